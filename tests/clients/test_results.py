"""docs/clients.json, of which scripts/clients_page.py makes the tables: each cell of a test is there, and the page fits it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_cell_of_a_test_has_a_result(request: pytest.FixtureRequest) -> None:
    """A new mark ``serves`` needs a run; see the end of docs/clients.md."""
    fields = ("client", "model", "behaviour")
    found = {tuple(row[field] for field in fields) for row in json.loads((ROOT / "docs" / "clients.json").read_text())}
    properties = [dict(item.user_properties) for item in request.session.items]
    # Tests of a client that is not installed are skipped, and make no row.
    installed = [each for each in properties if each.get("version", "not installed") != "not installed"]
    cells = {tuple(each[field] for field in fields) for each in installed}
    assert sorted(cells - found) == []


def test_page_is_made_of_the_results(tmp_path: Path) -> None:
    page = ROOT / "docs" / "clients.md"
    shutil.copy(page, tmp_path)
    subprocess.run([sys.executable, ROOT / "scripts" / "clients_page.py", "--page", tmp_path / page.name], check=True)
    assert (tmp_path / page.name).read_text() == page.read_text()
