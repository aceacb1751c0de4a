"""Shared by the test files: the methods and their expected properties, layouts, devices, the rules of comparison.

A new discretization needs one row in ``METHODS``; operators have kernels for both devices unless ``CPU_ALONE`` names them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import mpmath
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

# The devices that each operator has kernels for. Every test that takes `device` runs on each of its operator's.
# Operators, as test files name them in ``OPERATOR``, without CUDA kernels.
CPU_ALONE: frozenset[str] = frozenset()


def devices_of(operator: str) -> tuple[str, ...]:
    """The devices that the operator has kernels for."""
    return ("cpu",) if operator in CPU_ALONE else ("cpu", "cuda")


# The version of mamba_ssm in the tables of docs/clients.md, where its names come from ssm_kernels.compat.
COMPAT_VERSION = "2.3.2, its names from ssm_kernels.compat"


class Method(NamedTuple):
    """Known properties of a discretization, independent of its code.

    Attributes:
        oracle: ``(Abar, gain)`` at an mpmath number ``z``, written from the formula.
        scipy: method and ``alpha`` of ``scipy.signal.cont2discrete``, where it has the method.
        step_order: order of convergence for a constant input; None where the method is exact.
        keeps_dc_gain: whether the fixed point under a constant input is the continuous system's, ``-B u / A``.
        stable_from: ``|Abar| <= 1`` for real ``z`` in ``[stable_from, 0]``.
        input_has_delta: whether the input's factor is the step times the gain; else it is the gain.
        gain_terms: where the gain is the series of phi1 cut short, its number of terms: those of other signs cancel.
    """

    oracle: Callable[[Any], tuple[Any, Any]]
    scipy: tuple[str, float | None] | None
    step_order: int | None
    keeps_dc_gain: bool
    stable_from: float
    gain_terms: int | None = None
    input_has_delta: bool = True

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
    "gbt(0.7)": Method(_generalized_bilinear("0.7"), ("gbt", 0.7), 1, True, -math.inf),
    "dirac": Method(_exponential(1), None, 0, False, -math.inf, input_has_delta=False),
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


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def dtypes(*chosen: torch.dtype) -> pytest.MarkDecorator:
    """Parametrizes a test over these dtypes, by default over all."""
    return pytest.mark.parametrize("dtype", chosen or DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Draws:
    """Random float64 numbers, the same on every device."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)


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
    """Gradients of the results with respect to the inputs; zero for inputs that no result depends on.

    The result of no steps from no state depends on nothing, and the reference gives it no graph.
    """
    pairs = zip(outputs, cotangents, strict=True)
    dependent = [(output, grad) for output, grad in pairs if output.requires_grad and grad is not None]
    if not dependent:
        return [torch.zeros_like(leaf) for leaf in leaves]
    outputs, cotangents = zip(*dependent, strict=True)
    return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, materialize_grads=True)


def move(tensor: Tensor, device: str) -> Tensor:
    """A copy with the same strides and offset. Copies the memory as it is, without a kernel."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.as_strided((elements,), (1,), 0).to(device, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def move_all(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: move(value, device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def on_meta(value: Any) -> Any:
    """Tensors, in lists too, with the same strides on meta: .to("meta") keeps the strides of dense tensors only."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_meta, value))
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


# The names of the values of the options that choose kernels, in the order of the values.
DEBUG_OPTION_VALUES = {
    "causal_conv1d_kernel": ("faster", "by_layout"),
    "linear_scan_kernel": ("faster", "tiles", "sequential"),
    "selective_scan_kernel": ("faster", "sequential", "warp_scan"),
    "ssd_mma": ("wgmma", "mma"),
    "delta_rule_mma": ("wgmma", "mma"),
    "delta_rule_cpu": ("kernels", "matmuls"),
    "mamba3_cpu": ("kernels", "operators"),
}


def set_debug_option(name: str, value: str | int) -> int:
    """Sets an option of csrc/torch/debug_options.h and returns the previous value."""
    if isinstance(value, str):
        value = DEBUG_OPTION_VALUES[name].index(value)
    return torch.ops.ssm_kernels._set_debug_option(name, value)


@contextmanager
def debug_option(name: str, value: str | int) -> Iterator[int]:
    """Sets the option within the context, yields the previous value and restores it at the end."""
    before = set_debug_option(name, value)
    try:
        yield before
    finally:
        set_debug_option(name, before)


# The option that chooses the kernels on CUDA, by the operator's family.
KERNEL_OPTIONS = {
    "causal_conv1d": "causal_conv1d_kernel",
    "linear_scan": "linear_scan_kernel",
    "selective_scan": "selective_scan_kernel",
    "ssd_chunk_scan": "ssd_mma",
    "delta_rule_scan": "delta_rule_mma",
}


def kernel_choices(family: str, device: str) -> list[AbstractContextManager[Any]]:
    """Contexts in which calls on the device take each of the family's kernels that support them."""
    option = KERNEL_OPTIONS.get(family)
    if device == "cpu" or option is None:
        return [nullcontext()]
    return [debug_option(option, value) for value in DEBUG_OPTION_VALUES[option]]


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def tf32() -> Iterator[None]:
    """PyTorch's switch allows TF32 in float32 products."""
    matmul = torch.backends.cuda.matmul
    was_allowed = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = was_allowed


# Events of the profiler itself.
OVERHEADS = ("Activity Buffer", "Lazy Function Loading", "Runtime Triggered", "Command Buffer Full", "Buffer Flush", "Resource")


def launched_kernels(call: Callable[[], Any]) -> dict[str, int]:
    """The names of the kernels that a call launches on CUDA, with the number of launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    others = ("Mem", "cuda", *OVERHEADS)
    return {event.key: event.count for event in profile.key_averages() if not event.key.startswith(others)}


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


def split(operator: torch._ops.OpOverloadPacket, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The operator's positional and keyword arguments."""
    arguments = operator.default._schema.arguments
    positional = tuple(inputs.get(argument.name) for argument in arguments if not argument.kwarg_only)
    keywords = (argument.name for argument in arguments if argument.kwarg_only)
    return positional, {name: inputs[name] for name in keywords if name in inputs}


def step_on_a_copy(function: Callable, inputs: dict[str, Any], state: str) -> tuple[Tensor, Tensor]:
    """The output and the new state of a decoding step, which updates a copy of the state in the same strides."""
    old = inputs[state]
    copy = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(old)
    return function(**(inputs | {state: copy})), copy


def _memory_events(function: Callable) -> list[Any]:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())


def allocated(function: Callable, device: str) -> int:
    """Bytes that PyTorch's allocator is asked for during the call."""
    if device == "cuda":
        before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        function()
        return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before
    return sum(event.nbytes() for event in _memory_events(function) if event.nbytes() > 0)


def peak_memory(function: Callable, device: str) -> int:
    """The peak of bytes held during the call, minus the bytes held before."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    return max(0, *itertools.accumulate(event.nbytes() for event in _memory_events(function)))


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


def assert_all_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, *, of_largest: bool = False
) -> None:
    """Compares to a relative and absolute tolerance. With ``of_largest``, because long sums cancel, the tolerance is a fraction
    of each result's largest value, or of 1."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        rtol = atol = tolerance
        if of_largest:
            largest = expected[name].abs().max().item() if expected[name].numel() else 0
            rtol, atol = 0, tolerance * max(1, largest)
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name
