"""The operators of layers with context parallelism: ``Operators`` of ``nn/_operators.py`` over the ranks of a group.

``GroupOperators`` has the operators that functions have too, and this module those that only layers call.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from .._mixers import delta_rule_mixer, mamba2_arguments, mamba_mixer, mlstm_mixer
from ..choices import Exchange
from ..nn._operators import LOCAL
from ..ops._step_sizes import step_size
from ..ops.norm import layer_norm_gated, rms_norm_gated
from ._agreement import Agreement, calls_begun
from ._autocast import Autocast
from ._collectives import Gathering
from ._convolution import MambaConv, is_gate
from ._group import Group
from ._group_operators import GroupOperators
from ._mamba2_mixer import ChainedMamba2Mixer, Mamba2Mixer
from ._packed_sequences import ForwardCount
from ._split_norm import SplitNorm, split_mamba2_mixer

__all__ = ["LayerOperators"]


class LayerOperators(GroupOperators):
    """The operators of a layer. They return None for a last state that nobody needs.

    Args:
        group: the ranks.
        exchange: as for :class:`GroupOperators`.
        layer: the number of the layer in its model, from 1.
        forward_count: counts the forward passes of the model.
    """

    is_local = False

    def __init__(self, group: Group, exchange: Exchange | None, layer: int, forward_count: ForwardCount | None) -> None:
        super().__init__(group, Agreement(group, of_layer=True), exchange, "ContextParallel", layer, forward_count)
        self.begun = 0  # calls when the layer's forward began

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerOperators:
        # A copy has agreed on nothing.
        return LayerOperators(self.group, self.exchange, self._layer, copy.deepcopy(self._forward_count, memo))

    def begin(self) -> None:
        """The layer's forward begins. Compiled code and backward, which may recompute it, count no forward passes."""
        if torch.compiler.is_compiling():
            return
        self.begun = calls_begun()
        if self._forward_count is not None and torch._C._current_graph_task_id() == -1:
            self._forward_count.begin(self._layer)

    def __reduce__(self) -> Any:
        raise TypeError(
            "ContextParallel: expected a state_dict to be saved, got a whole layer or model: its rank belongs to this run"
        )

    def mamba_conv(
        self, xz: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, *layer: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba_conv``."""
        if self.group.size == 1:
            return LOCAL.mamba_conv(xz, weight, bias, initial_state, *layer)
        weight = weight.squeeze(1)
        if torch.compiler.is_compiling() or weight.shape[1] == 1:
            x, z = xz.chunk(2, dim=-1)
            x = self.causal_conv1d(x, weight, bias, activation="silu", initial_state=initial_state)
            return x, x, z
        xz, weight, bias, initial_state = self._cast_convolution(xz, weight, bias, initial_state)
        options = {"activation": "silu", "return_final_state": False}
        self._agree_on_convolution(xz[..., : xz.shape[2] // 2], weight, bias, initial_state, options)
        x, scanned, z = MambaConv.apply(xz, weight, bias, initial_state, self._chain(), self.group)
        return x, scanned, z

    def mamba_mixer(self, *arguments: Any, needs_last_state: bool) -> tuple[Tensor, Tensor | None]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba_mixer``; no last state unless it is needed."""
        if self.group.size == 1:
            return LOCAL.mamba_mixer(*arguments, needs_last_state=needs_last_state)

        z: Tensor | None = arguments[6]
        z_is_gate = z is not None and not torch.compiler.is_compiling() and is_gate(z)

        def scan(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            results = self.selective_scan(*tensors, **options, return_last_state=needs_last_state, z_is_gate=z_is_gate)
            return results if needs_last_state else (results, None)

        out, last_state = mamba_mixer(scan, *arguments)
        return out, last_state

    def mamba2_mixer(self, *arguments: Any, norm: SplitNorm | None = None) -> tuple[Tensor, None, None]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba2_mixer``, without initial and final states.

        ``norm`` describes one whose groups are on several ranks of tensor parallelism.
        """
        if self.group.size == 1:
            local = LOCAL.mamba2_mixer if norm is None else functools.partial(split_mamba2_mixer, norm=norm)
            return local(*arguments)[0], None, None
        given, options = mamba2_arguments(arguments)
        if given.conv_state is not None or given.ssm_state is not None:
            raise ValueError("Mamba2: expected neither conv_state nor ssm_state over several ranks, got states of a cache")
        tensors = dict(zip(given._fields, given, strict=True))
        cu_seqlens = tensors.pop("cu_seqlens")
        named_options = dict(zip(options._fields, options, strict=True))
        check = functools.partial(torch.ops.ssm_kernels._mamba2_mixer.default, cu_seqlens=None)
        self._agree("Mamba2", check, tensors, named_options, {"projected": 1, "seq_idx": 1}, cu_seqlens)
        numbers, packing = self._packing("Mamba2", given.projected.shape[1], given.seq_idx, cu_seqlens)
        to, chain = Autocast(given.projected), self._chain()
        node = Mamba2Mixer if chain is None else ChainedMamba2Mixer
        out: Tensor = node.apply(
            to.to_lower(given.projected),
            *map(to.to_float, given[1:7]),
            *((None,) * 3 if packing is None else (numbers, packing.steps_before, packing.carry_mask)),
            options,
            self.group,
            norm,
            *(() if chain is None else (chain,)),
        )
        return out, None, None

    def delta_rule_mixer(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Arguments and results as ``torch.ops.ssm_kernels._delta_rule_mixer``, without final states: ranks serve no cache."""
        if self.group.size == 1:
            return LOCAL.delta_rule_mixer(*arguments)

        def scan(*tensors: Tensor, **options: Any) -> tuple[Tensor, None]:
            return self.delta_rule_scan(*tensors, **options), None

        return delta_rule_mixer(self.causal_conv1d, scan, rms_norm_gated, *arguments)

    def mlstm_mixer(self, *arguments: Any) -> tuple[Tensor, Any, Any, Any]:
        """Arguments and results as ``torch.ops.ssm_kernels._mlstm_mixer``, without final states: ranks serve no cache."""
        if self.group.size == 1:
            return LOCAL.mlstm_mixer(*arguments)

        def scan(*tensors: Tensor, initial_C: Any, initial_n: Any, initial_m: Any, **options: Any) -> tuple[Tensor, None]:
            states = None if initial_C is None else (initial_C, initial_n, initial_m)
            return self.mlstm_scan(*tensors, initial_states=states, **options), None

        return mlstm_mixer(scan, layer_norm_gated, *arguments)[0], None, None, None

    def mingru_scan(self, gate: Tensor, candidate: Tensor, h0: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        return self._scan("mingru_scan", (gate, candidate), h0, **options)

    def minlstm_scan(
        self, forget: Tensor, input: Tensor, candidate: Tensor, h0: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return self._scan("minlstm_scan", (forget, input, candidate), h0, **options)

    def liquid_scan(
        self, candidate: Tensor, tau: Tensor, dt: Tensor | float, h0: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return self._scan("liquid_scan", (candidate, tau, step_size("liquid_scan", dt, candidate)), h0, **options)

    def _scan(self, name: str, inputs: tuple[Tensor, ...], h0: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        h, last_state = self.recurrence(name, inputs, h0, **options)
        return h, last_state

    def reset_in_reverse(self, reset: Tensor) -> Tensor:
        """As :meth:`.Operators.reset_in_reverse`, on the rank that has the step before a reset."""
        if self.group.size == 1:
            return LOCAL.reset_in_reverse(reset)
        self._agree("bidirectional layer", lambda reset: None, {"reset": reset}, {}, {"reset": 1})
        batch, seqlen = reset.shape
        first = reset[:, 0].long() if seqlen > 0 else reset.new_zeros(batch, dtype=torch.int64)
        table = Gathering([torch.stack([first, torch.full_like(first, seqlen)])], self.group, "reset at the borders").wait()[0]
        start = torch.zeros_like(first)
        for first, lengths in (of_rank.unbind(0) for of_rank in table[self.group.rank + 1 :].flip(0).unbind(0)):
            start = torch.where(lengths > 0, first, start)
        return torch.cat([reset[:, 1:], start.bool()[:, None]], dim=1) if seqlen > 0 else reset
