r"""The layer of xLSTM's matrix memory: projections, gates with a soft cap, the recurrence, a layer norm of each head, a gate.

For hidden states :math:`u_t`, with :math:`\mathrm{cap}(x) = c \tanh(x / c)`:

.. math::
    i_t &= \mathrm{cap}(W_i u_t + b_i), \qquad f_t = \mathrm{cap}(W_f u_t + b_f) \\
    h_t &= \mathrm{mLSTM}(W_q u, W_k u, W_v u, i, f)_t \\
    \mathrm{out}_t &= W_{out}\, (\sigma(W_o u_t) \odot \mathrm{norm}(h_t))

with the recurrence of :func:`ssm_kernels.mlstm_scan`. Sources: Beck et al., *xLSTM: Extended Long Short-Term Memory* (arXiv
2405.04517); *xLSTM 7B* (arXiv 2503.13427), whose layer has these parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .._dtypes import wide_dtype
from .._torchscript import refuse_script
from ..choices import RecomputeName
from ..ops._packing import with_padding
from ..ops.mlstm_step import mlstm_step
from ..ops.norm import layer_norm_gated
from ._operators import CallsOperators
from .checks import (
    check_bools,
    check_choice,
    check_dtype,
    check_int,
    check_not_negative,
    check_number,
    check_optional_int,
    check_shape,
    check_tensor,
)
from .common import is_plain_linear, is_unseen, keeps_less, mark_parameters, states_from_cache
from .initialization import fill_, initialized, linear
from .naming import class_name, names_layer
from .weight_decay import NamesNoDecay

__all__ = ["MLSTM"]

States = tuple[Tensor, Tensor, Tensor]

# The most channels of a head's query that mlstm_scan takes.
_MAX_QUERY_CHANNELS = 256


@refuse_script
class _HeadLayerNorm(NamesNoDecay, nn.Module):
    """The layer norm of each head, and the sigmoid of a gate."""

    def __init__(
        self,
        channels: int,
        head_dim: int,
        eps: float,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.head_dim, self.eps = head_dim, eps
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return layer_norm_gated(
            x,
            self.weight,
            z,
            self.bias,
            eps=self.eps,
            group_size=self.head_dim,
            norm_before_gate=True,
            activation="sigmoid",
        )


def _reset_input_gate(gate: nn.Linear) -> None:
    fill_(gate.weight, torch.zeros((), device=gate.weight.device))
    fill_(gate.bias, torch.tensor(-10.0, device=gate.bias.device))


def _reset_forget_gate(gate: nn.Linear) -> None:
    fill_(gate.weight, torch.zeros((), device=gate.weight.device))
    fill_(gate.bias, torch.linspace(3.0, 6.0, gate.out_features, device=gate.bias.device))


@names_layer
class MLSTM(NamesNoDecay, CallsOperators, nn.Module):
    """The layer of xLSTM's matrix memory, a causal map (batch, seqlen, embedding_dim) -> (batch, seqlen, embedding_dim).

    Parameters are those of xLSTM-7B's layer, whose checkpoints load here, with ``qk_dim = embedding_dim * qk_dim_factor`` and
    ``v_dim = embedding_dim * v_dim_factor``: ``q.weight`` and ``k.weight`` (qk_dim, embedding_dim), ``v.weight`` and
    ``ogate_preact.weight`` (v_dim, embedding_dim), ``igate_preact`` and ``fgate_preact``, each with ``weight`` (num_heads,
    embedding_dim) and ``bias`` (num_heads,), ``multihead_norm.weight`` (v_dim,), ``out_proj.weight`` (embedding_dim, v_dim);
    with ``weight_mode="fused"`` ``qkv_opreact.weight`` in place of the first four and ``ifgate_preact`` in place of the gates.

    Args:
        embedding_dim: channels of input and output.
        num_heads: heads. A head has at most 256 channels of a query, as :func:`ssm_kernels.mlstm_scan` takes them.
        use_bias: whether projections and norm have a bias. The gates always have one.
        norm_eps: of the norm of each head's output.
        eps: added to the divisor; see :func:`ssm_kernels.mlstm_scan`.
        qk_dim_factor: ``embedding_dim * qk_dim_factor`` channels of queries and of keys.
        v_dim_factor: ``embedding_dim * v_dim_factor`` channels of values.
        gate_soft_cap: bounds the gates before their activation; ``None`` leaves them as they are.
        weight_mode: ``"single"``, or ``"fused"`` for one matrix of all projections and one of both gates.
        layer_idx: key of this layer in the cache of ``inference_params``.
        device: where the parameters are made.
        dtype: dtype of the layer. States are float32 (float64 in a float64 layer).

    Raises:
        ValueError: an argument is not as above, such as a head of more than 256 channels of a query.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer, x = nn.MLSTM(64, num_heads=4), torch.randn(1, 100, 64)
        >>> layer(x).shape  # (batch, seqlen, embedding_dim)
        torch.Size([1, 100, 64])
        >>> layer(x, cu_seqlens=torch.tensor([0, 30, 100])).shape  # two packed sequences
        torch.Size([1, 100, 64])
    """

    # Backward computes this again instead of keeping it, as for Mamba2.
    recompute: RecomputeName = "cheap"

    def __init__(
        self,
        embedding_dim: int = 4096,
        num_heads: int = 8,
        use_bias: bool = False,
        norm_eps: float = 1e-6,
        eps: float = 1e-6,
        qk_dim_factor: float = 0.5,
        v_dim_factor: float = 1.0,
        gate_soft_cap: float | None = 15.0,
        weight_mode: str = "single",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = class_name(self)
        check_int(layer, "embedding_dim", embedding_dim)
        check_int(layer, "num_heads", num_heads)
        check_bools(layer, use_bias=use_bias)
        check_not_negative(layer, "norm_eps", norm_eps)
        check_not_negative(layer, "eps", eps)
        check_choice(layer, "weight_mode", weight_mode, ("single", "fused"))
        check_optional_int(layer, "layer_idx", layer_idx, low=0)
        check_dtype(layer, dtype)
        if gate_soft_cap is not None:
            check_number(layer, "gate_soft_cap", gate_soft_cap)
            if not 0 < gate_soft_cap < math.inf:
                raise ValueError(f"{layer}: expected gate_soft_cap to be positive and finite, got {gate_soft_cap}")
        self.embedding_dim, self.num_heads, self.layer_idx = embedding_dim, num_heads, layer_idx
        self.qk_dim_factor, self.v_dim_factor = qk_dim_factor, v_dim_factor
        self.qk_dim = _channels(layer, embedding_dim, "qk_dim_factor", qk_dim_factor, num_heads)
        self.v_dim = _channels(layer, embedding_dim, "v_dim_factor", v_dim_factor, num_heads)
        if self.qk_dim // num_heads > _MAX_QUERY_CHANNELS:
            expected = f"embedding_dim * qk_dim_factor / num_heads to be at most {_MAX_QUERY_CHANNELS}"
            raise ValueError(f"{layer}: expected {expected}, got {self.qk_dim} / {num_heads}")
        self.eps, self.gate_soft_cap, self.weight_mode = eps, gate_soft_cap, weight_mode
        if weight_mode == "single":
            self.q = linear(embedding_dim, self.qk_dim, use_bias, device, dtype)
            self.k = linear(embedding_dim, self.qk_dim, use_bias, device, dtype)
            self.v = linear(embedding_dim, self.v_dim, use_bias, device, dtype)
            self.ogate_preact = linear(embedding_dim, self.v_dim, use_bias, device, dtype)
            self.igate_preact = initialized(linear(embedding_dim, num_heads, True, device, dtype), _reset_input_gate)
            self.fgate_preact = initialized(linear(embedding_dim, num_heads, True, device, dtype), _reset_forget_gate)
            _reset_input_gate(self.igate_preact)
            _reset_forget_gate(self.fgate_preact)
            mark_parameters("_no_reinit", self.igate_preact.bias, self.fgate_preact.bias)
        else:
            self.qkv_opreact = linear(embedding_dim, 2 * (self.qk_dim + self.v_dim), use_bias, device, dtype)
            self.ifgate_preact = initialized(linear(embedding_dim, 2 * num_heads, True, device, dtype), _reset_gates)
            _reset_gates(self.ifgate_preact)
            mark_parameters("_no_reinit", self.ifgate_preact.bias)
        self.multihead_norm = _HeadLayerNorm(self.v_dim, self.v_dim // num_heads, norm_eps, use_bias, device, dtype)
        self.out_proj = linear(self.v_dim, embedding_dim, use_bias, device, dtype)

    def forward(self, hidden_states: Tensor, inference_params: Any = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mixes a sequence, or several packed one after another.

        Args:
            hidden_states: (batch, seqlen, embedding_dim), any strides.
            inference_params: ``None``, or an object with ``seqlen_offset`` (steps done so far) and ``key_value_memory_dict``
                (a dict, in which this layer keeps its states under ``layer_idx``). With offset 0 the sequence starts anew;
                later calls continue it. The states carry no gradient. With ``cu_seqlens`` the cache has a row for each packed
                sequence, and steps after ``cu_seqlens[-1]`` are padding, which no sequence and no state sees.
            cu_seqlens: (sequences + 1,), int32 or int64, for a batch of 1: sequence ``i`` begins at ``cu_seqlens[i]`` and ends
                before ``cu_seqlens[i + 1]``. The sequences are independent.

        Returns:
            (batch, seqlen, embedding_dim).

        Raises:
            ValueError: a shape is not as above, or the layer has no ``layer_idx`` for ``inference_params``.
            TypeError: an argument is not a tensor, or ``inference_params`` lacks an attribute.
        """
        layer = class_name(self)
        check_shape(layer, "hidden_states", hidden_states, "(batch, seqlen, embedding_dim)", (None, None, self.embedding_dim))
        if cu_seqlens is not None:
            check_tensor(layer, "cu_seqlens", cu_seqlens)
            if cu_seqlens.dim() != 1 or hidden_states.shape[0] != 1:
                got = f"{[*cu_seqlens.shape]} and a batch of {hidden_states.shape[0]}"
                raise ValueError(f"{layer}: expected cu_seqlens of shape (sequences + 1,) and a batch of 1, got {got}")
        if inference_params is None:
            return self._mix(hidden_states, None, cu_seqlens)[0]
        self._check_is_local()
        rows = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        cache = self._get_states_from_cache(inference_params, rows)
        continues = inference_params.seqlen_offset != 0
        if continues and cu_seqlens is None and hidden_states.shape[1] == 1 and not torch.is_grad_enabled():
            return self.step(hidden_states, *cache)[0]
        first = [state.to(wide_dtype(state.dtype)).clone() for state in cache] if continues else None
        if cu_seqlens is not None:
            cu_seqlens = with_padding(cu_seqlens, hidden_states.shape[1])
            if first is not None:  # the padding's states are the last
                first = [torch.cat([state, state.new_zeros(1, *state.shape[1:])]) for state in first]
        out, last = self._mix(hidden_states, None if first is None else (first[0], first[1], first[2]), cu_seqlens)
        for state, value in zip(cache, last, strict=True):
            state.copy_(value[:rows].detach())
        return out

    @torch.no_grad()
    def step(self, hidden_states: Tensor, C: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mixes one time step, for decoding. Not differentiable.

        Args:
            hidden_states: (batch, 1, embedding_dim).
            C: (batch, num_heads, head_v_dim, head_qk_dim), modified in place, as are ``n`` and ``m``.
            n: (batch, num_heads, head_qk_dim).
            m: (batch, num_heads).

        Returns:
            ``out``, (batch, 1, embedding_dim), and the three states.

        Raises:
            ValueError: ``hidden_states`` has more than one time step, or a state another shape.
            TypeError: an argument is not a tensor.
        """
        layer = f"{class_name(self)}.step"
        self._check_is_local()
        check_shape(layer, "hidden_states", hidden_states, "(batch, 1, embedding_dim)", (None, 1, self.embedding_dim))
        q, k, v, i, f, o = self._project(hidden_states[:, 0])
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in (q, k, v))
        if self.gate_soft_cap is not None:
            i, f = (self.gate_soft_cap * torch.tanh(gate / self.gate_soft_cap) for gate in (i, f))
        h = mlstm_step(C, n, m, q, k, v, i, f, eps=self.eps)
        return self.out_proj(self.multihead_norm(h.flatten(-2), o))[:, None], C, n, m

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> States:
        """Returns the states ``C``, ``n`` and ``m`` of an empty memory for :meth:`step`.

        Args:
            batch_size: sequences decoded together.
            max_seqlen: ignored, because the states do not grow.
            dtype: must be ``None`` or the dtype of the states, float32 (float64 in a float64 layer).
            kwargs: ignored.

        Raises:
            ValueError: ``batch_size`` is negative, or ``dtype`` is another.
            TypeError: ``batch_size`` is not an int.
        """
        name = f"{class_name(self)}.allocate_inference_cache"
        check_int(name, "batch_size", batch_size, low=0)
        weight = self.multihead_norm.weight
        wide = wide_dtype(weight.dtype)
        if dtype not in (None, wide):
            raise ValueError(f"{name}: expected dtype None or {wide}, got {dtype}")
        heads, of_keys, of_values = self.num_heads, self.qk_dim // self.num_heads, self.v_dim // self.num_heads
        C = torch.zeros(batch_size, heads, of_values, of_keys, device=weight.device, dtype=wide)
        return C, C.new_zeros(batch_size, heads, of_keys), C.new_full((batch_size, heads), -math.inf)

    def extra_repr(self) -> str:
        return f"embedding_dim={self.embedding_dim}, num_heads={self.num_heads}, qk_dim={self.qk_dim}, v_dim={self.v_dim}"

    def _mix(self, u: Tensor, states: States | None, cu_seqlens: Tensor | None) -> tuple[Tensor, States]:
        q, k, v, i, f, o = self._project(u)
        norm = self.multihead_norm
        takes_norm = type(norm).forward is _HeadLayerNorm.forward and is_unseen(norm)
        takes_projection = takes_norm and self.operators.is_local and keeps_less(self) and is_plain_linear(self.out_proj)
        out, *last = self.operators.mlstm_mixer(
            *(q, k, v, i, f),
            *((o, norm.weight, norm.bias) if takes_norm else (None, None, None)),
            *(states or (None, None, None)),
            *((self.out_proj.weight, self.out_proj.bias) if takes_projection else (None, None)),
            cu_seqlens,
            self.gate_soft_cap,
            self.eps,
            norm.eps if takes_norm else 0.0,
            self.recompute == "all" and torch.is_grad_enabled(),
            class_name(self),
        )
        if not takes_projection:
            out = self.out_proj(out if takes_norm else norm(out, o))
        return out, (last[0], last[1], last[2])

    def _project(self, u: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, (..., columns), the gates before their soft cap, and the gate of the output."""
        if self.weight_mode == "single":
            q, k, v, o = self.q(u), self.k(u), self.v(u), self.ogate_preact(u)
            i, f = self.igate_preact(u), self.fgate_preact(u)
        else:
            q, k, v, o = self.qkv_opreact(u).split([self.qk_dim, self.qk_dim, self.v_dim, self.v_dim], dim=-1)
            i, f = self.ifgate_preact(u).chunk(2, dim=-1)
        return q, k, v, i, f, o

    def _get_states_from_cache(self, inference_params: Any, batch_size: int) -> States:
        device = self.multihead_norm.weight.device
        C, n, m = states_from_cache(self, inference_params, batch_size, device, "the tensors C, n and m", ("C", "n", "m"))
        heads, of_keys, of_values = self.num_heads, self.qk_dim // self.num_heads, self.v_dim // self.num_heads
        for name, state, axes, sizes in (
            ("C", C, "(batch, num_heads, head_v_dim, head_qk_dim)", (of_values, of_keys)),
            ("n", n, "(batch, num_heads, head_qk_dim)", (of_keys,)),
            ("m", m, "(batch, num_heads)", ()),
        ):
            check_shape(class_name(self), f"{name} of the cache", state, axes, (batch_size, heads, *sizes))
        return C, n, m


def _reset_gates(gates: nn.Linear) -> None:
    fill_(gates.weight, torch.zeros((), device=gates.weight.device))
    heads, device = gates.out_features // 2, gates.bias.device
    fill_(gates.bias, torch.cat([torch.full((heads,), -10.0, device=device), torch.linspace(3.0, 6.0, heads, device=device)]))


def _channels(layer: str, embedding_dim: int, name: str, factor: float, num_heads: int) -> int:
    check_number(layer, name, factor)
    channels = embedding_dim * factor
    if not 1 <= channels < math.inf or int(channels) % num_heads:
        expected = f"embedding_dim * {name} to be a multiple of num_heads = {num_heads}"
        raise ValueError(f"{layer}: expected {expected}, got {embedding_dim} * {factor}")
    return int(channels)
