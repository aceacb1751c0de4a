r"""The selective state-space layer ("S6") with a choice of discretization.

For an input :math:`x_t` of ``d_inner`` channels, with ``d_state`` states per channel:

.. math::
    (r_t, B_t, C_t) &= W_x x_t, \qquad \Delta_t = \mathrm{softplus}(W_\Delta r_t + b_\Delta), \qquad A = -e^{A_{\log}} \\
    h_t &= \bar A(\Delta_t A)\, h_{t-1} + \Delta_t\, k(\Delta_t A)\, B_t x_t \\
    y_t &= (\langle C_t, h_t \rangle + D x_t) \cdot \mathrm{silu}(z_t)

The discretization chooses :math:`\bar A` and :math:`k`; see :func:`ssm_kernels.selective_scan`. The gate :math:`z` is optional.
Source: Gu and Dao, *Mamba* (arXiv 2312.00752), section 3 and algorithm 2. Initialization: S4D-real, :math:`A_n = -n`, and
:math:`b_\Delta` such that :math:`\mathrm{softplus}(b_\Delta)` is log-uniform in [``dt_min``, ``dt_max``].
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, overload

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .._discretizations import delta_A_discretizations, is_two_sample, takes_delta_A, with_alpha
from .._dtypes import readable, wide_dtype
from .._scan_state import ScanState
from ..choices import DiscretizationName, StepInitialization, TimeStepsScale, TwoSampleDiscretizationName
from ..ops import selective_state_update
from ..ops._arguments import is_autocast_enabled
from ._operators import CallsOperators
from .checks import (
    check_bools,
    check_choice,
    check_discretization,
    check_dtype,
    check_floating,
    check_int,
    check_not_negative,
    check_number,
    check_shape,
    check_step_sizes,
    check_tensor,
)
from .common import is_only_a_product, mark_parameters, update_state
from .discretized import DiscretizedModule
from .initialization import fill_, initialized, linear, reset_step_projection
from .naming import class_name, name_for_operator, names_layer
from .two_samples import KeepsSamples

__all__ = ["SelectiveSSM"]


class SelectiveBase(KeepsSamples, DiscretizedModule, CallsOperators):
    """Base class: the parameters of the selective SSM, its scan and its step. Derived layers add the rest of the mixer.

    Parameters: ``x_proj.weight`` (dt_rank + 2 d_state, d_inner), ``dt_proj.weight`` (d_inner, dt_rank), ``dt_proj.bias``
    (d_inner,), ``A_log`` (d_inner, d_state), ``D`` (d_inner,); with ``"exp_trapezoidal"`` also ``lam_logit`` (d_inner,).
    ``A_log``, ``D`` and ``lam_logit`` are float32 whatever the ``dtype`` of the layer (float64 in a float64 layer).

    Rules that read two input samples have them in the state, (batch, d_inner + 1, d_state + 1): the last column is the last
    sample of ``x``, the last row that of ``B``.
    """

    # A class attribute, because layers that earlier versions pickled have no value of their own.
    time_steps_scale: TimeStepsScale = "both"

    _no_decay: tuple[str, ...] = ("A_log", "D")

    def _init_ssm(
        self,
        d_model: int,
        d_inner: int,
        d_state: int,
        dt_rank: int | Literal["auto"],
        discretization: DiscretizationName | TwoSampleDiscretizationName,
        alpha: float | None,
        time_steps_scale: TimeStepsScale,
        dt_min: float,
        dt_max: float,
        dt_init: StepInitialization,
        dt_scale: float,
        dt_init_floor: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        layer = class_name(self)
        if alpha is not None or discretization in ("gbt", "gbt_two_sample"):
            if alpha is not None:
                check_number(layer, "alpha", alpha)
            discretization = with_alpha(layer, discretization, alpha)
        check_discretization(layer, discretization, takes_two_samples=True)
        check_choice(layer, "time_steps_scale", time_steps_scale, ("both", "A"))
        if time_steps_scale == "A" and not takes_delta_A(discretization):
            raise ValueError(
                f"{layer}: expected time_steps_scale 'A' with one of {[*delta_A_discretizations]}, in which A may have a "
                f"step of its own, got {discretization!r}"
            )
        self.time_steps_scale = time_steps_scale
        check_int(layer, "d_state", d_state, high=256)
        if isinstance(dt_rank, str):
            check_choice(layer, "dt_rank", dt_rank, ("auto",))
            rank = math.ceil(d_model / 16)
        else:
            check_int(layer, "dt_rank", dt_rank)
            rank = dt_rank
        check_choice(layer, "dt_init", dt_init, ("random", "constant"))
        check_not_negative(layer, "dt_scale", dt_scale)
        check_step_sizes(layer, dt_min, dt_max, dt_init_floor)
        check_dtype(layer, dtype)
        self.d_inner, self.d_state, self.dt_rank, self.discretization = d_inner, d_state, rank, discretization
        self.dt_min, self.dt_max, self.dt_init_floor = dt_min, dt_max, dt_init_floor
        self.dt_init, self.dt_scale = dt_init, dt_scale
        self.x_proj = linear(d_inner, rank + 2 * d_state, False, device, dtype)
        draw_steps = functools.partial(
            reset_step_projection,
            dt_init=dt_init,
            bound=rank**-0.5 * dt_scale,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init_floor=dt_init_floor,
        )
        self.dt_proj = initialized(nn.Linear(rank, d_inner, device=device, dtype=dtype), draw_steps)
        wide = wide_dtype(self.dt_proj.weight.dtype)
        self.A_log = nn.Parameter(torch.empty(d_inner, d_state, device=device, dtype=wide))
        self.D = nn.Parameter(torch.empty(d_inner, device=device, dtype=wide))
        if discretization == "exp_trapezoidal":
            self.lam_logit = nn.Parameter(torch.empty(d_inner, device=device, dtype=wide))
            self._no_decay = (*self._no_decay, "lam_logit")
        mark_parameters("_no_weight_decay", *(self.get_parameter(name) for name in self._no_decay))
        mark_parameters("_no_reinit", self.dt_proj.bias)
        if is_two_sample(discretization):
            self._state_axes = "(batch, d_inner + 1, d_state + 1)"
        self._register_discretization(device)
        self.dt_proj.reset_parameters()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes ``A_log``, ``D`` and ``lam_logit``; the submodules have their own ``reset_parameters``."""
        fill_(self.A_log, torch.arange(1, self.d_state + 1, device=self.A_log.device, dtype=self.A_log.dtype).log())
        self.D.fill_(1)
        if self.discretization == "exp_trapezoidal":
            self.lam_logit.zero_()
        self._reset_discretization()

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """``delta``, (..., d_inner), ``B`` and ``C``, (..., d_state), of ``x``, (..., d_inner), and the bias of ``delta``.

        The scan adds the bias in float32 (float64 in a float64 layer). It is absent where ``dt_proj`` is called as a module,
        which adds it itself.
        """
        dt, B, C = torch.split_with_sizes(self.x_proj(x), (self.dt_rank, self.d_state, self.d_state), -1)
        if is_only_a_product(self.dt_proj):
            return F.linear(dt, self.dt_proj.weight), B, C, self.dt_proj.bias
        return self.dt_proj(dt), B, C, None

    def _scan(
        self,
        x: Tensor,
        z: Tensor | None,
        initial_state: Tensor | None,
        scanned: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        needs_last_state: bool = True,
        time_steps: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The SSM over a sequence: ``x``, ``z`` and the result (batch, seqlen, d_inner); also the last state.

        ``scanned`` is a view of ``x`` for the scan, if the two need separate gradients. Without ``needs_last_state`` the last
        state may be None. ``time_steps`` (batch, seqlen).
        """
        if scanned is None:
            scanned = x
            delta, B, C, delta_bias = self._project(x)
        else:
            is_tracked = x.requires_grad and not torch.compiler.is_compiling()
            version = x._version if is_tracked else 0
            delta, B, C, delta_bias = self._project(x)
            # A hook of x_proj wrote into its input, so its autograd history changed.
            if is_tracked and x._version != version:
                scanned = x
        if is_two_sample(self.discretization) or time_steps is not None:
            steps = self._step_arguments(delta, delta_bias, time_steps)
            return self._scan_by_function(scanned, steps, B, C, z, initial_state, seq_idx, cu_seqlens, needs_last_state)
        initial_state = None if initial_state is None else initial_state.to(wide_dtype(x.dtype))
        arguments = (scanned, delta, self.A_log, B, C, self.D, z, delta_bias, initial_state, self.discretization)
        packed = (seq_idx, cu_seqlens)
        return self.operators.mamba_mixer(*arguments, *packed, *name_for_operator(self), needs_last_state=needs_last_state)

    def _step_arguments(
        self, delta: Tensor, delta_bias: Tensor | None, time_steps: Tensor | None, names: tuple[str, str] = ("delta", "delta_A")
    ) -> dict[str, Any]:
        """The arguments of the scan, or with other ``names`` of its step, that say how long steps are.

        ``delta`` (..., d_inner), before bias and softplus. ``time_steps`` (...) scales the steps of A and B, or of A alone.
        """
        name, name_of_A = names
        given: dict[str, Any] = {name: delta, f"{name}_bias": delta_bias, f"{name}_softplus": True}
        if time_steps is None:
            return given
        wide = wide_dtype(delta.dtype)
        raw = delta.to(wide) if delta_bias is None else delta.to(wide) + delta_bias.to(wide)
        scaled = (F.softplus(raw) * time_steps.to(wide)[..., None]).to(delta.dtype)
        if self.time_steps_scale == "A":
            return given | {name_of_A: scaled}
        return {name: scaled, f"{name}_bias": None, f"{name}_softplus": False}

    def _check_time_steps(self, layer: str, time_steps: Tensor | None, axes: str, shape: tuple[int, ...]) -> None:
        if time_steps is None:
            return
        check_shape(layer, "time_steps", time_steps, axes, shape)
        check_floating(layer, "time_steps", time_steps, least_bytes=2)

    def _scan_by_function(
        self,
        x: Tensor,
        steps: dict[str, Any],
        B: Tensor,
        C: Tensor,
        z: Tensor | None,
        initial_state: Tensor | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
        needs_last_state: bool,
    ) -> tuple[Tensor, Any]:
        """As ``_scan``, after its projections, of rules and arguments that the operators between projections do not have."""
        reads_two = is_two_sample(self.discretization)
        wide = wide_dtype(x.dtype)
        first = self._parts_of(initial_state, x.dtype) if reads_two and initial_state is not None else None
        state = initial_state if first is None else first.state
        options: dict[str, Any] = {
            name: value.mT if name in ("delta", "delta_A") else value.to(wide) if isinstance(value, Tensor) else value
            for name, value in steps.items()
        }
        options |= self._weights(x.dtype, 1) | {"discretization": self.discretization}
        if first is not None:
            options["previous"] = (first.u, first.B)
        # Several ranks exchange a last state, and a process has it without further cost.
        returns = needs_last_state or self.operators.is_local
        results = self.operators.selective_scan(
            u=x.mT,
            A=-torch.exp(self.A_log.to(wide)),
            B=B.mT,
            C=C.mT,
            D=self.D.to(wide),
            z=None if z is None else z.mT,
            **options,
            initial_state=None if state is None else state.to(wide),
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_last_state=returns,
        )
        if not returns:
            return results.mT, None
        out, last = results
        if isinstance(last, Tensor):
            return out.mT, last
        assert last.B is not None
        of_channels = torch.cat([last.state, last.u.to(wide)[..., None]], -1)
        return out.mT, torch.cat([of_channels, F.pad(last.B.to(wide), (0, 1))[:, None]], 1)

    def _views_of(self, state: Tensor) -> ScanState:
        return ScanState(state[:, :-1, :-1], state[:, :-1, -1], state[:, -1, :-1])

    def _scan_step(self, x: Tensor, z: Tensor | None, state: Tensor, time_steps: Tensor | None = None) -> Tensor:
        """The SSM for one time step: ``x``, ``z`` and the result (batch, d_inner); ``state`` is modified in place."""
        dt, B, C, dt_bias = self._project(x)
        # Autocast casts the projections, but not x itself.
        x, z = x.to(dt.dtype), None if z is None else z.to(dt.dtype)
        steps = self._step_arguments(dt, None if dt_bias is None else readable(dt_bias, dt.dtype), time_steps, ("dt", "dt_A"))

        def update(state: Tensor, **samples: Any) -> Tensor:
            return selective_state_update(
                state,
                x,
                A=readable(self.A_log, dt.dtype),
                B=B,
                C=C,
                D=readable(self.D, dt.dtype),
                z=z,
                **steps,
                discretization=self.discretization,
                A_is_log=True,
                **samples,
            )

        if is_two_sample(self.discretization):
            return self._step_two_samples(state, x.dtype, functools.partial(update, **self._weights(x.dtype, 0)))
        return update_state(state, x.dtype, update)

    # In messages of the operator between the projections.
    _mixer_name = "Mamba"
    _state_axes = "(batch, d_inner, d_state)"

    def _state_shape(self) -> tuple[int, ...]:
        samples = int(is_two_sample(self.discretization))
        return self.d_inner + samples, self.d_state + samples

    def _zero_state(self, batch_size: int, dtype: torch.dtype | None) -> Tensor:
        dtype = wide_dtype(self.A_log.dtype) if dtype is None else dtype
        return torch.zeros(batch_size, *self._state_shape(), device=self.D.device, dtype=dtype)


@names_layer
class SelectiveSSM(SelectiveBase):
    """The selective state-space model with its projections: a causal map of sequences with ``d_inner`` channels.

    Args:
        d_inner: channels.
        d_state: states per channel, at most 256.
        dt_rank: rank of the projection to the step sizes; ``"auto"`` is ``ceil(d_inner / 16)``.
        discretization: one of ``ssm_kernels.discretizations``; unless it is ``"zoh"`` the ``state_dict`` names it, as
            ``discretization_name``, which ``load_state_dict`` compares. ``"euler"`` is stable only while ``delta * |A| <= 2``:
            start it with ``d_state * dt_max`` well below 2. Nothing keeps ``delta`` there in training. ``"gbt"`` takes
            ``alpha``, and ``"dirac"`` reads its input as impulses. Rules of ``ssm_kernels.two_sample_discretizations`` have a
            state of (batch, d_inner + 1, d_state + 1): the last sample of ``x`` in the last column, that of ``B`` in the last
            row. ``"exp_trapezoidal"`` weighs the current sample by the sigmoid of the parameter ``lam_logit``, (d_inner,),
            zero at first.
        alpha: of ``"gbt"`` and ``"gbt_two_sample"``: see :func:`ssm_kernels.selective_scan`. The attribute
            ``discretization`` is then ``"gbt(0.7)"``.
        time_steps_scale: which steps ``time_steps`` of :meth:`forward` scales. ``"both"``: those of A and B, for samples of a
            continuous signal at irregular times (S5). ``"A"``: those of A alone, for events, whose input does not depend on the
            time since the event before (Event-SSM); of the rules of :func:`ssm_kernels.selective_scan` that take ``delta_A``.
            docs/discretizations.md compares them.
        dt_min: smallest step size at initialization.
        dt_max: largest step size at initialization.
        dt_init: ``"random"`` (uniform) or ``"constant"`` weights of the projection to the step sizes.
        dt_scale: factor on the size of these weights.
        dt_init_floor: lower bound of the step sizes at initialization, applied after ``dt_min``.
        device: where the parameters are made.
        dtype: dtype of the projections. ``A_log`` and ``D`` are float32 (float64 in a float64 layer).

    Raises:
        ValueError: the discretization or another argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> layer = nn.SelectiveSSM(64, discretization="bilinear")
        >>> layer(torch.randn(2, 100, 64)).shape  # (batch, seqlen, d_inner)
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        d_inner: int,
        d_state: int = 16,
        dt_rank: int | Literal["auto"] = "auto",
        *,
        discretization: DiscretizationName | TwoSampleDiscretizationName = "zoh",
        alpha: float | None = None,
        time_steps_scale: TimeStepsScale = "both",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: StepInitialization = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("SelectiveSSM", "d_inner", d_inner)
        self._init_ssm(
            d_inner,
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

    @overload
    def forward(
        self,
        x: Tensor,
        z: Tensor | None = None,
        initial_state: Tensor | None = None,
        return_last_state: Literal[False] = False,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        time_steps: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        z: Tensor | None,
        initial_state: Tensor | None,
        return_last_state: Literal[True],
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        time_steps: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self,
        x: Tensor,
        z: Tensor | None = None,
        initial_state: Tensor | None = None,
        *,
        return_last_state: Literal[True],
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        time_steps: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self,
        x: Tensor,
        z: Tensor | None = None,
        initial_state: Tensor | None = None,
        return_last_state: bool = False,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        time_steps: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(
        self,
        x: Tensor,
        z: Tensor | None = None,
        initial_state: Tensor | None = None,
        return_last_state: bool = False,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        time_steps: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the SSM over a sequence.

        Args:
            x: (batch, seqlen, d_inner), any strides.
            z: gate, shape and dtype of ``x``.
            initial_state: state before the first step, (batch, d_inner, d_state); zero if absent. With ``cu_seqlens``
                (sequences, d_inner, d_state). Rules that read two input samples have d_inner + 1 and d_state + 1 instead.
            return_last_state: also return the state after the last step, of each sequence of ``cu_seqlens``.
            seq_idx: (batch, seqlen), int32 or int64: a new sequence begins wherever it changes.
            cu_seqlens: (sequences + 1,), int32 or int64, for a batch of 1: sequence ``i`` begins at ``cu_seqlens[i]`` and ends
                before ``cu_seqlens[i + 1]``. Together with ``seq_idx`` sequences begin where either says so.
            time_steps: measured time since the step before, (batch, seqlen), any floating-point dtype, which scales the step
                sizes: see ``time_steps_scale``. Absent: one.

        Returns:
            ``out``, (batch, seqlen, d_inner); with ``return_last_state`` also ``last_state``, of the shape of
            ``initial_state``, float32 (float64 in a float64 layer). Both are differentiable with respect to all arguments of
            floating-point numbers and all parameters.

        Raises:
            ValueError: a shape is not as above.
            TypeError: an argument is not a tensor.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, x = nn.SelectiveSSM(32), torch.randn(2, 10, 32)
            >>> y, state = layer(x[:, :7], return_last_state=True)
            >>> rest = layer(x[:, 7:], initial_state=state)  # continues
            >>> torch.allclose(torch.cat([y, rest], dim=1), layer(x), atol=1e-5)
            True
        """
        layer = class_name(self)
        check_bools(layer, return_last_state=return_last_state)
        self._check_sequence("x", x)
        if z is not None:
            self._check_sequence("z", z)
        if initial_state is not None:
            self._check_state(layer, "initial_state", initial_state)
        for name, value in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
            if value is not None:
                check_tensor(layer, name, value)
        self._check_time_steps(layer, time_steps, "(batch, seqlen)", tuple(x.shape[:2]))
        out, last_state = self._scan(x, z, initial_state, None, seq_idx, cu_seqlens, return_last_state, time_steps)
        return (out, last_state) if return_last_state else out

    @torch.no_grad()
    def step(self, x: Tensor, state: Tensor, z: Tensor | None = None, *, time_steps: Tensor | None = None) -> Tensor:
        """Runs one time step, for decoding. Not differentiable.

        Args:
            x: (batch, d_inner).
            state: (batch, d_inner, d_state), of rules that read two input samples (batch, d_inner + 1, d_state + 1), any
                floating-point dtype, modified in place; from :meth:`allocate_state`, or a ``last_state``.
            z: gate, shape and dtype of ``x``.
            time_steps: measured time since the step before, (batch,), as for :meth:`forward`.

        Returns:
            ``out``, (batch, d_inner).

        Raises:
            ValueError: a shape is not as above.
            TypeError: an argument is not a tensor.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> layer, x = nn.SelectiveSSM(32), torch.randn(2, 32)
            >>> state = layer.allocate_state(2)
            >>> with torch.no_grad():
            ...     y = layer.step(x, state)  # updates state
            >>> y.shape, state.shape
            (torch.Size([2, 32]), torch.Size([2, 32, 16]))
        """
        layer = f"{class_name(self)}.step"
        for name, value in (("x", x),) if z is None else (("x", x), ("z", z)):
            check_shape(layer, name, value, "(batch, d_inner)", (None, self.d_inner))
            check_floating(layer, name, value, least_bytes=2)
        if z is not None and z.dtype != x.dtype and not is_autocast_enabled(x.device.type):
            raise RuntimeError(f"{layer}: expected z of dtype {x.dtype} (the dtype of x), got {z.dtype}")
        self._check_state(layer, "state", state)
        self._check_time_steps(layer, time_steps, "(batch,)", (x.shape[0],))
        return self._scan_step(x, z, state, time_steps)

    def _check_sequence(self, name: str, value: Tensor) -> None:
        check_shape(class_name(self), name, value, "(batch, seqlen, d_inner)", (None, None, self.d_inner))

    def _check_state(self, layer: str, name: str, state: Tensor) -> None:
        """The operators check the shape of a state of rules that read one input sample."""
        check_tensor(layer, name, state)
        check_floating(layer, name, state)
        if is_two_sample(self.discretization):
            check_shape(layer, name, state, self._state_axes, (None, *self._state_shape()))

    def allocate_state(self, batch_size: int, dtype: torch.dtype | None = None) -> Tensor:
        """The zero state, (batch, d_inner, d_state), of rules that read two input samples (batch, d_inner + 1, d_state + 1).

        It is float32 (float64 in a float64 layer) unless ``dtype`` is given.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> nn.SelectiveSSM(32).allocate_state(2).shape
            torch.Size([2, 32, 16])
        """
        check_int("SelectiveSSM.allocate_state", "batch_size", batch_size, low=0)
        return self._zero_state(batch_size, dtype)

    def extra_repr(self) -> str:
        return f"d_inner={self.d_inner}, d_state={self.d_state}, dt_rank={self.dt_rank}, discretization={self.discretization!r}"
