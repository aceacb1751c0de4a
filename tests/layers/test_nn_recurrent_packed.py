"""The layers of linear recurrences called as torch.nn.GRU is: hx, and sequences packed by torch.nn.utils.rnn."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers import says
from layer_helpers import HIDDEN, IN, assert_all_close, assert_same_gradients, every_recurrence, make_layer, make_sequence
from plain_layers import parameters_of
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, unpack_sequence

from ssm_kernels.nn.packed import PackedOrder

OPERATOR = "linear_scan"

# In the order of the user, who may have sorted them; the third are of one length.
LENGTHS = {"sorted": (7, 4, 4, 1), "unsorted": (2, 9, 1, 5, 9), "equal": (3, 3, 3), "one": (6,)}
every_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))


def make_packed(lengths: tuple[int, ...], device: str = "cpu", channels: int = IN) -> tuple[list[Tensor], PackedSequence]:
    sequences = [make_sequence(length, channels, device=device, seed=i).requires_grad_() for i, length in enumerate(lengths)]
    return sequences, pack_sequence(sequences, enforce_sorted=sorted(lengths, reverse=True) == list(lengths))


def each_alone(layer: nn.Module, sequences: list[Tensor], hx: Tensor | None = None, dts: Any = 1.0) -> tuple[Tensor, Tensor]:
    """Calls the layer on each sequence; returns the concatenated outputs and the stacked last states."""
    options = [{"dt": dt} for dt in dts] if isinstance(dts, list) else [{} if dts == 1.0 else {"dt": dts}] * len(sequences)
    states = [None] * len(sequences) if hx is None else hx.unbind(1)
    results = [layer(x, state, **more) for x, state, more in zip(sequences, states, options, strict=True)]
    return torch.cat([h for h, _ in results]), torch.stack([h for _, h in results], dim=1)


def unpacked(results: tuple[PackedSequence, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(unpack_sequence(results[0])), results[1]


def as_of_gru(packed: PackedSequence, like: PackedSequence) -> bool:
    """Whether all but the data is the same."""
    return all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in zip(packed[1:], like[1:], strict=True)  # batch_sizes, sorted_indices, unsorted_indices
    )


@every_lengths
@pytest.mark.parametrize(
    ("num_layers", "bidirectional", "batch_first"), list(itertools.product((1, 2), (False, True), (False, True)))
)
@every_recurrence
def test_each_sequence_as_if_alone(name, num_layers, bidirectional, batch_first, lengths, device):
    """In the order of the user, values and gradients, hx included."""
    layer = make_layer(name, device, num_layers=num_layers, bidirectional=bidirectional, batch_first=batch_first)
    hx = make_sequence(num_layers * (1 + bidirectional), len(lengths), HIDDEN, device=device, seed=9).requires_grad_()
    for state in (None, hx):
        sequences, packed = make_packed(lengths, device)
        actual, expected = unpacked(layer(packed, state)), each_alone(layer, sequences, state)
        assert_all_close(actual, expected, 1e-12, 1e-12)
        leaves = {f"sequence {i}": x for i, x in enumerate(sequences)} | parameters_of(layer)
        assert_same_gradients(actual, expected, leaves | ({} if state is None else {"hx": hx}), 1e-10, 1e-12)


@every_lengths
@pytest.mark.parametrize("bidirectional", [False, True])
@every_recurrence
def test_types_and_shapes_are_those_of_gru(name, bidirectional, lengths, device):
    options = {"num_layers": 2, "bidirectional": bidirectional}
    layer = make_layer(name, device, **options)
    gru = nn.GRU(IN, HIDDEN, dtype=torch.float64, device=device, **options)
    _, packed = make_packed(lengths, device)
    hx = make_sequence(2 * (1 + bidirectional), len(lengths), HIDDEN, device=device)
    for arguments in ((packed,), (packed, hx)):
        (output, h_n), (gru_output, gru_h_n) = layer(*arguments), gru(*arguments)
        assert isinstance(output, PackedSequence) and as_of_gru(output, gru_output) and as_of_gru(output, packed)
        assert output.data.shape == gru_output.data.shape and output.data.dtype == gru_output.data.dtype
        assert h_n.shape == gru_h_n.shape and h_n.dtype == gru_h_n.dtype
    padded, padded_lengths = pad_packed_sequence(output)
    assert padded.shape == (max(lengths), len(lengths), HIDDEN * (1 + bidirectional))
    assert padded_lengths.tolist() == list(lengths)


@every_lengths
def test_order_and_back(lengths, device):
    sequences, packed = make_packed(lengths, device)
    order = PackedOrder(packed)
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if packed.sorted_indices is not None:
        by_length = packed.sorted_indices.tolist()
    one_after_another = order.to_sequences(packed.data)
    assert torch.equal(one_after_another, torch.cat([sequences[i] for i in by_length]))
    assert order.cu_seqlens.tolist() == [0, *itertools.accumulate(lengths[i] for i in by_length)]
    back = order.to_packed(one_after_another)
    assert torch.equal(back.data, packed.data) and as_of_gru(back, packed)


@pytest.mark.parametrize(
    ("num_layers", "bidirectional", "batch_first"), list(itertools.product((1, 2), (False, True), (False, True)))
)
@every_recurrence
def test_sequences_that_start_anew_as_if_alone(name, num_layers, bidirectional, batch_first, device):
    """In both directions, values and gradients, hx included, which every sequence of a row begins with."""
    layer = make_layer(name, device, num_layers=num_layers, bidirectional=bidirectional, batch_first=batch_first)
    starts = ((0, 3, 4), (5,), ())  # of each row of the batch, beside 0
    x = make_sequence(9, 3, IN, device=device).requires_grad_()
    hx = make_sequence(num_layers * (1 + bidirectional), 3, HIDDEN, device=device, seed=9).requires_grad_()
    reset = torch.zeros(9, 3, dtype=torch.bool, device=device)
    for row, steps in enumerate(starts):
        reset[list(steps), row] = True
    to_layout = (lambda tensor: tensor.transpose(0, 1)) if batch_first else (lambda tensor: tensor)
    for state in (None, hx):
        output, h_n = layer(to_layout(x), state, reset=to_layout(reset))
        outputs, last_states = [], []
        for row, steps in enumerate(starts):
            bounds = sorted({0, 9, *steps})
            of_row = None if state is None else state[:, row]
            parts = [layer(x[begin:end, row], of_row) for begin, end in itertools.pairwise(bounds)]
            outputs.append(torch.cat([h for h, _ in parts]))
            # A direction ends with the last sequence in its time.
            first_states, final_states = parts[0][1], parts[-1][1]
            of_layers = range(num_layers * (1 + bidirectional))
            last_states.append(torch.stack([(first_states if bidirectional and i % 2 else final_states)[i] for i in of_layers]))
        expected = torch.stack(outputs, dim=1), torch.stack(last_states, dim=1)
        assert_all_close((to_layout(output), h_n), expected, 1e-12, 1e-12)
        leaves = {"x": x} | parameters_of(layer) | ({} if state is None else {"hx": hx})
        assert_same_gradients((to_layout(output), h_n), expected, leaves, 1e-10, 1e-12)


@every_recurrence
def test_reset_of_one_sequence_and_bad_resets(name, device):
    layer = make_layer(name, device, num_layers=1)
    x, reset = make_sequence(7, IN, device=device), torch.arange(7, device=device) == 4
    expected = torch.cat([layer(x[:4])[0], layer(x[4:])[0]])
    assert_all_close((layer(x, reset=reset)[0],), (expected,), 1e-12, 1e-12)
    with pytest.raises(ValueError, match=says("expected reset of shape (seqlen) with seqlen = 7, got [6]")):
        layer(x, reset=reset[:6])
    batch = x[:, None].expand(7, 2, IN)
    with pytest.raises(
        ValueError, match=says("expected reset of shape (seqlen, batch) with seqlen = 7, batch = 2, got [2, 7]")
    ):
        layer(batch, reset=torch.zeros(2, 7, dtype=torch.bool, device=device))
    with pytest.raises(RuntimeError, match=says("expected reset of dtype bool, or of an integer", "got torch.complex64")):
        layer(x, reset=reset.to(torch.complex64))
    with pytest.raises(TypeError, match=says("expected reset to be a tensor, got list")):
        layer(x, reset=[0] * 7)
    with pytest.raises(ValueError, match=says("expected reset or cu_seqlens, got both")):
        layer(x[:, None], reset=reset[:, None], cu_seqlens=torch.tensor([0, 7], device=device))


@every_recurrence
def test_dropout_between_layers(name, device):
    layer = make_layer(name, device, dropout=1.0)
    sequences, packed = make_packed(LENGTHS["unsorted"], device)
    assert layer.training
    dropped = unpacked(layer(packed))
    assert_all_close(dropped, each_alone(layer, sequences), 1e-12, 1e-12)
    kept = unpacked(layer.eval()(packed))
    assert not torch.allclose(dropped[0], kept[0])
    assert_all_close(kept, each_alone(layer, sequences), 1e-12, 1e-12)


def test_step_lengths_are_packed_as_the_input(device):
    layer = make_layer("Liquid", device, bidirectional=True)
    sequences, packed = make_packed(LENGTHS["unsorted"], device)
    dts = [0.1 + make_sequence(len(x), device=device, seed=20 + i).abs() for i, x in enumerate(sequences)]
    results = layer(packed, dt=pack_sequence(dts, enforce_sorted=False))
    assert_all_close(unpacked(results), each_alone(layer, sequences, dts=dts), 1e-12, 1e-12)
    assert_all_close(unpacked(layer(packed, dt=0.25)), each_alone(layer, sequences, dts=0.25), 1e-12, 1e-12)


@every_recurrence
def test_hx_is_that_of_gru(name, device):
    """Positional and by that name; by the older one with a warning."""
    layer = make_layer(name, device, num_layers=1)
    names = [*inspect.signature(nn.GRU.forward).parameters]
    assert [*inspect.signature(type(layer).forward).parameters][: len(names)] == names == ["self", "input", "hx"]
    x, hx = make_sequence(7, 3, IN, device=device), make_sequence(1, 3, HIDDEN, device=device, seed=1)
    expected = layer(x, hx)
    with pytest.warns(FutureWarning, match="h_0 is called hx now"):
        of_old_name = layer(x, h_0=hx)
    for results in (layer(x, hx=hx), layer(input=x, hx=hx), of_old_name):
        for a, b in zip(results, expected, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(layer(x)[0], expected[0])
    with pytest.raises(TypeError, match=says("expected hx or h_0, its older name, got both")):
        layer(x, hx, h_0=hx)


def test_the_older_name_of_hx_warns_by_default(tmp_path):
    """Without filters of its own, in a module that is not the main one."""
    code = "import torch\nfrom ssm_kernels.nn import Liquid, MinGRU\nx, hx = torch.zeros(5, 2, 3), torch.zeros(1, 2, 4)\n"
    code += "for layer in (MinGRU(3, 4), Liquid(3, 4)):\n    layer(x, h_0=hx)\n"
    (tmp_path / "user_model.py").write_text(code)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    result = subprocess.run([sys.executable, "-c", "import user_model"], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("MinGRU", "Liquid"):
        assert f"FutureWarning: {name}: h_0 is called hx now" in result.stderr


@every_recurrence
def test_bad_calls_with_a_packed_sequence(name):
    layer = make_layer(name, num_layers=1)
    _, packed = make_packed((4, 2, 3))
    with pytest.raises(ValueError, match=says("expected hx of shape", "= [1, 3, 6], got [1, 2, 6]")):
        layer(packed, make_sequence(1, 2, HIDDEN))
    with pytest.raises(TypeError, match=says("expected hx to be a tensor, got list")):
        layer(packed, [make_sequence(1, 3, HIDDEN)])
    with pytest.raises(ValueError, match=says("expected a PackedSequence or cu_seqlens, got both")):
        layer(packed, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=says("expected a PackedSequence or reset, got both")):
        layer(packed, reset=torch.zeros(9, dtype=torch.bool))
    _, wide = make_packed((4, 2, 3), channels=IN + 1)
    with pytest.raises(ValueError, match=says("expected input.data of shape (steps, input_size)", "got [9, 6]")):
        layer(wide)
    if name == "Liquid":
        with pytest.raises(TypeError, match=says("expected dt to be a number or a PackedSequence, got Tensor")):
            layer(packed, dt=torch.ones(9))
        with pytest.raises(ValueError, match=says("dt", "[9]", "got [8]")):
            layer(packed, dt=pack_sequence([torch.ones(4), torch.ones(2), torch.ones(2)], enforce_sorted=False))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("Liquid", "hx"), ("MinGRU", "indices"), ("MinLSTM", "sizes")),
        *(pytest.param("Liquid", form, marks=pytest.mark.exhaustive) for form in ("indices", "sizes")),
    ],
)
def test_packed_sequences_compile_into_one_graph(name, form):
    """The number of sequences comes from the indices or from hx, and without these from a value, a symbol of the graph.

    The layers share the code that finds it.
    """
    torch._dynamo.reset()  # the parameters of this test share the code of forward, and so its limit of recompilations
    capture = torch._dynamo.config.patch(capture_scalar_outputs=form == "sizes")
    layer = make_layer(name, bidirectional=True, num_layers=1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((5, 3, 3), (4, 4, 2, 1), (3, 1)):
        sequences = [make_sequence(n, IN, seed=n) for n in lengths]
        packed = pack_sequence(sequences, enforce_sorted=form != "indices")
        hx = make_sequence(2, len(lengths), HIDDEN) if form == "hx" else None
        with capture:
            output, h_n = compiled(packed, hx)
        expected = layer(packed, hx)
        assert as_of_gru(output, expected[0])
        assert_all_close((output.data, h_n), (expected[0].data, expected[1]), 1e-12, 1e-12)
