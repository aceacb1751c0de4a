r"""The Mamba-2 mixer: one projection to all inputs, a short causal convolution, the state-space dual form, a gated norm.

For hidden states :math:`u_t` of ``d_model`` channels and heads :math:`h` of ``headdim`` channels:

.. math::
    (z_t, v_t, \delta_t) &= W_{in} u_t, \qquad
    (x_t, B_t, C_t) = \mathrm{silu}(b + \textstyle\sum_{k=0}^{w-1} K_k \odot v_{t-w+1+k}), \qquad w = \mathrm{d\_conv} \\
    \Delta_{t,h} &= \mathrm{clamp}(\mathrm{softplus}(\delta_{t,h} + b_h), \mathrm{dt\_limit}), \qquad A_h = -e^{A_{\log,h}} \\
    S_{t,h} &= e^{\Delta_{t,h} A_h}\, S_{t-1,h} + \Delta_{t,h}\, k(\Delta_{t,h} A_h)\, x_{t,h} B_t^\top, \qquad
    y_{t,h} = S_{t,h} C_t + D_h x_{t,h} \\
    \mathrm{out}_t &= W_{out}\, \mathrm{norm}(y_t \cdot \mathrm{silu}(z_t))

Source: Dao and Gu, *Transformers are SSMs* (arXiv 2405.21060), sections 7 and 8. The discretization chooses :math:`k`; see
:func:`ssm_kernels.ssd_chunk_scan`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .._discretizations import is_two_sample
from .._dtypes import readable, wide_dtype
from .._scan_state import ScanState
from ..choices import (
    ConvActivation,
    ExponentialDiscretizationName,
    ExponentialTwoSampleDiscretizationName,
    RecomputeName,
)
from ..ops import selective_state_update
from ..ops.ssd import ssd_chunk_scan
from .aligned import (
    can_align,
    first_columns,
)
from .checks import (
    check_bools,
    check_discretization,
    check_dtype,
    check_int,
    check_not_negative,
    check_optional_int,
    check_pair,
    check_recompute,
    check_step_sizes,
    check_tensor,
)
from .common import (
    conv_parameters,
    expanded,
    is_plain_linear,
    keeps_less,
    mark_parameters,
    short_convolution,
    update_state,
)
from .discretized import DiscretizedModule
from .gated_rms_norm import GatedRMSNorm
from .initialization import init_dt_bias, linear, uniform_
from .mamba2_projections import Mamba2Projections
from .naming import name_for_operator, names_layer
from .two_samples import KeepsSamples
from .weight_decay import own_no_decay

__all__ = ["Mamba2"]

_RULES = (*get_args(ExponentialDiscretizationName), *get_args(ExponentialTwoSampleDiscretizationName))

_mamba2_mixer = torch.ops.ssm_kernels._mamba2_mixer.default
_mamba2_mixer_projected = torch.ops.ssm_kernels._mamba2_mixer_projected.default


@names_layer
class Mamba2(KeepsSamples, DiscretizedModule, Mamba2Projections):
    """The Mamba-2 mixer, a causal map (batch, seqlen, d_model) -> (batch, seqlen, d_model).

    Positional arguments, parameters (names, shapes, order), ``forward``, ``step``, ``allocate_inference_cache`` and
    ``inference_params`` match ``mamba_ssm``'s ``Mamba2``. Its checkpoints load here with ``strict=True``, and checkpoints with
    ``discretization="zoh"`` load there. With another discretization the ``state_dict``
    also has ``discretization_name``, which ``load_state_dict`` compares: see :class:`.discretized.DiscretizedModule`.

    With ``d_inner = expand * d_model``, ``nheads = d_ssm / headdim`` and ``d_xBC = d_ssm + 2 ngroups d_state``, parameters:
    ``dt_bias`` and ``A_log`` (nheads,), ``D`` (nheads,) or, with ``D_has_hdim``, (d_ssm,), ``in_proj.weight``
    (2 d_inner + 2 ngroups d_state + nheads, d_model), ``conv1d.weight`` (d_xBC, 1, d_conv), ``conv1d.bias`` (d_xBC,),
    ``norm.weight`` (d_ssm,), ``out_proj.weight`` (d_model, d_inner); with ``bias`` also ``in_proj.bias`` and ``out_proj.bias``.

    Args:
        d_model: channels of input and output.
        d_state: states per channel, at most 256.
        d_conv: width of the convolution.
        conv_init: the convolution's weights are uniform in [-conv_init, conv_init] at initialization; ``None`` is
            ``torch.nn.Conv1d``'s own.
        expand: ``d_inner = expand * d_model``.
        headdim: channels per head, at most 256.
        d_ssm: channels that go through the SSM; the other ``d_inner - d_ssm`` go through a gated MLP (SwiGLU) beside it.
            ``None`` is all of them.
        ngroups: groups of heads that share B and C, and of channels that are normalized together.
        A_init_range: ``-A`` is uniform in this range at initialization.
        D_has_hdim: whether D is a number for each channel, not for each head.
        rmsnorm: whether there is a norm; without it, ``out_proj`` reads ``y * silu(z)``.
        norm_before_gate: normalize y and then apply the gate, instead of normalizing the gated y.
        dt_min: smallest step size at initialization.
        dt_max: largest step size at initialization.
        dt_init_floor: lower bound of the step sizes at initialization, applied after ``dt_min``.
        dt_limit: the step sizes are clamped to this range, in training and in decoding.
        bias: whether the in- and out-projections have one.
        conv_bias: whether the convolution has one.
        chunk_size: a hint for the scan; ``None`` leaves the choice to it.
        use_mem_eff_path: ignored, for compatibility: there is one path.
        layer_idx: key of this layer in the cache of ``inference_params``.
        process_group: must be ``None``; it keeps the order of arguments. :class:`ssm_kernels.distributed.TensorParallel` shares
            a layer over ranks.
        sequence_parallel: ignored.
        device: where the parameters are made.
        dtype: dtype of the layer. ``dt_bias``, ``A_log`` and ``D`` are float32 (float64 in a float64 layer).
        discretization: one that :func:`ssm_kernels.ssd_chunk_scan` takes. With ``"foh_ramp"`` and ``"exp_trapezoidal"``, which
            read two input samples a step, operators of their own take the place of the one between the projections, and
            ``recompute`` changes nothing. The state of :meth:`step` is then (batch, nheads, headdim + 1, d_state + 1), with the
            last samples, and a sequence begins with a sample of zero. ``"exp_trapezoidal"`` has a parameter ``lam_logit``,
            (nheads,), the logit of the current sample's weight, 0 at initialization.
        recompute: what backward recomputes instead of keeping it: ``"none"``, ``"cheap"`` (up to 3 % more time in training)
            or ``"all"``. Assignable. docs/layers.md has bytes and times of each.

    Raises:
        ValueError: an argument is not as above, or not one that :func:`ssm_kernels.ssd_chunk_scan` takes.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer = nn.Mamba2(64, headdim=16, d_state=32)
        >>> layer(torch.randn(2, 100, 64)).shape  # (batch, seqlen, d_model)
        torch.Size([2, 100, 64])
        >>> cu_seqlens = torch.tensor([0, 30, 100], dtype=torch.int32)  # two packed sequences
        >>> layer(torch.randn(1, 100, 64), cu_seqlens=cu_seqlens).shape
        torch.Size([1, 100, 64])
    """

    _no_decay: tuple[str, ...] = ("dt_bias", "A_log", "D")

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int | None = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        discretization: ExponentialDiscretizationName | ExponentialTwoSampleDiscretizationName = "zoh",
        recompute: RecomputeName = "cheap",
    ) -> None:
        super().__init__()
        for name, size in (("d_model", d_model), ("ngroups", ngroups)):
            check_int("Mamba2", name, size)
        for name, size in (("d_state", d_state), ("headdim", headdim)):
            check_int("Mamba2", name, size, high=256)
        for name, value in (("d_ssm", d_ssm), ("chunk_size", chunk_size)):
            check_optional_int("Mamba2", name, value)
        check_optional_int("Mamba2", "layer_idx", layer_idx, low=0)
        if conv_init is not None:
            check_not_negative("Mamba2", "conv_init", conv_init)
        check_bools(
            "Mamba2",
            D_has_hdim=D_has_hdim,
            rmsnorm=rmsnorm,
            norm_before_gate=norm_before_gate,
            bias=bias,
            conv_bias=conv_bias,
            use_mem_eff_path=use_mem_eff_path,
            sequence_parallel=sequence_parallel,
        )
        check_pair("Mamba2", "A_init_range", A_init_range)
        check_pair("Mamba2", "dt_limit", dt_limit)
        check_step_sizes("Mamba2", dt_min, dt_max, dt_init_floor)
        check_discretization("Mamba2", discretization, _RULES)
        check_recompute("Mamba2", recompute)
        check_dtype("Mamba2", dtype)
        self.d_model, self.d_state, self.d_conv, self.conv_init = d_model, d_state, d_conv, conv_init
        self.expand, self.d_inner = expand, expanded("Mamba2", expand, d_model)
        self.headdim, self.ngroups = headdim, ngroups
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        self.A_init_range, self.D_has_hdim, self.rmsnorm, self.norm_before_gate = (
            A_init_range,
            D_has_hdim,
            rmsnorm,
            norm_before_gate,
        )
        self.dt_min, self.dt_max, self.dt_init_floor, self.dt_limit = dt_min, dt_max, dt_init_floor, dt_limit
        self.chunk_size, self.use_mem_eff_path, self.layer_idx = chunk_size, use_mem_eff_path, layer_idx
        self.discretization: ExponentialDiscretizationName | ExponentialTwoSampleDiscretizationName = discretization
        self.recompute = recompute
        self.activation: ConvActivation | None = "silu"
        if process_group is not None:
            raise ValueError(
                f"Mamba2: expected process_group None, got {type(process_group).__name__}: "
                "ssm_kernels.distributed.TensorParallel shares a layer over ranks"
            )
        if not 0 < self.d_ssm <= self.d_inner:
            raise ValueError(f"Mamba2: expected d_ssm from 1 to d_inner = {self.d_inner}, got {self.d_ssm}")
        if self.d_ssm % headdim:
            raise ValueError(f"Mamba2: expected a headdim that divides d_ssm = {self.d_ssm}, got {headdim}")
        if not 0 < A_init_range[0] <= A_init_range[1] < math.inf:
            raise ValueError(f"Mamba2: expected A_init_range with 0 < low <= high, got {tuple(A_init_range)}")
        if not dt_limit[0] <= dt_limit[1]:
            raise ValueError(f"Mamba2: expected dt_limit = (min, max) with min <= max, got {tuple(dt_limit)}")
        self.nheads = self.d_ssm // headdim
        self._check_scan()

        d_xBC = self.d_ssm + 2 * ngroups * d_state
        # The order of mamba_ssm: optimizer states are saved, and random numbers drawn, in the order of creation.
        d_in_proj = 2 * self.d_inner + 2 * ngroups * d_state + self.nheads
        self.in_proj = linear(d_model, d_in_proj, bias, device, dtype)
        self.conv1d = short_convolution("Mamba2", d_xBC, d_conv, conv_bias, device, dtype, conv_init)
        wide = wide_dtype(self.in_proj.weight.dtype)
        self.dt_bias = nn.Parameter(torch.empty(self.nheads, device=device, dtype=wide))
        self.A_log = nn.Parameter(torch.empty(self.nheads, device=device, dtype=wide))
        self.D = nn.Parameter(torch.empty(self.d_ssm if D_has_hdim else self.nheads, device=device, dtype=wide))
        if discretization == "exp_trapezoidal":
            self.lam_logit = nn.Parameter(torch.empty(self.nheads, device=device, dtype=wide))
            self._no_decay = (*self._no_decay, "lam_logit")
        if is_two_sample(discretization):
            self._state_axes = "(batch, nheads, headdim + 1, d_state + 1)"
        # A subclass may name parameters that it makes later.
        mark_parameters("_no_weight_decay", *(parameter for _, parameter in own_no_decay(self)))
        self._register_discretization(device)
        if conv_init is not None:
            uniform_(self.conv1d.weight, -conv_init, conv_init)
        self.reset_parameters()
        if rmsnorm:
            self.norm = GatedRMSNorm(self.d_ssm, ngroups, norm_before_gate, device=device, dtype=dtype)
        self.out_proj = linear(self.d_inner, d_model, bias, device, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes ``dt_bias``, ``A_log``, ``D`` and ``lam_logit``; the submodules have their own ``reset_parameters``."""
        init_dt_bias(self.dt_bias, self.dt_min, self.dt_max, self.dt_init_floor)
        uniform_(self.A_log, *self.A_init_range).log_()
        self.D.fill_(1)
        if self.discretization == "exp_trapezoidal":
            self.lam_logit.zero_()
        self._reset_discretization()

    def forward(
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Mixes a sequence, or several packed one after another.

        Args:
            u: (batch, seqlen, d_model), any strides; (batch * seqlen, d_model) if ``seqlen`` is given.
            seqlen: steps of each row of the batch, where ``u`` is flattened. Not together with ``cu_seqlens``.
            seq_idx: (batch, seqlen), int32 or int64: a new sequence begins wherever it changes. Steps with a negative number
                are padding, whose convolution is zero; what they hold must be finite.
            cu_seqlens: (sequences + 1,), int32 or int64, for a batch of 1: sequence ``i`` begins at ``cu_seqlens[i]`` and ends
                before ``cu_seqlens[i + 1]``. Together with ``seq_idx`` sequences begin where either says so.
            inference_params: ``None``, or an object with ``seqlen_offset`` (steps done so far) and ``key_value_memory_dict``
                (a dict, in which this layer keeps its states under ``layer_idx``). With offset 0 the sequence starts anew;
                later calls continue it, by one step or by several: under ``torch.no_grad()`` one step is :meth:`step`. The
                states carry no gradient. With ``cu_seqlens`` the cache has a row for each packed sequence, so that a batch of
                prompts of unequal lengths goes through one call and is then decoded as (sequences, 1, d_model). Steps after
                ``cu_seqlens[-1]`` are then padding, which no sequence and no state sees, and ``seq_idx`` must have the same
                packing: the CPU checks this unless it compiles, CUDA does not. Not together with ``seq_idx`` alone.

        Packed sequences are independent, in the convolution and in the state.

        Returns:
            Shape of ``u``.

        Raises:
            ValueError: a shape is not as above, ``u`` is not a multiple of ``seqlen`` steps, or arguments are given together
                that exclude each other.
            TypeError: an argument is not a tensor, ``seqlen`` is not an int, or ``inference_params`` lacks an attribute.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, x = nn.Mamba2(32, headdim=16), torch.randn(1, 10, 32)
            >>> seq_idx = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]], dtype=torch.int32)  # two packed sequences
            >>> packed = layer(x, seq_idx=seq_idx)
            >>> torch.allclose(packed[:, 4:], layer(x[:, 4:]), atol=1e-5)
            True
        """
        self._check_packed_tensors(seq_idx, cu_seqlens)
        if seqlen is not None:
            if cu_seqlens is not None:
                raise ValueError("Mamba2: expected seqlen or cu_seqlens, got both: packed sequences are a batch of 1")
            return self.forward(self._unflatten(u, seqlen), None, seq_idx, None, inference_params).flatten(0, 1)
        self._check_sequences("u", u)
        return self._mix_sequences(u, seq_idx, cu_seqlens, inference_params)

    def _step(self, u: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        mlp, mixed = self._project(u)
        z, xBC, dt = mixed.split([self.d_ssm, self._conv_channels(), self.nheads], dim=-1)
        x, B, C = self._split_heads(self._convolve_step(xBC, conv_state))
        D = self._D_of_heads() if self.D_has_hdim else self.D[:, None]

        def update(state: Tensor, **samples: Any) -> Tensor:
            return selective_state_update(
                state,
                x,
                dt[..., None].expand(x.shape),
                readable(self.A_log, x.dtype)[:, None, None].expand(-1, self.headdim, self.d_state),
                B,
                C,
                readable(D, x.dtype).expand(-1, self.headdim),
                None if self.rmsnorm else z.unflatten(-1, (self.nheads, self.headdim)),
                readable(self.dt_bias, x.dtype)[:, None].expand(-1, self.headdim),
                dt_softplus=True,
                dt_limit=self.dt_limit,
                discretization=self.discretization,
                A_is_log=True,
                **samples,
            )

        if is_two_sample(self.discretization):
            y = self._step_two_samples(ssm_state, x.dtype, functools.partial(update, **self._weights(x.dtype, 1)))
        else:
            y = update_state(ssm_state, x.dtype, update)
        y = y.flatten(-2)
        if self.rmsnorm:
            y = self.norm(y, z)
        return self._finish(y, mlp)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_state={self.d_state}, nheads={self.nheads}, headdim={self.headdim}, "
            f"ngroups={self.ngroups}, discretization={self.discretization!r}"
        )

    def _mix(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_two_sample(self.discretization):
            return self._mix_two_samples(hidden_states, conv_state, ssm_state, seq_idx, cu_seqlens)
        aligned_dtype = self._dtype_to_align(hidden_states)
        if aligned_dtype is not None:
            headdim = self._aligned_headdim(aligned_dtype, hidden_states)
            if headdim != self.headdim:
                return self._mix_in_aligned_heads(
                    aligned_dtype, headdim, hidden_states, conv_state, ssm_state, seq_idx, cu_seqlens
                )
        mlp, mixed = self._project(hidden_states, aligned_dtype)
        if aligned_dtype is not None and not can_align(hidden_states, self.out_proj):
            aligned_dtype = None
        mixer = self._mixer()
        is_projected = False
        own: tuple[Any, ...] = ()  # arguments of the operator that this layer calls itself
        if mixer is _mamba2_mixer:
            own = name_for_operator(self)
            is_projected = mlp is None and keeps_less(self) and is_plain_linear(self.out_proj)
            if is_projected or (self.recompute == "all" and torch.is_grad_enabled()):
                mixer = _mamba2_mixer_projected
                weights: Sequence[Tensor | None] = (None, None)
                if is_projected:
                    weights = self._weights_of_out_proj(aligned_dtype)
                own = (*weights, self.recompute == "all", *own)
        y, _, final_states = mixer(
            mixed,
            *conv_parameters("Mamba2", self.conv1d),
            self.A_log,
            self._D_of_heads(),
            self.dt_bias,
            self.norm.weight if self.rmsnorm else None,
            self._initial_state(conv_state, mixed.dtype),
            None if ssm_state is None else ssm_state.to(wide_dtype(mixed.dtype)),
            seq_idx,
            cu_seqlens,
            *self._mixer_options(self.headdim),
            *own,
        )
        out = first_columns(y, self.d_model) if is_projected else self._finish(y, mlp, aligned_dtype)
        return out, mixed, final_states

    def _mix_two_samples(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Any]:
        """As ``_mix``. The final states have the last samples, as :meth:`_views_of` finds them; several ranks return none."""
        mlp, mixed = self._project(hidden_states)
        z, inputs, dt = mixed.split([self.d_ssm, self._conv_channels(), self.nheads], dim=-1)
        weight, bias = conv_parameters("Mamba2", self.conv1d)
        convolved = self.operators.causal_conv1d(
            inputs,
            weight.squeeze(1),
            bias,
            activation="silu",
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            initial_state=self._initial_state(conv_state, mixed.dtype),
        )
        x, B, C = self._split_heads(convolved)
        wide = wide_dtype(x.dtype)
        first = None if ssm_state is None else self._parts_of(ssm_state, x.dtype)
        returns = self.operators.is_local
        results = self.operators.ssd_chunk_scan(
            *(x, dt, -torch.exp(self.A_log.to(wide)), B, C),
            chunk_size=self.chunk_size,
            D=self._D_of_heads().to(wide),
            z=None if self.rmsnorm else z.unflatten(-1, (self.nheads, self.headdim)),
            dt_bias=self.dt_bias.to(wide),
            dt_softplus=True,
            dt_limit=self.dt_limit,
            initial_states=None if first is None else first.state,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_final_states=returns,
            discretization=self.discretization,
            **self._weights(x.dtype, 0),
            previous="zero" if first is None else (first.u, cast(Tensor, first.B)),
        )
        y, last = results if returns else (results, None)
        y = y.flatten(-2)
        if self.rmsnorm:
            y = self.norm(y, z)
        if last is None:
            return self._finish(y, mlp), mixed, None
        of_rows = torch.cat([last.state, last.u.to(wide)[..., None]], -1)
        of_groups = F.pad(cast(Tensor, last.B).to(wide), (0, 1, 0, self.nheads - self.ngroups))
        return self._finish(y, mlp), mixed, torch.cat([of_rows, of_groups[:, :, None]], 2)

    def _views_of(self, state: Tensor) -> ScanState:
        """A head has its sample of x in a further column. The further row of head ``g`` has the sample of B of group ``g``."""
        return ScanState(state[:, :, :-1, :-1], state[:, :, :-1, -1], state[:, : self.ngroups, -1, :-1])

    @staticmethod
    def _unflatten(u: Tensor, seqlen: int) -> Tensor:
        """The rows of a flattened batch, (batch, seqlen, d_model)."""
        check_tensor("Mamba2", "u", u)
        if u.dim() != 2:
            raise ValueError(f"Mamba2: expected u of shape (batch * seqlen, d_model) with seqlen, got {list(u.shape)}")
        check_int("Mamba2", "seqlen", seqlen)
        if u.shape[0] % seqlen != 0:
            raise ValueError(f"Mamba2: expected u of a multiple of seqlen = {seqlen} steps, got {u.shape[0]}")
        return u.unflatten(0, (u.shape[0] // seqlen, seqlen))

    def _check_scan(self) -> None:
        """Lets the scan check its sizes and options, on meta tensors."""
        x = torch.empty(1, 0, self.nheads, self.headdim, device="meta", dtype=torch.float32)
        BC = torch.empty(1, 0, self.ngroups, self.d_state, device="meta", dtype=torch.float32)
        ssd_chunk_scan(
            x,
            x[..., 0],
            x.new_empty(self.nheads),
            BC,
            BC,
            chunk_size=self.chunk_size,
            discretization="zoh" if is_two_sample(self.discretization) else self.discretization,
        )

    # In messages of the operator between the projections.
    _mixer_name = "Mamba2"
    _state_axes = "(batch, nheads, headdim, d_state)"

    def _state_shape(self) -> tuple[int, ...]:
        samples = int(is_two_sample(self.discretization))
        return self.nheads, self.headdim + samples, self.d_state + samples
