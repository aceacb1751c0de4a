"""The names that arguments take, as types: a type checker reports a misspelt name, and editors complete names.

Every public function, layer and configuration uses these types, and arguments with a default of None also take None. A variable
of type ``str`` needs ``typing.cast``, or one of these types where it is declared.

Examples:
    >>> from ssm_kernels.choices import DiscretizationName
    >>> from ssm_kernels.nn import Mamba
    >>> def make_layer(discretization: DiscretizationName) -> Mamba:
    ...     return Mamba(16, discretization=discretization)
    >>> make_layer("bilinear").discretization
    'bilinear'
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "CandidateActivation",
    "ConvActivation",
    "DiscretizationName",
    "Exchange",
    "ExponentialDiscretizationName",
    "ExponentialTwoSampleDiscretizationName",
    "GateActivation",
    "LiquidActivation",
    "MixerName",
    "PreviousSample",
    "RecomputeName",
    "RecurrenceName",
    "StepInitialization",
    "TimeStepsScale",
    "TwoSampleDiscretizationName",
]

DiscretizationName = Literal[
    "zoh", "zoh_exact", "foh", "bilinear", "poly", "highorder", "rk4", "euler", "backward_euler", "gbt", "dirac"
]
"""``discretization`` of :func:`ssm_kernels.selective_scan`, its step and its layers.
``"foh"`` is an alias of ``"zoh_exact"``. ``"gbt"`` takes ``alpha``. Configurations and operators of ``torch.ops`` have
no such argument, and take the number in the name: ``"gbt(0.7)"``."""

TwoSampleDiscretizationName = Literal["foh_ramp", "trapezoidal", "gbt_two_sample", "exp_trapezoidal"]
"""``discretization`` of :func:`ssm_kernels.selective_scan`: rules that read two input samples a step. ``"gbt_two_sample"``
takes ``alpha``, ``"exp_trapezoidal"`` ``lam``."""

ExponentialTwoSampleDiscretizationName = Literal["foh_ramp", "exp_trapezoidal"]
"""``discretization`` of :func:`ssm_kernels.ssd_chunk_scan` and :class:`ssm_kernels.nn.Mamba2`: the rules with two input samples
whose decay is :math:`e^z`. ``"exp_trapezoidal"`` takes ``lam``."""

PreviousSample = Literal["zero", "repeat"]
"""``previous`` of :func:`ssm_kernels.selective_scan` and :func:`ssm_kernels.ssd_chunk_scan`, where it is not a pair of
samples."""

ExponentialDiscretizationName = Literal["zoh", "zoh_exact", "foh", "poly", "highorder", "rk4"]
"""``discretization`` of :func:`ssm_kernels.ssd_chunk_scan` and :class:`ssm_kernels.nn.Mamba2`: the rules whose decay is
:math:`e^z`."""

CandidateActivation = Literal["g", "tanh"]
"""``candidate_activation`` of :func:`ssm_kernels.mingru_scan`, :func:`ssm_kernels.minlstm_scan` and their layers."""

LiquidActivation = Literal["tanh"]
"""``candidate_activation`` of :class:`ssm_kernels.nn.Liquid`."""

ConvActivation = Literal["silu", "swish", "none"]
"""``activation`` of :func:`ssm_kernels.causal_conv1d`. ``"swish"`` is an alias of ``"silu"``, ``"none"`` of None."""

GateActivation = Literal["silu", "gelu", "gelu_tanh", "sigmoid", "none"]
"""``activation`` of :func:`ssm_kernels.rms_norm_gated` and :func:`ssm_kernels.layer_norm_gated`."""

StepInitialization = Literal["random", "constant"]
"""``dt_init`` of :class:`ssm_kernels.nn.Mamba` and :class:`ssm_kernels.nn.SelectiveSSM`."""

TimeStepsScale = Literal["both", "A"]
"""``time_steps_scale`` of :class:`ssm_kernels.nn.Mamba` and :class:`ssm_kernels.nn.SelectiveSSM`."""

MixerName = Literal[
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MinGRU",
    "MinLSTM",
    "DeltaNet",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "GatedDeltaProduct",
    "MLSTM",
]
"""``mixer`` of :class:`ssm_kernels.models.MambaConfig`."""

RecomputeName = Literal["none", "cheap", "all"]
"""``recompute`` of :class:`ssm_kernels.nn.Mamba`, :class:`ssm_kernels.nn.Mamba2` and
:class:`ssm_kernels.models.MambaConfig`."""

RecurrenceName = Literal["MinGRU", "MinLSTM"]
"""``rnn`` of :class:`ssm_kernels.models.RecurrentMixer`."""

Exchange = Literal["chain", "summaries"]
"""``exchange`` of the functions and layers in :mod:`ssm_kernels.distributed`, which choose it themselves."""
