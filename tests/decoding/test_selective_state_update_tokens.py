"""selective_state_update as servers call it: its own options and axes; test_decoding_tokens.py has what it shares."""

from __future__ import annotations

import itertools

import pytest
import torch
from decoding_helpers import CALLS, SELECTIVE_STATE_UPDATE
from helpers import METHODS, says
from torch import Tensor

OPERATOR = "selective_state_update"

assert_matches, make_token_inputs = SELECTIVE_STATE_UPDATE.assert_matches, SELECTIVE_STATE_UPDATE.make_token_inputs


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("discretization", METHODS)
def test_every_method(discretization, tied, device):
    for dtype, dstate in itertools.product((torch.float64, torch.bfloat16), (16, 200)):
        inputs = make_token_inputs(
            **CALLS["packed_accepted"], heads=4, dim=5, dstate=dstate, discretization=discretization, dtype=dtype, device=device
        )
        if tied:
            inputs["A"] = inputs["A"][:, :1, :1].expand_as(inputs["A"])
        assert_matches(inputs | {"dt_limit": (0.1, 0.9)})
        assert_matches(inputs | {"A": inputs["A"].abs().log(), "A_is_log": True})


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias", "dt_softplus"])
def test_without_an_option(absent, device):
    assert_matches(make_token_inputs(**CALLS["tokens"], dstate=16, device=device, **{absent: False}))


@pytest.mark.parametrize("sizes", [(3, None, 1000, 16, 8), (2, 80, 64, 128, 1), (1, 24, 64, 128, 8)])
def test_sizes_of_models(sizes, device):
    rows, heads, dim, dstate, groups = sizes
    options = {"rows": rows, "heads": heads, "dim": dim, "dstate": dstate, "groups": groups, "device": device}
    assert_matches(make_token_inputs(**options, tokens=3, destination=3, dtype=torch.float32))
    assert_matches(make_token_inputs(**options, destination=0, dtype=torch.float32))


SHAPES = {
    "x": ((2, 3, 4, 1), "expected x of shape (batch, dim), got [2, 3, 4, 1]"),
    "dt": ((2, 2, 4), "expected dt of shape (batch, tokens, dim) = [2, 3, 4], got [2, 2, 4]"),
    "B": ((2, 3), "expected B of shape (batch, tokens, dstate) or (batch, tokens, groups, dstate), got [2, 3]"),
    "C": ((2, 3, 5), "expected C of shape (batch, tokens, dstate) = [2, 3, 3], got [2, 3, 5]"),
    "out": ((2, 4), "expected out of shape (batch, tokens, dim) = [2, 3, 4], got [2, 4]"),
    # The tokens of a packed x are not in rows.
    "cu_seqlens": ((3,), "expected x of shape (tokens, dim), got [2, 3, 4]"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shape(name, device):
    inputs = make_token_inputs(tokens=3, dtype=torch.float32, device=device)
    shape, message = SHAPES[name]
    like = inputs["state_batch_indices"] if name == "cu_seqlens" else inputs["x"]
    for on_meta in (False, True):
        changed = inputs | {name: like.new_zeros(shape)}
        if on_meta:
            changed = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in changed.items()}
        with pytest.raises(ValueError, match=says(f"selective_state_update: {message}")):
            SELECTIVE_STATE_UPDATE.decode(changed)
