"""Mamba-3's scan, typed and documented. It calls ``torch.ops.ssm_kernels``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._mamba3_state import Mamba3State
from ._arguments import four_tensors, names_arguments

__all__ = ["mamba3_chunk_scan"]

# Looked up once: the attributes of torch.ops take 0.3 microseconds a call.
_mamba3_chunk_scan = torch.ops.ssm_kernels.mamba3_chunk_scan.default


@names_arguments
def mamba3_chunk_scan(
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
    chunk_size: int | None = None,
    initial_states: Mamba3State | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:
    r"""Mamba-3's scan (Lahoti et al., "Mamba-3", 2026), of any rank, in chunks, as matrix products.

    Per head, with the phases :math:`\theta_t = \theta_{t-1} + \pi \tanh(\mathrm{angles}_t)\, \mathrm{dt}_t`, the rotation
    :math:`R(\theta)` of pairs of columns, and the weight :math:`\lambda_t = \sigma(\mathrm{trap}_t)`:

    .. math::
        k_t &= R(\theta_t)(B_t + B_\mathrm{bias}), \qquad q_t = R(\theta_t)(C_t + C_\mathrm{bias}) \\
        S_t &= e^{A_t \mathrm{dt}_t} \left(S_{t-1} + (1 - \lambda_t)\, \mathrm{dt}_t\, x_{t-1} k_{t-1}^\top\right)
               + \lambda_t\, \mathrm{dt}_t\, x_t k_t^\top \\
        y_t &= S_t q_t + D x_t, \qquad
        \mathrm{out}_t = y_t \cdot \mathrm{silu}(z_t) \ \text{or}\
        \mathrm{rms}(y_t)\, w \cdot \mathrm{silu}(z_t)

    It is the rule ``"exp_trapezoidal"`` of :func:`ssd_chunk_scan` with a rate and complex phases of each step.

    With an axis of R ranks in ``B`` and ``C`` (MIMO), each step has R rows :math:`k_t^r` and :math:`q_t^r` with the phases of
    the step. With :math:`v_t^r = x_t \cdot \mathrm{mimo}_x^r`, :math:`x_t k_t^\top` becomes
    :math:`\sum_r v_t^r (k_t^r)^\top`, and

    .. math::
        y_t^r = S_t q_t^r + D v_t^r, \qquad
        \mathrm{out}_t = \sum_r \mathrm{mimo}_\mathrm{out}^r \cdot f(y_t^r,\, z_t \cdot \mathrm{mimo}_z^r)

    where :math:`f(y, z) = y \cdot \mathrm{silu}(z)` or :math:`\mathrm{rms}(y)\, w \cdot \mathrm{silu}(z)`.

    Args:
        x: (batch, seqlen, heads, headdim); float32, float16, bfloat16 or float64. headdim is at most 256. Sequences may have
            any strides.
        dt: step sizes after their activation, (batch, seqlen, heads), dtype of ``x`` or float32 (float64 with float64 inputs).
        A: rates after their activation, at most 0, shape and dtypes of ``dt``.
        B: (batch, seqlen, groups, dstate) or (batch, seqlen, ranks, groups, dstate), dtype of ``x``; after its norm.
            Consecutive heads share a group. dstate is at most 256.
        C: likewise.
        trap: logits of the weight of a step's own sample, shape and dtypes of ``dt``.
        angles: before tanh, (batch, seqlen, angles) for all heads or (batch, seqlen, heads, angles), dtypes of ``dt``; at most
            dstate / 2. Columns of further pairs are not rotated.
        B_bias: (heads, dstate), or with ranks (heads, ranks, dstate) too; float32 (float64 with float64 inputs).
        C_bias: likewise.
        D: (heads,) or (heads, headdim), dtype of ``B_bias``.
        z: the gate, shape and dtype of ``x``.
        mimo_x: (heads, ranks, headdim), dtype of ``B_bias``, with ranks only; None is a factor of one, as for ``mimo_z`` and
            ``mimo_out``.
        mimo_z: likewise, with ``z`` only.
        mimo_out: likewise.
        norm_weight: (heads, headdim), dtype of ``B_bias``: the output of each head is divided by its root mean square and
            multiplied by the weight, before the gate.
        norm_eps: added to the mean square.
        rotate: pair i of columns is (2 i, 2 i + 1) for ``"pairs"``, as of mamba_ssm's layers of rank one, and
            (i, i + dstate / 2) for ``"halves"``, as of those of higher rank. Parameters of one are wrong with the other.
        chunk_size: steps of a chunk; chosen if None. With ranks a chunk has at most 256 rows, on a CPU fewer.
        initial_states: a :class:`ssm_kernels.reference.Mamba3State`, or four tensors, to continue from. ``angle`` (batch,
            heads, angles), ``ssm`` (batch, heads, headdim, dstate) and ``k`` (batch, heads, dstate), with ranks (batch, heads,
            ranks, dstate), are float32 (float64 with float64 inputs), ``x`` (batch, heads, headdim) has the dtype of ``x``.
            None: zero, without a sample before the first one.
        return_final_states: also return the states after the last step.
        seq_idx: (batch, seqlen), int32 or int64, the number of the sequence that a step belongs to. Where it changes, the
            states start again at zero. ``initial_states`` belong to the first sequence of a row, final ones to its last.
        cu_seqlens: (sequences + 1,), int32 or int64. The batch, then of size 1, holds sequences one after another, and sequence
            ``s`` is steps ``cu_seqlens[s]`` to ``cu_seqlens[s + 1] - 1``. States then have a row for each sequence.
        reverse: not supported; flip the arguments along seqlen.

    Returns:
        ``out``, (batch, seqlen, heads, headdim), dtype of ``x``; with ``return_final_states`` then a ``Mamba3State``, shaped
        and typed as ``initial_states``, its angle from -pi to pi. A sequence without steps returns its initial states. All are
        differentiable with respect to every floating-point tensor argument. Double backward and ``torch.func`` transforms
        other than ``vmap`` are not supported and raise.

    ``A``, ``dt``, the outputs and the gradients of a step depend on no later step. Phases are float64 and reduced to half a
    turn in each step; sums and states are float32 (float64 with float64 inputs), whatever the dtype of ``x``. So are
    the operands of products, except on CUDA in float16 and bfloat16. Autograd saves the inputs. ``docs/mamba3.md`` describes
    the computation, what is rounded, and the errors.

    Raises:
        ValueError: a shape, the values of ``cu_seqlens`` or an option are not as above, or ``initial_states`` is not four
            tensors.
        NotImplementedError: ``reverse`` is True.
        RuntimeError: a dtype, layout or device is not supported.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import mamba3_chunk_scan
        >>> batch, seqlen, heads, headdim, groups, dstate, angles = 2, 100, 4, 8, 1, 16, 4
        >>> x, (B, C) = torch.randn(batch, seqlen, heads, headdim), torch.randn(2, batch, seqlen, groups, dstate)
        >>> dt, A, trap = torch.rand(batch, seqlen, heads), -torch.rand(batch, seqlen, heads), torch.randn(batch, seqlen, heads)
        >>> arguments = x, dt, A, B, C, trap, torch.randn(batch, seqlen, angles)
        >>> out, states = mamba3_chunk_scan(*arguments, return_final_states=True)
        >>> out.shape, states.ssm.shape
        (torch.Size([2, 100, 4, 8]), torch.Size([2, 4, 8, 16]))
        >>> more = mamba3_chunk_scan(*arguments, initial_states=states)  # continues
    """
    angle, ssm, k, last_x = four_tensors(initial_states)
    out, *states = _mamba3_chunk_scan(
        x,
        dt,
        A,
        B,
        C,
        trap,
        angles,
        B_bias=B_bias,
        C_bias=C_bias,
        D=D,
        z=z,
        mimo_x=mimo_x,
        mimo_z=mimo_z,
        mimo_out=mimo_out,
        norm_weight=norm_weight,
        initial_angle=angle,
        initial_ssm=ssm,
        initial_k=k,
        initial_x=last_x,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        norm_eps=norm_eps,
        rotate=rotate,
        chunk_size=chunk_size,
        reverse=reverse,
    )
    return (out, Mamba3State(*states)) if return_final_states else out
