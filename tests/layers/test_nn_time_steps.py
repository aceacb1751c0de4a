"""Layers with measured steps: ``time_steps`` scales the steps of A and B, or of A alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels import compat, nn, reference

RULES = ("zoh", "zoh_exact", "poly", "highorder", "rk4", "dirac", "exp_trapezoidal")
OF_BOTH_ALONE = ("bilinear", "euler", "foh_ramp", "trapezoidal")
CASES = [(rule, "A") for rule in RULES] + [(rule, "both") for rule in (*RULES, *OF_BOTH_ALONE)]
every_case = pytest.mark.parametrize(("rule", "scale"), CASES)
D_MODEL, STEPS = 12, 9


def make_layer(kind: type, rule: str, scale: str, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(D_MODEL, d_state=5, discretization=rule, time_steps_scale=scale, dtype=torch.float64, **options)
    if rule == "exp_trapezoidal":
        torch.nn.init.normal_(layer.lam_logit)
    return layer


def make_inputs(batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, STEPS, D_MODEL, generator=generator, dtype=torch.float64)
    time_steps = 3 * torch.rand(batch, STEPS, generator=generator, dtype=torch.float64)
    time_steps[:, 2] = 0
    return x, time_steps


@every_case
def test_selective_ssm_is_the_reference(rule, scale):
    layer, (x, time_steps) = make_layer(nn.SelectiveSSM, rule, scale), make_inputs()
    z = torch.randn_like(x)
    raw, B, C, bias = layer._project(x)
    own = F.softplus(raw + bias)
    scaled = own * time_steps[..., None]
    steps = {"delta": own, "delta_A": scaled.mT} if scale == "A" else {"delta": scaled}
    options: dict[str, Any] = {"lam": layer.lam_logit[:, None], "lam_sigmoid": True} if rule == "exp_trapezoidal" else {}
    two = rule in ("exp_trapezoidal", "foh_ramp", "trapezoidal")
    function = reference.two_sample_scan if two else reference.selective_scan
    delta = steps.pop("delta").mT
    arguments = (x.mT, delta, -layer.A_log.exp(), B.mT, C.mT, layer.D, z.mT)
    expected, last = function(*arguments, discretization=rule, **options, **steps, return_last_state=True)
    time_steps = time_steps.requires_grad_()
    out, state = layer(x, z, return_last_state=True, time_steps=time_steps)
    torch.testing.assert_close(out, expected.mT)
    torch.testing.assert_close(state[:, :-1, :-1] if two else state, last.state if two else last)
    (out.sum() + state.sum()).backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert time_steps.grad.abs().sum() > 0


@every_case
def test_ones_change_nothing(rule, scale):
    layer, (x, _) = make_layer(nn.Mamba, rule, scale), make_inputs()
    ones = torch.ones(2, STEPS)
    torch.testing.assert_close(layer(x, time_steps=ones), layer(x))


@every_case
def test_selective_ssm_in_pieces_and_in_steps(rule, scale):
    layer, (x, time_steps) = make_layer(nn.SelectiveSSM, rule, scale), make_inputs()
    whole, last = layer(x, return_last_state=True, time_steps=time_steps)
    first, state = layer(x[:, :4], return_last_state=True, time_steps=time_steps[:, :4])
    second, end = layer(x[:, 4:], initial_state=state, return_last_state=True, time_steps=time_steps[:, 4:])
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, last)
    state = layer.allocate_state(2)
    steps = [layer.step(x[:, t], state, time_steps=time_steps[:, t]) for t in range(STEPS)]
    torch.testing.assert_close(torch.stack(steps, 1), whole)
    torch.testing.assert_close(state, last)


@every_case
def test_mamba_in_pieces_and_in_steps(rule, scale):
    layer, (x, time_steps) = make_layer(nn.Mamba, rule, scale, layer_idx=0), make_inputs()
    whole = layer(x, time_steps=time_steps)
    cache = layer.allocate_inference_cache(2, STEPS)
    with torch.no_grad():
        steps = [layer.step(x[:, t : t + 1], *cache, time_steps=time_steps[:, t : t + 1])[0] for t in range(STEPS)]
        torch.testing.assert_close(torch.cat(steps, 1), whole.detach())
        params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        found = []
        for begin, end in ((0, 4), (4, 7), (7, 8), (8, 9)):
            params.seqlen_offset = begin
            found.append(layer(x[:, begin:end], inference_params=params, time_steps=time_steps[:, begin:end]))
    torch.testing.assert_close(torch.cat(found, 1), whole.detach())


@every_case
def test_mamba_of_packed_sequences(rule, scale):
    layer, (x, time_steps) = make_layer(nn.Mamba, rule, scale, layer_idx=0), make_inputs(1)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    parts = [layer(x[:, span], time_steps=time_steps[:, span]) for span in (slice(0, 4), slice(4, 9))]
    expected = torch.cat(parts, 1)
    torch.testing.assert_close(layer(x, cu_seqlens=ends, time_steps=time_steps), expected)
    seq_idx = torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32)
    torch.testing.assert_close(layer(x, seq_idx=seq_idx, time_steps=time_steps), expected)
    with torch.no_grad():
        params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        torch.testing.assert_close(layer(x, cu_seqlens=ends, inference_params=params, time_steps=time_steps), expected)


@every_case
def test_mamba_gradients(rule, scale):
    layer, (x, time_steps) = make_layer(nn.Mamba, rule, scale), make_inputs(1)
    x, time_steps = x[:, :3].requires_grad_(), (time_steps[:, :3] + 0.1).requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def call(x: Tensor, time_steps: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, given, (x,), {"time_steps": time_steps})

    assert torch.autograd.gradcheck(call, (x, time_steps, *values), fast_mode=True)


@pytest.mark.parametrize("scale", ["A", "both"])
def test_autocast(scale):
    torch.manual_seed(0)
    layer = nn.Mamba(D_MODEL, time_steps_scale=scale)
    x, time_steps = (each.float() for each in make_inputs())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, time_steps=time_steps)
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x, time_steps=time_steps), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.Mamba(8, discretization="bilinear", time_steps_scale="A"), "Mamba: expected time_steps_scale 'A' with one"),
        (
            lambda: nn.SelectiveSSM(8, discretization="foh_ramp", time_steps_scale="A"),
            "SelectiveSSM: expected time_steps_scale",
        ),
        (lambda: nn.Mamba(8, time_steps_scale="B"), "Mamba: unknown time_steps_scale 'B', expected"),
        (
            lambda: nn.Mamba(8)(torch.zeros(2, 5, 8), time_steps=torch.zeros(2, 4)),
            r"Mamba: expected time_steps of shape \(batch, seqlen\) with batch = 2, seqlen = 5",
        ),
        (
            lambda: nn.SelectiveSSM(8).step(torch.zeros(2, 8), torch.zeros(2, 8, 16), time_steps=torch.zeros(2, 1)),
            r"SelectiveSSM.step: expected time_steps of shape \(batch,\)",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"^Mamba: expected time_steps to be a tensor, got float$"):
        nn.Mamba(8)(torch.zeros(2, 5, 8), time_steps=1.0)
    with pytest.raises(RuntimeError, match=r"^Mamba: expected time_steps of a floating-point dtype"):
        nn.Mamba(8)(torch.zeros(2, 5, 8), time_steps=torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match=r"^Mamba: expected no time_steps with bimamba_type 'v2'"):
        compat.bidirectional.Mamba(8, bimamba_type="v2")(torch.zeros(2, 5, 8), time_steps=torch.ones(2, 5))
