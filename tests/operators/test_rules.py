"""The table of rules for vmap, flops, DTensor and exporters: every public operator has a row, and every row each column."""

from __future__ import annotations

import pytest
import torch
from decoding_helpers import DECODING_STEPS

from ssm_kernels import ops
from ssm_kernels.rules import ROWS, column
from ssm_kernels.rules._table import Row

# Exporters take neither updates in place nor summaries, which only ranks that share a sequence call.
WITHOUT_DECOMPOSITION = {
    *DECODING_STEPS,
    "mamba3_state_update",
    "mlstm_step",
    *(name for name in ops.__all__ if name.endswith("_summary")),
}
# Rows of operators inside layers' own operators, which neither vmap nor DTensor nor an exporter reaches.
FLOPS_ALONE = {"_copy_rows", "_mamba_inner", "_mixer_parameters"}


def test_public_operators_have_rows():
    assert {*ops.__all__} <= {*ROWS}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_each_column(name):
    if name in FLOPS_ALONE:
        expected = {"flops"}
    else:
        expected = {*Row._fields} - ({"decompositions"} if name in WITHOUT_DECOMPOSITION else set())
    assert {field for field in Row._fields if getattr(ROWS[name], field)} == expected


@pytest.mark.parametrize("field", Row._fields)
def test_rows_name_operators(field):
    assert [name for name in column(field) if not hasattr(torch.ops.ssm_kernels, name)] == []


@pytest.mark.parametrize("name", [name for name in ROWS if name not in FLOPS_ALONE])
def test_rules_reach_the_operators_kernels(name):
    """vmap maps an operator itself, or one that its calls reach; flops count forward's operators and backward's."""
    row = ROWS[name]
    assert name in row.batching and name in row.flops
    assert {*row.axes} <= {*row.flops} and {*row.decompositions} <= {*row.flops}
