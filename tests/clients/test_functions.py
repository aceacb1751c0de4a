"""The functions of ssm_kernels.compat: values and gradients, dtypes, in-place effects and returned tuples of the peers."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPAT_VERSION
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ssm_kernels import reference
from ssm_kernels.compat._modules import MODULES
from ssm_kernels.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from ssm_kernels.compat.layer_norm import RMSNorm as AddRMSNorm
from ssm_kernels.compat.layer_norm import layer_norm_fn, rms_norm_fn
from ssm_kernels.compat.norms import LayerNorm, RMSNorm, layernorm_fn, rmsnorm_fn
from ssm_kernels.compat.references import causal_conv1d_ref
from ssm_kernels.compat.selective_scan import mamba_inner_fn, selective_scan_fn, selective_state_update
from ssm_kernels.compat.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

OPERATOR = "every operator"
CLIENT = "mamba_ssm"
CLIENT_VERSION = COMPAT_VERSION
OTHER_MODULES = (
    *(f"ssm_kernels.compat.{name}" for name in ("models", "generation", "mixer_seq_simple", "unserved")),
    "ssm_kernels.models.mamba_lm",
    "ssm_kernels.models.mixer_model",
    "ssm_kernels.compat.layernorm",
    "ssm_kernels.compat.scan_extensions",
    "ssm_kernels.compat.conv_extensions",
)
# Those of the operators.
FUNCTIONS = {
    name: value
    for names in MODULES.values()
    for name, value in names.items()
    if inspect.isfunction(value) and value.__module__ not in OTHER_MODULES
}
LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def served(function: str):
    return pytest.mark.serves("values and gradients", model=f"`{function}`")


def randn(*shape: int, device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device).to(dtype)


def assert_same_values_and_gradients(function, expected, tensors: dict[str, Tensor], **tolerance: float) -> None:
    """Compares every result and the gradient of every tensor. Gradients have the dtype of their tensor."""
    results, gradients = [], []
    for call in (function, expected):
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
        out = call(**leaves)
        out = out if isinstance(out, tuple) else (out,)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.device) for each in out]
        sum((weight * each).sum() for weight, each in zip(weights, out, strict=True)).backward()
        results.append([each.detach().double() for each in out])
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    torch.testing.assert_close(results[0], results[1], **tolerance)
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.dtype == tensors[name].dtype, name
        torch.testing.assert_close(gradient, gradients[1][name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def scan_tensors(device: str) -> dict[str, Tensor]:
    return {
        "u": randn(2, 6, 17, device=device),
        "delta": randn(2, 6, 17, device=device),
        "A": -randn(6, 4, device=device).exp(),
        "B": randn(2, 2, 4, 17, device=device),
        "C": randn(2, 4, 17, device=device),
        "D": randn(6, device=device),
        "z": randn(2, 6, 17, device=device),
        "delta_bias": randn(6, device=device),
    }


@served("selective_scan_fn")
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_selective_scan_fn(device, discretization):
    def expected(**tensors):
        return reference.selective_scan(**tensors, delta_softplus=True, return_last_state=True, discretization=discretization)

    def function(u, delta, A, B, C, D, z, delta_bias):
        return selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, True, True, discretization=discretization)

    assert_same_values_and_gradients(function, expected, scan_tensors(device))


@served("mamba_inner_fn")
@pytest.mark.parametrize("normalized", [False, True])
def test_mamba_inner_fn(device, normalized):
    dim, dstate, rank = 6, 4, 3
    tensors = {
        "xz": randn(2, 2 * dim, 11, device=device),
        "conv1d_weight": randn(dim, 1, 4, device=device),
        "conv1d_bias": randn(dim, device=device),
        "x_proj_weight": randn(rank + 2 * dstate, dim, device=device),
        "delta_proj_weight": randn(dim, rank, device=device),
        "out_proj_weight": randn(5, dim, device=device),
        "out_proj_bias": randn(5, device=device),
        "A": -randn(dim, dstate, device=device).exp(),
        "D": randn(dim, device=device),
        "delta_bias": randn(dim, device=device),
    }
    if normalized:
        tensors |= {f"{name}_rms_weight": randn(size, device=device) for name, size in (("b", 4), ("c", 4), ("dt", 6))}

    def normalize(v, weight):
        return v if weight is None else F.rms_norm(v, v.shape[-1:], weight, 1e-6)

    def expected(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, D, delta_bias,
        b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None,
    ):  # fmt: skip
        x, z = xz.chunk(2, dim=1)
        x = F.silu(F.conv1d(F.pad(x, (3, 0)), conv1d_weight, conv1d_bias, groups=dim))
        low, B, C = F.linear(x.transpose(1, 2), x_proj_weight).split([rank, dstate, dstate], dim=-1)
        delta = normalize(F.linear(low, delta_proj_weight), dt_rms_weight)
        B, C = normalize(B, b_rms_weight), normalize(C, c_rms_weight)
        y = reference.selective_scan(
            x, delta.transpose(1, 2), A, B.transpose(1, 2), C.transpose(1, 2), D, z, delta_bias, delta_softplus=True
        )
        return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)

    assert_same_values_and_gradients(mamba_inner_fn, expected, tensors)


def ssd_tensors(device: str, batch: int = 2) -> dict[str, Tensor]:
    return {
        "x": randn(batch, 19, 4, 8, device=device),
        "dt": randn(batch, 19, 4, device=device),
        "A": -randn(4, device=device).exp(),
        "B": randn(batch, 19, 2, 6, device=device),
        "C": randn(batch, 19, 2, 6, device=device),
        "D": randn(4, device=device),
        "z": randn(batch, 19, 4, 8, device=device),
        "dt_bias": randn(4, device=device),
        "initial_states": randn(batch, 4, 8, 6, device=device),
    }


@served("mamba_chunk_scan_combined")
def test_mamba_chunk_scan_combined(device):
    options = {"dt_softplus": True, "dt_limit": (0.1, 2.0), "return_final_states": True}

    def function(x, dt, A, B, C, D, z, dt_bias, initial_states):
        return mamba_chunk_scan_combined(x, dt, A, B, C, 16, D, z, dt_bias, initial_states, **options)

    def expected(**tensors):
        return reference.ssd_chunk_scan(**tensors, **options)

    assert_same_values_and_gradients(function, expected, ssd_tensors(device))


@pytest.mark.serves("states of packed sequences", model="`mamba_chunk_scan_combined`")
def test_states_of_packed_sequences(device):
    tensors = ssd_tensors(device, batch=1)
    cu_seqlens = torch.tensor([0, 7, 16], device=device)  # steps 16 to 18 are padding
    seq_idx = torch.tensor([[0] * 7 + [1] * 9 + [-1] * 3], device=device)

    def function(**given):
        return mamba_chunk_scan_combined(
            **given, chunk_size=16, seq_idx=seq_idx, cu_seqlens=cu_seqlens, return_varlen_states=True, return_final_states=True
        )

    def expected(**given):
        out = reference.ssd_chunk_scan(**given, seq_idx=seq_idx)
        final_states = torch.zeros_like(given["initial_states"])  # the row ends with padding
        states = []
        for start, end in ((0, 7), (7, 16)):
            steps = {name: given[name][:, start:end] for name in ("x", "dt", "B", "C", "z")}
            initial = given["initial_states"] if start == 0 else None
            options = {**given, **steps, "initial_states": initial, "return_final_states": True}
            states.append(reference.ssd_chunk_scan(**options)[1])
        return out, final_states, torch.cat(states)

    assert_same_values_and_gradients(function, expected, tensors)


def test_packing_must_agree():
    tensors = ssd_tensors("cpu", batch=1)
    options = {"chunk_size": 16, "cu_seqlens": torch.tensor([0, 7, 19]), "return_varlen_states": True}
    with pytest.raises(ValueError, match=r"same packing, got sequences that begin at \[8\] and at \[7\]"):
        mamba_chunk_scan_combined(**tensors, **options, seq_idx=torch.tensor([[0] * 8 + [1] * 11]))
    with pytest.raises(ValueError, match="expected seq_idx with return_varlen_states of several sequences"):
        mamba_chunk_scan_combined(**tensors, **options)
    with pytest.raises(ValueError, match="expected cu_seqlens with return_varlen_states, got None"):
        mamba_chunk_scan_combined(**tensors, chunk_size=16, return_varlen_states=True)


@pytest.mark.parametrize("change", [lambda h: h[None], lambda h: h[:, :1], lambda h: h[0], lambda h: h.repeat(2, 1, 1, 1)])
def test_packed_sequences_have_one_initial_state(change):
    tensors = ssd_tensors("cpu", batch=1)
    initial_states = change(tensors.pop("initial_states"))
    packing = {"cu_seqlens": torch.tensor([0, 7, 19]), "seq_idx": torch.tensor([[0] * 7 + [1] * 12])}
    message = r"^mamba_chunk_scan_combined: expected initial_states of shape \(1, heads, headdim, dstate\).*got "
    with pytest.raises(ValueError, match=message + re.escape(str([*initial_states.shape]))):
        mamba_chunk_scan_combined(**tensors, **packing, chunk_size=16, initial_states=initial_states, return_varlen_states=True)


@served("mamba_split_conv1d_scan_combined")
@pytest.mark.parametrize("norm", ["none", "before the gate", "after the gate"])
@pytest.mark.parametrize("mlp", [0, 3])
def test_mamba_split_conv1d_scan_combined(device, norm, mlp):
    heads, headdim, groups, dstate = 4, 8, 2, 6
    dim, columns = heads * headdim, heads * headdim + 2 * groups * dstate
    tensors = {
        "zxbcdt": randn(2, 13, 2 * mlp + dim + columns + heads, device=device),
        "conv1d_weight": randn(columns, 4, device=device),
        "conv1d_bias": randn(columns, device=device),
        "dt_bias": randn(heads, device=device),
        "A": -randn(heads, device=device).exp(),
        "D": randn(heads, device=device),
        "outproj_weight": randn(5, mlp + dim, device=device),
        "outproj_bias": randn(5, device=device),
    }
    before = norm == "before the gate"
    if norm != "none":
        tensors["rmsnorm_weight"] = randn(dim, device=device)

    def function(**given):
        return mamba_split_conv1d_scan_combined(
            **given, chunk_size=16, headdim=headdim, ngroups=groups, norm_before_gate=before, return_final_states=True
        )

    def normalize(v, weight):
        return F.rms_norm(v.unflatten(-1, (groups, -1)), (dim // groups,), eps=1e-6).flatten(-2) * weight

    def expected(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, outproj_weight, outproj_bias, rmsnorm_weight=None):
        gate, up, z, xBC, dt = zxbcdt.split([mlp, mlp, dim, columns, heads], dim=-1)
        padded = F.pad(xBC.transpose(1, 2), (3, 0))
        xBC = F.silu(F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=columns)).transpose(1, 2)
        x, B, C = xBC.split([dim, groups * dstate, groups * dstate], dim=-1)
        B, C = B.unflatten(-1, (groups, dstate)), C.unflatten(-1, (groups, dstate))
        y, states = reference.ssd_chunk_scan(
            x.unflatten(-1, (heads, headdim)), dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True, return_final_states=True
        )
        y = y.flatten(-2)
        if rmsnorm_weight is None:
            y = y * F.silu(z)
        else:
            y = normalize(y, rmsnorm_weight) * F.silu(z) if before else normalize(y * F.silu(z), rmsnorm_weight)
        return F.linear(torch.cat([F.silu(gate) * up, y], dim=-1), outproj_weight, outproj_bias), states

    assert_same_values_and_gradients(function, expected, tensors)


@served("causal_conv1d_fn")
@pytest.mark.parametrize("layout", ["channels-first", "channels-last"])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_causal_conv1d_fn(device, layout, activation):
    x, weight, bias = randn(2, 6, 13, device=device), randn(6, 4, device=device), randn(6, device=device)
    initial = randn(2, 6, 3, device=device)

    def function(x, weight, bias, initial_states):
        if layout == "channels-last":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        out, states = causal_conv1d_fn(x, weight, bias, None, initial_states, True, None, activation)
        assert out.stride() == x.stride()
        return out, states

    def expected(x, weight, bias, initial_states):
        steps = torch.cat([initial_states, x], dim=-1)
        out = F.conv1d(steps, weight[:, None], bias, groups=6)
        return out if activation is None else F.silu(out), steps[..., -3:]

    tensors = {"x": x, "weight": weight, "bias": bias, "initial_states": initial}
    assert_same_values_and_gradients(function, expected, tensors)
    states_out = torch.empty(2, 6, 3, dtype=x.dtype, device=device)
    states = causal_conv1d_fn(x, weight, bias, return_final_states=True, final_states_out=states_out)[1]
    assert states is states_out and torch.equal(states_out, x[..., -3:])


@pytest.mark.parametrize("function", [causal_conv1d_fn, causal_conv1d_ref])
def test_a_cache_of_final_states_stays_outside_of_the_graph(function, device):
    x, weight = randn(2, 6, 13, device=device), randn(6, 4, device=device)
    cache = torch.zeros(4, 6, 3, dtype=x.dtype, device=device)
    x.requires_grad_()
    states = function(x, weight, return_final_states=True, final_states_out=cache[:2])[1]
    assert not cache.requires_grad and torch.equal(cache[:2], x[..., -3:]) and torch.equal(states, cache[:2])
    expected = torch.zeros_like(x)
    expected[..., -3:] = 1
    assert torch.equal(torch.autograd.grad(states.sum(), x)[0], expected)


@pytest.mark.serves("packed sequences", model="`causal_conv1d_fn`")
def test_causal_conv1d_fn_of_packed_sequences(device):
    x, weight = randn(1, 6, 13, device=device), randn(6, 4, device=device)
    seq_idx = torch.tensor([[0] * 5 + [1] * 6 + [-1] * 2], dtype=torch.int32, device=device)
    out = causal_conv1d_fn(x, weight, seq_idx=seq_idx)
    separate = [causal_conv1d_fn(x[..., start:end], weight) for start, end in ((0, 5), (5, 11))]
    torch.testing.assert_close(out, torch.cat([*separate, torch.zeros_like(x[..., 11:])], dim=-1))


@pytest.mark.serves("values and effects", model="`causal_conv1d_update`")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("length", [3, 5])
def test_causal_conv1d_update(device, steps, length):
    """Step by step, with shifted and with circular states, the update is the convolution of the whole."""
    x, weight, bias = randn(2, 6, 12, device=device), randn(6, 4, device=device), randn(6, device=device)
    expected = causal_conv1d_fn(x, weight, bias, activation="silu")
    shifted, circular = (torch.zeros(2, 6, length, dtype=x.dtype, device=device) for _ in range(2))
    slots = torch.zeros(4, 6, length, dtype=x.dtype, device=device)
    indices = torch.tensor([3, 1], dtype=torch.int32, device=device)
    for start in range(0, 12, steps):
        new = x[..., start : start + steps]
        lengths = torch.full((2,), start, dtype=torch.int32, device=device)
        outs = [
            causal_conv1d_update(new, shifted, weight, bias, "silu"),
            causal_conv1d_update(new, circular, weight, bias, "silu", cache_seqlens=lengths),
            causal_conv1d_update(new, slots, weight, bias, "silu", conv_state_indices=indices),
        ]
        for out in outs:
            torch.testing.assert_close(out, expected[..., start : start + steps])
    torch.testing.assert_close(shifted, x[..., -length:])
    torch.testing.assert_close(slots[[3, 1]], shifted)
    assert not slots[[0, 2]].any()
    newest = (12 - 1 - torch.arange(length, device=device)) % length
    torch.testing.assert_close(circular[..., newest], x[..., -length:].flip(-1))


def test_causal_conv1d_varlen_states(device):
    x = randn(10, 6, device=device)
    states = causal_conv1d_varlen_states(x, torch.tensor([0, 2, 2, 10], device=device), 3)
    zero = torch.zeros(6, 3, dtype=x.dtype, device=device)
    torch.testing.assert_close(states, torch.stack([torch.cat([zero[:, :1], x[:2].T], dim=1), zero, x[7:].T]))


def test_varlen_states_of_a_traced_call():
    x, cu_seqlens = torch.randn(10, 6), torch.tensor([0, 2, 10])
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (x, cu_seqlens)]
        assert causal_conv1d_varlen_states(*fake, 3).shape == (2, 6, 3)
    ends = torch.stack([cu_seqlens, torch.tensor([0, 5, 10])])
    mapped = torch.vmap(lambda each: causal_conv1d_varlen_states(x, each, 3))(ends)
    torch.testing.assert_close(mapped, torch.stack([causal_conv1d_varlen_states(x, each, 3) for each in ends]))


@pytest.mark.parametrize("with_heads", [False, True])
@pytest.mark.serves("values and effects", model="`selective_state_update`")
def test_selective_state_update_in_mixed_dtypes(device, with_heads):
    """The step of a scan in float64, rounded once: of the values given, none is rounded to a narrower dtype first."""
    channels = (4, 8) if with_heads else (8,)
    groups = (2,) if with_heads else ()
    state = randn(3, *channels, 6, device=device, dtype=torch.float16)
    x, dt = randn(3, *channels, device=device, dtype=LOW), randn(3, *channels, device=device, dtype=torch.float32)
    A = -randn(*channels, 6, device=device).exp().to(LOW)
    B, C = (randn(3, *groups, 6, device=device, dtype=torch.float32) for _ in range(2))
    D, dt_bias = randn(*channels, device=device, dtype=LOW), randn(*channels, device=device, dtype=torch.float32)
    wide = [tensor.double() for tensor in (state, x, dt, A, B, C, D)]
    expected_out, expected_state = reference.selective_state_update(*wide, dt_bias=dt_bias.double(), dt_softplus=True)
    out = selective_state_update(state, x, dt, A, B, C, D, None, dt_bias, True)
    assert out.dtype == LOW and state.dtype == torch.float16
    torch.testing.assert_close(out.double(), expected_out, rtol=2**-8, atol=2**-16)
    torch.testing.assert_close(state.double(), expected_state, rtol=2**-11, atol=2**-16)


def test_padding_in_a_cache_of_another_dtype(device):
    state = randn(5, 8, 4, device=device, dtype=torch.float16)
    before = state.clone()
    x, B = randn(2, 8, device=device, dtype=LOW), randn(2, 4, device=device, dtype=LOW)
    A = -torch.ones(8, 4, device=device)
    indices = torch.tensor([3, -1], device=device)
    out = selective_state_update(state, x, x.abs(), A, B, B, state_batch_indices=indices)
    assert not out[1].any() and out[0].any()
    assert not torch.equal(state[3], before[3])
    assert torch.equal(state[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


@pytest.mark.serves("mixed dtypes", model="`mamba_chunk_scan_combined`")
def test_ssd_in_mixed_dtypes(device):
    """float32 arguments keep their values beside bfloat16: the result is as exact as one rounding of it."""
    tensors = ssd_tensors(device)
    dtypes = dict.fromkeys(tensors, torch.float32) | dict.fromkeys(("x", "z", "A", "D", "dt_bias", "initial_states"), LOW)
    tensors = {name: tensor.to(dtypes[name]).requires_grad_() for name, tensor in tensors.items()}
    out, states = mamba_chunk_scan_combined(**tensors, chunk_size=16, dt_softplus=True, return_final_states=True)
    assert (out.dtype, states.dtype) == (LOW, torch.float32)
    wide = {name: tensor.detach().double() for name, tensor in tensors.items()}
    expected, expected_states = reference.ssd_chunk_scan(**wide, dt_softplus=True, return_final_states=True)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(states.double(), expected_states, rtol=1e-5, atol=1e-5)
    (out.float().sum() + states.sum()).backward()
    assert {name: tensor.grad.dtype for name, tensor in tensors.items()} == dtypes


@served("rmsnorm_fn")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("group_size", [None, 4])
def test_gated_norms(device, before, group_size):
    tensors = {"x": randn(3, 5, 8, device=device), "weight": randn(8, device=device), "z": randn(3, 5, 8, device=device)}

    def expected(x, weight, z, bias=None):
        v = (x if before else x * F.silu(z)).unflatten(-1, (-1, group_size or 8))
        if bias is not None:
            v = v - v.mean(-1, keepdim=True)
        v = (v * (v.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * weight
        v = v if bias is None else v + bias
        return v * F.silu(z) if before else v

    def rms(x, weight, z):
        return rmsnorm_fn(x, weight, None, z, 1e-5, group_size, before)

    def layer(x, weight, z, bias):
        return layernorm_fn(x, weight, bias, z, 1e-5, group_size, before)

    assert_same_values_and_gradients(rms, expected, tensors)
    assert_same_values_and_gradients(layer, expected, tensors | {"bias": randn(8, device=device)})


@served("layer_norm_fn")
@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_norms_of_a_sum(device, is_rms_norm):
    tensors = {name: randn(3, 5, 8, device=device) for name in ("x", "residual", "x1")}
    tensors |= {name: randn(8, device=device) for name in ("weight", "bias", "weight1", "bias1")}

    def normalize(v, weight, bias):
        return F.rms_norm(v, (8,), weight, 1e-6) + bias if is_rms_norm else F.layer_norm(v, (8,), weight, bias, 1e-6)

    def expected(x, residual, x1, weight, bias, weight1, bias1):
        total = x + residual + x1
        return normalize(total, weight, bias), normalize(total, weight1, bias1), total

    def function(**given):
        return layer_norm_fn(**given, prenorm=True, is_rms_norm=is_rms_norm)

    assert_same_values_and_gradients(function, expected, tensors)


def test_returns_of_the_norm_of_a_sum():
    x, weight = torch.randn(4, 8).to(LOW), torch.ones(8)
    y, total = rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, total.dtype) == (LOW, torch.float32) and torch.equal(total, x.float())
    assert rms_norm_fn(x, weight, None, residual=total, prenorm=True)[1].dtype == torch.float32
    y, mask, none = rms_norm_fn(x.float(), weight, None, dropout_p=0.5, return_dropout_mask=True)
    assert none is None and torch.equal(y == 0, ~mask)
    assert isinstance(AddRMSNorm(8)(x.float()), Tensor)


def test_norms_can_be_subclassed_and_keep_the_names_of_parameters():
    class Norm(RMSNorm):
        def forward(self, x, z=None):
            return 2 * super().forward(x, z)

    norm = Norm(8, eps=1e-3, group_size=4, norm_before_gate=False)
    assert list(norm.state_dict()) == ["weight"] and list(LayerNorm(8).state_dict()) == ["weight", "bias"]
    x, z = torch.randn(2, 8), torch.randn(2, 8)
    torch.testing.assert_close(norm(x, z), 2 * rmsnorm_fn(x, norm.weight, None, z, 1e-3, 4, False))


POSITIONAL = {
    "selective_scan_fn": "u delta A B C D z delta_bias delta_softplus return_last_state",
    "mamba_inner_fn": "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A B C D "
    "delta_bias B_proj_bias C_proj_bias delta_softplus checkpoint_lvl b_rms_weight c_rms_weight dt_rms_weight b_c_dt_rms_eps",
    "mamba_inner_fn_no_out_proj": "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight A B C D delta_bias B_proj_bias "
    "C_proj_bias delta_softplus checkpoint_lvl",
    "bimamba_inner_fn": "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A A_b B C "
    "D delta_bias B_proj_bias C_proj_bias delta_softplus checkpoint_lvl",
    "bimamba_inner_ref": "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A A_b B C "
    "D delta_bias B_proj_bias C_proj_bias delta_softplus",
    "selective_state_update": "state x dt A B C D z dt_bias dt_softplus state_batch_indices",
    "mamba_chunk_scan_combined": "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus dt_limit "
    "return_final_states return_varlen_states state_dtype",
    "mamba_split_conv1d_scan_combined": "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states seq_idx "
    "dt_limit return_final_states activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups "
    "norm_before_gate state_dtype",
    "layer_norm_linear_fn": "x norm_weight norm_bias linear_weight linear_bias residual eps prenorm residual_in_fp32 "
    "is_rms_norm",
    "rms_norm_forward": "x weight bias eps is_rms_norm",
    "causal_conv1d_fn": "x weight bias seq_idx initial_states return_final_states final_states_out activation",
    "causal_conv1d_update": "x conv_state weight bias activation cache_seqlens conv_state_indices",
    "causal_conv1d_varlen_states": "x cu_seqlens state_len",
    "selective_scan_ref": "u delta A B C D z delta_bias delta_softplus return_last_state",
    "mamba_inner_ref": "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A B C D "
    "delta_bias B_proj_bias C_proj_bias delta_softplus",
    "selective_state_update_ref": "state x dt A B C D z dt_bias dt_softplus",
    "causal_conv1d_ref": "x weight bias initial_states return_final_states final_states_out activation",
    "causal_conv1d_update_ref": "x conv_state weight bias activation cache_seqlens",
    "rms_norm_ref": "x weight bias z eps group_size norm_before_gate upcast",
    "rmsnorm_fn": "x weight bias z eps group_size norm_before_gate",
    "layernorm_fn": "x weight bias z eps group_size norm_before_gate is_rms_norm",
    "mamba3_siso_combined": "Q K V ADT DT Trap Q_bias K_bias Angles D Z Input_States chunk_size return_final_states cu_seqlens",
    "mamba3_mimo": "Q K V ADT DT Trap Q_bias K_bias MIMO_V MIMO_Z MIMO_Out Angles D Z chunk_size rotary_dim_divisor dtype "
    "return_state cu_seqlens",
    "rms_norm_fn": "x weight bias residual x1 weight1 bias1 eps dropout_p rowscale prenorm residual_in_fp32 "
    "return_dropout_mask",
    "layer_norm_fn": "x weight bias residual x1 weight1 bias1 eps dropout_p rowscale prenorm residual_in_fp32 is_rms_norm "
    "return_dropout_mask",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_positions_of_arguments(name):
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    assert [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD] == POSITIONAL[name].split()
    has_rule = name.startswith(("selective_", "mamba_", "bimamba_"))
    assert [each.name for each in parameters if each.kind == each.KEYWORD_ONLY] == ["discretization"] * has_rule
    if name.startswith("mamba_") and not name.startswith("mamba_inner"):
        assert inspect.signature(function).parameters["dt_limit"].default == (0.0, math.inf)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: causal_conv1d_fn(x, x[0, :, :4], activation="gelu"), NotImplementedError, "got 'gelu'"),
        (lambda x: causal_conv1d_fn(x[0], x[0, :, :4]), ValueError, r"\(batch, channels, seqlen\), got \[6, 17\]"),
        (
            lambda x: causal_conv1d_fn(x, x[0, :, :4], final_states_out=x),
            ValueError,
            "final_states_out is written with return_final_states=True only",
        ),
        (lambda x: selective_scan_fn(x.to(torch.complex64), x, x[0], x, x), NotImplementedError, "complex u is not supported"),
        (lambda x: mamba_inner_fn(x[:, :5], x, None, x, x[0], x, None, x[0]), ValueError, r"\(batch, 2 \* dim, seqlen\)"),
        (lambda x: layer_norm_fn(x, x[0, 0], None, x1=x, rowscale=x[..., 0]), ValueError, "rowscale is not supported"),
    ],
    ids=["activation", "layout", "final_states_out", "complex", "xz", "rowscale"],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(2, 6, 17))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_call_has_no_graph_break(compiled, fresh_dynamo):
    def step(u, delta, A, B):
        return selective_scan_fn(u, delta, A, B, B, None, None, None, True).sum()

    tensors = [tensor.float() for name, tensor in scan_tensors("cpu").items() if name in ("u", "delta", "A", "C")]
    run = torch.compile(step, fullgraph=True, backend="eager") if compiled else step
    torch.testing.assert_close(run(*tensors), step(*tensors))
