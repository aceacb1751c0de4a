"""Mamba-3's decoding step, typed and documented."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import names_arguments

__all__ = ["mamba3_state_update"]


@names_arguments
def mamba3_state_update(
    angle: Tensor,
    ssm: Tensor,
    previous_k: Tensor,
    previous_x: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    *,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    rotate: str = "pairs",
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    r"""One decoding step of Mamba-3, of any rank; the four states are updated in place.

    The step of :func:`mamba3_chunk_scan`, which describes the formula and the arguments: the result equals a scan of one step
    that begins with these states. A new cache is zero.

    Args:
        angle: phases in radians, (batch, heads, angles), modified in place and then from -pi to pi; float32 or float64. Phases
            of a float32 cache are rounded in each step: use float64 for long sequences. With ``state_batch_indices`` the first
            size of each state is the number of cache slots instead. States may have any strides.
        ssm: (batch, heads, headdim, dstate), modified in place; float32 (float64 with float64 inputs), or the dtype of ``x``,
            to which each update is rounded.
        previous_k: (batch, heads, dstate), with ranks (batch, heads, ranks, dstate), modified in place; float32 (float64 with
            float64 inputs).
        previous_x: (batch, heads, headdim), modified in place; dtype of ``x``.
        x: (batch, heads, headdim); float32, float16, bfloat16 or float64. headdim is at most 256.
        dt: (batch, heads), dtype of ``x`` or float32 (float64 with float64 inputs).
        A: likewise.
        B: (batch, groups, dstate), or with ranks (MIMO) (batch, ranks, groups, dstate), dtype of ``x``. dstate is at most 256.
        C: likewise.
        trap: shape and dtypes of ``dt``.
        angles: (batch, angles) or (batch, heads, angles), dtypes of ``dt``.
        B_bias: (heads, dstate), or with ranks (heads, ranks, dstate) too; float32 (float64 with float64 inputs).
        C_bias: likewise.
        D: (heads,) or (heads, headdim), dtype of ``B_bias``.
        z: shape and dtype of ``x``.
        mimo_x: (heads, ranks, headdim), dtype of ``B_bias``, with ranks only; None is a factor of one, as for ``mimo_z``, which
            requires ``z``, and ``mimo_out``.
        mimo_z: likewise.
        mimo_out: likewise.
        norm_weight: (heads, headdim), dtype of ``B_bias``.
        norm_eps: added to the mean square.
        rotate: ``"pairs"`` or ``"halves"``.
        state_batch_indices: (batch,), int32 or int64: the slot that each row of the batch uses. A negative index is padding:
            the output is zero and no state is touched. Other indices must be distinct and below the number of slots; the CPU
            raises a ValueError otherwise. CUDA does not check, because the host would have to wait for the device: an index
            past the last slot is padding, too, and rows that share a slot race.

    Returns:
        The output, shape and dtype of ``x``. Not differentiable: backward through it raises. A state requires a gradient after
        the call only if it did before; backward through it then raises, too.

    Raises:
        ValueError: a shape, an option or an index is not as above.
        RuntimeError: a dtype, layout or device is not supported, or elements of a state share memory with each other or with
            another argument.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import mamba3_state_update
        >>> batch, heads, headdim, dstate, angles = 2, 4, 8, 16, 4
        >>> cache = [torch.zeros(batch, heads, *shape) for shape in ((angles,), (headdim, dstate), (dstate,), (headdim,))]
        >>> for token in range(3):
        ...     x, (B, C) = torch.randn(batch, heads, headdim), torch.randn(2, batch, 1, dstate)
        ...     dt, A, trap = torch.rand(batch, heads), -torch.rand(batch, heads), torch.randn(batch, heads)
        ...     out = mamba3_state_update(*cache, x, dt, A, B, C, trap, torch.randn(batch, angles))
        >>> out.shape
        torch.Size([2, 4, 8])
    """
    result: Tensor = torch.ops.ssm_kernels.mamba3_state_update.default(
        angle,
        ssm,
        previous_k,
        previous_x,
        *(x, dt, A, B, C, trap, angles),
        B_bias,
        C_bias,
        D,
        z,
        mimo_x,
        mimo_z,
        mimo_out,
        norm_weight,
        norm_eps,
        rotate,
        state_batch_indices,
    )
    return result
