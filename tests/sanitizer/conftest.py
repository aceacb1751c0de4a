"""Memory in which compute-sanitizer sees each access beyond a tensor's last 16-byte vector, for all tests of this folder."""

from __future__ import annotations

import pytest
import sanitizer


@pytest.fixture(scope="session", autouse=True)
def vector_memory() -> None:
    if sanitizer.DEVICE == "cuda":
        from vector_allocator import use_vector_allocator

        use_vector_allocator()
