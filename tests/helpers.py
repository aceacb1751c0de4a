"""Shared by the test files: the methods and their expected properties, the factory of inputs, the rules of comparison.

A new discretization needs one row in ``METHODS``; a new device for an operator, one word in ``DEVICES``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mpmath
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from ssm_kernels import reference, selective_scan, selective_state_update

# The devices that each operator has kernels for. Every test that takes `device` runs on each of its operator's.
DEVICES = {
    "causal_conv1d": ["cpu", "cuda"],  # and its decoding step
    "linear_scan": ["cpu", "cuda"],  # and every other recurrence of its family
    "norms": ["cpu", "cuda"],  # gated, and with a residual
    "selective_scan": ["cpu", "cuda"],
    "selective_state_update": ["cpu", "cuda"],
    "mamba2_mixer": ["cpu", "cuda"],
    "ssd_chunk_scan": ["cpu", "cuda"],
}


class Method(NamedTuple):
    """Known properties of a discretization, independent of its code.

    Attributes:
        oracle: ``(Abar, gain)`` at an mpmath number ``z``, written from the formula.
        scipy: method and ``alpha`` of ``scipy.signal.cont2discrete``, where it has the method.
        step_order: order of convergence for a constant input; None where the method is exact.
        keeps_dc_gain: whether the fixed point under a constant input is the continuous system's, ``-B u / A``.
        stable_from: ``|Abar| <= 1`` for real ``z`` in ``[stable_from, 0]``.
        gain_terms: where the gain is the series of phi1 cut short, its number of terms: those of other signs cancel.
    """

    oracle: Callable[[Any], tuple[Any, Any]]
    scipy: tuple[str, float | None] | None
    step_order: int | None
    keeps_dc_gain: bool
    stable_from: float
    gain_terms: int | None = None

    @property
    def mid_step_order(self) -> int:
        """Order of convergence for a smooth input read mid-step: to hold that sample costs second order."""
        return 2 if self.step_order is None else min(self.step_order, 2)


def _exponential(terms: int | None) -> Callable[[Any], tuple[Any, Any]]:
    """``e^z`` with the first ``terms`` terms of phi1, or all of them."""

    def oracle(z):
        if terms is None:
            return mpmath.exp(z), mpmath.expm1(z) / z if z else mpmath.mpf(1)
        return mpmath.exp(z), mpmath.fsum(z**k / mpmath.factorial(k + 1) for k in range(terms))

    return oracle


def _generalized_bilinear(alpha: str) -> Callable[[Any], tuple[Any, Any]]:
    def oracle(z):
        a = mpmath.mpf(alpha)
        return (1 + (1 - a) * z) / (1 - a * z), 1 / (1 - a * z)

    return oracle


METHODS = {
    "zoh": Method(_exponential(1), None, 1, False, -math.inf),
    "zoh_exact": Method(_exponential(None), ("zoh", None), None, True, -math.inf),
    "bilinear": Method(_generalized_bilinear("0.5"), ("bilinear", None), 2, True, -math.inf),
    "poly": Method(_exponential(3), None, 3, False, -math.inf, gain_terms=3),
    "highorder": Method(_exponential(2), None, 2, False, -math.inf, gain_terms=2),
    "rk4": Method(_exponential(4), None, 4, False, -math.inf, gain_terms=4),
    "euler": Method(_generalized_bilinear("0"), ("euler", None), 1, True, -2.0),
    "backward_euler": Method(_generalized_bilinear("1"), ("backward_diff", None), 1, True, -math.inf),
}


def chunk_length(dstate: int) -> int:
    """Steps between two states that the scan saves; it saves (batch, chunks + 1, dim, dstate) in all."""
    u, A = torch.empty(1, 1, 4096, device="meta"), torch.empty(1, dstate, device="meta")
    *_, chunk_states = torch.ops.ssm_kernels._selective_scan_fwd(u, u, A, A, A, None, None, None, None, "zoh", False, True)
    return 4096 // (chunk_states.shape[1] - 1)


CHUNK = chunk_length(1)  # tests that cross chunks choose lengths around it

TENSORS = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")

# The options of make_inputs without anything optional.
MINIMAL = dict.fromkeys(("D", "z", "delta_bias", "delta_softplus", "initial_state"), False)

# Of selective_state_update: the dtypes of x, dt, B, C, z and out, and of the state.
STEP_DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]

# Of its arguments, with and without heads and groups.
STEP_FORMS: dict[str, dict[str, Any]] = {
    "channels": {"dim": 6},
    "channels_groups": {"dim": 6, "groups": 3},
    "heads": {"heads": 4, "dim": 5},
    "heads_groups": {"heads": 4, "dim": 5, "groups": 2},
}


# The transforms of torch.func that the operators refuse: by name, the transform of a function at a tensor.
FUNC_TRANSFORMS: dict[str, Callable[[Callable, Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "vmap_of_grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x])),
}


class KeptGraphs:
    """A backend of torch.compile that runs the graphs of forward and of backward as they are, and keeps them."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        compilers = {"fw_compiler": self.forward, "bw_compiler": self.backward, "inference_compiler": self.forward}
        self.backend = aot_autograd(**{name: partial(self._keep, graphs) for name, graphs in compilers.items()})

    @staticmethod
    def _keep(graphs: list[torch.fx.GraphModule], graph: torch.fx.GraphModule, _: Any) -> Callable:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def kernels(self) -> tuple[list[str], list[str]]:
        """The operators of ssm_kernels in the one graph of forward, and in the one of backward."""
        (forward,), (backward,) = self.forward, self.backward
        return tuple(
            [str(node.target) for node in graph.graph.nodes if "ssm_kernels" in str(node.target)]
            for graph in (forward, backward)
        )


def says(*parts: str) -> str:
    """A pattern of the parts in this order."""
    return ".*".join(re.escape(part) for part in parts)


def parameter_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of A, D, delta_bias, states and constant B and C beside inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def arrange(tensor: Tensor, layout: str) -> Tensor:
    """The same values in other strides.

    ``contiguous``; ``transposed``: the last two dimensions swapped in memory; ``permuted``: all dimensions reversed in memory;
    ``channels_first``: the second dimension last, as convolutions over time have it; ``offset``: a view that starts inside a
    larger buffer; ``sliced``: every second element of a buffer twice as long.
    """
    if layout == "contiguous" or tensor.dim() == 0:
        return tensor.contiguous()
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else tensor.contiguous()
    if layout == "permuted":
        reverse = tuple(range(tensor.dim() - 1, -1, -1))
        return tensor.permute(reverse).contiguous().permute(reverse)
    if layout == "channels_first":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.dim() > 2 else tensor.contiguous()
    if layout == "offset":
        buffer = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), math.nan)
        view = buffer[..., 2 : 2 + tensor.shape[-1]]
    elif layout == "sliced":
        buffer = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan)
        view = buffer[..., ::2]
    else:
        raise ValueError(f"unknown layout {layout!r}")
    view.copy_(tensor)
    return view


# cu_seqlens of 10 steps, and what is expected of them.
BAD_OFFSETS = {
    (1, 3, 10): "to start at 0, got 1",
    (-1, 3, 10): "to start at 0, got -1",
    (0, 5, 3, 10): "not to decrease, got 5 before 3",
    (0, 3, 12, 10): "not to decrease, got 12 before 10",
    (0, 3, 9): "to end at seqlen = 10, got 9",
    (0, 3, 11): "to end at seqlen = 10, got 11",
    (0,): "to end at seqlen = 10, got 0",
}

LAYOUTS = ("contiguous", "transposed", "permuted", "channels_first", "offset", "sliced")


def gradients_of_dependent(
    outputs: Iterable[Tensor], cotangents: Iterable[Tensor | None], leaves: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The gradients that these send back, zero where there are none.

    A result of no steps from no state depends on nothing, and the reference's then has no graph.
    """
    pairs = zip(outputs, cotangents, strict=True)
    dependent = [(output, grad) for output, grad in pairs if output.requires_grad and grad is not None]
    if not dependent:
        return [torch.zeros_like(leaf) for leaf in leaves]
    outputs, cotangents = zip(*dependent, strict=True)
    return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, materialize_grads=True)


def move(tensor: Tensor, device: str) -> Tensor:
    """A copy in the same strides, from the same offset: the memory is copied as it is, by no kernel."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.as_strided((elements,), (1,), 0).to(device, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


# The names of the values of the options that choose kernels, in the order of the values.
DEBUG_OPTION_VALUES = {
    "causal_conv1d_kernel": ("faster", "by_layout"),
    "selective_scan_kernel": ("faster", "sequential", "warp_scan"),
    "ssd_mma": ("wgmma", "mma"),
}


def set_debug_option(name: str, value: str | int) -> int:
    """Sets an option of csrc/torch/debug_options.h and returns the previous value."""
    if isinstance(value, str):
        value = DEBUG_OPTION_VALUES[name].index(value)
    return torch.ops.ssm_kernels._set_debug_option(name, value)


@contextmanager
def debug_option(name: str, value: str | int) -> Iterator[int]:
    """Sets the option within the context, which is the previous value, and restores that at the end."""
    before = set_debug_option(name, value)
    try:
        yield before
    finally:
        set_debug_option(name, before)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a call, which was called on another stream before, and the results that each replay writes."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        function()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@contextmanager
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Fills new memory, so that an element that no kernel writes is not zero by luck."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def move_all(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: move(value, device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def make_inputs(
    *,
    batch: int = 2,
    dim: int = 4,
    seqlen: int = 5,
    dstate: int = 3,
    groups: int | None = None,
    B: str = "variable",
    C: str = "variable",
    D: bool = True,
    z: bool = True,
    delta_bias: bool = True,
    delta_softplus: bool = True,
    initial_state: bool = True,
    discretization: str = "zoh",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``selective_scan``, the same numbers on every device.

    ``delta * A`` is in (-2, 0), where no method blows up, whatever the length.

    Args:
        groups: None for B and C of shape (batch, dstate, seqlen), else (batch, groups, dstate, seqlen).
        B, C: ``"variable"`` (per step) or ``"constant"``, (dim, dstate).
        layout: see :func:`arrange`; of every tensor.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def matrix(form: str) -> Tensor:
        if form == "constant":
            return normal(dim, dstate)
        return normal(batch, dstate, seqlen) if groups is None else normal(batch, groups, dstate, seqlen)

    values = {
        "u": normal(batch, dim, seqlen),
        "delta": 0.6 * normal(batch, dim, seqlen) - 1 if delta_softplus else 0.02 + 0.6 * uniform(batch, dim, seqlen),
        "A": -0.1 - 0.9 * uniform(dim, dstate),
        "B": matrix(B),
        "C": matrix(C),
        "D": normal(dim) if D else None,
        "z": normal(batch, dim, seqlen) if z else None,
        "delta_bias": 0.2 * uniform(dim) if delta_bias else None,
        "initial_state": normal(batch, dim, dstate) if initial_state else None,
    }
    constants = {"A", "D", "delta_bias", "initial_state"}
    constants |= {name for name, form in (("B", B), ("C", C)) if form == "constant"}
    inputs: dict[str, Any] = {
        name: None
        if value is None
        else arrange(value.to(device, parameter_dtype(dtype) if name in constants else dtype), layout)
        for name, value in values.items()
    }
    return inputs | {"discretization": discretization, "delta_softplus": delta_softplus}


def make_step_inputs(
    *,
    batch: int = 2,
    dim: int = 4,
    dstate: int = 3,
    heads: int | None = None,
    groups: int | None = None,
    D: bool = True,
    z: bool = True,
    dt_bias: bool = True,
    dt_softplus: bool = True,
    slots: int | None = None,
    discretization: str = "zoh",
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype | None = None,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of ``selective_state_update``, the same numbers on every device.

    Args:
        heads: None for a state of shape (batch, dim, dstate), else (batch, heads, dim, dstate): ``dim`` is then headdim.
        groups: None for B and C of shape (batch, dstate), else (batch, groups, dstate). With heads None means one group.
        slots: the number of cache slots, with ``state_batch_indices`` in reverse order; None for no indices.
        layout: see :func:`arrange`; of every tensor but the indices.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    channels = (dim,) if heads is None else (heads, dim)
    matrix = (batch, dstate) if groups is None and heads is None else (batch, groups or 1, dstate)
    values = {
        "state": normal(batch if slots is None else slots, *channels, dstate),
        "x": normal(batch, *channels),
        "dt": 0.6 * normal(batch, *channels) - 1 if dt_softplus else 0.02 + 0.6 * uniform(batch, *channels),
        "A": -0.1 - 0.9 * uniform(*channels, dstate),
        "B": normal(*matrix),
        "C": normal(*matrix),
        "D": normal(*channels) if D else None,
        "z": normal(batch, *channels) if z else None,
        "dt_bias": 0.2 * uniform(*channels) if dt_bias else None,
    }
    dtypes = dict.fromkeys(("A", "D", "dt_bias"), parameter_dtype(dtype)) | {"state": state_dtype or parameter_dtype(dtype)}
    inputs: dict[str, Any] = {
        name: None if value is None else arrange(value.to(device, dtypes.get(name, dtype)), layout)
        for name, value in values.items()
    }
    if slots is not None:
        inputs["state_batch_indices"] = torch.arange(slots - 1, slots - 1 - batch, -1, dtype=torch.int32, device=device)
    return inputs | {"discretization": discretization, "dt_softplus": dt_softplus}


def split(operator: torch._ops.OpOverloadPacket, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The operator's positional and keyword arguments."""
    arguments = operator.default._schema.arguments
    positional = tuple(inputs.get(argument.name) for argument in arguments if not argument.kwarg_only)
    keywords = (argument.name for argument in arguments if argument.kwarg_only)
    return positional, {name: inputs[name] for name in keywords if name in inputs}


def with_gradients(inputs: dict[str, Any], names: Iterable[str] = TENSORS) -> dict[str, Any]:
    return inputs | {name: inputs[name].detach().requires_grad_() for name in names if inputs[name] is not None}


def scan_with_state(**inputs: Any) -> tuple[Tensor, Tensor]:
    return selective_scan(**inputs, return_last_state=True)


def training_step(inputs: dict[str, Any], function: Callable) -> dict[str, Tensor]:
    """The results of the function, and the gradients that a loss sends back through it to every tensor argument."""
    leaves = with_gradients(inputs)
    out, last_state = function(**leaves)
    (out.float().square().sum() + last_state.float().square().sum()).backward()
    return {"out": out, "last_state": last_state} | {n: leaves[n].grad for n in TENSORS if inputs[n] is not None}


def reference_scan(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`ssm_kernels.reference.selective_scan`, run on the CPU for every device: a GPU would spend its time on launches."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

    def on_cpu(value: Any) -> Any:
        return value.cpu() if isinstance(value, Tensor) else value

    results = reference.selective_scan(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})
    if isinstance(results, Tensor):
        return results.to(tensors[0].device)
    out, last_state = results
    return out.to(tensors[0].device), last_state.to(tensors[0].device)


def as_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def make_cotangents(inputs: dict[str, Any], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients of out and of last_state."""
    generator = torch.Generator().manual_seed(seed)
    u, A = inputs["u"], inputs["A"]
    grad_out = torch.randn(u.shape, generator=generator, dtype=torch.float64)
    grad_last_state = torch.randn((u.shape[0], *A.shape), generator=generator, dtype=torch.float64)
    return grad_out.to(u), grad_last_state.to(A)


def evaluate(function: Callable, inputs: dict[str, Any], cotangents: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """``out``, ``last_state`` and, given cotangents, ``grad_<name>`` of every tensor argument, in the operator's dtypes."""
    leaves = {name: inputs[name].detach() for name in TENSORS if inputs.get(name) is not None}
    if cotangents is not None:
        for leaf in leaves.values():
            leaf.requires_grad_()
    out, last_state = function(**(inputs | leaves), return_last_state=True)
    out, last_state = out.to(inputs["u"].dtype), last_state.to(inputs["A"].dtype)
    results = {"out": out.detach(), "last_state": last_state.detach()}
    if cotangents is not None:
        # A result of no steps from no state depends on nothing, and the reference's then has no graph.
        dependent = [(y, grad) for y, grad in zip((out, last_state), cotangents, strict=True) if y.requires_grad]
        outputs, incoming = [y for y, _ in dependent], [grad for _, grad in dependent]
        if outputs:
            gradients = torch.autograd.grad(
                outputs, tuple(leaves.values()), incoming, allow_unused=True, materialize_grads=True
            )
        else:
            gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]
        results |= {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return results


def assert_as_accurate(actual: Tensor, native: Tensor, exact: Tensor, what: str, floor: float | None = None) -> None:
    """The low-precision rule: at most twice the error of PyTorch in the same dtypes, plus a rounding floor.

    Both errors are against float64, in the maximum and in the root mean square. The floor is one rounding to a 16-bit dtype,
    and sixteen where the dtype is that of the arithmetic itself: PyTorch's own largest error ranges from one rounding to about
    as many from one seed to the next, so that a single yardstick may come out far below what is usual.
    """
    assert actual.dtype == native.dtype and actual.shape == exact.shape, what
    if not actual.numel():
        return
    if floor is None:
        floor = torch.finfo(actual.dtype).eps / 2 * (1 if actual.element_size() == 2 else 16)
    for name, norm in (("maximum", lambda x: x.abs().max()), ("root mean square", lambda x: x.square().mean().sqrt())):
        error, yardstick, scale = (norm(x).item() for x in (actual.double() - exact, native.double() - exact, exact))
        assert error <= 2 * yardstick + floor * scale, (
            f"{what}: {name} error {error:.3g}, PyTorch's {yardstick:.3g}, size of the values {scale:.3g}"
        )


def assert_matches_reference(function: Callable, inputs: dict[str, Any], *, gradients: bool = True) -> dict[str, Tensor]:
    """Compares with the float64 reference, by the low-precision rule below float64; returns the function's results."""
    cotangents = make_cotangents(inputs) if gradients else None
    actual = evaluate(function, inputs, cotangents)
    exact = evaluate(reference_scan, as_float64(inputs), None if cotangents is None else tuple(x.double() for x in cotangents))
    assert actual.keys() == exact.keys()
    if inputs["u"].dtype == torch.float64:
        for name, value in actual.items():
            torch.testing.assert_close(value, exact[name], rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    else:
        native = evaluate(reference_scan, inputs, cotangents)
        for name, value in actual.items():
            assert_as_accurate(value, native[name], exact[name], name)
    return actual


def step(inputs: dict[str, Any], function: Callable = selective_state_update) -> tuple[Tensor, Tensor]:
    """``out`` and the new state, of a copy of the state in the same strides."""
    state = inputs["state"]
    copy = torch.empty_strided(state.shape, state.stride(), dtype=state.dtype, device=state.device).copy_(state)
    return function(**(inputs | {"state": copy})), copy


def assert_step_matches_reference(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """As :func:`assert_matches_reference`, for ``selective_state_update``; returns ``out`` and the new state."""
    out, state = step(inputs)
    assert out.shape == inputs["x"].shape and out.dtype == inputs["x"].dtype
    exact_out, exact_state = reference.selective_state_update(**as_float64(inputs))
    if inputs["x"].dtype == torch.float64:
        torch.testing.assert_close(out, exact_out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, exact_state, rtol=1e-12, atol=1e-12)
    else:
        native_out, native_state = reference.selective_state_update(**inputs)
        assert_as_accurate(out, native_out.to(out.dtype), exact_out, "out")
        assert_as_accurate(state, native_state, exact_state, "state")
    return out, state


def evaluate_in_float64(inputs: dict[str, Any], cotangents: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """The operator's results and gradients of CPU tensors in float64."""
    return evaluate(selective_scan, as_float64(inputs), cotangents and tuple(x.double() for x in cotangents))


def assert_close(actual: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    """float64 to 1e-10; else to roundings of the largest value, which cancellation may leave far below the terms of its sum."""
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        rtol = atol = 1e-10
        if dtype != torch.float64:
            scale = max(1.0, exact[name].abs().max().item())
            rtol, atol = 2 * torch.finfo(value.dtype).eps, 64 * torch.finfo(torch.float32).eps * scale
        torch.testing.assert_close(
            value.cpu().double(), exact[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name
