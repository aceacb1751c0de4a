"""Shared by the tests of ssd_chunk_scan: the factory of inputs, its options, the rules of comparison."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import arrange, assert_as_accurate, debug_option, gradients_of_dependent, parameter_dtype
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference

# The differentiable arguments.
TENSORS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
SEQUENCES = ("x", "dt", "B", "C", "z")

# Gradients of out and of final_states; None of a result that nothing depends on.
Cotangents = tuple[Tensor | None, Tensor | None]

# Those whose transition is e^z; what the operator takes.
METHODS = ("zoh", "zoh_exact", "poly", "highorder", "rk4")

# Where assert_nan_ends may put its NaN.
NAN_PLACES = (*SEQUENCES, "initial_states", "grad_out", "grad_final_states")

# Steps that CUDA's kernels take together, whatever chunk_size says.
KERNEL_CHUNK = 64

# The options of make_inputs without anything optional.
MINIMAL: dict[str, Any] = {"D": None} | dict.fromkeys(("z", "dt_bias", "dt_softplus", "initial_states"), False)

# Of packed sequences, the offsets: among them sequences of no steps, at both ends too, and of one.
PACKED = (0, 0, 3, 4, 4, 4, 9, 9)

# The gradients that are as few numbers as there are heads, each of them a sum over all steps of results of products.
FEW_SUMS = ("grad_A", "grad_dt_bias")

# Options of make_inputs, each with what it does not name as in MINIMAL.
OPTIONS: dict[str, dict[str, Any]] = {
    "required_only": {},
    "D": {"D": "head"},
    "D_of_channels": {"D": "channel"},
    "z": {"z": True},
    "D_and_z": {"D": "head", "z": True},
    "dt_bias": {"dt_bias": True},
    "dt_softplus": {"dt_softplus": True},
    "dt_bias_and_softplus": {"dt_bias": True, "dt_softplus": True},
    "dt_limit": {"dt_bias": True, "dt_softplus": True, "dt_limit": (0.2, 0.4)},
    "initial_states": {"initial_states": True},
    "resets": {"resets": ((2, 3), (1,))},
    "resets_with_states": {"resets": ((2, 3), (1,)), "initial_states": True},
    "packed": {"cu_seqlens": PACKED},
    "packed_with_states": {"cu_seqlens": PACKED, "initial_states": True},
    "everything": {"D": "channel", "z": True, "dt_bias": True, "dt_softplus": True, "initial_states": True},
}
OPTIONS = {name: MINIMAL | options for name, options in OPTIONS.items()}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
every_method = pytest.mark.parametrize("discretization", METHODS)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def dtypes(*chosen: torch.dtype) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", chosen or DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make_inputs(
    *,
    batch: int = 2,
    seqlen: int = 5,
    heads: int = 4,
    headdim: int = 3,
    groups: int = 2,
    dstate: int = 2,
    D: str | None = "head",
    z: bool = True,
    dt_bias: bool = True,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: bool = True,
    resets: Sequence[Iterable[int]] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    chunk_size: int | None = None,
    discretization: str = "zoh",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``ssd_chunk_scan``, the same numbers on every device.

    ``dt * A`` is in (-2, 0).

    Args:
        D: ``"head"``, ``"channel"`` or None.
        resets: of each row of the batch, in turn, the steps before which a new sequence begins; makes ``seq_idx``.
        cu_seqlens: takes the place of batch and seqlen.
        layout: see :func:`helpers.arrange`; of every floating-point tensor.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    sequences = batch
    if cu_seqlens is not None:
        batch, seqlen, sequences = 1, cu_seqlens[-1], len(cu_seqlens) - 1
    values = {
        "x": normal(batch, seqlen, heads, headdim),
        "dt": 0.6 * normal(batch, seqlen, heads) - 1 if dt_softplus else 0.02 + 0.6 * uniform(batch, seqlen, heads),
        "A": -0.1 - 0.9 * uniform(heads),
        "B": normal(batch, seqlen, groups, dstate),
        "C": normal(batch, seqlen, groups, dstate),
        "D": {"head": normal(heads), "channel": normal(heads, headdim), None: None}[D],
        "z": normal(batch, seqlen, heads, headdim) if z else None,
        "dt_bias": 0.2 * uniform(heads) if dt_bias else None,
        "initial_states": normal(sequences, heads, headdim, dstate) if initial_states else None,
    }
    inputs: dict[str, Any] = {
        name: None
        if value is None
        else arrange(value.to(device, dtype if name in SEQUENCES else parameter_dtype(dtype)), layout)
        for name, value in values.items()
    }
    inputs["seq_idx"] = inputs["cu_seqlens"] = None
    if resets is not None:
        inputs["seq_idx"] = make_seq_idx([resets[row % len(resets)] for row in range(batch)], seqlen).to(device)
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return inputs | {
        "dt_softplus": dt_softplus,
        "dt_limit": dt_limit,
        "chunk_size": chunk_size,
        "discretization": discretization,
    }


def make_seq_idx(resets: Sequence[Iterable[int]], seqlen: int) -> Tensor:
    """Numbers that change at these steps, not in ascending order, and come again."""
    seq_idx = torch.zeros(len(resets), seqlen, dtype=torch.int32)
    for row, steps in zip(seq_idx, resets, strict=True):
        for step in steps:
            row[step:] += 1
    return 5 - (3 * seq_idx) % 4


def tensor_names(inputs: dict[str, Any]) -> list[str]:
    """Names of the differentiable arguments that are present."""
    return [name for name in TENSORS if inputs[name] is not None]


def at_steps(inputs: dict[str, Any], steps: slice) -> dict[str, Any]:
    """The arguments of a part of the time."""
    of_steps = [name for name in (*SEQUENCES, "seq_idx") if inputs[name] is not None]
    return inputs | {name: inputs[name][:, steps] for name in of_steps}


def as_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {name: inputs[name].double() for name in tensor_names(inputs)}


def with_gradients(inputs: dict[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    return inputs | {name: inputs[name].detach().requires_grad_() for name in names or tensor_names(inputs)}


def scan(**inputs: Any) -> tuple[Tensor, Tensor]:
    """The operator's two results; its Python function, looked up when called."""
    return ssm_kernels.ssd_chunk_scan(**inputs, return_final_states=True)


def reference_scan(**inputs: Any) -> tuple[Tensor, Tensor]:
    """The reference's two results, computed on the CPU for every device: a GPU would spend its time on launches."""
    device = inputs["x"].device
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    out, final_states = reference.ssd_chunk_scan(**on_cpu, return_final_states=True)
    return out.to(device), final_states.to(device)


def states_like(inputs: dict[str, Any]) -> Tensor:
    """Zero states, of the shape of final_states."""
    x, B, cu_seqlens = inputs["x"], inputs["B"], inputs["cu_seqlens"]
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_zeros(sequences, *x.shape[2:], B.shape[3], dtype=parameter_dtype(x.dtype))


def make_cotangents(inputs: dict[str, Any], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients of out and of final_states."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
        for like in (inputs["x"], states_like(inputs))
    )


def evaluate(function: Callable, inputs: dict[str, Any], cotangents: Cotangents | None = None) -> dict[str, Tensor]:
    """``out``, ``final_states`` and, given cotangents, ``grad_<name>`` of every tensor argument, in the operator's dtypes."""
    leaves = {name: inputs[name].detach().requires_grad_(cotangents is not None) for name in tensor_names(inputs)}
    out, final_states = function(**(inputs | leaves))
    out, final_states = out.to(inputs["x"].dtype), final_states.to(inputs["A"].dtype)
    results = {"out": out.detach(), "final_states": final_states.detach()}
    if cotangents is not None:
        gradients = gradients_of_dependent((out, final_states), cotangents, [*leaves.values()])
        results |= {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return results


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Compares to a fraction of each result's largest value, or of 1, because sums of many terms cancel."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        size = expected[name].abs().max().item() if expected[name].numel() else 0
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=tolerance * max(1, size), msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_matches_reference(
    inputs: dict[str, Any],
    *,
    gradients: bool = True,
    cotangents: Cotangents | None = None,
    function: Callable = scan,
    exact: Callable = reference_scan,
) -> dict[str, Tensor]:
    """Compares with the float64 reference, by the low-precision rule below float64; returns the function's results.

    Args:
        cotangents: replace the result of :func:`make_cotangents`.
        exact: in place of the reference; given everything in float64.
    """
    if cotangents is None and gradients:
        cotangents = make_cotangents(inputs)
    actual = evaluate(function, inputs, cotangents)
    expected = evaluate_in_float64(inputs, cotangents, exact)
    if inputs["x"].dtype == torch.float64:
        assert_all_close(actual, expected)
    else:
        assert_all_as_accurate(actual, evaluate_natively(inputs, cotangents, expected), expected, inputs)
    return actual


def assert_nan_ends(inputs: dict[str, Any], name: str, step: int, begins: Sequence[int], chunk: int) -> None:
    """A NaN in the last row of the batch, whose sequences begin at these steps, reaches nothing but its own sequence, the
    chunks of that many steps in which this begins and ends, and its own chunk.

    Args:
        name: of an argument or of a result's gradient; one of states has the NaN everywhere, else it is at the step.
    """
    cotangents = dict(zip(("grad_out", "grad_final_states"), make_cotangents(inputs), strict=True))
    clean = evaluate(scan, inputs, tuple(cotangents.values()))
    values = inputs | cotangents
    values[name] = values[name].clone()
    of_states = name in ("initial_states", "grad_final_states")
    values[name][-1 if of_states else (-1, step)] = math.nan
    actual = evaluate(scan, {key: values[key] for key in inputs}, tuple(values[key] for key in cotangents))

    batch, length = inputs["x"].shape[:2]
    last = len(begins) - 1
    sequence = bisect.bisect(begins, step) - 1
    sequence = {"initial_states": 0, "grad_final_states": last}.get(name, sequence)
    first, end = begins[sequence], (*begins, length)[sequence + 1]
    if not of_states:
        first, end = min(first, step // chunk * chunk), max(end, (step // chunk + 1) * chunk)
    reached = torch.zeros(batch, length, dtype=torch.bool, device=inputs["x"].device)
    reached[-1, first // chunk * chunk : -(-end // chunk) * chunk] = True
    for result in ("out", *(f"grad_{of}" for of in SEQUENCES)):
        assert torch.equal(actual[result][~reached], clean[result][~reached]), f"{result} of a NaN in {name}"
    for result, own in (("final_states", last), ("grad_initial_states", 0)):
        rows = slice(0, batch - 1) if sequence == own else slice(None)
        assert torch.equal(actual[result][rows], clean[result][rows]), f"{result} of a NaN in {name}"
    assert any(value.isnan().any() for value in actual.values())


def assert_as_exact_as_rounding(inputs: dict[str, Any]) -> None:
    """``out`` without D, of whose product nothing but that is rounded; under decays by which a chunk's pairs are most of it."""
    decays = torch.linspace(-2, -16, inputs["x"].shape[2], device=inputs["x"].device)
    inputs = inputs | {"D": None, "z": None, "dt": torch.full_like(inputs["dt"], 0.03), "dt_bias": None, "A": decays}
    exact = scan(**as_float64(inputs))[0]
    error, least = (scan(**inputs)[0] - exact).norm(), (exact.to(inputs["x"].dtype) - exact).norm()
    assert error <= 1.15 * least


def evaluate_in_float64(
    inputs: dict[str, Any], cotangents: Cotangents | None = None, function: Callable = reference_scan
) -> dict[str, Tensor]:
    return evaluate(function, as_float64(inputs), cotangents and tuple(x if x is None else x.double() for x in cotangents))


def assert_all_as_accurate(
    actual: dict[str, Tensor], native: dict[str, Tensor], exact: dict[str, Tensor], inputs: dict[str, Any]
) -> None:
    """The low-precision rule, for every result of such inputs."""
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        # Sums in float32 of what the roundings of 16-bit operands have left: no more exact than one of these roundings.
        of_16_bits = name in FEW_SUMS and has_16_bit_products(inputs)
        floor = torch.finfo(inputs["x"].dtype).eps / 2 if of_16_bits else None
        assert_as_accurate(value, native[name], exact[name], name, floor)


def evaluate_natively(inputs: dict[str, Any], cotangents: Cotangents | None, exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """The yardstick of the low-precision rule: PyTorch in the dtypes, and with the products, of the operator."""
    if not has_16_bit_products(inputs):
        return evaluate(reference_scan, inputs, cotangents)
    if cotangents is None:
        return evaluate(scan_in_16_bit_products, inputs)
    # Of so few numbers one draw of roundings may by chance be far more exact than is usual: the least exact of several chunks.
    draws = [evaluate(partial(scan_in_16_bit_products, chunk=steps), inputs, cotangents) for steps in (64, 48, 32)]
    few = [f"grad_{name}" for name in tensor_names(inputs) if f"grad_{name}" in FEW_SUMS]
    return draws[0] | {
        name: max((draw[name] for draw in draws), key=lambda value, name=name: (value - exact[name]).abs().sum().item())
        for name in few
    }


def has_16_bit_products(inputs: dict[str, Any]) -> bool:
    """Whether the kernels multiply operands in the dtype of the inputs, float16 or bfloat16, instead of float32."""
    if not inputs["x"].is_cuda or inputs["x"].element_size() != 2:
        return False
    return inputs["B"].shape[3] <= 128 or _shared_memory(inputs["x"].device) >= 146 * 1024


def has_fp32_kernels(inputs: dict[str, Any]) -> bool:
    """Whether both directions run as fused kernels; otherwise one of them falls back to PyTorch matmuls."""
    return _shared_memory(inputs["x"].device) >= (136 if inputs["B"].shape[3] <= 128 else 184) * 1024


def _shared_memory(device: torch.device) -> int:
    """That a block may have, within the limit of :func:`limited_shared_memory`."""
    with debug_option("ssd_shared_bytes", 2**62) as limit:
        return min(limit, torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def preferred_products(name: str) -> AbstractContextManager[None]:
    """``"wgmma"``: the kernels of capability 9.0a, where the device runs them; ``"mma"``: the kernels of all devices."""
    return debug_option("ssd_mma", name)


def limited_workspace(limit: int) -> AbstractContextManager[None]:
    """No more bytes for the states that backward's kernels keep on CUDA, or those of one head of one entry of the batch."""
    return debug_option("ssd_workspace_bytes", limit)


def limited_shared_memory(limit: int) -> AbstractContextManager[None]:
    """No more bytes of it for a block: fewer stages or, with many states or in float32, PyTorch's products in float32."""
    return debug_option("ssd_shared_bytes", limit)


def scan_in_16_bit_products(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    discretization: str,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """PyTorch in that dtype: the scan in chunks, as products whose operands have 16 bits and whose sums are float32.

    So are the products of its gradients, among whose operands is the gradient of what the gate multiplies. Everything between
    them is float32; of float64 inputs all of it is float64.
    """
    dtype, accumulate = x.dtype, parameter_dtype(x.dtype)
    batch, seqlen, heads, headdim = x.shape
    # At once: a gradient that comes from several chunks is then rounded when their sum is complete.
    x, dt, B, C = (tensor.to(accumulate) for tensor in (x, dt, B, C))
    d = dt if dt_bias is None else dt + dt_bias
    d = (F.softplus(d) if dt_softplus else d).clamp(*dt_limit)
    gain = reference.coefficients(discretization, d, A)[1]
    zeta = (d * A).clamp(min=-800)  # infinite sums would have NaN differences
    if initial_states is None:
        sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
        initial_states = x.new_zeros(sequences, heads, headdim, B.shape[3])
    states, outputs = list(initial_states.unbind()), [x.new_zeros(0, heads, headdim)]
    for row, begin, end, i in _sequences(batch, seqlen, seq_idx, cu_seqlens):
        if seq_idx is not None and begin > 0:
            states[i] = torch.zeros_like(states[i])
        for first in range(begin, end, chunk):
            steps = row, slice(first, min(first + chunk, end))
            out, states[i] = _chunk_in_16_bit_products(x[steps], zeta[steps], gain[steps], B[steps], C[steps], states[i], dtype)
            outputs.append(out)
    out = torch.cat(outputs).view(x.shape)
    if D is not None:
        out = out + (D if D.dim() == 2 else D[:, None]) * x
    if z is not None:
        out = _RoundedGradient.apply(out, dtype) * F.silu(z.to(accumulate))
    return out, torch.stack(states) if states else initial_states


def _sequences(
    batch: int, seqlen: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None
) -> Iterator[tuple[int, int, int, int]]:
    """Row of the batch, first step, end and number of the state of every sequence."""
    if cu_seqlens is not None:
        for state, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            yield 0, begin, end, state
        return
    for row in range(batch):
        begins = [] if seq_idx is None else (seq_idx[row].diff().nonzero()[:, 0] + 1).tolist()
        for begin, end in itertools.pairwise([0, *begins, seqlen]):
            yield row, begin, end, row


def _chunk_in_16_bit_products(
    x: Tensor, zeta: Tensor, gain: Tensor, B: Tensor, C: Tensor, state: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    def product(equation: str, a: Tensor, b: Tensor) -> Tensor:
        return _RoundedProduct.apply(equation, dtype, a, b)

    def of_heads(of_groups: Tensor, axis: int) -> Tensor:
        return of_groups.repeat_interleave(x.shape[1] // B.shape[1], dim=axis)

    sums = zeta.double().cumsum(0)
    causal = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()[:, :, None]
    decay = (sums[:, None] - sums).masked_fill(~causal, -math.inf).exp().to(x.dtype)
    from_start, to_end, whole = (exponent.exp().to(x.dtype) for exponent in (sums, sums[-1] - sums, sums[-1]))
    M = of_heads(product("ign,jgn->ijg", C, B), 2) * decay * gain
    of_state = product("hpn,ihn->ihp", state, of_heads(C, 1))
    out = product("ijh,jhp->ihp", M, x) + from_start[..., None] * of_state
    weighed = (to_end * gain)[..., None] * x
    return out, state * whole[:, None, None] + product("jhp,jhn->hpn", weighed, of_heads(B, 1))


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype).to(grad.dtype), None


class _RoundedProduct(torch.autograd.Function):
    """An einsum that rounds its operands to a dtype; its gradients round theirs too, the incoming gradient included."""

    @staticmethod
    def forward(ctx: Any, equation: str, dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
        a, b = (operand.to(dtype).to(operand.dtype) for operand in (a, b))
        ctx.save_for_backward(a, b)
        ctx.equation, ctx.dtype = equation, dtype
        return torch.einsum(equation, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor]:
        a, b = ctx.saved_tensors
        of_a, of_b, of_result = re.split(",|->", ctx.equation)
        grad = grad.to(ctx.dtype).to(grad.dtype)
        grad_a = torch.einsum(f"{of_result},{of_b}->{of_a}", grad, b)
        return None, None, grad_a, torch.einsum(f"{of_a},{of_result}->{of_b}", a, grad)


def training_step(function: Callable, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The results of the function, and the gradients that a loss sends back through it to every tensor argument."""
    leaves = with_gradients(inputs)
    out, final_states = function(**leaves)
    (out.float().square().sum() + final_states.float().square().sum()).backward()
    return {"out": out, "final_states": final_states} | {f"grad_{name}": leaves[name].grad for name in tensor_names(inputs)}


def operator_arguments(inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments of the public operator, positional and keyword ones."""
    positional = ("x", "dt", "A", "B", "C")
    return tuple(inputs[name] for name in positional), {k: v for k, v in inputs.items() if k not in positional}


def forward_arguments(inputs: dict[str, Any]) -> tuple:
    """Arguments of _ssd_chunk_scan_fwd, in the order of its schema."""
    return tuple(_by_schema(torch.ops.ssm_kernels._ssd_chunk_scan_fwd.default, inputs))


def backward_arguments(inputs: dict[str, Any], needs_grad: Sequence[bool] | None = None) -> tuple:
    """Arguments of _ssd_chunk_scan_bwd, in the order of its schema."""
    grad_out, grad_final_states = make_cotangents(inputs)
    others = {"grad_out": grad_out, "grad_final_states": grad_final_states}
    others["needs_grad"] = [inputs[name] is not None for name in TENSORS] if needs_grad is None else list(needs_grad)
    return tuple(_by_schema(torch.ops.ssm_kernels._ssd_chunk_scan_bwd.default, inputs | others))


def _by_schema(operator: torch._ops.OpOverload, values: dict[str, Any]) -> list[Any]:
    limits = dict(zip(("dt_min", "dt_max"), values["dt_limit"], strict=True))
    return [(values | limits)[argument.name] for argument in operator._schema.arguments]
