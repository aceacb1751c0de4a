r"""A minGRU or minLSTM as a mixer: a short convolution before it, a gate and a projection after it.

For hidden states :math:`s_t` of ``d_model`` channels, with ``d_inner = expand * d_model``:

.. math::
    x_t &= \mathrm{silu}(b + \textstyle\sum_{k=0}^{w-1} K_k \odot s_{t-w+1+k}), \qquad w = \mathrm{d\_conv} \\
    h_t &= \mathrm{RNN}(x)_t \\
    \mathrm{out}_t &= W_{out}\, (h_t \odot \mathrm{silu}(W_{gate} s_t + b_{gate}))

RNN is a layer of ``nn/minrnn.py`` from ``d_model`` to ``d_inner`` channels. Source of the convolution before it: Feng et al.,
*Were RNNs All We Needed?* (arXiv 2410.01201), appendix on language modelling; of the gate: Gu and Dao, *Mamba*
(arXiv 2312.00752), section 3.4.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import wide_dtype
from ..choices import CandidateActivation, RecurrenceName
from ..nn.checks import check_bools, check_choice, check_dtype, check_int, check_optional_int
from ..nn.common import PackedMixer, expanded, short_convolution
from ..nn.initialization import initialized, linear, uniform_rows_
from ..nn.minrnn import MinGRU, MinLSTM
from ..nn.naming import class_name, names_layer
from ..nn.recurrent import RecurrentBase

__all__ = ["RecurrentMixer"]

_LAYERS = {"MinGRU": MinGRU, "MinLSTM": MinLSTM}


def _draw_input_gate(rnn: RecurrentBase) -> None:
    # In both layers the last part of the bias is the candidate's, and the part before it this gate's.
    uniform_rows_(rnn.get_parameter("bias_ih_l0"), slice(-2 * rnn.hidden_size, -rnn.hidden_size), -4, 0)


def _reset_rnn(rnn: RecurrentBase) -> None:
    type(rnn).reset_parameters(rnn)
    _draw_input_gate(rnn)


@names_layer
class RecurrentMixer(PackedMixer):
    """A causal map (batch, seqlen, d_model) -> (batch, seqlen, d_model) around a minGRU or minLSTM, called as ``nn.Mamba`` is.

    Parameters, with parts = 2 for a minGRU and 3 for a minLSTM: ``conv1d.weight`` (d_model, 1, d_conv), ``conv1d.bias``
    (d_model,), ``rnn.weight_ih_l0`` (parts d_inner, d_model), ``rnn.bias_ih_l0`` (parts d_inner,), ``gate_proj.weight``
    (d_inner, d_model), ``out_proj.weight`` (d_model, d_inner); with ``bias`` also ``gate_proj.bias`` and ``out_proj.bias``.

    The bias of the gate that lets the candidate in is uniform in [-4, 0] at initialization, so that states last two to about
    fifty steps; with biases around zero they would last about two.

    Args:
        d_model: channels of input and output.
        rnn: ``"MinGRU"`` or ``"MinLSTM"``.
        d_conv: width of the convolution.
        expand: ``d_inner = int(expand * d_model)``.
        candidate_activation: see :class:`ssm_kernels.nn.MinGRU`.
        conv_bias: whether the convolution has a bias.
        bias: whether ``gate_proj`` and ``out_proj`` have one.
        layer_idx: key of this layer in the cache of ``inference_params``.
        device: where the parameters are made.
        dtype: dtype of the layer. States are float32 (float64 in a float64 layer).

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels.models import RecurrentMixer
        >>> RecurrentMixer(64, rnn="MinLSTM")(torch.randn(2, 100, 64)).shape  # (batch, seqlen, d_model)
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        d_model: int,
        rnn: RecurrenceName = "MinGRU",
        d_conv: int = 4,
        expand: float = 2,
        candidate_activation: CandidateActivation | None = None,
        conv_bias: bool = True,
        bias: bool = False,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = class_name(self)
        check_int(name, "d_model", d_model)
        check_choice(name, "rnn", rnn, [*_LAYERS])
        check_bools(name, conv_bias=conv_bias, bias=bias)
        check_optional_int(name, "layer_idx", layer_idx, low=0)
        check_dtype(name, dtype)
        self.d_model, self.d_conv, self.expand, self.layer_idx = d_model, d_conv, expand, layer_idx
        self.d_inner = expanded(name, expand, d_model)
        self.conv1d = short_convolution(name, d_model, d_conv, conv_bias, device, dtype)
        layer = _LAYERS[rnn](
            d_model, self.d_inner, batch_first=True, candidate_activation=candidate_activation, device=device, dtype=dtype
        )
        self.rnn = initialized(layer, _reset_rnn)
        self.gate_proj = linear(d_model, self.d_inner, bias, device, dtype)
        self.out_proj = linear(self.d_inner, d_model, bias, device, dtype)
        _draw_input_gate(self.rnn)

    def forward(self, hidden_states: Tensor, inference_params: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mixes a sequence, or several packed one after another.

        Args:
            hidden_states: (batch, seqlen, d_model), any strides.
            inference_params: as in :class:`ssm_kernels.nn.Mamba`: with ``cu_seqlens`` the cache has a row for each packed
                sequence, and steps after ``cu_seqlens[-1]`` are padding.
            cu_seqlens: (sequences + 1,), int32 or int64, for a batch of 1: sequence ``i`` begins at ``cu_seqlens[i]`` and ends
                before ``cu_seqlens[i + 1]``. The sequences are independent, in the convolution and in the state.

        Returns:
            (batch, seqlen, d_model).

        Raises:
            ValueError: a shape is not as above, or the layer has no ``layer_idx`` for ``inference_params``.
            TypeError: an argument is not a tensor, or ``inference_params`` lacks an attribute.
        """
        self._check_packed_tensors(None, cu_seqlens)
        self._check_sequences("hidden_states", hidden_states)
        return self._mix_sequences(hidden_states, None, cu_seqlens, inference_params)

    def _step(self, u: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        h, h_n = self.rnn.step(self._convolve_step(u, conv_state), self._as_hx(ssm_state))
        ssm_state.copy_(h_n[0])
        return self._finish(h, u)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, d_inner={self.d_inner}, d_conv={self.d_conv}"

    def _mix(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = self._conv_parameters()
        x = self.operators.causal_conv1d(
            hidden_states,
            weight,
            bias,
            activation="silu",
            cu_seqlens=cu_seqlens,
            initial_state=self._initial_state(conv_state, hidden_states.dtype),
        )
        h, h_n = self.rnn(x, None if ssm_state is None else self._as_hx(ssm_state), cu_seqlens=cu_seqlens)
        return self._finish(h, hidden_states), hidden_states, h_n[0]

    def _as_hx(self, ssm_state: Tensor) -> Tensor:
        """A cached state, of any floating-point dtype, as the recurrence takes it."""
        return ssm_state[None].to(wide_dtype(self.rnn.weight_ih_l0.dtype))

    def _finish(self, h: Tensor, hidden_states: Tensor) -> Tensor:
        return self.out_proj(h * F.silu(self.gate_proj(hidden_states)))

    _state_axes = "(batch, d_inner)"

    def _state_shape(self) -> tuple[int, ...]:
        return (self.d_inner,)
