"""What the tests of causal_conv1d and causal_conv1d_update share: inputs, evaluation, comparison with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import arrange, as_float64, assert_as_accurate, gradients_of_dependent, parameter_dtype
from torch import Tensor

from ssm_kernels import causal_conv1d, causal_conv1d_update, reference

TENSORS = ("x", "weight", "bias", "initial_state")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# cu_seqlens with sequences shorter than a width, of one step, and without steps: first, last, twice in a row.
PACKED = (0, 0, 1, 3, 3, 3, 9, 40, 75, 75)
# Beside those of helpers.LAYOUTS: (batch, channels, seqlen) in memory; columns of a wider tensor that begin at a multiple of 16
# bytes, and that do not; rows of a wider channels-first tensor.
LAYOUTS = ("channels_first_memory", "slice", "odd_slice", "channels_first_slice")


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A (batch, seqlen, channels) tensor in other strides; what lies beside it is NaN."""
    batch, seqlen, channels = x.shape
    if layout == "channels_first_memory":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout in ("slice", "odd_slice"):
        first = 16 if layout == "slice" else 5
        view = x.new_full((batch, seqlen, channels + 40), math.nan)[..., first : first + channels]
    elif layout == "channels_first_slice":
        view = x.new_full((batch, channels + 6, seqlen), math.nan)[:, 2 : 2 + channels].transpose(1, 2)
    else:
        return arrange(x, layout)
    view.copy_(x)
    return view


def make_inputs(
    *,
    batch: int = 2,
    seqlen: int = 9,
    channels: int = 5,
    width: int = 4,
    bias: bool = True,
    activation: str | None = "silu",
    seq_idx: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    initial_state: bool = True,
    dtype: torch.dtype = torch.float64,
    weight_dtype: torch.dtype | None = None,
    layout: str = "contiguous",
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``causal_conv1d``, the same numbers on every device.

    Args:
        seq_idx: sequences of some steps each, whose numbers come again, are negative and do not ascend.
        cu_seqlens: makes batch 1, and seqlen what they end at.
        layout: of x.
    """
    generator = torch.Generator().manual_seed(seed)
    if cu_seqlens is not None:
        batch, seqlen = 1, cu_seqlens[-1]
    states = batch if cu_seqlens is None else len(cu_seqlens) - 1
    parameters = weight_dtype or parameter_dtype(dtype)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    numbers = None
    if seq_idx:
        changes = torch.rand(batch, seqlen, generator=generator) < 0.3
        numbers = torch.tensor([7, -2, 3])[changes.cumsum(1) % 3].to(device, torch.int32)
    return {
        "x": lay_out(normal(batch, seqlen, channels), layout),
        "weight": normal(channels, width, dtype=parameters),
        "bias": normal(channels, dtype=parameters) if bias else None,
        "activation": activation,
        "seq_idx": numbers,
        "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=device),
        "initial_state": normal(states, channels, width - 1) if initial_state else None,
    }


def tensor_names(inputs: dict[str, Any]) -> list[str]:
    return [name for name in TENSORS if inputs.get(name) is not None]


def with_gradients(inputs: dict[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """With new leaves for the differentiable tensors, in the same strides."""
    names = tensor_names(inputs) if names is None else names
    return inputs | {name: inputs[name].detach().requires_grad_() for name in names}


def make_cotangents(inputs: dict[str, Any], seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = inputs["x"], inputs["weight"]
    states = x.shape[0] if inputs["cu_seqlens"] is None else len(inputs["cu_seqlens"]) - 1
    shapes = (x.shape, (states, x.shape[2], weight.shape[1] - 1))
    grad_out, grad_state = (torch.randn(shape, generator=generator, dtype=torch.float64).to(x) for shape in shapes)
    return torch.empty_like(x).copy_(grad_out), grad_state


def forward_arguments(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Of _causal_conv1d and _causal_conv1d_fwd."""
    order = ("x", "weight", "bias", "seq_idx", "cu_seqlens", "initial_state", "activation")
    return tuple(inputs[name] for name in order)


def backward_arguments(inputs: dict[str, Any], needs_grad: Sequence[bool] = (True,) * 4) -> tuple[Any, ...]:
    """Of _causal_conv1d_bwd."""
    return (*make_cotangents(inputs), *forward_arguments(inputs), needs_grad)


def with_state(**inputs: Any) -> tuple[Tensor, Tensor]:
    return causal_conv1d(**inputs, return_final_state=True)


def reference_with_state(**inputs: Any) -> tuple[Tensor, Tensor]:
    """Run on the CPU for every device: a GPU would spend its time on launches."""
    device = inputs["x"].device
    moved = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    out, final_state = reference.causal_conv1d(**moved, return_final_state=True)
    return out.to(device), final_state.to(device)


def evaluate(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: dict[str, Any],
    cotangents: Sequence[Tensor | None] | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """``out``, ``final_state`` and, given cotangents, ``grad_<name>`` of the tensors of those names, all by default."""
    leaves = inputs if cotangents is None else with_gradients(inputs, names)
    out, final_state = (result.to(inputs["x"].dtype) for result in function(**leaves))
    results = {"out": out.detach(), "final_state": final_state.detach()}
    if cotangents is not None:
        names = tensor_names(inputs) if names is None else names
        gradients = gradients_of_dependent((out, final_state), cotangents, [leaves[name] for name in names])
        results |= {f"grad_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    return results


def assert_matches_reference(inputs: dict[str, Any], function: Callable = with_state) -> dict[str, Tensor]:
    """Results and gradients against the float64 reference, by the low-precision rule below float64."""
    cotangents = make_cotangents(inputs)
    actual = evaluate(function, inputs, cotangents)
    exact = evaluate(reference_with_state, as_float64(inputs), [x.double() for x in cotangents])
    assert actual.keys() == exact.keys()
    if inputs["x"].dtype == torch.float64:
        assert_all_close(actual, exact, 1e-12)
    else:
        native = evaluate(reference_with_state, inputs, cotangents)
        for name, value in actual.items():
            assert_as_accurate(value, native[name], exact[name], name)
    return actual


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def make_step_inputs(
    *,
    batch: int = 3,
    seqlen: int | None = None,
    channels: int = 5,
    width: int = 4,
    length: int | None = None,
    bias: bool = True,
    activation: str | None = "silu",
    slots: int | None = None,
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``causal_conv1d_update``.

    Args:
        seqlen: None for x of shape (batch, channels).
        length: of the state; the width by default, as mamba_ssm has it.
        slots: the size of a cache, of which the batch uses the last slots, in reverse.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = weight_dtype or parameter_dtype(dtype)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    indices = None
    if slots is not None:
        indices = torch.arange(slots - 1, slots - 1 - batch, -1, dtype=torch.int32, device=device)
    return {
        "x": normal(batch, channels) if seqlen is None else normal(batch, seqlen, channels),
        "conv_state": normal(slots or batch, channels, length or width, dtype=state_dtype or dtype),
        "weight": normal(channels, width, dtype=parameters),
        "bias": normal(channels, dtype=parameters) if bias else None,
        "activation": activation,
        "state_batch_indices": indices,
    }


def step(inputs: dict[str, Any], function: Callable = causal_conv1d_update) -> tuple[Tensor, Tensor]:
    """``out`` and the new state, of a copy of the state in the same strides."""
    state = inputs["conv_state"]
    copy = torch.empty_strided(state.shape, state.stride(), dtype=state.dtype, device=state.device).copy_(state)
    return function(**(inputs | {"conv_state": copy})), copy


def assert_step_matches_reference(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    out, state = step(inputs)
    assert out.shape == inputs["x"].shape and out.dtype == inputs["x"].dtype
    exact_out, exact_state = reference.causal_conv1d_update(**as_float64(inputs))
    # The state holds what came in, rounded to its own dtype at most.
    assert torch.equal(state, exact_state.to(state.dtype))
    if inputs["x"].dtype == torch.float64:
        torch.testing.assert_close(out, exact_out, rtol=1e-12, atol=1e-12)
    else:
        native_out, _ = reference.causal_conv1d_update(**inputs)
        assert_as_accurate(out, native_out.to(out.dtype), exact_out, "out")
    return out, state
