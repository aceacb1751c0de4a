"""The backend of transformers' xLSTM on ``mlstm_scan`` and ``mlstm_step``.

A layer of ``modeling_xlstm`` calls one module, ``xLSTMBackend``, with heads before time and states ``C`` of (key_dim,
value_dim). Its states begin with the unit ``m`` = 0, not minus infinity: with the same beginning ``eps``, which is added in
units of :math:`e^m`, has the same effect.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._dtypes import wide_dtype
from ..ops.mlstm import mlstm_scan
from ..ops.mlstm_step import mlstm_step
from ._transformers_functions import Function

__all__ = ["MLSTM", "backends_of_xlstm", "forward_of_backend"]

MLSTM = "mlstm_scan"

# The most channels of a query that mlstm_scan takes.
_MAX_QUERY_CHANNELS = 256


def backends_of_xlstm(module: ModuleType) -> dict[str, Function]:
    """The forward of the class ``xLSTMBackend``, if the module defines it. Where the package xlstm is installed, none does."""
    backend = vars(module).get("xLSTMBackend")
    is_own = isinstance(backend, type) and backend.__module__ == module.__name__ and "forward" in vars(backend)
    return {"xLSTMBackend": vars(backend)["forward"]} if is_own else {}


def _first_states(
    query: Tensor, value: Tensor, C: Tensor | None, n: Tensor | None, m: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The states as ``mlstm_scan`` takes them; of an empty memory with the unit 0 if absent."""
    wide = wide_dtype(query.dtype)
    if C is None or n is None or m is None:
        batch, heads, _, key_dim = query.shape
        C = query.new_zeros(batch, heads, value.shape[3], key_dim, dtype=wide)
        return C, C.new_zeros(batch, heads, key_dim), C.new_zeros(batch, heads)
    return C.to(wide).transpose(2, 3), n.to(wide), m.to(wide).squeeze(-1)


def forward_of_backend(original: Function) -> Function:
    """A forward on these kernels for any mode and length. Heads with too many channels of a query take ``original``."""

    @functools.wraps(original)
    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        igate: Tensor,
        fgate: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
    ) -> Any:
        arguments = (query, key, value, igate, fgate, c_initial, n_initial, m_initial)
        if query.shape[-1] > _MAX_QUERY_CHANNELS:
            return original(self, *arguments, return_last_states=return_last_states, mode=mode)
        mode = self.config.mode if mode is None else mode
        if "inference" in mode:
            return_last_states = True
        elif "train" not in mode:
            raise ValueError(f"Unknown mode: {mode}")
        elif return_last_states is None:
            return_last_states = self.config.return_last_states
        states = _first_states(query, value, c_initial, n_initial, m_initial)
        eps, dtype = self.config.eps, getattr(torch, self.config.inference_state_dtype)
        needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments)
        if query.shape[2] == 1 and not needs_gradient:
            C, n, m = (state.clone() for state in states)
            out = mlstm_step(C, n, m, *(x[:, :, 0] for x in arguments[:5]), eps=eps)[:, :, None]
        else:
            sequences = (x.transpose(1, 2) for x in arguments[:5])
            out, (C, n, m) = mlstm_scan(*sequences, eps=eps, initial_states=states, return_final_states=True)
            out = out.transpose(1, 2)
        if not return_last_states:
            return out
        return out, (C.transpose(2, 3).to(dtype), n.to(dtype), m[..., None].to(dtype))

    return forward
