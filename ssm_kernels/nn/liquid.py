r"""A layer of states that relax, each with its time constant, towards a target that the input sets.

.. math::
    \tau_t \frac{dh}{dt} = f_t - h, \qquad f_t = g(W_f x_t + b_f), \qquad
    \tau_t = \tau_{min} + \mathrm{softplus}(W_\tau x_t + b_\tau)

With :math:`x_t` held over a step of length :math:`\Delta_t`, the solution is exact:

.. math::
    h_t = f_t + (h_{t-1} - f_t)\, e^{-\Delta_t / \tau_t}

It is the liquid time-constant network of Hasani, Lechner, Amini, Rus and Grosu (arXiv 2006.04439) without the synapses between
its states: target and time constant read the input alone, which makes the recurrence linear in :math:`h` and a scan of it.
See ``docs/recurrences.md``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._dtypes import wide_dtype
from ..choices import LiquidActivation
from ..ops._arguments import check_dense
from ..ops._step_sizes import check_step_size
from ..ops.recurrences import liquid_step
from .checks import check_bools, check_choice, check_pair
from .common import mark_parameters
from .initialization import inverse_softplus, uniform_rows_
from .naming import class_name, names_layer
from .recurrent import RecurrentBase

__all__ = ["Liquid"]

# Where softplus underflows, dt / tau stays finite.
_TAU_MIN = 1e-3


def _raw_tau(log_tau: Tensor) -> Tensor:
    return inverse_softplus(log_tau.exp() - _TAU_MIN)


@names_layer
class Liquid(RecurrentBase):
    """Relaxation with input-dependent ("liquid") time constants, for samples at regular or irregular times.

    Constructor, shapes and calls match ``torch.nn.GRU``, plus a step length ``dt``.

    Parameters: ``weight_ih_l{k}`` (2 hidden_size, inputs of the layer), rows of the target before those of the time constant,
    and ``bias_ih_l{k}`` (2 hidden_size,). Without ``input_dependent_tau`` both have hidden_size rows, and ``raw_tau_l{k}``
    (hidden_size,), float32 (float64 in a float64 layer), is the argument of softplus. Parameters of the backward direction end
    in ``_reverse``.

    Args:
        input_size: channels of the input.
        hidden_size: channels of the state, and of the output for each direction.
        num_layers: layers; each reads the output of the previous one.
        bias: whether the projections have a bias; input-dependent time constants need it.
        batch_first: whether ``input`` and ``output`` are (batch, seqlen, channels) instead of (seqlen, batch, channels).
        dropout: probability that an output of a layer, except the last one, is dropped in training.
        bidirectional: whether each layer also runs backwards in time; the outputs of both directions are side by side.
        candidate_activation: activation of the target :math:`f`: ``"tanh"`` or ``None``.
        input_dependent_tau: whether the time constants depend on the input; else each channel has a constant one.
        tau_init: the range, in the unit of ``dt``, in which :math:`\\tau_{min} + \\mathrm{softplus}(b_\\tau)` is log-uniform at
            initialization; :math:`\\tau_{min}` is 0.001.
        device: where the parameters are made.
        dtype: dtype of the layer. States are float32 (float64 in a float64 layer).

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer = nn.Liquid(8, 16, batch_first=True)
        >>> dt = torch.rand(3, 100)  # the time since the sample before, (batch, seqlen)
        >>> output, h_n = layer(torch.randn(3, 100, 8), dt=dt)
        >>> output.shape, h_n.shape
        (torch.Size([3, 100, 16]), torch.Size([1, 3, 16]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        candidate_activation: LiquidActivation | None = "tanh",
        input_dependent_tau: bool = True,
        tau_init: tuple[float, float] = (1.0, 32.0),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_bools("Liquid", input_dependent_tau=input_dependent_tau)
        parts = 2 if input_dependent_tau else 1
        super().__init__(parts, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype)
        check_choice("Liquid", "candidate_activation", candidate_activation, (None, "tanh"))
        if input_dependent_tau and not bias:
            raise ValueError("Liquid: input-dependent time constants need bias=True")
        check_pair("Liquid", "tau_init", tau_init)
        if not _TAU_MIN < tau_init[0] <= tau_init[1] < math.inf:
            raise ValueError(f"Liquid: expected {_TAU_MIN} < tau_init[0] <= tau_init[1], both finite, got {tau_init}")
        self.candidate_activation, self.input_dependent_tau, self.tau_init = candidate_activation, input_dependent_tau, tau_init
        if not input_dependent_tau:
            wide = wide_dtype(self.weight_ih_l0.dtype)
            self._no_decay = tuple(f"raw_tau_{name}" for name in self._names())
            for name in self._no_decay:
                raw_tau = nn.Parameter(torch.empty(hidden_size, device=device, dtype=wide))
                mark_parameters("_no_weight_decay", raw_tau)
                self.register_parameter(name, raw_tau)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes like ``torch.nn.GRU``, except for the time constants, which are drawn from ``tau_init``."""
        super().reset_parameters()
        low, high = (math.log(tau) for tau in self.tau_init)
        for name in self._names():
            if self.input_dependent_tau:
                parameter, rows = getattr(self, f"bias_ih_{name}"), slice(self.hidden_size, None)
            else:
                parameter, rows = getattr(self, f"raw_tau_{name}"), slice(None)
            uniform_rows_(parameter, rows, low, high, _raw_tau, wide_dtype(parameter.dtype))

    @overload
    def forward(
        self,
        input: Tensor,
        hx: Tensor | None = None,
        *,
        dt: float | Tensor = 1.0,
        cu_seqlens: Tensor | None = None,
        reset: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        h_0: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: Tensor | None = None,
        *,
        dt: float | PackedSequence = 1.0,
        h_0: Tensor | None = None,
    ) -> tuple[PackedSequence, Tensor]: ...
    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        *,
        dt: float | Tensor | PackedSequence = 1.0,
        cu_seqlens: Tensor | None = None,
        reset: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        h_0: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Runs the layers over sequences.

        Args:
            input: (seqlen, batch, input_size); with ``batch_first`` (batch, seqlen, input_size); or one sequence, (seqlen,
                input_size); or a ``torch.nn.utils.rnn.PackedSequence`` of data (steps, input_size).
            hx: states before the first step, (num_layers * num_directions, batch, hidden_size), without batch for one
                sequence; zero if absent. Its dtype is that of ``h_n`` or of the layer; under autocast of float32 or narrower.
            dt: how long each sample is held, not negative: one number, or of the shape of ``input`` without its channels;
                with a ``PackedSequence`` a number, or one packed in the same way. A step of length 0 changes nothing. The layer
                does not check the values of tensors.
            cu_seqlens: (S + 1,), int32 or int64, for a batch of 1 with S sequences packed one after another along seqlen: where
                each begins and the last one ends. Each has its own states: ``hx`` and ``h_n`` have size S instead of batch.
                Not together with a ``PackedSequence``.
            reset: of the shape of ``input`` without its channels, or with one channel; bool, or of an integer or floating-point
                dtype. Where it is true, or not zero, a sequence starts anew at that step, from its states of ``hx`` or from
                zero. No direction carries a state over such a start. ``h_n`` has the states after the last step. Not together
                with a ``PackedSequence`` or ``cu_seqlens``.
            lengths: (batch,), a tensor of an integer dtype or a sequence of ints: how many steps of each row of a padded batch
                count, 0 to seqlen. The others are padding: what they hold is ignored, and the outputs there are zero. ``h_n``
                has the states after a row's last step that counts, and the direction ``_reverse`` begins at that step. Results
                are those of ``pack_padded_sequence`` and ``pad_packed_sequence``. Tensors on the CPU spare a wait for the
                device. Not together with a ``PackedSequence``, ``cu_seqlens`` or ``reset``.
            h_0: the older name of ``hx``; a FutureWarning.

        Returns:
            ``output``, the states of the last layer at every step, in the layout and dtype of ``input`` with num_directions *
            hidden_size channels, or a ``PackedSequence`` for one; ``h_n``, the states after the last step (for the direction
            ``_reverse`` after position 0), shaped as ``hx``, float32 (float64 in a float64 layer). Both are differentiable. For
            a ``PackedSequence`` the sequences of ``hx`` and ``h_n`` are in the order in which they were packed, as
            ``torch.nn.GRU`` has them.

        Raises:
            ValueError: a shape or a length is not as above, or ``dt`` is a number that is negative, NaN, or finite and beyond
                the range of the states' dtype.
            RuntimeError: a dtype is not as above.
            TypeError: an argument is not a tensor (``dt``: nor a number).

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, x = nn.Liquid(8, 16, batch_first=True), torch.randn(2, 10, 8)
            >>> output, h_n = layer(x, dt=0.5)  # a step length for all samples
            >>> output, h_n = layer(x, h_n, dt=torch.rand(2, 10))  # or one for each; continues
            >>> output.shape, h_n.shape
            (torch.Size([2, 10, 16]), torch.Size([1, 2, 16]))
        """
        hx = self._initial_state(hx, h_0)
        if isinstance(input, PackedSequence):
            order = self._packed_order(input, hx)
            if isinstance(dt, PackedSequence):
                self._check_dt(dt.data, input.data.shape[:-1])
                dt = order.to_sequences(dt.data).unsqueeze(0)[..., None]
            else:
                self._check_number(dt, "a number or a PackedSequence")
            return self._run_packed(input, hx, cu_seqlens, order, reset, lengths, dt=dt)
        self._check_input(input)
        if not isinstance(dt, Tensor):
            self._check_number(dt, "a number or a tensor")
        else:
            self._check_dt(dt, input.shape[:-1])
            dt = dt if input.dim() == 3 else dt[None]
            dt = (dt if self.batch_first or input.dim() == 2 else dt.transpose(0, 1))[..., None]
        if lengths is not None:
            return self._run_padded(input, hx, lengths, cu_seqlens, reset, dt=dt)
        return self._run(input, hx, cu_seqlens, reset, dt=dt)

    def step(
        self, x: Tensor, state: Tensor | None = None, *, dt: float | Tensor = 1.0, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs one time step, for decoding; not for bidirectional layers.

        Args:
            x: (batch, input_size).
            state: (num_layers, batch, hidden_size), an ``h_n`` or the result of the previous step; zero if absent. Its
                dtype is as for ``hx``.
            dt: how long ``x`` is held, not negative: one number, or (batch,).
            reset: (batch,) or (batch, 1), bool or of an integer or floating-point dtype: where it is true, or not zero, the
                row's states before the step are zero, whatever ``state`` holds.

        Returns:
            ``output``, (batch, hidden_size), and the new state, shaped as ``state``, float32 (float64 in a float64 layer).

        Raises:
            ValueError: a shape is not as above, ``dt`` is one that :meth:`forward` refuses, or the layers are
                bidirectional.
            RuntimeError: a dtype is not as above.
            TypeError: an argument is not a tensor (``dt``: nor a number).

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, state = nn.Liquid(8, 16), None
            >>> with torch.no_grad():
            ...     for dt in (1.0, 0.1, 3.0):
            ...         y, state = layer.step(torch.randn(2, 8), state, dt=dt)
            >>> y.shape, state.shape
            (torch.Size([2, 16]), torch.Size([1, 2, 16]))
        """
        self._check_step_input(x)
        if not isinstance(dt, Tensor):
            self._check_number(dt, "a number or a tensor")
        else:
            self._check_dt(dt, x.shape[:-1])
            dt = dt[..., None]
        return self._run_step(x, state, reset, dt=dt)

    def extra_repr(self) -> str:
        words = [super().extra_repr()]
        words += [] if self.candidate_activation == "tanh" else [f"candidate_activation={self.candidate_activation}"]
        words += [] if self.input_dependent_tau else ["input_dependent_tau=False"]
        return ", ".join(words)

    def _names(self) -> list[str]:
        return [f"l{layer}{suffix}" for layer in range(self.num_layers) for suffix in self._directions]

    def _check_number(self, dt: Any, expected: str) -> None:
        name = class_name(self)
        is_number = isinstance(dt, numbers.Real) and not isinstance(dt, bool)
        if not is_number:
            raise TypeError(f"{name}: expected dt to be {expected}, got {type(dt).__name__}")
        check_step_size(name, dt, wide_dtype(self.weight_ih_l0.dtype))

    def _check_dt(self, dt: Tensor, expected: torch.Size) -> None:
        name = class_name(self)
        check_dense(name, "dt", dt)
        if dt.shape != expected:
            raise ValueError(
                f"{name}: expected dt to be a number, or of the shape of the input without its channels = {list(expected)}, "
                f"got {list(dt.shape)}"
            )
        if dt.is_complex() or dt.dtype == torch.bool:
            raise RuntimeError(f"{name}: expected dt of a floating-point or integer dtype, got {dt.dtype}")

    def _relaxation(self, projected: Tensor, name: str, dt: float | Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
        """Returns target, time constant and step of a layer and direction."""
        if self.input_dependent_tau:
            target, raw_tau = projected.chunk(2, dim=-1)
        else:
            target, raw_tau = projected, getattr(self, f"raw_tau_{name}").to(wide_dtype(projected.dtype))
        if self.candidate_activation == "tanh":
            target = torch.tanh(target)
        dt = dt.to(wide_dtype(target.dtype)) if isinstance(dt, Tensor) else dt
        return target, F.softplus(raw_tau) + _TAU_MIN, dt

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
        target, tau, dt = self._relaxation(projected, name, options["dt"])
        scan = self.operators.liquid_scan
        return scan(target, tau, dt, h0, reverse=reverse, cu_seqlens=cu_seqlens, reset=reset, return_last_state=True)

    def _step(self, projected: Tensor, state: Tensor | None, name: str, **options: Any) -> tuple[Tensor, Tensor]:
        return liquid_step(*self._relaxation(projected, name, options["dt"]), state)
