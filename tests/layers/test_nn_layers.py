"""Every layer: late initialization, strides, causality, state_dicts, and torch.compile of whole sequences and of steps."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from layer_helpers import (
    MIXERS,
    RECURRENCES,
    assert_all_close,
    assert_same_gradients,
    decode,
    every_layer,
    make_layer,
    make_sequence,
    new_layer,
    run,
    variants_of,
    width_of,
)
from plain_layers import parameters_of
from torch._dynamo.testing import CompileCounterWithBackend

OPERATOR = "selective_scan"

# Parameters that reset_parameters draws in another order than the constructor.
OTHER_ORDER = {
    "Mamba": ("dt_proj.", "out_proj."),
    "Mamba2": ("dt_bias", "A_log", "conv1d.", "out_proj."),
    "SelectiveSSM": ("dt_proj.",),
}


@every_layer
def test_made_on_meta_and_initialized_later(name):
    options = {"conv_init": 0.1} if name == "Mamba2" else {}
    torch.manual_seed(0)
    expected = parameters_of(new_layer(name, **options))
    layer = new_layer(name, **options, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    torch.manual_seed(0)
    layer.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    for key, parameter in layer.named_parameters():
        assert parameter.isfinite().all(), key
        assert key.startswith(OTHER_ORDER.get(name, ())) or torch.equal(parameter, expected[key]), key
    assert name != "Mamba2" or layer.conv1d.weight.abs().max() <= 0.1


@every_layer
def test_inputs_of_any_strides(name, device):
    layer = make_layer(name, device)
    x = make_sequence(2, 9, width_of(layer), device=device)
    expected = run(layer, x)
    for view in (x.transpose(0, 1).contiguous().transpose(0, 1), x.transpose(1, 2).contiguous().transpose(1, 2)):
        assert not view.is_contiguous()
        torch.testing.assert_close(run(layer, view), expected, rtol=1e-12, atol=1e-14)
    expanded = x[:1].expand(2, -1, -1)
    torch.testing.assert_close(run(layer, expanded), run(layer, expanded.contiguous()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["Mamba-bilinear", "Mamba2", "SelectiveSSM", *RECURRENCES])
def test_the_future_does_not_matter(name, device):
    layer = make_layer(name, device)
    x = make_sequence(2, 9, width_of(layer), device=device)
    changed = torch.cat([x[:, :5], make_sequence(2, 4, width_of(layer), device=device, seed=1)], dim=1)
    before, after = run(layer, x), run(layer, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=1e-12, atol=1e-14)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(dim=-1).min() > 1e-9


@pytest.mark.parametrize("name", [*MIXERS, "SelectiveSSM", *variants_of(*RECURRENCES)])
def test_state_dict_round_trip(name, tmp_path, device):
    options = {"bidirectional": True} if name.startswith(RECURRENCES) else {}
    layer = make_layer(name, device, **options)
    other = new_layer(name, dtype=torch.float64, device=device, **options)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    x = make_sequence(2, 4, width_of(layer), device=device)
    assert (run(other, x) - run(layer, x)).abs().max() > 1e-3
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True), strict=True)
    torch.testing.assert_close(run(other, x), run(layer, x), rtol=0, atol=0)
    torch.testing.assert_close(run(copy.deepcopy(layer), x), run(layer, x), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "sequences"),
    [
        *(("Mamba-foh", {"bias": False}, sequences) for sequences in (None, "cu_seqlens", "seq_idx")),
        *(("Mamba2", {"d_ssm": 8}, sequences) for sequences in (None, "cu_seqlens", "seq_idx")),
        *((name, {"bidirectional": name == "MinGRU"}, None) for name in RECURRENCES),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_compiles_once_for_all_lengths(name, options, sequences, device, fresh_dynamo):
    layer = make_layer(name, device, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, graphs = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter), []
    for seqlen in (9, 5, 64):
        options = {}
        if sequences == "cu_seqlens":
            options["cu_seqlens"] = torch.tensor([0, 3, 3, seqlen], device=device)
        elif sequences == "seq_idx":
            options["seq_idx"] = torch.arange(seqlen, device=device)[None] // 4
            if name != "Mamba2":
                options["seq_idx"] = options["seq_idx"].repeat(2, 1)
        shape = (1 if sequences == "cu_seqlens" or name == "Mamba2" else 2, seqlen) if name not in RECURRENCES else (seqlen, 2)
        x = make_sequence(*shape, width_of(layer), device=device).requires_grad_()
        actual, expected = compiled(x, **options), layer(x, **options)
        assert_all_close(actual, expected, rtol=1e-10, atol=1e-12)
        assert_same_gradients(actual, expected, {"x": x} | parameters_of(layer), rtol=1e-9, atol=1e-12)
        graphs.append(counter.frame_count)
    # The first call may be traced twice, as a number of a module is a variable before it is found to be a constant.
    assert graphs[0] == graphs[-1] <= (1 if name.startswith("Mamba-") else 2)


@pytest.mark.slow
@every_layer
def test_compiled_step(name, device, fresh_dynamo):
    layer = make_layer(name, device)
    x = make_sequence(2, 4, width_of(layer), device=device)
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(decode(layer, x, step), run(layer, x).detach(), rtol=1e-10, atol=1e-12)
