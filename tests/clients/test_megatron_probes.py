"""Megatron-LM's checks before it uses mamba_ssm and causal_conv1d, and the calls of its Mamba mixer."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest
import torch
from packaging.version import Version

from ssm_kernels import compat, reference

CLIENT = "megatron-core"
CLIENT_VERSION = "of 2026-08-22, its calls restated"
OPERATOR = "mamba2_mixer"


@pytest.mark.parametrize(
    ("package", "lowest"), [("mamba_ssm", "2.2.6.post3"), ("mamba-ssm", "2.2.6.post3"), ("causal_conv1d", "1.6.0")]
)
def test_versions_are_new_enough(package, lowest):
    with compat.installed():
        assert Version(importlib.metadata.version(package)) >= Version(lowest)


def test_signatures_have_the_arguments_that_are_probed():
    with compat.installed():
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
    for function in (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined):
        assert "state_dtype" in inspect.signature(function).parameters


def test_gated_norm_can_be_subclassed(device):
    with compat.installed():
        from mamba_ssm.ops.triton.layernorm_gated import RMSNorm

    class ExtendedRMSNorm(RMSNorm):
        def sharded_state_dict(self, prefix=""):
            return {f"{prefix}weight": self.weight}

    torch.manual_seed(0)
    norm = ExtendedRMSNorm(8, eps=1e-5, group_size=4, norm_before_gate=False, device=device, dtype=torch.float32)
    x, z = torch.randn(2, 3, 8, device=device), torch.randn(2, 3, 8, device=device)
    gated = (x * torch.nn.functional.silu(z)).unflatten(-1, (2, 4))
    expected = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(norm(x, z), expected.flatten(-2) * norm.weight)
    assert [*norm.sharded_state_dict("a.")] == ["a.weight"]


# The calls of megatron/core/ssm: mamba_mixer.py, causal_conv1d.py and gated_delta_product.py. The mixer keeps activations as
# (seqlen, batch, columns), projects in bfloat16 and keeps A_log and D in float32.
HEADS, HEADDIM, GROUPS, DSTATE, CHUNK = 4, 8, 2, 16, 16
DIM = HEADS * HEADDIM
COLUMNS = DIM + 2 * GROUPS * DSTATE


def mixer_tensors(device, dtype, has_hdim=False, batch=2, seqlen=37):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    return {
        "zxBCdt": randn(seqlen, batch, DIM + COLUMNS + HEADS).to(dtype),
        "conv1d_weight": randn(COLUMNS, 1, 4).to(dtype),
        "conv1d_bias": randn(COLUMNS).to(dtype),
        "dt_bias": randn(HEADS).to(dtype),
        "A_log": randn(HEADS),
        "D": randn(DIM if has_hdim else HEADS),
    }


def compose(zxBCdt, conv1d_weight, conv1d_bias, dt_bias, A_log, D, seq_idx=None, gated=True):
    """The mixer between its projections, in the dtype of its tensors: y, (batch, seqlen, columns), z and the last states."""
    z, xBC, dt = zxBCdt.transpose(0, 1).split([DIM, COLUMNS, HEADS], dim=-1)
    xBC = reference.causal_conv1d(xBC, conv1d_weight[:, 0], conv1d_bias, activation="silu", seq_idx=seq_idx)
    x, B, C = xBC.split([DIM, GROUPS * DSTATE, GROUPS * DSTATE], dim=-1)
    y, states = reference.ssd_chunk_scan(
        x.unflatten(-1, (HEADS, HEADDIM)),
        dt,
        -A_log.exp(),
        B.unflatten(-1, (GROUPS, DSTATE)),
        C.unflatten(-1, (GROUPS, DSTATE)),
        D=D.view(HEADS, HEADDIM) if D.shape[0] == DIM else D,
        z=z.unflatten(-1, (HEADS, HEADDIM)) if gated else None,
        dt_bias=dt_bias,
        dt_softplus=True,
        seq_idx=seq_idx,
        return_final_states=True,
    )
    return y.flatten(-2), z, states


def training_call(tensors, seq_idx=None, state_dtype=None):
    with compat.installed():
        from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined
    D = tensors["D"]
    has_hdim = D.shape[0] == DIM
    y = mamba_split_conv1d_scan_combined(
        tensors["zxBCdt"].transpose(0, 1).contiguous(),
        tensors["conv1d_weight"].squeeze(1),
        tensors["conv1d_bias"],
        tensors["dt_bias"].float(),
        -torch.exp(tensors["A_log"].float()),
        D=D.float().view(HEADS, HEADDIM) if has_hdim else D,
        chunk_size=CHUNK,
        activation="silu",
        headdim=None if has_hdim else HEADDIM,
        ngroups=GROUPS,
        norm_before_gate=False,
        seq_idx=seq_idx,
        state_dtype=state_dtype,
    )
    return y.transpose(0, 1).contiguous()


def assert_close_in_bfloat16(out, exact, coarse):
    """The error against float64 is at most twice the one of PyTorch in bfloat16."""
    assert out.dtype == coarse.dtype
    error, own_error = ((each.double() - exact).norm() / exact.norm() for each in (out, coarse))
    assert error <= 2 * own_error + torch.finfo(out.dtype).eps


@pytest.mark.parametrize("has_hdim", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.serves("training call", model="`MambaMixer`")
def test_training_call(has_hdim, packed, device):
    """The fused function without norm and out-projection gates the scan. seq_idx is int32, its last number is padding's."""
    tensors = mixer_tensors(device, torch.float32, has_hdim, batch=1 if packed else 2)
    seq_idx = torch.tensor([[0] * 5 + [1] * 20 + [2] * 12], dtype=torch.int32, device=device) if packed else None
    ours = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    exact = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    y = training_call(ours, seq_idx, torch.float32)
    expected = compose(**exact, seq_idx=seq_idx)[0].transpose(0, 1)
    assert y.shape == (37, tensors["zxBCdt"].shape[1], DIM) and y.is_contiguous()
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, tensor in exact.items():
        scale = tensor.grad.abs().max().item()
        torch.testing.assert_close(ours[name].grad.double(), tensor.grad, rtol=1e-4, atol=1e-4 * scale, msg=name)


@pytest.mark.serves("bf16", model="`MambaMixer`")
def test_training_call_in_bfloat16(device):
    tensors = mixer_tensors(device, torch.bfloat16)
    y = training_call(tensors, state_dtype=torch.bfloat16)
    exact = compose(**{name: tensor.double() for name, tensor in tensors.items()})[0].transpose(0, 1)
    coarse = compose(**{name: tensor.bfloat16() for name, tensor in tensors.items()})[0].transpose(0, 1)
    assert_close_in_bfloat16(y, exact, coarse)


@pytest.mark.serves("prompt and cache", model="`MambaMixer`")
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rmsnorm", [False, True])
def test_prompt_call(rmsnorm, state_dtype, device):
    """Parts instead of the fused function: the mixer copies the returned states into its cache, of any dtype."""
    with compat.installed():
        from causal_conv1d import causal_conv1d_fn
        from mamba_ssm.ops.triton.layernorm_gated import RMSNorm
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    tensors = mixer_tensors(device, torch.float32)
    z, xBC, dt = tensors["zxBCdt"].transpose(0, 1).contiguous().split([DIM, COLUMNS, HEADS], dim=-1)
    xBC = causal_conv1d_fn(
        x=xBC.transpose(1, 2).contiguous(),
        weight=tensors["conv1d_weight"].squeeze(1),
        bias=tensors["conv1d_bias"],
        activation="silu",
    )
    x, B, C = xBC.transpose(1, 2).contiguous().split([DIM, GROUPS * DSTATE, GROUPS * DSTATE], dim=-1)
    z = z.unflatten(-1, (HEADS, HEADDIM)).contiguous()
    result = mamba_chunk_scan_combined(
        x.unflatten(-1, (HEADS, HEADDIM)).contiguous(),
        dt.contiguous(),
        -torch.exp(tensors["A_log"].float()),
        B.unflatten(-1, (GROUPS, DSTATE)).contiguous(),
        C.unflatten(-1, (GROUPS, DSTATE)).contiguous(),
        CHUNK,
        D=tensors["D"],
        z=None if rmsnorm else z,
        dt_bias=tensors["dt_bias"].float(),
        dt_softplus=True,
        return_final_states=True,
        initial_states=None,
        state_dtype=state_dtype,
    )
    y, last_state = result
    ssm_state = torch.zeros(2, HEADS, HEADDIM, DSTATE, dtype=state_dtype, device=device)
    ssm_state.copy_(last_state)
    y = y.flatten(-2).transpose(0, 1).contiguous()
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    expected, expected_z, states = compose(**exact, gated=not rmsnorm)
    expected = expected.transpose(0, 1)
    if rmsnorm:
        norm = RMSNorm(DIM, eps=1e-5, group_size=DIM // GROUPS, norm_before_gate=False, device=device, dtype=torch.float32)
        y = norm(y, z.flatten(-2).transpose(0, 1).contiguous())
        ones = torch.ones(DIM, dtype=torch.float64, device=device)
        expected = reference.rms_norm_gated(
            expected, ones, expected_z.transpose(0, 1), eps=1e-5, group_size=DIM // GROUPS, norm_before_gate=False
        )
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    tolerance = 1e-4 if state_dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ssm_state.double(), states, rtol=tolerance, atol=1e-4)


def test_norm_without_gate(device):
    """After the fused function, which gated already, the mixer calls its norm with one argument."""
    with compat.installed():
        from mamba_ssm.ops.triton.layernorm_gated import RMSNorm
    norm = RMSNorm(DIM, eps=1e-5, group_size=DIM // GROUPS, norm_before_gate=False, device=device, dtype=torch.float32)
    y = torch.randn(5, 2, DIM, device=device)
    expected = torch.nn.functional.rms_norm(y.unflatten(-1, (GROUPS, -1)), (DIM // GROUPS,), eps=1e-5).flatten(-2)
    torch.testing.assert_close(norm(y), expected)
    torch.testing.assert_close(norm(y, None), expected)


@pytest.mark.serves("context-parallel convolution", model="`causal_conv1d_cp`")
def test_convolution_of_a_context_parallel_shard(device):
    """A shard takes the end of the one before as initial_states, and its numbers of sequences as seq_idx, in one call."""
    with compat.installed():
        from causal_conv1d import causal_conv1d_fn
    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((1, 24, 8), (8, 4), (8,)))
    seq_idx = torch.tensor([[0] * 10 + [1] * 7 + [2] * 7], dtype=torch.int32, device=device)
    whole = causal_conv1d_fn(x=x.transpose(1, 2), weight=weight, bias=bias, seq_idx=seq_idx, activation="silu")
    shards = []
    for start in (0, 8, 16):
        own = seq_idx[:, start : start + 8]
        tail = (
            x[:, start - 3 : start].masked_fill((seq_idx[:, start - 3 : start] != own[:, :1])[..., None], 0) if start else None
        )
        shards.append(
            causal_conv1d_fn(
                x=x[:, start : start + 8].transpose(1, 2),
                weight=weight,
                bias=bias,
                seq_idx=own,
                initial_states=None if tail is None else tail.transpose(1, 2),
                activation="silu",
            )
        )
    torch.testing.assert_close(torch.cat(shards, -1), whole)


@pytest.mark.serves("step of a batch of slots", model="`MambaMixer`")
def test_step_of_slots(device):
    """causal_conv1d_update with int32 slots of a cache; -1 is a lane that no request uses."""
    with compat.installed():
        from causal_conv1d import causal_conv1d_update
    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((3, COLUMNS), (COLUMNS, 4), (COLUMNS,)))
    conv_state = torch.randn(5, COLUMNS, 4, device=device)
    before = conv_state.clone()
    slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=device)
    out = causal_conv1d_update(x, conv_state, weight, bias, "silu", conv_state_indices=slots).unsqueeze(1)
    assert out.shape == (3, 1, COLUMNS) and not out[1].any()
    for row, slot in ((0, 3), (2, 0)):
        steps = torch.cat([before[slot, :, 1:], x[row, :, None]], dim=-1)
        torch.testing.assert_close(conv_state[slot], steps)
        torch.testing.assert_close(out[row, 0], torch.nn.functional.silu((steps * weight).sum(-1) + bias))
    assert torch.equal(conv_state[[1, 2, 4]], before[[1, 2, 4]])
