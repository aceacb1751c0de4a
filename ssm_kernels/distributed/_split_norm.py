"""The gated RMSNorm of groups whose columns are on several ranks, inside the Mamba-2 mixer and alone.

A kernel sums the squares of a rank's columns of each group, an all-reduce adds the sums, and a second kernel normalizes with
the mean. Backward does the same with the products of gradients and normalized values. A row with one group sends one number
in each direction.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ._autocast import Autocast
from ._group import Group
from ._reductions import start_all_reduce, wait

__all__ = ["SplitNorm", "split_mamba2_mixer"]

_ops = torch.ops.ssm_kernels


@dataclasses.dataclass(frozen=True)
class SplitNorm:
    """Partition of the groups' columns over the ranks. A block is the columns of this rank that belong to one group.

    Attributes:
        ranks: they share the columns.
        groups: number of groups of all ranks.
        group_size: columns of a group, on all ranks together.
        reads: the group of each block.
        norm_before_gate: as for ``rms_norm_gated``.
        eps: added to the mean square.
    """

    ranks: Group
    groups: int
    group_size: int
    reads: tuple[int, ...]
    norm_before_gate: bool
    eps: float

    def forward(self, x: Tensor, z: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of this rank's columns and, for backward, rstd of each row's blocks. Not differentiable."""
        block_size = x.shape[-1] // len(self.reads)
        squares = _ops._norm_gated_squares(x, None if self.norm_before_gate else z, block_size, "silu")
        options = (block_size, self.norm_before_gate, "silu", False)
        out, rstd, _ = _ops._norm_gated_fwd(x, weight, z, None, self.eps, *options, self._mean_over_groups(squares))
        return out, rstd

    def mean_product(self, grad_out: Tensor, x: Tensor, z: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
        """The argument ``mean_product`` of ``_norm_gated_bwd``."""
        options = (x.shape[-1] // len(self.reads), self.norm_before_gate, "silu")
        return self._mean_over_groups(_ops._norm_gated_products(grad_out, x, weight, z, rstd, *options))

    def mixer_forward(self, projected: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba2_mixer_fwd``."""
        y, conv_state, ssm_state, _, _, parameters = _ops._mamba2_mixer_fwd(projected, *arguments, applies_norm=False)
        out, rstd = self.forward(y, projected[..., : y.shape[-1]], arguments[5])
        return out, conv_state, ssm_state, y, rstd, parameters

    def _mean_over_groups(self, sums: Tensor) -> Tensor:
        """The means over groups, of the sums over blocks. Both (rows, blocks). Overwrites ``sums``."""
        is_each_once = self.reads == tuple(range(self.groups))
        if not is_each_once:
            of_groups = [torch.zeros_like(sums[:, 0])] * self.groups
            for block, group in enumerate(self.reads):
                of_groups[group] = of_groups[group] + sums[:, block]
            sums = torch.stack(of_groups, -1)
        sums = wait(start_all_reduce(sums, self.ranks), "all_reduce", self.ranks).div_(self.group_size)
        return sums if is_each_once else torch.stack([sums[:, group] for group in self.reads], -1)


class _Mamba2Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: SplitNorm, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, conv_state, ssm_state, *saved = norm.mixer_forward(*arguments)
        ctx.save_for_backward(*arguments[:11], *saved)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.options = norm, arguments[11:]
        return out, conv_state, ssm_state

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, y, rstd, parameters = ctx.saved_tensors
        grad_out, mean_product = grads[0], None
        if grad_out is not None:
            mean_product = ctx.norm.mean_product(grad_out, y, tensors[0][..., : y.shape[-1]], tensors[6], rstd)
        needs = [*ctx.needs_input_grad[1:10]]
        results = _ops._mamba2_mixer_bwd(*grads, y, rstd, parameters, needs, *tensors, *ctx.options, mean_product)
        of_tensors = (grad if need else None for grad, need in zip(results, needs, strict=True))
        return None, *of_tensors, *(None,) * (2 + len(ctx.options))


def split_mamba2_mixer(projected: Tensor, *arguments: Any, norm: SplitNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results as ``torch.ops.ssm_kernels._mamba2_mixer``, with its casts under autocast."""
    to = Autocast(projected)
    *parameters, conv_state, ssm_state = arguments[:8]
    tensors = (to.to_lower(projected), *map(to.to_float, parameters), to.to_lower(conv_state), to.to_float(ssm_state))
    results: tuple[Tensor, Tensor, Tensor] = _Mamba2Mixer.apply(norm, *tensors, *arguments[8:])
    return results
