"""Reset masks of linear_scan's family: a sequence that starts anew is a new sequence with the same h0."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import dtypes
from operator_spec import tensor_names
from recurrence_helpers import (
    LINEAR,
    MINLSTM,
    RESETS,
    Variant,
    assert_all_close,
    at_steps,
    evaluate,
    every_recurrence,
    every_variant,
    make_inputs,
)
from test_linear_scan_grad import leaves_and_scan
from torch import Tensor

OPERATOR = "linear_scan"

every_reset = pytest.mark.parametrize("options", RESETS.values(), ids=list(RESETS))


def one_by_one(variant: Variant, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The scan of each row's sequences, one call each, and the last state of each row's last sequence in time."""
    reset, rows, last_states = inputs["reset"], [], []
    batch, seqlen = reset.shape
    for row in range(batch):
        # With reverse a sequence starts at its last step.
        starts = [t + inputs["reverse"] for t in reset[row].nonzero().flatten().tolist()]
        bounds = sorted({0, seqlen, *starts})
        of_row = inputs | {name: value[row : row + 1] for name, value in inputs.items() if is_of_rows(value, batch)}
        parts = []
        for begin, end in itertools.pairwise(bounds):
            alone = at_steps(variant, of_row | {"reset": None}, slice(begin, end))
            parts.append(variant.scan(**alone, return_last_state=True))
        rows.append(torch.cat([h for h, _ in parts], dim=1))
        last_states.append(parts[0 if inputs["reverse"] else -1][1])
    return torch.cat(rows), torch.cat(last_states)


def is_of_rows(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == batch


@every_reset
@every_variant
def test_resets_are_sequences_one_by_one(variant, options, device):
    """Outputs and all gradients, that of h0 included."""
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(variant, batch=3, seqlen=40, channels=9, dtype=dtype, device=device, **options)
        names = tensor_names(inputs)
        cotangents = variant.make_cotangents(inputs)
        found = []
        for function in (
            lambda **given: variant.scan(**given, return_last_state=True),
            lambda **given: one_by_one(variant, given),
        ):
            leaves = {name: inputs[name].detach().requires_grad_() for name in names}
            results = function(**(inputs | leaves))
            gradients = torch.autograd.grad(results, list(leaves.values()), cotangents)
            found.append(dict(zip(("h", "last_state", *names), (*results, *gradients), strict=True)))
        for name, actual in found[0].items():
            tolerance = 1e-11 if dtype == torch.float64 else 1e-4
            torch.testing.assert_close(
                actual, found[1][name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@every_reset
@dtypes()
@every_recurrence
def test_values_and_gradients(variant, dtype, options, device):
    for sizes in ({"seqlen": 70, "channels": 37}, {"seqlen": 1}, {"seqlen": 0}, {"batch": 0}, {"channels": 0}):
        variant.assert_matches_reference(make_inputs(variant, dtype=dtype, device=device, **(options | sizes)))


@pytest.mark.parametrize("layout", ["transposed", "permuted", "offset", "sliced"])
@every_reset
def test_layouts(layout, options, device):
    for variant, dtype in itertools.product((LINEAR, MINLSTM), (torch.float64, torch.bfloat16)):
        inputs = make_inputs(variant, seqlen=70, channels=33, dtype=dtype, layout=layout, device=device, **options)
        variant.assert_matches_reference(inputs)


@every_reset
def test_strides_of_the_mask(options, device):
    """A row for the whole batch, every second step of a longer one, and time first."""
    inputs = make_inputs(LINEAR, seqlen=33, device=device, **options)
    row = inputs["reset"][:1]
    for mask in (
        row.expand(2, 33),
        row.repeat_interleave(2, dim=1)[:, ::2].expand(2, 33),
        row.expand(2, 33).t().contiguous().t(),
    ):
        LINEAR.assert_matches_reference(inputs | {"reset": mask})


@every_reset
@every_variant
def test_gradcheck(variant, options, device):
    leaves, scan = leaves_and_scan(variant, make_inputs(variant, channels=2, seqlen=5, device=device, **options))
    assert torch.autograd.gradcheck(scan, leaves)


@every_reset
def test_gradgradcheck(options, device):
    leaves, scan = leaves_and_scan(LINEAR, make_inputs(LINEAR, channels=2, seqlen=5, device=device, **options))
    assert torch.autograd.gradgradcheck(scan, leaves)


@every_reset
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_gradients_that_have_a_graph_are_as_exact_as_those_without(autocast, options, device):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(LINEAR, seqlen=300, channels=5, dtype=dtype, device=device, **options)
        leaves, scan = leaves_and_scan(LINEAR, inputs)
        results, cotangents = scan(*leaves), LINEAR.make_cotangents(inputs)
        plain = torch.autograd.grad(results, leaves, cotangents, retain_graph=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            differentiable = torch.autograd.grad(results, leaves, cotangents, create_graph=True)
        for actual, expected in zip(differentiable, plain, strict=True):
            tolerance = 2e-6 if expected.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=2e-5)


@every_recurrence
def test_masks_without_and_with_every_reset(variant, device):
    for dtype, reverse in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        inputs = make_inputs(variant, seqlen=35, dtype=dtype, reverse=reverse, device=device)
        cotangents = variant.make_cotangents(inputs)
        plain = evaluate(variant, inputs, cotangents)
        mask = torch.zeros(2, 35, dtype=torch.bool, device=device)
        if device == "cpu":  # the mask takes other tiles on CUDA
            assert_all_close(evaluate(variant, inputs | {"reset": mask}, cotangents), plain, 0)
        mask[:, -1 if reverse else 0] = True  # the first step starts a sequence anyway
        with_first = evaluate(variant, inputs | {"reset": mask}, cotangents)
        assert_all_close(with_first, evaluate(variant, inputs | {"reset": mask & False}, cotangents), 0)
        variant.assert_matches_reference(inputs | {"reset": ~(mask & False)})


@every_reset
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@every_recurrence
def test_nonfinite_numbers_do_not_cross_a_reset(variant, value, options, device):
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(variant, seqlen=70, channels=9, form="full", dtype=dtype, device=device, **options)
        inputs["reset"] = torch.zeros(2, 70, dtype=torch.bool, device=device)
        inputs["reset"][:, [20, 40]] = True
        # One sequence of three, between the resets.
        middle = slice(21, 41) if inputs["reverse"] else slice(20, 40)
        clean = evaluate(variant, inputs)
        cotangents = variant.make_cotangents(inputs)
        clean_gradients = evaluate(variant, inputs, cotangents)
        for name in variant.recurrence.inputs:
            touched = inputs | {name: inputs[name].clone()}
            touched[name][1, 30, 3] = value
            h = evaluate(variant, touched)["h"]
            inside = torch.zeros_like(h, dtype=torch.bool)
            inside[1, middle, 3] = True
            assert torch.equal(h[~inside], clean["h"][~inside]), name
            gradients = evaluate(variant, touched, cotangents)
            for other in variant.recurrence.inputs:
                of_other = gradients[f"grad_{other}"]
                assert torch.equal(of_other[~inside], clean_gradients[f"grad_{other}"][~inside]), f"{other} of {name}"


@pytest.mark.cuda
@every_reset
def test_cuda_graph(options):
    draws = [make_inputs(MINLSTM, seqlen=300, dtype=torch.float32, device="cuda", seed=seed, **options) for seed in range(3)]
    MINLSTM.assert_replays(draws)
