"""Inputs of causal_conv1d and causal_conv1d_update, and their comparison with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import helpers
import torch
from helpers import Draws, arrange, assert_as_accurate, parameter_dtype, step_on_a_copy
from operator_spec import OperatorSpec, Shapes, as_float64, rows
from torch import Tensor

from ssm_kernels import causal_conv1d_update, reference

TENSORS = ("x", "weight", "bias", "initial_state")
# cu_seqlens with sequences shorter than a width, of one step, and without steps: first, last, twice in a row.
PACKED = (0, 0, 1, 3, 3, 3, 9, 40, 75, 75)
# In addition to helpers.LAYOUTS: (batch, channels, seqlen) in memory; columns of a wider tensor that begin at a multiple of 16
# bytes, and that do not; rows of a wider channels-first tensor.
LAYOUTS = ("channels_first_memory", "slice", "odd_slice", "channels_first_slice")


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A (batch, seqlen, channels) tensor in other strides; memory beside it is NaN."""
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
        seq_idx: sequences of some steps each, whose numbers come again and do not ascend, and padding between them.
        cu_seqlens: makes batch 1, and seqlen what they end at.
        layout: of x.
    """
    draws = Draws(seed)
    if cu_seqlens is not None:
        batch, seqlen = 1, cu_seqlens[-1]
    states = batch if cu_seqlens is None else len(cu_seqlens) - 1
    parameters = weight_dtype or parameter_dtype(dtype)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return draws.normal(*shape).to(dtype).to(device)

    numbers = None
    if seq_idx:
        changes = torch.rand(batch, seqlen, generator=draws.generator) < 0.3
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


OPTIONS: dict[str, dict[str, Any]] = {
    "required": {"bias": False, "activation": None, "initial_state": False},
    "whole": {},
    "seq_idx": {"seq_idx": True},
    "packed": {"cu_seqlens": (0, 0, 3, 9)},
    "packed_with_seq_idx": {"cu_seqlens": (0, 0, 3, 9), "seq_idx": True},
}
CASES = OPTIONS | {f"{name}_channels_first": options | {"layout": LAYOUTS[0]} for name, options in OPTIONS.items()}
SIZES = [*OPTIONS.values(), {"seqlen": 70}, {"seqlen": 0}, {"batch": 0}, {"cu_seqlens": (0,)}, {"width": 1}]

CUDA_CALLS: dict[str, dict[str, Any]] = {
    "long": {"batch": 1, "channels": 64, "seqlen": 8192},
    "wide": {"channels": 2048, "seqlen": 200},
    "channels_first": {"channels": 136, "seqlen": 328, "layout": "channels_first_memory"},
    "whole": {"channels": 136, "seqlen": 328, "dtype": torch.bfloat16},
    "seq_idx": {"channels": 136, "seqlen": 328, "dtype": torch.bfloat16, "seq_idx": True},
    "packed": {"channels": 136, "dtype": torch.bfloat16, "cu_seqlens": PACKED},
}

SHAPES: Shapes = {
    "x": [("(batch, seqlen, channels)", [(9, 5), (1, 2, 9, 5), ()])],
    "weight": [
        ("(channels, width)", [(5,), (5, 1, 4), ()]),
        ("(channels, width) = [5, 4]", [(4, 4), (1, 4), (6, 4)]),
    ],
    "bias": [("(channels,) = [5]", [(4,), (1,), (5, 1), ()])],
    "seq_idx": [("(batch, seqlen) = [2, 9]", [(2, 8), (9,), (1, 9), (2, 9, 1)])],
    "initial_state": [
        ("(batch, channels, width - 1) = [2, 5, 3]", [(2, 5, 4), (1, 5, 3), (2, 4, 3), (2, 3), (2, 3, 5)]),
    ],
}


def unknown_activation(name: str) -> str:
    return f"unknown activation '{name}', expected None, 'silu' or 'swish'"


BAD_ACTIVATIONS = ("relu", "", "SiLU", "gelu")


class CausalConv1d(OperatorSpec):
    results = ("out", "final_state")
    all_results = "return_final_state"
    internal = "_causal_conv1d"
    autograd = "_causal_conv1d"
    gradient_tolerance = 1e-12
    reference_tolerance = 1e-12
    any_stride_of_one = True
    cases = CASES
    options = OPTIONS
    several_chunks = MappingProxyType({"channels": 16, "seqlen": 70})
    large = MappingProxyType({"channels": 70, "seqlen": 70})
    packs = True
    compiled = ("required", "whole", "seq_idx")
    mapped = tuple(OPTIONS)
    sizes = SIZES
    layouts = (*LAYOUTS, *helpers.LAYOUTS)
    nested = ("x", "weight")
    good = MappingProxyType({"batch": 2, "seqlen": 9, "channels": 5, "width": 4})
    indices = ({"seq_idx": True}, {"cu_seqlens": (0, 4, 9)})
    together = MappingProxyType({"seq_idx": True})
    either = ("weight", "bias")
    bad_shapes = (
        ({}, SHAPES),
        ({"cu_seqlens": (0, 4, 4, 9)}, {"initial_state": [("(sequences, channels, width - 1) = [3, 5, 3]", [(1, 5, 3)])]}),
    )
    bad_values = (
        *(({}, {"activation": name}, unknown_activation(name)) for name in BAD_ACTIVATIONS),
        ({"initial_state": False}, {"weight": torch.zeros(5, 0)}, "expected weight of a width of at least 1, got [5, 0]"),
    )
    offsets = MappingProxyType(
        {"channels": rows("x out", 2, channels=83, seqlen=70), "steps": rows("x out", 1, channels=21, seqlen=197)}
    )
    cuda_calls = CUDA_CALLS
    cuda_kernels = ("causal_conv1d_kernel", ("faster", "by_layout"))

    def make_inputs(self, **options: Any) -> dict[str, Any]:
        return make_inputs(**options)

    def result_shapes(self, inputs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        x, weight, cu_seqlens = inputs["x"], inputs["weight"], inputs["cu_seqlens"]
        states = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        return x.shape, (states, x.shape[2], weight.shape[1] - 1)

    def result_dtypes(self, inputs: dict[str, Any]) -> tuple[torch.dtype, ...]:
        return inputs["x"].dtype, inputs["x"].dtype

    def make_cotangents(self, inputs: dict[str, Any], seed: int = 1) -> tuple[Tensor, ...]:
        """The gradient of out has the strides of x."""
        grad_out, grad_state = super().make_cotangents(inputs, seed)
        return torch.empty_like(inputs["x"]).copy_(grad_out), grad_state

    def time_axes(self, inputs: dict[str, Any]) -> dict[str, int]:
        return {name: 1 for name in ("x", "seq_idx") if inputs[name] is not None}

    def cast_by_autocast(self, inputs: dict[str, Any]) -> list[str]:
        return [name for name in ("x", "initial_state") if inputs[name] is not None]

    def needed(self, inputs: dict[str, Any]) -> list[bool]:
        return [True] * 4


with_state = CONV = CausalConv1d("causal_conv1d")
assert_matches_reference, assert_all_close, evaluate = CONV.assert_matches_reference, CONV.assert_close, CONV.evaluate
make_cotangents, backward_arguments = CONV.make_cotangents, CONV.backward_arguments


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
    draws, parameters = Draws(seed), weight_dtype or parameter_dtype(dtype)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return draws.normal(*shape).to(dtype).to(device)

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
    """``out`` and the new state, of a copy of the state."""
    return step_on_a_copy(function, inputs, "conv_state")


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
