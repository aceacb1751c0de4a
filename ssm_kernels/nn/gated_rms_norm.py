"""The gated RMSNorm of the Mamba-2 mixer and of the heads of the delta rules, as a module."""

from __future__ import annotations

from typing import get_args

import torch
import torch.nn as nn
from torch import Tensor

from .._torchscript import refuse_script
from ..choices import GateActivation
from ..ops.norm import rms_norm_gated
from .checks import check_bools, check_choice, check_dtype, check_int, check_not_negative
from .weight_decay import NamesNoDecay

__all__ = ["GatedRMSNorm"]


@refuse_script
class GatedRMSNorm(NamesNoDecay, nn.Module):
    """RMSNorm of each group of channels, with a gate.

    ``norm(x * silu(z)) * weight``, or ``norm(x) * weight * silu(z)`` with ``norm_before_gate``; without ``z`` a plain
    norm. Computed in float32 (float64 for float64 inputs).

    Args:
        channels: size of the last axis.
        groups: how many groups the channels are divided into.
        norm_before_gate: see above.
        eps: added to the mean square.
        activation: of the gate, as in :func:`ssm_kernels.rms_norm_gated`.
    """

    # A class attribute, because layers that earlier versions pickled have no value of their own.
    activation: GateActivation = "silu"

    def __init__(
        self,
        channels: int,
        groups: int = 1,
        norm_before_gate: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: GateActivation = "silu",
    ) -> None:
        super().__init__()
        check_int("GatedRMSNorm", "channels", channels)
        check_int("GatedRMSNorm", "groups", groups)
        check_bools("GatedRMSNorm", norm_before_gate=norm_before_gate)
        check_not_negative("GatedRMSNorm", "eps", eps)
        check_choice("GatedRMSNorm", "activation", activation, get_args(GateActivation))
        check_dtype("GatedRMSNorm", dtype)
        if channels % groups != 0:
            raise ValueError(f"GatedRMSNorm: expected groups that divide channels = {channels}, got {groups}")
        self.group_size, self.norm_before_gate, self.eps = channels // groups, norm_before_gate, eps
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return rms_norm_gated(
            x,
            self.weight,
            z,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
            activation=self.activation,
        )
