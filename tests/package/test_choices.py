"""The types of names have the names that the operators and layers take."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, get_args

import pytest
import torch

import ssm_kernels
from ssm_kernels import choices, nn, reference
from ssm_kernels.models import MambaConfig, RecurrentMixer
from ssm_kernels.models.config import MIXERS

X = torch.ones(1, 2, 3)
A = -torch.ones(2, 4)
B = torch.ones(1, 4, 3)
W = torch.ones(3, 4)


def taken(call: Callable[..., Any], argument: str) -> set[str]:
    """The names that the error for an unknown name lists."""
    with pytest.raises(ValueError, match=f"unknown {argument}") as error:
        call(**{argument: "????"})
    _, _, listed = str(error.value).partition("expected ")
    return set(re.findall(r"\w+", listed.removeprefix("one of"))) - {"or", "None"}


def test_names_of_discretizations_are_those_of_the_table():
    names, aliases = ssm_kernels.discretizations, torch.ops.ssm_kernels._discretization_aliases()
    assert set(get_args(choices.DiscretizationName)) == {*names, *aliases, "gbt", "dirac"}
    assert set(get_args(choices.DiscretizationName)) == {*reference.DISCRETIZATIONS, *reference.ALIASES, "gbt", "dirac"}
    assert get_args(choices.TwoSampleDiscretizationName) == ssm_kernels.two_sample_discretizations


@pytest.mark.parametrize(
    ("type_", "argument", "call"),
    [
        (
            Literal[choices.DiscretizationName, choices.TwoSampleDiscretizationName],
            "discretization",
            lambda **name: ssm_kernels.selective_scan(X, X, A, B, B, **name),
        ),
        (
            Literal[choices.DiscretizationName, choices.TwoSampleDiscretizationName],
            "discretization",
            lambda **name: nn.Mamba(8, **name),
        ),
        (
            Literal[choices.ExponentialDiscretizationName, choices.ExponentialTwoSampleDiscretizationName],
            "discretization",
            lambda **name: ssm_kernels.ssd_chunk_scan(X[..., None], X, -X[0, 0], X[..., None], X[..., None], **name),
        ),
        (choices.CandidateActivation, "candidate_activation", lambda **name: ssm_kernels.mingru_scan(X, X, **name)),
        (choices.CandidateActivation, "candidate_activation", lambda **name: nn.MinLSTM(2, 3, **name)),
        (choices.LiquidActivation, "candidate_activation", lambda **name: nn.Liquid(2, 3, **name)),
        (choices.ConvActivation, "activation", lambda **name: ssm_kernels.causal_conv1d(X, W, **name)),
        (choices.GateActivation, "activation", lambda **name: ssm_kernels.rms_norm_gated(X, X[0, 0], X, **name)),
        (choices.GateActivation, "activation", lambda **name: reference.rms_norm_gated(X, X[0, 0], X, **name)),
        (choices.StepInitialization, "dt_init", lambda **name: nn.Mamba(8, **name)),
        (choices.TimeStepsScale, "time_steps_scale", lambda **name: nn.Mamba(8, **name)),
        (choices.MixerName, "mixer", lambda **name: MambaConfig(**name)),
        (choices.RecomputeName, "recompute", lambda **name: nn.Mamba(8, **name)),
        (choices.RecomputeName, "recompute", lambda **name: nn.Mamba2(64, **name)),
        (choices.RecomputeName, "recompute", lambda **name: MambaConfig(**name)),
        (choices.RecurrenceName, "rnn", lambda **name: RecurrentMixer(8, **name)),
    ],
)
def test_types_have_the_names_that_are_taken(type_: Any, argument: str, call: Callable[..., Any]) -> None:
    # None is the public name of the first two operators' "none".
    spare = {"none"} if type_ in (choices.CandidateActivation, choices.ConvActivation) else set()
    assert set(get_args(type_)) - spare == taken(call, argument) - spare


def test_other_names_are_taken_one_by_one():
    for name in get_args(choices.ConvActivation):
        assert ssm_kernels.causal_conv1d(X, W, activation=name).shape == X.shape
    assert get_args(choices.MixerName) == MIXERS
    for name in get_args(choices.Exchange):
        assert ssm_kernels.distributed.ContextParallel(exchange=name) is not None


def test_every_type_is_in_all():
    types = {name for name, value in vars(choices).items() if name[0].isupper() and get_args(value)}
    assert types == set(choices.__all__)


def test_wrong_types_of_names_are_named():
    with pytest.raises(TypeError, match=r"^selective_scan: expected discretization to be a string, got int$"):
        ssm_kernels.selective_scan(X, X, A, B, B, discretization=3)
    with pytest.raises(TypeError, match=r"^mingru_scan: expected candidate_activation to be a string or None, got int$"):
        ssm_kernels.mingru_scan(X, X, candidate_activation=3)
