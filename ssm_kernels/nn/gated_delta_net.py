r"""Gated DeltaNet: the delta rule with a decay of each head, Mamba-2's gate.

The formulas are those of ``delta_rule.py`` with :math:`g_{t,h} = -e^{A_{\log,h}}\, \mathrm{softplus}((W_a u_t)_h + b_h)` and
:math:`\beta_t = \sigma(W_b u_t)`. Source: Yang, Kautz and Hatamizadeh, *Gated Delta Networks: Improving Mamba2 with Delta Rule*
(arXiv 2412.06464).
"""

from __future__ import annotations

from typing import Literal

import torch

from ..choices import GateActivation
from .checks import check_choice
from .delta_rule import DeltaRuleMixer
from .initialization import linear
from .naming import class_name, names_layer

__all__ = ["GatedDeltaNet"]


@names_layer
class GatedDeltaNet(DeltaRuleMixer):
    """Gated DeltaNet, a causal map (batch, seqlen, hidden_size) -> (batch, seqlen, hidden_size).

    Positional arguments and the ``state_dict`` are those of flash-linear-attention's ``fla.layers.GatedDeltaNet``, whose
    checkpoints load here; ``forward`` returns the output alone. Parameters, with ``key_dim = num_heads * head_dim`` and
    ``value_dim = num_v_heads * head_dim * expand_v``: ``A_log`` and ``dt_bias`` (num_v_heads,), ``q_proj.weight`` and
    ``k_proj.weight`` (key_dim, hidden_size), ``v_proj.weight`` (value_dim, hidden_size), ``a_proj.weight`` and
    ``b_proj.weight`` (num_v_heads, hidden_size), ``q_conv1d.weight`` and ``k_conv1d.weight`` (key_dim, 1, conv_size),
    ``v_conv1d.weight`` (value_dim, 1, conv_size), ``g_proj.weight`` (value_dim, hidden_size), ``o_norm.weight`` (head_dim *
    expand_v,), ``o_proj.weight`` (hidden_size, value_dim).

    Args:
        hidden_size: channels of input and output.
        expand_v: a value head has ``head_dim * expand_v`` columns.
        head_dim: columns of a head of queries and keys.
        num_heads: heads of queries and keys.
        num_v_heads: heads of values, gates and states, a multiple of ``num_heads``: each head of queries and keys serves
            several. ``None`` is ``num_heads``.
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernels of flash-linear-attention; ignored.
        use_gate: whether the activation of ``g_proj(u)`` multiplies the normalized output.
        use_short_conv: whether queries, keys and values go through short convolutions.
        allow_neg_eigval: doubles beta, so that transitions have eigenvalues down to -1.
        conv_size: width of the convolutions.
        conv_bias: whether the convolutions have a bias.
        layer_idx: key of this layer in the cache of ``inference_params``.
        norm_eps: of the norm of each head's output.
        output_gate_activation: ``"swish"``, ``"silu"`` (the same) or ``"sigmoid"``.
        device: where the parameters are made.
        dtype: dtype of the layer. ``A_log``, ``dt_bias``, ``o_norm.weight`` without ``use_gate`` and states are float32
            (float64 in a float64 layer).

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer, x = nn.GatedDeltaNet(64, head_dim=16, num_heads=2, num_v_heads=4), torch.randn(1, 100, 64)
        >>> layer(x).shape  # (batch, seqlen, hidden_size)
        torch.Size([1, 100, 64])
        >>> cu_seqlens = torch.tensor([0, 30, 100])  # two packed sequences
        >>> layer(x, cu_seqlens=cu_seqlens).shape
        torch.Size([1, 100, 64])
    """

    _no_decay = ("A_log", "dt_bias")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: Literal["swish", "silu", "sigmoid"] = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = class_name(self)
        self._set_sizes(
            *(hidden_size, num_heads, num_v_heads, head_dim, None, conv_size, mode, layer_idx, norm_eps, dtype),
            expand_v=expand_v,
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
        )
        check_choice(layer, "output_gate_activation", output_gate_activation, ("swish", "silu", "sigmoid"))
        self.output_gate_activation = output_gate_activation
        # The order of flash-linear-attention: optimizer states are saved, and random numbers drawn, in the order of creation.
        self._make_projections(device, dtype)
        self.a_proj = linear(hidden_size, self.num_v_heads, False, device, dtype)
        self.b_proj = linear(hidden_size, self.num_v_heads, False, device, dtype)
        self._make_gate_parameters(self.num_v_heads, device)
        self.reset_parameters()
        self._make_convolutions(conv_bias, device, dtype)
        if use_gate:
            self.g_proj = linear(hidden_size, self.value_dim, False, device, dtype)
        activation: GateActivation | None = (
            None if not use_gate else "sigmoid" if output_gate_activation == "sigmoid" else "silu"
        )
        self.o_norm = self._make_norm(norm_eps, device, dtype, activation)
        self.o_proj = linear(self.value_dim, hidden_size, False, device, dtype)
