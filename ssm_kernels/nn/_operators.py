"""The operators that layers call: over whole sequences on this process, or over spans of sequences on several ranks.

A layer calls ``self.operators``, which is ``LOCAL`` by default. :class:`ssm_kernels.distributed.ContextParallel` sets the
operators of its ranks, ``LayerOperators`` of ``distributed/_layer_operators.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from ..choices import CandidateActivation, ConvActivation
from ..ops.convolution import causal_conv1d
from ..ops.mamba3 import mamba3_chunk_scan
from ..ops.recurrences import liquid_scan, mingru_scan, minlstm_scan
from ..ops.selective_scan import selective_scan
from ..ops.ssd import ssd_chunk_scan
from .naming import class_name

__all__ = ["LOCAL", "CallsOperators", "LocalOperators", "Operators"]

_ops = torch.ops.ssm_kernels

# With return_last_state=True. The type of a static method takes the first of a function's overloads, which has no last state.
_Scan = Callable[..., tuple[Tensor, Tensor]]


class Operators(Protocol):
    """Operators over whole sequences, for layers that may have a span of each sequence only."""

    @property
    def is_local(self) -> bool:
        """Whether this process has whole sequences."""

    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        activation: ConvActivation | None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        initial_state: Tensor | None = None,
    ) -> Tensor:
        """As :func:`ssm_kernels.causal_conv1d`, without the final state."""

    @property
    def selective_scan(self) -> Callable[..., Any]:
        """As :func:`ssm_kernels.selective_scan`, without ``alpha`` and ``states_at``."""

    @property
    def ssd_chunk_scan(self) -> Callable[..., Any]:
        """As :func:`ssm_kernels.ssd_chunk_scan`, without ``states_at``."""

    @property
    def mamba3_chunk_scan(self) -> Callable[..., Any]:
        """As :func:`ssm_kernels.mamba3_chunk_scan`."""

    def mamba_conv(
        self, xz: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, *layer: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba_conv``."""

    def mamba_mixer(self, *arguments: Any, needs_last_state: bool) -> tuple[Tensor, Any]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba_mixer``. A last state that is not needed may be None."""

    def mamba2_mixer(self, *arguments: Any) -> tuple[Tensor, Any, Any]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba2_mixer``. Several ranks return no states."""

    def delta_rule_mixer(self, *arguments: Any) -> tuple[Tensor, Any]:
        """Arguments and results as ``torch.ops.ssm_kernels._delta_rule_mixer``. Several ranks return None for the states."""

    def mlstm_mixer(self, *arguments: Any) -> tuple[Tensor, Any, Any, Any]:
        """Arguments and results as ``torch.ops.ssm_kernels._mlstm_mixer``. Several ranks return None for the states."""

    def mingru_scan(
        self,
        gate: Tensor,
        candidate: Tensor,
        h0: Tensor | None,
        *,
        candidate_activation: CandidateActivation | None,
        reverse: bool,
        cu_seqlens: Tensor | None,
        reset: Tensor | None,
        return_last_state: Literal[True],
    ) -> tuple[Tensor, Tensor]:
        """As :func:`ssm_kernels.mingru_scan`."""

    def minlstm_scan(
        self,
        forget: Tensor,
        input: Tensor,
        candidate: Tensor,
        h0: Tensor | None,
        *,
        candidate_activation: CandidateActivation | None,
        reverse: bool,
        cu_seqlens: Tensor | None,
        reset: Tensor | None,
        return_last_state: Literal[True],
    ) -> tuple[Tensor, Tensor]:
        """As :func:`ssm_kernels.minlstm_scan`."""

    def liquid_scan(
        self,
        candidate: Tensor,
        tau: Tensor,
        dt: Tensor | float,
        h0: Tensor | None,
        *,
        reverse: bool,
        cu_seqlens: Tensor | None,
        reset: Tensor | None,
        return_last_state: Literal[True],
    ) -> tuple[Tensor, Tensor]:
        """As :func:`ssm_kernels.liquid_scan`."""

    def reset_in_reverse(self, reset: Tensor) -> Tensor:
        """The mask ``reset`` of the backward direction, (batch, seqlen): the step before each reset of the forward one."""


class LocalOperators:
    """The operators of this process alone."""

    is_local = True

    # The functions and PyTorch's operators themselves, so that a call passes through no other Python function.
    causal_conv1d = staticmethod(causal_conv1d)
    selective_scan = staticmethod(cast(Callable[..., Any], selective_scan))
    ssd_chunk_scan = staticmethod(cast(Callable[..., Any], ssd_chunk_scan))
    mamba3_chunk_scan = staticmethod(cast(Callable[..., Any], mamba3_chunk_scan))
    mamba_conv = staticmethod(_ops._mamba_conv.default)
    mamba2_mixer = staticmethod(_ops._mamba2_mixer.default)
    delta_rule_mixer = staticmethod(_ops._delta_rule_mixer.default)
    mlstm_mixer = staticmethod(_ops._mlstm_mixer.default)
    mingru_scan = staticmethod(cast(_Scan, mingru_scan))
    minlstm_scan = staticmethod(cast(_Scan, minlstm_scan))
    liquid_scan = staticmethod(cast(_Scan, liquid_scan))

    def mamba_mixer(self, *arguments: Any, needs_last_state: bool) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = _ops._mamba_mixer.default(*arguments)
        return results

    def reset_in_reverse(self, reset: Tensor) -> Tensor:
        # Not a slice, reset[:, 1:]: a program exported with it would refuse the sizes 1 and 2 of a dynamic seqlen.
        is_last = torch.arange(reset.shape[1], device=reset.device) == reset.shape[1] - 1
        return reset.roll(-1, 1) & ~is_last


LOCAL: Operators = LocalOperators()


class CallsOperators:
    """Base class of the layers whose operators :class:`ssm_kernels.distributed.ContextParallel` may replace."""

    # A class attribute, so that layers that no style has changed neither save nor copy it.
    operators: Operators = LOCAL

    def _check_is_local(self) -> None:
        if not self.operators.is_local:
            layer = class_name(self)
            raise ValueError(
                f"{layer}: expected no inference_params and no step with context parallelism: a cache has no place for spans"
            )
