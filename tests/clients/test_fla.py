"""The layers of flash-linear-attention that call mamba_ssm and causal_conv1d, on ssm_kernels.compat.

``Mamba.forward`` and ``Mamba2.forward`` take their kernels' path for weights on CUDA only, so the tests direct them to it on
the CPU. FLA's activations and gated norm are Triton kernels, which raise "0 active drivers" without a GPU: on the CPU,
PyTorch's compositions replace these two in both paths.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fla_package import import_fla, without
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ssm_kernels import compat, reference
from ssm_kernels.compat._modules import VERSIONS

CLIENT = "flash-linear-attention"
OPERATOR = "mamba2_mixer"

SIZES = {
    "Mamba": {"hidden_size": 32, "intermediate_size": 48, "state_size": 8},
    "Mamba2": {"hidden_size": 32, "head_dim": 16, "state_size": 8, "chunk_size": 16},
}
every_model = pytest.mark.parametrize("model", SIZES)


@pytest.fixture(autouse=True)
def without_tf32():
    """The slow paths call cuDNN's convolution, which takes TF32 by default."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


MODULES = (
    "fla.layers.mamba",
    "fla.layers.mamba2",
    "fla.layers.mamba3",
    "fla.modules.causal_conv1d.backends.cuda.ops",
    "fla.models.cache_utils",
)


@pytest.fixture(scope="module")
def fla():
    """FLA's modules, imported while compat is installed, and forgotten after the tests of this file."""
    with without("fla", *VERSIONS):
        with compat.installed():
            mamba, mamba2, mamba3, convolution, cache_utils = import_fla(*MODULES)
        yield SimpleNamespace(
            mamba=mamba,
            mamba2=mamba2,
            mamba3=mamba3,
            convolution=convolution,
            cache=cache_utils.Cache,
            layers={"Mamba": mamba.Mamba, "Mamba2": mamba2.Mamba2},
        )


class GatedNorm(nn.Module):
    """The formula of FLA's RMSNormGated, with its parameters."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps, self.group_size, self.norm_before_gate = norm.eps, norm.group_size, norm.norm_before_gate

    def forward(self, x, z):
        x = x if self.norm_before_gate else x * F.silu(z)
        x = F.rms_norm(x.unflatten(-1, (-1, self.group_size)), (self.group_size,), eps=self.eps).flatten(-2) * self.weight
        return x * F.silu(z) if self.norm_before_gate else x


def make(fla, model, device, dtype=torch.float32, **options):
    """A layer whose ``forward`` takes the kernels, and a copy for the path without them."""
    torch.manual_seed(0)
    layer = fla.layers[model](**SIZES[model] | options, layer_idx=0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            # Initial biases and D are constants.
            if not name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    layer = layer.to(device, dtype)
    if device == "cpu":
        layer.act = F.silu
        if getattr(layer, "norm", None) is not None:
            layer.norm = GatedNorm(layer.norm)
    slow = copy.deepcopy(layer)
    if device == "cpu":
        setattr(layer, "slow_forward" if model == "Mamba" else "torch_forward", layer.cuda_kernels_forward)
    return layer, slow


def run_slowly(layer, *args, **kwargs):
    return getattr(layer, "slow_forward" if type(layer).__name__ == "Mamba" else "torch_forward")(*args, **kwargs)[0]


def hidden_states(device, dtype=torch.float32):
    return torch.randn(2, 37, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@contextlib.contextmanager
def counted_kernels():
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "ssm_kernels":
                calls[function._schema.name.partition("::")[2]] += 1
            return function(*args, **(kwargs or {}))

    calls: Counter[str] = Counter()
    with Count():
        yield calls


def both_ways(*names):
    return {f"{name}_{direction}": 1 for name in names for direction in ("fwd", "bwd")}


def calls_of(layer, *, training):
    """The operators of one forward and backward of a layer: the fused function of a training step has the norm, too."""
    if type(layer).__name__ == "Mamba":
        return both_ways("_causal_conv1d", "_selective_scan")
    norm = ["_norm_gated"] if training and layer.rmsnorm else []
    return both_ways("_causal_conv1d", "_ssd_chunk_scan", *norm)


def assert_same_gradients(layer, expected):
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    for name, parameter in layer.named_parameters():
        scale = gradients[name].abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(
            parameter.grad.double(),
            gradients[name].double(),
            rtol=1e-4,
            atol=1e-4 * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.serves("outputs and gradients")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("Mamba", {}),
        ("Mamba", {"use_bias": True, "use_conv_bias": False}),
        ("Mamba2", {}),
        ("Mamba2", {"use_bias": True, "norm_before_gate": True, "D_has_hdim": True, "dt_limit": (0.01, 0.5)}),
        ("Mamba2", {"rmsnorm": False, "use_conv_bias": False}),
    ],
    ids=["Mamba", "Mamba with other options", "Mamba2", "Mamba2 with other options", "Mamba2 without norm"],
)
def test_layer_has_the_outputs_and_gradients_of_its_slow_path(fla, model, options, training, device):
    layer, slow = make(fla, model, device, **options)
    layer.train(training)
    x = hidden_states(device)
    with counted_kernels() as calls:
        out = layer(x)[0]
        out.square().mean().backward()
    assert calls == calls_of(layer, training=training)
    expected = run_slowly(slow, x)
    expected.square().mean().backward()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert_same_gradients(layer, slow)


class Mamba2Composition(nn.Module):
    """Mamba-2 from its formulas, in float64, with the parameters of FLA's layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name in ("in_proj", "conv1d", "out_proj"):
            setattr(self, name, copy.deepcopy(getattr(layer, name)))
        self.norm = GatedNorm(copy.deepcopy(layer.norm))
        for name in ("dt_bias", "A_log", "D"):
            setattr(self, name, nn.Parameter(getattr(layer, name).detach().clone()))
        self.heads, self.groups = layer.num_heads, layer.n_groups
        self.sizes = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
        self.parts = [layer.intermediate_size, *[layer.n_groups * layer.ssm_state_size] * 2]
        self.double()

    def forward(self, x):
        z, xBC, dt = self.in_proj(x).split(self.sizes, dim=-1)
        xBC = F.silu(self.conv1d(xBC.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        x, B, C = xBC.split(self.parts, dim=-1)
        y = reference.ssd_chunk_scan(
            x.unflatten(-1, (self.heads, -1)),
            dt,
            -self.A_log.exp(),
            B.unflatten(-1, (self.groups, -1)),
            C.unflatten(-1, (self.groups, -1)),
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        return self.out_proj(self.norm(y.flatten(-2), z))


@pytest.mark.serves("outputs and gradients")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("model", ["Mamba2"])
def test_mamba2_of_several_groups(fla, model, training, device):
    """The slow path gives a head the group of its number modulo the number of groups, in prompts but not in steps."""
    layer, slow = make(fla, model, device, n_groups=2)
    layer.train(training)
    composition, x = Mamba2Composition(layer), hidden_states(device)
    with counted_kernels() as calls:
        out = layer(x)[0]
        out.square().mean().backward()
    assert calls == calls_of(layer, training=training)
    expected = composition(x.double())
    expected.square().mean().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    assert_same_gradients(layer, composition)
    assert (run_slowly(slow, x) - out).abs().max() > 0.01, "the slow path is mended: compare with it"


@pytest.mark.serves("left padding")
@every_model
def test_left_padding(fla, model, device):
    layer, slow = make(fla, model, device)
    x = hidden_states(device)
    mask = torch.ones(2, 37, device=device)
    mask[0, :9] = 0
    with torch.no_grad():
        out, expected = layer.eval()(x, attention_mask=mask)[0], run_slowly(slow.eval(), x, attention_mask=mask)
        alone = layer(x[:1, 9:])[0]
    torch.testing.assert_close(out[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[:1, 9:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.serves("cached steps")
@pytest.mark.parametrize("prompt", [1, 23])
@every_model
def test_cached_steps(fla, model, prompt, device):
    """A prompt and steps through FLA's cache give what one call gives."""
    options = {"n_groups": 2} if model == "Mamba2" else {}
    layer, _ = make(fla, model, device, **options)
    layer.eval()
    x, cache = hidden_states(device), fla.cache()
    with torch.no_grad():
        expected = layer(x)[0]
        outs = [layer(x[:, :prompt], past_key_values=cache, use_cache=True)[0]]
        with counted_kernels() as calls:
            for t in range(prompt, 37):
                outs.append(layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0])
    assert calls == {"causal_conv1d_update": 37 - prompt, "selective_state_update": 37 - prompt}
    assert cache.get_seq_length() == 37
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.serves("bf16")
@every_model
def test_bf16(fla, model, device):
    """The error against the slow path in float32 is at most twice that of the slow path in bfloat16."""
    layer, slow = make(fla, model, device, torch.bfloat16)
    x = hidden_states(device, torch.bfloat16)
    with counted_kernels() as calls:
        out = layer(x)[0]
        out.float().square().mean().backward()
    assert calls == calls_of(layer, training=True) and out.dtype == torch.bfloat16
    with torch.no_grad():
        exact = run_slowly(copy.deepcopy(slow).float(), x.float())
        error, own_error = ((each.float() - exact).norm() / exact.norm() for each in (out, run_slowly(slow, x)))
    assert error <= 2 * own_error + torch.finfo(torch.bfloat16).eps


@pytest.mark.serves("packed sequences", model="`causal_conv1d_cuda`")
def test_convolution_of_packed_sequences(fla, device):
    """The backend "cuda" of FLA's short convolutions, (batch, seqlen, channels), takes causal_conv1d_fn with seq_idx."""
    x, weight = torch.randn(1, 12, 8, device=device), torch.randn(8, 4, device=device)
    cu_seqlens = torch.tensor([0, 5, 12], device=device)
    with counted_kernels() as calls:
        out, _ = fla.convolution.causal_conv1d_cuda(x, weight, cu_seqlens=cu_seqlens, activation="silu")
    assert calls == {"_causal_conv1d_fwd": 1}
    padded = [F.pad(part.transpose(1, 2), (3, 0)) for part in (x[:, :5], x[:, 5:])]
    expected = torch.cat([F.silu(F.conv1d(part, weight[:, None], groups=8)) for part in padded], dim=-1).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_mamba3_finds_functions_of_either_rank(fla):
    assert fla.mamba3.mamba3_mimo_combined is compat.mamba3.mamba3_mimo
    assert fla.mamba3.mamba3_siso_combined is compat.mamba3.mamba3_siso_combined


def test_import_leaves_transformers_as_it_was(fla):
    import transformers

    for name in ("Mamba", "Mamba2"):
        config = getattr(transformers, f"{name}Config")
        assert type(transformers.AutoConfig.for_model(name.lower())) is config
        assert transformers.AutoModelForCausalLM._model_mapping[config] is getattr(transformers, f"{name}ForCausalLM")
    assert "mamba_ssm" not in sys.modules
