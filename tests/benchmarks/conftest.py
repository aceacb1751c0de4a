"""Forgets flash-linear-attention, which benchmarks import as a peer, after the tests of a file."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest
from fla_package import transformers_without_fla, without


@pytest.fixture(scope="module", autouse=True)
def without_peers_afterwards() -> Iterator[None]:
    has_transformers = importlib.util.find_spec("transformers") is not None
    with without("fla"), transformers_without_fla() if has_transformers else contextlib.nullcontext():
        yield
