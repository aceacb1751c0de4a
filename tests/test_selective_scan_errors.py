"""selective_scan: what bad arguments are told. A value or shape is a ValueError, a dtype or device a RuntimeError."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import says
from selective_scan_helpers import make_inputs

from ssm_kernels import selective_scan
from ssm_kernels.reference import ALIASES, DISCRETIZATIONS

OPERATOR = "selective_scan"
SIZES = {"batch": 2, "dim": 6, "seqlen": 5, "dstate": 3, "groups": 2}


def good_inputs(**options) -> dict:
    return make_inputs(**(SIZES | {"dtype": torch.float32} | options))


def test_good_inputs_are_accepted(device):
    selective_scan(**good_inputs(device=device))


# name, shape, what is expected of it
WRONG_RANKS = [
    ("u", (6, 5), "(batch, dim, seqlen)"),
    ("u", (2, 6, 5, 1), "(batch, dim, seqlen)"),
    ("u", (), "(batch, dim, seqlen)"),
    ("delta", (6, 5), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("delta", (2, 6, 5, 1), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("A", (6,), "(dim, dstate)"),
    ("A", (2, 6, 3), "(dim, dstate)"),
    ("B", (6,), "(dim, dstate), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen)"),
    ("B", (1, 2, 2, 3, 5), "(batch, groups, dstate, seqlen)"),
    ("C", (6,), "(dim, dstate), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen)"),
    ("C", (1, 2, 2, 3, 5), "(batch, groups, dstate, seqlen)"),
    ("D", (1, 6), "(dim,) = [6]"),
    ("z", (6, 5), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("delta_bias", (6, 1), "(dim,) = [6]"),
    ("initial_state", (6, 3), "(batch, dim, dstate) = [2, 6, 3]"),
]

# Each size of each argument, too large, too small, and 1, which must not be broadcast.
WRONG_SIZES = [
    ("delta", (3, 6, 5), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("delta", (2, 7, 5), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("delta", (2, 6, 4), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("delta", (1, 6, 5), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("delta", (2, 1, 5), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("delta", (2, 6, 1), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("A", (5, 3), "(dim, dstate) = [6, 3]"),
    ("A", (1, 3), "(dim, dstate) = [6, 3]"),
    ("B", (3, 2, 3, 5), "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]"),
    ("B", (2, 2, 4, 5), "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]"),
    ("B", (2, 2, 3, 6), "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]"),
    ("B", (1, 2, 3, 5), "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]"),
    ("B", (2, 2, 3, 1), "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]"),
    ("B", (1, 3, 5), "(batch, dstate, seqlen) = [2, 3, 5]"),
    ("B", (2, 1, 5), "(batch, dstate, seqlen) = [2, 3, 5]"),
    ("B", (2, 3, 4), "(batch, dstate, seqlen) = [2, 3, 5]"),
    ("B", (1, 3), "(dim, dstate) = [6, 3]"),
    ("B", (6, 4), "(dim, dstate) = [6, 3]"),
    ("C", (3, 2, 3, 5), "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]"),
    ("C", (2, 2, 2, 5), "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]"),
    ("C", (2, 2, 3, 4), "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]"),
    ("C", (2, 2, 1, 5), "(batch, groups, dstate, seqlen) = [2, 2, 3, 5]"),
    ("C", (1, 3, 5), "(batch, dstate, seqlen) = [2, 3, 5]"),
    ("C", (2, 3, 1), "(batch, dstate, seqlen) = [2, 3, 5]"),
    ("C", (1, 3), "(dim, dstate) = [6, 3]"),
    ("C", (6, 2), "(dim, dstate) = [6, 3]"),
    ("D", (7,), "(dim,) = [6]"),
    ("D", (1,), "(dim,) = [6]"),
    ("z", (1, 6, 5), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("z", (2, 7, 5), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("z", (2, 6, 1), "(batch, dim, seqlen) = [2, 6, 5]"),
    ("delta_bias", (5,), "(dim,) = [6]"),
    ("delta_bias", (1,), "(dim,) = [6]"),
    ("initial_state", (1, 6, 3), "(batch, dim, dstate) = [2, 6, 3]"),
    ("initial_state", (2, 5, 3), "(batch, dim, dstate) = [2, 6, 3]"),
    ("initial_state", (2, 6, 4), "(batch, dim, dstate) = [2, 6, 3]"),
]


@pytest.mark.parametrize(("name", "shape", "expected"), WRONG_RANKS + WRONG_SIZES)
def test_shapes(name, shape, expected, device):
    inputs = good_inputs(device=device) | {name: torch.zeros(shape, device=device)}
    for place in (device, "meta"):
        moved = {k: v.to(place) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        with pytest.raises(
            ValueError, match=says(f"selective_scan: expected {name} of shape ", expected, ", got ", str([*shape]))
        ):
            selective_scan(**moved)


def test_message_in_full(device):
    """The form that every message about a shape has."""
    inputs = make_inputs(batch=2, dim=4, seqlen=64, dstate=16, groups=1, device=device)
    inputs["B"] = inputs["B"][:, :, :8]
    message = "selective_scan: expected B of shape (batch, groups, dstate, seqlen) = [2, 1, 16, 64], got [2, 1, 8, 64]"
    with pytest.raises(ValueError, match=re.escape(message)):
        selective_scan(**inputs)


@pytest.mark.parametrize("name", ["B", "C"])
@pytest.mark.parametrize("groups", [4, 5, 12])
def test_groups_that_do_not_divide_dim(groups, name, device):
    inputs = good_inputs(device=device) | {name: torch.zeros(2, groups, 3, 5, device=device)}
    with pytest.raises(ValueError, match=says("selective_scan: ", name, "6", str(groups))) as error:
        selective_scan(**inputs)
    assert "groups" in str(error.value) and "divide" in str(error.value)


@pytest.mark.parametrize("name", ["B", "C"])
def test_zero_groups(name, device):
    inputs = good_inputs(device=device) | {name: torch.zeros(2, 0, 3, 5, device=device)}
    with pytest.raises(ValueError, match=says("selective_scan: ", name)):
        selective_scan(**inputs)


def test_dstate_above_the_limit(device):
    selective_scan(**make_inputs(dstate=256, seqlen=2, device=device))
    with pytest.raises(ValueError, match=says("selective_scan: ", "dstate", "256", "257")):
        selective_scan(**make_inputs(dstate=257, seqlen=2, device=device))


@pytest.mark.parametrize("name", ["", "ZOH", "zoh ", "tustin", "foh_ramp"])
def test_unknown_discretization_lists_the_known(name, device):
    with pytest.raises(ValueError, match=says("selective_scan: unknown discretization ", name)) as error:
        selective_scan(**good_inputs(device=device) | {"discretization": name})
    for known in [*DISCRETIZATIONS, *ALIASES]:
        assert re.search(rf"\b{known}\b", str(error.value)), f"{known} is not listed"


@pytest.mark.parametrize("name", list(DISCRETIZATIONS) + list(ALIASES))
def test_known_discretizations_are_accepted(name, device):
    selective_scan(**good_inputs(device=device) | {"discretization": name})


@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"])
def test_complex_is_not_supported(name, device):
    inputs = good_inputs(device=device)
    inputs[name] = inputs[name].to(torch.complex64)
    with pytest.raises(RuntimeError, match=says("selective_scan: expected ", name)) as error:
        selective_scan(**inputs)
    assert re.search(r"complex.*not supported", str(error.value))


@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers(dtype, name, device):
    inputs = good_inputs(device=device)
    inputs[name] = torch.ones(inputs[name].shape, dtype=dtype, device=device)
    got = {torch.int64: "Long", torch.int32: "Int", torch.uint8: "Byte", torch.bool: "Bool"}[dtype]
    with pytest.raises(RuntimeError, match=says(f"selective_scan: expected {name} of dtype ", ", got ", got)):
        selective_scan(**inputs)


MIXED_DTYPES = [
    # dtype of the rest, argument, its dtype, what is expected
    (torch.float32, "delta", torch.float64, "Float"),
    (torch.float32, "delta", torch.bfloat16, "Float"),
    (torch.bfloat16, "delta", torch.float32, "BFloat16"),
    (torch.float16, "delta", torch.bfloat16, "Half"),
    (torch.float32, "B", torch.bfloat16, "Float"),
    (torch.bfloat16, "B", torch.float32, "BFloat16"),
    (torch.bfloat16, "C", torch.float16, "BFloat16"),
    (torch.float16, "z", torch.float32, "Half"),
    (torch.bfloat16, "A", torch.bfloat16, "Float"),
    (torch.float32, "A", torch.float64, "Float"),
    (torch.float64, "A", torch.float32, "Double"),
    (torch.float16, "D", torch.float16, "Float"),
    (torch.float64, "D", torch.float32, "Double"),
    (torch.bfloat16, "delta_bias", torch.bfloat16, "Float"),
    (torch.bfloat16, "initial_state", torch.bfloat16, "Float"),
    (torch.float32, "initial_state", torch.float64, "Float"),
    (torch.float64, "u", torch.float32, None),
    (torch.float32, "u", torch.bfloat16, None),
]


@pytest.mark.parametrize(("dtype", "name", "got", "expected"), MIXED_DTYPES)
def test_mixed_dtypes(dtype, name, got, expected, device):
    inputs = good_inputs(dtype=dtype, device=device)
    inputs[name] = inputs[name].to(got)
    if expected is None:  # u sets the dtype, so that the next argument is the one that differs
        pattern = says("selective_scan: expected delta of dtype ", ", got ")
    else:
        scalar = {torch.float64: "Double", torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}[got]
        pattern = says(f"selective_scan: expected {name} of dtype {expected} ", f", got {scalar}")
    with pytest.raises(RuntimeError, match=pattern):
        selective_scan(**inputs)


@pytest.mark.parametrize("name", ["B", "C"])
def test_constant_matrix_has_the_dtype_of_A(name, device):
    inputs = good_inputs(dtype=torch.bfloat16, device=device, **{name: "constant"})
    inputs[name] = inputs[name].to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=says(f"selective_scan: expected {name} of dtype Float ", ", got BFloat16")):
        selective_scan(**inputs)


def test_float8_is_not_supported(device):
    inputs = good_inputs(device=device)
    inputs["u"] = inputs["u"].to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=says("selective_scan: expected u of dtype ", ", got ")):
        selective_scan(**inputs)


OTHERS = ["delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"]


@pytest.mark.parametrize("name", OTHERS)
def test_mixed_devices(name, device):
    inputs = good_inputs(device=device)
    inputs[name] = inputs[name].to("meta")
    with pytest.raises(RuntimeError, match=says(f"selective_scan: expected {name} on {device}", ", got meta")):
        selective_scan(**inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["u", *OTHERS])
def test_cpu_and_cuda_mixed(name):
    inputs = good_inputs(device="cpu")
    inputs[name] = inputs[name].to("cuda")
    expected, got = ("cuda:0", "cpu") if name == "u" else ("cpu", "cuda:0")
    with pytest.raises(RuntimeError, match=says("selective_scan: expected ", f" on {expected}", f", got {got}")):
        selective_scan(**inputs)


@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C"])
def test_required_arguments(name, device):
    inputs = good_inputs(device=device)
    del inputs[name]
    with pytest.raises(TypeError, match=name):
        selective_scan(**inputs)


def test_options_are_keyword_only(device):
    inputs = good_inputs(device=device)
    tensors = [inputs[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    with pytest.raises(TypeError, match="positional"):
        selective_scan(*tensors, "zoh")


def test_bad_arguments_leave_no_trace(device):
    """After an error the next call works."""
    inputs = good_inputs(device=device)
    expected = selective_scan(**inputs)
    with pytest.raises(ValueError, match="expected A"):
        selective_scan(**inputs | {"A": inputs["A"][:3]})
    assert torch.equal(selective_scan(**inputs), expected)
