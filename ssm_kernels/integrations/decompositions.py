"""The operators in terms of PyTorch's own, for exporters that know no others.

:func:`decomposition_table` is for ``torch.export.ExportedProgram.run_decompositions``. A scan becomes one ``scan`` of PyTorch's
higher-order operators over its steps, ``h_t = Abar_t h_{t-1} + c_t B_t u_t`` with the coefficients of
:mod:`ssm_kernels.reference`; its body holds one step, so that nothing has the size of all states. ONNX has such an operator,
``Scan``. The rest becomes elementwise operators.

Inputs narrower than float32 are computed in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from .. import reference
from .._mixers import MAMBA2_ARGUMENTS, mamba2_arguments, mamba2_mixer, mamba_mixer, project
from ..choices import ConvActivation, DiscretizationName
from ..reference.sequences import step_sizes

__all__ = ["decomposition_table"]

Decomposition = Callable[..., Any]
_table: dict[Any, Decomposition] = {}


def decomposition_table() -> dict[Any, Decomposition]:
    """Returns a function of PyTorch's operators for each operator that leaves its arguments as they are.

    The table has the scans, the convolution, the norms, the steps of the linear recurrences, and what layers call between
    their projections; forward only. ``selective_state_update`` and ``causal_conv1d_update`` are not in it, because they update
    a state in place: for decoding, export the scan and the convolution of one step, with their initial and last states.

    Returns:
        A new dict from ``torch.ops.ssm_kernels`` overloads to functions of the same arguments, for
        ``ExportedProgram.run_decompositions``. The functions return the operators' results but for what forward saves for
        backward, in whose place they return tensors without elements. They raise ValueError for ``cu_seqlens``.

    Examples:
        >>> import torch
        >>> import ssm_kernels
        >>> table = ssm_kernels.integrations.decompositions.decomposition_table()
        >>> a, b = torch.rand(2, 5, 3), torch.rand(2, 5, 3)
        >>> h, last_state = table[torch.ops.ssm_kernels.linear_scan.default](a, b)
        >>> torch.allclose(h, ssm_kernels.linear_scan(a, b))
        True
    """
    return dict(_table)


def _decomposes(name: str) -> Callable[[Decomposition], Decomposition]:
    def register(function: Decomposition) -> Decomposition:
        _table[getattr(torch.ops.ssm_kernels, name).default] = function
        return function

    return register


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _to(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _refuse_packed(operator: str, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        raise ValueError(
            f"decomposition of {operator}: expected cu_seqlens to be None, got a tensor: a graph cannot have one scan for each "
            "of a number of sequences that it does not know"
        )


def _scan(
    step: Callable[..., list[Tensor]], state: Tensor, steps: list[Tensor], constants: tuple[Tensor, ...], *, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of all steps, which have the shape and dtype of ``like``, and the last state."""
    if isinstance(like.shape[0], int) and like.shape[0] == 0:
        return like, state
    last_state, outputs = scan_op(step, [state], steps, constants)
    return outputs, last_state


def _scan_states(
    discretization: DiscretizationName,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The state-space model without skip connection and gate, for both of its scans.

    Args:
        discretization: a name.
        x: (seqlen, batch, heads, headdim).
        dt: step sizes, (seqlen, batch, heads).
        A: (heads, dstate), or (heads, 1) for one number a head.
        B: (seqlen, batch, groups, dstate).
        C: as B.
        state: (batch, heads, headdim, dstate).
        keep: (seqlen, batch), 0 where the state before a step is dropped, else 1.

    Returns:
        y, (seqlen, batch, heads, headdim), and the last state.
    """
    heads_of_group = x.shape[2] // B.shape[2]

    def step(h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *others: Tensor) -> list[Tensor]:
        A, *keep = reversed(others)
        if keep:
            h = h * keep[0][:, None, None, None]
        Abar, c = reference.coefficients(discretization, dt[..., None], A)
        B, C = (X[:, :, None].expand(-1, -1, heads_of_group, -1).flatten(1, 2) for X in (B, C))
        h = Abar[:, :, None] * h + (c * B)[:, :, None] * x[..., None]
        return [h, (h * C[:, :, None]).sum(-1)]

    return _scan(step, state, [x, dt, B, C, *([] if keep is None else [keep])], (A,), like=x)


def _keep(seq_idx: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(seqlen, batch): 0 where a sequence begins inside a row, else 1."""
    if seq_idx is None:
        return None
    continues = (seq_idx[:, 1:] == seq_idx[:, :-1]).to(seq_idx.dtype)
    return torch.cat([torch.ones_like(seq_idx[:, :1]), continues], dim=1).to(dtype).transpose(0, 1)


@_decomposes("_selective_scan_fwd")
def _selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    discretization: DiscretizationName,
    delta_softplus: bool,
    save_chunk_states: bool,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_packed("selective_scan", cu_seqlens)
    batch, dim, _ = u.shape
    dtype = _wide(u)
    if reverse:
        u, delta, B, C = (X if X.dim() == 2 else X.flip(-1) for X in (u, delta, B, C))
        z, seq_idx = (None if X is None else X.flip(-1) for X in (z, seq_idx))
    x, delta, A, B, C, D, z_wide, bias, state = _to(dtype, u, delta, A, B, C, D, z, delta_bias, initial_state)
    # (seqlen, batch, groups, dstate); a time-invariant matrix is the same at each step, with a group for each channel.
    B, C = (X.expand(u.shape[2], batch, *X.shape) if X.dim() == 2 else _with_groups(X).permute(3, 0, 1, 2) for X in (B, C))
    groups = max(B.shape[2], C.shape[2])
    B, C = (X.expand(-1, -1, groups, -1) for X in (B, C))
    dt = step_sizes(delta.permute(2, 0, 1), bias, delta_softplus)
    state = x.new_zeros(batch, dim, A.shape[1]) if state is None else state
    y, last_state = _scan_states(
        discretization, x.permute(2, 0, 1)[..., None], dt, A, B, C, state[:, :, None], _keep(seq_idx, dtype)
    )
    out = _skip_and_gate(y[..., 0].permute(1, 2, 0), x, None if D is None else D[:, None], z_wide).to(u.dtype)
    return out.flip(-1) if reverse else out, last_state[:, :, 0], x.new_zeros(0)


def _with_groups(X: Tensor) -> Tensor:
    return X if X.dim() == 4 else X[:, None]


def _skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    y = y if D is None else y + D * x
    return y if z is None else y * F.silu(z)


@_decomposes("ssd_chunk_scan")
def _ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    discretization: DiscretizationName = "zoh",
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    _refuse_packed("ssd_chunk_scan", cu_seqlens)
    batch, _, heads, headdim = x.shape
    if reverse:
        x, dt, B, C = (sequence.flip(1) for sequence in (x, dt, B, C))
        z, seq_idx = (None if sequence is None else sequence.flip(1) for sequence in (z, seq_idx))
    wide, dt, A, B, C, D, z, bias, states = _to(_wide(x), x, dt, A, B, C, D, z, dt_bias, initial_states)
    dt = step_sizes(dt, bias, dt_softplus, dt_limit)
    states = wide.new_zeros(batch, heads, headdim, B.shape[3]) if states is None else states
    x_t, dt_t, B_t, C_t = (sequence.transpose(0, 1) for sequence in (wide, dt, B, C))
    y, states = _scan_states(discretization, x_t, dt_t, A[:, None], B_t, C_t, states, _keep(seq_idx, wide.dtype))
    D = D[:, None] if D is not None and D.dim() == 1 else D
    out = _skip_and_gate(y.transpose(0, 1), wide, D, z).to(x.dtype)
    return out.flip(1) if reverse else out, states


@_decomposes("causal_conv1d")
def _causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: ConvActivation | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _refuse_packed("causal_conv1d", cu_seqlens)
    wide, weight, bias, state = _to(_wide(x), x, weight, bias, initial_state)
    out, state = reference.causal_conv1d(
        wide, weight, bias, activation=activation, seq_idx=seq_idx, initial_state=state, return_final_state=True
    )
    return out.to(x.dtype), state.to(x.dtype)


def _norm(
    name: str, x: Tensor, weight: Tensor | None, z: Tensor | None = None, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return getattr(reference, name)(*_to(_wide(x), x, weight, z, bias), **options).to(x.dtype)


def _add_norm(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    normed, new_residual = getattr(reference, name)(*_to(_wide(x), x, residual, weight, bias), eps=eps)
    kept = _wide(x) if residual_in_fp32 else x.dtype if residual is None else residual.dtype
    return normed.to(x.dtype), new_residual.to(kept)


for _name in ("rms_norm_gated", "layer_norm_gated"):
    _decomposes(_name)(partial(_norm, _name))
for _name in ("add_rms_norm", "add_layer_norm"):
    _decomposes(_name)(partial(_add_norm, _name))


def _bound(operator: Any, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call, by name and in the operator's order."""
    arguments = operator._schema.arguments
    given = dict(zip((argument.name for argument in arguments), positional, strict=False)) | dict(named)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}


def _linear_step(h: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    h = a * h + b
    return [h, h.clone()]  # the results of a step share no memory


def _recurrence(name: str, is_step: bool) -> Decomposition:
    operator = getattr(torch.ops.ssm_kernels, f"{name}_{'step' if is_step else 'scan'}").default
    coefficients = reference.RECURRENCES[f"{name}_scan"]
    parameters = inspect.signature(coefficients).parameters
    first = next(iter(parameters))

    def decomposition(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        given = _bound(operator, arguments, options)
        dtype, shape, wide = given[first].dtype, given[first].shape, _wide(given[first])
        inputs = {key: given[key].to(wide) if isinstance(given[key], Tensor) else given[key] for key in parameters}
        a, b = (factor.expand(shape) for factor in coefficients(**inputs))
        if is_step:
            h = b.clone() if given["state"] is None else a * given["state"].to(wide) + b
            return h.to(dtype), h.clone()
        _refuse_packed(f"{name}_scan", given["cu_seqlens"])
        h0 = torch.zeros_like(b[:, 0]) if given["h0"] is None else given["h0"].to(wide)
        if given["reset"] is not None:
            reset = given["reset"].unsqueeze(-1)
            a, b = torch.where(reset, 0, a), torch.where(reset, a * h0.unsqueeze(1) + b, b)
        steps = [(factor.flip(1) if given["reverse"] else factor).transpose(0, 1) for factor in (a, b)]
        h, last_state = _scan(_linear_step, h0, steps, (), like=steps[1])
        h = h.transpose(0, 1)
        return (h.flip(1) if given["reverse"] else h).to(dtype), last_state

    return decomposition


for _name in (scan.removesuffix("_scan") for scan in reference.RECURRENCES):
    _decomposes(f"{_name}_scan")(_recurrence(_name, is_step=False))
    _decomposes(f"{_name}_step")(_recurrence(_name, is_step=True))


@_decomposes("_mamba_conv")
def _mamba_conv(
    xz: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, layer: str = "Mamba"
) -> tuple[Tensor, Tensor, Tensor]:
    x, z = xz.chunk(2, dim=-1)
    x, _ = _causal_conv1d(x, weight.flatten(1), bias, "silu", initial_state=initial_state)
    return x, x, z


@_decomposes("_mamba_mixer_fwd")
def _mamba_mixer(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    given = _bound(torch.ops.ssm_kernels._mamba_mixer_fwd.default, arguments, options)
    scan = partial(_selective_scan, save_chunk_states=given.pop("save_chunk_states"))
    out, last_state, saved = mamba_mixer(scan, **given)
    return out, last_state, saved, saved.clone()


def _without_norm(x: Tensor, weight: Tensor, z: Tensor, **options: Any) -> Tensor:
    return x


@_decomposes("_mamba2_mixer_fwd")
def _mamba2_mixer(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    given = _bound(torch.ops.ssm_kernels._mamba2_mixer_fwd.default, arguments, options)
    norm = partial(_norm, "rms_norm_gated") if given.pop("applies_norm") else _without_norm
    results = mamba2_mixer(_causal_conv1d, _ssd_chunk_scan, norm, *mamba2_arguments(tuple(given.values())))
    return *results, *(given["projected"].new_zeros(0) for _ in range(3))


@_decomposes("_mamba2_mixer_projected_fwd")
def _mamba2_mixer_projected(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    given = _bound(torch.ops.ssm_kernels._mamba2_mixer_projected_fwd.default, arguments, options)
    out, *others = _mamba2_mixer(*(*given.values(),)[:MAMBA2_ARGUMENTS])
    return project(out, *(*given.values(),)[MAMBA2_ARGUMENTS:]), *others
