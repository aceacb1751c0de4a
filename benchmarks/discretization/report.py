"""Tables for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.discretization.accuracy import Accuracy, Convergence
from benchmarks.discretization.operations import Operation
from benchmarks.discretization.scans import Scan
from benchmarks.discretization.signals import COMPLEX_STATES, SAMPLINGS, STATES
from benchmarks.harness import UNRELIABLE_SPREAD, Timing
from benchmarks.labels import label
from benchmarks.tables import Column, Table, show


@dataclass
class Report:
    """The results of a run. Parts that were not requested are empty.

    Attributes:
        machine: see :func:`benchmarks.harness.machine`.
        settings: the run's parameters.
        signal: description of the input of the accuracy part.
        sample_spacing: sample spacing of a recorded signal.
        sampling: the place in a step of the sample that the figure's and the advice's errors are for, a key of ``SAMPLINGS``.
        advice: what the errors mean for the choice of a rule.
    """

    machine: dict[str, str | int]
    settings: dict[str, object]
    operations: list[Operation] = field(default_factory=list)
    scans: list[Scan] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)
    signal: str = ""
    sample_spacing: float | None = None
    sampling: str = "end"
    advice: str = ""

    @property
    def A_range(self) -> tuple[float, float]:
        """The smallest and the largest ``|A|`` of the accuracy part; of a matrix those of its eigenvalues."""
        low, high = self.settings["A_range"]
        return float(low), float(high)

    @property
    def states(self) -> str:
        """The name of complex states and of those of a matrix, or an empty string for real ones."""
        states = str(self.settings.get("states", "real"))
        return "" if states == "real" else STATES[states]

    @property
    def is_complex(self) -> bool:
        return self.settings.get("states", "real") in COMPLEX_STATES

    @property
    def unreliable(self) -> list[str]:
        """The timings whose spread is too large to compare them, by name."""
        operations = [operation.name for operation in self.operations if not operation.timing.is_reliable]
        return operations + [name for scan in self.scans for name in scan.unreliable()]

    def write_json(self, path: Path) -> None:
        content = {
            "machine": self.machine,
            "settings": self.settings,
            "signal": self.signal,
            "sample_spacing": self.sample_spacing,
            "sampling": self.sampling,
            "advice": self.advice,
            "unreliable": self.unreliable,
            "operations": [operation.to_dict() for operation in self.operations],
            "scans": [scan.to_dict() for scan in self.scans],
            "accuracies": [accuracy.to_dict() for accuracy in self.accuracies],
        }
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_csv(self, path: Path) -> None:
        """One number per line: part, name (of the method or the operation), quantity, step size (if it has one), value."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["part", "name", "quantity", "step", "value"])
            writer.writerows(self._rows())

    def _rows(self) -> Iterator[tuple[str, str, str, float | str, float]]:
        for operation in self.operations:
            yield "operations", operation.name, "ns_per_element", "", operation.per_element
            yield "operations", operation.name, "ns_per_channel_step", "", operation.per_step
        for scan in self.scans:
            timings = {"forward": scan.forward, "backward": scan.backward, "forward_backward": scan.training}
            loops = {"loop_forward_scaled": scan.loop_forward, "loop_forward_backward_scaled": scan.loop_training}
            for name, timing in (timings | loops).items():
                if timing is not None:
                    yield "scans", scan.method, f"{name}_seconds", "", timing.median
                    yield "scans", scan.method, f"{name}_spread", "", timing.spread
            yield "scans", scan.method, "tokens_per_second", "", scan.tokens_per_second
            yield "scans", scan.method, "bytes_per_second", "", scan.bytes_per_second
            if scan.speedup is not None:
                yield "scans", scan.method, "speedup_over_loop", "", scan.speedup
        for accuracy in self.accuracies:
            for sampling, found in accuracy.convergence.items():
                for step, error in zip(accuracy.steps, found.errors, strict=True):
                    yield "accuracies", accuracy.method, f"error_sampled_at_{sampling}", step, error
                if found.order is not None:
                    yield "accuracies", accuracy.method, f"order_sampled_at_{sampling}", "", found.order
            yield "accuracies", accuracy.method, "dc_gain_error", accuracy.dc_step, accuracy.dc_gain_error
            if accuracy.rounding is not None:
                yield "accuracies", accuracy.method, "rounding", accuracy.steps[-1], accuracy.rounding
            if accuracy.spectral_radii:
                for step, radius in zip(accuracy.steps, accuracy.spectral_radii, strict=True):
                    yield "accuracies", accuracy.method, "spectral_radius", step, radius

    def print_header(self, console: Console) -> None:
        machine = self.machine
        place = f"{machine['gpu']}, CUDA {machine['cuda']}, driver {machine['driver']}; " if "gpu" in machine else ""
        console.print(
            Text(f"ssm_kernels {machine['ssm_kernels']}, torch {machine['torch']}, Python {machine['python']}", "bold")
        )
        console.print(
            Text(
                f"{place}{machine['cpu']}, cores: {machine['cores']}, threads: {machine['threads']}, "
                f"{machine['cpu_capability']}; {machine['system']}"
            )
        )
        if "gpu" in machine:
            console.print(Text("Times are GPU times between CUDA events, after the cache was overwritten."))

    def print_tables(self, console: Console) -> None:
        if self.operations:
            _print_operations(console, self.operations, int(str(self.settings["dstate"])))
        if self.scans:
            _print_scans(console, self)
        if self.accuracies:
            _print_accuracies(console, self)
            console.print(Text(self.advice, "bold"))
        if names := self.unreliable:
            listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            limit = f"{100 * UNRELIABLE_SPREAD:.0f} %"
            console.print(Text(f"unreliable: rerun on a machine without other load. Spread above {limit}: {listed}.", "bold"))


def _note(console: Console, *sentences: str) -> None:
    console.print(Text(" ".join(filter(None, sentences)), "dim"), soft_wrap=False)


def _number(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits, without an exponent where this is readable."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "inf"
    magnitude = math.floor(math.log10(abs(value)))
    if -3 <= magnitude < 6:
        return f"{value:.{max(0, digits - 1 - magnitude)}f}"
    return f"{value:.{digits - 1}e}"


def _digits(timing: Timing) -> int:
    """The digits that the spread leaves meaningful."""
    return 3 if timing.spread < 0.05 else 2 if timing.is_reliable else 1


def _milliseconds(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    return f"{_number(1e3 * timing.median, _digits(timing))} {_spread(timing):>3}"


def _spread(timing: Timing) -> str:
    return f"{100 * timing.spread:.0f}" if timing.spread < 0.995 else ">99"


def _print_operations(console: Console, operations: Sequence[Operation], dstate: int) -> None:
    columns = [
        Column("operation", lambda found: found.name),
        Column("A", lambda found: found.form),
        Column("dtype", lambda found: found.dtype),
        Column("ns per\nelement", lambda found: _number(found.per_element, _digits(found.timing))),
        Column("ns per channel,\nstep", lambda found: _number(found.per_step, _digits(found.timing))),
        Column("%", lambda found: _spread(found.timing)),
    ]
    show(Table(f"1. Elementary operations, dstate {dstate}", columns, operations), console)
    cost = {operation.name: operation.per_step for operation in operations}
    ratio = cost["solve (bilinear Abar)"] / cost["bilinear, Abar and c"]
    _note(
        console,
        "With a diagonal A one step of one channel needs dstate elements, with a full A one dstate x dstate matrix:",
        f"the bilinear rule then costs {_number(ratio, 2)} times as much. Medians in eager PyTorch, which pays a pass over",
        "memory for each operation; the fused kernel keeps the values in registers.",
    )


def _print_scans(console: Console, report: Report) -> None:
    scans, dtype = report.scans, str(report.settings["dtype"])
    training = scans[0].training is not None
    looped = scans[0].loop_step is not None
    zoh = next((scan.step.median for scan in scans if scan.method == "zoh"), None)
    columns = [
        Column("method", lambda scan: label(scan.method)),
        Column("forward\nms   %", lambda scan: _milliseconds(scan.forward)),
        Column("backward\nms   %", lambda scan: _milliseconds(scan.backward)),
        Column("both\nms   %", lambda scan: _milliseconds(scan.training)),
        Column("/ zoh", lambda scan: "-" if zoh is None else f"{scan.step.median / zoh:.2f}"),
        Column("Mtok/s", lambda scan: _number(scan.tokens_per_second / 1e6)),
        Column("GB/s", lambda scan: _number(scan.bytes_per_second / 1e9)),
        Column("loop\nms", lambda scan: _number(1e3 * scan.loop_step.median)),
        Column("loop /\nkernel", lambda scan: f"{_number(scan.speedup)}x"),
    ]
    shown = columns[:2] + columns[2:4] * training + columns[4:7] + columns[7:] * looped
    show(Table(f"2. selective_scan, {scans[0].size}, {dtype}", shown, scans), console)
    moved = scans[0].training_bytes if training else scans[0].forward_bytes
    _note(
        console,
        f"Median of {scans[0].step.trials} trials, methods alternating; %: half the distance from 20th to 80th percentile.",
        "Arguments as in Mamba's layer: B and C per step, D, gate z, delta_bias, softplus.",
        f"A, B and C are complex, A is that of {report.states}: a complex state has two numbers." if report.is_complex else "",
        f"A is the matrix of {report.states}, one for all channels." if report.states and not report.is_complex else "",
        "Forward alone runs without a graph;" if training else "No graph is recorded;",
        f"ratios, tokens (batch x seqlen) and bytes are for {'forward and backward together' if training else 'forward'}.",
        f"GB/s counts each argument, result{' and gradient' if training else ''} once ({_number(moved / 2**20)} MiB), without",
        "saved states and workspace.",
    )
    if looped:
        length, seqlen = scans[0].loop_seqlen, scans[0].size.seqlen
        ran = "" if length == seqlen else f", run over {length} steps and scaled by {seqlen / length:g}"
        _note(console, f"Loop: the same in PyTorch, coefficients of all steps at once, then a loop over time{ran}.")


def _error(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "diverges"


def _order(found: Convergence) -> str:
    return "exact" if found.exact else "-" if found.order is None else f"{found.order:.2f}"


def _gain(value: float) -> str:
    if math.isnan(value):
        return "unstable"
    return "0" if abs(value) < 1e-12 else f"{100 * value:+.3g}%"


def _stable_step(accuracy: Accuracy) -> str:
    step = accuracy.stable_step
    return "none" if step is None else "all" if step == max(accuracy.steps) else f"{step:.4g}"


def _print_accuracies(console: Console, report: Report) -> None:
    accuracies, sampling, spacing = report.accuracies, report.sampling, report.sample_spacing
    dtype, (slowest, fastest) = str(report.settings["dtype"]), report.A_range
    starred = any(accuracy.by_reference for accuracy in accuracies)
    steps, rounded = accuracies[0].steps, any(accuracy.rounding is not None for accuracy in accuracies)
    is_matrix = bool(report.states) and not report.is_complex
    headline = accuracies[0].headline_step(spacing)
    small = "the norm of delta A <= 1/8" if is_matrix else "max|delta A| <= 0.5"
    names = {"end": "end", "middle": "mid"}
    gain = f"for the worst A of this range{', the absolute value' * report.is_complex}"
    gain = "the norm of the states' error over that of the states" if is_matrix else gain
    columns = [Column("method", lambda accuracy: label(accuracy.method) + " *" * accuracy.by_reference)]
    for place in (sampling, *(other for other in SAMPLINGS if other != sampling)):
        # The other place only for comparison: at the same step, and its order.
        for step in dict.fromkeys((steps[0], headline, steps[-1]) if place == sampling else (headline,)):
            columns.append(Column(f"{names[place]}\n{step:.4g}", lambda found, s=step, at=place: _error(found.error_at(s, at))))
        columns.append(Column(f"{names[place]}\norder", lambda found, at=place: _order(found.convergence[at])))
    columns.append(Column(f"DC gain\n{accuracies[0].dc_step:.4g}", lambda accuracy: _gain(accuracy.dc_gain_error)))
    columns += [Column("stable\nup to", lambda accuracy: _stable_step(accuracy))] * is_matrix
    columns += [Column(dtype, lambda found: "-" if found.rounding is None else _error(found.rounding))] * rounded
    show(Table("3. Error against the exact solution", columns, accuracies), console)
    if report.is_complex:
        rates = f"|A| of {report.states} from {slowest:.4g} to {fastest:.4g} in every channel"
    else:
        of_matrix = f"One matrix A of {report.states} for all channels, with eigenvalues"
        channels = "" if is_matrix else " in every channel"
        rates = f"{of_matrix if is_matrix else 'A'} from {-slowest:.4g} to {-fastest:.4g}{channels}"
    _note(console, f"Input: {report.signal}. {rates}.")
    _note(
        console,
        "Error: root mean square of out - y at the steps' ends, relative to y, in float64, at the coarsest step,",
        f"at {headline:.4g}{'' if spacing is None else ', the sample spacing'}, and at the finest; order: its slope where the",
        f"input is resolved and {small}. 'end': a step reads the input at its end, as a model on samples does (half",
        "a step early on average: first order for every rule with one sample; those with two read the true sample before the",
        "first step). 'mid': at its middle, which no model on samples does; it shows a rule with one sample itself.",
        f"DC gain: error of the steady state for a constant input at the step in the column's head, {gain}.",
        "Stable up to: the largest measured step up to which all spectral radii of Abar are below 1." if is_matrix else "",
        "*: by exponentials of matrices, which the operators do not take: ssm_kernels.reference computed it."
        if starred
        else "",
        f"{dtype}: error of rounding at the finest step, rounding of the arguments included." if rounded else "",
    )
