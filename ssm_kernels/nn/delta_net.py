r"""DeltaNet: a linear attention whose state is a map from keys to values, which the delta rule corrects.

The formulas are those of ``delta_rule.py`` without decay, with :math:`\beta_t = \sigma(W_b u_t)`. Sources: Schlag, Irie and
Schmidhuber, *Linear Transformers Are Secretly Fast Weight Programmers* (arXiv 2102.11174); Yang, Wang, Zhang, Shen and Kim,
*Parallelizing Linear Transformers with the Delta Rule over Sequence Length* (arXiv 2406.06484).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_choice, check_int, check_number
from .delta_rule import DeltaRuleMixer, Projected
from .initialization import linear
from .naming import class_name, names_layer

__all__ = ["DeltaNet"]


@names_layer
class DeltaNet(DeltaRuleMixer):
    """DeltaNet, a causal map (batch, seqlen, hidden_size) -> (batch, seqlen, hidden_size).

    Positional arguments and the ``state_dict`` are those of flash-linear-attention's ``fla.layers.DeltaNet``, whose
    checkpoints load here; ``forward`` returns the output alone. Parameters, with ``key_dim = hidden_size * expand_k`` and
    ``value_dim = hidden_size * expand_v``: ``q_proj.weight`` and ``k_proj.weight`` (key_dim, hidden_size), ``v_proj.weight``
    (value_dim, hidden_size), ``b_proj.weight`` (num_heads, hidden_size), ``q_conv1d.weight`` and ``k_conv1d.weight`` (key_dim,
    1, conv_size), ``v_conv1d.weight`` (value_dim, 1, conv_size), ``o_norm.weight`` (value_dim / num_heads,), ``o_proj.weight``
    (hidden_size, value_dim); with ``use_gate`` also ``g_proj.weight`` (value_dim, hidden_size).

    Args:
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernels of flash-linear-attention; ignored.
        d_model: channels of input and output, in place of ``hidden_size``.
        hidden_size: channels of input and output.
        expand_k: ``hidden_size * expand_k`` channels of queries and of keys.
        expand_v: ``hidden_size * expand_v`` channels of values.
        num_heads: heads.
        use_beta: whether beta is made of the input; otherwise it is 1.
        use_gate: whether ``silu(g_proj(u))`` multiplies the normalized output.
        use_short_conv: whether queries, keys and values go through short convolutions.
        conv_size: width of the convolutions.
        conv_bias: whether the convolutions have a bias.
        allow_neg_eigval: doubles beta, so that transitions have eigenvalues down to -1.
        layer_idx: key of this layer in the cache of ``inference_params``.
        qk_activation: of queries and keys: ``"silu"``, ``"relu"``, ``"elu"`` (plus 1) or ``"identity"``.
        qk_norm: of each head's query and key: ``"l2"``, or ``"sum"``, which divides by the sum of absolute values.
        norm_eps: of the norm of each head's output.
        device: where the parameters are made.
        dtype: dtype of the layer. ``o_norm.weight`` without ``use_gate`` and states are float32 (float64 in a float64 layer).

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer, x = nn.DeltaNet(hidden_size=64, num_heads=4), torch.randn(1, 100, 64)
        >>> layer(x).shape  # (batch, seqlen, hidden_size)
        torch.Size([1, 100, 64])
        >>> cu_seqlens = torch.tensor([0, 30, 100])  # two packed sequences
        >>> layer(x, cu_seqlens=cu_seqlens).shape
        torch.Size([1, 100, 64])
    """

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size = hidden_size if d_model is None else d_model
        layer = class_name(self)
        head_k_dim = _columns(layer, hidden_size, "expand_k", expand_k, num_heads)
        head_v_dim = _columns(layer, hidden_size, "expand_v", expand_v, num_heads)
        self._set_sizes(
            *(hidden_size, num_heads, None, head_k_dim, head_v_dim, conv_size, mode, layer_idx, norm_eps, dtype),
            expand_v=expand_v,
            use_beta=use_beta,
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
        )
        check_choice(layer, "qk_activation", qk_activation, ("silu", "relu", "elu", "identity"))
        check_choice(layer, "qk_norm", qk_norm, ("l2", "sum"))
        self.expand_k = expand_k
        self.qk_activation, self.qk_norm, self.qk_l2norm = qk_activation, qk_norm, qk_norm == "l2"
        # The order of flash-linear-attention: optimizer states are saved, and random numbers drawn, in the order of creation.
        self._make_projections(device, dtype)
        if use_beta:
            self.b_proj = linear(hidden_size, num_heads, False, device, dtype)
        self._make_convolutions(conv_bias, device, dtype)
        if use_gate:
            self.g_proj = linear(hidden_size, self.value_dim, False, device, dtype)
        self.o_norm = self._make_norm(norm_eps, device, dtype, "silu" if use_gate else None)
        self.o_proj = linear(self.value_dim, hidden_size, False, device, dtype)

    def _beta(self, projected: Projected, q: Tensor) -> Tensor:
        if "b_proj" in self._modules:
            return super()._beta(projected, q)
        return q.new_full(q.shape[:-1], 2.0 if self.allow_neg_eigval else 1.0)

    @property
    def _activates_keys(self) -> bool:  # type: ignore[override]
        return self.qk_activation in ("relu", "elu") or self.qk_norm == "sum"

    def _activate(self, projected: Sequence[Tensor]) -> list[Tensor]:
        q, k, v = super()._activate(projected)
        if self.qk_activation == "relu":
            q, k = F.relu(q), F.relu(k)
        elif self.qk_activation == "elu":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.qk_norm == "sum":
            q, k = self._divide_by_sums(q), self._divide_by_sums(k)
        return [q, k, v]

    def _divide_by_sums(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.num_heads, self.head_k_dim))
        return F.normalize(heads, p=1, dim=-1, eps=1e-6).to(x.dtype).flatten(-2)


def _columns(layer: str, hidden_size: int, name: str, expand: float, num_heads: int) -> int:
    """The columns of a head, ``hidden_size * expand / num_heads``."""
    check_int(layer, "hidden_size", hidden_size)
    check_int(layer, "num_heads", num_heads)
    check_number(layer, name, expand)
    channels = hidden_size * expand
    if not 1 <= channels < math.inf or not math.isclose(channels, round(channels)):
        raise ValueError(f"{layer}: expected a whole hidden_size * {name} of at least 1, got {hidden_size} * {expand}")
    if round(channels) % num_heads:
        raise ValueError(f"{layer}: expected num_heads that divide hidden_size * {name} = {round(channels)}, got {num_heads}")
    return round(channels) // num_heads
