"""ssd_chunk_scan on CUDA: the bars of accuracy in benchmarks/bars.json, on the inputs of bench_ssd.py as Mamba-2 makes them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks print their tables with rich")

from benchmarks import bars
from benchmarks.bench_ssd import Case, LogCase, figures
from benchmarks.benchmark import relative_error

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("each_products")]

CASES = [
    Case(2, 2048, 24),
    Case(2, 2048, 24, z=True),
    Case(2, 2048, 24, dstate=64),
    Case(2, 2048, 24, dstate=256),
    Case(1, 2048, 24, dtype=torch.float32),
    LogCase(2, 2048, 16, headdim=128, groups=16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bars(case):
    ours = case.contender(torch.device("cuda"))
    found = case.compared(ours)
    errors = {name: relative_error(found[name], exact) for name, exact in case.exact(ours).items()}
    row = {**case.fields, **case.errors_of_out(ours.inputs), "errors": {"ours": errors}}
    judged = bars.judge([(case.name, figures(row, {}))], bars.load("ssd_chunk_scan"))
    assert len(judged) == 2 and all(found["met"] for found in judged), (judged, row["errors"])
