"""A description of an operator between a layer's projections, and the comparisons that the tests of all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from operator_spec import TRACED, UNTRACED
from torch import Tensor

Inputs = dict[str, Any]


@dataclass(frozen=True)
class MixerSpec:
    """An operator between a layer's projections, and the options that the tests of ``test_mixers.py`` run with.

    Attributes:
        name: that in ``torch.ops.ssm_kernels``, the stem of those of forward and backward.
        composition: the same by public operators.
        make_inputs: returns the operator's arguments in its order.
        results: names of the results that gradients come through, the first of all.
        all_results: names of all results.
        options: of ``make_inputs``, by name.
        of_one_result: names of options with which gradients come through one result at a time.
        of_a_subset: those with which one argument at a time needs a gradient.
        of_opcheck: those for ``torch.library.opcheck``.
        whole: options of a call with every part that the operator can have, the projection after it too.
        of_gradcheck: options for ``torch.autograd.gradcheck``, and the results whose gradients are those of finite differences.
        sizes: options of a call that kernels of fp16 and bf16 take.
        of_low_precision: options beside these.
        layer: the layer that messages name.
    """

    name: str
    composition: Callable
    make_inputs: Callable[..., Inputs]
    results: tuple[str, ...]
    all_results: tuple[str, ...]
    options: dict[str, Inputs]
    of_one_result: tuple[str, ...]
    of_a_subset: tuple[str, ...]
    of_opcheck: tuple[str, ...]
    whole: Inputs
    of_gradcheck: tuple[Inputs, tuple[str, ...]]
    sizes: Inputs
    of_low_precision: tuple[Inputs, ...]
    layer: str

    def __repr__(self) -> str:
        return self.name.removeprefix("_").removesuffix("_mixer")

    @property
    def operator(self) -> torch._ops.OpOverloadPacket:
        return getattr(torch.ops.ssm_kernels, self.name)

    @property
    def forward_operator(self) -> torch._ops.OpOverloadPacket:
        return getattr(torch.ops.ssm_kernels, f"{self.name}_fwd")

    @property
    def backward_operator(self) -> torch._ops.OpOverloadPacket:
        return getattr(torch.ops.ssm_kernels, f"{self.name}_bwd")

    def backward_arguments(self, inputs: Inputs) -> tuple:
        """Those for a gradient of the first result."""
        plain = tuple(inputs.values())
        found = self.forward_operator(*plain)
        saved, absent = found[len(self.all_results) :], [None] * (len(self.results) - 1)
        gradients = [result.name.removeprefix("grad_") for result in self.backward_operator.default._schema.returns]
        return (found[0], *absent, *saved, [inputs[name] is not None for name in gradients], *plain)

    def opcheck(self, inputs: Inputs, traced: Sequence[str] = ()) -> None:
        """Checks the operators whose names end in ``traced`` also by a trace with symbolic sizes, which takes seconds."""
        needing = {leaf: inputs[leaf].detach().requires_grad_() for leaf in leaves_of(inputs)}
        calls: dict[str, tuple[torch._ops.OpOverloadPacket, tuple]] = {
            "": (self.operator, tuple((inputs | needing).values())),
            "_fwd": (self.forward_operator, tuple(inputs.values())),
            "_bwd": (self.backward_operator, self.backward_arguments(inputs)),
        }
        for name, (operator, arguments) in calls.items():
            torch.library.opcheck(operator.default, arguments, test_utils=TRACED if name in traced else UNTRACED)

    def evaluate(
        self, function: Callable, inputs: Inputs, results: Sequence[str] | None = None, leaves: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """The results, and the gradients of some arguments through some of the results."""
        results = self.results if results is None else results
        leaves = leaves_of(inputs) if leaves is None else leaves
        inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in leaves}
        outputs = dict(zip(self.all_results, function(*inputs.values()), strict=True))
        generator = torch.Generator().manual_seed(1)
        cotangents = {n: torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for n, v in outputs.items()}
        gradients = torch.autograd.grad(
            [outputs[n] for n in results],
            [inputs[n] for n in leaves],
            [cotangents[n] for n in results],
            allow_unused=True,
            materialize_grads=True,
        )
        return {n: v.detach() for n, v in outputs.items()} | {f"grad_{n}": g for n, g in zip(leaves, gradients, strict=True)}

    def evaluate_both(
        self, inputs: Inputs, results: Sequence[str] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The results of :meth:`evaluate` for the operator and for the composition."""
        return self.evaluate(self.operator, inputs, results), self.evaluate(self.composition, inputs, results)


def leaves_of(inputs: Inputs) -> list[str]:
    return [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]


def kept_bytes(run: Callable[[], Tensor], given: Sequence[Any]) -> int:
    """Bytes that a call which returns `out` keeps for backward beside the tensors among `given`."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    pointers = {value.untyped_storage().data_ptr() for value in given if isinstance(value, Tensor)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.untyped_storage().data_ptr() not in saved
    return sum(size for pointer, size in saved.items() if pointer not in pointers)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        size = expected[name].abs().max().item() if expected[name].numel() else 0
        torch.testing.assert_close(
            value.to(expected[name].dtype),
            expected[name],
            rtol=0,
            atol=tolerance * max(1, size),
            msg=lambda m, n=name: f"{n}: {m}",
        )


def assert_vmap_is_a_loop(function: Callable, inputs: Inputs) -> None:
    """Over samples of the first argument."""
    first, *rest = inputs.values()
    samples = torch.stack([first, first.flip(1)])
    mapped = torch.vmap(lambda sample: function(sample, *rest)[0])(samples)
    for sample, result in zip(samples, mapped, strict=True):
        assert_close({"out": result}, {"out": function(sample, *rest)[0]}, 1e-12)
