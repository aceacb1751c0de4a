"""Writes the table of clients in docs/clients.md: which behaviours of which models of other packages the tests have shown.

    pytest -m clients --junitxml results.xml && python scripts/clients_page.py results.xml

The results are kept in docs/clients.json, and those of a file replace the older ones of the same versions of its clients and of
PyTorch on the same devices. Without a file the script only makes the page from docs/clients.json.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIELDS = ("client", "version", "model", "behaviour", "device", "torch")
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->\n"
DEVICES = {"cpu": "CPU", "cuda": "CUDA"}

Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", nargs="*", type=Path, help="files that pytest --junitxml wrote")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "clients.json", help="the results of all runs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "clients.md", help="the page that has the table")
    options = parser.parse_args()
    rows: list[Row] = json.loads(options.results.read_text()) if options.results.exists() else []
    for path in options.junit:
        new = read_junit(path)
        run = {run_of(row) for row in new}
        rows = [row for row in rows if run_of(row) not in run] + new
    if options.junit:
        rows.sort(key=lambda row: [row[field] for field in FIELDS])
        options.results.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    page = options.page.read_text()
    before, rest = page.split(BEGIN)
    options.page.write_text(before + BEGIN + "\n" + table(rows) + "\n" + END + rest.split(END)[1])


def run_of(row: Row) -> tuple[str, ...]:
    """Identifies the run that gave a result."""
    return tuple(row[field] for field in ("client", "version", "device", "torch"))


def read_junit(path: Path) -> list[Row]:
    """One row for each client, model, behaviour and device; it works if all of its tests passed. Skipped tests make no row."""
    outcomes: dict[tuple[str, ...], bool] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        properties = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        if "client" not in properties or case.find("skipped") is not None:
            continue
        key = tuple(str(properties[field]) for field in FIELDS)
        passed = case.find("failure") is None and case.find("error") is None
        outcomes[key] = outcomes.get(key, True) and passed
    return [dict(zip(FIELDS, key, strict=True)) | {"works": "yes" if works else "no"} for key, works in outcomes.items()]


def table(rows: list[Row]) -> str:
    """A table for each version of a client: a row for each model, a column for each behaviour, where it works."""
    text = []
    for client, version in dict.fromkeys((row["client"], row["version"]) for row in rows):
        own = [row for row in rows if (row["client"], row["version"]) == (client, version)]
        behaviours = list(dict.fromkeys(row["behaviour"] for row in own))
        text += [f"`{client}` {version}, with PyTorch {versions_of_torch(own)}:", ""]
        text += ["| | " + " | ".join(behaviours) + " |", "|---" * (1 + len(behaviours)) + "|"]
        for model in dict.fromkeys(row["model"] for row in own):
            cells = [cell([r for r in own if (r["model"], r["behaviour"]) == (model, name)]) for name in behaviours]
            text.append(f"| {model} | " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def versions_of_torch(rows: list[Row]) -> str:
    """The versions of PyTorch on each device, such as "2.11.0 (CPU, CUDA)"."""
    devices: dict[str, list[str]] = {}
    for torch, device in sorted({(row["torch"], row["device"]) for row in rows}):
        devices.setdefault(torch, []).append(DEVICES[device])
    return " and ".join(f"{torch} ({', '.join(names)})" for torch, names in devices.items())


def cell(rows: list[Row]) -> str:
    """The devices on which every run passed, and those on which one failed."""
    words = []
    for device, name in DEVICES.items():
        works = [row["works"] == "yes" for row in rows if row["device"] == device]
        if works:
            words.append(name if all(works) else f"**{name} fails**")
    return ", ".join(words) or "–"


if __name__ == "__main__":
    main()
