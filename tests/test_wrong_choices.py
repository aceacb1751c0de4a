"""Arguments that a user of another library or of a misspelt name passes: the error says what to write instead."""

from __future__ import annotations

import pytest
import torch

import ssm_kernels
from ssm_kernels import nn


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


@pytest.mark.parametrize(("given", "meant"), [("zho", "zoh"), ("ZOH", "zoh"), ("zoh-exact", "zoh_exact")])
def test_layers_name_the_nearest_choice(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"^Mamba: .*; did you mean '{meant}'\\?$"):
        nn.Mamba(8, discretization=given)


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
