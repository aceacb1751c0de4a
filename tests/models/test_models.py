"""MambaLM: equal to a model of plain layers, parameters of mamba_ssm, training, compilation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from pathlib import Path
from typing import get_args

import plain_layers
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import says
from layer_helpers import assert_same_gradients
from model_helpers import MIXERS, every_mixer, make_config, make_model, make_tokens, mamba_ssm_shapes
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels.choices import MixerName
from ssm_kernels.models import InferenceParams, MambaConfig, MambaLM, RecurrentMixer

OPERATOR = "selective_scan"  # the devices of all the mixers' operators


# ----- values and gradients


@pytest.mark.parametrize("d_intermediate", [0, 20])
@every_mixer
def test_values_and_gradients(mixer, d_intermediate, device):
    model = make_model(mixer, device, d_intermediate=d_intermediate)
    tokens = make_tokens(2, 11, device=device)
    actual = model(tokens).logits
    expected = plain_layers.logits(model, tokens)
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(actual, expected, plain_layers.parameters_of(model), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("mixer, discretization", [("Mamba", "foh"), ("Mamba", "bilinear"), ("Mamba2", "foh")])
def test_discretizations(mixer, discretization):
    model, tokens = make_model(mixer, discretization=discretization), make_tokens(2, 9)
    torch.testing.assert_close(model(tokens).logits, plain_layers.logits(model, tokens))
    assert not torch.allclose(model(tokens).logits, make_model(mixer)(tokens).logits)


@pytest.mark.parametrize("field", ["rms_norm", "fused_add_norm", "residual_in_fp32", "tie_embeddings"])
def test_options(field):
    """The options of the configuration reach the model."""
    model, tokens = make_model("Mamba", dtype=torch.float32, **{field: False}), make_tokens(2, 9)
    block = model.backbone.layers[0]
    is_rms = isinstance(block.norm, torch.nn.RMSNorm) and isinstance(model.backbone.norm_f, torch.nn.RMSNorm)
    is_tied = model.lm_head.weight is model.backbone.embedding.weight
    states = {"rms_norm": is_rms, "fused_add_norm": block.fused_add_norm, "residual_in_fp32": block.residual_in_fp32}
    expected = dict.fromkeys(["rms_norm", "fused_add_norm", "residual_in_fp32", "tie_embeddings"], True)
    assert states | {"tie_embeddings": is_tied} == expected | {field: False}
    model(tokens).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if field in ("fused_add_norm", "residual_in_fp32"):
        torch.testing.assert_close(model(tokens).logits, make_model("Mamba", dtype=torch.float32)(tokens).logits)


def test_16_bit_residual_stream_in_float32():
    model = make_model("Mamba", dtype=torch.bfloat16)
    hidden_states, residual = model.backbone.layers[0](model.backbone.embedding(make_tokens(1, 3)))
    assert hidden_states.dtype == torch.bfloat16 and residual.dtype == torch.float32
    assert model(make_tokens(1, 3)).logits.dtype == torch.bfloat16


@every_mixer
def test_autocast(mixer, device):
    model, tokens = make_model(mixer, device, torch.float32), make_tokens(2, 9, device=device)
    with torch.autocast(device, torch.bfloat16):
        logits = model(tokens).logits
        generated = model.generate(tokens, max_new_tokens=3, temperature=0)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(tokens).logits, rtol=0.1, atol=0.5)
    logits.float().logsumexp(dim=-1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert generated.shape == (2, 12)


# ----- what mamba_ssm has


def test_fields_and_defaults_are_those_of_mamba_ssm():
    expected = {
        "d_model": 2560,
        "d_intermediate": 0,
        "n_layer": 64,
        "vocab_size": 50277,
        "ssm_cfg": {},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
    }
    assert dataclasses.asdict(MambaConfig()) == expected | {"mixer": "Mamba", "discretization": "zoh", "recompute": "cheap"}
    assert MambaConfig().to_dict() == expected
    assert [*dataclasses.asdict(MambaConfig())][:12] == [*expected]
    own = ["attention_mask", "inputs_embeds", "labels"]  # keyword-only
    names = [*inspect.signature(MambaLM.forward).parameters][1:]
    assert names == ["input_ids", "position_ids", "inference_params", "num_last_tokens", *own, "mixer_kwargs"]


@pytest.mark.parametrize("d_intermediate", [0, 100])
@pytest.mark.parametrize("mixer", ["Mamba", "Mamba2"])
def test_names_and_shapes_of_parameters(mixer, d_intermediate):
    model = make_model(mixer, d_intermediate=d_intermediate)
    shapes = {name: [*value.shape] for name, value in model.state_dict().items()}
    expected = mamba_ssm_shapes(model.config)
    assert shapes == expected and [*shapes] == [*expected]


@pytest.mark.parametrize("d_intermediate, residuals", [(0, 1), (100, 2)])
def test_initialization(d_intermediate, residuals):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "n_layer": 9, "vocab_size": 1000, "d_intermediate": d_intermediate}
    model = MambaLM(MambaConfig(**sizes, ssm_cfg={"bias": True}))
    embedding = model.backbone.embedding.weight
    assert model.lm_head.weight is embedding
    assert embedding.std().item() == pytest.approx(0.02, rel=0.02) and abs(embedding.mean().item()) < 1e-3
    for layer in model.backbone.layers:
        projections = [layer.mixer.out_proj] + ([layer.mlp.fc2] if d_intermediate else [])
        for projection in projections:
            # Uniform up to 1 / sqrt(inputs), as nn.Linear's own, and then divided.
            bound = projection.in_features**-0.5 / math.sqrt(9 * residuals)
            assert bound > projection.weight.max().item() > 0.99 * bound
        assert layer.mixer.in_proj.weight.max().item() > 0.99 * 64**-0.5
        assert not layer.mixer.in_proj.bias.any() and not layer.mixer.out_proj.bias.any()
        # The bias of the step sizes stays as the mixer drew it.
        dt = F.softplus(layer.mixer.dt_proj.bias)
        assert dt.min() >= 0.999e-4 and dt.max() <= 0.1001 and dt.std() > 0.01
    model = MambaLM(MambaConfig(**sizes), {"initializer_range": 0.5, "rescale_prenorm_residual": False})
    assert model.backbone.embedding.weight.std().item() == pytest.approx(0.5, rel=0.02)
    assert model.backbone.layers[0].mixer.out_proj.weight.max().item() > 0.99 * 128**-0.5


@pytest.mark.parametrize("rnn, between", [("MinGRU", (0, 1)), ("MinLSTM", (1, 2))])
def test_gate_that_lets_the_candidate_in_starts_closed(rnn, between):
    torch.manual_seed(0)
    mixer = RecurrentMixer(64, rnn)
    parts = mixer.rnn.bias_ih_l0.unflatten(0, (-1, 128))
    for part, bias in enumerate(parts):
        if part == between[0]:
            assert -4 <= bias.min() < -3.5 and -0.5 < bias.max() <= 0
        else:
            assert bias.abs().max() <= 128**-0.5


# ----- arguments


@pytest.mark.parametrize(
    "fields, error, words",
    [
        ({"d_model": 0}, ValueError, "expected d_model to be at least 1, got 0"),
        ({"vocab_size": 10**12}, ValueError, "expected vocab_size from 1 to 2147483647, got 1000000000000"),
        ({"d_intermediate": float("nan")}, TypeError, "expected d_intermediate to be an int, got float"),
        ({"attn_layer_idx": "12"}, TypeError, "expected attn_layer_idx to be a list, got str"),
        ({"ssm_cfg": {"d_stat": 3}}, TypeError, "expected arguments of Mamba in ssm_cfg, ['d_state', 'd_conv', 'expand', "),
        ({"ssm_cfg": {"layer_idx": 3}}, ValueError, "expected ssm_cfg without layer_idx, which the model sets itself, got 3"),
        ({"ssm_cfg": {"d_state": 10**12}}, ValueError, "expected ssm_cfg['d_state'] of at most 16777216, got 10"),
        ({"ssm_cfg": {3: 4}}, TypeError, "expected arguments of Mamba in ssm_cfg"),
        ({"n_layer": 1.0}, TypeError, "expected n_layer to be an int, got float"),
        ({"rms_norm": 1}, TypeError, "expected rms_norm to be a bool, got int"),
        ({"ssm_cfg": [1]}, TypeError, "expected ssm_cfg to be a dict, got list"),
        ({"attn_layer_idx": [3]}, ValueError, "expected no attention layers"),
        ({"attn_cfg": {"num_heads": 3}}, ValueError, "expected no attention layers"),
        ({"mixer": "LSTM"}, ValueError, f"unknown mixer 'LSTM', expected one of {[*get_args(MixerName)]}"),
        ({"mixer": "Mamba", "ssm_cfg": {"layer": "Mamba2"}}, ValueError, "expected one mixer, got mixer='Mamba'"),
        ({"discretization": "tustin"}, ValueError, "unknown discretization 'tustin'"),
        ({"discretization": "foh", "mixer": "MinGRU"}, ValueError, "expected no discretization with mixer 'MinGRU'"),
        ({"ssm_cfg": {"discretization": "foh"}}, ValueError, "MambaConfig(discretization=...)"),
        ({"ssm_cfg": {"recompute": "all"}}, ValueError, "MambaConfig(recompute=...)"),
        ({"recompute": "all", "mixer": "MinGRU"}, ValueError, "expected no recompute with mixer 'MinGRU'"),
    ],
)
def test_bad_configurations(fields, error, words):
    with pytest.raises(error, match=says(f"MambaConfig: {words}" if words[0] != "M" else words)):
        MambaConfig(**fields)


def test_configurations_leave_their_arguments_alone():
    ssm_cfg = {"layer": "Mamba2", "d_state": 8}
    config = MambaConfig(ssm_cfg=ssm_cfg)
    assert config.mixer == "Mamba2" and config.ssm_cfg == {"d_state": 8} and len(ssm_cfg) == 2
    assert config.to_dict()["ssm_cfg"] == ssm_cfg
    assert MambaConfig.from_dict(config.to_dict()) == config == dataclasses.replace(config)
    with pytest.raises(ValueError, match=says("discretization 'bilinear' is not supported")):
        MambaLM(make_config("Mamba2", discretization="bilinear"))
    with pytest.raises(TypeError, match="MambaConfig: expected fields to be a dict, got list"):
        MambaConfig.from_dict([1])
    with pytest.raises(TypeError, match="MambaLM: expected config to be a MambaConfig, got dict"):
        MambaLM({})


@pytest.mark.parametrize("rnn", ["MinGRU", "MinLSTM"])
def test_bad_calls_of_the_recurrent_mixer(rnn):
    mixer = RecurrentMixer(4, rnn)
    with pytest.raises(ValueError, match=says("RecurrentMixer: expected hidden_states of shape (batch, seqlen, d_model)")):
        mixer(torch.zeros(2, 3, 5))
    conv_state, state = mixer.allocate_inference_cache(2, 0)
    with pytest.raises(ValueError, match=says("RecurrentMixer.step: expected hidden_states", "got [2, 2, 4]")):
        mixer.step(torch.zeros(2, 2, 4), conv_state, state)
    with pytest.raises(ValueError, match=says("RecurrentMixer.step: expected ssm_state of shape (batch, d_inner) = [2, 8]")):
        mixer.step(torch.ones(2, 1, 4), conv_state, state[:1])
    assert not conv_state.any()
    with pytest.raises(TypeError, match=says("RecurrentMixer: expected cu_seqlens to be a tensor, got list")):
        mixer(torch.zeros(1, 3, 4), cu_seqlens=[0, 3])
    with pytest.raises(ValueError, match="inference_params needs a layer_idx"):
        mixer(torch.zeros(2, 3, 4), InferenceParams(3, 2))
    for arguments, words in (
        ({"rnn": "GRU"}, "RecurrentMixer: unknown rnn 'GRU'"),
        ({"expand": 0}, "RecurrentMixer: expected expand"),
        ({"d_conv": 0}, "d_conv"),
    ):
        with pytest.raises(ValueError, match=says(words)):
            RecurrentMixer(4, **arguments)


# ----- training


def real_text() -> Tensor:
    """Bytes of this repository's license."""
    return torch.tensor([*(Path(__file__).parents[2] / "LICENSE").read_bytes()])


@every_mixer
def test_trains_as_the_plain_model(mixer):
    """On real text, in float32, from the same parameters: the losses of every step are equal, and fall."""
    text = real_text()
    torch.manual_seed(0)
    model = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=128, mixer=mixer, ssm_cfg=MIXERS[mixer]))
    parameters = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    losses: dict[str, list[float]] = {"ours": [], "plain": []}
    calls = {
        "ours": (lambda ids: model(ids).logits, model.parameters()),
        "plain": (lambda ids: plain_layers.logits(model, ids, parameters), parameters.values()),
    }
    for name, (call, leaves) in calls.items():
        optimizer = torch.optim.Adam(leaves, lr=1e-2)
        for step in range(12):
            starts = torch.randint(len(text) - 33, (4,), generator=torch.Generator().manual_seed(step))
            batch = text[starts[:, None] + torch.arange(33)]
            loss = F.cross_entropy(call(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["ours"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["ours"][0] == pytest.approx(math.log(128), abs=0.1)
    assert losses["ours"][-1] < losses["ours"][0] - 1.2


@every_mixer
def test_checkpointed_blocks(mixer):
    """torch.utils.checkpoint computes every block again in backward."""
    model, tokens = make_model(mixer, d_intermediate=20), make_tokens(2, 9)
    parameters = [*model.parameters()]
    expected = torch.autograd.grad(model(tokens).logits.square().sum(), parameters)
    calls = []
    for layer in model.backbone.layers:
        layer.mixer.register_forward_hook(lambda *_: calls.append(None))
        layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    actual = torch.autograd.grad(model(tokens).logits.square().sum(), parameters)
    assert len(calls) == 4
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


# ----- torch.compile and torch.export


@pytest.mark.slow
def test_compiles_once_for_all_lengths(device):
    """Compiles one mixer; the tests of the layers compile the others."""
    model = make_model("MinGRU", device, d_intermediate=20, n_layer=1)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for seqlen in (9, 5, 64):
        tokens = make_tokens(2, seqlen, device=device)
        actual, expected = compiled(tokens).logits, model(tokens).logits
        torch.testing.assert_close(actual, expected)
        assert_same_gradients(actual, expected, plain_layers.parameters_of(model), 1e-7, 1e-9)
        graphs.append(counter.frame_count)
    # The first call may be traced twice, as a module's float is a variable before it is found to be a constant.
    assert graphs[0] == graphs[-1] <= 2


@pytest.mark.slow
@every_mixer
def test_exports(mixer):
    model = make_model(mixer, d_intermediate=20)
    sizes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen")}}
    program = torch.export.export(model, (make_tokens(2, 9),), dynamic_shapes=sizes)
    for shape in ((2, 9), (3, 17)):
        torch.testing.assert_close(program.module()(make_tokens(*shape)).logits, model(make_tokens(*shape)).logits)
