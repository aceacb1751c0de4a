"""The reference of Mamba-3 against a complex scan, and against mamba_ssm's references, restated."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mamba3_helpers import MAMBA3, REFERENCE_SCAN, every_option, make_inputs
from torch import Tensor

from ssm_kernels import reference


def by_complex_scan(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Outputs and last states of diagonal complex rates A + i omega: no rotation, and no frame.

    With pair n of B as b = B_2n + i B_2n+1, the state h, one complex number for a row and a pair, is the rotated one turned
    back by the phase: h_t = e^(A dt - i omega dt) (h_{t-1} + (1 - lambda) dt x_{t-1} b_{t-1}) + lambda dt x_t b_t, and
    y = Re(h conj(c)).
    """
    x, dt, A, trap, angles = (inputs[name] for name in ("x", "dt", "A", "trap", "angles"))
    heads, groups = x.shape[2], inputs["B"].shape[2]
    B, C = (
        torch.view_as_complex(
            (inputs[name].repeat_interleave(heads // groups, 2) + inputs[f"{name}_bias"]).unflatten(-1, (-1, 2))
        )
        for name in "BC"
    )
    omega = math.pi * F.pad(torch.tanh(angles), (0, B.shape[-1] - angles.shape[-1]))[:, :, None]
    weight = torch.sigmoid(trap)
    h = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1], dtype=torch.complex128)
    last, outputs, phase = torch.zeros_like(h), [], 0
    for t in range(x.shape[1]):
        turn = torch.exp(torch.complex(A[:, t, :, None] * dt[:, t, :, None], -omega[:, t] * dt[:, t, :, None]))
        now = x[:, t, :, :, None] * B[:, t, :, None]
        h = turn[:, :, None] * (h + ((1 - weight) * dt)[:, t, :, None, None] * last) + (weight * dt)[:, t, :, None, None] * now
        outputs.append((h * C[:, t, :, None].conj()).real.sum(-1))
        last, phase = now, phase + omega[:, t] * dt[:, t, :, None]
    frame = torch.exp(1j * phase)[:, :, None]
    return torch.stack(outputs, 1), torch.view_as_real(h * frame).flatten(-2)


@pytest.mark.parametrize("angles", [1, 3])
def test_is_a_complex_scan(angles):
    inputs = make_inputs(seqlen=40, angles=angles, D=None, z=False, initial_states=False)
    out, state = by_complex_scan(inputs)
    found, _, ssm, *_ = MAMBA3.reference(**inputs)
    torch.testing.assert_close(found, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ssm, state, rtol=1e-12, atol=1e-12)


def step_of_mamba_ssm(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """mamba3_siso_step_ref of mamba_ssm's tests, for premultiplied ADT, keys K, queries Q and values V."""
    Q, K, V = inputs["C"], inputs["B"], inputs["x"]
    heads = V.shape[2]
    Q, K = (each.repeat_interleave(heads // each.shape[2], 2) for each in (Q, K))
    ADT, DT, Trap = inputs["A"] * inputs["dt"], inputs["dt"], inputs["trap"]
    Angles = math.pi * torch.tanh(inputs["angles"])[:, :, None]
    angle, ssm, k_state, v_state = (inputs[f"initial_{name}"] for name in ("angle", "ssm", "k", "x"))
    outputs = []
    for t in range(V.shape[1]):
        angle = torch.remainder(angle + Angles[:, t] * DT[:, t, :, None], 2 * math.pi)
        q, k = Q[:, t] + inputs["C_bias"], K[:, t] + inputs["B_bias"]
        pad = (0, q.shape[-1] // 2 - angle.shape[-1])
        cos, sin = F.pad(angle.cos(), pad, value=1.0), F.pad(angle.sin(), pad)
        q, k = (
            torch.stack(
                (each[..., ::2] * cos - each[..., 1::2] * sin, each[..., ::2] * sin + each[..., 1::2] * cos), -1
            ).flatten(-2)
            for each in (q, k)
        )
        trap, alpha = torch.sigmoid(Trap[:, t]), torch.exp(ADT[:, t])
        beta, gamma = (1 - trap) * DT[:, t] * alpha, trap * DT[:, t]
        ssm = alpha[..., None, None] * ssm
        ssm = ssm + beta[..., None, None] * k_state[..., None, :] * v_state[..., None]
        ssm = ssm + gamma[..., None, None] * k[..., None, :] * V[:, t, :, :, None]
        out = (ssm @ q[..., None]).squeeze(-1) + inputs["D"][:, None] * V[:, t]
        outputs.append(out * F.silu(inputs["z"][:, t]))
        k_state, v_state = k, V[:, t]
    return torch.stack(outputs, 1), angle, ssm, k_state, v_state


def test_is_mamba_ssm_step_reference():
    inputs = make_inputs(seqlen=20)
    out, angle, *states = MAMBA3.reference(**inputs)
    expected, turned, *others = step_of_mamba_ssm(inputs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.remainder(angle, 2 * math.pi), turned, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(states, others, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_is_mamba_ssm_chunk_reference():
    """mamba3_siso_fwd_ref of mamba_ssm's tests: the quadratic form with shifted weights, less what is not causal."""
    inputs = make_inputs(batch=1, seqlen=20, initial_states=False, D=None, z=False)
    out, _, ssm, last_k, _ = MAMBA3.reference(**inputs)
    dt, weight, V = inputs["dt"][0], torch.sigmoid(inputs["trap"][0]), inputs["x"][0]
    next_dt, next_weight = F.pad(dt[1:], (0, 0, 0, 1)), F.pad(weight[1:], (0, 0, 0, 1))
    shifted = next_dt * (1 - next_weight)
    scale = dt * weight + shifted
    phases = (math.pi * torch.tanh(inputs["angles"][0])[:, None] * dt[..., None]).cumsum(0)
    Q, K = (inputs[name][0].repeat_interleave(2, 1) + inputs[f"{name}_bias"] for name in "CB")
    own = (Q * K).sum(-1) * shifted
    Q, K = (reference.mamba3.rotated(each, phases, "pairs") for each in (Q, K))
    sums = (inputs["A"][0] * dt).cumsum(0)
    decay = torch.exp(sums[:, None] - sums[None])
    pairs = torch.einsum("thd,shd->hts", Q, K * scale[..., None]).tril()
    expected = torch.einsum("hts,tsh,shd->thd", pairs, decay, V) - own[..., None] * V
    torch.testing.assert_close(out[0], expected, rtol=1e-12, atol=1e-12)
    to_end = torch.exp(sums[-1] - sums)
    torch.testing.assert_close(ssm[0], torch.einsum("thn,thp,th->hpn", K * scale[..., None], V, to_end), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last_k[0], K[-1])


def make_ranked(ranks: int = 3, **options: Any) -> dict[str, Any]:
    inputs = make_inputs(biases=False, initial_states=False, rotate="halves", **options)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, seqlen, heads, headdim = inputs["x"].shape
    groups, dstate = inputs["B"].shape[2:]
    inputs |= {name: normal(batch, seqlen, ranks, groups, dstate) for name in "BC"}
    inputs |= {f"{name}_bias": normal(heads, ranks, dstate) for name in "BC"}
    return inputs | {f"mimo_{name}": normal(heads, ranks, headdim) for name in ("x", "z", "out")}


def test_ranks_are_sums_of_outer_products():
    """Trap 2: r is before g in memory, every group is read, and D multiplies v of each rank."""
    inputs = make_ranked(norm=True)
    out, _, ssm, last_k, _ = MAMBA3.reference(**inputs)
    assert last_k.shape == (2, 4, 3, 6)
    x, dt, weight = inputs["x"], inputs["dt"], torch.sigmoid(inputs["trap"])
    phases = (math.pi * torch.tanh(inputs["angles"])[:, :, None] * dt[..., None]).cumsum(1)
    k, q = (
        torch.stack(
            [
                reference.mamba3.rotated(
                    inputs[name][:, :, r].repeat_interleave(2, 2) + inputs[f"{name}_bias"][:, r], phases, "halves"
                )
                for r in range(3)
            ],
            2,
        )
        for name in "BC"
    )
    v = x[:, :, None] * inputs["mimo_x"].transpose(0, 1)
    S, before, outputs = 0, 0, []
    for t in range(x.shape[1]):
        now = sum(v[:, t, r, :, :, None] * k[:, t, r, :, None] for r in range(3))
        decay = torch.exp(inputs["A"][:, t] * dt[:, t])[..., None, None]
        S = decay * (S + ((1 - weight) * dt)[:, t, :, None, None] * before) + (weight * dt)[:, t, :, None, None] * now
        before, total = now, 0
        for r in range(3):
            y = (S * q[:, t, r, :, None]).sum(-1) + inputs["D"][:, None] * v[:, t, r]
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * inputs["norm_weight"]
            total = total + inputs["mimo_out"][:, r] * y * F.silu(inputs["z"][:, t] * inputs["mimo_z"][:, r])
        outputs.append(total)
    torch.testing.assert_close(out, torch.stack(outputs, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ssm, S, rtol=1e-12, atol=1e-12)


def test_one_rank_is_no_rank():
    inputs = make_inputs(initial_states=False)
    ranked = inputs | {name: inputs[name].unsqueeze(2) for name in "BC"}
    ranked |= {name: inputs[name].unsqueeze(1) for name in ("B_bias", "C_bias")}
    for found, wanted in zip(MAMBA3.reference(**ranked), MAMBA3.reference(**inputs), strict=True):
        torch.testing.assert_close(found.reshape(wanted.shape), wanted, rtol=0, atol=0)


def test_ranks_continue():
    inputs = make_ranked(seqlen=7)
    whole = MAMBA3.reference(**inputs)
    names = ("x", "dt", "A", "B", "C", "trap", "angles", "z")
    first, second = (inputs | {name: inputs[name][:, part] for name in names} for part in (slice(3), slice(3, None)))
    out, *states = MAMBA3.reference(**first)
    out_2, *last = MAMBA3.reference(
        **second | dict(zip(("initial_angle", "initial_ssm", "initial_k", "initial_x"), states, strict=True))
    )
    torch.testing.assert_close(torch.cat((out, out_2), 1), whole[0], rtol=1e-12, atol=1e-12)
    for found, wanted in zip(last, whole[1:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@every_option
def test_packed_and_reset_are_separate_sequences(options):
    """The reference's own packing: sequences one by one, with their states."""
    if options.get("cu_seqlens") is None or options.get("resets") is not None:
        options = options | {"cu_seqlens": (0, 2, 2, 7), "resets": None}
    inputs = make_inputs(**options)
    whole = MAMBA3.reference(**inputs)
    outputs, lasts = [], []
    bounds = inputs["cu_seqlens"].tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = {
            name: value[:, begin:end]
            if name in ("x", "dt", "A", "B", "C", "trap", "angles", "z") and value is not None
            else value
            for name, value in inputs.items()
        }
        part |= {
            name: value[row : row + 1] for name, value in inputs.items() if name.startswith("initial") and value is not None
        }
        out, *last = REFERENCE_SCAN(**part | {"cu_seqlens": None}, return_final_states=True)
        outputs.append(out)
        lasts.append(last)
    torch.testing.assert_close(whole[0], torch.cat(outputs, 1), rtol=1e-12, atol=1e-12)
    for i, found in enumerate(whole[1:]):
        torch.testing.assert_close(found, torch.cat([last[i] for last in lasts]), rtol=1e-12, atol=1e-12)
