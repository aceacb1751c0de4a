"""``mamba_ssm.modules.mamba2_simple`` (2.3.2): Mamba-2 without a cache, with initial states that can be learned."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import Mamba2
from ._errors import check_activation
from .ssd import mamba_split_conv1d_scan_combined

__all__ = ["Mamba2Simple"]


class Mamba2Simple(Mamba2):
    """The Mamba-2 mixer without a cache. Parameters are those of :class:`ssm_kernels.nn.Mamba2` and ``init_states``.

    Arguments are those of :class:`ssm_kernels.nn.Mamba2`, and:

    Args:
        learnable_init_states: adds the parameter ``init_states``, (heads, headdim, dstate), zero at first.
        activation: of the convolution: ``"silu"``, ``"swish"`` or None.
        use_mem_eff_path: must be True with ``ngroups > 1``, because ``mamba_ssm`` normalizes all groups together otherwise.

    Raises:
        NotImplementedError: another activation, or ``use_mem_eff_path=False`` with ``ngroups > 1``.
        ValueError, TypeError: as :class:`ssm_kernels.nn.Mamba2`.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 128,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        learnable_init_states: bool = False,
        activation: str | None = "swish",
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kind = check_activation("Mamba2Simple", activation)
        if not use_mem_eff_path and ngroups > 1:
            raise NotImplementedError(f"Mamba2Simple: expected use_mem_eff_path=True with ngroups {ngroups}, got False")
        super().__init__(
            d_model,
            d_state,
            d_conv,
            conv_init,
            expand,
            headdim,
            ngroups=ngroups,
            A_init_range=A_init_range,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init_floor=dt_init_floor,
            dt_limit=dt_limit,
            bias=bias,
            conv_bias=conv_bias,
            chunk_size=chunk_size,
            use_mem_eff_path=use_mem_eff_path,
            layer_idx=layer_idx,
            device=device,
            dtype=dtype,
        )
        self.activation, self.learnable_init_states = kind, learnable_init_states
        if learnable_init_states:
            self.init_states = nn.Parameter(torch.zeros(self.nheads, headdim, d_state, device=device, dtype=dtype))
            self.init_states._no_weight_decay = True  # type: ignore[attr-defined]

    _no_decay = (*Mamba2._no_decay, "init_states")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes the layer's own parameters; the submodules have their own ``reset_parameters``."""
        super().reset_parameters()
        # Mamba2's constructor calls this method before there are initial states.
        if "init_states" in self._parameters:
            self.init_states.zero_()

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(batch, seqlen, d_model) to itself; ``seq_idx``, (batch, seqlen), numbers packed sequences."""
        initial_states = self.init_states.expand(u.shape[0], -1, -1, -1) if self.learnable_init_states else None
        out = mamba_split_conv1d_scan_combined(
            self.in_proj(u),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias,
            -torch.exp(self.A_log),
            self.D,
            self.chunk_size or 256,
            initial_states=initial_states,
            seq_idx=seq_idx,
            dt_limit=self.dt_limit,
            activation=self.activation,
            rmsnorm_weight=self.norm.weight,
            rmsnorm_eps=self.norm.eps,
            headdim=self.headdim,
            ngroups=self.ngroups,
            norm_before_gate=False,
        )
        assert isinstance(out, Tensor)
        projected: Tensor = self.out_proj(out)
        return projected

    def allocate_inference_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: the layer has no cache."""
        raise NotImplementedError("Mamba2Simple: the layer has no cache, use Mamba2")

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: the layer has no cache."""
        raise NotImplementedError("Mamba2Simple: the layer has no cache, use Mamba2")
