"""The section "Layers and models" of a page of results, made of the JSON file of ``bench_layers.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.markdown import table

__all__ = ["layers"]

Result = dict[str, Any]
PEER = "mamba_ssm"
RELATIONS = {"speed": "≥", "share": "≤", "limit": "≤"}


def value(row: Result, who: str, quantity: str) -> float | None:
    found = (row.get(who) or {}).get(quantity)
    return found["median"] if isinstance(found, dict) else found


def cell(row: Result, who: str, quantity: str, unit: float, decimals: int) -> str:
    """A figure in a unit, with its spread if it is ours, and a mark if it is recorded."""
    figures, found = row.get(who) or {}, value(row, who, quantity)
    if found is None:
        return "unsupported" if figures.get("unsupported") else ""
    words = f"{found / unit:.{decimals}f}"
    if who == "ours" and isinstance(figures[quantity], dict):
        words += f" ± {100 * figures[quantity]['spread']:.0f} %"
    return words + (" (recorded)" if figures.get("recorded") else "")


def ratio(row: Result, quantity: str, other: str = PEER, *, of_ours: bool = False) -> str:
    """The other's figure over ours, or ours over the other's."""
    ours, theirs = value(row, "ours", quantity), value(row, other, quantity)
    if ours is None or theirs is None:
        return ""
    return f"{ours / theirs if of_ours else theirs / ours:.2f}"


def bar(row: Result, quantity: str, unit: float = 1.0, other: str | None = PEER) -> str:
    """The row's bar, whether it is met, and the goal."""
    for judged in row["judged"]:
        if judged["quantity"] == quantity and judged["other"] == other:
            words = f"{RELATIONS[judged['kind']]} {judged['bar'] / unit:g} {'met' if judged['met'] else '**missed**'}"
            if judged["goal"] is not None:
                words += f", goal {judged['goal'] / unit:g} {'met' if judged['goal_met'] else 'missed'}"
            return words
    return ""


def times(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        line = [row["name"]]
        for quantity in ("forward", "both"):
            line += [cell(row, who, quantity, 1e-3, 3) for who in ("ours", "before", PEER)]
            line += [ratio(row, quantity), bar(row, quantity)]
        lines.append(line)
    columns = ["before", PEER, "speed-up", "bar"]
    return table(["layer", "forward", *columns, "forward + backward", *columns], lines)


def memory(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        line = [row["name"], *(cell(row, who, "peak", 1e6, 0) for who in ("ours", "before", PEER))]
        line += [ratio(row, "peak", of_ours=True), bar(row, "peak")]
        line += [cell(row, who, "kept", 1e3, 1) for who in ("ours", PEER)]
        line += [bar(row, "kept", 1e3, None), *(cell(row, who, "held", 1e3, 1) for who in ("ours", PEER))]
        lines.append(line)
    header = ["layer", "peak, MB", "before", PEER, "ours / mamba_ssm", "bar"]
    return table([*header, "kept, kB", PEER, "bar", "held, kB", PEER], lines)


def steps(rows: Sequence[Result]) -> str:
    lines = [
        [row["name"], *(cell(row, who, "step", 1e-6, 2) for who in ("ours", PEER)), ratio(row, "step"), bar(row, "step")]
        for row in rows
    ]
    return table(["step", "µs", PEER, "speed-up", "bar"], lines)


def latencies(rows: Sequence[Result]) -> str:
    lines = [
        [row["name"], *(cell(row, who, "replay", 1e-3, 4) for who in ("ours", "before", PEER)), bar(row, "replay", 1e-3, None)]
        for row in rows
    ]
    return table(["layers", "ms", "before", PEER, "bar"], lines)


def models(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        line = [row["name"], *(cell(row, who, "step", 1e-3, 1) for who in ("ours", "before", PEER))]
        for who in ("ours", PEER):
            seconds = value(row, who, "step")
            line.append("" if seconds is None else f"{row['tokens'] / seconds / 1e3:.0f}")
        line += [ratio(row, "step"), bar(row, "step")]
        lines.append(line + [cell(row, who, "peak", 2**30, 1) for who in ("ours", "before", PEER)])
    header = ["model", "ms", "before", PEER, "10³ tokens/s", PEER, "speed-up", "bar", "peak, GiB", "before", PEER]
    return table(header, lines)


def generation(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        line = [row["name"], *(cell(row, who, "generate", 1e-3, 1) for who in ("ours", PEER))]
        for who in ("ours", PEER):
            seconds = value(row, who, "generate")
            line.append("" if seconds is None else f"{row['tokens'] / seconds:.0f}")
        lines.append([*line, ratio(row, "generate"), bar(row, "generate")])
    return table(["model", "ms", PEER, "tokens/s", PEER, "speed-up", "bar"], lines)


def operators(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        for quantity in ("forward", "backward"):
            seconds = value(row, "ours", quantity)
            line = [row["name"], quantity, cell(row, "ours", quantity, 1e-3, 4)]
            line += [f"{row['bytes'][quantity] / seconds / 1e9:.0f}", cell(row, "copy", quantity, 1e-3, 4)]
            line += [ratio(row, quantity, "copy"), bar(row, quantity, other="copy")]
            for other in (PEER, "PyTorch"):
                line += [cell(row, other, quantity, 1e-3, 4), ratio(row, quantity, other), bar(row, quantity, other=other)]
            lines.append(line)
    others = [PEER, "speed-up", "bar", "PyTorch", "speed-up", "bar"]
    return table(["operator", "", "ms", "GB/s", "copy, ms", "of a copy", "bar", *others], lines, left=2)


def errors(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        line = [row["name"]]
        for who in ("ours", PEER):
            found = row["errors"].get(who, {})
            for of_gradients in (False, True):
                chosen = {name: error for name, error in found.items() if name.startswith("grad_") == of_gradients}
                worst = max(chosen, key=lambda name: chosen[name], default=None)
                line.append("" if worst is None else f"{chosen[worst]:.1e} ({worst})")
        lines.append(line)
    return table(["case", "outputs", "gradients", f"{PEER}, outputs", "gradients"], lines)


# By kind of row: what stands before its table, and the table.
PARTS: dict[str, tuple[str, Callable[[Sequence[Result]], str]]] = {
    "layer": (
        "Milliseconds of a layer, projections included. *Forward* is without gradients; *forward + backward* ends with the\n"
        "gradients of the input and of every parameter:",
        times,
    ),
    "memory": (
        "Memory of these layers. *Peak*: of forward and backward, over what was allocated before. *Kept*: bytes per token\n"
        "that the forward saves for backward, each storage once, without the parameters and the layer's own input. *Held*:\n"
        "bytes per token that are allocated between forward and backward, without the output:",
        memory,
    ),
    "decode": (
        "Microseconds of a decoding step of a layer, in a CUDA graph of steps of different layers with different states, too\n"
        "many for the second-level cache:",
        steps,
    ),
    "latency": ("Milliseconds of one replay of a CUDA graph with the forward of two layers:", latencies),
    "model": (
        "A training step of `models.MambaLM` with float32 parameters under autocast to bfloat16, vocabulary 50280: forward,\n"
        "loss and backward, without the optimizer, beside `MambaLMHeadModel`:",
        models,
    ),
    "generation": (
        "Generation of the most probable tokens by a model in bfloat16, prompt included, steps in a CUDA graph; wall-clock\n"
        "milliseconds of the whole call:",
        generation,
    ),
    "operator": (
        "Operators between projections and scans. GB/s and the copy count what must be moved, every activation and gradient\n"
        "once; *of a copy* is the copy's time over ours:",
        operators,
    ),
}


def layers(result: Result) -> str:
    parts = []
    for kind, (text, make_table) in PARTS.items():
        rows = [row for row in result["rows"] if row["kind"] == ("layer" if kind == "memory" else kind)]
        if rows:
            parts.append(f"{text}\n\n{make_table(rows)}")
    reasons = dict.fromkeys(result["skipped"].values())
    skipped = [
        f"Not measured ({reason}): {', '.join(name for name, why in result['skipped'].items() if why == reason)}."
        for reason in reasons
    ]
    refused = [
        f"mamba_ssm does not run {row['name']}: {row[PEER]['unsupported']}."
        for row in result["rows"]
        if (row.get(PEER) or {}).get("unsupported")
    ]
    parts.append(
        "Largest relative errors (L2) against our layer in float64 on the CPU, of the first steps of the first sequence;\n"
        f"errors of logits against our model in float32:\n\n{errors(result['rows'])}"
    )
    body = "\n\n".join([*parts, *skipped, *refused])
    return f"""## Layers and models

Parameters and activations in bfloat16, unless a row says otherwise; eager, without torch.compile. mamba_ssm's layers have the
same weights ({result["peer"]}); *speed-up* is their time over
ours. *Before* is ours when only the scan was fused, recorded. Between two events, after the second-level cache was overwritten
once, as `triton.testing.do_bench` measures; {result["settings"]["trials"]} trials; median, ± half the distance from the 20th to
the 80th percentile. A row's own figures were measured in turns; rows may be of different runs.

{body}
"""
