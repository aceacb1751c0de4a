"""One description of an operator for its tests: inputs, results, gradients, comparison with the reference.

A new operator is a subclass of :class:`OperatorSpec`, with its inputs and the shapes of its results, and an entry of
``OPERATORS`` in ``operators.py``: the tests of ``test_operators_*.py`` then run for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from helpers import (
    assert_all_close,
    assert_as_accurate,
    assert_equal,
    captured,
    devices_of,
    gradients_of_dependent,
    parameter_dtype,
    split,
)
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference

Inputs = dict[str, Any]
Results = dict[str, Tensor]
# Gradients of the results; None for a result that nothing depends on.
Cotangents = Sequence[Tensor | None]


# Checks of torch.library.opcheck without its trace with symbolic sizes, which takes forty times as long, and with it.
UNTRACED = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = (*UNTRACED, "test_aot_dispatch_dynamic")

# By argument: expected shapes, with the sizes where other arguments set them, and wrong ones.
Shapes = Mapping[str, list[tuple[str, list[tuple[int, ...]]]]]


class Offsets(NamedTuple):
    """Options of ``make_inputs``, and the axes of a row of each input and result."""

    options: Inputs
    axes: Mapping[str, Sequence[int]]


def rows(names: str, *axes: int, **options: Any) -> Offsets:
    """Rows along the same axes of these inputs and results."""
    return Offsets(options, dict.fromkeys(names.split(), axes))


class OperatorSpec:
    """A public operator: calls run ``ssm_kernels.<name>``, looked up when called, and return all its results.

    Attributes:
        results: names of the results.
        all_results: the keyword argument with which the function returns all of them.
        family: its key in ``helpers.KERNEL_OPTIONS``; by default the name.
        internal: the stem of ``_x_fwd`` and ``_x_bwd``.
        autograd: the operator with all arguments positional that the public one calls, if there is one.
        tolerance: of results in float64 against results of the same kernels, called otherwise.
        gradient_tolerance: of their gradients.
        reference_tolerance: of both in float64 against the reference.
        sums_cancel: tolerances are fractions of the largest value of each result, of which sums of many terms are left.
        offset_exact: results begin where Meta says, inside of no other memory.
        packs: takes ``cu_seqlens``.
        any_stride_of_one: axes of size 1 may have any stride.
        frames: how often torch.compile may take the first call, before it needs no other graph.
        cases: options of :meth:`make_inputs` with which expensive tests run.
        options: those for all other tests.
        several_chunks: of a call that is longer than a chunk.
        large: of a call that several threads share, to which tests add ``batch``.
        compiled: keys of ``options`` for tests of torch.compile.
        mapped: keys of ``options`` for tests of vmap.
        sizes: options of :meth:`make_inputs` for which Meta is compared with the device.
        layouts: those that :meth:`make_inputs` takes.
        nested: two of the tensors, mapped by one vmap inside another.
        good: options of :meth:`make_inputs` with sizes that no error confuses, by which the tables of messages are written.
        indices: options that add tensors of integers, a set for each call.
        together: options of a call with every tensor that can be there together.
        wide: tensors in the accumulation dtype.
        either: tensors that may have the dtype of the first one or the accumulation dtype. All others have the first one's.
        bad_shapes: options, and by argument the shape that an error expects, and wrong ones. Sizes of 1 must not be broadcast.
        bad_values: options, changed arguments, and the message of the ValueError.
        offsets: by name, calls whose rows may start at any element.
        cuda_calls: options of calls for tests of streams and CUDA graphs; empty: these leave the operator out. "long" has few
            channels and many steps, so that kernels split time between blocks, and "wide" enough channels to fill a GPU.
        cuda_kernels: the debug option, and those of its values, that choose kernels for these.
    """

    results: ClassVar[tuple[str, ...]] = ("out",)
    all_results: ClassVar[str | None] = None
    family: str = ""
    internal: ClassVar[str]
    autograd: ClassVar[str | None] = None
    tolerance: ClassVar[float] = 1e-12
    gradient_tolerance: ClassVar[float] = 1e-11
    reference_tolerance: ClassVar[float] = 1e-11
    sums_cancel: ClassVar[bool] = False
    offset_exact: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    any_stride_of_one: ClassVar[bool] = False
    frames: ClassVar[int] = 1
    cases: ClassVar[Mapping[str, Inputs]] = {"default": {}}
    options: ClassVar[Mapping[str, Inputs]] = {"default": {}}
    several_chunks: ClassVar[Mapping[str, Any]] = {"seqlen": 70}
    large: ClassVar[Mapping[str, Any]] = {"seqlen": 70}
    compiled: ClassVar[Sequence[str]] = ("default",)
    mapped: ClassVar[Sequence[str]] = ("default",)
    sizes: ClassVar[Sequence[Inputs]] = ({},)
    layouts: ClassVar[Sequence[str]] = ("contiguous",)
    nested: ClassVar[tuple[str, str]]
    good: ClassVar[Inputs] = {}
    indices: ClassVar[Sequence[Inputs]] = ({},)
    together: ClassVar[Inputs] = {}
    wide: ClassVar[Sequence[str]] = ()
    either: ClassVar[Sequence[str]] = ()
    bad_shapes: ClassVar[Sequence[tuple[Inputs, Shapes]]] = ()
    bad_values: ClassVar[Sequence[tuple[Inputs, Inputs, str]]] = ()
    offsets: ClassVar[Mapping[str, Offsets]] = {}
    cuda_calls: ClassVar[Mapping[str, Inputs]] = {}
    cuda_kernels: ClassVar[tuple[str, Sequence[str]]] = ("", ())

    def __init__(self, name: str) -> None:
        self.name = name
        self.family = type(self).family or name

    def __repr__(self) -> str:
        return self.name

    # ----- what an operator defines

    def make_inputs(self, **options: Any) -> Inputs:
        """Keyword arguments of the function, the same numbers on every device."""
        raise NotImplementedError

    def result_shapes(self, inputs: Inputs) -> Sequence[Sequence[int]]:
        raise NotImplementedError

    def result_dtypes(self, inputs: Inputs) -> Sequence[torch.dtype]:
        dtype = self.first(inputs).dtype
        return dtype, parameter_dtype(dtype)

    def time_axes(self, inputs: Inputs) -> dict[str, int]:
        """The axis of time of each tensor that has one."""
        raise NotImplementedError

    def cast_by_autocast(self, inputs: Inputs) -> list[str]:
        """Names of the tensors that autocast casts to its dtype."""
        raise NotImplementedError

    def internal_values(self, inputs: Inputs) -> Inputs:
        """Arguments of the internal operators, by their names."""
        return inputs

    def row_names(self, **options: Any) -> list[str]:
        """Names of the tensors of such inputs that have an entry for each row of the batch."""
        one, two = (self.make_inputs(**{**options, "batch": batch}) for batch in (1, 2))
        return [name for name, value in one.items() if isinstance(value, Tensor) and value.shape != two[name].shape]

    def sums_of_pytorch(self, inputs: Inputs) -> list[str]:
        """Names of the results that PyTorch's sums or matmuls make, whose order is not the operator's own."""
        return []

    # ----- calls

    @property
    def devices(self) -> list[str]:
        return [*devices_of(self.family)]

    @property
    def function(self) -> Callable:
        return getattr(ssm_kernels, self.name)

    @property
    def operator(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.ssm_kernels, self.name).default

    @property
    def forward_operator(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.ssm_kernels, f"{self.internal}_fwd").default

    @property
    def backward_operator(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.ssm_kernels, f"{self.internal}_bwd").default

    def __call__(self, **inputs: Any) -> tuple[Tensor, ...]:
        return self._all_of(getattr(ssm_kernels, self.name), inputs)

    def reference_function(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """The reference's function, run on the CPU for every device: a GPU would spend its time on launches."""
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        on_cpu = [value.cpu() if isinstance(value, Tensor) else value for value in args]
        named_on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        results = getattr(reference, self.name)(*on_cpu, **named_on_cpu)
        return results.to(device) if isinstance(results, Tensor) else tuple(result.to(device) for result in results)

    def reference(self, **inputs: Any) -> tuple[Tensor, ...]:
        """All results of the reference."""
        return self._all_of(self.reference_function, inputs)

    def _all_of(self, function: Callable, inputs: Inputs) -> tuple[Tensor, ...]:
        results = function(**inputs) if self.all_results is None else function(**inputs, **{self.all_results: True})
        return (results,) if isinstance(results, Tensor) else results

    def operator_arguments(self, inputs: Inputs) -> tuple[tuple, Inputs]:
        """Arguments of the public operator, positional and keyword ones."""
        return split(getattr(torch.ops.ssm_kernels, self.name), inputs)

    def forward_arguments(self, inputs: Inputs) -> tuple:
        """Arguments of ``_x_fwd``, in the order of its schema."""
        return _by_schema(self.forward_operator, self.internal_values(inputs))

    def backward_arguments(self, inputs: Inputs, needs_grad: Sequence[bool] | None = None) -> tuple:
        """Arguments of ``_x_bwd``; needs all gradients of tensors that are present, unless ``needs_grad`` says otherwise."""
        values = self.internal_values(inputs) | self.saved_values(inputs)
        grads = zip(self.results, self.make_cotangents(inputs), strict=True)
        values |= {f"grad_{name}": cotangent for name, cotangent in grads}
        values["needs_grad"] = self.needed(inputs) if needs_grad is None else list(needs_grad)
        return _by_schema(self.backward_operator, values)

    def saved_values(self, inputs: Inputs) -> Inputs:
        """The tensors that forward saves for backward, by the names of backward's arguments."""
        return {}

    def needed(self, inputs: Inputs) -> list[bool]:
        """The gradients that backward returns by default, as flags."""
        raise NotImplementedError

    # ----- tensors

    def first(self, inputs: Inputs) -> Tensor:
        return next(value for value in inputs.values() if isinstance(value, Tensor))

    def make_cotangents(self, inputs: Inputs, seed: int = 1) -> tuple[Tensor, ...]:
        """Gradients of all results."""
        generator, device = torch.Generator().manual_seed(seed), self.first(inputs).device
        return tuple(
            torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(device, dtype)
            for shape, dtype in zip(self.result_shapes(inputs), self.result_dtypes(inputs), strict=True)
        )

    # ----- evaluation and comparison

    def evaluate(
        self,
        function: Callable,
        inputs: Inputs,
        cotangents: Cotangents | None = None,
        names: Sequence[str] | None = None,
    ) -> Results:
        """The results and, given cotangents, ``grad_<name>`` of these tensors, by default all, in the operator's dtypes."""
        leaves = with_gradients(inputs, names) if cotangents is not None else inputs
        outputs, dtypes = function(**leaves), list(self.result_dtypes(inputs))
        if function is self:
            assert [output.dtype for output in outputs] == dtypes
        outputs = [output.to(dtype) for output, dtype in zip(outputs, dtypes, strict=True)]
        results = {name: output.detach() for name, output in zip(self.results, outputs, strict=True)}
        if cotangents is not None:
            names = tensor_names(inputs) if names is None else names
            gradients = gradients_of_dependent(outputs, cotangents, [leaves[name] for name in names])
            results |= {f"grad_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
        return results

    def evaluate_in_float64(
        self, inputs: Inputs, cotangents: Cotangents | None = None, function: Callable | None = None
    ) -> Results:
        """The results and gradients in float64, of the reference or of this function."""
        cotangents = cotangents and tuple(x if x is None else x.double() for x in cotangents)
        return self.evaluate(function or self.reference, as_float64(inputs), cotangents)

    def evaluate_natively(self, inputs: Inputs, cotangents: Cotangents | None, exact: Results) -> Results:
        """The yardstick of the low-precision rule: PyTorch in the operator's dtypes."""
        return self.evaluate(self.reference, inputs, cotangents)

    def assert_same_as(self, function: Callable, inputs: Inputs, *, bits: bool = False) -> None:
        """The results and all gradients are those of another function."""
        cotangents = self.make_cotangents(inputs)
        actual, expected = (self.evaluate(call, inputs, cotangents) for call in (self, function))
        if bits:
            assert_equal(actual, expected)
        else:
            self.assert_close(actual, expected)

    def rounding_floor(self, name: str, inputs: Inputs) -> float | None:
        """Replaces the low-precision rule's usual floor for this result; None keeps it."""
        return None

    def assert_same_layout(self, meta: Tensor, real: Tensor) -> None:
        """Shape, dtype and strides; strides are compared only if there are elements."""
        assert meta.is_meta and not real.is_meta
        assert (meta.shape, meta.dtype) == (real.shape, real.dtype), self.name
        strides = zip(meta.stride(), real.stride(), real.shape, strict=True)
        assert not real.numel() or all(a == b for a, b, size in strides if size > 1 or not self.any_stride_of_one)
        assert meta.storage_offset() == real.storage_offset() or not self.offset_exact

    def assert_close(self, actual: Results, expected: Results, tolerance: float | None = None) -> None:
        assert_all_close(actual, expected, tolerance or self.reference_tolerance, of_largest=self.sums_cancel)

    def assert_as_accurate(self, actual: Results, native: Results, exact: Results, inputs: Inputs) -> None:
        """The low-precision rule, for every result of such inputs."""
        assert actual.keys() == exact.keys()
        for name, value in actual.items():
            assert_as_accurate(value, native[name].to(value.dtype), exact[name], name, self.rounding_floor(name, inputs))

    def assert_matches_reference(
        self,
        inputs: Inputs,
        *,
        gradients: bool = True,
        cotangents: Cotangents | None = None,
        function: Callable | None = None,
        exact: Callable | None = None,
    ) -> Results:
        """Compares with the float64 reference, by the low-precision rule below float64; returns the function's results.

        Args:
            cotangents: replace the result of :meth:`make_cotangents`.
            function: in place of the operator.
            exact: in place of the reference; given everything in float64.
        """
        if cotangents is None and gradients:
            cotangents = self.make_cotangents(inputs)
        actual = self.evaluate(function or self, inputs, cotangents)
        expected = self.evaluate_in_float64(inputs, cotangents, exact)
        if self.first(inputs).dtype == torch.float64:
            self.assert_close(actual, expected)
        else:
            self.assert_as_accurate(actual, self.evaluate_natively(inputs, cotangents, expected), expected, inputs)
        return actual

    def assert_replays(self, draws: Sequence[Inputs], *, gradients: bool = True) -> None:
        """Captures a call on CUDA in a graph and replays it on new values in the same tensors, the first ones last: each time
        it computes what an eager call does, bit for bit. Draws differ in the values of their tensors."""
        static = {name: value.clone() if isinstance(value, Tensor) else value for name, value in draws[0].items()}
        cotangents = [self.make_cotangents(draw, seed) if gradients else () for seed, draw in enumerate(draws, 1)]
        static_cotangents = tuple(map(torch.clone, cotangents[0])) or None
        graph, found = captured(lambda: self.evaluate(self, static, static_cotangents))
        for draw, incoming in [*zip(draws, cotangents, strict=True)][::-1]:
            for name, value in draw.items():
                if isinstance(value, Tensor):
                    static[name].copy_(value)
            for tensor, value in zip(static_cotangents or (), incoming, strict=True):
                tensor.copy_(value)
            graph.replay()
            assert_equal(found, self.evaluate(self, draw, incoming or None))

    def training_step(self, function: Callable, inputs: Inputs) -> Results:
        """The results of the function, and the gradients that a loss sends back through it to every tensor argument."""
        leaves = with_gradients(inputs)
        results = function(**leaves)
        sum(result.float().square().sum() for result in results).backward()
        named = {name: result.detach() for name, result in zip(self.results, results, strict=True)}
        return named | {f"grad_{name}": leaves[name].grad for name in tensor_names(inputs)}


def _by_schema(operator: torch._ops.OpOverload, values: Inputs) -> tuple:
    # The last argument of some is the layer that errors name.
    return tuple(values[argument.name] for argument in operator._schema.arguments if argument.name != "layer")


def tensor_names(inputs: Inputs) -> list[str]:
    """Names of the differentiable arguments that are present."""
    return [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]


def with_gradients(inputs: Inputs, names: Iterable[str] | None = None) -> Inputs:
    """With new leaves for these tensors, by default for all, in the same strides."""
    names = tensor_names(inputs) if names is None else names
    return inputs | {name: inputs[name].detach().requires_grad_() for name in names if inputs[name] is not None}


def as_float64(inputs: Inputs) -> Inputs:
    return inputs | {name: inputs[name].double() for name in tensor_names(inputs)}
