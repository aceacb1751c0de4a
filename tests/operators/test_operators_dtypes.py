"""Messages of every operator about dtypes and devices, which are RuntimeErrors."""

from __future__ import annotations

import pytest
import torch
from decoding_helpers import DECODING_STEPS
from error_helpers import (
    RECURRENCES,
    SELECTIVE,
    Function,
    assert_refuses,
    every_function,
    over,
)
from operator_spec import tensor_names
from torch import Tensor

OPERATOR = "every operator"

# ----- dtypes

SCALARS = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
INTEGERS = {torch.int64: "int64", torch.int32: "int32", torch.uint8: "uint8", torch.bool: "bool"}
FLOATS = "float32, float16, bfloat16 or float64"


def expected_scalars(function: Function, name: str, dtype: torch.dtype) -> list[str]:
    own, accumulation = SCALARS[dtype], "float64" if dtype == torch.float64 else "float32"
    if function.spec is not None and name in function.spec.wide:
        return [accumulation]
    either = DECODING_STEPS[function.name].either if function.spec is None else function.spec.either
    return [*dict.fromkeys((own, accumulation))] if name in either else [own]


@pytest.mark.parametrize("dtype", SCALARS, ids=str)
@every_function
def test_mixed_dtypes(function, dtype, device):
    inputs = function.inputs(dtype=dtype, device=device)
    for name in tensor_names(inputs):
        if name == function.first:
            continue
        expected = expected_scalars(function, name, dtype)
        for got, scalar in (SCALARS | INTEGERS).items():
            changed = inputs | {name: inputs[name].to(got)}
            if scalar in expected:
                function(**changed)
                continue
            like = f"(with {function.first} of dtype {SCALARS[dtype]})"
            message = f"expected {name} of dtype {' or '.join(expected)} {like}, got {scalar}"
            assert_refuses(function, changed, RuntimeError, message)


@pytest.mark.parametrize("dtype", SCALARS, ids=str)
@pytest.mark.parametrize("name", ["B", "C"])
def test_constant_matrix_has_the_dtype_of_A(name, dtype, device):
    inputs = SELECTIVE.inputs(dtype=dtype, device=device, **{name: "constant"})
    accumulation = "float64" if dtype == torch.float64 else "float32"
    for got, scalar in SCALARS.items():
        if scalar != accumulation:
            message = f"expected {name} of dtype {accumulation} (with u of dtype {SCALARS[dtype]}), got {scalar}"
            assert_refuses(SELECTIVE, inputs | {name: inputs[name].to(got)}, RuntimeError, message)


@every_function
def test_dtype_of_the_first_tensor(function, device):
    inputs = function.inputs(device=device)
    ones = torch.ones(inputs[function.first].shape, device=device)
    for dtype, got in (INTEGERS | {torch.float8_e4m3fn: "float8_e4m3fn"}).items():
        message = f"expected {function.first} of dtype {FLOATS}, got {got}"
        assert_refuses(function, inputs | {function.first: ones.to(dtype)}, RuntimeError, message)


@every_function
def test_complex_is_not_supported(function, device):
    inputs = function.inputs(device=device)
    for name in tensor_names(inputs):
        if name == "A" and function.name.startswith("selective_s") and not function.name.endswith("summary"):
            continue  # complex states: test_selective_scan_complex.py
        message = f"expected a real {name}, got complex64: complex tensors are not supported"
        assert_refuses(function, inputs | {name: inputs[name].to(torch.complex64)}, RuntimeError, message)


@every_function
def test_dtypes_of_indices(function, device):
    for options in function.indices:
        inputs = function.inputs(device=device, **options)
        for name in inputs.keys() & {"seq_idx", "cu_seqlens", "state_batch_indices"}:
            for dtype, got in {torch.int16: "int16", torch.float32: "float32", torch.bool: "bool"}.items():
                if inputs[name] is not None:
                    message = f"expected {name} of dtype int32 or int64, got {got}"
                    assert_refuses(function, inputs | {name: inputs[name].to(dtype)}, RuntimeError, message)


@over([*RECURRENCES.values()])
def test_dtypes_of_resets(function, device):
    inputs = function.inputs(reset=True, device=device)
    for dtype in (torch.complex64, torch.complex128):
        message = (
            "expected reset of dtype bool, or of an integer or floating-point dtype in which any number but zero is a reset, "
            f"got {dtype}"
        )
        assert_refuses(function, inputs | {"reset": inputs["reset"].to(dtype)}, RuntimeError, message)


# ----- devices


@every_function
def test_mixed_devices(function, device):
    for options in function.indices:
        inputs = function.inputs(device=device, **options)
        on = inputs[function.first].device
        for name, value in inputs.items():
            if isinstance(value, Tensor) and name != function.first:
                message = f"expected {name} on {on} (the device of {function.first}), got meta"
                assert_refuses(function, inputs | {name: value.to("meta")}, RuntimeError, message, on_meta=False)


@pytest.mark.cuda
@every_function
def test_cpu_and_cuda_mixed(function):
    for options in function.indices:
        inputs = function.inputs(**options)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                expected, got = ("cuda:0", "cpu") if name == function.first else ("cpu", "cuda:0")
                message = rf"^{function.name}: expected \w+ on {expected} \(the device of {function.first}\), got {got}"
                with pytest.raises(RuntimeError, match=message):
                    function(**inputs | {name: value.to("cuda")})
