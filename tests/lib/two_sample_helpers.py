"""Inputs and results of scans with two input samples a step, and of those with a step of its own for A."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def make_scan_inputs(
    rule: str,
    *,
    batch: int = 2,
    dim: int = 6,
    seqlen: int = 7,
    dstate: int = 3,
    B: str = "per step",
    C: str = "per step",
    previous: str = "zero",
    sequences: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of ``selective_scan``, also of the reference.

    ``previous``: ``"given"`` for samples of both u and B.
    """
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def matrix(form: str) -> Tensor:
        shapes = {"per step": (batch, dstate, seqlen), "groups": (batch, 2, dstate, seqlen), "constant": (dim, dstate)}
        return normal(*shapes[form], dtype=wide if form == "constant" else dtype)

    rows = batch if sequences is None else sequences
    inputs: dict[str, Any] = {
        "u": normal(batch, dim, seqlen),
        "delta": normal(batch, dim, seqlen) - 1,
        "A": -normal(dim, dstate, dtype=torch.float64).exp().to(wide),
        "B": matrix(B),
        "C": matrix(C),
        "D": normal(dim, dtype=wide),
        "z": normal(batch, dim, seqlen),
        "delta_bias": normal(dim, dtype=wide),
        "initial_state": normal(rows, dim, dstate, dtype=wide),
        "delta_softplus": True,
        "discretization": rule,
    }
    if rule == "gbt_two_sample":
        inputs["alpha"] = 0.7
    if rule == "exp_trapezoidal":
        inputs |= {"lam": normal(batch, dim, seqlen), "lam_sigmoid": True}
    if previous == "given":
        sample = None if B == "constant" else normal(rows, *inputs["B"].shape[1:-1])
        inputs["previous"] = (normal(rows, dim), sample)
    else:
        inputs["previous"] = previous
    return inputs | options


def map_tensors(function: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with ``function`` of each tensor, those of pairs too."""

    def mapped(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(mapped(each) for each in value)
        return function(value) if isinstance(value, Tensor) else value

    return {name: mapped(value) for name, value in inputs.items()}


def on(device: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return map_tensors(lambda value: value.to(device), inputs)


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs in float64."""
    return map_tensors(lambda value: value.double() if value.is_floating_point() else value, inputs)


def leaves_of(inputs: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor], list[str]]:
    """Copies of the inputs that require gradients, and their names."""
    copied, leaves, names = dict(inputs), [], []

    def leaf(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().clone(memory_format=torch.preserve_format).requires_grad_())
        names.append(name)
        return leaves[-1]

    for name, value in inputs.items():
        is_pair = name == "previous" and not isinstance(value, str)
        copied[name] = tuple(leaf(f"previous_{i}", each) for i, each in enumerate(value)) if is_pair else leaf(name, value)
    return copied, leaves, names


def evaluate(function: Any, inputs: dict[str, Any], flag: str | None = "return_last_state") -> dict[str, Tensor]:
    """Outputs, with ``flag`` the last state and samples, and the gradients of a sum with random weights."""
    given, leaves, names = leaves_of(inputs)
    out, last = (function(**given), ()) if flag is None else function(**given, **{flag: True})
    if isinstance(last, Tensor):
        last = (last,)
    results = {"out": out} | {f"last_{i}": value for i, value in enumerate(last) if value is not None}
    generator = torch.Generator().manual_seed(5)
    # Exact in every dtype.
    weights = [torch.randint(-4, 5, x.shape, generator=generator).double() / 4 for x in results.values()]
    loss = sum((x * weight.to(x)).double().sum() for x, weight in zip(results.values(), weights, strict=True))
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return results | {f"grad_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
