"""The decoding step of the selective scan and of the scan in chunks, typed and documented."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._discretizations import is_two_sample, with_alpha
from ..choices import DiscretizationName, TwoSampleDiscretizationName
from ._arguments import empty_output, names_arguments, read_dt_limit
from ._complex import complex_step, is_complex
from ._dense_step import dense_step, is_dense
from ._two_samples import broadcast_steps

__all__ = ["selective_state_update"]


def _check_samples(discretization: str, previous_x: Tensor | None, previous_B: Tensor | None) -> None:
    if previous_x is None or previous_B is None:
        name = "previous_x" if previous_x is None else "previous_B"
        raise ValueError(f"selective_state_update: expected {name} with discretization {discretization!r}, got None")


def _two_sample_step(
    state: Tensor,
    previous_x: Tensor | None,
    previous_B: Tensor | None,
    x: Tensor,
    *others: Any,
    out: Tensor | None = None,
    for_servers: tuple[Any, ...] | None = None,
    **options: Any,
) -> Tensor:
    _check_samples(options["discretization"], previous_x, previous_B)
    tensors = (state, previous_x, previous_B, x, *others)
    if for_servers is None:
        result: Tensor = torch.ops.ssm_kernels.selective_state_update_two_sample.default(*tensors, **options)
        return result
    result = empty_output(x, for_servers[3]) if out is None else out
    given = [options[name] for name in ("discretization", "lam_sigmoid", "dt_limit", "A_is_log")]
    torch.ops.ssm_kernels.selective_state_update_two_sample_out.default(*tensors, *given, False, True, result, *for_servers)
    return result


def _refuse_one_sample(discretization: str, **given: Any) -> None:
    name = next(name for name, value in given.items() if value is not None)
    rules = "discretization 'exp_trapezoidal'" if name.startswith("lam") else "a discretization that reads two input samples"
    raise ValueError(f"selective_state_update: expected {name} with {rules} only, got {discretization!r}")


def _refuse_servers(**given: Any) -> None:
    name = next(name for name, value in given.items() if value is not None)
    raise NotImplementedError(f"selective_state_update: {name} is not supported with a complex A")


@names_arguments
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    discretization: DiscretizationName | TwoSampleDiscretizationName = "zoh",
    alpha: float | None = None,
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    previous_x: Tensor | None = None,
    previous_B: Tensor | None = None,
    dt_A: Tensor | None = None,
    conjugate_pairs: bool = True,
    dt_limit: Sequence[float] | None = None,
    A_is_log: bool = False,
    out: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    disable_state_update: bool = False,
) -> Tensor:
    r"""One decoding step of the selective scan, or a few; ``state`` is updated in place.

    The result equals a scan with seqlen 1, the initial state ``state`` and the same ``dt_limit``, whose default in
    :func:`ssd_chunk_scan` is (0, inf). The step has two forms. With channels (Mamba, :func:`selective_scan`) ``state`` is
    (batch, dim, dstate). With heads (Mamba-2, :func:`ssd_chunk_scan`) ``state`` is (batch, heads, headdim, dstate), and ``A``,
    ``dt``, ``D`` and ``dt_bias`` are expanded over the axes that they do not depend on. Arguments have the names and the order
    of ``mamba_ssm``'s function.

    Args:
        state: (batch, dim, dstate) or (batch, heads, headdim, dstate), modified in place; float32 (float64 with float64
            inputs), or the dtype of ``x``. With ``state_batch_indices`` its first size is the number of cache slots instead.
        x: (batch, dim) or (batch, heads, headdim).
        dt: shape and dtype of ``x`` (with heads often expanded over headdim, which is read without a copy).
        A: (dim, dstate) or (heads, headdim, dstate); float32 (float64 with float64 inputs), or the dtype of ``x``; may be
            expanded. With channels also a matrix for each, (dim, dstate, dstate), or one for all, (1, dstate, dstate), with
            the discretizations that :func:`selective_scan` takes for it. The step is then a scan over its tokens. It takes
            none of the arguments from ``A_is_log`` on, no ``dt_A``, and raises if an argument requires a gradient.
        B: (batch, dstate) or (batch, groups, dstate), dtype of ``x``. The groups divide dim or, where there
            are heads, the heads.
        C: shape and dtype of ``B``.
        D: (dim,) or (heads, headdim), dtypes as for ``A``.
        z: gate, shape and dtype of ``x``.
        dt_bias: (dim,) or (heads, headdim), dtypes as for ``A``.
        dt_softplus: apply softplus to ``dt + dt_bias``.
        state_batch_indices: (batch,), int32 or int64: the slot of ``state`` that each row of the batch uses. A negative index
            is padding: the output is zero and no state is touched. Other indices must be distinct and below the number of
            slots; the CPU raises a ValueError otherwise. CUDA does not check, because the host would have to wait for the
            device: a row whose index is past the last slot returns NaN and touches no state. Rows that share a slot race:
            the contents of this slot and the outputs of these rows are undefined; other slots are not affected.
        discretization, alpha, lam_sigmoid: as for :func:`selective_scan`.
        lam: of ``"exp_trapezoidal"``, as for :func:`selective_scan`: dtype of ``x``, its shape or one that broadcasts to it.
        previous_x, previous_B: the samples of the step before, for rules that read two, beside ``state`` and in the same slots:
            (batch, dim) or (batch, heads, headdim), and (batch, dstate) or (batch, groups, dstate) as ``B``, dtype of ``x``;
            modified in place. Zero before the first step. Slots that receive the state after a token receive its samples too.
            ``intermediate_states_buffer`` receives states alone: the samples beside them are the tokens' ``x`` and ``B``.
        dt_A: the step of ``A``, as ``delta_A`` of :func:`selective_scan`: dtype of ``x``, its shape or one that broadcasts to
            it. ``dt_bias``, ``dt_softplus`` and ``dt_limit`` do not apply to it.
        conjugate_pairs: of a complex ``A``, as for :func:`selective_scan`. ``state``, ``A``, ``B``, ``C`` and ``previous_B``
            are then complex64, or complex128 with float64 inputs. The step takes none of the arguments from ``out`` on, no
            ``dt_A`` and no ``A_is_log``. A constant ``B`` is one of dim groups, ``B.expand(batch, -1, -1)``.
        dt_limit: the smallest and the largest step size; clamps the others, after bias and softplus. None: no limits.
        A_is_log: ``A`` holds the logarithm that layers keep; the operator computes ``-exp(A)`` from it.
        out: the tensor that the output is written to: shape, dtype and device of ``x``, any strides. A new one if absent.
        dst_state_batch_indices: the slot that each row writes to, if it differs from the slot that it reads from; int32 or
            int64. (batch,): the state after the row's last token. (batch, tokens): the state after each token, to the slot in
            the token's column. A negative index is padding: that state is not written.
        pad_slot_id: a further index that is padding, for all tables of indices; vLLM's newer name is ``null_block_id``.
        num_accepted_tokens: (batch,), int32 or int64, with ``state_batch_indices`` of shape (batch, columns): how many tokens
            of the previous call speculative decoding has accepted. Row ``b`` reads the state in column
            ``num_accepted_tokens[b] - 1``, and column 0 if the number is 0.
        cu_seqlens: (sequences + 1,), int32 or int64: the tokens of all sequences are packed one after another. ``x``, ``dt``
            and ``z`` are then (tokens, dim) or (tokens, heads, headdim), ``B`` and ``C`` (tokens, dstate) or (tokens, groups,
            dstate); a row is a sequence. A sequence without tokens touches no state.
            Tokens after ``cu_seqlens[-1]`` are padding, for CUDA graphs, which keep one shape: they touch no state, and their
            output is zero, or in ``out``, if given, what it was.
        intermediate_states_buffer: (entries, tokens, dim, dstate) or (entries, tokens, heads, headdim, dstate), dtype of
            ``state``: receives the state after each token. Row ``b`` writes to entry ``b`` or, with
            ``intermediate_state_indices``, to entry ``intermediate_state_indices[b]``, unless that is padding. Other entries
            stay as they are.
        intermediate_state_indices: (batch,), int32 or int64.
        disable_state_update: do not write to ``state``, as when drafts are only verified.

    **Several tokens.** ``x`` of shape (batch, tokens, dim) or (batch, tokens, heads, headdim), with ``dt`` and ``z`` of the
    same shape and ``B`` and ``C`` of shape (batch, tokens, dstate) or (batch, tokens, groups, dstate), makes one step for each
    token. The result equals as many calls of one token. The kernel reads the state of a row once, and writes it once, after the
    last token. If the table of slots to write to has two axes, it writes the state after each token: that table is
    ``dst_state_batch_indices`` or, without it, ``state_batch_indices``. A row without ``num_accepted_tokens`` reads column 0.

    **Slots.** A row whose slot to read from is padding has the output zero and writes nothing. No slot or entry that a row
    writes to may be read or written by another row: the CPU raises a ValueError, on CUDA the contents are undefined. Rows may
    share a slot that none writes to. If a row writes several states to one slot, the last one stays. On CUDA a row whose slot
    to read from is past the last one returns NaN and writes nothing, and a state whose slot or entry is past the last one is
    not written.

    These arguments are those of vLLM, FlashInfer and SGLang. With any of those after ``A_is_log`` the function calls
    ``torch.ops.ssm_kernels.selective_state_update_out``, or ``selective_state_update_two_sample_out`` of rules with two samples
    and with ``dt_A``, which raise if an argument requires a gradient.

    Returns:
        ``out``, shape and dtype of ``x``; the argument if it is given. Not differentiable: backward through it raises.
        ``state`` requires a gradient after the call only if it did before; backward through it then raises, too.

    Raises:
        ValueError: a shape, the discretization, ``dt_limit`` or, on the CPU, a table of indices, ``num_accepted_tokens`` or
            ``cu_seqlens`` is not as above.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        RuntimeError: elements of ``state``, ``out`` or ``intermediate_states_buffer``, which are written to, share memory with
            each other or with another argument.
        NotImplementedError: an argument requires a gradient beside ``out`` or another of the arguments after ``A_is_log``.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import selective_state_update
        >>> batch, dim, dstate = 2, 8, 16
        >>> state = torch.zeros(batch, dim, dstate)  # updated in place
        >>> A = -torch.rand(dim, dstate)
        >>> for token in range(3):
        ...     x, dt = torch.randn(batch, dim), torch.rand(batch, dim)
        ...     B, C = torch.randn(batch, dstate), torch.randn(batch, dstate)
        ...     y = selective_state_update(state, x, dt, A, B, C)
        >>> y.shape
        torch.Size([2, 8])
        >>> heads, headdim = 4, 2  # Mamba-2: a number a head, expanded
        >>> state = torch.zeros(batch, heads, headdim, dstate)
        >>> A, dt = -torch.rand(heads), torch.rand(batch, heads)
        >>> A, dt = A[:, None, None].expand(-1, headdim, dstate), dt[:, :, None].expand(-1, -1, headdim)
        >>> selective_state_update(state, torch.randn(batch, heads, headdim), dt, A, B, C).shape
        torch.Size([2, 4, 2])
    """
    if alpha is not None or discretization in ("gbt", "gbt_two_sample"):
        discretization = with_alpha("selective_state_update", discretization, alpha)
    limits = read_dt_limit("selective_state_update", dt_limit)
    for_servers = (
        dst_state_batch_indices,
        pad_slot_id,
        num_accepted_tokens,
        cu_seqlens,
        intermediate_states_buffer,
        intermediate_state_indices,
    )
    is_of_server = out is not None or disable_state_update or any(value is not None for value in for_servers)
    reads_two = is_two_sample(discretization)
    if not reads_two and (lam is not None or lam_sigmoid is not False or previous_x is not None or previous_B is not None):
        _refuse_one_sample(
            discretization, lam=lam, lam_sigmoid=lam_sigmoid or None, previous_x=previous_x, previous_B=previous_B
        )
    of_complex = is_complex(A)
    if conjugate_pairs is not True and not of_complex:
        raise ValueError("selective_state_update: expected conjugate_pairs=False with a complex A only, got a real A")
    if of_complex and is_of_server:
        _refuse_servers(
            out=out,
            dst_state_batch_indices=dst_state_batch_indices,
            pad_slot_id=pad_slot_id,
            num_accepted_tokens=num_accepted_tokens,
            cu_seqlens=cu_seqlens,
            intermediate_states_buffer=intermediate_states_buffer,
            intermediate_state_indices=intermediate_state_indices,
            disable_state_update=disable_state_update or None,
        )
    if not of_complex and is_dense(state, A):
        if reads_two:
            _check_samples(discretization, previous_x, previous_B)
        return dense_step(
            *(state, previous_x, previous_B, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices),
            discretization=discretization,
            dt_limit=limits,
            unsupported={
                "A_is_log": A_is_log,
                "dt_A": dt_A,
                "lam": lam,
                "lam_sigmoid": lam_sigmoid,
                "out": out,
                "dst_state_batch_indices": dst_state_batch_indices,
                "pad_slot_id": pad_slot_id,
                "num_accepted_tokens": num_accepted_tokens,
                "cu_seqlens": cu_seqlens,
                "intermediate_states_buffer": intermediate_states_buffer,
                "intermediate_state_indices": intermediate_state_indices,
                "disable_state_update": disable_state_update,
            },
        )
    if reads_two or dt_A is not None or of_complex:
        rows = "(tokens, " if cu_seqlens is not None else "(batch, tokens, " if x.dim() == state.dim() else "(batch, "
        axes = rows + ("dim)" if state.dim() == 3 else "heads, headdim)")
        samples = (previous_x, previous_B) if reads_two else (x.new_empty(0), x.new_empty(0))
        step: Callable[..., Tensor] = _two_sample_step
        options: dict[str, Any] = {}
        if is_of_server:
            options = {"out": out, "for_servers": (*for_servers, disable_state_update)}
        if of_complex:
            step, options = partial(complex_step, _two_sample_step), {"conjugate_pairs": conjugate_pairs}
        return step(
            *(state, *samples, x, dt, A, B, C, D, z, dt_bias),
            broadcast_steps("selective_state_update", "lam", lam, x, axes),
            dt_softplus,
            state_batch_indices,
            broadcast_steps("selective_state_update", "dt_A", dt_A, x, axes),
            discretization=discretization,
            lam_sigmoid=lam_sigmoid,
            dt_limit=limits,
            A_is_log=A_is_log,
            **options,
        )
    if not is_of_server:
        result: Tensor = torch.ops.ssm_kernels.selective_state_update.default(
            state,
            x,
            dt,
            A,
            B,
            C,
            D,
            z,
            dt_bias,
            dt_softplus,
            state_batch_indices,
            discretization=discretization,
            dt_limit=limits,
            A_is_log=A_is_log,
        )
        return result
    result = empty_output(x, cu_seqlens) if out is None else out
    torch.ops.ssm_kernels.selective_state_update_out.default(
        state,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        dt_softplus,
        state_batch_indices,
        discretization,
        limits,
        A_is_log,
        result,
        *for_servers,
        disable_state_update,
    )
    return result
