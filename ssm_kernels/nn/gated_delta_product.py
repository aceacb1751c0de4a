r"""Gated DeltaProduct: several updates of the state in each step, after one decay.

The formulas are those of ``delta_rule.py``, where the update runs ``num_householder`` times with keys, values and betas of
their own, so that the transition of a step is a product of generalized Householder matrices. The decay is that of
``gated_delta_net.py``, or none. Source: Siems, Carstensen, Zela, Hutter, Pontil and Grazzi, *DeltaProduct: Improving
State-Tracking in Linear RNNs via Householder Products* (arXiv 2502.10297).
"""

from __future__ import annotations

import torch

from .checks import check_int
from .delta_rule import DeltaRuleMixer
from .initialization import linear
from .naming import class_name, names_layer

__all__ = ["GatedDeltaProduct"]


@names_layer
class GatedDeltaProduct(DeltaRuleMixer):
    """Gated DeltaProduct, a causal map (batch, seqlen, hidden_size) -> (batch, seqlen, hidden_size).

    Positional arguments and the ``state_dict`` are those of flash-linear-attention's ``fla.layers.GatedDeltaProduct``, whose
    checkpoints load here; ``forward`` returns the output alone. Parameters, with ``key_dim = num_heads * head_dim``,
    ``value_dim = num_v_heads * head_dim * expand_v`` and n = ``num_householder``: ``A_log`` and ``dt_bias`` (num_v_heads,),
    ``q_proj.weight`` (key_dim, hidden_size), ``k_proj.weight`` (n key_dim, hidden_size), ``v_proj.weight`` (n value_dim,
    hidden_size), ``b_proj.weight`` (n num_v_heads, hidden_size), ``a_proj.weight`` (num_v_heads, hidden_size),
    ``q_conv1d.weight`` (key_dim, 1, conv_size), ``k_conv1d.weight`` (n key_dim, 1, conv_size), ``v_conv1d.weight`` (n
    value_dim, 1, conv_size), ``g_proj.weight`` (value_dim, hidden_size), ``o_norm.weight`` (head_dim * expand_v,),
    ``o_proj.weight`` (hidden_size, value_dim).

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode, use_short_conv, conv_size, conv_bias, layer_idx,
            norm_eps, device: as for :class:`GatedDeltaNet`.
        use_output_gate: whether ``silu(g_proj(u))`` multiplies the normalized output.
        use_forget_gate: whether the state decays.
        allow_neg_eigval: doubles beta, so that updates have eigenvalues down to -1.
        num_householder: updates in a step.
        dtype: dtype of the layer. ``A_log``, ``dt_bias``, ``o_norm.weight`` without ``use_output_gate`` and states are float32
            (float64 in a float64 layer).

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer, x = nn.GatedDeltaProduct(64, head_dim=16, num_heads=2), torch.randn(1, 100, 64)
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
        use_output_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        num_householder: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = class_name(self)
        self._set_sizes(
            *(hidden_size, num_heads, num_v_heads, head_dim, None, conv_size, mode, layer_idx, norm_eps, dtype),
            expand_v=expand_v,
            use_output_gate=use_output_gate,
            use_short_conv=use_short_conv,
            conv_bias=conv_bias,
            use_forget_gate=use_forget_gate,
            allow_neg_eigval=allow_neg_eigval,
        )
        check_int(layer, "num_householder", num_householder)
        self.num_householder = num_householder
        # The order of flash-linear-attention: optimizer states are saved, and random numbers drawn, in the order of creation.
        self._make_projections(device, dtype)
        self.b_proj = linear(hidden_size, self.num_v_heads * num_householder, False, device, dtype)
        if use_forget_gate:
            self.a_proj = linear(hidden_size, self.num_v_heads, False, device, dtype)
            self._make_gate_parameters(self.num_v_heads, device)
            self.reset_parameters()
        self._make_convolutions(conv_bias, device, dtype)
        if use_output_gate:
            self.g_proj = linear(hidden_size, self.value_dim, False, device, dtype)
        self.o_norm = self._make_norm(norm_eps, device, dtype, "silu" if use_output_gate else None)
        self.o_proj = linear(self.value_dim, hidden_size, False, device, dtype)
