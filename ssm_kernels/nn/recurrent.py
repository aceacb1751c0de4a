"""Base class of the layers of linear recurrences: everything of ``torch.nn.GRU`` except the recurrence itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._dtypes import wide_dtype
from .._warnings import warn
from ..ops._arguments import check_dense, is_autocast_enabled
from ..ops._masks import as_mask, read_lengths, reset_state
from ._operators import CallsOperators
from .checks import check_bools, check_dtype, check_int, check_probability, check_shape, check_tensor
from .initialization import uniform_
from .naming import class_name
from .packed import PackedOrder
from .weight_decay import NamesNoDecay

__all__ = ["RecurrentBase"]


class RecurrentBase(NamesNoDecay, nn.Module, CallsOperators):
    """Layers of a linear recurrence, each after one projection of its input; called like ``torch.nn.GRU``.

    Derived layers give the number of the projection's parts, each ``hidden_size`` wide, and define ``_scan`` and ``_step``,
    which take the projection's result.

    Parameters, for each layer k, and with ``_reverse`` after their names for its other direction: ``weight_ih_l{k}`` (parts *
    hidden_size, inputs of the layer) and, with ``bias``, ``bias_ih_l{k}`` (parts * hidden_size,).
    """

    weight_ih_l0: nn.Parameter

    def __init__(
        self,
        parts: int,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = class_name(self)
        for what, size in (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            check_int(name, what, size)
        check_bools(name, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
        check_probability(name, "dropout", dropout)
        check_dtype(name, dtype)
        if dropout > 0 and num_layers == 1:
            warn(f"{name}: dropout acts between layers, and there is only one")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, dropout, bidirectional
        for layer in range(num_layers):
            inputs = input_size if layer == 0 else hidden_size * len(self._directions)
            for suffix in self._directions:
                weight = torch.empty(parts * hidden_size, inputs, device=device, dtype=dtype)
                self.register_parameter(f"weight_ih_l{layer}{suffix}", nn.Parameter(weight))
                if bias:
                    self.register_parameter(f"bias_ih_l{layer}{suffix}", nn.Parameter(torch.empty_like(weight[:, 0])))

    @property
    def _directions(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weights and biases like ``torch.nn.GRU``: uniform, up to ``hidden_size**-0.5``."""
        for parameter in self.parameters(recurse=False):
            uniform_(parameter, -(self.hidden_size**-0.5), self.hidden_size**-0.5)

    def flatten_parameters(self) -> None:
        """Does nothing; for code written for ``torch.nn.GRU``, whose parameters cuDNN wants contiguous."""

    def _scan(
        self,
        projected: Tensor,
        h0: Tensor | None,
        name: str,
        *,
        reverse: bool,
        cu_seqlens: Tensor | None,
        reset: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Returns all states, (batch, seqlen, hidden_size), and the last one, from the projected input, (batch, seqlen, parts *
        hidden_size).

        ``name`` is the suffix of the parameters' names of this layer and direction, such as ``l0_reverse``.
        """
        raise NotImplementedError

    def _step(self, projected: Tensor, state: Tensor | None, name: str, **options: Any) -> tuple[Tensor, Tensor]:
        """One step of ``_scan``; returns the output and the state, (batch, hidden_size)."""
        raise NotImplementedError

    def _project(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, getattr(self, f"weight_ih_{name}"), getattr(self, f"bias_ih_{name}") if self.bias else None)

    def _is_dropped(self, layer: int) -> bool:
        return layer < self.num_layers - 1 and self.dropout > 0

    def _split_states(
        self, states: Tensor | None, what: str, sizes: tuple[int, ...], method: str = ""
    ) -> tuple[Tensor | None, ...]:
        """Checks the states of every layer and direction and casts them to the recurrence's dtype. Messages name ``method``.

        Raises:
            ValueError: the shape is not (layers and directions, *sizes, hidden_size).
            RuntimeError: the dtype is neither that of the layer nor that of its states, nor, under autocast, a floating-point
                dtype of at most 32 bits.
        """
        name = class_name(self) + method
        layers = self.num_layers * len(self._directions)
        if states is None:
            return (None,) * layers
        check_tensor(name, what, states)
        expected = (layers, *sizes, self.hidden_size)
        if states.shape != expected:
            batch = "batch, " if sizes else ""
            raise ValueError(
                f"{name}: expected {what} of shape (num_layers * num_directions, {batch}hidden_size) = "
                f"{list(expected)}, got {list(states.shape)}"
            )
        own = self.weight_ih_l0.dtype
        wide = wide_dtype(own)
        if states.dtype not in (own, wide):
            is_cast = states.is_floating_point() and states.dtype != torch.float64 and is_autocast_enabled(states.device.type)
            if not is_cast or own == torch.float64:
                also = "" if own == wide else f" or {own}"
                raise RuntimeError(f"{name}: expected {what} of dtype {wide}{also}, got {states.dtype}")
        return states.to(wide).unbind(0)

    def _check_input(self, input: Tensor) -> None:
        name = class_name(self)
        if not isinstance(input, Tensor):
            raise TypeError(f"{name}: expected input to be a tensor or a PackedSequence, got {type(input).__name__}")
        check_dense(name, "input", input)
        if input.dim() not in (2, 3) or input.shape[-1] != self.input_size:
            order = "batch, seqlen" if self.batch_first else "seqlen, batch"
            raise ValueError(
                f"{name}: expected input of shape ({order}, input_size) or (seqlen, input_size) with input_size = "
                f"{self.input_size}, got {list(input.shape)}"
            )

    def _initial_state(self, hx: Tensor | None, h_0: Tensor | None) -> Tensor | None:
        """``hx``, or the argument under its older name."""
        if h_0 is None:
            return hx
        name = class_name(self)
        if hx is not None:
            raise TypeError(f"{name}: expected hx or h_0, its older name, got both")
        # Not a DeprecationWarning: Python hides it outside __main__.
        warn(f"{name}: h_0 is called hx now, as in torch.nn.GRU", FutureWarning)
        return h_0

    def _run_packed(
        self,
        input: PackedSequence,
        hx: Tensor | None,
        cu_seqlens: Tensor | None,
        order: PackedOrder,
        reset: Tensor | None = None,
        lengths: Any = None,
        **options: Any,
    ) -> tuple[PackedSequence, Tensor]:
        """``forward`` of a ``PackedSequence``: the scan runs over its sequences one after another."""
        name = class_name(self)
        if not self.operators.is_local:
            raise ValueError(f"{name}: expected no PackedSequence with context parallelism: pass spans and cu_seqlens")
        if cu_seqlens is not None:
            raise ValueError(f"{name}: expected a PackedSequence or cu_seqlens, got both")
        for what, value in (("reset", reset), ("lengths", lengths)):
            if value is not None:
                raise ValueError(f"{name}: expected a PackedSequence or {what}, got both")
        if hx is not None:
            self._split_states(hx, "hx", (order.cu_seqlens.shape[0] - 1,))
            hx = hx if input.sorted_indices is None else hx.index_select(1, input.sorted_indices)
        x = order.to_sequences(input.data).unsqueeze(0 if self.batch_first else 1)
        output, h_n = self._run(x, hx, order.cu_seqlens, **options)
        h_n = h_n if input.unsorted_indices is None else h_n.index_select(1, input.unsorted_indices)
        return order.to_packed(output.squeeze(0 if self.batch_first else 1)), h_n

    def _packed_order(self, input: PackedSequence, hx: Tensor | None) -> PackedOrder:
        check_shape(class_name(self), "input.data", input.data, "(steps, input_size)", (None, self.input_size))
        if hx is not None:
            check_tensor(class_name(self), "hx", hx)
        return PackedOrder(input, hx)

    def _run_padded(
        self,
        input: Tensor,
        hx: Tensor | None,
        lengths: Any,
        cu_seqlens: Tensor | None,
        reset: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """``forward`` of a padded batch: its rows and, after each, the padding are sequences one after another.

        Tensors among the options are (batch, seqlen, 1).
        """
        name = class_name(self)
        for what, value in (("cu_seqlens", cu_seqlens), ("reset", reset)):
            if value is not None:
                raise ValueError(f"{name}: expected lengths or {what}, got both")
        if not self.operators.is_local:
            raise ValueError(f"{name}: expected no lengths with context parallelism: pass spans and cu_seqlens")
        self._check_input(input)
        if input.dim() != 3:
            raise ValueError(f"{name}: expected lengths with a batch of sequences, got input of shape {list(input.shape)}")
        x = input if self.batch_first else input.transpose(0, 1)
        batch, seqlen, _ = x.shape
        begins = torch.arange(batch, device=x.device) * seqlen
        lengths = read_lengths(name, lengths, batch, seqlen, x.device)
        borders = torch.stack([begins, begins + lengths], dim=1).flatten()
        cu_seqlens = torch.cat([borders, borders.new_full((1,), batch * seqlen)])
        is_padding = (torch.arange(seqlen, device=x.device) >= lengths[:, None])[..., None]

        def in_a_row(values: Tensor) -> Tensor:
            # Zero: what the padding holds, NaN included, would have a gradient of zero times that.
            values = values.masked_fill(is_padding, 0)
            return values.reshape(batch * seqlen, values.shape[2])

        if hx is not None:
            states = torch.stack(self._split_states(hx, "hx", (batch,)))  # type: ignore[arg-type]
            hx = torch.stack([states, torch.zeros_like(states)], dim=2).flatten(1, 2)
        options = {key: in_a_row(value)[None] if isinstance(value, Tensor) else value for key, value in options.items()}
        output, h_n = self._run(in_a_row(x).unsqueeze(0 if self.batch_first else 1), hx, cu_seqlens, **options)
        output = output.reshape(batch, seqlen, output.shape[2]).masked_fill(is_padding, 0)
        return output if self.batch_first else output.transpose(0, 1), h_n[:, ::2]

    def _resets(self, reset: Tensor | None, input: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the masks of both directions, (batch, seqlen), bool.

        A sequence that starts at step t ends for the other direction at step t - 1, where that direction starts.
        """
        if reset is None:
            return None, None
        axes = "(seqlen)" if input.dim() == 2 else "(batch, seqlen)" if self.batch_first else "(seqlen, batch)"
        reset = as_mask(class_name(self), reset, input.dim() - 1)
        check_shape(class_name(self), "reset", reset, axes, input.shape[:-1])
        assert reset is not None
        reset = reset[None] if input.dim() == 2 else reset if self.batch_first else reset.transpose(0, 1)
        return reset, self.operators.reset_in_reverse(reset) if self.bidirectional else None

    def _run(
        self, input: Tensor, hx: Tensor | None, cu_seqlens: Tensor | None, reset: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Implements ``forward``; ``options`` go to ``_scan``."""
        self._check_input(input)
        is_batched = input.dim() == 3
        x = input if is_batched else input[None]
        is_batch_first = self.batch_first or not is_batched
        if cu_seqlens is not None:
            check_tensor(class_name(self), "cu_seqlens", cu_seqlens)
            if cu_seqlens.dim() != 1:
                shape = list(cu_seqlens.shape)
                raise ValueError(f"{class_name(self)}: expected cu_seqlens of shape (sequences + 1,), got {shape}")
            sizes: tuple[int, ...] = (cu_seqlens.shape[0] - 1,)
        else:
            sizes = (x.shape[0 if is_batch_first else 1],) if is_batched else ()
        resets = self._resets(reset, input)
        states = self._split_states(hx, "hx", sizes)
        last_states: list[Tensor] = []
        for layer in range(self.num_layers):
            outputs = []
            for suffix, starts in zip(self._directions, resets, strict=False):
                projected = self._project(x, f"l{layer}{suffix}")
                # Transpose after the projection, which would copy a transposed input; the scan reads any strides.
                projected = projected if is_batch_first else projected.transpose(0, 1)
                h0 = states[len(last_states)]
                h0 = h0 if sizes or h0 is None else h0[None]
                h, last_state = self._scan(
                    projected, h0, f"l{layer}{suffix}", reverse=suffix != "", cu_seqlens=cu_seqlens, reset=starts, **options
                )
                outputs.append(h)
                last_states.append(last_state if sizes else last_state[0])
            x, is_batch_first = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1), True
            if self._is_dropped(layer):
                x = F.dropout(x, self.dropout, self.training)
        if not is_batched:
            x = x[0]
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x, torch.stack(last_states)

    def _check_step_input(self, x: Tensor) -> None:
        check_shape(f"{class_name(self)}.step", "x", x, "(batch, input_size)", (None, self.input_size))

    def _run_step(self, x: Tensor, state: Tensor | None, reset: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Implements ``step``; ``options`` go to ``_step``."""
        name = class_name(self)
        if self.bidirectional:
            raise ValueError(f"{name}.step: a bidirectional layer needs the whole sequence")
        self._check_step_input(x)
        new_states = []
        states = self._split_states(state, "state", (x.shape[0],), ".step")
        if reset is not None:
            before = reset_state(f"{name}.step", None if state is None else torch.stack(states), reset, x, axis=1)  # type: ignore[arg-type]
            states = states if before is None else before.unbind(0)
        for layer, layer_state in enumerate(states):
            x, new_state = self._step(self._project(x, f"l{layer}"), layer_state, f"l{layer}", **options)
            new_states.append(new_state)
            if self._is_dropped(layer):
                x = F.dropout(x, self.dropout, self.training)
        return x, torch.stack(new_states)

    def extra_repr(self) -> str:
        words = [f"{self.input_size}, {self.hidden_size}"]
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        words += [f"{name}={getattr(self, name)}" for name, default in defaults.items() if getattr(self, name) != default]
        return ", ".join(words)
