"""Layers with discretizations that read two input samples a step: the state has the last samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_kernels import compat, nn, reference
from ssm_kernels.models import MambaConfig, MambaLM

RULES: dict[str, dict[str, Any]] = {
    "foh_ramp": {},
    "trapezoidal": {},
    "gbt_two_sample": {"alpha": 0.7},
    "exp_trapezoidal": {},
}
every_rule = pytest.mark.parametrize("rule", RULES)
D_MODEL, STEPS = 12, 9


def make_layer(kind: type, rule: str, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(D_MODEL, d_state=5, discretization=rule, **RULES[rule], dtype=torch.float64, **options)
    if rule == "exp_trapezoidal":
        torch.nn.init.normal_(layer.lam_logit)
    return layer


def make_x(batch: int = 2) -> Tensor:
    return torch.randn(batch, STEPS, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@every_rule
def test_selective_ssm_is_the_reference(rule):
    layer, x = make_layer(nn.SelectiveSSM, rule), make_x()
    z = torch.randn_like(x)
    delta, B, C, bias = layer._project(x)
    weights = {"lam": layer.lam_logit[:, None], "lam_sigmoid": True} if rule == "exp_trapezoidal" else {}
    expected, last = reference.two_sample_scan(
        *(x.mT, delta.mT, -layer.A_log.exp(), B.mT, C.mT, layer.D, z.mT, bias),
        discretization=rule,
        **RULES[rule],
        **weights,
        delta_softplus=True,
        return_last_state=True,
    )
    out, state = layer(x, z, return_last_state=True)
    torch.testing.assert_close(out, expected.mT)
    torch.testing.assert_close(state[:, :-1, :-1], last.state)
    torch.testing.assert_close(state[:, :-1, -1], last.u)
    torch.testing.assert_close(state[:, -1, :-1], last.B)
    (out.sum() + state.sum()).backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@every_rule
def test_selective_ssm_in_pieces_and_in_steps(rule):
    layer, x = make_layer(nn.SelectiveSSM, rule), make_x()
    whole, last = layer(x, return_last_state=True)
    first, state = layer(x[:, :4], return_last_state=True)
    second, end = layer(x[:, 4:], initial_state=state, return_last_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, last)
    state = layer.allocate_state(2)
    steps = [layer.step(x[:, t], state) for t in range(STEPS)]
    torch.testing.assert_close(torch.stack(steps, 1), whole)
    torch.testing.assert_close(state, last)


@every_rule
def test_mamba_in_pieces_and_in_steps(rule):
    layer, x = make_layer(nn.Mamba, rule, layer_idx=0), make_x()
    whole = layer(x)
    cache = layer.allocate_inference_cache(2, STEPS)
    assert cache[1].shape == (2, layer.d_inner + 1, layer.d_state + 1)
    with torch.no_grad():
        steps = [layer.step(x[:, t : t + 1], *cache)[0] for t in range(STEPS)]
        torch.testing.assert_close(torch.cat(steps, 1), whole.detach())
        params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        found = []
        for begin, end in ((0, 4), (4, 7), (7, 8), (8, 9)):
            params.seqlen_offset = begin
            found.append(layer(x[:, begin:end], inference_params=params))
    torch.testing.assert_close(torch.cat(found, 1), whole.detach())


@every_rule
def test_mamba_of_packed_sequences(rule):
    layer, x = make_layer(nn.Mamba, rule, layer_idx=0), make_x(1)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    expected = torch.cat([layer(x[:, :4]), layer(x[:, 4:])], 1)
    torch.testing.assert_close(layer(x, cu_seqlens=ends), expected)
    seq_idx = torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32)
    torch.testing.assert_close(layer(x, seq_idx=seq_idx), expected)
    with torch.no_grad():
        params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        layer(x, cu_seqlens=ends, inference_params=params)
        _, state = params.key_value_memory_dict[0]
        assert state.shape[0] == 2


@every_rule
def test_mamba_gradients(rule):
    """The gradients of all parameters equal finite differences."""
    layer, x = make_layer(nn.Mamba, rule), make_x(1)[:, :3].requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *values), fast_mode=True)


@every_rule
def test_state_dict_names_the_rule(rule):
    layer = make_layer(nn.Mamba, rule)
    other = nn.Mamba(D_MODEL, d_state=5, discretization=layer.discretization, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(make_x()), other(make_x()))
    assert layer.discretization == ("gbt_two_sample(0.7)" if rule == "gbt_two_sample" else rule)
    assert ("lam_logit" in layer.no_weight_decay()) == (rule == "exp_trapezoidal")
    with pytest.raises(RuntimeError, match="expected a checkpoint of discretization 'bilinear'"):
        state_dict = {name: value for name, value in layer.state_dict().items() if name != "lam_logit"}
        nn.Mamba(D_MODEL, d_state=5, discretization="bilinear", dtype=torch.float64).load_state_dict(state_dict)


def test_layers_of_the_forks_decay_no_weight_of_samples():
    layer = compat.bidirectional.Mamba(8, discretization="exp_trapezoidal")
    assert layer.no_weight_decay() == nn.Mamba(8, discretization="exp_trapezoidal").no_weight_decay()


@every_rule
def test_models_generate(rule):
    name = "gbt_two_sample(0.7)" if rule == "gbt_two_sample" else rule
    torch.manual_seed(0)
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=20, discretization=name)
    model = MambaLM(config).double()
    prompt = torch.randint(0, 20, (2, 5))
    with torch.no_grad():
        tokens = model.generate(prompt, max_length=9, top_k=1)
        for t in range(5, 9):
            logits = model(tokens[:, :t]).logits[:, -1]
            assert torch.equal(logits.argmax(-1), tokens[:, t])


MAMBA2: dict[str, dict[str, Any]] = {
    "foh_ramp": {"discretization": "foh_ramp"},
    "exp_trapezoidal": {"discretization": "exp_trapezoidal"},
    "groups": {"discretization": "exp_trapezoidal", "ngroups": 2, "D_has_hdim": True},
    "no_norm": {"discretization": "foh_ramp", "rmsnorm": False, "d_ssm": 16},
}
every_mamba2 = pytest.mark.parametrize("options", MAMBA2.values(), ids=list(MAMBA2))


def make_mamba2(**options: Any) -> nn.Mamba2:
    torch.manual_seed(0)
    layer = nn.Mamba2(D_MODEL, d_state=5, headdim=4, chunk_size=4, layer_idx=0, dtype=torch.float64, **options)
    for parameter in (layer.D, *([layer.lam_logit] if layer.discretization == "exp_trapezoidal" else [])):
        torch.nn.init.normal_(parameter)
    return layer


def test_mamba2_is_the_reference():
    layer, u = make_mamba2(**MAMBA2["groups"]), make_x()
    z, xBC, dt = layer.in_proj(u).split([24, 24 + 20, 6], -1)
    convolved = torch.nn.functional.silu(layer.conv1d(xBC.mT)[..., :STEPS].mT)
    x, B, C = convolved.split([24, 10, 10], -1)
    y = reference.two_sample_chunk_scan(
        *(x.unflatten(-1, (6, 4)), dt, -layer.A_log.exp(), B.unflatten(-1, (2, 5)), C.unflatten(-1, (2, 5))),
        D=layer.D.view(6, 4),
        dt_bias=layer.dt_bias,
        dt_softplus=True,
        discretization="exp_trapezoidal",
        lam=layer.lam_logit,
        lam_sigmoid=True,
    )
    gated = (y.flatten(2) * torch.nn.functional.silu(z)).unflatten(-1, (2, 12))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + layer.norm.eps)
    torch.testing.assert_close(layer(u), layer.out_proj(normed.flatten(2) * layer.norm.weight))


@every_mamba2
def test_mamba2_in_pieces_and_in_steps(options):
    layer, x = make_mamba2(**options), make_x()
    whole = layer(x)
    cache = layer.allocate_inference_cache(2, STEPS)
    assert cache[1].shape == (2, layer.nheads, 5, 6)
    with torch.no_grad():
        steps = [layer.step(x[:, t : t + 1], *cache)[0] for t in range(STEPS)]
        torch.testing.assert_close(torch.cat(steps, 1), whole.detach())
        params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        found = []
        for begin, end in ((0, 4), (4, 7), (7, 8), (8, 9)):
            params.seqlen_offset = begin
            found.append(layer(x[:, begin:end], inference_params=params))
    torch.testing.assert_close(torch.cat(found, 1), whole.detach())
    torch.testing.assert_close(params.key_value_memory_dict[0][1], cache[1])


@every_mamba2
def test_mamba2_of_packed_sequences(options):
    layer, x = make_mamba2(**options), make_x(1)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    expected = torch.cat([layer(x[:, :4]), layer(x[:, 4:])], 1)
    torch.testing.assert_close(layer(x, cu_seqlens=ends), expected)
    seq_idx = torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32)
    torch.testing.assert_close(layer(x, seq_idx=seq_idx), expected)
    with torch.no_grad():
        params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        layer(x[:, :7], cu_seqlens=torch.tensor([0, 4, 7]), inference_params=params)
        params.seqlen_offset = 7
        more = layer(torch.cat([make_x(1)[:, :1], x[:, 7:8]]), inference_params=params)
    torch.testing.assert_close(more[1:], expected[:, 7:8].detach())


@every_mamba2
def test_mamba2_gradients(options):
    """The gradients of all parameters equal finite differences."""
    layer, x = make_mamba2(**options), make_x(1)[:, :3].requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *values), fast_mode=True)


@every_mamba2
def test_state_dict_of_mamba2_names_the_rule(options):
    layer, other = make_mamba2(**options), make_mamba2(**options)
    torch.nn.init.normal_(other.A_log)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(make_x()), other(make_x()))
    assert ("lam_logit" in layer.no_weight_decay()) == (layer.discretization == "exp_trapezoidal")
    narrower = make_mamba2(**options | {"discretization": "zoh"})
    state_dict = {name: value for name, value in layer.state_dict().items() if name != "lam_logit"}
    with pytest.raises(RuntimeError, match="expected a checkpoint of discretization 'zoh'"):
        narrower.load_state_dict(state_dict)


@pytest.mark.parametrize("rule", ["foh_ramp", "exp_trapezoidal"])
def test_models_of_mamba2_generate(rule):
    torch.manual_seed(0)
    config = MambaConfig(
        d_model=16, n_layer=2, vocab_size=24, mixer="Mamba2", ssm_cfg={"headdim": 8, "d_state": 4}, discretization=rule
    )
    model = MambaLM(config).double()
    prompt = torch.randint(0, 20, (2, 5))
    with torch.no_grad():
        tokens = model.generate(prompt, max_length=9, top_k=1)
        for t in range(5, 9):
            logits = model(tokens[:, :t]).logits[:, -1]
            assert torch.equal(logits.argmax(-1), tokens[:, t])


def test_autocast():
    torch.manual_seed(0)
    layer = nn.Mamba(D_MODEL, discretization="exp_trapezoidal")
    x = make_x().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        out.float().sum().backward()
        with torch.no_grad():
            cache = layer.allocate_inference_cache(2, STEPS)
            steps = torch.cat([layer.step(x[:, t : t + 1], *cache)[0] for t in range(STEPS)], 1)
    assert out.dtype == torch.bfloat16 and layer.lam_logit.grad is not None
    torch.testing.assert_close(steps.float(), out.float(), rtol=0.05, atol=0.05)


@every_rule
def test_states_of_other_dtypes_and_shapes(rule):
    """A step writes into a state of its dtype, and into one of another dtype by a copy."""
    layer, x = make_layer(nn.SelectiveSSM, rule).float(), make_x().float()
    states = [layer.allocate_state(2, dtype) for dtype in (torch.float32, torch.float64)]
    outs = [torch.stack([layer.step(x[:, t], state) for t in range(STEPS)], 1) for state in states]
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0)
    torch.testing.assert_close(states[0].double(), states[1], rtol=0, atol=0)
    message = rf"expected {{}} of shape \(batch, d_inner \+ 1, d_state \+ 1\) with d_inner \+ 1 = {D_MODEL + 1}"
    wrong = torch.zeros(2, D_MODEL, 5)
    with pytest.raises(ValueError, match=f"^SelectiveSSM: {message.format('initial_state')}"):
        layer(x, initial_state=wrong)
    with pytest.raises(ValueError, match=rf"^SelectiveSSM.step: {message.format('state')}"):
        layer.step(x[:, 0], wrong)
    mamba = make_layer(nn.Mamba, rule, layer_idx=0)
    conv_state, state = mamba.allocate_inference_cache(2, STEPS)
    with pytest.raises(ValueError, match=r"expected ssm_state of shape \(batch, d_inner \+ 1, d_state \+ 1\)"):
        mamba.step(make_x()[:, :1], conv_state, state[:, :-1, :-1].clone())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nn.Mamba2(64, headdim=16, discretization="trapezoidal"),
            "Mamba2: discretization 'trapezoidal' has a rational decay, and this layer needs an exponential one, expected",
        ),
        (lambda: nn.Mamba(8, discretization="gbt_two_sample"), "Mamba: expected discretization 'gbt_two_sample' with alpha"),
        (lambda: nn.Mamba(8, discretization="gbt_two_sample(2)"), "Mamba: expected discretization 'gbt_two_sample' with alpha"),
        (lambda: nn.Mamba(8, discretization="foh_ramp", alpha=0.5), "Mamba: expected alpha with discretization"),
        (
            lambda: compat.bidirectional.Mamba(8, bimamba_type="v2", discretization="foh_ramp"),
            "Mamba: discretization 'foh_ramp' reads two input samples a step, which the mixer of several directions",
        ),
        (lambda: MambaConfig(mixer="MinGRU", discretization="foh_ramp"), "MambaConfig: discretization 'foh_ramp' reads two"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()
