"""ssd_chunk_scan on CUDA: its kernels, and sequences that blocks split.

test_ssd_cuda_grad.py has the gradients, test_ssd_cuda_variants.py what is the same for all kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_equal, dtypes, no_synchronization
from ssd_helpers import OPTIONS, assert_matches_reference, every_method, every_option, make_inputs
from torch import Tensor

from ssm_kernels import ssd_chunk_scan

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("each_products")]

of_kernels = dtypes(torch.float32, torch.bfloat16, torch.float16)


def results_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    out, final_states = ssd_chunk_scan(**inputs, return_final_states=True)
    return {"out": out, "final_states": final_states}


@of_kernels
@every_option
def test_values(options, dtype):
    for sizes in ({"headdim": 64, "dstate": 128, "seqlen": 200}, {"headdim": 48, "dstate": 24, "seqlen": 65}):
        assert_matches_reference(make_inputs(dtype=dtype, device="cuda", **(sizes | options)), gradients=False)


@every_method
def test_discretizations(discretization):
    inputs = make_inputs(headdim=64, dstate=64, seqlen=100, dtype=torch.bfloat16, device="cuda", discretization=discretization)
    assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (6, 2), (6, 6), (9, 3)])
def test_heads_share_groups(heads, groups):
    inputs = make_inputs(heads=heads, groups=groups, headdim=64, dstate=64, seqlen=70, dtype=torch.bfloat16, device="cuda")
    assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("name", ["everything", "resets_with_states"])
@pytest.mark.parametrize("seqlen", [1000, 2048, 3001])
def test_sequences_longer_than_a_range(seqlen, name):
    """A batch of one with two heads is split along time, with resets."""
    options = OPTIONS[name] | ({"resets": ((2, 64, 65, 999),)} if name.startswith("resets") else {})
    sizes = {"batch": 1, "heads": 2, "groups": 1, "headdim": 64, "dstate": 64, "seqlen": seqlen}
    inputs = make_inputs(dtype=torch.bfloat16, device="cuda", **(sizes | options))
    assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("heads", [2, 60, 160])
def test_packed_sequences_in_ranges(heads):
    """With few heads a sequence is longer than a block's range of chunks, with many a range has several sequences."""
    offsets = (0, 0, 300, 364, 365, 1500, 1500, 2000)
    sizes = {"heads": heads, "groups": 1, "headdim": 64, "dstate": 64, "cu_seqlens": offsets}
    assert_matches_reference(make_inputs(dtype=torch.bfloat16, device="cuda", **sizes), gradients=False)


def test_many_packed_sequences():
    """More than one for each thread that counts their chunks."""
    lengths = torch.arange(2500) % 3
    offsets = (0, *torch.cumsum(lengths, 0).tolist())
    sizes = {"heads": 2, "groups": 1, "headdim": 8, "dstate": 8, "cu_seqlens": offsets}
    assert_matches_reference(make_inputs(dtype=torch.bfloat16, device="cuda", **sizes), gradients=False)


@pytest.mark.parametrize("heads", [3, 397])
def test_heads_without_a_partner_in_ranges(heads):
    """Longer than a range with few heads, in two ranges with many; padded rows and columns."""
    sizes = {"batch": 1, "heads": heads, "groups": 1, "headdim": 36, "dstate": 100, "seqlen": 700}
    assert_matches_reference(make_inputs(dtype=torch.float16, device="cuda", **sizes), gradients=False)


def test_a_sequence_in_two_ranges_has_the_bits_of_a_whole_one():
    """Two heads for each multiprocessor fill whole ranges; with half as many more, ranges begin inside sequences."""
    heads = 2 * torch.cuda.get_device_properties("cuda").multi_processor_count
    sizes = {"batch": 1, "heads": heads * 3 // 2, "groups": 1, "headdim": 64, "dstate": 128, "seqlen": 330}
    inputs = make_inputs(dtype=torch.bfloat16, device="cuda", **sizes)
    head_axes = {"x": 2, "dt": 2, "z": 2, "A": 0, "D": 0, "dt_bias": 0, "initial_states": 1}
    fewer = {
        name: value.narrow(head_axes[name], 0, heads) if name in head_axes and isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    cut, whole = results_of(inputs), results_of(fewer)
    assert_equal({"out": cut["out"][:, :, :heads], "final_states": cut["final_states"][:, :heads]}, whole)


MANY_HEADS = {"batch": 8, "heads": 80, "groups": 2, "headdim": 64, "dstate": 128, "seqlen": 330}


def test_rows_of_a_batch_with_many_heads():
    """Ranges that begin inside sequences and have several: the same as a call for each row of the batch."""
    inputs = make_inputs(**MANY_HEADS, dtype=torch.bfloat16, device="cuda")
    whole = results_of(inputs)
    batched = ("x", "dt", "B", "C", "z", "initial_states")
    for row in (0, 7):
        of_row = results_of({name: inputs[name][row : row + 1] if name in batched else inputs[name] for name in inputs})
        # The sequences of one row may be longer than ranges: then sums come in another order.
        for name, value in of_row.items():
            torch.testing.assert_close(value[0], whole[name][row], rtol=2e-2, atol=2e-2)


def test_rows_that_are_not_aligned():
    inputs = make_inputs(headdim=64, dstate=64, seqlen=70, dtype=torch.bfloat16, device="cuda")
    expected = results_of(inputs)
    for name in ("x", "z", "B", "C"):
        wider = torch.zeros(*inputs[name].shape[:3], 67, dtype=torch.bfloat16, device="cuda")
        wider[..., 1:65] = inputs[name]
        assert_equal(results_of(inputs | {name: wider[..., 1:65]}), expected)


def test_states_that_are_not_aligned():
    inputs = make_inputs(headdim=64, dstate=64, seqlen=70, dtype=torch.bfloat16, device="cuda")
    expected, states = results_of(inputs), inputs["initial_states"]
    apart = torch.cat([states.new_zeros(1), states.flatten()])[1:].view_as(states)
    assert_equal(results_of(inputs | {"initial_states": apart}), expected)


def test_a_step_that_forgets_everything():
    """Weak decays after one of e^-1e5 keep their accuracy, and one of e^-inf makes no NaN."""
    for strong in (-1e5, -float("inf")):
        inputs = make_inputs(heads=2, groups=1, headdim=64, dstate=64, seqlen=130, dtype=torch.bfloat16, device="cuda")
        inputs |= {"dt_softplus": False, "dt_bias": None, "A": torch.tensor([strong, -1.0], device="cuda")}
        inputs["dt"] = inputs["dt"].abs()
        assert_matches_reference(inputs, gradients=False)


def test_nothing_waits_for_the_device():
    inputs = make_inputs(headdim=64, dstate=64, seqlen=300, dtype=torch.bfloat16, device="cuda")
    with no_synchronization():
        results_of(inputs)
