"""Projects by field (docs/clients.md): their imports and calls, restated with small inputs, beside plain formulas."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPAT_VERSION
from test_vision_forks import plain_layer
from torch import nn

from ssm_kernels import compat
from ssm_kernels.compat._modules import PARTS

CLIENT = "mamba_ssm"
CLIENT_VERSION = COMPAT_VERSION

MAMBA = "from mamba_ssm import Mamba"
FORK = """
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, mamba_inner_fn
from mamba_ssm.ops.selective_scan_interface import bimamba_inner_fn, mamba_inner_fn_no_out_proj
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
import selective_scan_cuda
import causal_conv1d_cuda
"""
NORMS_1_X = "from mamba_ssm.ops.triton.layernorm import RMSNorm, layer_norm_fn, rms_norm_fn"
NORMS_2_X = "from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn"
LANGUAGE_MODEL = """
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.utils.generation import GenerationMixin
from mamba_ssm.utils.hf import load_config_hf, load_state_dict_hf
"""
# Field and project: the imports, and the arguments of the mixer of 12 channels.
PROJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "images, Vim": (FORK + NORMS_2_X + LANGUAGE_MODEL, {"layer_idx": 0, "bimamba_type": "v2", "if_divide_out": True}),
    "images, LocalMamba": (FORK + NORMS_1_X, {"d_state": 4, "bimamba_type": "v2", "if_devide_out": True}),
    "images, VMamba": ("import selective_scan_cuda_oflex, selective_scan_cuda_core, selective_scan_cuda\n" + MAMBA, {}),
    "video, VideoMamba": (FORK + NORMS_1_X + LANGUAGE_MODEL, {"layer_idx": 1, "bimamba": True}),
    "volumes, SegMamba": (MAMBA, {"d_state": 16, "d_conv": 4, "expand": 2, "bimamba_type": "v3", "nslices": 3}),
    "volumes, U-Mamba": (MAMBA, {"d_state": 16, "d_conv": 4, "expand": 2}),
    "point clouds, PointMamba": (
        FORK + NORMS_2_X,
        {"layer_idx": 0},
    ),
    "audio, Audio-Mamba": (FORK + NORMS_1_X, {"layer_idx": 0, "bimamba_type": "v1", "if_devide_out": True}),
    "time series, S-Mamba": (MAMBA, {"d_state": 5, "d_conv": 2, "expand": 1}),
    "graphs, Graph-Mamba": (MAMBA, {"d_state": 4, "d_conv": 4, "expand": 4}),
    "reinforcement learning, Decision Mamba": (MAMBA, {}),
}


@pytest.fixture(autouse=True)
def only_ours():
    compat.uninstall()
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in PARTS}
    with compat.installed():
        yield
    sys.modules.update(hidden)


@pytest.mark.serves("imports and mixers of projects")
@pytest.mark.parametrize("project", PROJECTS)
def test_imports_and_mixers(project):
    imports, arguments = PROJECTS[project]
    names: dict[str, Any] = {"__name__": project}
    exec(imports, names)
    assert [request for request in compat.served().missing if request.by == project] == []
    torch.manual_seed(0)
    mixer = names["Mamba"](d_model=12, **arguments).double()
    s = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    parameters = dict(mixer.named_parameters())
    out, expected = mixer(s), plain_layer(arguments, parameters, s)
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(each.square().sum(), [s, *parameters.values()]) for each in (out, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.serves("imports and mixers of projects")
def test_genomics():
    """Caduceus: the older files first, blocks of mixers of both directions with shared projections, and fused norms."""
    names: dict[str, Any] = {"__name__": "caduceus"}
    exec("from mamba_ssm.modules.mamba_simple import Mamba, Block\n" + NORMS_1_X, names)
    exec("from mamba_ssm.models.mixer_seq_simple import MixerModel, _init_weights\n" + LANGUAGE_MODEL, names)
    Mamba, RMSNorm = names["Mamba"], names["RMSNorm"]

    class BothDirections(nn.Module):
        def __init__(self, d_model):
            super().__init__()
            self.forwards, self.backwards = Mamba(d_model=d_model, layer_idx=0), Mamba(d_model=d_model, layer_idx=0)
            self.backwards.in_proj.weight = self.forwards.in_proj.weight
            self.backwards.out_proj.weight = self.forwards.out_proj.weight

        def forward(self, hidden_states, inference_params=None):
            reverse = self.backwards(hidden_states.flip(dims=(1,)), inference_params=inference_params).flip(dims=(1,))
            return self.forwards(hidden_states, inference_params=inference_params) + reverse

    torch.manual_seed(0)
    norm_cls = partial(RMSNorm, eps=1e-3)
    assert "mlp_cls" not in inspect.signature(names["Block"].__init__).parameters  # which tells Caduceus the version
    blocks = [
        names["Block"](12, BothDirections, norm_cls=norm_cls, fused_add_norm=True, residual_in_fp32=True) for _ in range(2)
    ]
    s, residual = torch.randn(2, 9, 12), None
    hidden, total = s, torch.zeros_like(s)
    for block in blocks:
        s, residual = block(s, residual, inference_params=None)
        total = total + hidden
        normed = F.rms_norm(total, (12,), block.norm.weight, 1e-3)
        mixers = block.mixer.forwards, block.mixer.backwards
        ones = [
            plain_layer({}, dict(mixer.named_parameters(remove_duplicate=False)), x)
            for mixer, x in zip(mixers, (normed, normed.flip(1)), strict=True)
        ]
        hidden = ones[0] + ones[1].flip(1)
        torch.testing.assert_close((s, residual), (hidden, total), rtol=1e-4, atol=1e-4)
    norm_f = names["rms_norm_fn"] if isinstance(blocks[0].norm, RMSNorm) else names["layer_norm_fn"]
    last = norm_f(
        s, blocks[0].norm.weight, blocks[0].norm.bias, eps=1e-3, residual=residual, prenorm=False, residual_in_fp32=True
    )
    torch.testing.assert_close(last, F.rms_norm(s + residual, (12,), blocks[0].norm.weight, 1e-3))
    assert [request for request in compat.served().missing if request.by == "caduceus"] == []
