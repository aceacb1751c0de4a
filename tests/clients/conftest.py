"""Marks this folder's tests ``clients``, and records which of a client's behaviours a test shows.

A module names its client, a package's name, as ``CLIENT``, and a version other than the installed one as ``CLIENT_VERSION``. A
test with the mark ``serves(behaviour)`` is a cell of the tables in docs/clients.md: its row is the test's parameter ``model``
(or the mark's argument ``model``), its column the behaviour. The record goes into the file of ``--junitxml``, of which
``scripts/clients_page.py`` makes the tables.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.clients)
        if mark := item.get_closest_marker("serves"):
            item.user_properties += record(item, mark).items()


def record(item: pytest.Item, mark: pytest.Mark) -> dict[str, str]:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    client, version = item.module.CLIENT, getattr(item.module, "CLIENT_VERSION", None)
    try:
        version = version or importlib.metadata.version(client)
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "client": client,
        "version": version,
        "model": str(mark.kwargs.get("model", parameters.get("model", client))),
        "behaviour": mark.args[0],
        "device": str(parameters.get("device", "cuda" if item.get_closest_marker("cuda") else "cpu")),
        "torch": torch.__version__.partition("+")[0],
    }
