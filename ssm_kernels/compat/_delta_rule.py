"""Shared parts of :mod:`ssm_kernels.compat.fla`: the call of the operators, and checks of FLA's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from typing import cast as cast_type

import torch
from torch import Tensor

from .._dtypes import cast, readable, wide_dtype
from .._warnings import warn
from ..ops._arguments import did_you_mean
from ..ops.delta_rule import delta_rule_scan
from ..ops.delta_rule_step import delta_rule_step
from ._errors import check_given, check_shape
from ._promotion import common_dtype, no_autocast

__all__ = ["FUNCTIONS", "check_gates", "delta_rule", "serve"]

# The most tokens of a sequence for which a call without gradients takes the decoding step, which reads and writes each state
# once.
_TOKENS_OF_A_STEP = 16


def delta_rule(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    num_householder: int = 1,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    by_step: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Calls the scan, or the decoding step, with FLA's arguments, for any gate.

    ``by_step``: short calls without gradients take :func:`ssm_kernels.delta_rule_step`. ``in_place``: the step writes the final
    state to ``initial_state`` and returns that tensor, if it has the dtype of states.
    """
    if cu_seqlens is not None and q.dim() == 4 and q.shape[0] != 1:
        raise ValueError(f"{function}: expected a batch of 1 with cu_seqlens, got {q.shape[0]}")
    dtype = common_dtype(function, q=q, k=k, v=v)
    common_dtype(function, beta=beta, g=g, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias)
    wide = wide_dtype(dtype)
    q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
    beta, g = readable(beta, dtype), readable(g, dtype)
    states = cast(initial_state, wide)
    if states is not None:
        axes = ["value_dim", "key_dim"] if state_v_first else ["key_dim", "value_dim"]
        sizes = {"key_dim": q.shape[-1], "value_dim": v.shape[-1]}
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shape = (sequences, *v.shape[2:3], *(sizes[axis] for axis in axes))
        check_shape(function, "initial_state", states, f"(sequences, value_heads, {', '.join(axes)})", shape)
        states = states if state_v_first else states.transpose(2, 3)
    options: dict[str, Any] = {
        "g": g,
        "scale": scale,
        "qk_l2norm": use_qk_l2norm_in_kernel,
        "A_log": cast(A_log, wide),
        "dt_bias": cast(dt_bias, wide),
        "gate_lower_bound": lower_bound,
        "beta_sigmoid": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "num_householder": num_householder,
    }
    with no_autocast(q):
        if by_step and seq_idx is None and _is_short(q, cu_seqlens, [q, k, v, beta, g, states, A_log, dt_bias]):
            writes_initial_state = in_place and initial_state is not None and initial_state.dtype == wide
            final_states = states if states is not None else _zeros(q, v, cu_seqlens, wide)
            if states is not None and not writes_initial_state:
                final_states = states.clone()
            out = _step(final_states, q, k, v, beta, cu_seqlens, options)
            if writes_initial_state:
                return out, initial_state if output_final_state else None
        else:
            out, final_states = delta_rule_scan(
                q,
                k,
                v,
                beta,
                initial_states=states,
                return_final_states=True,
                cu_seqlens=cu_seqlens,
                seq_idx=seq_idx,
                **options,
            )
    if not output_final_state:
        return out, None
    return out, final_states if state_v_first else final_states.transpose(2, 3)


def _is_short(q: Tensor, cu_seqlens: Tensor | None, tensors: list[Tensor | None]) -> bool:
    """Whether the decoding step serves a call: few tokens a sequence, and no gradient."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return False
    if q.dim() != 4 or q.shape[-1] > 512:
        return False
    # The lengths of packed sequences are on the device: the mean length stands for them.
    sequences = 1 if cu_seqlens is None else max(cu_seqlens.shape[0] - 1, 1)
    return 0 < q.shape[1] <= _TOKENS_OF_A_STEP * sequences


def _zeros(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype) -> Tensor:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.zeros(sequences, *v.shape[2:4], q.shape[3], dtype=dtype, device=q.device)


def _step(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, cu_seqlens: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Runs the decoding step, whose packed tokens have no axis of the batch."""
    if cu_seqlens is None:
        return delta_rule_step(states, q, k, v, beta, **options)
    # squeeze, not [0]: the operator then refuses tensors whose batch is not 1.
    given = {name: value.squeeze(0) if name == "g" and value is not None else value for name, value in options.items()}
    q, k, v, beta = (x.squeeze(0) for x in (q, k, v, beta))
    return delta_rule_step(states, q, k, v, beta, cu_seqlens=cu_seqlens, **given)[None]


class Function(NamedTuple):
    """How a function of FLA differs from the others."""

    needs_gate: bool = False
    has_channels: bool = False  # the gate has one number a channel of the key
    by_step: bool = False
    keywords: Sequence[str] = ()  # arguments that ``**kwargs`` may hold


_LAYOUT = "transpose_state_layout"

FUNCTIONS: Mapping[str, Function] = {
    "chunk_delta_rule": Function(),
    "chunk_gated_delta_rule": Function(needs_gate=True, keywords=("use_gate_in_kernel", "A_log", "dt_bias", _LAYOUT)),
    "chunk_kda": Function(needs_gate=True, has_channels=True, keywords=("A_log", "dt_bias", _LAYOUT)),
    "chunk_gated_delta_product": Function(),
    "fused_recurrent_delta_rule": Function(by_step=True),
    "fused_recurrent_gated_delta_rule": Function(by_step=True, keywords=(_LAYOUT,)),
    "fused_recurrent_kda": Function(needs_gate=True, has_channels=True, by_step=True, keywords=(_LAYOUT,)),
}


def serve(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    keywords: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Calls one of ``FUNCTIONS`` after it has refused what is not supported.

    ``keywords`` are the function's ``**kwargs``, and ``options`` its other arguments by name.
    """
    function = FUNCTIONS[name]
    options |= _read_keywords(name, {} if keywords is None else keywords, function.keywords)
    for refused, instead in _REFUSED.items():
        value = options.pop(refused, None)
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: {refused} is not supported{instead}")
    g = _read_gates(name, q, v, options.pop("g", None), options.pop("gk", None), options.get("use_gate_in_kernel", False))
    return delta_rule(
        name,
        q,
        k,
        v,
        _read_beta(name, beta, v) if function.by_step else cast_type(Tensor, beta),
        g=g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        by_step=function.by_step,
        **_read_parameters(name, g, options),
    )


_REFUSED = {
    "cp_context": ": expected None",
    "return_intermediate_states": ": states_at of ssm_kernels.delta_rule_scan returns states between steps",
    "use_graph": ": calls can be captured without it, with cu_seqlens that end at seqlen",
    "gv": ": decays are one a head (g) or one a channel of the key (gk)",
}


def _read_keywords(name: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The keywords that change a call, with the state's layout under its newer name."""
    if "head_first" in given:
        raise TypeError(f"{name}: head_first is not supported, as in FLA itself: sequences are (batch, seqlen, heads, dim)")
    for keyword in given:
        if keyword not in (*known, "chunk_size"):
            raise TypeError(
                f"{name}: got an unexpected keyword argument {keyword!r}{did_you_mean(keyword, (*known, 'chunk_size'))}"
            )
    return {keyword: value for keyword, value in given.items() if keyword != "chunk_size"}


def _read_gates(name: str, q: Tensor, v: Tensor, g: Tensor | None, gk: Tensor | None, is_raw: bool) -> Tensor | None:
    """The sum of the gates that are given."""
    function = FUNCTIONS[name]
    if gk is not None and is_raw:
        raise NotImplementedError(f"{name}: gk with use_gate_in_kernel is not supported: compute one log decay of both")
    if function.needs_gate or is_raw or g is not None:
        check_gates(name, v, g=g, key_dim=q.shape[-1] if function.has_channels else None, steps=q.shape[1:2])
    if gk is None:
        return g
    check_gates(name, v, gk=gk, key_dim=q.shape[-1])
    return gk if g is None else g.unsqueeze(-1) + gk


def _read_parameters(name: str, g: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options as :func:`delta_rule` takes them.

    Parameters of a raw gate are flattened: FLA reads elements and ignores shapes, such as (1, 1, heads, 1) of ``A_log``.
    """
    if _LAYOUT in options:
        if options["state_v_first"]:
            raise ValueError(f"{name}: expected state_v_first or its older name {_LAYOUT}, got both")
        warn(f"{name}: {_LAYOUT} is the older name of state_v_first", DeprecationWarning)
        options["state_v_first"] = bool(options.pop(_LAYOUT))
    A_log, dt_bias = options.pop("A_log", None), options.pop("dt_bias", None)
    lower_bound, is_safe = options.pop("lower_bound", None), options.pop("safe_gate", False)
    if not options.pop("use_gate_in_kernel", False):
        return options
    if is_safe and lower_bound is None:
        raise ValueError(f"{name}: expected lower_bound with safe_gate and use_gate_in_kernel, got None")
    if A_log is None and lower_bound is None:
        raise ValueError(f"{name}: expected A_log with use_gate_in_kernel, got None")
    if dt_bias is not None:
        dt_bias = dt_bias.flatten()
        channels = g.shape[2:] if g is not None and FUNCTIONS[name].has_channels else None
        if channels is not None and dt_bias.numel() == channels[0] * channels[1]:
            dt_bias = dt_bias.view(*channels)
    return {**options, "A_log": None if A_log is None else A_log.flatten(), "dt_bias": dt_bias, "lower_bound": lower_bound}


def _read_beta(name: str, beta: Tensor | None, v: Tensor) -> Tensor:
    if beta is None:
        return v.new_ones(v.shape[:3])
    if beta.dim() == v.dim():
        raise NotImplementedError(
            f"{name}: a beta of channels is not supported: expected (batch, seqlen, value_heads), got {list(beta.shape)}"
        )
    return beta


def check_gates(
    function: str, v: Tensor, *, key_dim: int | None = None, steps: Sequence[int] | None = None, **gates: Tensor | None
) -> None:
    """Raises unless the gates have one number a value head or, with ``key_dim``, one a channel of the key.

    ``steps``: (seqlen,), if ``v`` may have several updates in a step.
    """
    check_given(function, **gates)
    channels = () if key_dim is None else (key_dim,)
    steps = v.shape[1:2] if steps is None else steps
    for name, gate in gates.items():
        assert gate is not None
        axes = "(batch, seqlen, value_heads)" if key_dim is None else "(batch, seqlen, value_heads, key_dim)"
        check_shape(function, name, gate, axes, (*v.shape[:1], *steps, *v.shape[2:3], *channels))
