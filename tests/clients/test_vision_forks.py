"""Arguments and functions of the vision forks of mamba_ssm, and the names of its versions 1.x, beside plain formulas."""

from __future__ import annotations

import importlib
import io
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPAT_VERSION

import ssm_kernels
from ssm_kernels import compat
from ssm_kernels.compat.bidirectional import Mamba
from ssm_kernels.compat.mixer_seq_simple import BlockWithoutMLP, MixerModel, create_block
from ssm_kernels.compat.references import bimamba_inner_ref
from ssm_kernels.compat.selective_scan import bimamba_inner_fn, mamba_inner_fn, mamba_inner_fn_no_out_proj
from ssm_kernels.distributed import tensor_parallel

CLIENT = "mamba_ssm"
CLIENT_VERSION = COMPAT_VERSION
OPERATOR = "selective_scan"

# Each project's arguments of the mixer, and the suffixes of its directions.
PROJECTS = {
    "Vim": ({"bimamba_type": "v2", "if_divide_out": True, "init_layer_scale": 0.5}, ("", "_b")),
    "Vim, one direction": ({"bimamba_type": "none"}, ("",)),
    "Vim v1": ({"bimamba_type": "v1"}, ("",)),
    "VideoMamba": ({"layer_idx": 0, "bimamba": True}, ("", "_b")),
    "VideoMamba, one direction": ({"bimamba": False}, ("",)),
    "LocalMamba, Audio-Mamba": ({"bimamba_type": "v2", "if_devide_out": True}, ("", "_b")),
    "SegMamba": ({"bimamba_type": "v3", "nslices": 3}, ("", "_b", "_s")),
}


def plain_mixer(p, xz, end="", A_log=None, reverse=False):
    """The mixer between its projections in one direction, step by step; ``reverse`` scans the convolved sequence backwards."""
    x, z = xz.transpose(1, 2).chunk(2, dim=1)
    weight, bias = p[f"conv1d{end}.weight"], p[f"conv1d{end}.bias"]
    x = F.silu(F.conv1d(x, weight, bias, padding=weight.shape[2] - 1, groups=x.shape[1])[..., : x.shape[2]]).transpose(1, 2)
    A = -torch.exp(p[f"A{end}_log"] if A_log is None else A_log)
    rank, dstate = p[f"dt_proj{end}.weight"].shape[1], A.shape[1]
    dt, B, C = (x @ p[f"x_proj{end}.weight"].T).split([rank, dstate, dstate], -1)
    dt = F.softplus(dt @ p[f"dt_proj{end}.weight"].T + p[f"dt_proj{end}.bias"])
    h, ys = x.new_zeros(x.shape[0], *A.shape), {}
    for t in range(x.shape[1])[:: -1 if reverse else 1]:
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt * x)[:, t, :, None] * B[:, t, None]
        ys[t] = (h * C[:, t, None]).sum(-1) + p[f"D{end}"] * x[:, t]
    return torch.stack([ys[t] for t in range(x.shape[1])], 1) * F.silu(z.transpose(1, 2))


def plain_layer(options, p, s):
    xz = s @ p["in_proj.weight"].T
    y = plain_mixer(p, xz)
    kind = options.get("bimamba_type", "v2" if options.get("bimamba") else "none")
    if kind == "v1":
        y = y + plain_mixer(p, xz, A_log=p["A_b_log"], reverse=True)
    if kind in ("v2", "v3"):
        y = y + plain_mixer(p, xz.flip(1), "_b").flip(1)
    if kind == "v3":
        order = torch.arange(s.shape[1]).view(options["nslices"], -1).T.flatten()
        sliced = plain_mixer(p, xz[:, order], "_s")
        y = y + torch.empty_like(sliced).index_copy(1, order.to(s.device), sliced)
    if kind == "v2" and (options.get("if_divide_out") or options.get("if_devide_out")):
        y = y / 2
    out = y @ p["out_proj.weight"].T
    return out * p["gamma"] if "gamma" in p else out


@pytest.mark.serves("values and gradients", model="`Mamba` of Vim, VideoMamba, SegMamba, LocalMamba, Audio-Mamba")
@pytest.mark.parametrize("project", PROJECTS)
def test_mixers_of_several_directions_have_the_values_and_gradients_of_plain_formulas(project, device):
    options, ends = PROJECTS[project]
    torch.manual_seed(0)
    layer = Mamba(8, d_state=3, expand=2, device=device, dtype=torch.float64, **options)
    names = {f"{name}{end}" for end in ends for name in ("conv1d", "x_proj", "dt_proj", "D")} | {f"A{end}_log" for end in ends}
    names |= {"A_b_log"} if options.get("bimamba_type") == "v1" else set()
    names |= {"in_proj", "out_proj"} | ({"gamma"} if "init_layer_scale" in options else set())
    assert {name.partition(".")[0] for name in layer.state_dict()} == names
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    s = torch.randn(2, 9, 8, device=device, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())
    out, expected = layer(s), plain_layer(options, parameters, s)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    leaves = [s, *parameters.values()]
    torch.testing.assert_close(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout))


def test_mixers_start_as_those_of_the_forks():
    torch.manual_seed(0)
    layer = Mamba(16, d_state=4, bimamba_type="v3", nslices=2, init_layer_scale=0.25)
    exponents = torch.arange(1, 5.0).log().expand(32, 4)
    for end in ("", "_b", "_s"):
        torch.testing.assert_close(getattr(layer, f"A{end}_log").detach(), exponents)
        assert (getattr(layer, f"D{end}") == 1).all()
    assert (layer.gamma == 0.25).all()
    marked = [name for name, parameter in layer.named_parameters() if getattr(parameter, "_no_weight_decay", False)]
    assert marked == ["A_log", "D", "A_b_log", "D_b", "A_s_log", "D_s"]
    assert layer.no_weight_decay() == {*marked}
    # The order of the forks, in which optimizers number the states that they save.
    assert [name for name, _ in layer.named_parameters()][:3] == ["gamma", "A_log", "D"]
    assert [name for name, _ in layer.named_children()][-1] == "out_proj"
    bound = 1 / layer.dt_rank**0.5
    assert layer.dt_proj_b.bias.abs().max() <= bound and layer.dt_proj_b.bias.std() > 0.3 * bound  # any nn.Linear
    assert (F.softplus(layer.dt_proj.bias) < 0.11).all()
    again = Mamba(16, d_state=4, bimamba_type="v3", nslices=2, init_layer_scale=0.25, device="meta").to_empty(device="cpu")
    for module in again.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name in ("A_log", "A_b_log", "A_s_log", "D_b", "gamma"):
        torch.testing.assert_close(getattr(again, name), getattr(layer, name), msg=name)


def test_a_mixer_of_one_direction_is_our_layer():
    torch.manual_seed(0)
    layer, plain = Mamba(16, bimamba_type="none"), ssm_kernels.nn.Mamba(16)
    plain.load_state_dict(layer.state_dict())
    s = torch.randn(2, 5, 16)
    assert torch.equal(layer(s), plain(s)) and torch.equal(layer(s, None, 4), plain(s))
    assert isinstance(plain, Mamba) and isinstance(layer, ssm_kernels.nn.Mamba)

    class Derived(Mamba):
        pass

    assert not isinstance(plain, Derived) and not isinstance(torch.nn.Linear(2, 2), Mamba)
    states = layer.allocate_inference_cache(2, 5)
    torch.testing.assert_close(layer.step(s[:, :1], *states)[0], layer(s[:, :1]))
    file = io.BytesIO()
    torch.save(Mamba(16, bimamba_type="v2"), file)
    file.seek(0)
    assert torch.load(file, weights_only=False).bimamba_type == "v2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bimamba_type": "v4"}, "unknown bimamba_type 'v4'"),
        ({"bimamba_type": "v1", "bimamba": True}, "expected bimamba or bimamba_type, got bimamba=True and bimamba_type='v1'"),
        ({"bimamba_type": "v2", "bimamba": False}, "expected bimamba or bimamba_type"),
        ({"bimamba_type": "v3", "nslices": 0}, "nslices"),
        ({"bimamba_type": "v2", "nslices": 0}, "nslices"),
    ],
)
def test_arguments_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=f"^Mamba: .*{message}"):
        Mamba(16, **options)


def test_types_without_slices_ignore_their_number():
    """SegMamba passes nslices whatever the type is."""
    s = torch.randn(1, 8, 16)
    for kind in ("none", "v1", "v2"):
        torch.manual_seed(0)
        expected = Mamba(16, bimamba_type=kind)(s)
        torch.manual_seed(0)
        assert torch.equal(Mamba(16, bimamba_type=kind, nslices=3)(s), expected)


def test_what_several_directions_cannot_do():
    layer = Mamba(16, layer_idx=0, bimamba_type="v3", nslices=4)
    s = torch.randn(1, 8, 16)
    for arguments in ({"inference_params": object()}, {"seq_idx": torch.zeros(1, 8)}, {"cu_seqlens": torch.tensor([0, 8])}):
        with pytest.raises(NotImplementedError, match=f"Mamba: expected no {next(iter(arguments))} with bimamba_type 'v3'"):
            layer(s, **arguments)
    with pytest.raises(NotImplementedError, match="expected no step with bimamba_type 'v3'"):
        layer.step(s[:, :1], None, None)
    with pytest.raises(ValueError, match="4 slices divide, got length 6"):
        layer(s[:, :6])
    with pytest.raises(ValueError, match="hidden_states"):
        layer(s[..., :3])


def test_tensor_and_context_parallelism_refuse_several_directions(monkeypatch):
    layer = Mamba(16, bimamba_type="v2")
    with pytest.raises(ValueError, match=r"^TensorParallel: mixer: expected a Mamba of one direction, got bimamba_type 'v2'"):
        tensor_parallel._check("TensorParallel: mixer", layer, 1)
    tensor_parallel._check("TensorParallel: mixer", Mamba(16), 1)
    monkeypatch.setattr(layer, "operators", SimpleNamespace(is_local=False))
    with pytest.raises(NotImplementedError, match=r"^Mamba: expected bimamba_type 'none' in a context-parallel group"):
        layer(torch.randn(1, 8, 16))
    # FSDP2 and TensorParallel derive classes from a layer's class.
    derived = type("FSDPMamba", (type("FSDPModule", (), {}), Mamba), {})
    assert isinstance(derived(16), Mamba) and not isinstance(layer, derived)


def inner_arguments(device="cpu"):
    torch.manual_seed(0)
    sizes = {
        "xz": (2, 12, 9),
        "weight": (6, 1, 4),
        "bias": (6,),
        "x_proj": (2 + 3 + 3, 6),
        "dt_proj": (6, 2),
        "out": (5, 6),
        "A": (6, 3),
    }
    tensors = {name: torch.randn(size, device=device, dtype=torch.float64) for name, size in sizes.items()}
    tensors |= {"A_b": -torch.rand_like(tensors["A"]), "D": torch.randn(6, device=device, dtype=torch.float64)}
    tensors["A"] = -tensors["A"].abs()
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def plain_parameters(t, bias):
    p = {"conv1d.weight": t["weight"], "conv1d.bias": t["bias"], "x_proj.weight": t["x_proj"], "dt_proj.weight": t["dt_proj"]}
    return p | {"dt_proj.bias": bias, "D": t["D"], "A_log": (-t["A"]).log()}


@pytest.mark.serves("values and gradients", model="`bimamba_inner_fn`, `mamba_inner_fn_no_out_proj`")
def test_functions_of_the_forks_have_the_values_and_gradients_of_plain_formulas(device):
    t = inner_arguments(device)
    bias = torch.randn(6, device=device, dtype=torch.float64, requires_grad=True)
    head = [t["xz"], t["weight"], t["bias"], t["x_proj"], t["dt_proj"]]
    p, xz = plain_parameters(t, bias), t["xz"].transpose(1, 2)
    forward = plain_mixer(p, xz)
    both = forward + plain_mixer(p, xz, A_log=(-t["A_b"]).log(), reverse=True)
    out = mamba_inner_fn_no_out_proj(*head, t["A"], None, None, t["D"], delta_bias=bias, delta_softplus=True)
    two = bimamba_inner_fn(*head, t["out"], None, t["A"], t["A_b"], None, None, t["D"], delta_bias=bias, delta_softplus=True)
    one = mamba_inner_fn(*head, t["out"], None, t["A"], None, None, t["D"], delta_bias=bias)
    torch.testing.assert_close([out, two, one], [forward.transpose(1, 2), both @ t["out"].T, forward @ t["out"].T])
    reference = bimamba_inner_ref(*head, t["out"], None, t["A"], t["A_b"], None, None, t["D"], delta_bias=bias)
    torch.testing.assert_close(reference, two)
    leaves = [*t.values(), bias]
    for value, expected in ((out, forward.transpose(1, 2)), (two, both @ t["out"].T)):
        dout = torch.randn_like(value)
        grads = [torch.autograd.grad(each, leaves, dout, allow_unused=True, retain_graph=True) for each in (value, expected)]
        torch.testing.assert_close([*grads[0]], [*grads[1]])


def test_errors_name_the_function_of_the_fork():
    t = inner_arguments()
    head = [t["xz"], t["weight"], t["bias"], t["x_proj"], t["dt_proj"]]
    with pytest.raises(ValueError, match=r"^bimamba_inner_fn: expected A_b of shape \(dim, dstate\)"):
        bimamba_inner_fn(*head, t["out"], None, t["A"], t["A_b"][:1])
    with pytest.raises(ValueError, match=r"^mamba_inner_fn_no_out_proj: expected x_proj_weight of shape"):
        mamba_inner_fn_no_out_proj(*head[:3], t["x_proj"][1:], t["dt_proj"], t["A"])


def test_names_and_positions_of_the_versions_1_x():
    with compat.installed():
        layernorm = importlib.import_module("mamba_ssm.ops.triton.layernorm")
        later = importlib.import_module("mamba_ssm.ops.triton.layer_norm")
        assert importlib.import_module("mamba_ssm.modules.mamba_simple").Block is BlockWithoutMLP
    assert layernorm.RMSNorm is later.RMSNorm
    x, weight, bias, residual = torch.randn(3, 8), torch.rand(8), torch.randn(8), torch.randn(3, 8)
    expected = F.layer_norm(x + residual, (8,), weight, bias, eps=0.5)
    torch.testing.assert_close(layernorm.layer_norm_fn(x, weight, bias, residual, 0.5, True), (expected, x + residual))
    expected = F.rms_norm(x + residual, (8,), weight, eps=0.5)
    torch.testing.assert_close(layernorm.rms_norm_fn(x, weight, None, residual, True, False, 0.5), (expected, x + residual))
    torch.testing.assert_close(
        layernorm.layer_norm_fn(x, weight, None, None, 0.5, is_rms_norm=True), F.rms_norm(x, (8,), weight, 0.5)
    )


def test_blocks_and_models_of_the_versions_1_x():
    block = BlockWithoutMLP(16, Mamba, torch.nn.LayerNorm, False, True)
    assert block.mlp is None and block.residual_in_fp32
    s = torch.randn(2, 5, 16)
    hidden, residual = block(s)
    torch.testing.assert_close(residual, s)
    torch.testing.assert_close(hidden, block.mixer(block.norm(s)))
    for made in (create_block(16, {"d_state": 4}, rms_norm=True), create_block(16, ssm_cfg={"d_state": 4})):
        assert made.mlp is None and made.mixer.d_state == 4 and isinstance(made.mixer, Mamba)
    assert create_block(16, None).mixer.d_state == 16
    vision = create_block(16, ssm_cfg={"bimamba_type": "v2"})
    assert vision.mixer.D_b.shape == (32,) and vision(s)[0].shape == s.shape
    for model in (MixerModel(16, 1, 21), MixerModel(16, 1, vocab_size=21), MixerModel(16, 1, 21, {"d_state": 4})):
        assert model.embedding.weight.shape == (21, 16) and model.layers[0].mlp is None
    assert model.layers[0].mixer.d_state == 4
    with pytest.raises(ValueError, match="create_block: expected d_intermediate to be an int beside ssm_cfg"):
        create_block(16, {}, {})


def test_the_convolution_takes_the_activation_at_its_older_positions():
    conv = compat.causal_conv1d.causal_conv1d_fn
    x, weight, bias = torch.randn(2, 3, 6), torch.randn(3, 4), torch.randn(3)
    expected = conv(x, weight, bias, activation="silu")
    assert torch.equal(conv(x, weight, bias, "silu"), expected) and torch.equal(conv(x, weight, bias, None, "silu"), expected)
    with pytest.raises(ValueError, match="causal_conv1d_fn: expected seq_idx to be a tensor or None beside activation='silu'"):
        conv(x, weight, bias, "silu", activation="silu")
    with pytest.raises(TypeError, match="causal_conv1d_fn: expected seq_idx to be a tensor or None, got str"):
        conv(x, weight, bias, "relu")
