r"""Kimi Delta Attention: the delta rule with a decay of each channel of the key.

The formulas are those of ``delta_rule.py`` with the raw gate :math:`r_t = W_{f2} W_{f1} u_t + b`, of ``head_dim`` numbers a
value head, :math:`g_{t,h} = -e^{A_{\log,h}}\, \mathrm{softplus}(r_{t,h})`, :math:`\beta_t = \sigma(W_b u_t)` and the gate
:math:`\sigma(W_{z2} W_{z1} u_t + b_z)` of the output. With a lower bound :math:`l` the decay is
:math:`g_{t,h} = l\, \sigma(e^{A_{\log,h}} r_{t,h})`. Source: Kimi Team, *Kimi Linear: An Expressive, Efficient Attention
Architecture* (arXiv 2510.26692).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .checks import check_number
from .delta_rule import DeltaRuleMixer, Projected
from .initialization import init_dt_bias, linear
from .naming import class_name, names_layer

__all__ = ["KimiDeltaAttention"]


@names_layer
class KimiDeltaAttention(DeltaRuleMixer):
    """Kimi Delta Attention, a causal map (batch, seqlen, hidden_size) -> (batch, seqlen, hidden_size).

    Positional arguments and the ``state_dict`` are those of flash-linear-attention's ``fla.layers.KimiDeltaAttention``, whose
    checkpoints load here; ``forward`` returns the output alone. Parameters, with ``key_dim = num_heads * head_dim``,
    ``head_v_dim = head_dim * expand_v`` and ``value_dim = num_v_heads * head_v_dim``: ``A_log`` (num_v_heads,), ``dt_bias``
    (num_v_heads * head_dim,), ``q_proj.weight`` and ``k_proj.weight`` (key_dim, hidden_size), ``v_proj.weight`` (value_dim,
    hidden_size), ``q_conv1d.weight`` and ``k_conv1d.weight`` (key_dim, 1, conv_size), ``v_conv1d.weight`` (value_dim, 1,
    conv_size), ``f_proj.0.weight`` (head_v_dim, hidden_size), ``f_proj.1.weight`` (num_v_heads * head_dim, head_v_dim),
    ``b_proj.weight`` (num_v_heads, hidden_size), ``g_proj.0.weight`` (head_v_dim, hidden_size), ``g_proj.1.weight``
    (value_dim, head_v_dim), ``g_proj.1.bias`` (value_dim,), ``o_norm.weight`` (head_v_dim,), ``o_proj.weight`` (hidden_size,
    value_dim).

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode, use_short_conv, conv_size, conv_bias, layer_idx,
            norm_eps, device: as for :class:`GatedDeltaNet`.
        allow_neg_eigval: doubles beta, so that transitions have eigenvalues down to -1.
        safe_gate: needs ``lower_bound``; ``A_log`` is then zero at initialization.
        lower_bound: a negative number, which the log decay of a step never falls below: see the formulas of
            ``kimi_delta_attention.py``. ``None`` leaves the decay unbounded.
        dtype: dtype of the layer. ``A_log``, ``dt_bias`` and states are float32 (float64 in a float64 layer).

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer, x = nn.KimiDeltaAttention(64, head_dim=16, num_heads=4), torch.randn(1, 100, 64)
        >>> layer(x).shape  # (batch, seqlen, hidden_size)
        torch.Size([1, 100, 64])
        >>> cu_seqlens = torch.tensor([0, 30, 100])  # two packed sequences
        >>> layer(x, cu_seqlens=cu_seqlens).shape
        torch.Size([1, 100, 64])
    """

    _no_decay = ("A_log", "dt_bias")
    _A_range = (1.0, 16.0)

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = class_name(self)
        self._set_sizes(
            *(hidden_size, num_heads, num_v_heads, head_dim, None, conv_size, mode, layer_idx, norm_eps, dtype),
            expand_v=expand_v,
            use_short_conv=use_short_conv,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
            safe_gate=safe_gate,
        )
        if lower_bound is not None:
            check_number(layer, "lower_bound", lower_bound)
            if not -math.inf < lower_bound < 0:
                raise ValueError(f"{layer}: expected lower_bound to be finite and negative, got {lower_bound}")
        elif safe_gate:
            raise ValueError(f"{layer}: expected a lower_bound with safe_gate, got None")
        self.lower_bound = lower_bound
        # The order of flash-linear-attention: optimizer states are saved, and random numbers drawn, in the order of creation.
        self._make_projections(device, dtype)
        self._make_convolutions(conv_bias, device, dtype)
        rank = self.head_v_dim
        self.f_proj = nn.Sequential(
            linear(hidden_size, rank, False, device, dtype), linear(rank, self.gate_dim, False, device, dtype)
        )
        self.b_proj = linear(hidden_size, self.num_v_heads, False, device, dtype)
        self._make_gate_parameters(self.gate_dim, device)
        self.reset_parameters()
        self.g_proj = nn.Sequential(
            linear(hidden_size, rank, False, device, dtype), linear(rank, self.value_dim, True, device, dtype)
        )
        self.o_norm = self._make_norm(norm_eps, device, dtype, "sigmoid")
        self.o_proj = linear(self.value_dim, hidden_size, False, device, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes ``A_log`` and ``dt_bias``; the submodules have their own ``reset_parameters``."""
        if self.safe_gate:
            self.A_log.zero_()
            init_dt_bias(self.dt_bias, 0.001, 0.1, 1e-4)
        else:
            super().reset_parameters()

    safe_gate: bool

    @property
    def gate_dim(self) -> int:
        """The channels of the decay."""
        return self.num_v_heads * self.head_k_dim

    def _raw_gate(self, projected: Projected) -> Tensor:
        return projected["f_proj"].unflatten(-1, (self.num_v_heads, self.head_k_dim))

    def _gates(self, projected: Projected) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, options = super()._gates(projected)
        return tensors, {**options, "gate_lower_bound": self.lower_bound}
