"""Seeds the draws of this folder's tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Each test draws the same numbers, alone and in any order."""
    torch.manual_seed(0)
