"""How ssd_chunk_scan partitions a call for its CUDA kernels: plain data, which needs no GPU."""

from __future__ import annotations

import subprocess

from build_helpers import compile_program

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
