"""Fixtures that choose the MMA instruction of ssd_chunk_scan on CUDA."""

from __future__ import annotations

import pytest
import torch
from ssd_helpers import preferred_products


@pytest.fixture
def variant(request):
    """A row of the table in ssd_variants.py. The test runs with the row's preferred MMA instruction."""
    with preferred_products(request.param.products):
        yield request.param


@pytest.fixture(params=["wgmma", "mma"])
def each_products(request):
    """Runs the test with either MMA preference of ssd_chunk_scan; float32 and float64 have one kind of products."""
    dtype = request.node.callspec.params.get("dtype")
    if request.param == "mma" and dtype in (torch.float32, torch.float64):
        pytest.skip(f"{dtype} has one kind of products")
    with preferred_products(request.param):
        yield
