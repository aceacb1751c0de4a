"""ssd_chunk_scan: what bad arguments are told. A value or shape: ValueError; a dtype or device: RuntimeError."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from helpers import BAD_OFFSETS, says
from ssd_helpers import METHODS, PACKED, SEQUENCES, TENSORS, backward_arguments, make_inputs
from torch import Tensor

from ssm_kernels import ssd_chunk_scan
from ssm_kernels.reference import ALIASES, DISCRETIZATIONS

OPERATOR = "ssd_chunk_scan"
SIZES = {"batch": 2, "seqlen": 5, "heads": 4, "headdim": 3, "groups": 2, "dstate": 6}


def good_inputs(**options) -> dict:
    return make_inputs(**(SIZES | {"dtype": torch.float32, "D": "channel"} | options))


def assert_raises(inputs: dict, error: type[Exception], message: str) -> None:
    """The whole message, on the device and on meta."""
    for place in (None, "meta"):
        moved = {k: v.to(place) if place and isinstance(v, Tensor) else v for k, v in inputs.items()}
        with pytest.raises(error, match=rf"^{re.escape('ssd_chunk_scan: ' + message)}(\n|$)"):
            ssd_chunk_scan(**moved)


# ----- shapes

SEQUENCE = "(batch, seqlen, heads, headdim)"
MATRIX = "(batch, seqlen, groups, dstate)"

# Of each argument: its axes, its shape beside good inputs, and shapes that are wrong, sizes of 1 among them, which must not be
# broadcast.
SHAPES = {
    "dt": ("(batch, seqlen, heads)", (2, 5, 4), [(2, 5), (2, 5, 4, 3), (1, 5, 4), (2, 1, 4), (2, 5, 1), (2, 6, 4), (2, 4, 5)]),
    "A": ("(heads,)", (4,), [(3,), (1,), (), (4, 3), (4, 1), (4, 3, 6)]),
    "B": (MATRIX, (2, 5, 2, 6), [(1, 5, 2, 6), (3, 5, 2, 6), (2, 1, 2, 6), (2, 6, 2, 6)]),
    "C": (MATRIX, (2, 5, 2, 6), [(1, 5, 2, 6), (2, 4, 2, 6), (2, 5, 1, 6), (2, 5, 4, 6), (2, 5, 2, 1), (2, 5, 6), (2, 5, 12)]),
    "z": (SEQUENCE, (2, 5, 4, 3), [(2, 5, 12), (1, 5, 4, 3), (2, 1, 4, 3), (2, 5, 1, 3), (2, 5, 4, 1), (2, 5, 3, 4)]),
    "dt_bias": ("(heads,)", (4,), [(3,), (1,), (), (4, 3), (1, 4)]),
    "initial_states": (
        "(batch, heads, headdim, dstate)",
        (2, 4, 3, 6),
        [(1, 4, 3, 6), (2, 1, 3, 6), (2, 4, 6, 3), (2, 4, 3, 1), (4, 3, 6), (2, 12, 6)],
    ),
    "seq_idx": ("(batch, seqlen)", (2, 5), [(5,), (1, 5), (2, 1), (2, 4), (2, 6), (2, 5, 1)]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, device):
    axes, expected, wrong = SHAPES[name]
    for shape in wrong:
        dtype = torch.int32 if name == "seq_idx" else torch.float32
        inputs = good_inputs(device=device) | {name: torch.zeros(shape, dtype=dtype, device=device)}
        assert_raises(inputs, ValueError, f"expected {name} of shape {axes} = {[*expected]}, got {[*shape]}")


@pytest.mark.parametrize(("name", "axes"), [("x", SEQUENCE), ("B", MATRIX)])
def test_ranks(name, axes, device):
    for shape in ((2, 5, 12), (2, 5, 4, 3, 1), (5,), ()):
        inputs = good_inputs(device=device) | {name: torch.zeros(shape, device=device)}
        assert_raises(inputs, ValueError, f"expected {name} of shape {axes}, got {[*shape]}")


def test_shapes_of_D(device):
    for shape in ((), (4, 3, 1), (3,), (1,), (12,), (3, 4), (4, 1), (1, 3), (2, 3)):
        inputs = good_inputs(device=device) | {"D": torch.zeros(shape, device=device)}
        expected = "expected D of shape (heads,) = [4] or (heads, headdim) = [4, 3]"
        assert_raises(inputs, ValueError, f"{expected}, got {[*shape]}")


def test_groups_that_do_not_divide_the_heads(device):
    for groups in (3, 5, 8, 0):
        inputs = good_inputs(device=device)
        inputs |= {name: torch.zeros(2, 5, groups, 6, device=device) for name in ("B", "C")}
        assert_raises(inputs, ValueError, f"expected the groups of B and C to divide heads = 4, got {groups}")


def test_headdim_and_dstate_over_the_limit(device):
    ssd_chunk_scan(**make_inputs(seqlen=2, headdim=256, dstate=256, device=device))
    for name, size in (("headdim", 257), ("dstate", 257), ("headdim", 0), ("dstate", 0)):
        inputs = make_inputs(**{"seqlen": 2, "dtype": torch.float32, "device": device, name: size})
        assert_raises(inputs, ValueError, f"expected {name} from 1 to 256, got {size}")


# ----- options


def test_chunk_size(device):
    for chunk_size in (0, -1, -64):
        inputs = good_inputs(chunk_size=chunk_size, device=device)
        assert_raises(inputs, ValueError, f"expected chunk_size of at least 1, got {chunk_size}")
    for chunk_size in (1, 2**40):
        ssd_chunk_scan(**good_inputs(chunk_size=chunk_size, device=device))


def test_limits_of_the_step_size(device):
    for low, high in ((0.2, 0.1), (1.0, 0.0), (math.inf, 0.0), (math.nan, 1.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match=says("ssd_chunk_scan: expected dt_limit = (min, max) with min <= max, got (")):
            ssd_chunk_scan(**good_inputs(dt_limit=(low, high), device=device))
    message = "expected dt_limit = (min, max) with min <= max, got (0.5, 0.25)"
    assert_raises(good_inputs(dt_limit=(0.5, 0.25), device=device), ValueError, message)
    for limits in ((0.1,), (0.0, 1.0, 2.0), ()):
        message = f"expected dt_limit = (min, max), got {len(limits)} numbers"
        assert_raises(good_inputs(dt_limit=limits, device=device), ValueError, message)
    assert_raises(good_inputs(dt_limit=0.1, device=device), ValueError, "expected dt_limit = (min, max), got 0.1")


@pytest.mark.parametrize("name", sorted(DISCRETIZATIONS.keys() - set(METHODS)))
def test_discretizations_that_are_not_exponential(name, device):
    """They are known, and others are listed."""
    with pytest.raises(ValueError, match=says(f"ssd_chunk_scan: discretization '{name}' is not supported")) as error:
        ssd_chunk_scan(**good_inputs(discretization=name, device=device))
    listed = str(error.value).splitlines()[0].partition("expected one of: ")[2].split(", ")
    assert sorted(listed) == sorted((*METHODS, *ALIASES))


@pytest.mark.parametrize("name", ["", "ZOH", "zoh ", "tustin"])
def test_unknown_discretization(name, device):
    expected = says(
        "ssd_chunk_scan: unknown discretization ", name, "expected one of: zoh, zoh_exact, poly, highorder, rk4, foh"
    )
    with pytest.raises(ValueError, match=expected + "$"):
        ssd_chunk_scan(**good_inputs(discretization=name, device=device))


# ----- sequences


def test_both_kinds_of_sequences(device):
    inputs = good_inputs(cu_seqlens=PACKED, device=device)
    inputs["seq_idx"] = torch.zeros(1, 9, dtype=torch.int32, device=device)
    assert_raises(inputs, ValueError, "expected seq_idx or cu_seqlens, got both: each says where sequences begin")


@pytest.mark.parametrize("offsets", BAD_OFFSETS, ids=str)
def test_values_of_offsets(offsets, device):
    for dtype in (torch.int32, torch.int64):
        inputs = good_inputs(cu_seqlens=(0, 10), initial_states=False, device=device)
        inputs["cu_seqlens"] = torch.tensor(offsets, dtype=dtype, device=device)
        with pytest.raises(ValueError, match=says(f"ssd_chunk_scan: expected cu_seqlens {BAD_OFFSETS[offsets]}")):
            ssd_chunk_scan(**inputs)


def test_offsets_with_a_batch(device):
    for batch in (0, 2):
        inputs = good_inputs(batch=batch, initial_states=False, device=device)
        inputs["cu_seqlens"] = torch.tensor([0, 5], device=device)
        assert_raises(inputs, ValueError, f"expected batch 1 with cu_seqlens, got {batch}")


def test_shape_of_offsets(device):
    for shape in ((0,), (), (1, 3)):
        inputs = good_inputs(batch=1, initial_states=False, device=device)
        inputs["cu_seqlens"] = torch.zeros(shape, dtype=torch.int64, device=device)
        assert_raises(inputs, ValueError, f"expected cu_seqlens of shape (sequences + 1,), got {[*shape]}")


def test_initial_states_of_packed_sequences(device):
    inputs = good_inputs(cu_seqlens=PACKED, device=device)
    inputs["initial_states"] = inputs["initial_states"][:1]
    expected = "expected initial_states of shape (sequences, heads, headdim, dstate) = [7, 4, 3, 6], got [1, 4, 3, 6]"
    assert_raises(inputs, ValueError, expected)


INTEGERS = {torch.int16: "Short", torch.float32: "Float", torch.bool: "Bool"}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_dtypes_of_sequences(dtype, device):
    inputs = good_inputs(cu_seqlens=(0, 1), initial_states=False, device=device)
    inputs["cu_seqlens"] = inputs["cu_seqlens"].to(dtype)
    assert_raises(inputs, RuntimeError, f"expected cu_seqlens of dtype Int or Long, got {INTEGERS[dtype]}")
    inputs = good_inputs(resets=((2,),), device=device)
    inputs["seq_idx"] = inputs["seq_idx"].to(dtype)
    assert_raises(inputs, RuntimeError, f"expected seq_idx of dtype Int or Long, got {INTEGERS[dtype]}")


# ----- dtypes and devices

SCALARS = {torch.float64: "Double", torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}


@pytest.mark.parametrize("dtype", SCALARS, ids=str)
def test_mixed_dtypes(dtype, device):
    """Sequences have the dtype of x, parameters and states the accumulation dtype."""
    inputs = good_inputs(dtype=dtype, device=device)
    accumulation = "Double" if dtype == torch.float64 else "Float"
    for name in TENSORS[1:]:
        expected = SCALARS[dtype] if name in SEQUENCES else accumulation
        for got, scalar in (SCALARS | {torch.int64: "Long"}).items():
            if scalar != expected:
                message = f"expected {name} of dtype {expected} (with x of dtype {SCALARS[dtype]}), got {scalar}"
                assert_raises(inputs | {name: inputs[name].to(got)}, RuntimeError, message)


def test_dtype_of_x(device):
    for dtype, got in ((torch.int64, "Long"), (torch.bool, "Bool"), (torch.float8_e4m3fn, "Float8_e4m3fn")):
        inputs = good_inputs(device=device)
        inputs["x"] = torch.ones(inputs["x"].shape, device=device).to(dtype)
        assert_raises(inputs, RuntimeError, f"expected x of dtype Float, Half, BFloat16 or Double, got {got}")


@pytest.mark.parametrize("name", TENSORS)
def test_complex_is_not_supported(name, device):
    inputs = good_inputs(device=device)
    inputs[name] = inputs[name].to(torch.complex64)
    message = f"expected a real {name}, got ComplexFloat: complex tensors are not supported"
    assert_raises(inputs, RuntimeError, message)


def test_mixed_devices(device):
    for options in ({"resets": ((2,),)}, {"cu_seqlens": PACKED}):
        inputs = good_inputs(device=device, **options)
        for name in (*TENSORS[1:], "seq_idx" if "resets" in options else "cu_seqlens"):
            message = f"ssd_chunk_scan: expected {name} on {inputs['x'].device} (the device of x), got meta"
            with pytest.raises(RuntimeError, match=says(message)):
                ssd_chunk_scan(**inputs | {name: inputs[name].to("meta")})


@pytest.mark.cuda
def test_cpu_and_cuda_mixed():
    inputs = good_inputs(cu_seqlens=PACKED)
    for name in (*TENSORS, "cu_seqlens"):
        expected, got = ("cuda:0", "cpu") if name == "x" else ("cpu", "cuda:0")
        with pytest.raises(RuntimeError, match=says("ssd_chunk_scan: expected ", f" on {expected}", f", got {got}")):
            ssd_chunk_scan(**inputs | {name: inputs[name].to("cuda")})


# ----- the function


def test_required_arguments(device):
    for name in ("x", "dt", "A", "B", "C"):
        inputs = good_inputs(device=device)
        del inputs[name]
        with pytest.raises(TypeError, match=name):
            ssd_chunk_scan(**inputs)


def test_options_are_keyword_only(device):
    """mamba_ssm's function takes chunk_size as its sixth argument: here it would be taken for another one."""
    inputs = good_inputs(device=device)
    with pytest.raises(TypeError, match="positional"):
        ssd_chunk_scan(*(inputs[name] for name in ("x", "dt", "A", "B", "C")), 64)
    kinds = [p.kind for p in inspect.signature(ssd_chunk_scan).parameters.values()]
    assert set(kinds[5:]) == {inspect.Parameter.KEYWORD_ONLY}


def test_bad_arguments_leave_no_trace(device):
    """After an error the next call works."""
    inputs = good_inputs(device=device)
    expected = ssd_chunk_scan(**inputs)
    with pytest.raises(ValueError, match="expected initial_states"):
        ssd_chunk_scan(**inputs | {"initial_states": inputs["initial_states"][:1]})
    assert torch.equal(ssd_chunk_scan(**inputs), expected)


def test_incoming_gradients_of_the_wrong_shape(device):
    """Errors of the internal operator, which autograd itself never causes."""
    arguments = backward_arguments(good_inputs(device=device))
    torch.ops.ssm_kernels._ssd_chunk_scan_bwd(*arguments)
    for index, shape in ((0, (2, 4, 4, 3)), (1, (1, 4, 3, 6))):
        wrong = [*arguments]
        wrong[index] = torch.zeros(shape, device=device)
        name = ("grad_out", "grad_final_states")[index]
        with pytest.raises(ValueError, match=says(f"expected {name} of shape ", f"got {[*shape]}")):
            torch.ops.ssm_kernels._ssd_chunk_scan_bwd(*wrong)
