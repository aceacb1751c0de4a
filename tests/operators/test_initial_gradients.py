"""The mirror of summaries: the gradient of the state before a span, from the gradients of the outputs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import recurrence_helpers
import selective_scan_helpers
import ssd_helpers
import test_operators_torch as generic
import torch
from helpers import METHODS, Draws, assert_as_accurate, dtypes, move_all, parameter_dtype
from operator_spec import with_gradients
from operators import over
from recurrence_helpers import PLAIN
from ssd_rounding import states_in_split_products
from summary_helpers import assert_within_a_rounding_per_step, cast
from torch import Tensor

import ssm_kernels
from ssm_kernels.ops import summaries
from ssm_kernels.reference import RECURRENCES, coefficients
from ssm_kernels.reference import summaries as reference_summaries
from ssm_kernels.reference.sequences import step_sizes

OPERATOR = "every operator"


def gate_and_reads(inputs: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Abar and what reads the states, silu(z) times u as the gradients of the outputs, (batch, seqlen, dim, dstate)."""
    exact = {name: cast(value, dtype) for name, value in move_all(inputs, "cpu").items()}
    bias, z, C, dim = exact["delta_bias"], exact["z"], exact["C"], exact["A"].shape[0]
    steps = step_sizes(exact["delta"], None if bias is None else bias[:, None], inputs["delta_softplus"])
    Abar, _ = coefficients(inputs["discretization"], steps.movedim(2, 1)[..., None], exact["A"])
    if C.dim() > 2:
        C = C if C.dim() == 4 else C[:, None]
        C = C.repeat_interleave(dim // C.shape[1], 1).movedim(3, 1)
    grad_y = exact["u"] if z is None else exact["u"] * torch.nn.functional.silu(z)
    return Abar, C * grad_y.movedim(2, 1)[..., None]


def mirrored(inputs: dict[str, Any]) -> dict[str, Any]:
    names = ("delta", "A", "C", "z", "delta_bias", "discretization", "delta_softplus", "seq_idx")
    return {name: inputs[name] for name in names}


def assert_matches_initial_gradient(inputs: dict[str, Any], a_rounding_per_step: bool = False) -> None:
    """The mirror with ``u`` as the gradients of the outputs: float64 to 1e-12, else by the low-precision rule."""
    seq_idx, dtype = inputs["seq_idx"], parameter_dtype(inputs["u"].dtype)
    begins = None if seq_idx is None else summaries._begins(seq_idx).cpu()
    actual = summaries._selective_scan_initial_gradient(inputs["u"], **mirrored(inputs)).cpu()
    exact, native = (reference_summaries.initial_gradient(*gate_and_reads(inputs, of), begins) for of in (torch.float64, dtype))
    if dtype == torch.float64:
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)
    elif a_rounding_per_step:
        assert_within_a_rounding_per_step(actual, exact, inputs["u"].shape[2])
    else:
        assert_as_accurate(actual, native, exact, "initial gradient")


@dtypes(torch.float64, torch.float32, torch.bfloat16, torch.float16)
@pytest.mark.parametrize("z", [False, True], ids=["no_z", "z"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("discretization", METHODS)
def test_initial_gradient_of_selective_scan(discretization, is_packed, z, dtype, device):
    resets = ((20, 60), (), (1,)) if is_packed else None
    sizes = {"batch": 3, "seqlen": 70, "dim": 6, "groups": 2, "resets": resets}
    options = {"discretization": discretization, "dtype": dtype, "device": device}
    assert_matches_initial_gradient(selective_scan_helpers.make_inputs(**sizes, **options, z=z))


# Around a tile of the CUDA kernel, 32 channels of 64 steps; and few channels of many steps, which are cut into segments there.
SPANS: dict[str, dict[str, Any]] = {
    **{f"{seqlen} steps": {"seqlen": seqlen} for seqlen in (0, 1, 63, 64, 65, 128, 129)},
    **{f"{dim} channels": {"dim": dim, "seqlen": 70} for dim in (1, 31, 32, 33, 70)},
    **{f"{dstate} states": {"dstate": dstate, "seqlen": 70} for dstate in (1, 8, 16, 17, 256)},
    "groups": {"dim": 64, "groups": 4, "seqlen": 70},
    "constant": {"B": "constant", "C": "constant", "seqlen": 70},
    "required_only": selective_scan_helpers.MINIMAL | {"seqlen": 70},
    **{f"segments, {seqlen} steps": {"batch": 1, "dim": 5, "seqlen": seqlen} for seqlen in (257, 1024, 4097)},
    "segments, groups": {"batch": 1, "dim": 64, "groups": 2, "dstate": 16, "seqlen": 3000},
    "segments, constant": {"batch": 1, "B": "constant", "C": "constant", "seqlen": 3001},
    "segments, no_z": {"batch": 1, "z": False, "seqlen": 3001},
    "segments, resets": {"batch": 1, "resets": ((2500,),), "seqlen": 3001},
    "rows": {"batch": 70, "dim": 70, "seqlen": 65},
    # Around lanes of two channels, groups and parts of steps, and tiles of 16 states.
    **{f"maps, {dim} channels": {"dim": dim, "dstate": 16, "seqlen": 70} for dim in (1, 127, 128, 130)},
    **{f"maps, {seqlen} steps": {"dstate": 13, "seqlen": seqlen} for seqlen in (31, 32, 33, 255, 256, 257, 600)},
    **{f"maps, {dstate} states": {"batch": 1, "dstate": dstate, "seqlen": 300} for dstate in (12, 24, 33, 50)},
    "maps, groups": {"dim": 66, "groups": 2, "dstate": 16, "seqlen": 300},
}


@dtypes(torch.float64, torch.float32, torch.bfloat16, torch.float16)
@pytest.mark.parametrize("sizes", SPANS.values(), ids=[*SPANS])
def test_initial_gradient_of_every_span(sizes, dtype, kernel, device):
    if device == "cpu" and "resets" not in sizes:  # only CUDA cuts time into segments
        sizes = sizes | {"seqlen": min(sizes["seqlen"], 600)}
    for layout in ("contiguous", "transposed"):
        inputs = selective_scan_helpers.make_inputs(**sizes, layout=layout, dtype=dtype, device=device)
        assert_matches_initial_gradient(inputs)
        # Transitions near 1, so that the last steps count.
        assert_matches_initial_gradient(inputs | {"A": 1e-3 * inputs["A"]}, a_rounding_per_step=True)


@dtypes(torch.float64, torch.float32)
def test_initial_gradient_of_expanded_tensors(dtype, kernel, device):
    inputs = selective_scan_helpers.make_inputs(seqlen=70, groups=2, dstate=16, dtype=dtype, device=device)
    inputs |= {name: inputs[name][:, :1].expand_as(inputs[name]) for name in ("u", "delta", "z", "C")}
    assert_matches_initial_gradient(inputs)


def test_initial_gradient_of_a_sequence_before_a_nan(device):
    inputs = selective_scan_helpers.make_inputs(seqlen=70, resets=((20,),), device=device)
    expected = summaries._selective_scan_initial_gradient(inputs["u"], **mirrored(inputs))
    for name in ("u", "delta", "z", "C"):
        inputs[name][..., 30] = torch.nan
    torch.testing.assert_close(summaries._selective_scan_initial_gradient(inputs["u"], **mirrored(inputs)), expected)


@dtypes(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize("resets", [None, ((20, 60), (), (130,))], ids=["whole", "packed"])
@pytest.mark.parametrize("log_decay", [False, True], ids=["step_sizes", "log_decay"])
def test_initial_gradient_of_ssd(log_decay, resets, dtype, device):
    options = {"batch": 3, "seqlen": 150, "heads": 4, "headdim": 32, "dstate": 64, "groups": 2, "resets": resets}
    inputs = ssd_helpers.make_inputs(**options, log_decay=log_decay, dtype=dtype, device=device)
    names = ("dt", "A", "dt_bias", "dt_softplus", "dt_limit", "discretization", "seq_idx", "log_decay")
    shared = {name: inputs[name] for name in names}
    actual = summaries._ssd_chunk_scan_initial_gradient(inputs["x"], C=inputs["C"], **shared)
    exact = {name: value.double().cpu() for name, value in inputs.items() if isinstance(value, Tensor)}
    if log_decay:
        transitions = exact["log_decay"].exp()
    else:
        transitions, _ = coefficients("zoh", step_sizes(exact["dt"], exact["dt_bias"], True), exact["A"])
    reads = exact["x"][..., None] * exact["C"].repeat_interleave(2, 2)[..., None, :]
    begins = None if resets is None else summaries._begins(inputs["seq_idx"]).cpu()
    expected = reference_summaries.initial_gradient(transitions[..., None, None], reads, begins)
    if ssd_helpers.has_16_bit_products(inputs):
        native = states_in_split_products(inputs["x"], B=inputs["C"], reverse=True, **shared)
        assert_as_accurate(actual.cpu(), native.cpu(), expected, "initial gradient")
    else:
        tolerance = 1e-12 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("reset", [False, True], ids=["whole", "reset"])
@over(PLAIN)
def test_initial_gradient_of_recurrences(operator, reset, reverse, device):
    inputs = recurrence_helpers.make_inputs(operator, reverse=reverse, reset=reset, device=device)
    names = operator.recurrence.inputs
    grad_h = Draws(2).normal(*operator.first(inputs).shape).to(device)
    options = {name: inputs[name] for name in (*operator.fixed, "reverse", "reset")}
    given = [inputs[name] for name in names]
    actual = summaries._linear_recurrence_initial_gradient(grad_h, operator.name, given, **options)
    a, _ = RECURRENCES[operator.name](**{name: inputs[name].cpu() for name in names}, **operator.fixed)
    begins = inputs["reset"].cpu() if reset else None
    expected = reference_summaries.initial_gradient(a.expand(grad_h.shape), grad_h.cpu(), begins, reverse)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_initial_gradient_of_packed_sequences(reverse, device):
    """Each sequence has that of a batch row of its steps."""
    a, grad_h = (Draws(seed).normal(1, 9, 4).to(device) for seed in (1, 2))
    offsets = torch.tensor(recurrence_helpers.PACKED, dtype=torch.int32, device=device)
    options = {"recurrence": "linear_scan", "reverse": reverse}
    actual = summaries._linear_recurrence_initial_gradient(grad_h, inputs=(a, a), cu_seqlens=offsets, **options)
    for row, (begin, end) in zip(actual, itertools.pairwise(recurrence_helpers.PACKED), strict=True):
        grad, gate = (x[:, begin:end] for x in (grad_h, a))
        expected = summaries._linear_recurrence_initial_gradient(grad, inputs=(gate, gate), **options)
        torch.testing.assert_close(row[None], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("z", [False, True], ids=["no_z", "z"])
@pytest.mark.parametrize("seqlen", [5, 300])
def test_initial_gradient_completes_that_of_the_scan(seqlen, z, device):
    """With ``decay`` times the gradient of the last state, it is what the scan's adjoint returns."""
    inputs = selective_scan_helpers.make_inputs(z=z, D=False, seqlen=seqlen, device=device)
    leaves = with_gradients(inputs, ["initial_state"])
    out, last_state = selective_scan_helpers.SELECTIVE_SCAN(**leaves)
    grad_out, grad_last_state = (Draws(1).normal(*x.shape).to(device) for x in (out, last_state))
    (expected,) = torch.autograd.grad((out, last_state), leaves["initial_state"], (grad_out, grad_last_state))
    shared = {name: inputs[name] for name in ("delta", "A", "delta_bias", "discretization", "delta_softplus")}
    of_outputs = summaries._selective_scan_initial_gradient(grad_out, C=inputs["C"], z=inputs["z"], **shared)
    decay = ssm_kernels.selective_scan_summary(inputs["u"], B=inputs["B"], **shared)[1]
    torch.testing.assert_close(of_outputs + decay * grad_last_state, expected, rtol=1e-12, atol=1e-12)


def test_opcheck_of_the_initial_gradients(device):
    options = {"dtype": torch.float32, "device": device}
    inputs = selective_scan_helpers.make_inputs(**options)
    for z in (inputs["z"], None):
        arguments = (*(inputs[name] for name in ("u", "delta", "A", "C")), z, inputs["delta_bias"], "zoh", True)
        torch.library.opcheck(generic.ops._selective_scan_initial_gradient.default, arguments)
    inputs = ssd_helpers.make_inputs(**options)
    arguments = [inputs[name] for name in ("x", "dt", "A", "C", "dt_bias")]
    torch.library.opcheck(
        generic.ops._ssd_chunk_scan_initial_gradient.default, (*arguments, True, 0.0, 1.0, inputs["seq_idx"], "zoh", None, None)
    )
