"""The bits of a row's results do not depend on the rest of the batch, and on the CPU no bits depend on the number of threads.

docs/numerics.md has the exceptions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from decoding_helpers import DECODING_STEPS
from helpers import assert_equal, dtypes, kernel_choices
from operators import OPERATORS, over_options
from torch import Tensor

OPERATOR = "every operator"

# The row is this one of the batch of eight; the smaller batches have it at other places.
ROW = 5
RESULTS = ("out", "state")
BATCHES = ([ROW], [1, ROW, 3], [ROW, 0, 2], list(range(8)))


def unpacked(options_of: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options for name, options in options_of.items() if "cu_seqlens" not in options}


every_option = over_options(OPERATORS, lambda operator: unpacked(operator.options))
every_case = over_options(OPERATORS, lambda operator: unpacked(operator.cases))


def of_rows(rows: list[int], values: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {name: values[name][rows] for name in names}


@dtypes(torch.float32, torch.bfloat16)
@every_option
def test_a_row_in_any_batch(operator, options, dtype, device):
    """Also on CUDA, where a longer or wider batch may take other kernels."""
    options = operator.several_chunks | options | {"dtype": dtype, "device": device}
    inputs = operator.make_inputs(**options, batch=8)
    cotangents = operator.make_cotangents(inputs)
    own = operator.row_names(**options)
    names = [*operator.results, *(f"grad_{name}" for name in own if inputs[name].is_floating_point())]
    names = [name for name in names if name not in operator.sums_of_pytorch(inputs)]
    if not names:
        pytest.skip("PyTorch's matmuls")
    for kernels in kernel_choices(operator.family, device):
        with kernels:
            results = []
            for rows in BATCHES:
                batch = inputs | of_rows(rows, inputs, own)
                found = operator.evaluate(operator, batch, tuple(cotangent[rows] for cotangent in cotangents))
                results.append({name: found[name][rows.index(ROW)] for name in names})
        for other in results[1:]:
            assert_equal(other, results[0])


@pytest.mark.parametrize("name", DECODING_STEPS)
def test_a_row_in_any_batch_of_a_decoding_step(name, device):
    decoding = DECODING_STEPS[name]
    for size, dtype in itertools.product((decoding.large, *decoding.sizes), (torch.float32, torch.bfloat16)):
        options = {**size, "dtype": dtype, "state_dtype": dtype, "device": device}
        inputs = decoding.make_inputs(**options, batch=40)
        own = decoding.row_names(**options)
        for kernels in kernel_choices(decoding.family, device):
            with kernels:
                results = []
                for rows in (*BATCHES, list(range(40)), list(range(40))):
                    found = decoding.step(inputs | of_rows(rows, inputs, own))
                    results.append({result: value[rows.index(ROW)] for result, value in zip(RESULTS, found, strict=True)})
            for other in results[1:]:
                assert_equal(other, results[0])


@dtypes(torch.float32, torch.bfloat16)
@every_case
def test_the_same_bits_every_time_whatever_the_number_of_threads(operator, options, dtype, device, two_threads):
    """In batches of one and of several rows, which tasks divide in different ways."""
    layouts = operator.layouts if len(operator.layouts) == 1 else ("contiguous", "transposed")
    for batch, layout in itertools.product((1, 3), layouts):
        strides = {} if layout == "contiguous" or "layout" in options else {"layout": layout}
        sizes = operator.large | {"batch": batch, "seqlen": 300}
        inputs = operator.make_inputs(**(sizes | options | {"dtype": dtype}), **strides, device=device)
        if set(operator.results) <= set(operator.sums_of_pytorch(inputs)):
            pytest.skip("PyTorch's matmuls")
        cotangents = operator.make_cotangents(inputs)
        first = operator.evaluate(operator, inputs, cotangents)
        for threads in ((2, 5) if batch == 1 else (1, 5)) if device == "cpu" else (2,):
            torch.set_num_threads(threads)
            assert_equal(operator.evaluate(operator, inputs, cotangents), first)
        torch.set_num_threads(2)
