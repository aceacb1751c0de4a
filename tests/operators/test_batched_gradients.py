"""Several vector-Jacobian products at once of every differentiable operator: is_grads_batched, and vmap over cotangents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from operator_spec import OperatorSpec, tensor_names, with_gradients
from operators import OPERATORS, over_options
from summary_helpers import SUMMARIES
from torch import Tensor

import ssm_kernels
from ssm_kernels import nn

OPERATOR = "every operator"

DIFFERENTIABLE: dict[str, OperatorSpec] = OPERATORS | SUMMARIES
ONE_PER_FAMILY = (
    "selective_scan",
    "ssd_chunk_scan",
    "mingru_scan",
    "causal_conv1d",
    "rms_norm_gated",
    "selective_scan_summary",
    "ssd_chunk_scan_summary",
    "rglru_scan_summary",
)


def batched(product: Callable) -> Callable:
    return partial(product, is_grads_batched=True)


def vmapped_twice(product: Callable) -> Callable:
    def function(*cotangents: Tensor) -> tuple[Tensor, ...]:
        twice = torch.vmap(torch.vmap(product))(*(torch.stack([cotangent, 2 * cotangent]) for cotangent in cotangents))
        return tuple(gradient[1] / 2 for gradient in twice)

    return function


MECHANISMS = {"is_grads_batched": batched, "vmap": torch.vmap, "vmap in vmap": vmapped_twice}


def product_of(results: list[Tensor], tensors: list[Tensor]) -> Callable:
    def product(*cotangents: Tensor, **options: Any) -> tuple[Tensor, ...]:
        kept = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(results, tensors, cotangents, **kept, **options)

    return product


def assert_equals_a_loop(results: list[Tensor], tensors: list[Tensor], tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(3, *r.shape, generator=generator, dtype=torch.float64).to(r) for r in results]
    product = product_of(results, tensors)
    expected = [torch.stack(column) for column in zip(*map(product, *cotangents), strict=True)]
    for name, batched_by in MECHANISMS.items():
        actual = batched_by(product)(*cotangents)
        torch.testing.assert_close(
            actual, tuple(expected), rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def batch_and_packed(spec: OperatorSpec) -> dict[str, dict[str, Any]]:
    return {"batch": {}} | ({"packed": {"cu_seqlens": (0, 0, 3, 9)}} if spec.packs else {})


@over_options(DIFFERENTIABLE, lambda spec: batch_and_packed(spec) | {name: spec.options[name] for name in spec.mapped})
def test_batched_gradients(operator, options, device, no_vmap_fallback, recwarn):
    """Gradients of all arguments, the first and the last one, through all results and through one."""
    inputs = operator.make_inputs(**options, device=device)
    names = tensor_names(inputs)
    for differentiated, through in ((names, None), (names[:1], None), (names[-1:], None), (names, 1)):
        leaves = with_gradients(inputs, differentiated)
        results = [result for result in operator(**leaves)[:through] if result.requires_grad]
        assert_equals_a_loop(results, [leaves[name] for name in differentiated], operator.tolerance)
    assert not [w for w in recwarn if "vmap" in str(w.message) or "batching rule" in str(w.message)]


@over_options(DIFFERENTIABLE, batch_and_packed)
def test_vmap_over_no_cotangents(operator, options, device, no_vmap_fallback):
    leaves = with_gradients(operator.make_inputs(**options, device=device))
    tensors = [leaves[name] for name in tensor_names(leaves)]
    results = list(operator(**leaves))
    gradients = torch.vmap(product_of(results, tensors))(*(result.detach().new_zeros(0, *result.shape) for result in results))
    assert [gradient.shape for gradient in gradients] == [(0, *tensor.shape) for tensor in tensors]


@pytest.mark.parametrize(("layer", "sizes"), [(nn.Mamba, {}), (nn.Mamba2, {"headdim": 8, "d_state": 16}), (nn.MinGRU, {})])
def test_batched_gradients_of_a_layer(layer, sizes):
    """The mixers' operators, for which layers are the public functions."""
    torch.manual_seed(0)
    module = (layer(16, 16) if layer is nn.MinGRU else layer(16, **sizes)).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    out = module(x)
    assert_equals_a_loop([out if isinstance(out, Tensor) else out[0]], [x, *module.parameters()], 1e-11)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_gradcheck_of_batched_gradients(name):
    operator = DIFFERENTIABLE[name]
    inputs = operator.make_inputs(batch=1, seqlen=3)
    names = tensor_names(inputs)

    def function(*tensors):
        return operator(**inputs | dict(zip(names, tensors, strict=True)))

    leaves = with_gradients(inputs)
    tensors = tuple(leaves[name] for name in names)
    assert torch.autograd.gradcheck(function, tensors, check_batched_grad=True, fast_mode=True)


def test_vectorized_jacobian_and_hessian():
    operator = OPERATORS["mingru_scan"]
    inputs = operator.make_inputs(batch=1, seqlen=3)
    names = tensor_names(inputs)
    tensors = tuple(inputs[name] for name in names)

    def function(*tensors):
        return operator(**inputs | dict(zip(names, tensors, strict=True)))

    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(function, tensors, vectorize=True), jacobian(function, tensors))

    a, b = (torch.rand(1, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in range(2))

    def scalar(a, b):
        return ssm_kernels.linear_scan(a, b).pow(3).sum()

    hessian = torch.autograd.functional.hessian
    torch.testing.assert_close(hessian(scalar, (a, b), vectorize=True), hessian(scalar, (a, b)))
