r"""The Mamba-3 mixer: one projection to all inputs, norms of B and C, the scan with rotations and two samples a step, a gate.

For hidden states :math:`u_t` of ``d_model`` channels and heads :math:`h` of ``headdim`` channels:

.. math::
    (z_t, x_t, B_t, C_t, \delta_t, a_t, \mathrm{trap}_t, \mathrm{angles}_t) &= W_{in} u_t \\
    \Delta_{t,h} = \mathrm{softplus}(\delta_{t,h} + b_h), \qquad A_{t,h} &= -\max(\phi(a_{t,h}), A_\mathrm{floor}) \\
    y_{t,h} &= \mathrm{Mamba3}(x, \Delta, A, \mathrm{norm}(B), \mathrm{norm}(C), \mathrm{trap}, \mathrm{angles})_{t,h} \\
    \mathrm{out}_t &= W_{out}\, (y_t \cdot \mathrm{silu}(z_t))

with the scan of :func:`ssm_kernels.mamba3_chunk_scan`, of rank one or, with ``is_mimo``, of ``mimo_rank``, and
:math:`\phi(a) = 1 + a` for :math:`a \ge 0`, else :math:`1 / (1 - a)`, or softplus. Source: Lahoti et al., *Mamba-3* (2026). The
layer has no convolution.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import wide_dtype
from ..ops._packing import with_padding
from ..ops.mamba3_step import mamba3_state_update
from ._operators import CallsOperators
from .checks import (
    check_bools,
    check_choice,
    check_dtype,
    check_int,
    check_not_negative,
    check_optional_int,
    check_shape,
    check_step_sizes,
    check_tensor,
)
from .common import expanded, mark_parameters, states_from_cache
from .gated_rms_norm import GatedRMSNorm
from .initialization import init_dt_bias, linear
from .naming import class_name, names_layer
from .weight_decay import NamesNoDecay, own_no_decay

__all__ = ["Mamba3"]

States = tuple[Tensor, Tensor, Tensor, Tensor]
_STATES = ("angle_state", "ssm_state", "k_state", "v_state")


def _minus_heavy_tail(a: Tensor) -> Tensor:
    """Minus 1 + a from zero on, minus 1 / (1 - a) below: one of the two terms is 1. The derivative at zero is -1."""
    return (1 + F.relu(a)) / (a.clamp(max=0) - 1)


@names_layer
class Mamba3(NamesNoDecay, nn.Module, CallsOperators):
    """The Mamba-3 mixer, a causal map (batch, seqlen, d_model) -> (batch, seqlen, d_model).

    Positional arguments, parameters (names, shapes, order), ``forward``, ``step``, ``allocate_inference_cache`` and
    ``inference_params`` match ``mamba_ssm``'s ``Mamba3``; checkpoints load in both directions.

    With ``d_inner = expand * d_model``, ``nheads = d_inner / headdim``, R ranks (``mimo_rank`` with ``is_mimo``, else one) and
    S angles (``d_state / 4``, or ``d_state / 2`` with ``rope_fraction=1``), parameters: ``dt_bias`` and ``D`` (nheads,),
    ``B_bias`` and ``C_bias`` (nheads, R, d_state), ``in_proj.weight`` (2 d_inner + 2 R ngroups d_state + 3 nheads + S,
    d_model), ``B_norm.weight`` and ``C_norm.weight`` (d_state,), ``out_proj.weight`` (d_model, d_inner); with ``is_mimo`` also
    ``mimo_x``, ``mimo_z`` and ``mimo_o`` (nheads, R, headdim), and with ``is_outproj_norm`` ``norm.weight`` (d_inner,).

    Args:
        d_model: channels of input and output.
        d_state: states per channel, at most 256.
        expand: ``d_inner = expand * d_model``.
        headdim: channels per head, at most 256.
        ngroups: groups of heads that share B and C.
        rope_fraction: of the columns of B and C that are rotated: 0.5 or 1.
        dt_min: smallest step size at initialization.
        dt_max: largest step size at initialization.
        dt_init_floor: lower bound of the step sizes at initialization, applied after ``dt_min``.
        A_floor: smallest -A.
        is_outproj_norm: normalize each head's output before the gate.
        is_mimo: B and C have ``mimo_rank`` rows a step (MIMO). Such a layer rotates pairs (i, i + d_state / 2) of columns,
            others (2 i, 2 i + 1), as ``mamba_ssm``'s.
        mimo_rank: the ranks with ``is_mimo``; else ignored.
        fuse_pregate_headwise_norm: ignored.
        chunk_size: a hint for the scan; ``None`` leaves the choice to it, and so does ``is_mimo``.
        dropout: ignored.
        layer_idx: key of this layer in the cache of ``inference_params``.
        n_layer: ignored.
        device: where the parameters are made.
        dtype: dtype of the layer. ``dt_bias``, ``B_bias``, ``C_bias`` ``D`` and ``mimo_*`` are float32 (float64
            in a float64 layer).
        A_activation: ``"heavy_tail"``, mamba_ssm's since June 2026, or ``"softplus"``, its earlier one and that of
            flash-linear-attention. Checkpoints do not record it, and one of the other is another function.

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer = nn.Mamba3(64, headdim=16, d_state=32)
        >>> layer(torch.randn(2, 100, 64)).shape  # (batch, seqlen, d_model)
        torch.Size([2, 100, 64])
        >>> cu_seqlens = torch.tensor([0, 30, 100], dtype=torch.int32)  # two packed sequences
        >>> layer(torch.randn(1, 100, 64), cu_seqlens=cu_seqlens).shape
        torch.Size([1, 100, 64])
    """

    _no_decay: tuple[str, ...] = ("dt_bias", "D")

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        fuse_pregate_headwise_norm: bool = True,
        chunk_size: int | None = 64,
        dropout: float = 0.0,
        layer_idx: int | None = None,
        n_layer: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        A_activation: Literal["heavy_tail", "softplus"] = "heavy_tail",
    ) -> None:
        super().__init__()
        layer = class_name(self)
        for name, size in (("d_model", d_model), ("ngroups", ngroups), ("mimo_rank", mimo_rank)):
            check_int(layer, name, size)
        for name, size in (("d_state", d_state), ("headdim", headdim)):
            check_int(layer, name, size, high=256)
        check_optional_int(layer, "chunk_size", chunk_size)
        check_optional_int(layer, "layer_idx", layer_idx, low=0)
        check_optional_int(layer, "n_layer", n_layer, low=0)
        check_bools(
            layer,
            is_outproj_norm=is_outproj_norm,
            is_mimo=is_mimo,
            fuse_pregate_headwise_norm=fuse_pregate_headwise_norm,
        )
        check_step_sizes(layer, dt_min, dt_max, dt_init_floor)
        check_not_negative(layer, "A_floor", A_floor)
        check_not_negative(layer, "dropout", dropout)
        check_choice(layer, "A_activation", A_activation, ("heavy_tail", "softplus"))
        check_dtype(layer, dtype)
        if is_mimo and d_state % 2:
            raise ValueError(f"{layer}: expected an even d_state with is_mimo, got {d_state}")
        if rope_fraction not in (0.5, 1.0):
            raise ValueError(f"{layer}: expected rope_fraction 0.5 or 1.0, got {rope_fraction}")
        self.d_model, self.d_state, self.expand = d_model, d_state, expand
        self.d_inner = expanded(layer, expand, d_model)
        self.headdim, self.num_bc_heads, self.layer_idx = headdim, ngroups, layer_idx
        self.dt_min, self.dt_max, self.dt_init_floor, self.A_floor = dt_min, dt_max, dt_init_floor, A_floor
        self.is_outproj_norm, self.is_mimo = is_outproj_norm, is_mimo
        self.mimo_rank = mimo_rank if is_mimo else 1
        self.chunk_size, self.A_activation = chunk_size, A_activation
        self.num_rope_angles = int(d_state * rope_fraction) // 2
        if self.d_inner % headdim:
            raise ValueError(f"{layer}: expected a headdim that divides d_inner = {self.d_inner}, got {headdim}")
        self.nheads = self.d_inner // headdim
        if self.nheads % ngroups:
            raise ValueError(f"{layer}: expected ngroups to divide nheads = {self.nheads}, got {ngroups}")
        if self.num_rope_angles == 0:
            raise ValueError(f"{layer}: expected d_state * rope_fraction of at least 2, got {d_state} * {rope_fraction}")

        # The order of mamba_ssm: optimizer states are saved, and random numbers drawn, in the order of creation.
        matrix = self.mimo_rank * ngroups * d_state
        self._sizes = [self.d_inner] * 2 + [matrix] * 2 + [self.nheads] * 3 + [self.num_rope_angles]
        self.in_proj = linear(d_model, sum(self._sizes), False, device, dtype)
        wide = wide_dtype(self.in_proj.weight.dtype)
        self.dt_bias = nn.Parameter(torch.empty(self.nheads, device=device, dtype=wide))
        self.B_bias = nn.Parameter(torch.empty(self.nheads, self.mimo_rank, d_state, device=device, dtype=wide))
        self.C_bias = nn.Parameter(torch.empty(self.nheads, self.mimo_rank, d_state, device=device, dtype=wide))
        self.B_norm = GatedRMSNorm(d_state, device=device, dtype=dtype)
        self.C_norm = GatedRMSNorm(d_state, device=device, dtype=dtype)
        if is_mimo:
            of_ranks = (self.nheads, self.mimo_rank, headdim)
            self.mimo_x = nn.Parameter(torch.empty(of_ranks, device=device, dtype=wide))
            self.mimo_z = nn.Parameter(torch.empty(of_ranks, device=device, dtype=wide))
            self.mimo_o = nn.Parameter(torch.empty(of_ranks, device=device, dtype=wide))
        self.D = nn.Parameter(torch.empty(self.nheads, device=device, dtype=wide))
        mark_parameters("_no_weight_decay", *(parameter for _, parameter in own_no_decay(self)))
        self.reset_parameters()
        if is_outproj_norm:
            self.norm = GatedRMSNorm(self.d_inner, self.nheads, True, device=device, dtype=dtype)
        self.out_proj = linear(self.d_inner, d_model, False, device, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes the layer's own parameters; the submodules have their own ``reset_parameters``."""
        init_dt_bias(self.dt_bias, self.dt_min, self.dt_max, self.dt_init_floor)
        for parameter in (self.B_bias, self.C_bias, self.D):
            parameter.fill_(1)
        if self.is_mimo:
            self.mimo_z.fill_(1)
            for parameter in (self.mimo_x, self.mimo_o):
                parameter.fill_(1 / self.mimo_rank)

    def forward(
        self,
        u: Tensor,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Mixes a sequence, or several packed one after another.

        Args:
            u: (batch, seqlen, d_model), any strides.
            seq_idx: (batch, seqlen), int32 or int64: a new sequence begins wherever it changes. Not with ``inference_params``.
            cu_seqlens: (sequences + 1,), int32 or int64, for a batch of 1: sequence ``i`` begins at ``cu_seqlens[i]`` and ends
                before ``cu_seqlens[i + 1]``. The sequences are independent.
            inference_params: ``None``, or an object with ``seqlen_offset`` (steps done so far) and ``key_value_memory_dict``
                (a dict, in which this layer keeps its states under ``layer_idx``). With offset 0 the sequence starts anew;
                later calls continue it, by one step or by several. The states carry no gradient. With ``cu_seqlens`` the cache
                has a row for each packed sequence, and steps after ``cu_seqlens[-1]`` are padding, which no sequence and no
                state sees.

        Returns:
            (batch, seqlen, d_model).

        Raises:
            ValueError: a shape is not as above, the layer has no ``layer_idx`` for ``inference_params``, or ``seq_idx`` is
                given with it.
            TypeError: an argument is not a tensor, or ``inference_params`` lacks an attribute.
        """
        layer = class_name(self)
        check_shape(layer, "u", u, "(batch, seqlen, d_model)", (None, None, self.d_model))
        if seq_idx is not None:
            check_tensor(layer, "seq_idx", seq_idx)
            if seq_idx.shape != u.shape[:2]:
                expected = [*u.shape[:2]]
                raise ValueError(f"{layer}: expected seq_idx of shape (batch, seqlen) = {expected}, got {[*seq_idx.shape]}")
        if cu_seqlens is not None:
            check_tensor(layer, "cu_seqlens", cu_seqlens)
            if cu_seqlens.dim() != 1 or u.shape[0] != 1:
                got = f"{[*cu_seqlens.shape]} and a batch of {u.shape[0]}"
                raise ValueError(f"{layer}: expected cu_seqlens of shape (sequences + 1,) and a batch of 1, got {got}")
        if inference_params is None:
            return self._mix(u, None, seq_idx, cu_seqlens, needs_last=False)[0]
        self._check_is_local()
        if seq_idx is not None:
            raise ValueError(f"{layer}: expected seq_idx without inference_params, got both: pack by cu_seqlens")
        rows = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        cache = self._get_states_from_cache(inference_params, rows)
        continues = inference_params.seqlen_offset != 0
        if continues and cu_seqlens is None and u.shape[1] == 1 and not torch.is_grad_enabled():
            return self.step(u, *cache)[0]
        first = [state.clone() for state in cache] if continues else None
        if cu_seqlens is not None:
            cu_seqlens = with_padding(cu_seqlens, u.shape[1])
            if first is not None:  # the padding's states are the last
                first = [torch.cat([state, state.new_zeros(1, *state.shape[1:])]) for state in first]
        states = None if first is None else (first[0], first[1], first[2], first[3])
        out, last = self._mix(u, states, None, cu_seqlens, needs_last=True)
        assert last is not None
        for state, value in zip(cache, last, strict=True):
            state.copy_(value[:rows].detach())
        return out

    @torch.no_grad()
    def step(
        self, u: Tensor, angle_state: Tensor, ssm_state: Tensor, k_state: Tensor, v_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Mixes one time step, for decoding. Not differentiable.

        Args:
            u: (batch, d_model) or (batch, 1, d_model).
            angle_state: (batch, nheads, angles), float32 or float64, modified in place, as are the other states.
            ssm_state: (batch, nheads, headdim, d_state).
            k_state: (batch, R, nheads, d_state).
            v_state: (batch, nheads, headdim), of any floating-point dtype.

        Returns:
            ``out``, shape of ``u``, and the four states.

        Raises:
            ValueError: ``u`` has more than one time step, or a state another shape.
            TypeError: an argument is not a tensor.
        """
        self._check_is_local()
        layer = f"{class_name(self)}.step"
        check_tensor(layer, "u", u)
        if u.dim() == 3:
            check_shape(layer, "u", u, "(batch, 1, d_model)", (None, 1, self.d_model))
            out, *states = self.step(u[:, 0], angle_state, ssm_state, k_state, v_state)
            return out[:, None], states[0], states[1], states[2], states[3]
        check_shape(layer, "u", u, "(batch, d_model)", (None, self.d_model))
        check_shape(layer, "k_state", k_state, *self._shape_of_k())
        z, *tensors = self._project(u)
        v = v_state.to(tensors[0].dtype)
        y = mamba3_state_update(angle_state, ssm_state, self._k_of_operators(k_state), v, *tensors, **self._options(z))
        if v is not v_state:
            v_state.copy_(v)
        return self.out_proj(y.flatten(-2)), angle_state, ssm_state, k_state, v_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> States:
        """Returns ``angle_state``, ``ssm_state``, ``k_state`` and ``v_state`` of zeros for :meth:`step`.

        Args:
            batch_size: sequences decoded together.
            max_seqlen: ignored, because the states do not grow.
            dtype: of ``v_state``; by default that of the layer. The angles are float64, other states float32 (float64 in a
                float64 layer).
            kwargs: ignored.

        Raises:
            ValueError: ``batch_size`` is negative, or ``dtype`` is not supported.
            TypeError: ``batch_size`` is not an int.
        """
        name = f"{class_name(self)}.allocate_inference_cache"
        check_int(name, "batch_size", batch_size, low=0)
        check_dtype(name, dtype)
        weight = self.out_proj.weight
        shape = (batch_size, self.nheads)
        wide: dict[str, Any] = {"device": weight.device, "dtype": wide_dtype(weight.dtype)}
        return (
            torch.zeros(*shape, self.num_rope_angles, device=weight.device, dtype=torch.float64),
            torch.zeros(*shape, self.headdim, self.d_state, **wide),
            torch.zeros(batch_size, self.mimo_rank, self.nheads, self.d_state, **wide),
            torch.zeros(*shape, self.headdim, device=weight.device, dtype=weight.dtype if dtype is None else dtype),
        )

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_state={self.d_state}, nheads={self.nheads}, headdim={self.headdim}, "
            f"ngroups={self.num_bc_heads}, "
            + (f"mimo_rank={self.mimo_rank}, " if self.is_mimo else "")
            + f"A_activation={self.A_activation!r}"
        )

    def _k_of_operators(self, k: Tensor) -> Tensor:
        """The state k as the operators have it: (batch, nheads, d_state), or with ranks (batch, nheads, R, d_state); a view."""
        return k.transpose(1, 2) if self.is_mimo else k[:, 0]

    def _shape_of_k(self) -> tuple[str, tuple[int | None, ...]]:
        axes = "(batch, mimo_rank, nheads, d_state)" if self.is_mimo else "(batch, 1, nheads, d_state)"
        return axes, (None, self.mimo_rank, self.nheads, self.d_state)

    def _mix(
        self, u: Tensor, states: States | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None, needs_last: bool
    ) -> tuple[Tensor, States | None]:
        z, *tensors = self._project(u)
        if states is not None:
            angle, ssm, k, v = states
            x = tensors[0]
            wide = wide_dtype(x.dtype)
            states = (angle.to(wide), ssm.to(wide), self._k_of_operators(k).to(wide), v.to(x.dtype))
        results = self.operators.mamba3_chunk_scan(
            *tensors,
            chunk_size=None if self.is_mimo else self.chunk_size,
            initial_states=states,
            return_final_states=needs_last,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            **self._options(z),
        )
        y, last = results if needs_last else (results, None)
        y = self.out_proj(y.flatten(-2))
        if last is None:
            return y, None
        return y, (last.angle, last.ssm, last.k.transpose(1, 2) if self.is_mimo else last.k[:, None], last.x)

    def _project(self, u: Tensor) -> list[Tensor]:
        """The gate, and the tensors of the scan's steps in the order of its arguments."""
        z, x, B, C, dt, a, trap, angles = self.in_proj(u).split(self._sizes, dim=-1)
        of_heads, of_ranks = (self.nheads, self.headdim), (self.mimo_rank,) if self.is_mimo else ()
        of_groups = (*of_ranks, self.num_bc_heads, self.d_state)
        wide = wide_dtype(x.dtype)
        dt = F.softplus(dt + self.dt_bias.to(wide))
        a = a.to(wide)
        A = (_minus_heavy_tail(a) if self.A_activation == "heavy_tail" else -F.softplus(a)).clamp(max=-self.A_floor)
        B, C = self.B_norm(B.unflatten(-1, of_groups)), self.C_norm(C.unflatten(-1, of_groups))
        return [z.unflatten(-1, of_heads), x.unflatten(-1, of_heads), dt, A, B, C, trap, angles]

    def _options(self, z: Tensor) -> dict[str, Any]:
        wide = wide_dtype(z.dtype)
        options: dict[str, Any] = {
            "B_bias": (self.B_bias if self.is_mimo else self.B_bias[:, 0]).to(wide),
            "C_bias": (self.C_bias if self.is_mimo else self.C_bias[:, 0]).to(wide),
            "D": self.D.to(wide),
            "z": z,
        }
        if self.is_mimo:
            options |= {"mimo_x": self.mimo_x.to(wide), "mimo_z": self.mimo_z.to(wide), "mimo_out": self.mimo_o.to(wide)}
            options["rotate"] = "halves"
        if self.is_outproj_norm:
            options["norm_weight"] = self.norm.weight.to(wide).unflatten(0, (self.nheads, self.headdim))
            options["norm_eps"] = self.norm.eps
        return options

    def _get_states_from_cache(self, inference_params: Any, batch_size: int) -> States:
        device = self.out_proj.weight.device
        found = states_from_cache(self, inference_params, batch_size, device, "four tensors", _STATES)
        for name, state, axes, sizes in zip(
            _STATES,
            found,
            (
                "(batch, nheads, angles)",
                "(batch, nheads, headdim, d_state)",
                self._shape_of_k()[0],
                "(batch, nheads, headdim)",
            ),
            (
                (self.nheads, self.num_rope_angles),
                (self.nheads, self.headdim, self.d_state),
                (self.mimo_rank, self.nheads, self.d_state),
                (self.nheads, self.headdim),
            ),
            strict=True,
        ):
            check_shape(class_name(self), f"{name} of the cache", state, axes, (batch_size, *sizes))
        return found[0], found[1], found[2], found[3]
