r"""The Mamba mixer: projections, a short causal convolution, the selective SSM and a gate.

For hidden states :math:`s_t` of ``d_model`` channels, with ``d_inner = expand * d_model``:

.. math::
    (v_t, z_t) &= W_{in} s_t \\
    x_t &= \mathrm{silu}(b + \textstyle\sum_{k=0}^{w-1} K_k \odot v_{t-w+1+k}), \qquad w = \mathrm{d\_conv} \\
    y_t &= \mathrm{SSM}(x)_t \cdot \mathrm{silu}(z_t) \\
    \mathrm{out}_t &= W_{out}\, y_t

SSM is the layer of ``selective_ssm.py``. Source: Gu and Dao, *Mamba* (arXiv 2312.00752), section 3.4 and figure 3.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .._discretizations import is_two_sample
from .._dtypes import wide_dtype
from ..choices import (
    DiscretizationName,
    RecomputeName,
    StepInitialization,
    TimeStepsScale,
    TwoSampleDiscretizationName,
)
from .aligned import Heads, Layout, align_parameters, aligned_linear, aligned_size, can_align, dtype_to_align, first_columns
from .checks import check_bools, check_dtype, check_int, check_optional_int, check_recompute
from .common import PLAIN_TENSORS, SequenceMixer, conv_parameters, expanded, is_plain_linear, short_convolution
from .initialization import linear
from .naming import name_for_operator, names_layer
from .selective_ssm import SelectiveBase

__all__ = ["Mamba"]

_mamba_conv = torch.ops.ssm_kernels._mamba_conv.default
_mamba_inner = torch.ops.ssm_kernels._mamba_inner.default


@names_layer
class Mamba(SelectiveBase, SequenceMixer):
    """The Mamba mixer, a causal map (batch, seqlen, d_model) -> (batch, seqlen, d_model), with a choice of discretization.

    Positional arguments, parameters (names, shapes, order), ``step``, ``allocate_inference_cache`` and ``inference_params``
    match ``mamba_ssm``'s ``Mamba``. Its checkpoints load here with ``strict=True``, and checkpoints with
    ``discretization="zoh"`` load there. With another discretization the ``state_dict`` also has
    ``discretization_name``, which ``load_state_dict`` compares: see :class:`.discretized.DiscretizedModule`.

    Parameters: ``in_proj.weight`` (2 d_inner, d_model), ``conv1d.weight`` (d_inner, 1, d_conv), ``conv1d.bias`` (d_inner,),
    ``x_proj.weight`` (dt_rank + 2 d_state, d_inner), ``dt_proj.weight`` (d_inner, dt_rank), ``dt_proj.bias`` (d_inner,),
    ``A_log`` (d_inner, d_state), ``D`` (d_inner,), ``out_proj.weight`` (d_model, d_inner); with ``bias`` also ``in_proj.bias``
    and ``out_proj.bias``.

    Args:
        d_model: channels of input and output.
        d_state: states per inner channel, at most 256.
        d_conv: width of the convolution.
        expand: ``d_inner = int(expand * d_model)``.
        dt_rank: rank of the projection to the step sizes; ``"auto"`` is ``ceil(d_model / 16)``.
        dt_min: smallest step size at initialization.
        dt_max: largest step size at initialization.
        dt_init: ``"random"`` (uniform) or ``"constant"`` weights of the projection to the step sizes.
        dt_scale: factor on the size of these weights.
        dt_init_floor: lower bound of the step sizes at initialization, applied after ``dt_min``.
        conv_bias: whether the convolution has a bias.
        bias: whether the in- and out-projections have one.
        use_fast_path: ignored, for compatibility: there is one path.
        layer_idx: key of this layer in the cache of ``inference_params``.
        device: where the parameters are made.
        dtype: dtype of the layer. ``A_log`` and ``D`` are float32 (float64 in a float64 layer).
        discretization: one of ``ssm_kernels.discretizations``. ``"euler"`` is stable only while ``delta * |A| <= 2``: start it
            with ``d_state * dt_max`` well below 2. Nothing keeps ``delta`` there in training. ``"gbt"`` takes ``alpha``, and
            ``"dirac"`` reads its input as impulses. Rules of ``ssm_kernels.two_sample_discretizations`` have an
            ``ssm_state`` of (batch, d_inner + 1, d_state + 1), with the last samples beside the state, as in
            :class:`SelectiveSSM`.
        alpha: of ``"gbt"`` and ``"gbt_two_sample"``: see :func:`ssm_kernels.selective_scan`. The attribute
            ``discretization`` is then ``"gbt(0.7)"``.
        time_steps_scale: which steps ``time_steps`` of :meth:`forward` scales: ``"both"`` or ``"A"``, as in
            :class:`SelectiveSSM`.
        recompute: what backward recomputes instead of keeping it: ``"none"``, ``"cheap"`` (about 3 % more time in training)
            or ``"all"``. Assignable. docs/layers.md has bytes and times of each. Rules that read two input samples, and
            calls with ``time_steps``, run by operators of their own, which keep what ``"none"`` keeps.

    Raises:
        ValueError: the discretization or another argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer = nn.Mamba(64)
        >>> layer(torch.randn(2, 100, 64)).shape  # (batch, seqlen, d_model)
        torch.Size([2, 100, 64])
        >>> layer = nn.Mamba(64, d_state=8, d_conv=7, discretization="zoh_exact")
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | Literal["auto"] = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: StepInitialization = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        discretization: DiscretizationName | TwoSampleDiscretizationName = "zoh",
        alpha: float | None = None,
        time_steps_scale: TimeStepsScale = "both",
        recompute: RecomputeName = "cheap",
    ) -> None:
        super().__init__()
        check_int("Mamba", "d_model", d_model)
        check_bools("Mamba", conv_bias=conv_bias, bias=bias, use_fast_path=use_fast_path)
        check_optional_int("Mamba", "layer_idx", layer_idx, low=0)
        check_dtype("Mamba", dtype)
        check_recompute("Mamba", recompute)
        d_inner = expanded("Mamba", expand, d_model)
        self.d_model, self.d_conv, self.expand = d_model, d_conv, expand
        self.use_fast_path, self.layer_idx, self.activation = use_fast_path, layer_idx, "silu"
        self.recompute = recompute
        # The order of mamba_ssm: optimizer states are saved, and random numbers drawn, in the order of creation.
        self.in_proj = linear(d_model, 2 * d_inner, bias, device, dtype)
        self.conv1d = short_convolution("Mamba", d_inner, d_conv, conv_bias, device, dtype)
        self._init_ssm(
            d_model,
            d_inner,
            d_state,
            dt_rank,
            discretization,
            alpha,
            time_steps_scale,
            dt_min,
            dt_max,
            dt_init,
            dt_scale,
            dt_init_floor,
            device,
            dtype,
        )
        self.out_proj = linear(d_inner, d_model, bias, device, dtype)

    def forward(
        self,
        hidden_states: Tensor,
        inference_params: Any = None,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        time_steps: Tensor | None = None,
    ) -> Tensor:
        """Mixes a sequence, or several packed one after another.

        Args:
            hidden_states: (batch, seqlen, d_model), any strides.
            inference_params: ``None``, or an object with ``seqlen_offset`` (steps done so far) and ``key_value_memory_dict``
                (a dict, in which this layer keeps its states under ``layer_idx``). With offset 0 the sequence starts anew;
                later calls continue it, by one step or by several: under ``torch.no_grad()`` one step is :meth:`step`. The
                states carry no gradient. With ``cu_seqlens`` the cache has a row for each packed sequence, so that a batch of
                prompts of unequal lengths goes through one call and is then decoded as (sequences, 1, d_model). Steps after
                ``cu_seqlens[-1]`` are then padding, which no sequence and no state sees, and ``seq_idx`` must have the same
                packing: the CPU checks this unless it compiles, CUDA does not. Not together with ``seq_idx`` alone.
            seq_idx: (batch, seqlen), int32 or int64: a new sequence begins wherever it changes. Steps with a negative number
                are padding, whose convolution is zero; what they hold must be finite.
            cu_seqlens: (sequences + 1,), int32 or int64, for a batch of 1: sequence ``i`` begins at ``cu_seqlens[i]`` and ends
                before ``cu_seqlens[i + 1]``. Together with ``seq_idx`` sequences begin where either says so.
            time_steps: measured time since the step before, (batch, seqlen), any floating-point dtype, which scales the step
                sizes: see ``time_steps_scale``. The convolution counts steps, not time. Absent: one.

        Packed sequences are independent, in the convolution and in the state.

        Returns:
            Shape of ``hidden_states``.

        Raises:
            ValueError: a shape is not as above, the layer has no ``layer_idx`` for ``inference_params``, or arguments are given
                together that exclude each other.
            TypeError: an argument is not a tensor, or ``inference_params`` lacks an attribute.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, x = nn.Mamba(32, discretization="zoh_exact", time_steps_scale="A"), torch.randn(2, 10, 32)
            >>> gaps = torch.rand(2, 10)  # the time since the event before
            >>> layer(x, time_steps=gaps).shape
            torch.Size([2, 10, 32])
        """
        self._check_packed_tensors(seq_idx, cu_seqlens)
        self._check_sequences("hidden_states", hidden_states)
        self._check_time_steps("Mamba", time_steps, "(batch, seqlen)", tuple(hidden_states.shape[:2]))
        measured = {} if time_steps is None else {"time_steps": time_steps}
        return self._mix_sequences(hidden_states, seq_idx, cu_seqlens, inference_params, **measured)

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor, *, time_steps: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mixes one time step, for decoding. Not differentiable.

        Args:
            hidden_states: (batch, 1, d_model).
            conv_state: the last ``d_conv`` inputs of the convolution, (batch, channels, d_conv), modified in place.
            ssm_state: the state of the recurrence, modified in place. ``allocate_inference_cache`` returns both states.
            time_steps: measured time since the step before, (batch, 1), as for :meth:`forward`.

        Returns:
            ``out``, (batch, 1, d_model), and the two states.

        Raises:
            ValueError: ``hidden_states`` has more than one time step, or a state another shape. Neither state is modified then.
            RuntimeError: a state is not of a floating-point dtype. Neither state is modified then.
            TypeError: an argument is not a tensor.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, x = nn.Mamba(32), torch.randn(2, 10, 32)
            >>> states = layer.allocate_inference_cache(batch_size=2, max_seqlen=10)
            >>> with torch.no_grad():
            ...     steps = [layer.step(x[:, t : t + 1], *states)[0] for t in range(10)]
            >>> torch.allclose(torch.cat(steps, dim=1), layer(x), atol=1e-5)
            True
        """
        self._check_one_step(hidden_states, conv_state, ssm_state)
        self._check_time_steps("Mamba.step", time_steps, "(batch, 1)", (hidden_states.shape[0], 1))
        of_rows = None if time_steps is None else time_steps[:, 0]
        with torch.no_grad():  # not as a decorator, which hides the signature from names_layer
            out = self._step(hidden_states[:, 0], conv_state, ssm_state, of_rows)
        return out[:, None], conv_state, ssm_state

    def _step(self, u: Tensor, conv_state: Tensor, ssm_state: Tensor, time_steps: Tensor | None = None) -> Tensor:
        x, z = self.in_proj(u).chunk(2, dim=-1)
        return self.out_proj(self._scan_step(self._convolve_step(x, conv_state), z, ssm_state, time_steps))

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, d_state={self.d_state}, dt_rank={self.dt_rank}, discretization={self.discretization!r}"

    def _mix(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        time_steps: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = self._dtype_to_align(hidden_states) if time_steps is None else None
        if dtype is not None:
            return self._mix_aligned(dtype, hidden_states, conv_state, ssm_state, seq_idx, cu_seqlens)
        xz, (weight, bias) = self.in_proj(hidden_states), conv_parameters("Mamba", self.conv1d)
        first_inputs = self._initial_state(conv_state, xz.dtype)
        if time_steps is None and self._takes_projections_in():
            initial_state = None if ssm_state is None else ssm_state.to(wide_dtype(xz.dtype))
            parameters = (self.x_proj.weight, self.dt_proj.weight, self.dt_proj.bias, self.A_log, self.D)
            projection = (self.out_proj.weight, self.out_proj.bias)
            states = (first_inputs, initial_state, seq_idx, cu_seqlens)
            options = (self.discretization, self.recompute, *name_for_operator(self))
            out, last_state = _mamba_inner(xz, weight, bias, *parameters, *projection, *states, *options)
            return out, xz, last_state
        if seq_idx is None and cu_seqlens is None:
            arguments = (xz, weight, bias, first_inputs)
            x, scanned, z = self.operators.mamba_conv(*arguments, *name_for_operator(self))
            y, last_state = self._scan(x, z, ssm_state, scanned, needs_last_state=False, time_steps=time_steps)
        else:
            inputs, z = xz.chunk(2, dim=-1)
            packed: dict[str, Any] = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
            x = self.operators.causal_conv1d(
                inputs, weight.squeeze(1), bias, activation="silu", initial_state=first_inputs, **packed
            )
            y, last_state = self._scan(x, z, ssm_state, needs_last_state=False, **packed, time_steps=time_steps)
        return self.out_proj(y), xz, last_state

    def _takes_projections_in(self) -> bool:
        """Whether one operator also computes ``x_proj``, ``dt_proj`` and ``out_proj``, so that it keeps less for backward.

        A compiler sees the products, and decides what to keep.
        """
        return (
            self.recompute != "none"
            and not is_two_sample(self.discretization)
            and self.operators.is_local
            and not torch.compiler.is_compiling()
            and all(is_plain_linear(module) for module in (self.x_proj, self.dt_proj, self.out_proj))
            and self.x_proj.bias is None
        )

    def _dtype_to_align(self, hidden_states: Tensor) -> torch.dtype | None:
        """The dtype of a call that takes copies of the parameters with aligned rows, or None."""
        dtype = dtype_to_align(hidden_states)
        if dtype is None or not self.operators.is_local or self.x_proj.bias is not None:
            return None
        if is_two_sample(self.discretization):
            return None
        if all(size == aligned_size(size, dtype) for size in (self.d_inner, self.d_model, self.dt_rank)):
            return None
        is_plain = type(self.A_log) in PLAIN_TENSORS and type(self.D) in PLAIN_TENSORS
        linears = (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)
        return dtype if is_plain and can_align(hidden_states, *linears) else None

    def _mix_aligned(
        self,
        dtype: torch.dtype,
        hidden_states: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``_mix``, with zeros behind the channels, and behind the columns of dt, up to the next multiple of a vector."""
        rank, states = self.dt_rank, self.d_state
        columns, channels, ranks = (aligned_size(size, dtype) for size in (self.d_model, self.d_inner, rank))
        if (columns, channels) == (self.d_model, self.d_inner):
            xz = self.in_proj(hidden_states)
        else:
            xz = aligned_linear(hidden_states, self.in_proj, dtype, Heads(2, self.d_inner, channels))
        weight, bias = conv_parameters("Mamba", self.conv1d)
        projections = (self.x_proj.weight, self.dt_proj.weight, self.dt_proj.bias)
        parameters = align_parameters(
            (weight, bias, *projections, self.A_log, self.D, self.out_proj.weight, self.out_proj.bias),
            (
                Layout((channels, *weight.shape[1:])),
                Layout((channels,)),
                Layout((ranks + 2 * states, channels), split=rank, start=ranks),
                Layout((channels, ranks)),
                Layout((channels,)),
                Layout((channels, states)),
                Layout((channels,)),
                Layout((columns, channels)),
                Layout((columns,)),
            ),
        )
        padding = (0, 0, 0, channels - self.d_inner)
        first_inputs = self._initial_state(conv_state, dtype)
        first_inputs = None if first_inputs is None else F.pad(first_inputs, padding)
        initial_state = None if ssm_state is None else F.pad(ssm_state.to(wide_dtype(dtype)), padding)
        options = (self.discretization, self.recompute, *name_for_operator(self))
        out, last_state = _mamba_inner(xz, *parameters, first_inputs, initial_state, seq_idx, cu_seqlens, *options)
        return first_columns(out, self.d_model), xz, last_state[:, : self.d_inner]

    def _conv_channels(self) -> int:
        return self.d_inner

    def _conv_inputs(self, projected: Tensor) -> Tensor:
        return projected[..., : self.d_inner]
