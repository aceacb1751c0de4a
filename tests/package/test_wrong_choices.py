"""Arguments that a user of another library or of a misspelt name passes: the error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ssm_kernels
from ssm_kernels import nn, reference
from ssm_kernels.compat.causal_conv1d import causal_conv1d_fn
from ssm_kernels.compat.mamba2_simple import Mamba2Simple
from ssm_kernels.compat.mixer_seq_simple import create_block
from ssm_kernels.distributed._group_calls import choose_exchange
from ssm_kernels.models import MambaConfig, MixerModel, RecurrentMixer
from ssm_kernels.models.checkpoints import override


@pytest.mark.parametrize("flags", [(True,), (True, True)], ids=["softplus", "both"])
def test_flags_by_position_as_mamba_ssm_takes_them(flags: tuple[bool, ...]) -> None:
    # The message names this path.
    from ssm_kernels.compat.selective_scan import selective_scan_fn

    u, A, B = torch.ones(1, 2, 3), -torch.ones(2, 4), torch.ones(1, 4, 3)
    with pytest.raises(TypeError, match=r"^selective_scan: .*delta_softplus= and return_last_state= by.*selective_scan_fn"):
        ssm_kernels.selective_scan(u, u, A, B, B, None, None, None, *flags)
    selective_scan_fn(u, u, A, B, B, None, None, None, *flags)


def test_integer_beyond_a_float() -> None:
    f = torch.ones(1, 2, 3)
    with pytest.raises(ValueError, match=r"^liquid_scan: expected dt within a float's range"):
        ssm_kernels.liquid_scan(f, f, 10**400)


U, A, B = torch.ones(1, 2, 3), -torch.ones(2, 4), torch.ones(1, 4, 3)
# Every place that takes a name; one rule suggests the nearest.
PLACES: dict[str, Callable[[str], Any]] = {
    "operator": lambda name: ssm_kernels.selective_scan(U, U, A, B, B, discretization=name),
    "torch.ops": lambda name: torch.ops.ssm_kernels.selective_scan(U, U, A, B, B, discretization=name),
    "layer": lambda name: nn.Mamba(8, discretization=name),
    "reference": lambda name: reference.selective_scan(U, U, A, B, B, discretization=name),
    "config": lambda name: MambaConfig(discretization=name),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("zho", "zoh"),
        ("ZOH", "zoh"),
        ("zoh-exact", "zoh_exact"),
        ("exact_zoh", None),
        ("blinear", "bilinear"),
        ("Backward Euler", "backward_euler"),
        ("high_order", "highorder"),
        ("tustin", None),
        ("", None),
        ("z\udc80h", "zoh"),
        ("bilinear" * 100, None),
    ],
)
def test_every_place_names_the_same_nearest_choice(place: str, given: str, meant: str | None) -> None:
    if place in ("operator", "torch.ops") and "\udc80" in given:
        pytest.skip("PyTorch refuses strings that are not valid UTF-8")
    with pytest.raises(ValueError, match="unknown discretization") as error:
        PLACES[place](given)
    suggestion = "" if meant is None else f"; did you mean '{meant}'?"
    assert str(error.value).partition("; did")[1:] == suggestion.partition("; did")[1:]


@pytest.mark.parametrize(
    ("call", "error", "meant"),
    [
        (lambda: nn.MinGRU(2, 3, candidate_activation="tahn"), ValueError, "tanh"),
        (lambda: ssm_kernels.rms_norm_gated(U, U[0, 0], U, activation="GELU-tanh"), ValueError, "gelu_tanh"),
        (lambda: reference.rms_norm_gated(U, U[0, 0], U, activation="sigmod"), ValueError, "sigmoid"),
        (lambda: ssm_kernels.causal_conv1d(U, torch.ones(3, 4), activation="SiLU"), ValueError, "silu"),
        (lambda: reference.causal_conv1d(U, torch.ones(3, 4), activation="siwsh"), ValueError, "swish"),
        (lambda: nn.Mamba(8, dt_init="randon"), ValueError, "random"),
        (lambda: nn.Mamba(8, recompute="al"), ValueError, "all"),
        (lambda: nn.Mamba2(64, recompute="chaep"), ValueError, "cheap"),
        (lambda: MambaConfig(recompute="None"), ValueError, "none"),
        (lambda: MambaConfig(mixer="mamba-2"), ValueError, "Mamba2"),
        (lambda: MambaConfig(mixer="mingru"), ValueError, "MinGRU"),
        (lambda: MambaConfig(ssm_cfg={"layer": "mamba2"}), ValueError, "Mamba2"),
        (lambda: MambaConfig(ssm_cfg={"d_stat": 4}), TypeError, "d_state"),
        (lambda: MambaConfig.from_dict({"n_layers": 4}), ValueError, "n_layer"),
        (lambda: MixerModel(MambaConfig(d_model=8, n_layer=1), {"initialiser_range": 1}), TypeError, "initializer_range"),
        (lambda: override(MambaConfig(d_model=8), {"discretisation": "foh"}), TypeError, "discretization"),
        (lambda: RecurrentMixer(8, rnn="minlstm"), ValueError, "MinLSTM"),
        (lambda: choose_exchange("scan", "chains", 2), ValueError, "chain"),
        (lambda: causal_conv1d_fn(U, torch.ones(2, 4), activation="SiLU"), NotImplementedError, "silu"),
        (lambda: Mamba2Simple(64, activation="swich"), NotImplementedError, "swish"),
        (lambda: create_block(8, ssm_cfg={"layer": "mamba2"}), ValueError, "Mamba2"),
    ],
)
def test_other_names_name_the_nearest(call: Callable[[], Any], error: type[Exception], meant: str) -> None:
    with pytest.raises(error, match=rf"; did you mean '{meant}'\?$"):
        call()


def test_a_letter_is_near_to_no_other_letter():
    with pytest.raises(ValueError, match=r"^MinGRU: unknown candidate_activation 'x', expected one of [^;]*$"):
        nn.MinGRU(2, 3, candidate_activation="x")


def test_layers_name_no_choice_when_none_is_near() -> None:
    with pytest.raises(ValueError, match=r"^Mamba: unknown discretization 'xyzw', expected one of \[[^;]*\]$"):
        nn.Mamba(8, discretization="xyzw")


def test_transposed_layout_names_transpose() -> None:
    u, A, B = torch.ones(1, 7, 2), -torch.ones(2, 4), torch.ones(1, 4, 7)
    with pytest.raises(ValueError, match=r"^selective_scan: .*u\.transpose\(1, 2\)"):
        ssm_kernels.selective_scan(u, u, A, B, B)


def test_step_of_mamba2_names_expand() -> None:
    x, dt, A, B = torch.ones(1, 3, 2), torch.ones(1, 3), -torch.ones(3), torch.ones(1, 1, 4)
    with pytest.raises(ValueError, match=r"^selective_state_update: .*expand"):
        ssm_kernels.selective_state_update(torch.zeros(1, 3, 2, 4), x, dt, A, B, B)
