r"""The frame of the layers around a delta rule: projections, short convolutions, the recurrence, a norm of each head, a gate.

For hidden states :math:`u_t`, heads :math:`h` and the value heads that read them:

.. math::
    q_t, k_t, v_t &= \mathrm{silu}(\mathrm{conv}(W_q u)_t),\ \mathrm{silu}(\mathrm{conv}(W_k u)_t),\
        \mathrm{silu}(\mathrm{conv}(W_v u)_t) \\
    S_t &= S_{t-1}\, \mathrm{Diag}(e^{g_t}), \quad S_t \leftarrow S_t + \beta_t (v_t - S_t k_t)\, k_t^\top, \quad
        y_t = d_k^{-1/2}\, S_t q_t \\
    \mathrm{out}_t &= W_o\, (\mathrm{norm}(y_t) \cdot a(W_z u_t))

with rows of :math:`q` and :math:`k` of length one and :math:`d_k` columns of a key. The layers differ in the gate :math:`g`;
see :func:`ssm_kernels.delta_rule_scan`. Parameter names are those of flash-linear-attention, whose layers have this form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import wide_dtype
from ..choices import ConvActivation, GateActivation
from ..ops.delta_rule import delta_rule_scan
from ..ops.delta_rule_step import delta_rule_step
from .checks import (
    check_bools,
    check_choice,
    check_dtype,
    check_int,
    check_not_negative,
    check_number,
    check_optional_int,
)
from .common import (
    SequenceMixer,
    conv_parameters,
    convolve_step,
    is_plain_linear,
    is_unseen,
    keeps_less,
    mark_parameters,
    short_convolution,
    update_state,
)
from .gated_rms_norm import GatedRMSNorm
from .initialization import init_dt_bias, linear, uniform_
from .joined import join_projections
from .naming import class_name

__all__ = ["DeltaRuleMixer", "Projected"]

# The most columns of a key that delta_rule_step takes.
_COLUMNS_OF_A_STEP = 512


def _step_by_scan(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, num_householder: int, **options: Any
) -> Tensor:
    """:func:`ssm_kernels.delta_rule_step` for keys of any size. Modifies ``state`` in place."""
    if options.get("g") is not None:
        options["g"] = options["g"][:, None]
    if num_householder == 1:  # several updates have their axis already
        k, v, beta = (x[:, None] for x in (k, v, beta))
    initial_states = state.to(wide_dtype(q.dtype))
    y, last = delta_rule_scan(
        q[:, None],
        k,
        v,
        beta,
        num_householder=num_householder,
        initial_states=initial_states,
        return_final_states=True,
        **options,
    )
    state.copy_(last)
    return y[:, 0]


def _value_columns(layer: str, head_dim: int, expand_v: float) -> int:
    """The columns of a value head, ``head_dim * expand_v``, which must be whole."""
    check_int(layer, "head_dim", head_dim)
    check_number(layer, "expand_v", expand_v)
    columns = head_dim * expand_v
    if not 1 <= columns < math.inf or not math.isclose(columns, int(columns), rel_tol=1e-5):
        raise ValueError(f"{layer}: expected a whole head_dim * expand_v of at least 1, got {head_dim} * {expand_v}")
    return int(columns)


# The weight, (channels, 1, conv_size), the bias and the initial state.
_Convolution = tuple[Tensor | None, Tensor | None, Tensor | None]
_NO_CONVOLUTION: _Convolution = (None, None, None)

# The results of a layer's projections, by the names of the modules.
Projected = dict[str, Tensor]
# The projections that one product may compute; the sequences come first.
_JOINED = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj")
_PROJECTIONS = (*_JOINED, "f_proj", "g_proj")


class DeltaRuleMixer(SequenceMixer):
    """A mixer around a delta rule. A derived layer makes the parameters, in its own order, and computes gates and betas.

    ``q_conv1d``, ``k_conv1d`` and ``v_conv1d`` hold parameters and are not called.
    """

    hidden_size: int
    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    use_short_conv: bool
    conv_size: int
    num_householder: int = 1
    # The activation of queries and keys after projection and convolution, and whether the operator then normalizes their rows.
    qk_activation: str = "silu"
    qk_l2norm: bool = True
    # Whether _activate changes queries and keys between convolution and scan, by functions that the operator lacks.
    _activates_keys: bool = False
    allow_neg_eigval: bool = False

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    a_proj: nn.Linear
    b_proj: nn.Linear
    o_proj: nn.Linear
    q_conv1d: nn.Conv1d
    g_proj: nn.Module
    o_norm: GatedRMSNorm

    def _set_sizes(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None,
        head_k_dim: int,
        head_v_dim: int | None,
        conv_size: int,
        mode: str,
        layer_idx: int | None,
        norm_eps: float,
        dtype: torch.dtype | None,
        *,
        expand_v: float,
        **flags: bool,
    ) -> None:
        """Checks the arguments that all layers have, and keeps them. ``head_v_dim`` is ``head_k_dim * expand_v`` if None."""
        layer = class_name(self)
        if head_v_dim is None:
            head_v_dim = _value_columns(layer, head_k_dim, expand_v)
            self.head_dim = head_k_dim
        self.expand_v = expand_v
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads), ("conv_size", conv_size)):
            check_int(layer, name, size)
        check_optional_int(layer, "num_v_heads", num_v_heads)
        check_optional_int(layer, "layer_idx", layer_idx, low=0)
        check_choice(layer, "mode", mode, ("chunk", "fused_recurrent"))
        check_not_negative(layer, "norm_eps", norm_eps)
        check_bools(layer, **flags)
        check_dtype(layer, dtype)
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        if num_v_heads % num_heads:
            raise ValueError(f"{layer}: expected num_v_heads a multiple of num_heads = {num_heads}, got {num_v_heads}")
        self.mode, self.layer_idx = mode, layer_idx
        self.hidden_size = self.d_model = hidden_size
        self.conv_size = self.d_conv = conv_size
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.key_dim, self.value_dim = num_heads * head_k_dim, num_v_heads * head_v_dim
        for name, flag in flags.items():
            setattr(self, name, flag)

    def _make_projections(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        updates = self.num_householder
        self.q_proj = linear(self.hidden_size, self.key_dim, False, device, dtype)
        self.k_proj = linear(self.hidden_size, self.key_dim * updates, False, device, dtype)
        self.v_proj = linear(self.hidden_size, self.value_dim * updates, False, device, dtype)

    def _make_convolutions(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        if self.use_short_conv:
            for name, projection in (("q_conv1d", self.q_proj), ("k_conv1d", self.k_proj), ("v_conv1d", self.v_proj)):
                channels = projection.out_features
                conv = short_convolution(class_name(self), channels, self.conv_size, bias, device, dtype)
                self.add_module(name, conv)

    def _make_norm(
        self,
        eps: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        activation: GateActivation | None = "silu",
    ) -> GatedRMSNorm:
        """The norm of each head, with a gate of ``activation``. Without one, its weight is float32 in fp16 and bf16 layers."""
        if activation is None:
            dtype = wide_dtype(self.q_proj.weight.dtype)
        return GatedRMSNorm(self.head_v_dim, 1, True, eps, device, dtype, activation=activation or "silu")

    def _make_gate_parameters(self, gates: int, device: torch.device | str | None) -> None:
        """``A_log``, one number a value head, and ``dt_bias``, in float32 or float64; ``reset_parameters`` draws them."""
        wide = wide_dtype(self.q_proj.weight.dtype)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, device=device, dtype=wide))
        self.dt_bias = nn.Parameter(torch.empty(gates, device=device, dtype=wide))
        mark_parameters("_no_weight_decay", self.A_log, self.dt_bias)

    # The range of -A at initialization.
    _A_range: tuple[float, float] = (0.0, 16.0)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes ``A_log`` and ``dt_bias``, if the layer has them; the submodules have their own ``reset_parameters``."""
        if "A_log" not in self._parameters:
            return
        uniform_(self.A_log, *self._A_range).log_()
        init_dt_bias(self.dt_bias, 0.001, 0.1, 1e-4)

    def _step(self, u: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        projected = self._project(u)
        q, k, v = self._heads(self._convolve_one(self._sequences(projected), conv_state))
        tensors, flags = self._gates(projected)
        options: dict[str, Any] = {**tensors, **flags, "num_householder": self.num_householder, "qk_l2norm": self.qk_l2norm}
        update = delta_rule_step if self.head_k_dim <= _COLUMNS_OF_A_STEP else _step_by_scan
        beta = self._beta(projected, q)
        y = update_state(ssm_state, q.dtype, lambda state: update(state, q, k, v, beta, **options))
        return self._finish(y, projected.get("g_proj"))

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_v_heads={self.num_v_heads}"
        return f"hidden_size={self.hidden_size}, {heads}, head_k_dim={self.head_k_dim}, head_v_dim={self.head_v_dim}"

    # ----- gates and betas of the projections, which a derived layer may override

    def _raw_gate(self, projected: Projected) -> Tensor | None:
        """(..., value heads), or with one number a channel of the key (..., value heads, columns); None without decay."""
        return projected.get("a_proj")

    def _gates(self, projected: Projected) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The operator's arguments for gates and betas: tensors, and options. The projections may lack the axis of time."""
        is_raw = "b_proj" in self._modules
        options = {"beta_sigmoid": is_raw, "allow_neg_eigval": is_raw and self.allow_neg_eigval}
        g = self._raw_gate(projected)
        if g is None:
            return {}, options
        wide = wide_dtype(g.dtype)  # also after layer.half()
        dt_bias = self.dt_bias.to(wide)
        if g.dim() > projected["q_proj"].dim():
            dt_bias = dt_bias.unflatten(0, g.shape[-2:])
        return {"g": g, "A_log": self.A_log.to(wide), "dt_bias": dt_bias}, options

    def _beta(self, projected: Projected, q: Tensor) -> Tensor:
        """(..., updates, value heads), without the axis of updates if a step has one. ``q`` is (..., heads, columns)."""
        beta = projected["b_proj"]
        return beta if self.num_householder == 1 else beta.unflatten(-1, (self.num_householder, self.num_v_heads))

    # ----- one call

    def _mix(
        self,
        hidden_states: Tensor,
        conv_state: Tensor | None,
        ssm_state: Tensor | None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any, Tensor]:
        projected = self._project(hidden_states)
        conv_inputs = self._sequences(projected)
        sequences, convolutions = self._prepare(conv_inputs, conv_state, seq_idx, cu_seqlens)
        gates, flags = self._gates(projected)
        beta = self._beta(projected, sequences[0].unflatten(-1, (self.num_heads, self.head_k_dim)))
        z = projected.get("g_proj")
        norm = self.o_norm
        takes_norm = type(norm).forward is GatedRMSNorm.forward and is_unseen(norm)
        takes_projection = takes_norm and self.operators.is_local and keeps_less(self) and is_plain_linear(self.o_proj)
        y, final_states = self.operators.delta_rule_mixer(
            *sequences,
            # Updates follow one another: (batch, seqlen, updates, heads) -> (batch, seqlen * updates, heads).
            beta.flatten(1, 2) if self.num_householder > 1 else beta,
            gates.get("g"),
            z if takes_norm else None,
            *(weight for weight, _, _ in convolutions),
            *(bias for _, bias, _ in convolutions),
            gates.get("A_log"),
            gates.get("dt_bias"),
            norm.weight if takes_norm else None,
            *(state for _, _, state in convolutions),
            None if ssm_state is None else ssm_state.to(wide_dtype(conv_inputs[0].dtype)),
            *((self.o_proj.weight, self.o_proj.bias) if takes_projection else (None, None)),
            seq_idx,
            cu_seqlens,
            self.head_k_dim,
            self.head_v_dim,
            self.num_householder,
            self._conv_activations()[0],
            self.qk_l2norm,
            flags.get("gate_lower_bound"),
            flags["beta_sigmoid"],
            flags["allow_neg_eigval"],
            norm.eps if takes_norm else 0.0,
            takes_norm and norm.norm_before_gate,
            norm.activation if takes_norm else "silu",
            self.recompute == "all" and torch.is_grad_enabled(),
            class_name(self),
        )
        if takes_projection:
            out = y
        else:
            out = self.o_proj(y if takes_norm else self._normalize(y.unflatten(-1, (-1, self.head_v_dim)), z))
        return out, conv_inputs, final_states

    def _project(self, u: Tensor) -> Projected:
        """The projections of ``u``: of a few together, or all by calls of the modules."""
        modules = self._modules
        projected: Projected = {}
        if self.operators.is_local:
            groups = [{name: modules[name] for name in _JOINED if name in modules}]
            # The gate of the output has a buffer of its own: the mixer's backward writes its gradient, with that of the norm,
            # before the scan's backward, and those of the sequences after it.
            if isinstance(modules.get("g_proj"), nn.Linear):
                groups.append({"g_proj": modules["g_proj"]})
            projected = join_projections(u, *groups)
        for name in _PROJECTIONS:
            if name in modules and name not in projected:
                projected[name] = getattr(self, name)(u)
        return projected

    @staticmethod
    def _sequences(projected: Projected) -> tuple[Tensor, Tensor, Tensor]:
        return projected["q_proj"], projected["k_proj"], projected["v_proj"]

    def _prepare(
        self, projected: Sequence[Tensor], conv_state: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Sequence[Tensor], list[_Convolution]]:
        """Queries, keys and values, and the convolutions that remain for the operator."""
        if not self.use_short_conv:
            return self._activate(projected), [_NO_CONVOLUTION] * 3
        states = (None,) * 3 if conv_state is None else self._split(conv_state)
        parameters = zip(self._convolutions(), states, strict=True)
        convolutions: list[_Convolution] = [
            (weight, bias, self._initial_state(state, projected[0].dtype)) for (weight, bias), state in parameters
        ]
        if not self._activates_keys:
            return projected, convolutions

        def convolve(x: Tensor, convolution: _Convolution) -> Tensor:
            weight, bias, state = convolution
            assert weight is not None
            options: dict[str, Any] = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens, "initial_state": state}
            activation = self._conv_activations()[0]
            return self.operators.causal_conv1d(x, weight.squeeze(1), bias, activation=activation, **options)

        keys = [convolve(x, convolution) for x, convolution in zip(projected[:2], convolutions[:2], strict=True)]
        return self._activate([*keys, projected[2]]), [_NO_CONVOLUTION, _NO_CONVOLUTION, convolutions[2]]

    def _convolve_one(self, projected: Sequence[Tensor], conv_state: Tensor) -> list[Tensor]:
        """One step; modifies ``conv_state`` in place."""
        if not self.use_short_conv:
            return self._activate(projected)
        parts = zip(projected, self._split(conv_state), self._convolutions(), self._conv_activations(), strict=True)
        return self._activate(
            [convolve_step(x, state, weight.squeeze(1), bias, activation) for x, state, (weight, bias), activation in parts]
        )

    def _activate(self, projected: Sequence[Tensor]) -> list[Tensor]:
        """The activations that the convolutions have not applied."""
        q, k, v = projected
        if not self.use_short_conv:
            v = F.silu(v)
            if self.qk_activation == "silu":
                q, k = F.silu(q), F.silu(k)
        return [q, k, v]

    def _conv_activations(self) -> tuple[ConvActivation | None, ...]:
        of_keys: ConvActivation | None = "silu" if self.qk_activation == "silu" else None
        return of_keys, of_keys, "silu"

    def _convolutions(self) -> list[tuple[Tensor, Tensor | None]]:
        """The weights, (channels, 1, conv_size), and the biases, of queries, keys and values."""
        return [conv_parameters(class_name(self), getattr(self, name)) for name in ("q_conv1d", "k_conv1d", "v_conv1d")]

    def _heads(self, convolved: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(..., heads, columns); keys and values of several updates (..., updates, heads, columns)."""
        q, k, v = convolved
        updates = () if self.num_householder == 1 else (self.num_householder,)
        k = k.unflatten(-1, (*updates, self.num_heads, self.head_k_dim))
        v = v.unflatten(-1, (*updates, self.num_v_heads, self.head_v_dim))
        return q.unflatten(-1, (self.num_heads, self.head_k_dim)), k, v

    def _finish(self, y: Tensor, z: Tensor | None) -> Tensor:
        """Norm, gate and projection of (..., value heads, columns)."""
        out: Tensor = self.o_proj(self._normalize(y, z))
        return out

    def _normalize(self, y: Tensor, gate: Tensor | None) -> Tensor:
        """Norm and gate of (..., value heads, columns), as (..., value_dim)."""
        z = None if gate is None else gate.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        out: Tensor = self.o_norm(y, z)
        return out.flatten(-2)

    # ----- states

    def _conv_channels(self) -> int:
        updates = self.num_householder
        return self.key_dim + updates * (self.key_dim + self.value_dim) if self.use_short_conv else 0

    def _split(self, conv_state: Tensor) -> tuple[Tensor, ...]:
        updates = self.num_householder
        return conv_state.split([self.key_dim, self.key_dim * updates, self.value_dim * updates], dim=1)

    def _conv_inputs(self, projected: Any) -> Tensor:
        q = projected[0]
        return torch.cat(projected, dim=-1) if self.use_short_conv else q[..., :0]

    def _weight_of_states(self) -> Tensor:
        return self.q_conv1d.weight if self.use_short_conv else self.o_norm.weight

    _state_axes = "(batch, num_v_heads, head_v_dim, head_k_dim)"

    def _state_shape(self) -> tuple[int, ...]:
        return self.num_v_heads, self.head_v_dim, self.head_k_dim
