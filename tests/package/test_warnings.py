"""Warnings point at the line of the user's code, through however many frames of PyTorch and of this package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_helpers import make_layer
from model_helpers import make_model, make_tokens
from torch import nn

from ssm_kernels.nn import Mamba, MinGRU


class Wrapped(nn.Module):
    """A module of the user around one of ours; the warning's line is here."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


class Derived(MinGRU):
    """A layer whose constructor is the user's."""

    def __init__(self) -> None:
        super().__init__(3, 4, dropout=0.5)


def untie() -> nn.Module:
    model = make_model("Mamba")
    model.lm_head.load_state_dict({"weight": model.lm_head.weight.detach().clone()}, assign=True)
    return model


def with_older_name(layer: nn.Module) -> None:
    layer(torch.zeros(5, 2, 3), h_0=torch.zeros(1, 2, 4))


def load(layer: nn.Module) -> None:
    layer.load_state_dict(Mamba(16).state_dict())


# By the text of the user's line, the call that warns.
CALLS: dict[str, Callable[[], Any]] = {
    "MinGRU(3, 4, dropout=0.1)": lambda: MinGRU(3, 4, dropout=0.1),
    "super().__init__(3, 4, dropout=0.5)": Derived,
    "return self.layer(*args, **kwargs)": lambda: Wrapped(untie())(make_tokens(1, 4)),
    "untie()(make_tokens(1, 4))": lambda: untie()(make_tokens(1, 4)),
    "layer(torch.zeros(5, 2, 3), h_0=": lambda: with_older_name(MinGRU(3, 4)),
    "layer.load_state_dict(Mamba(16)": lambda: load(nn.Sequential(Mamba(16, discretization="zoh_exact"))[0]),
    "torch.utils.checkpoint": lambda: torch.utils.checkpoint.checkpoint(untie(), make_tokens(1, 4), use_reentrant=False),
}


@pytest.mark.parametrize("text", CALLS)
def test_a_warning_has_the_line_of_the_users_code(text):
    with pytest.warns(Warning) as caught:
        CALLS[text]()
    assert [each.filename for each in caught] == [__file__]
    lines = inspect.getsource(inspect.getmodule(Wrapped)).splitlines()
    assert text in lines[caught[0].lineno - 1]


def test_a_warning_is_shown_once_a_line():
    """Python's default rule, which a warning at a line of PyTorch would apply to all models together."""
    with pytest.warns(FutureWarning) as caught:
        import warnings

        warnings.simplefilter("default")
        layer = make_layer("MinGRU", num_layers=1, dtype=torch.float32)
        x, hx = torch.zeros(5, 2, layer.input_size), torch.zeros(1, 2, layer.hidden_size)
        for _ in range(2):
            layer(x, h_0=hx)
        layer(x, h_0=hx)
    assert len(caught) == 2
