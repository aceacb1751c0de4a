"""CUDA memory in which compute-sanitizer sees each access beyond a tensor's last 16-byte vector (``vector_allocator.cu``)."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import torch

import build_backend


def use_vector_allocator() -> None:
    """Lets this process allocate all CUDA memory so. Call it before the first CUDA tensor. Needs nvcc.

    With ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` instead, allocations end in the middle of a vector, and the sanitizer reports
    reads of the vector's other bytes (docs/cuda.md).
    """
    toolkit = build_backend.find_toolkit([])
    if toolkit is None:
        raise RuntimeError("expected nvcc, which compiles tests/lib/vector_allocator.cu, but found none")
    source = Path(__file__).with_suffix(".cu")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "vector_allocator.so"
        command = [toolkit.home / "bin" / "nvcc", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", source, "-o", library]
        subprocess.run([*map(str, command)], check=True)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "allocate_vectors", "free_vectors")
    torch.cuda.memory.change_current_allocator(allocator)
