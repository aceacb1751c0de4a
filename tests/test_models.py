"""MambaLM: equal to plain PyTorch and the reference operators, parameters of mamba_ssm, training, compilation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import says
from model_helpers import MIXERS, every_mixer, make_config, make_model, make_tokens, mamba_ssm_shapes, within
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels import reference
from ssm_kernels.models import InferenceParams, MambaConfig, MambaLM, RecurrentMixer

OPERATOR = "selective_scan"  # the devices of all the mixers' operators


# ----- the same model in plain PyTorch, of its parameters and the reference operators


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * weight


def _causal_convolution(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The short convolution and its activation on (batch, seqlen, channels)."""
    weight = p["conv1d.weight"]
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, p["conv1d.bias"], groups=weight.shape[0])).transpose(1, 2)


def _reference_mamba(p: dict[str, Tensor], u: Tensor, config: MambaConfig) -> Tensor:
    x, z = F.linear(u, p["in_proj.weight"]).chunk(2, dim=-1)
    x = _causal_convolution(p, x)
    rank, dstate = p["dt_proj.weight"].shape[1], p["A_log"].shape[1]
    dt, B, C = F.linear(x, p["x_proj.weight"]).split([rank, dstate, dstate], dim=-1)
    y = reference.selective_scan(
        x.transpose(1, 2),
        F.linear(dt, p["dt_proj.weight"]).transpose(1, 2),
        -p["A_log"].exp(),
        B.transpose(1, 2),
        C.transpose(1, 2),
        p["D"],
        z.transpose(1, 2),
        p["dt_proj.bias"],
        delta_softplus=True,
        discretization=config.discretization,
    )
    return F.linear(y.transpose(1, 2), p["out_proj.weight"])


def _reference_mamba2(p: dict[str, Tensor], u: Tensor, config: MambaConfig) -> Tensor:
    heads, inner = p["A_log"].shape[0], p["norm.weight"].shape[0]
    groups = config.ssm_cfg["ngroups"]
    channels = p["conv1d.weight"].shape[0]
    z, xBC, dt = F.linear(u, p["in_proj.weight"]).split([inner, channels, heads], dim=-1)
    x, B, C = _causal_convolution(p, xBC).split([inner, (channels - inner) // 2, (channels - inner) // 2], dim=-1)
    y = reference.ssd_chunk_scan(
        x.unflatten(-1, (heads, -1)),
        dt,
        -p["A_log"].exp(),
        B.unflatten(-1, (groups, -1)),
        C.unflatten(-1, (groups, -1)),
        D=p["D"],
        dt_bias=p["dt_bias"],
        dt_softplus=True,
        discretization=config.discretization,
    )
    gated = (y.flatten(-2) * F.silu(z)).unflatten(-1, (groups, -1))
    return F.linear(_rms_norm(gated, p["norm.weight"].unflatten(0, (groups, -1))).flatten(-2), p["out_proj.weight"])


def _reference_recurrence(p: dict[str, Tensor], u: Tensor, config: MambaConfig) -> Tensor:
    inputs = F.linear(_causal_convolution(p, u), p["rnn.weight_ih_l0"], p["rnn.bias_ih_l0"])
    scan = {"MinGRU": reference.mingru_scan, "MinLSTM": reference.minlstm_scan}[config.mixer]
    inputs = inputs.unflatten(-1, (-1, p["out_proj.weight"].shape[1])).unbind(-2)
    h = scan(*inputs, candidate_activation=config.ssm_cfg.get("candidate_activation"))
    gate = F.silu(F.linear(u, p["gate_proj.weight"], p.get("gate_proj.bias")))
    return F.linear(h * gate, p["out_proj.weight"], p.get("out_proj.bias"))


REFERENCES = {
    "Mamba": _reference_mamba,
    "Mamba2": _reference_mamba2,
    "MinGRU": _reference_recurrence,
    "MinLSTM": _reference_recurrence,
}


def reference_logits(parameters: dict[str, Tensor], config: MambaConfig, input_ids: Tensor) -> Tensor:
    """A model with RMSNorm and tied embeddings."""
    embedding = parameters["backbone.embedding.weight"]
    x = embedding[input_ids]
    for i in range(config.n_layer):
        p = within(parameters, f"backbone.layers.{i}.")
        x = x + REFERENCES[config.mixer](within(p, "mixer."), _rms_norm(x, p["norm.weight"]), config)
        if config.d_intermediate:
            value, gate = F.linear(_rms_norm(x, p["norm2.weight"]), p["mlp.fc1.weight"]).chunk(2, dim=-1)
            x = x + F.linear(value * F.silu(gate), p["mlp.fc2.weight"])
    return F.linear(_rms_norm(x, parameters["backbone.norm_f.weight"]), embedding)


@pytest.mark.parametrize("d_intermediate", [0, 20])
@every_mixer
def test_values_and_gradients(mixer, d_intermediate, device):
    model = make_model(mixer, device, d_intermediate=d_intermediate)
    tokens = make_tokens(2, 11, device=device)
    actual = model(tokens).logits
    parameters = dict(model.named_parameters())
    expected = reference_logits(parameters, model.config, tokens)
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn(actual.shape, dtype=torch.float64).to(device)
    gradients = (torch.autograd.grad(logits, [*parameters.values()], cotangent) for logits in (actual, expected))
    for name, got, wanted in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9, msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.parametrize("mixer, discretization", [("Mamba", "foh"), ("Mamba", "bilinear"), ("Mamba2", "foh")])
def test_discretizations(mixer, discretization):
    model, tokens = make_model(mixer, discretization=discretization), make_tokens(2, 9)
    torch.testing.assert_close(model(tokens).logits, reference_logits(dict(model.named_parameters()), model.config, tokens))
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
    assert dataclasses.asdict(MambaConfig()) == expected | {"mixer": "Mamba", "discretization": "zoh"}
    assert MambaConfig().to_dict() == expected
    assert [*dataclasses.asdict(MambaConfig())][:12] == [*expected]
    names = [*inspect.signature(MambaLM.forward).parameters][1:]
    assert names == ["input_ids", "position_ids", "inference_params", "num_last_tokens", "mixer_kwargs"]


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
        ({"n_layer": 1.0}, TypeError, "expected n_layer to be an int, got float"),
        ({"rms_norm": 1}, TypeError, "expected rms_norm to be a bool, got int"),
        ({"ssm_cfg": [1]}, TypeError, "expected ssm_cfg to be a dict, got list"),
        ({"attn_layer_idx": [3]}, ValueError, "expected no attention layers"),
        ({"attn_cfg": {"num_heads": 3}}, ValueError, "expected no attention layers"),
        ({"mixer": "LSTM"}, ValueError, "unknown mixer 'LSTM', expected one of ['Mamba', 'Mamba2', 'MinGRU', 'MinLSTM']"),
        ({"mixer": "Mamba", "ssm_cfg": {"layer": "Mamba2"}}, ValueError, "expected one mixer, got mixer='Mamba'"),
        ({"discretization": "tustin"}, ValueError, "unknown discretization 'tustin'"),
        ({"discretization": "foh", "mixer": "MinGRU"}, ValueError, "expected no discretization with mixer 'MinGRU'"),
        ({"ssm_cfg": {"discretization": "foh"}}, ValueError, "MambaConfig(discretization=...)"),
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
    with pytest.raises(ValueError, match=says("RecurrentMixer: expected no inference_params with cu_seqlens")):
        mixer(torch.zeros(1, 3, 4), InferenceParams(3, 1), torch.tensor([0, 3]))
    with pytest.raises(TypeError, match=says("RecurrentMixer: expected cu_seqlens to be a tensor, got list")):
        mixer(torch.zeros(1, 3, 4), cu_seqlens=[0, 3])
    with pytest.raises(ValueError, match="inference_params needs a layer_idx"):
        mixer(torch.zeros(2, 3, 4), InferenceParams(3, 2))
    for arguments, words in (
        ({"rnn": "GRU"}, "unknown rnn 'GRU'"),
        ({"expand": 0}, "expected expand"),
        ({"d_conv": 0}, "d_conv"),
    ):
        with pytest.raises(ValueError, match=says(f"RecurrentMixer: {words}" if words != "d_conv" else words)):
            RecurrentMixer(4, **arguments)


# ----- training


def real_text() -> Tensor:
    """Bytes of this repository's license."""
    return torch.tensor([*(Path(__file__).parents[1] / "LICENSE").read_bytes()])


@every_mixer
def test_trains_as_the_model_of_reference_operators(mixer):
    """On real text, in float32, from the same parameters: the losses of every step are equal, and fall."""
    text = real_text()
    torch.manual_seed(0)
    model = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=128, mixer=mixer, ssm_cfg=MIXERS[mixer]))
    parameters = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    losses: dict[str, list[float]] = {"ours": [], "reference": []}
    calls = {
        "ours": (lambda ids: model(ids).logits, model.parameters()),
        "reference": (lambda ids: reference_logits(parameters, model.config, ids), parameters.values()),
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
    assert losses["ours"] == pytest.approx(losses["reference"], rel=1e-4)
    assert losses["ours"][0] == pytest.approx(math.log(128), abs=0.1)
    assert losses["ours"][-1] < losses["ours"][0] - 1.2


@every_mixer
def test_gradients_reach_every_parameter(mixer):
    model = make_model(mixer, d_intermediate=20)
    model(make_tokens(2, 9)).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


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
    parameters = [*model.parameters()]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for seqlen in (9, 5, 64):
        tokens = make_tokens(2, seqlen, device=device)
        actual, expected = compiled(tokens).logits, model(tokens).logits
        torch.testing.assert_close(actual, expected)
        gradients = (torch.autograd.grad(logits.square().sum(), parameters) for logits in (actual, expected))
        for got, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)
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
