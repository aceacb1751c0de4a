"""Kernels and work partitions of ssd_chunk_scan on CUDA: plain data, which needs no GPU."""

from __future__ import annotations

import subprocess

import pytest
import torch
from build_helpers import compile_program
from ssd_helpers import limited_shared_memory, make_inputs, plan, preferred_products

CHUNK, UNIT_ROWS, UNIT_COLUMNS, UNITS = 64, 64, 128, 2


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def test_partition_counts_in_64_bits(tmp_path):
    """Sizes whose products with a chunk's length, or with each other, do not fit into 32 bits."""
    calls = [  # sequences, seqlen, heads, groups, headdim, dstate
        (2, 300, 24, 1, 64, 128),
        (1, 2**31, 1, 1, 64, 64),
        (3, 2**33 + 1, 80, 8, 256, 256),
        (1, 0, 1, 1, 8, 8),
        (1, 1, 2**30, 1, 256, 256),
        (2**31, 1, 8, 8, 64, 128),
        (2**20, 64, 2**20, 2**10, 128, 128),
    ]
    program = compile_program("ssd_plan", tmp_path)
    arguments = [str(size) for call in calls for size in call]
    lines = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True).stdout.splitlines()
    for (sequences, seqlen, heads, groups, headdim, dstate), line in zip(calls, lines, strict=True):
        units = heads * ceil_div(headdim, UNIT_ROWS) * (1 if dstate <= UNIT_COLUMNS else UNITS)
        work_tiles = sequences * groups * ceil_div(units // groups, UNITS)
        chunks = max(1, ceil_div(seqlen, CHUNK))
        assert line == f"{units} {work_tiles} {chunks} {(chunks - 1) * CHUNK}"


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    ("options", "products", "chunk"),
    [
        ({}, "double", 16),
        ({"dtype": torch.bfloat16, "headdim": 64, "dstate": 64}, "float", 64),
        ({"dtype": torch.float32, "chunk_size": 24}, "float", 24),
        ({"dtype": torch.float32, "chunk_size": 2**40}, "float", 64),
    ],
)
def test_plan_of_the_fallback(options, products, chunk, is_backward):
    """The length of chunks by the state's size or by chunk_size, up to a limit."""
    assert plan(make_inputs(**options), is_backward) == {"kernel": "aten", "products": products, "chunk": str(chunk)}


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("options", "kibibytes", "forward", "backward"),
    [
        ({"dtype": torch.float64}, 99, {"kernel": "aten"}, {"kernel": "aten"}),
        ({"dtype": torch.bfloat16}, 99, {"kernel": "sm80", "products": "16_bit"}, {"kernel": "sm80", "columns": "64"}),
        ({"dtype": torch.float16, "dstate": 256}, 146, {"kernel": "sm80"}, {"kernel": "sm80", "columns": "128"}),
        ({"dtype": torch.float16, "dstate": 256}, 145, {"kernel": "aten"}, {"kernel": "aten"}),
        ({"dtype": torch.float32}, 141, {"kernel": "aten"}, {"kernel": "aten"}),
        ({"dtype": torch.float32, "dstate": 128}, 142, {"products": "3xTF32"}, {"kernel": "sm80", "columns": "64"}),
        ({"dtype": torch.float32, "dstate": 256, "z": False}, 142, {"kernel": "aten"}, {"kernel": "sm80", "columns": "64"}),
        ({"dtype": torch.float32, "dstate": 256, "z": True}, 142, {"kernel": "aten"}, {"kernel": "aten"}),
        ({"dtype": torch.float32, "seqlen": 32}, 142, {"kernel": "short"}, {"kernel": "sm80"}),
        ({"dtype": torch.float32, "seqlen": 32, "log_decay": True}, 142, {"kernel": "sm80"}, {"kernel": "sm80"}),
        ({"dtype": torch.bfloat16, "log_decay": True}, 99, {"kernel": "sm80"}, {"kernel": "sm80", "columns": "64"}),
        ({"dtype": torch.float64, "log_decay": True}, 99, {"kernel": "aten"}, {"kernel": "aten"}),
    ],
    ids=str,
)
def test_plan_of_kernels_with_little_shared_memory(options, kibibytes, forward, backward):
    inputs = make_inputs(**{"headdim": 64, "dstate": 64, "seqlen": 100, "device": "cuda"} | options)
    with limited_shared_memory(1024 * kibibytes), preferred_products("mma"):
        for is_backward, expected in ((False, forward), (True, backward)):
            assert plan(inputs, is_backward).items() >= expected.items()
