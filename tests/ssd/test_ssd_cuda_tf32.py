"""ssd_chunk_scan on CUDA for fp32 where PyTorch's switch allows TF32: one TF32 product in place of three."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import captured
from operator_spec import with_gradients
from ssd_helpers import SSD, evaluate, evaluate_in_float64, every_method, make_cotangents, make_inputs, plan, scan
from torch import Tensor

from ssm_kernels import ssd_chunk_scan

pytestmark = pytest.mark.cuda

# Relative errors of norms. Each element is rounded to 11 bits; dt, A, dt_bias and log_decay get differences of sums.
LEAST, MOST, MOST_OF_DIFFERENCES = 3e-5, 1.5e-3, 1e-2
OF_DIFFERENCES = ("grad_dt", "grad_A", "grad_dt_bias", "grad_log_decay")
SHAPES: dict[str, Any] = {
    "gated": {},
    "P100": {"headdim": 100, "groups": 1},
    "reverse": {"reverse": True, "z": False},
    "log_decay": {"log_decay": True, "z": False},
}


@contextmanager
def tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    was_allowed = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = was_allowed


def inputs_on_cuda(**options: Any) -> dict[str, Any]:
    sizes = {"headdim": 64, "dstate": 128, "seqlen": 200, "dtype": torch.float32, "device": "cuda"}
    return make_inputs(**(sizes | options))


def assert_errors_of_tf32(inputs: dict[str, Any]) -> None:
    cotangents = make_cotangents(inputs)
    exact = evaluate_in_float64(inputs, cotangents, scan)
    with tf32():
        found = evaluate(SSD, inputs, cotangents)
    errors = {name: ((found[name] - value).norm() / value.norm()).item() for name, value in exact.items()}
    for name, error in errors.items():
        assert error <= (MOST_OF_DIFFERENCES if name in OF_DIFFERENCES else MOST), errors
    for name in ("out", "final_states", "grad_x", "grad_B", "grad_C"):
        assert errors[name] >= LEAST, f"{name} is too exact for TF32: {errors}"


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[bool]:
    return [torch.equal(first[name], second[name]) for name in first]


@pytest.mark.parametrize("dstate", [16, 64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_accuracy(dstate, shape):
    assert_errors_of_tf32(inputs_on_cuda(dstate=dstate, **SHAPES[shape]))


@pytest.mark.parametrize("options", [{"cu_seqlens": (0, 0, 70, 71, 200)}, {"resets": [(3, 64, 150)]}], ids=["packed", "resets"])
def test_accuracy_of_several_sequences(options):
    assert_errors_of_tf32(inputs_on_cuda(**options))


@every_method
def test_accuracy_of_discretizations(discretization):
    assert_errors_of_tf32(inputs_on_cuda(discretization=discretization))


def test_accuracy_of_segments_along_time():
    assert_errors_of_tf32(inputs_on_cuda(batch=1, heads=2, groups=1, seqlen=2100))


def test_forward_and_backward_read_the_switch_when_they_run():
    inputs = inputs_on_cuda()
    cotangents = make_cotangents(inputs)
    exact = evaluate(SSD, inputs, cotangents)
    leaves = with_gradients(inputs)
    tensors = [value for value in leaves.values() if isinstance(value, Tensor) and value.requires_grad]
    names = [name for name, value in leaves.items() if isinstance(value, Tensor) and value.requires_grad]
    with tf32():
        assert plan(inputs)["products"] == plan(inputs, is_backward=True)["products"] == "TF32"
        outputs = SSD(**leaves)
        gradients = torch.autograd.grad(outputs, tensors, cotangents, retain_graph=True)
    exact_gradients = torch.autograd.grad(outputs, tensors, cotangents)
    assert plan(inputs)["products"] == plan(inputs, is_backward=True)["products"] == "3xTF32"
    assert not torch.equal(outputs[0], exact["out"])
    for name, rounded, gradient in zip(names, gradients, exact_gradients, strict=True):
        assert torch.equal(gradient, exact[f"grad_{name}"]), name
        # The gradient of D is a sum of elementwise products.
        assert name == "D" or not torch.equal(rounded, gradient), name


def test_fp32_precision_allows_it_too():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert plan(inputs_on_cuda())["products"] == "TF32"
        matmul.fp32_precision = "ieee"
        assert plan(inputs_on_cuda())["products"] == "3xTF32"
    finally:
        matmul.fp32_precision = before


def test_the_same_bits_every_time_and_in_a_graph(fresh_dynamo):
    inputs = inputs_on_cuda()
    cotangents = make_cotangents(inputs)
    with tf32():
        first, second = (evaluate(SSD, inputs, cotangents) for _ in range(2))
        assert all(same(first, second))
        with torch.no_grad():
            graph, results = captured(lambda: SSD(**inputs))
            compiled = torch.compile(ssd_chunk_scan, backend="aot_eager")(**inputs)
    # A graph keeps the kernels that it has captured.
    graph.replay()
    assert torch.equal(results[0], first["out"])
    assert torch.equal(compiled, first["out"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_not_affected(dtype):
    inputs = inputs_on_cuda(dtype=dtype)
    cotangents = make_cotangents(inputs)
    exact = evaluate(SSD, inputs, cotangents)
    with tf32():
        assert all(same(evaluate(SSD, inputs, cotangents), exact))
