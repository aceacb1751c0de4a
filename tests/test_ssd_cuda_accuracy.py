"""ssd_chunk_scan on CUDA: the bars of accuracy in benchmarks/bars.json, on the inputs of bench_ssd.py as Mamba-2 makes them."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")

from benchmarks import bars
from benchmarks.bench_ssd import Case, errors_of, figures

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("each_products")]

CASES = [
    Case(2, 2048, 24),
    Case(2, 2048, 24, z=True),
    Case(2, 2048, 24, dstate=64),
    Case(2, 2048, 24, dstate=256),
    Case(1, 2048, 24, dtype="float32"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bars(case):
    device = torch.device("cuda")
    inputs = case.inputs(device)
    grad_out = torch.empty_like(inputs["x"]).normal_(generator=torch.Generator(device).manual_seed(1))
    row = asdict(case) | errors_of(case, inputs, grad_out)
    judged = bars.judge([(case.name, figures(row, {}))], bars.load("ssd_chunk_scan"))
    assert len(judged) == 2 and all(found["met"] for found in judged), (judged, row["errors"])
