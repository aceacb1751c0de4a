"""The Mamba-2 mixer's projections, and its call with heads of whole vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import wide_dtype
from ..ops._arguments import finite_dt_limit
from .aligned import (
    Heads,
    Layout,
    align_parameters,
    aligned_linear,
    aligned_size,
    can_align,
    dtype_to_align,
    first_columns,
)
from .common import PLAIN_TENSORS, PackedMixer, conv_parameters, keeps_less
from .gated_rms_norm import GatedRMSNorm
from .naming import name_for_operator

__all__ = ["Mamba2Projections"]

_mamba2_mixer = torch.ops.ssm_kernels._mamba2_mixer.default
_mamba2_mixer_projected = torch.ops.ssm_kernels._mamba2_mixer_projected.default


class Mamba2Projections(PackedMixer):
    """Base class of :class:`.Mamba2`, which has the attributes."""

    d_model: int
    d_inner: int
    d_ssm: int
    d_state: int
    nheads: int
    headdim: int
    ngroups: int
    chunk_size: int | None
    dt_limit: tuple[float, float]
    rmsnorm: bool
    norm_before_gate: bool
    D_has_hdim: bool
    recompute: Any
    discretization: Any
    in_proj: nn.Linear
    conv1d: nn.Conv1d
    out_proj: nn.Linear
    norm: GatedRMSNorm
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    D: nn.Parameter

    def _mixer_options(self, headdim: int) -> tuple[Any, ...]:
        """The operator's arguments after the tensors. Heads of ``headdim`` rows end with zeros, which the mean counts, too."""
        eps = self.norm.eps * self.headdim / headdim if self.rmsnorm else 0.0
        sizes = (headdim, self.ngroups, self.d_state, self.chunk_size)
        return (*sizes, *finite_dt_limit(self.dt_limit), eps, self.norm_before_gate, self.discretization)

    def _aligned_headdim(self, dtype: torch.dtype, u: Tensor) -> int:
        """The rows of a head with zeros up to whole vectors, or its own if the parameters cannot have copies, or if the zeros
        would take long.
        """
        headdim = aligned_size(self.headdim, dtype)
        is_plain = all(type(p) in PLAIN_TENSORS for p in (self.conv1d.weight, self.D, *self._norm_weights()))
        may_pad = is_plain and self.d_ssm == self.d_inner and 4 * headdim <= 5 * self.headdim
        return headdim if may_pad and can_align(u, self.out_proj) else self.headdim

    def _norm_weights(self) -> Sequence[Tensor]:
        return (self.norm.weight,) if self.rmsnorm else ()

    def _mix_in_aligned_heads(
        self,
        dtype: torch.dtype,
        headdim: int,
        u: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``_mix``, with zeros behind each head's rows: all operators then have aligned rows, and none copies sequences.

        The zeros stay zeros, and no row of another head or sum changes, except for means of squares: with ``headdim`` rows in
        place of the head's own they are smaller by that ratio, and so is eps. The norm's weight makes up for it.
        """
        heads, others = Heads(self.nheads, self.headdim, headdim), 2 * self.ngroups * self.d_state
        projected = aligned_linear(u, self.in_proj, dtype, heads._replace(number=2 * self.nheads))
        weight, bias = conv_parameters("Mamba2", self.conv1d)
        out_weight, out_bias = self.out_proj.weight, self.out_proj.bias
        rows, columns = aligned_size(self.d_model, dtype), heads.copied_rows
        of_conv, of_heads = columns + others, (self.nheads, headdim)
        weight_copy, bias_copy, norm, D, out_weight_copy, out_bias_copy = align_parameters(
            (
                weight,
                bias,
                self.norm.weight if self.rmsnorm else None,
                self._D_of_heads(),
                out_weight.unflatten(1, (self.nheads, self.headdim)),
                out_bias,
            ),
            (
                Layout((of_conv, *weight.shape[1:]), heads=heads),
                Layout((of_conv,), heads=heads),
                Layout((columns,), heads=heads),
                Layout(of_heads if self.D_has_hdim else (self.nheads,)),
                Layout((rows, *of_heads)),
                Layout((rows,)),
            ),
        )
        assert out_weight_copy is not None
        convolution, projection = (weight_copy, bias_copy), (out_weight_copy.flatten(1), out_bias_copy)
        if norm is not None:
            norm = norm.to(wide_dtype(norm.dtype)) * math.sqrt(self.headdim / headdim)
        # Zeros behind the heads of the states.
        padding = (0, 0, 0, headdim - self.headdim)
        first_inputs = self._initial_state(conv_state, dtype)
        if first_inputs is not None:
            x, BC = first_inputs.split([self.d_ssm, others], dim=1)
            x = F.pad(x.unflatten(1, (self.nheads, self.headdim)), padding).flatten(1, 2)
            first_inputs = torch.cat([x, BC], dim=1)
        initial_state = None if ssm_state is None else F.pad(ssm_state.to(wide_dtype(dtype)), padding)
        tensors = (self.A_log, D, self.dt_bias, norm, first_inputs, initial_state, seq_idx, cu_seqlens)
        options = self._mixer_options(headdim)
        if keeps_less(self):
            own = (*projection, self.recompute == "all", *name_for_operator(self))
            y, _, final_states = _mamba2_mixer_projected(projected, *convolution, *tensors, *options, *own)
        else:
            y, _, final_states = _mamba2_mixer(projected, *convolution, *tensors, *options, *name_for_operator(self))
            y = F.linear(y, *projection)
        return first_columns(y, self.d_model), projected, final_states[:, :, : self.headdim]

    def _mixer(self) -> Callable[..., tuple[Tensor, Any, Any]]:
        """The operator between the projections, with the arguments and results of ``_mamba2_mixer``."""
        return self.operators.mamba2_mixer

    def _D_of_heads(self) -> Tensor:
        """(nheads,) or (nheads, headdim)."""
        return self.D.unflatten(0, (self.nheads, self.headdim)) if self.D_has_hdim else self.D

    def _conv_channels(self) -> int:
        return self.d_ssm + 2 * self.ngroups * self.d_state

    def _conv_inputs(self, projected: Tensor) -> Tensor:
        others = 2 * self.ngroups * self.d_state
        columns = (projected.shape[-1] - self.nheads - others) // 2
        if columns == self.d_ssm:
            return projected[..., self.d_ssm : -self.nheads]
        x, BC, _ = projected[..., columns:].split([columns, others, self.nheads], dim=-1)
        return torch.cat([x.unflatten(-1, (self.nheads, -1))[..., : self.headdim].flatten(-2), BC], dim=-1)

    def _dtype_to_align(self, u: Tensor) -> torch.dtype | None:
        """The dtype of a call whose in-projection has aligned rows, or None."""
        dtype = dtype_to_align(u)
        return dtype if dtype is not None and self.operators.is_local and can_align(u, self.in_proj) else None

    def _project(self, u: Tensor, aligned_dtype: torch.dtype | None = None) -> tuple[Tensor | None, Tensor]:
        """Returns the output of the parallel MLP, if there is one, and z, the convolution's input and dt in one tensor."""
        d_mlp = self.d_inner - self.d_ssm
        projected = self.in_proj(u) if aligned_dtype is None else aligned_linear(u, self.in_proj, aligned_dtype)
        if d_mlp == 0:
            return None, projected
        gate, up, mixed = projected.tensor_split([d_mlp, 2 * d_mlp], dim=-1)
        return F.silu(gate) * up, mixed

    def _split_heads(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x, (batch, seqlen, nheads, headdim), B and C, (batch, seqlen, ngroups, d_state)."""
        x, B, C = xBC.split([self.d_ssm, *[self.ngroups * self.d_state] * 2], dim=-1)
        of_groups = (self.ngroups, self.d_state)
        return x.unflatten(-1, (self.nheads, self.headdim)), B.unflatten(-1, of_groups), C.unflatten(-1, of_groups)

    def _finish(self, y: Tensor, mlp: Tensor | None, aligned_dtype: torch.dtype | None = None) -> Tensor:
        y = y if mlp is None else torch.cat([mlp, y], dim=-1)
        if aligned_dtype is None:
            return self.out_proj(y)
        return aligned_linear(y, self.out_proj, aligned_dtype, contiguous=True)

    def _weights_of_out_proj(self, aligned_dtype: torch.dtype | None) -> Sequence[Tensor | None]:
        """The weight and the bias, with zeros behind rows and columns in a call with aligned rows."""
        weight, bias = self.out_proj.weight, self.out_proj.bias
        if aligned_dtype is None:
            return weight, bias
        rows, columns = (aligned_size(size, aligned_dtype) for size in weight.shape)
        return align_parameters((weight, bias), (Layout((rows, columns)), Layout((rows,))))
