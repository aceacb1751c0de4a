"""The functions of the extension module ``causal_conv1d_cuda``, in the forms of all its versions, and those of
``causal_conv1d.cpp_functions``, which mamba_ssm 2.2.5 and newer call.

The number of arguments tells the versions apart. Until 1.4 the functions return what they compute, and fill ``dx`` in place if
it is given. Since 1.5 they return nothing and write into tensors of the caller. Nothing is recorded by autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dtypes import cast, readable
from ._errors import check_device, check_shape, peer_arguments, unsupported_kind
from ._promotion import common_dtype, no_autocast
from .causal_conv1d import causal_conv1d_fn
from .causal_conv1d import causal_conv1d_update as _update
from .scan_extensions import fill

__all__ = [
    "causal_conv1d_bwd",
    "causal_conv1d_bwd_function",
    "causal_conv1d_fwd",
    "causal_conv1d_fwd_function",
    "causal_conv1d_update",
    "causal_conv1d_update_function",
]

_backward = torch.ops.ssm_kernels._causal_conv1d_bwd.default

# The arguments by their number, since these versions of causal_conv1d.
_FWD = {
    4: ("1.0", "x weight bias silu_activation"),
    5: ("1.1", "x weight bias seq_idx silu_activation"),
    7: ("1.2", "x weight bias seq_idx initial_states final_states_out silu_activation"),
    8: ("1.5", "x weight bias seq_idx initial_states out final_states_out silu_activation"),
}
_BWD = {
    6: ("1.0", "x weight bias dout dx silu_activation"),
    7: ("1.1", "x weight bias dout seq_idx dx silu_activation"),
    10: (
        "1.2",
        "x weight bias dout seq_idx initial_states dfinal_states dx return_dinitial_states silu_activation",
    ),
    12: (
        "1.5",
        "x weight bias dout seq_idx initial_states dfinal_states dx dweight dbias dinitial_states silu_activation",
    ),
}
_UPDATE = {
    5: ("1.0", "x conv_state weight bias silu_activation"),
    6: ("1.2", "x conv_state weight bias silu_activation cache_seqlens"),
    7: ("1.4", "x conv_state weight bias silu_activation cache_seqlens conv_state_indices"),
    8: ("1.5", "x conv_state weight bias out silu_activation cache_seqlens conv_state_indices"),
}


@torch.no_grad()
@peer_arguments("causal_conv1d_cuda.causal_conv1d_fwd")
def causal_conv1d_fwd(*args: Any) -> Tensor | None:
    """``causal_conv1d_cuda.causal_conv1d_fwd``: the convolution of :func:`.causal_conv1d.causal_conv1d_fn`.

    Arguments are positional: ``x, weight, bias``, then

    - ``silu_activation`` (1.0),
    - ``seq_idx, silu_activation`` (1.1),
    - ``seq_idx, initial_states, final_states_out, silu_activation`` (1.2 to 1.4), or
    - ``seq_idx, initial_states, out, final_states_out, silu_activation`` (1.5 and newer).

    ``silu_activation`` is a bool. ``final_states_out``, (batch, channels, width - 1), is written in place if it is a tensor.
    The rest is as in :func:`.causal_conv1d.causal_conv1d_fn`.

    Returns:
        ``out``, (batch, channels, seqlen); the form of 1.5 writes it into its argument and returns None. Not differentiable.

    Raises:
        TypeError: another number of arguments.
        ValueError, RuntimeError, TypeError: as :func:`.causal_conv1d.causal_conv1d_fn`.
    """
    name = "causal_conv1d_cuda.causal_conv1d_fwd"
    given = _named(name, _FWD, args)
    final_states_out = given.get("final_states_out")
    result = causal_conv1d_fn(
        given["x"],
        given["weight"],
        given["bias"],
        given.get("seq_idx"),
        given.get("initial_states"),
        return_final_states=final_states_out is not None,
        final_states_out=final_states_out,
        activation=_activation(name, given),
    )
    out = result if isinstance(result, Tensor) else result[0]
    if "out" not in given:
        return out
    fill(name, "out", given["out"], out)
    return None


@torch.no_grad()
@peer_arguments(
    "causal_conv1d_cuda.causal_conv1d_bwd",
    grad_out="dout",
    grad_final_state="dfinal_states",
    initial_state="initial_states",
)
def causal_conv1d_bwd(*args: Any) -> list[Tensor | None] | None:
    """``causal_conv1d_cuda.causal_conv1d_bwd``: the gradients of :func:`causal_conv1d_fwd`, which runs again.

    Arguments are positional: ``x, weight, bias, dout``, then

    - ``dx, silu_activation`` (1.0),
    - ``seq_idx, dx, silu_activation`` (1.1),
    - ``seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu_activation`` (1.2 to 1.4), or
    - ``seq_idx, initial_states, dfinal_states, dx, dweight, dbias, dinitial_states, silu_activation`` (1.5 and newer).

    The gradient of ``x`` is written into ``dx`` if it is a tensor.

    Returns:
        ``[dx, dweight, dbias]`` (1.0, 1.1) or ``[dx, dweight, dbias, dinitial_states]`` (1.2 to 1.4), each in the dtype of its
        tensor and None without it. The form of 1.5 returns None: it writes ``dx`` and ``dinitial_states``, and adds to
        ``dweight`` and ``dbias``, which the caller sets to zero before.

    Raises:
        TypeError: another number of arguments.
        ValueError: a gradient's tensor has another shape than its value.
        RuntimeError, TypeError: as :func:`causal_conv1d_fwd`.
    """
    name = "causal_conv1d_cuda.causal_conv1d_bwd"
    given = _named(name, _BWD, args)
    x, dout, dfinal_states = given["x"], given["dout"], given.get("dfinal_states")
    check_shape(name, "dout", dout, "(batch, channels, seqlen)", x.shape)
    weight, bias, initial_states = given["weight"], given["bias"], given.get("initial_states")
    common_dtype(name, x=x, weight=weight, bias=bias)
    if dfinal_states is not None:
        shape = (x.shape[0], x.shape[1], weight.shape[1] - 1)
        check_shape(name, "dfinal_states", dfinal_states, "(batch, channels, width - 1)", shape)
    # The operator itself, because torch.library.custom_op calls this function where autograd does not record.
    with no_autocast(x):
        dx, dweight, dbias, dinitial_states = _backward(
            cast(dout, x.dtype).transpose(1, 2),
            cast(dfinal_states, x.dtype),
            x.transpose(1, 2),
            readable(weight, x.dtype),
            readable(bias, x.dtype),
            given.get("seq_idx"),
            None,
            initial_states,
            _activation(name, given),
            [True, True, bias is not None, initial_states is not None],
        )
    dx, dweight = dx.transpose(1, 2), cast(dweight, weight.dtype)
    dbias = None if bias is None else cast(dbias, bias.dtype)
    dinitial_states = None if initial_states is None else dinitial_states
    if given["dx"] is not None:
        dx = fill(name, "dx", given["dx"], dx)
    if len(args) == 12:
        _accumulate(name, "dweight", given["dweight"], dweight)
        _accumulate(name, "dbias", given["dbias"], dbias)
        if given["dinitial_states"] is not None and dinitial_states is not None:
            fill(name, "dinitial_states", given["dinitial_states"], dinitial_states)
        return None
    if len(args) == 10:
        return [dx, dweight, dbias, dinitial_states if given["return_dinitial_states"] else None]
    return [dx, dweight, dbias]


@torch.no_grad()
@peer_arguments("causal_conv1d_cuda.causal_conv1d_update")
def causal_conv1d_update(*args: Any) -> Tensor | None:
    """``causal_conv1d_cuda.causal_conv1d_update``: decoding steps; ``conv_state`` is updated in place.

    Arguments are positional: ``x, conv_state, weight, bias``, then

    - ``silu_activation`` (1.0, 1.1), and with it ``cache_seqlens`` (1.2) and ``conv_state_indices`` (1.4), or
    - ``out, silu_activation, cache_seqlens, conv_state_indices`` (1.5 and newer).

    The rest is as in :func:`.causal_conv1d.causal_conv1d_update`.

    Returns:
        ``out``, shape of ``x``; the form of 1.5 writes it into its argument and returns None. Not differentiable.

    Raises:
        TypeError: another number of arguments.
        ValueError, RuntimeError, TypeError: as :func:`.causal_conv1d.causal_conv1d_update`.
    """
    name = "causal_conv1d_cuda.causal_conv1d_update"
    given = _named(name, _UPDATE, args)
    out = _update(
        given["x"],
        given["conv_state"],
        given["weight"],
        given["bias"],
        _activation(name, given),
        given.get("cache_seqlens"),
        given.get("conv_state_indices"),
    )
    if "out" not in given:
        return out
    fill(name, "out", given["out"], out)
    return None


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """``causal_conv1d.cpp_functions.causal_conv1d_fwd_function``: :func:`causal_conv1d_fwd` in the form of 1.2."""
    out = causal_conv1d_fwd(x, weight, bias, seq_idx, initial_states, final_states_out, silu_activation)
    assert out is not None
    return out


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor | None, ...]:
    """``causal_conv1d.cpp_functions.causal_conv1d_bwd_function``: :func:`causal_conv1d_bwd` in the form of 1.2, a tuple."""
    results = causal_conv1d_bwd(
        x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu_activation
    )
    assert results is not None
    return tuple(results)


def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """``causal_conv1d.cpp_functions.causal_conv1d_update_function``: :func:`causal_conv1d_update` in the form of 1.4."""
    out = causal_conv1d_update(x, conv_state, weight, bias, silu_activation, cache_seqlens, conv_state_indices)
    assert out is not None
    return out


def _named(function: str, forms: dict[int, tuple[str, str]], args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by name, of the form that has this number of them."""
    if len(args) not in forms:
        known = "; ".join(
            f"{number} since {version} ({names.replace(' ', ', ')})" for number, (version, names) in forms.items()
        )
        raise TypeError(f"{function}: expected a number of arguments of a version of causal_conv1d, {known}; got {len(args)}")
    given = dict(zip(forms[len(args)][1].split(), args, strict=True))
    optional = ("bias", "seq_idx", "initial_states", "final_states_out", "dfinal_states", "dx", "dbias", "dinitial_states")
    for name, value in given.items():
        if isinstance(value, Tensor):
            if (kind := unsupported_kind(value)) is not None:
                raise RuntimeError(f"{function}: expected {name} to be a dense tensor of numbers, got a {kind} tensor")
            continue
        if name in ("silu_activation", "return_dinitial_states"):
            continue
        if value is None and (name in optional or name in ("cache_seqlens", "conv_state_indices")):
            continue
        raise TypeError(f"{function}: expected {name} to be a tensor, got {type(value).__name__}")
    return given


def _activation(function: str, given: dict[str, Any]) -> str | None:
    silu = given["silu_activation"]
    if not isinstance(silu, (bool, int)):
        raise TypeError(f"{function}: expected silu_activation to be a bool, got {type(silu).__name__}")
    return "silu" if silu else None


def _accumulate(function: str, name: str, buffer: Tensor | None, value: Tensor | None) -> None:
    if buffer is None or value is None:
        if buffer is not value:
            raise ValueError(f"{function}: expected {name} exactly if there is a {name.removeprefix('d')}")
        return
    if buffer.shape != value.shape:
        raise ValueError(f"{function}: expected {name} of shape {list(value.shape)}, got {list(buffer.shape)}")
    check_device(function, name, buffer, "its gradient", value)
    buffer.add_(value)
