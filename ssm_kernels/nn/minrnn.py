r"""minGRU and minLSTM: the GRU and the LSTM with gates that read the input alone, so that the recurrence is a linear scan.

For an input :math:`x_t` of a layer, with :math:`g` the candidate's activation (the identity, unless one is chosen):

.. math::
    \text{minGRU:}\quad & (k_t, c_t) = W x_t + b, \qquad z_t = \sigma(k_t), \qquad
        h_t = (1 - z_t)\, h_{t-1} + z_t\, g(c_t) \\
    \text{minLSTM:}\quad & (p_t, q_t, c_t) = W x_t + b, \qquad f_t = \sigma(p_t), \quad i_t = \sigma(q_t), \qquad
        h_t = \frac{f_t}{f_t + i_t}\, h_{t-1} + \frac{i_t}{f_t + i_t}\, g(c_t)

Source: Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, *Were RNNs All We Needed?* (arXiv 2410.01201), sections 3.1 and 3.2; its
log-space form has ``candidate_activation="g"``. See ``docs/recurrences.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..choices import CandidateActivation
from ..ops import recurrences
from .checks import check_choice
from .naming import class_name, names_layer
from .recurrent import RecurrentBase

__all__ = ["MinGRU", "MinLSTM"]


class _MinRNN(RecurrentBase):
    """Base class of minGRU and minLSTM."""

    _parts: int
    _recurrence: str  # without "_scan"

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
        candidate_activation: CandidateActivation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            self._parts, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype
        )
        check_choice(class_name(self), "candidate_activation", candidate_activation, (None, "g", "tanh"))
        self.candidate_activation = candidate_activation
        self.reset_parameters()

    @overload
    def forward(
        self,
        input: Tensor,
        hx: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        reset: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        h_0: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self, input: PackedSequence, hx: Tensor | None = None, *, h_0: Tensor | None = None
    ) -> tuple[PackedSequence, Tensor]: ...
    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        *,
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
            ValueError: a shape or a length is not as above.
            RuntimeError: a dtype is not as above.
            TypeError: an argument is not a tensor.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, x = nn.MinGRU(8, 16, batch_first=True), torch.randn(2, 10, 8)
            >>> reset = torch.zeros(2, 10, dtype=torch.bool)
            >>> reset[:, 4] = True  # a sequence begins at step 4
            >>> output, h_n = layer(x, reset=reset)
            >>> torch.allclose(output[:, 4:], layer(x[:, 4:])[0], atol=1e-5)
            True
        """
        hx = self._initial_state(hx, h_0)
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx, cu_seqlens, self._packed_order(input, hx), reset, lengths)
        if lengths is not None:
            return self._run_padded(input, hx, lengths, cu_seqlens, reset)
        return self._run(input, hx, cu_seqlens, reset)

    def step(self, x: Tensor, state: Tensor | None = None, *, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Runs one time step, for decoding; not for bidirectional layers.

        Args:
            x: (batch, input_size).
            state: (num_layers, batch, hidden_size), an ``h_n`` or the result of the previous step; zero if absent. Its
                dtype is as for ``hx``.
            reset: (batch,) or (batch, 1), bool or of an integer or floating-point dtype: where it is true, or not zero, the
                row's states before the step are zero, whatever ``state`` holds.

        Returns:
            ``output``, (batch, hidden_size), and the new state, shaped as ``state``, float32 (float64 in a float64 layer).

        Raises:
            ValueError: a shape is not as above, or the layers are bidirectional.
            RuntimeError: a dtype is not as above.
            TypeError: an argument is not a tensor.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, state = nn.MinGRU(8, 16), None
            >>> with torch.no_grad():
            ...     for token in range(3):
            ...         y, state = layer.step(torch.randn(2, 8), state)
            >>> y.shape, state.shape
            (torch.Size([2, 16]), torch.Size([1, 2, 16]))
        """
        return self._run_step(x, state, reset)

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
        results: tuple[Tensor, Tensor] = getattr(self.operators, f"{self._recurrence}_scan")(
            *projected.chunk(self._parts, dim=-1),
            h0,
            candidate_activation=self.candidate_activation,
            reverse=reverse,
            cu_seqlens=cu_seqlens,
            reset=reset,
            return_last_state=True,
        )
        return results

    def _step(self, projected: Tensor, state: Tensor | None, name: str, **options: Any) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = getattr(recurrences, f"{self._recurrence}_step")(
            *projected.chunk(self._parts, dim=-1), state, candidate_activation=self.candidate_activation
        )
        return results

    def extra_repr(self) -> str:
        activation = self.candidate_activation
        return super().extra_repr() + ("" if activation is None else f", candidate_activation={activation!r}")


@names_layer
class MinGRU(_MinRNN):
    """minGRU, with the constructor, the shapes and the calls of ``torch.nn.GRU``.

    Parameters: ``weight_ih_l{k}`` (2 hidden_size, inputs of the layer), rows of the gate before rows of the candidate, and
    ``bias_ih_l{k}`` (2 hidden_size,); parameters of the backward direction end in ``_reverse``. There is no ``weight_hh``.

    Args:
        input_size: channels of the input.
        hidden_size: channels of the state, and of the output for each direction.
        num_layers: layers; each reads the output of the previous one.
        bias: whether the projections have a bias.
        batch_first: whether ``input`` and ``output`` are (batch, seqlen, channels) instead of (seqlen, batch, channels).
        dropout: probability that an output of a layer, except the last one, is dropped in training.
        bidirectional: whether each layer also runs backwards in time; the outputs of both directions are side by side.
        candidate_activation: ``None``, ``"tanh"`` or ``"g"``, the paper's :math:`g(x) = x + 1/2` for :math:`x \\ge 0`, else
            :math:`\\sigma(x)`.
        device: where the parameters are made.
        dtype: dtype of the layer. States are float32 (float64 in a float64 layer).

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer = nn.MinGRU(8, 16, num_layers=2, batch_first=True)
        >>> output, h_n = layer(torch.randn(3, 100, 8))
        >>> output.shape, h_n.shape
        (torch.Size([3, 100, 16]), torch.Size([2, 3, 16]))
        >>> output, h_n = layer(torch.randn(3, 50, 8), h_n)  # continues
    """

    _parts, _recurrence = 2, "mingru"


@names_layer
class MinLSTM(_MinRNN):
    """minLSTM, with the constructor of ``torch.nn.LSTM`` and, having one state, the shapes and the calls of ``torch.nn.GRU``.

    Parameters: ``weight_ih_l{k}`` (3 hidden_size, inputs of the layer), rows of forget gate, input gate and candidate, and
    ``bias_ih_l{k}`` (3 hidden_size,); parameters of the backward direction end in ``_reverse``. There is no ``weight_hh``.

    Args:
        input_size: channels of the input.
        hidden_size: channels of the state, and of the output for each direction.
        num_layers: layers; each reads the output of the previous one.
        bias: whether the projections have a bias.
        batch_first: whether ``input`` and ``output`` are (batch, seqlen, channels) instead of (seqlen, batch, channels).
        dropout: probability that an output of a layer, except the last one, is dropped in training.
        bidirectional: whether each layer also runs backwards in time; the outputs of both directions are side by side.
        candidate_activation: ``None``, ``"tanh"`` or ``"g"``, the paper's :math:`g(x) = x + 1/2` for :math:`x \\ge 0`, else
            :math:`\\sigma(x)`.
        device: where the parameters are made.
        dtype: dtype of the layer. States are float32 (float64 in a float64 layer).

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer = nn.MinLSTM(8, 16, batch_first=True, bidirectional=True)
        >>> output, h_n = layer(torch.randn(3, 100, 8))
        >>> output.shape, h_n.shape
        (torch.Size([3, 100, 32]), torch.Size([2, 3, 16]))
    """

    _parts, _recurrence = 3, "minlstm"
