"""``compat.fla_layers.Mamba3`` beside flash-linear-attention's layer, whose kernels of rank one the reference
replaces on the CPU, and those of higher rank ``mamba3_mimo``, which is tested against the reference elsewhere."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fla_package import import_fla, without
from torch import Tensor, nn

from ssm_kernels import reference
from ssm_kernels.compat.fla_layers import Mamba3
from ssm_kernels.compat.mamba3 import mamba3_mimo

CLIENT, OPERATOR = "flash-linear-attention", "mamba3_chunk_scan"
SIZES = {"hidden_size": 16, "state_size": 8, "head_dim": 8, "layer_idx": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "options": {"n_groups": 2, "is_outproj_norm": True, "rope_fraction": 1.0, "use_bias": True, "norm_eps": 0.1},
    "ranks": {"is_mimo": True, "mimo_rank": 3, "n_groups": 2},
    "ranks_norm": {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True, "norm_eps": 0.1},
}


def siso(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, **others):
    dt = DT.transpose(1, 2)
    return reference.mamba3_chunk_scan(
        *(V, dt, ADT.transpose(1, 2) / dt, K, Q, Trap.transpose(1, 2), Angles), B_bias=K_bias, C_bias=Q_bias, D=D, z=Z
    )


class Norm(nn.Module):
    """The formula of FLA's RMSNormGated, with its parameters."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps, self.size = norm.weight, norm.eps, norm.group_size or norm.weight.shape[0]

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        normed = F.rms_norm(x.unflatten(-1, (-1, self.size)), (self.size,), eps=self.eps).flatten(-2) * self.weight
        return normed if z is None else normed * F.silu(z)


@pytest.fixture(scope="module")
def fla():
    with without("fla"), pytest.MonkeyPatch.context() as patch:
        layers, cache_utils, configuration = import_fla(
            "fla.layers.mamba3", "fla.models.cache_utils", "fla.models.mamba3.configuration_mamba3"
        )
        patch.setattr(layers, "mamba3_siso_combined", siso)
        patch.setattr(layers, "mamba3_mimo_combined", mamba3_mimo)
        yield SimpleNamespace(Mamba3=layers.Mamba3, Cache=cache_utils.Cache, Config=configuration.Mamba3Config)


def make(fla: SimpleNamespace, options: dict[str, Any]) -> tuple[nn.Module, Mamba3]:
    torch.manual_seed(0)
    theirs = fla.Mamba3(**SIZES, **options)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if name.endswith("proj.weight") else 0.5))
    ours = Mamba3(**SIZES, **options)
    ours.load_state_dict(theirs.state_dict())
    for name in ("B_norm", "C_norm", "norm"):
        if hasattr(theirs, name):
            setattr(theirs, name, Norm(getattr(theirs, name)))
    return theirs, ours


@pytest.mark.serves("outputs and gradients", model="Mamba3")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_outputs_and_gradients(fla, options: dict[str, Any]):
    theirs, ours = make(fla, options)
    x = torch.randn(2, 21, SIZES["hidden_size"])
    expected, _ = theirs.cuda_kernels_forward(x)
    out, attentions, cache = ours(x)
    assert attentions is cache is None
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(out)
    for each in (expected, out):
        (each * weights).sum().backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=2e-3, atol=2e-4, msg=name)


def test_signatures_and_configuration(fla):
    for name in ("__init__", "forward"):
        theirs, ours = (inspect.signature(getattr(each, name)).parameters for each in (fla.Mamba3, Mamba3))
        assert [(key, each.default) for key, each in theirs.items()] == [(key, each.default) for key, each in ours.items()]
    config = fla.Config(hidden_size=16, state_size=8, head_dim=8, is_outproj_norm=True, norm_eps=0.1, use_bias=True)
    layer = Mamba3.of_config(config, layer_idx=3)
    assert layer.layer_idx == 3 and layer.norm.eps == layer.B_norm.eps == 0.1 and layer.in_proj.bias is not None


@pytest.mark.serves("cached steps", model="Mamba3")
def test_cache_with_padding(fla):
    """A padded prompt, a step, and three tokens at once, as each sequence alone."""
    _, ours = make(fla, {})
    x = torch.randn(2, 12, SIZES["hidden_size"])
    lengths = (8, 3)  # of the prompts, which are padded on the left
    mask = torch.arange(8) >= 8 - torch.tensor(lengths)[:, None]
    cache = fla.Cache()
    outputs = []
    with torch.no_grad():
        for begin, end in ((0, 8), (8, 9), (9, 12)):
            mask = F.pad(mask, (0, end - mask.shape[1]), value=True)
            out, _, cache = ours(x[:, begin:end], attention_mask=mask, past_key_values=cache, use_cache=True)
            outputs.append(out)
        found = torch.cat(outputs, dim=1)
        for row, length in enumerate(lengths):
            expected, *_ = ours(x[row : row + 1, 8 - length :])
            torch.testing.assert_close(found[row : row + 1, 8 - length :], expected, rtol=1e-4, atol=1e-5)
    assert (found[1, :5] == 0).all()
    with pytest.raises(ValueError, match=r"^Mamba3: expected attention_mask of shape"):
        ours(x, attention_mask=mask[:, :5])
    with pytest.raises(ValueError, match=r"^Mamba3: expected a layer with layer_idx"):
        Mamba3(16, 8, head_dim=8)(x, past_key_values=cache)
