"""The extension modules selective_scan_cuda, causal_conv1d_cuda and VMamba's, called as copies of mamba_ssm call them.

Each project's calls are restated in an autograd function with small inputs, and compared with plain formulas in float64.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPAT_VERSION
from torch import Tensor

from ssm_kernels import compat
from ssm_kernels.compat import conv_extensions
from ssm_kernels.compat._modules import PARTS

CLIENT = "mamba_ssm"
CLIENT_VERSION = COMPAT_VERSION
OPERATOR = "selective_scan"


@pytest.fixture(autouse=True)
def extension_modules():
    with compat.installed(only=[part for part in PARTS if part.partition("_cuda")[1]]):
        yield


def scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    """The scan of Mamba, step by step, in float64; also the last state."""
    u, delta, A, B, C, D, z, delta_bias = (None if t is None else t.double() for t in (u, delta, A, B, C, D, z, delta_bias))
    if A.dim() == 1:
        A, B, C = A[:, None], B[:, :, None], C[:, :, None]
    delta = delta.repeat_interleave(u.shape[1] // delta.shape[1], 1)
    if delta_bias is not None:
        delta = delta + delta_bias.repeat_interleave(u.shape[1] // delta_bias.shape[0])[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    B, C = (M.repeat_interleave(u.shape[1] // M.shape[1], 1) for M in (B, C))
    h, ys = u.new_zeros(u.shape[0], *A.shape), []
    for t in range(u.shape[2]):
        h = torch.exp(delta[:, :, t, None] * A) * h + (delta * u)[:, :, t, None] * B[..., t]
        ys.append((h * C[..., t]).sum(-1))
    y = torch.stack(ys, -1)
    if D is not None:
        y = y + D[:, None] * u
    return (y if z is None else y * F.silu(z)), h


def convolve(x, weight, bias):
    x, weight, bias = x.double(), weight.double(), bias.double()
    return F.silu(F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[2]])


def make_inputs(device, dtype=torch.float32, groups=1, seqlen=9) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "xz": torch.randn(2, 12, seqlen, dtype=dtype, device=device),
        "weight": torch.randn(6, 4, device=device),
        "bias": torch.randn(6, device=device),
        "delta": torch.randn(2, 6, seqlen, dtype=dtype, device=device),
        "A": -torch.rand(6, 3, device=device) - 0.1,
        "B": torch.randn(2, groups, 3, seqlen, dtype=dtype, device=device),
        "C": torch.randn(2, groups, 3, seqlen, dtype=dtype, device=device),
        "D": torch.randn(6, device=device),
        "delta_bias": torch.randn(6, device=device),
    }


# How projects call the convolution: forward of x, weight and bias, and backward with a tensor for the gradient of x.
def fwd_of_1_0(cuda, x, w, b):
    return cuda.causal_conv1d_fwd(x, w, b, True)


def bwd_of_1_0(cuda, x, w, b, dout, dx):
    return cuda.causal_conv1d_bwd(x, w, b, dout, dx, True)


def fwd_of_1_1(cuda, x, w, b):
    return cuda.causal_conv1d_fwd(x, w, b, None, True)


def bwd_of_1_1(cuda, x, w, b, dout, dx):
    return cuda.causal_conv1d_bwd(x, w, b, dout, None, dx, True)


def fwd_of_1_2(cuda, x, w, b):
    return cuda.causal_conv1d_fwd(x, w, b, None, None, None, True)


def bwd_of_1_2(cuda, x, w, b, dout, dx):
    *grads, dinitial_states = cuda.causal_conv1d_bwd(x, w, b, dout, None, None, None, dx, False, True)
    assert dinitial_states is None
    return grads


def fwd_of_1_5(cuda, x, w, b):
    out = torch.empty_like(x)
    assert cuda.causal_conv1d_fwd(x, w, b, None, None, out, None, True) is None
    return out


def bwd_of_1_5(cuda, x, w, b, dout, dx):
    dweight, dbias = torch.zeros_like(w), torch.zeros_like(b)
    assert cuda.causal_conv1d_bwd(x, w, b, dout, None, None, None, dx, dweight, dbias, None, True) is None
    return dx, dweight, dbias


FORKS = {
    "VideoMamba, SegMamba (causal_conv1d 1.0)": (fwd_of_1_0, bwd_of_1_0),
    "LocalMamba, Audio-Mamba (causal_conv1d 1.1)": (fwd_of_1_1, bwd_of_1_1),
    "Vim, PointMamba (causal_conv1d 1.2 to 1.4)": (fwd_of_1_2, bwd_of_1_2),
    "mamba_ssm 2.2.5 and newer (causal_conv1d 1.5 and newer)": (fwd_of_1_5, bwd_of_1_5),
}


class Inner(torch.autograd.Function):
    """The convolution and the scan of a fork's fused function, whose backward has one tensor for the gradients of x and z."""

    @staticmethod
    def forward(ctx, forms, xz, weight, bias, delta, A, B, C, D, delta_bias):
        scan_cuda, conv_cuda = (importlib.import_module(name) for name in ("selective_scan_cuda", "causal_conv1d_cuda"))
        x, z = xz.chunk(2, dim=1)
        convolved = forms[0](conv_cuda, x, weight, bias)
        out, states, out_z = scan_cuda.fwd(convolved, delta, A, B, C, D, z, delta_bias, True)
        ctx.forms = forms
        ctx.save_for_backward(xz, weight, bias, delta, A, B, C, D, delta_bias, states, out, convolved)
        return out_z

    @staticmethod
    def backward(ctx, dout):
        scan_cuda, conv_cuda = (importlib.import_module(name) for name in ("selective_scan_cuda", "causal_conv1d_cuda"))
        xz, weight, bias, delta, A, B, C, D, delta_bias, states, out, convolved = ctx.saved_tensors
        x, z = xz.chunk(2, dim=1)
        dxz = torch.full_like(xz, torch.nan)
        dx, dz = dxz.chunk(2, dim=1)
        dconvolved, ddelta, dA, dB, dC, dD, ddelta_bias, dz, out_z = scan_cuda.bwd(
            convolved, delta, A, B, C, D, z, delta_bias, dout, states, out, dz, True, True
        )
        assert dz.data_ptr() == dxz[:, 6:].data_ptr() and out_z.shape == dout.shape
        dx, dweight, dbias = ctx.forms[1](conv_cuda, x, weight, bias, dconvolved, dx)
        assert dx.data_ptr() == dxz.data_ptr()
        return None, dxz, dweight, dbias, ddelta, dA, dB, dC, dD, ddelta_bias


@pytest.mark.serves("values and gradients", model="`selective_scan_cuda`, `causal_conv1d_cuda`")
@pytest.mark.parametrize("forms", FORKS.values(), ids=FORKS)
def test_a_fork_has_the_values_and_gradients_of_plain_formulas(forms, device):
    inputs = make_inputs(device)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    out = Inner.apply(forms, *leaves.values())
    x, z = leaves["xz"].chunk(2, dim=1)
    rest = {name: leaves[name] for name in ("delta", "A", "B", "C", "D", "delta_bias")}
    expected, _ = scan(convolve(x, leaves["weight"], leaves["bias"]), z=z, delta_softplus=True, **rest)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, [*leaves.values()], dout)
    expected_grads = torch.autograd.grad(expected, [*leaves.values()], dout.double())
    for name, grad, expected_grad in zip(leaves, grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def as_mamba(cuda, name, u, delta, A, B, C, D, delta_bias):
    out, x, *rest = cuda.fwd(u, delta, A, B, C, D, None, delta_bias, True)
    assert rest == []
    return out, x, lambda dout: cuda.bwd(u, delta, A, B, C, D, None, delta_bias, dout, x, None, None, True, False)


def as_core(cuda, name, u, delta, A, B, C, D, delta_bias):
    out, x = cuda.fwd(u, delta, A, B, C, D, delta_bias, True, 1)
    return out, x, lambda dout: cuda.bwd(u, delta, A, B, C, D, delta_bias, dout, x, True, 1)


def as_oflex(cuda, name, u, delta, A, B, C, D, delta_bias):
    out, x = cuda.fwd(u, delta, A, B, C, D, delta_bias, True, 1, True)
    return out, x, lambda dout: cuda.bwd(u, delta, A, B, C, D, delta_bias, dout, x, True, 1)


VMAMBA = {
    "selective_scan_cuda": as_mamba,
    "selective_scan_cuda_core": as_core,
    "selective_scan_cuda_nrow": as_core,
    "selective_scan_cuda_oflex": as_oflex,
}


@pytest.mark.serves("values and gradients", model="VMamba's `_core`, `_oflex`")
@pytest.mark.parametrize("shared", [1, 2, 3])
@pytest.mark.parametrize("name", VMAMBA)
def test_vmamba_has_the_values_and_gradients_of_plain_formulas(name, shared, device):
    if name == "selective_scan_cuda" and shared > 1:
        pytest.skip("mamba_ssm has a step size for each channel")
    inputs = make_inputs(device, groups=2)
    given = {key: inputs[key] for key in ("delta", "A", "B", "C", "D", "delta_bias")}
    given["delta"], given["delta_bias"] = given["delta"][:, : 6 // shared], given["delta_bias"][: 6 // shared]
    leaves = {key: tensor.detach().requires_grad_() for key, tensor in {"u": inputs["xz"][:, :6], **given}.items()}
    out, x, backward = VMAMBA[name](importlib.import_module(name), name, **leaves)
    expected, last_state = scan(**leaves, delta_softplus=True)
    assert not out.requires_grad and x.shape == (2, 6, 1, 6)
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x[:, :, -1, 1::2].double(), last_state.detach(), rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(expected, [*leaves.values()], dout.double())
    for key, grad, expected_grad in zip(leaves, backward(dout), grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["selective_scan_cuda_ndstate", "selective_scan_cuda_core"])
def test_the_kernel_for_one_state_has_matrices_without_their_axis(name, device):
    inputs = make_inputs(device, groups=2)
    u, delta, D = inputs["xz"][:, :6], inputs["delta"], inputs["D"]
    A, B, C = inputs["A"][:, 0], inputs["B"][:, :, 0], inputs["C"][:, :, 0]
    cuda = importlib.import_module(name)
    out, x = cuda.fwd(u, delta, A, B, C, D, None, True, 1)
    torch.testing.assert_close(out.double(), scan(u, delta, A, B, C, D, delta_softplus=True)[0], rtol=1e-5, atol=1e-5)
    grads = cuda.bwd(u, delta, A, B, C, D, None, out, x, True, 1)
    assert [None if grad is None else grad.shape for grad in grads] == [t.shape for t in (u, delta, A, B, C, D)] + [None]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_sequences_keep_their_precision(dtype, device):
    cuda, oflex = (importlib.import_module(f"selective_scan_cuda{name}") for name in ("", "_oflex"))
    inputs = make_inputs(device, dtype)
    u, z = inputs["xz"].chunk(2, dim=1)
    given = [inputs[key] for key in ("delta", "A", "B", "C", "D")]
    expected, expected_z = (scan(u, *given, z=gate, delta_softplus=True)[0] for gate in (None, z))
    out, _, out_z = cuda.fwd(u, *given, z, None, True)
    assert out.dtype == out_z.dtype == dtype
    for value, exact in ((out, expected), (out_z, expected_z)):
        assert (value.double() - exact).abs().max() <= 1.01 * (exact.to(dtype).double() - exact).abs().max()
    wide, _ = oflex.fwd(u, *given, None, True, 1, True)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-5)
    grads = oflex.bwd(u, *given, None, wide, None, True, 1)
    assert [grad.dtype for grad in grads[:6]] == [t.dtype for t in (u, *given)] and grads[6] is None
    assert oflex.fwd(u, *given, None, True, 1, False)[0].dtype == dtype


def test_results_and_saved_states_have_the_shapes_of_mamba_ssm(device):
    cuda = importlib.import_module("selective_scan_cuda")
    inputs = make_inputs(device, seqlen=2049)
    u, z = inputs["xz"].chunk(2, dim=1)
    given = [inputs[key] for key in ("delta", "A", "B", "C")]
    out, x, out_z = cuda.fwd(u, *given, None, z, None, True, 1)
    assert x.shape == (2, 6, 2, 6) and x.is_contiguous() and out.shape == out_z.shape == u.shape
    grads = cuda.bwd(u, *given, None, z, None, out, x, out, None, True, False, 1)
    assert len(grads) == 8 and grads[5] is None and grads[6] is None and grads[7].shape == z.shape
    assert len(cuda.bwd(u, *given, None, None, None, out, None, None, None, True, False)) == 7
    constant = [given[0], given[1], given[1], given[1]]
    assert cuda.bwd(u, *constant, None, None, None, out, None, None, None, True, False)[3].shape == given[1].shape
    empty = cuda.fwd(u[..., :0], given[0][..., :0], given[1], *(t[..., :0] for t in given[2:]), None, None, None, True)
    assert empty[0].numel() == 0 and (empty[1][:, :, -1, 1::2] == 0).all()


def test_states_of_the_convolution(device):
    cuda = importlib.import_module("causal_conv1d_cuda")
    inputs = make_inputs(device)
    x, weight, bias = inputs["xz"][:, :6].contiguous(), inputs["weight"], inputs["bias"]
    before = torch.randn(2, 6, 3, device=device)
    whole = convolve(torch.cat([before, x], -1), weight, bias)[..., 3:]
    last = torch.full((2, 6, 3), torch.nan, device=device)
    out = cuda.causal_conv1d_fwd(x, weight, bias, None, before, last, True)
    torch.testing.assert_close(out.double(), whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(last, x[..., -3:])
    dout, dlast = torch.randn_like(x), torch.randn_like(last)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias, before)]
    joined = torch.cat([leaves[3], leaves[0]], -1)
    outputs = [convolve(joined, *leaves[1:3])[..., 3:], joined[..., -3:]]
    expected = torch.autograd.grad(outputs, leaves, [dout.double(), dlast])
    grads = cuda.causal_conv1d_bwd(x, weight, bias, dout, None, before, dlast, None, True, True)
    torch.testing.assert_close(grads, [*expected], rtol=1e-4, atol=1e-4)
    dx, dweight, dbias, dbefore = (torch.zeros_like(tensor) for tensor in leaves)
    dweight += 1
    cuda.causal_conv1d_bwd(x, weight, bias, dout, None, before, dlast, dx, dweight, dbias, dbefore, True)
    torch.testing.assert_close((dx, dweight - 1, dbias, dbefore), expected, rtol=1e-4, atol=1e-4)
    assert cuda.causal_conv1d_bwd(x, weight, None, dout, None, True)[2:] == [None]


@pytest.mark.parametrize("form", [5, 6, 7, 8])
def test_steps_of_the_convolution(form, device):
    cuda = importlib.import_module("causal_conv1d_cuda")
    inputs = make_inputs(device)
    x, weight, bias = inputs["xz"][:, :6], inputs["weight"], inputs["bias"]
    expected = convolve(x, weight, bias)
    state = torch.zeros(2, 6, 4, device=device)
    for t in range(x.shape[2]):
        step, out = x[..., t], torch.empty(2, 6, device=device)
        arguments = {
            5: (step, state, weight, bias, True),
            6: (step[..., None], state, weight, bias, True, None),
            7: (step[..., None], state, weight, bias, True, None, None),
            8: (step, state, weight, bias, out, True, None, None),
        }[form]
        result = cuda.causal_conv1d_update(*arguments)
        assert (result is None) == (form == 8)
        torch.testing.assert_close(
            (out if form == 8 else result).reshape(2, 6).double(), expected[..., t], rtol=1e-5, atol=1e-5
        )
    assert torch.equal(state, x[..., -4:])


def test_functions_work_where_autograd_does_not_record():
    """As in torch.library.custom_op, in which causal_conv1d 1.5 calls its module."""
    cuda = importlib.import_module("causal_conv1d_cuda")

    @torch.library.custom_op("ssm_kernels_tests::conv_gradient", mutates_args={"dx", "dweight"})
    def gradient(x: Tensor, weight: Tensor, dout: Tensor, dx: Tensor, dweight: Tensor) -> None:
        cuda.causal_conv1d_bwd(x, weight, None, dout, None, None, None, dx, dweight, None, None, True)

    x, weight, dout = torch.randn(1, 2, 5, requires_grad=True), torch.randn(2, 3), torch.randn(1, 2, 5)
    dx, dweight = torch.zeros(1, 2, 5), torch.zeros(2, 3)
    gradient(x, weight, dout, dx, dweight)
    expected = torch.autograd.grad(convolve(x, weight, torch.zeros(2)), x, dout.double())[0]
    torch.testing.assert_close(dx, expected)


def test_a_fork_compiles_as_one_graph():
    scan_cuda = importlib.import_module("selective_scan_cuda")

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, u, A, B):
            out, x = scan_cuda.fwd(u, u, A, B, B, None, None, None, True)
            ctx.save_for_backward(u, A, B, x)
            return out

        @staticmethod
        def backward(ctx, dout):
            u, A, B, x = ctx.saved_tensors
            du, ddelta, dA, dB, dC, *_ = scan_cuda.bwd(u, u, A, B, B, None, None, None, dout, x, None, None, True, False)
            return du + ddelta, dA, dB + dC

    leaves = [torch.randn(1, 2, 5), -torch.rand(2, 3), torch.randn(1, 1, 3, 5)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    call = torch.compile(lambda *tensors: Scan.apply(*tensors).square().sum(), fullgraph=True, backend="aot_eager")
    expected = scan(leaves[0], *leaves[:2], leaves[2], leaves[2], delta_softplus=True)[0].square().sum()
    torch.testing.assert_close(call(*leaves).double(), expected, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(call(*leaves), leaves)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, leaves), rtol=1e-4, atol=1e-4)


def test_functions_of_the_package_have_the_form_of_1_2():
    """``causal_conv1d.cpp_functions``, which mamba_ssm 2.2.5 and newer call."""
    x, weight, bias = torch.randn(2, 3, 6), torch.randn(3, 4), torch.randn(3)
    out = conv_extensions.causal_conv1d_fwd_function(x, weight, bias, None, None, None, True)
    torch.testing.assert_close(out.double(), convolve(x, weight, bias), rtol=1e-5, atol=1e-5)
    dx = torch.empty_like(x)
    grads = conv_extensions.causal_conv1d_bwd_function(x, weight, bias, out, None, None, None, dx, False, True)
    assert isinstance(grads, tuple) and grads[0] is dx and grads[3] is None
    state = torch.zeros(2, 3, 4)
    step = conv_extensions.causal_conv1d_update_function(x[..., :1], state, weight, bias, True, None, None)
    torch.testing.assert_close(step, out[..., :1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda s, c, t: c.causal_conv1d_fwd(t, t, t),
            TypeError,
            r"causal_conv1d_fwd: .* 4 since 1\.0 \(x, weight, bias, silu_act.* got 3",
        ),
        (lambda s, c, t: c.causal_conv1d_bwd(*[t] * 8), TypeError, r"causal_conv1d_bwd: .* 10 since 1\.2 .* got 8"),
        (lambda s, c, t: c.causal_conv1d_update(*[t] * 4), TypeError, r"causal_conv1d_update: .* got 4"),
        (
            lambda s, c, t: c.causal_conv1d_fwd(t, t[0], None, "silu"),
            TypeError,
            r"causal_conv1d_fwd: expected silu_activation to be a bool",
        ),
        (
            lambda s, c, t: c.causal_conv1d_fwd(None, t[0], None, True),
            TypeError,
            "causal_conv1d_fwd: expected x to be a tensor, got None",
        ),
        (
            lambda s, c, t: c.causal_conv1d_fwd(t, t[0, :2], None, True),
            ValueError,
            "^causal_conv1d_cuda.causal_conv1d_fwd: expected weight",
        ),
        (
            lambda s, c, t: c.causal_conv1d_bwd(t, t[0], None, t, t[:, :1], True),
            ValueError,
            r"^causal_conv1d_cuda.causal_conv1d_bwd: expected dx of shape \[2, 3, 4\], got \[2, 1, 4\]",
        ),
        (lambda s, c, t: c.causal_conv1d_bwd(t, t[0], None, t[:1], None, True), ValueError, "expected dout of shape"),
        (
            lambda s, c, t: s.fwd(t, t, t[0], t[:1], t, None, None, None, True),
            ValueError,
            r"^selective_scan_cuda.fwd: expected B of shape",
        ),
        (
            lambda s, c, t: s.fwd(t, t, t[0], None, t, None, None, None, True),
            TypeError,
            "^selective_scan_cuda.fwd: expected B to be a ten",
        ),
        (
            lambda s, c, t: s.fwd(t, t, t[0] * 1j, t, t, None, None, None, True),
            NotImplementedError,
            "^selective_scan_cuda.fwd: complex A is not supported",
        ),
        (
            lambda s, c, t: s.bwd(t, t, t[0], t[0], t[0], None, t, None, t, None, t, t[:1], True, False),
            ValueError,
            r"^selective_scan_cuda.bwd: expected dz of shape \[2, 3, 4\], got \[1, 3, 4\]",
        ),
        (
            lambda s, c, t: s.bwd(t, t, t[0], t[0], t[0], None, None, None, t[:1], None, None, None, True, False),
            ValueError,
            r"^selective_scan_cuda.bwd: expected dout of shape \(batch, dim, seqlen\)",
        ),
    ],
)
def test_errors_name_the_function_that_was_called(call, error, message):
    modules = [importlib.import_module(name) for name in ("selective_scan_cuda", "causal_conv1d_cuda")]
    with pytest.raises(error, match=message) as raised:
        call(*modules, torch.randn(2, 3, 4))
    assert "_fn" not in str(raised.value) and "selective_scan:" not in str(raised.value)


def test_calls_that_no_signature_has_name_the_function():
    """Python's message names the argument alone, or a function that the client does not know."""
    x = torch.zeros(1, 2, 3)
    for module, function, call, words in (
        ("selective_scan_cuda", "fwd", lambda fwd: fwd(x, x), "missing a required argument: 'A'"),
        ("selective_scan_cuda_oflex", "bwd", lambda bwd: bwd(*[x] * 12), "too many positional arguments"),
        ("causal_conv1d_cuda", "causal_conv1d_fwd", lambda fwd: fwd(x=x), "got an unexpected keyword argument 'x'"),
    ):
        with pytest.raises(TypeError, match=f"^{module}.{function}: {words}$"):
            call(getattr(importlib.import_module(module), function))


def test_the_account_names_the_functions_that_answered():
    core = importlib.import_module("selective_scan_cuda_core")
    assert core.fwd and core.bwd
    answers = {request.name: request.answer for request in compat.served().requests}
    for function in ("fwd", "bwd"):
        assert answers[f"selective_scan_cuda_core.{function}"] == f"ssm_kernels.compat.scan_extensions.core_{function}"
