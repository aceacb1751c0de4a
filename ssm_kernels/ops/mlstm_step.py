"""The decoding step of xLSTM's matrix memory, typed and documented."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import names_arguments

__all__ = ["mlstm_step"]


@names_arguments
def mlstm_step(
    C: Tensor,
    n: Tensor,
    m: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    r"""One decoding step of xLSTM's matrix memory; ``C``, ``n`` and ``m`` are updated in place.

    The step of :func:`mlstm_scan`, which describes the formula: the result equals a scan of one step that begins with these
    states.

    Args:
        C: (batch, heads, value_dim, key_dim), modified in place; float32 (float64 with float64 inputs), or the dtype of ``q``,
            to which each update is rounded. Any strides. With ``state_batch_indices`` its first size, as that of ``n`` and
            ``m``, is the number of cache slots instead.
        n: (batch, heads, key_dim), modified in place unless ``normalize`` is False; float32 (float64 with float64 inputs).
        m: (batch, heads), modified in place; dtype of ``n``. Minus infinity is an empty memory: fill a new cache with it.
        q: (batch, heads, key_dim); float32, float16, bfloat16 or float64. key_dim is at most 512.
        k: shape and dtype of ``q``.
        v: (batch, heads, value_dim), dtype of ``q``.
        i: (batch, heads), dtype of ``q`` or float32 (float64 with float64 inputs).
        f: likewise.
        scale: of ``q``, finite; key_dim ** -0.5 if None.
        eps: added to the divisor, in units of :math:`e^m`.
        input_gate: ``"exp"``, or ``"sigmoid"``, which leaves ``m`` at 0.
        normalize: divide; ``False`` only with ``input_gate="sigmoid"``.
        state_batch_indices: (batch,), int32 or int64: the slot that each row of the batch uses. A negative index is padding:
            the output is zero and no state is touched. Other indices must be distinct and below the number of slots; the CPU
            raises a ValueError otherwise. CUDA does not check, because the host would have to wait for the device: a row whose
            index is past the last slot returns NaN and touches no state, and rows that share a slot race.

    Returns:
        The output, (batch, heads, value_dim), dtype of ``q``. Not differentiable: backward through it raises. A state requires
        a gradient after the call only if it did before; backward through it then raises, too.

    Raises:
        ValueError: a shape, an option or, on the CPU, an index is not as above.
        RuntimeError: a dtype, layout or device is not supported, or elements of ``C``, ``n`` or ``m`` share memory with each
            other or with another argument.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import mlstm_step
        >>> batch, heads, key_dim, value_dim = 2, 4, 16, 8
        >>> C, n = torch.zeros(batch, heads, value_dim, key_dim), torch.zeros(batch, heads, key_dim)  # updated in place
        >>> m = torch.full((batch, heads), -torch.inf)  # empty
        >>> for token in range(3):
        ...     (q, k), v = torch.randn(2, batch, heads, key_dim), torch.randn(batch, heads, value_dim)
        ...     out = mlstm_step(C, n, m, q, k, v, *torch.randn(2, batch, heads))
        >>> out.shape
        torch.Size([2, 4, 8])
    """
    result: Tensor = torch.ops.ssm_kernels.mlstm_step.default(
        C, n, m, q, k, v, i, f, scale, eps, input_gate, normalize, state_batch_indices
    )
    return result
