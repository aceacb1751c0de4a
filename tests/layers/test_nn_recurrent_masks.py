"""Masks of resets and lengths of padded batches, as users of torch.nn.GRU have them, for layers, scans and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import says
from layer_helpers import (
    HIDDEN,
    IN,
    assert_all_close,
    assert_same_gradients,
    every_recurrence,
    make_layer,
    make_sequence,
)
from plain_layers import parameters_of
from recurrence_helpers import RECURRENCES
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ssm_kernels
from ssm_kernels.nn import Liquid, MinGRU

OPERATOR = "linear_scan"
DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float64)
# The names of the inputs of each recurrence beside its state.
INPUTS = {name.removesuffix("_scan"): tuple(recurrence.inputs) for name, recurrence in RECURRENCES.items()}
every_operator = pytest.mark.parametrize("operator", INPUTS)


def inputs_of(operator: str, *shape: int, device: str) -> dict[str, Tensor]:
    """Inputs in (0, 1), which every recurrence takes."""
    inputs = {name: make_sequence(*shape, device=device, seed=i).sigmoid() for i, name in enumerate(INPUTS[operator])}
    if "recurrent_param" in inputs:
        inputs["recurrent_param"] = inputs["recurrent_param"].reshape(-1, shape[-1])[0]
    return inputs


@every_operator
def test_scans_take_masks_of_any_form(operator, device):
    scan, inputs = getattr(ssm_kernels, f"{operator}_scan"), inputs_of(operator, 2, 7, 3, device=device)
    reset = torch.zeros(2, 7, dtype=torch.bool, device=device)
    reset[0, 3] = reset[1, 0] = True
    expected = scan(**inputs, reset=reset)
    assert not torch.equal(expected, scan(**inputs))
    for dtype in DTYPES:
        for mask in (reset.to(dtype), reset.to(dtype)[..., None], -reset.to(dtype) if dtype != torch.bool else reset):
            assert torch.equal(scan(**inputs, reset=mask), expected), (dtype, mask.shape)
    with pytest.raises(RuntimeError, match=says(f"{operator}_scan: expected reset of dtype bool, or of an integer")):
        scan(**inputs, reset=reset.to(torch.complex64))
    with pytest.raises(ValueError, match=says(f"{operator}_scan: expected reset of shape (batch, seqlen) = [2, 7]")):
        scan(**inputs, reset=reset[..., None].expand(2, 7, 2).float())
    with pytest.raises(TypeError, match=says(f"{operator}_scan: expected reset to be a tensor or None, got list")):
        scan(**inputs, reset=[[True]])


@every_operator
def test_steps_reset_rows(operator, device):
    """Rows with a reset begin at zero, in values and gradients, whatever their state holds: NaN leaves no trace."""
    step, inputs = getattr(ssm_kernels, f"{operator}_step"), inputs_of(operator, 3, 5, device=device)
    reset = torch.tensor([True, False, True], device=device)
    state = make_sequence(3, 5, device=device, seed=9)
    kept = torch.where(reset[:, None], 0, state)
    state[0] = torch.nan
    state.requires_grad_()
    expected = step(**inputs, state=kept)
    for dtype in DTYPES:
        for mask in (reset.to(dtype), reset.to(dtype)[:, None]):
            assert_all_close(step(**inputs, state=state, reset=mask), expected, 0, 0)
    (gradient,) = torch.autograd.grad(step(**inputs, state=state, reset=reset)[1].sum(), state)
    assert torch.equal(gradient[reset], torch.zeros_like(gradient[reset])) and gradient[1].abs().min() > 0
    assert_all_close(step(**inputs, reset=reset), step(**inputs), 0, 0)
    with pytest.raises(ValueError, match=says(f"{operator}_step: expected reset of shape (batch,) = [3], got [2]")):
        step(**inputs, state=state, reset=reset[:2])
    with pytest.raises(RuntimeError, match=says(f"{operator}_step: expected reset of dtype bool", "got torch.complex64")):
        step(**inputs, state=state, reset=reset.to(torch.complex64))
    with pytest.raises(TypeError, match=says(f"{operator}_step: expected reset to be a tensor")):
        step(**inputs, state=state, reset=[True])


@pytest.mark.parametrize("batch_first", [False, True])
@every_recurrence
def test_layers_take_masks_of_any_form(name, batch_first, device):
    layer = make_layer(name, device, batch_first=batch_first, bidirectional=True)
    x, hx = make_sequence(6, 6, IN, device=device), make_sequence(4, 6, HIDDEN, device=device, seed=1)
    reset = make_sequence(6, 6, device=device, seed=2) > 1
    expected = layer(x, hx, reset=reset)
    for dtype in DTYPES:
        for mask in (reset.to(dtype), reset.to(dtype)[..., None]):
            assert_all_close(layer(x, hx, reset=mask), expected, 0, 0)
            assert_all_close(layer(x[0], hx[:, 0], reset=mask[0])[:1], layer(x[0], hx[:, 0], reset=reset[0])[:1], 0, 0)


@every_recurrence
def test_layer_steps_with_reset_are_the_sequence(name, device):
    layer, x = make_layer(name, device), make_sequence(6, 3, IN, device=device)
    reset = torch.zeros(6, 3, device=device)
    reset[2, 0] = reset[4, 1] = 1
    expected, h_n = layer(x, reset=reset)
    state, outputs = None, []
    for t in range(6):
        output, state = layer.step(x[t], state, reset=reset[t])
        outputs.append(output)
    assert_all_close((torch.stack(outputs), state), (expected, h_n))
    with pytest.raises(ValueError, match=says(".step: expected reset of shape (batch,) = [3], got [6, 3]")):
        layer.step(x[0], state, reset=reset)


def padded_as_torch(layer: Any, x: Tensor, hx: Tensor | None, lengths: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The results by way of a PackedSequence."""
    batch_first = layer.batch_first
    packed = {
        key: pack_padded_sequence(value, lengths.cpu(), batch_first=batch_first, enforce_sorted=False)
        for key, value in (("input", x), *options.items())
    }
    output, h_n = layer(packed.pop("input"), hx, **packed)
    seqlen = x.shape[1 if batch_first else 0]
    return pad_packed_sequence(output, batch_first=batch_first, total_length=seqlen)[0], h_n


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@every_recurrence
def test_lengths_are_those_of_packed_sequences(name, batch_first, bidirectional, device):
    """Values and gradients of a padded batch; the padding holds NaN, which nothing sees."""
    layer = make_layer(name, device, batch_first=batch_first, bidirectional=bidirectional)
    lengths = torch.tensor([2, 7, 1, 5], device=device)
    shape = (4, 7) if batch_first else (7, 4)
    x = make_sequence(*shape, IN, device=device).requires_grad_()
    hx = make_sequence(2 * (1 + bidirectional), 4, HIDDEN, device=device, seed=1).requires_grad_()
    options = {"dt": make_sequence(*shape, device=device, seed=2).exp()} if name == "Liquid" else {}
    is_padding = torch.arange(7, device=device) >= lengths[:, None]
    is_padding = is_padding if batch_first else is_padding.T
    dirty_options = {key: value.masked_fill(is_padding, torch.nan) for key, value in options.items()}
    for state in (None, hx):
        expected = padded_as_torch(layer, x, state, lengths, **options)
        dirty = x.masked_fill(is_padding[..., None], torch.nan)
        results = layer(dirty, state, lengths=lengths, **dirty_options)
        assert_all_close(results, expected, 1e-12, 1e-12)
        assert results[0][is_padding].count_nonzero() == 0
        leaves = {"x": x} | parameters_of(layer) | ({} if state is None else {"hx": hx})
        assert_same_gradients(results, expected, leaves, 1e-10, 1e-12)
    for form in (lengths.int(), lengths.cpu(), lengths.tolist(), tuple(lengths.tolist())):
        assert_all_close(layer(x, hx, lengths=form, **options), layer(x, hx, lengths=lengths, **options), 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_keep_the_states_in_float32(dtype, device):
    """``h_n`` is that of the row alone, bit for bit, and not one rounded to the output's dtype. A row without steps has hx."""
    layer = MinGRU(IN, HIDDEN, batch_first=True, bidirectional=True, dtype=dtype, device=device)
    x, hx = make_sequence(3, 5, IN, device=device, dtype=dtype), make_sequence(2, 3, HIDDEN, device=device).float()
    output, h_n = layer(x, hx, lengths=[5, 0, 3])
    assert h_n.dtype == torch.float32 and torch.equal(h_n[:, 1], hx[:, 1]) and output[1].count_nonzero() == 0
    alone = layer(x[2:, :3], hx[:, 2:])
    assert_all_close((output[2:, :3], h_n[:, 2:]), alone, 1e-6, 1e-6)
    for shape in ((0, 4, IN), (2, 0, IN)):
        empty = torch.zeros(shape, dtype=dtype, device=device)
        output, h_n = layer(empty, lengths=[0] * shape[0])
        assert output.shape == (*shape[:2], 2 * HIDDEN) and h_n.shape == (2, shape[0], HIDDEN)


def test_bad_lengths(device):
    layer, x = Liquid(IN, HIDDEN, batch_first=True, device=device), torch.zeros(2, 4, IN, device=device)
    for bad in ([1, 5], [-1, 2], torch.tensor([4, 9], device=device)):
        with pytest.raises(ValueError, match=says("Liquid: expected lengths from 0 to seqlen = 4, got values from")):
            layer(x, lengths=bad)
    for bad in ([1], torch.ones(2, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match=says("Liquid: expected lengths of shape (batch,) = [2], got")):
            layer(x, lengths=bad)
    for bad in (torch.ones(2), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(RuntimeError, match=says("Liquid: expected lengths of an integer dtype, got torch.")):
            layer(x, lengths=bad)
    for bad in (3, "ab", [1.0, 2.0], [True, True]):
        with pytest.raises(TypeError, match=says("Liquid: expected lengths to be a tensor or a sequence of ints, got")):
            layer(x, lengths=bad)
    with pytest.raises(ValueError, match=says("Liquid: expected lengths with a batch of sequences")):
        layer(x[0], lengths=[4])
    reset, cu_seqlens = torch.zeros(2, 4, device=device), torch.tensor([0, 4], device=device)
    for name, value in (("reset", reset), ("cu_seqlens", cu_seqlens)):
        with pytest.raises(ValueError, match=says(f"Liquid: expected lengths or {name}, got both")):
            layer(x, lengths=[4, 4], **{name: value})
    packed = pack_padded_sequence(x, torch.tensor([4, 4]), batch_first=True)
    with pytest.raises(ValueError, match=says("Liquid: expected a PackedSequence or lengths, got both")):
        layer(packed, lengths=[4, 4])


@every_recurrence
def test_lengths_compile_and_export(name):
    layer, x = make_layer(name, batch_first=True, bidirectional=True), make_sequence(4, 6, IN)
    lengths = torch.tensor([3, 6, 1, 2])
    expected = layer(x, lengths=lengths)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_all_close(compiled(x, lengths=lengths), expected)
    batch, seqlen = torch.export.Dim("batch"), torch.export.Dim("seqlen")
    shapes = {"input": {0: batch, 1: seqlen}, "lengths": {0: batch}}
    program = torch.export.export(layer, (x,), {"lengths": lengths}, dynamic_shapes=shapes, strict=False).module()
    for sizes in ((4, 6), (1, 1), (2, 2), (7, 3)):
        other = make_sequence(*sizes, IN, seed=3)
        ends = torch.arange(sizes[0]) % (sizes[1] + 1)
        assert_all_close(program(other, lengths=ends), layer(other, lengths=ends))
