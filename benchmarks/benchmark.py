"""The mechanism that the benchmarks share: contenders that take turns, and the program around the cases.

A benchmark declares a :class:`Benchmark`: its cases, how they are measured, the tables of its result and the figures that
``bars.json`` holds. :func:`main` does the rest: arguments, progress, JSON, tables, bars and exit status. ``report.py`` makes
the pages of the same tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ssm_kernels
from benchmarks import bars, triton_kernels
from benchmarks.harness import Stages, machine, measure, on_h200, peak_bytes, sets_beyond_cache, time_graph
from benchmarks.tables import DIRECTIONS, Column, Row, Table, median, show, text

PEER, FLA = "mamba_ssm", "flash-linear-attention"
RECORDED = Path(__file__).with_name("recorded.json")
# The JSON file is written after a group of rows, unless more than this share of the time went to writing it.
SHARE_OF_WRITES = 0.05
# The share of the device's memory from which on PyTorch gives back what it does not use. It takes as long as a row.
SHARE_OF_MEMORY = 0.3
Result = dict[str, Any]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """Settings of a measurement."""

    device: torch.device
    trials: int
    warmup: int
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    cache_writes: int = 8
    recorded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def without_peers(self) -> bool:
        """Whether ours alone is measured."""
        return getattr(self.options, "without_peers", False)

    def sets(self, make: Callable[[int], Any], nbytes: int, most: int = 2**20) -> list[Any]:
        """Sets of inputs that the second-level cache does not hold."""
        return sets_beyond_cache(make, nbytes, self.device, most)

    def time_graph(self, function: Callable[[Any], Any], sets: Sequence[Any]) -> dict[str, float]:
        """The time of a call in a CUDA graph of calls on these sets."""
        return time_graph(function, sets, self.trials, self.device).to_dict()


def outputs_of(function: Function, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Calls the function on its inputs; one output becomes a tuple too."""
    out = function(**inputs)
    return out if isinstance(out, tuple) else (out,)


def leaves_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the inputs that can have a gradient by leaves that require it."""
    return {
        name: value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


class Contender(NamedTuple):
    """A function with its inputs by name, the gradients of its first outputs, and its parameters, which are leaves too."""

    function: Function
    inputs: Mapping[str, Any]
    grads: Sequence[Tensor]
    parameters: Mapping[str, Tensor] = MappingProxyType({})

    def wanted(self, leaves: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors whose gradients backward computes."""
        of_inputs = {name: value for name, value in leaves.items() if isinstance(value, Tensor) and value.requires_grad}
        return of_inputs | dict(self.parameters)

    def results(self, names: Sequence[str] = ("out",)) -> dict[str, Tensor]:
        """The outputs by name, and the gradient of every input and parameter as "grad_" and its name."""
        leaves = leaves_of(self.inputs)
        outputs, wanted = outputs_of(self.function, leaves), self.wanted(leaves)
        gradients = torch.autograd.grad(outputs[: len(self.grads)], list(wanted.values()), self.grads)
        found = {name: out.detach() for name, out in zip(names, outputs, strict=False)}
        return found | {f"grad_{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}

    def stages(self, *whats: str) -> dict[str, Stages]:
        """Stages by name: "forward" without gradients, "training" with them, the "backward" of that, and "both" in one."""
        leaves = leaves_of(self.inputs)
        wanted = list(self.wanted(leaves).values())

        def forward() -> Any:
            with torch.no_grad():
                return self.function(**self.inputs)

        def training() -> Any:
            return self.function(**leaves)

        def backward(outputs: Any, **options: Any) -> Any:
            return torch.autograd.grad(outputs, wanted, self.grads, **options)

        kept = training() if "backward" in whats else None
        found: dict[str, Stages] = {
            "forward": (forward,),
            "training": (training,),
            "backward": (lambda: backward(kept, retain_graph=True),),
            "both": (training, backward),
        }
        return {what: found[what] for what in whats}

    def peak_bytes(self) -> int | None:
        """The most that forward and backward allocate at a time, outputs and gradients included; None on the CPU."""
        return peak_bytes(self.results, self.grads[0].device)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """The relative L2 error against a result in float64 on the CPU."""
    return ((actual.cpu().double() - exact).norm() / exact.norm()).item()


class Copy(NamedTuple):
    """A contender that moves the bytes that an operator must: it reads half of them and writes as many."""

    nbytes: Mapping[str, int]
    device: torch.device

    def stages(self, *whats: str) -> dict[str, Stages]:
        def copy(nbytes: int) -> Stages:
            half = nbytes // 2 // 16 * 16  # both ends aligned
            source, target = (torch.zeros(half, dtype=torch.int8, device=self.device) for _ in range(2))
            return [lambda: target.copy_(source)]

        return {what: copy(self.nbytes[what]) for what in whats}


class Stopwatch:
    """Where the time goes: seconds between laps, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> float:
        seconds, self._start = time.perf_counter() - self._start, time.perf_counter()
        self.laps[name] = round(self.laps.get(name, 0.0) + seconds, 4)
        return seconds


class Turns:
    """Stages of the contenders of one or several rows, timed in turns."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._stages: dict[int, Stages] = {}
        self._targets: list[tuple[dict[str, Any], str]] = []

    def add(self, figures: dict[str, Any], stages: Mapping[str, Stages]) -> None:
        """Adds stages. Their times become figures when :meth:`measure` runs."""
        for what, of_one in stages.items():
            self._stages[len(self._targets)] = of_one
            self._targets.append((figures, what))

    def measure(self, **options: Any) -> None:
        """Times everything that was added."""
        names = ("device", "trials", "warmup", "cache_writes")
        defaults = {name: getattr(self.run, name) for name in names}
        for index, found in measure(self._stages, **defaults | options).items():
            figures, what = self._targets[index]
            figures[what] = found.total.to_dict()


@dataclass(frozen=True)
class Contest:
    """The contenders of a row, and how they are compared and timed.

    Attributes:
        results: computes the results of a contender; those that are in ``exact`` are compared.
        exact: the same results in float64 on the CPU.
        prepare: takes a contender's name, the contender and its figures, after the comparison; may add figures, and returns the
            stages to time by the figures' names.
        allowed: the error beyond which a result of this name is wrong.
        amounts: further entries of the row.
        judges_others: whether wrong results of others than ours count. Their gradients never do: only their outputs say whether
            they compute the same.
    """

    contenders: Mapping[str, Any]
    results: Callable[[Any], Mapping[str, Tensor]]
    exact: Mapping[str, Tensor]
    prepare: Callable[[str, Any, dict[str, Any]], Mapping[str, Stages]]
    allowed: Callable[[str], float]
    amounts: Mapping[str, Any] = field(default_factory=dict)
    judges_others: bool = True

    def row(self, turns: Turns) -> dict[str, Any]:
        """The figures of the contenders, whose times follow, their errors, and the names of wrong results.

        An exception of another than ours becomes its figure.
        """
        figures: dict[str, dict[str, Any]] = {}
        errors: dict[str, dict[str, float]] = {}
        watch = Stopwatch()
        for who, contender in self.contenders.items():
            figures[who] = {"recorded": False, "unsupported": None}
            try:
                found = self.results(contender)
                if compared := {name: relative_error(found[name], self.exact[name]) for name in self.exact if name in found}:
                    errors[who] = compared
                turns.add(figures[who], self.prepare(who, contender, figures[who]))
            except Exception as error:
                if who == "ours":
                    raise
                message = (str(error).strip().splitlines() or [""])[0]
                figures[who] = {"recorded": False, "unsupported": f"{type(error).__name__}: {message}"}
            watch.lap(who)
        wrong = [
            f"{who}: {name}"
            for who, of_one in errors.items()
            for name, error in of_one.items()
            if not error <= self.allowed(name)  # NaN is wrong
            and (who == "ours" or (self.judges_others and not name.startswith("grad_")))
        ]
        return {**figures, "errors": errors, "wrong": wrong, "seconds": watch.laps, **self.amounts}


class Case:
    """A row of a benchmark. Subclasses say what is measured.

    Attributes:
        name: what ``--cases`` chooses by, and the name of the row.
        turns: cases with equal values take turns; None for a case alone.
    """

    name: str
    turns: Any = None

    def contest(self, run: Run) -> Contest:
        raise NotImplementedError

    def timing(self, run: Run) -> dict[str, Any]:
        """Options of :func:`harness.measure`."""
        return {}

    def triton_call(self, device: torch.device) -> Callable[[], Any] | None:
        """A function that makes the peer's call, and before that its tensors; None if it calls no installed Triton kernel."""
        return None

    @property
    def fields(self) -> dict[str, Any]:
        """The entries of the row that describe the case."""
        return {}


def measure_cases(cases: Sequence[Any], run: Run) -> list[dict[str, Any]]:
    """The rows of cases that take turns."""
    turns, watch, rows = Turns(run), Stopwatch(), []
    for case in cases:
        contest = case.contest(run)
        exact = {"exact": watch.lap("exact")}
        row = {"name": case.name, **case.fields, **contest.row(turns)}
        rows.append(row | {"seconds": exact | row["seconds"]})
        watch.lap("rows")
    turns.measure(**cases[0].timing(run))
    share_seconds(rows, watch.lap("measured"))
    for case, row in zip(cases, rows, strict=True):
        recorded_figures(run.recorded.get(case.name, {}), row, run.device)
    return rows


def share_seconds(rows: Sequence[dict[str, Any]], measured: float) -> None:
    """Adds to each row its share of the seconds in which all of them were measured."""
    for row in rows:
        row["seconds"] = {
            name: round(value, 3) for name, value in (row["seconds"] | {"measured": measured / len(rows)}).items()
        }


def recorded_figures(recorded: Mapping[str, Mapping[str, float]], row: dict[str, Any], device: torch.device) -> None:
    """Adds figures recorded on an H200 for contenders that this run did not measure."""
    for who, found in recorded.items() if on_h200(device) else ():
        if who not in row:
            times = {what: {"median": value} if not what.startswith("peak") else value for what, value in found.items()}
            row[who] = {"recorded": True, "unsupported": None, **times}


def speedups(row: Row, others: Mapping[str, str], whats: Iterable[str] = DIRECTIONS) -> dict[str, float]:
    """The figures "forward, speed-up over ..." of a row, where both times are known, by the others' keys in it and names."""
    return {
        f"{what}, speed-up over {name}": theirs / ours
        for other, name in others.items()
        for what in whats
        if (ours := median(row.get("ours"), what)) and (theirs := median(row.get(other), what))
    }


def nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        name: in its results, in ``bars.json`` and in ``page.md``.
        cases: makes the cases from the options; each has a name.
        tables: makes the tables of a result, for the terminal and the page.
        figures: computes the figures that bars hold, from a row and the result that it is part of.
        measure: makes the rows of cases that take turns.
        trials, warmup: the default number of each.
        cache_writes: as :func:`harness.measure` takes it.
        context: makes the entries of a result beside its rows, before these are measured.
        conclude: makes further entries, after the rows.
        add_options: adds the benchmark's own options.
        layout: turns a result, whose rows are a list, into the form that the JSON file and the tables have.
        required: the options, by name, that make a missed bar an error, each with the rows that it holds, a prefix.
        trials_option: the name of the option that sets ``trials``.
        appends: has the option ``--append``, with which a run adds its rows to those of an earlier one.
        leaves_out_peers: has the option ``--without_peers``, with which ours alone is measured.
        triton_call: as :meth:`Case.triton_call`, for cases with Triton kernels, which are compiled before anything is measured.
        triton_seconds: the seconds that this may take, and the part of them for the configurations that are tuned.
        tunes_once: Triton's kernels keep the configuration of the first size.
    """

    name: str
    cases: Callable[[argparse.Namespace], Sequence[Any]]
    tables: Callable[[Result], list[Table]]
    figures: Callable[[Row, Result], Mapping[str, float]] = nothing
    measure: Callable[[list[Any], Run], list[dict[str, Any]]] = measure_cases
    trials: int = 20
    warmup: int = 3
    cache_writes: int = 8
    context: Callable[[Run], Result] = nothing
    conclude: Callable[[Run], Result] = nothing
    add_options: Callable[[argparse.ArgumentParser], None] = nothing
    layout: Callable[[Result], Result] = dict
    required: Mapping[str, str] = field(default_factory=dict)
    trials_option: str = "--trials"
    appends: bool = False
    leaves_out_peers: bool = False
    triton_call: Callable[[Any, torch.device], Callable[[], Any] | None] | None = None
    triton_seconds: tuple[float, float] = (60.0, 40.0)
    tunes_once: bool = False


def parse(benchmark: Benchmark, description: str | None, arguments: Sequence[str] | None) -> tuple[Run, list[Any]]:
    """Reads the settings and the cases from the options; ends the program if the options contradict each other."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--cases", "--only", nargs="+", metavar="NAME", help="only cases whose name contains one of these (default: all)"
    )
    parser.add_argument(
        benchmark.trials_option,
        dest="trials",
        type=int,
        default=benchmark.trials,
        help="of each measurement (default: %(default)s)",
    )
    parser.add_argument("--warmup", type=int, default=benchmark.warmup, help="trials before those (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the measurements")
    if benchmark.appends:
        parser.add_argument("--append", action="store_true", help="keep the rows of FILE that this run does not measure")
    if benchmark.leaves_out_peers:
        parser.add_argument("--without_peers", action="store_true", help="ours alone")
    for option, rows in benchmark.required.items():
        words = f"fail if a bar of {rows.rstrip('/') or 'any row'} is missed; RATIO replaces that of bars.json"
        parser.add_argument(f"--{option}", type=float, nargs="?", const=0.0, metavar="RATIO", help=words)
    if benchmark.triton_call is not None:
        parser.add_argument(triton_kernels.OPTION, nargs=2, metavar=("INDEX", "FOLDER"), help=argparse.SUPPRESS)
    parser.set_defaults(device="cuda")
    benchmark.add_options(parser)
    options = parser.parse_args(arguments)
    if options.trials < 1 or options.warmup < 0:
        parser.error(f"{benchmark.trials_option} starts at 1, --warmup at 0")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: no such folder: {options.json.parent}")
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("needs a CUDA GPU, and PyTorch finds none here")
        if ssm_kernels.build_info()["cuda"] is None:
            parser.error("needs CUDA kernels, and ssm_kernels was built without; `python -m ssm_kernels` says more")
        device = torch.device("cuda", torch.cuda.current_device())
    cases = benchmark.cases(options)
    chosen = [case for case in cases if options.cases is None or any(part in case.name for part in options.cases)]
    if not chosen:
        names = ", ".join(case.name for case in cases)
        parser.error(f"--cases: no name contains {' or '.join(options.cases)}; there are: {names}")
    recorded = json.loads(RECORDED.read_text()).get(benchmark.name, {})
    return Run(device, options.trials, options.warmup, options, benchmark.cache_writes, recorded), chosen


def encoded(result: Result) -> str:
    """JSON with one entry, and one entry of a list, a line: a sweep has thousands of rows."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "[\n" + ",\n".join(f"    {json.dumps(entry, default=str)}" for entry in value) + "\n  ]"
        return json.dumps(value, default=str)

    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {text(value)}" for key, value in result.items()) + "\n}\n"


def measured(benchmark: Benchmark, run: Run, cases: Sequence[Any]) -> Result:
    """The result; after a group of cases the JSON file has what was measured, in case a later one does not end."""
    context = dict(benchmark.context(run))
    settings = {"trials": run.trials, "warmup": run.warmup, **context.pop("settings", {})}
    result: Result = {"benchmark": benchmark.name, "machine": machine(run.device), "settings": settings, **context, "rows": []}

    kept: list[Row] = []
    if getattr(run.options, "append", False) and run.options.json is not None and run.options.json.exists():
        names = {case.name for case in cases}
        kept = [row for row in json.loads(run.options.json.read_text())["rows"] if row["name"] not in names]
    result["rows"] = kept

    for key in context.keys() & {"peer", "peers"}:
        print(f"{key}: {context[key]}")

    def write() -> None:
        if run.options.json is not None:
            run.options.json.write_text(encoded(benchmark.layout(result)))

    watch, written = Stopwatch(), 0.0
    groups: dict[Any, list[Any]] = {}
    for case in cases:
        groups.setdefault(id(case) if case.turns is None else case.turns, []).append(case)
    names = dict.fromkeys([*(row["name"] for row in kept), *(case.name for case in cases)])
    order = {name: index for index, name in enumerate(names)}
    start = time.monotonic()
    for group in groups.values():
        rows = benchmark.measure(group, run)
        result["rows"] = sorted([*result["rows"], *rows], key=lambda row: order[row["name"]])
        if written <= SHARE_OF_WRITES * (time.monotonic() - start):
            watch.lap("measured")
            write()
            written += watch.lap("written")
        for row in rows:
            print(progress(row), flush=True)
        if run.device.type == "cuda" and torch.cuda.memory_reserved() > SHARE_OF_MEMORY * torch.cuda.mem_get_info()[1]:
            torch.cuda.empty_cache()
    result |= benchmark.conclude(run)
    write()
    return result


def compile_ahead(benchmark: Benchmark, run: Run, cases: Sequence[Any], arguments: Sequence[str] | None) -> None:
    """Compiles the Triton kernels of the cases in several processes, of which this may be one."""
    find, share = benchmark.triton_call, getattr(run.options, "compile_share", None)
    if find is None or run.device.type != "cuda" or run.without_peers:
        return

    def calls() -> Iterable[tuple[str, Callable[[], Any]]]:
        for case in cases:
            if (call := find(case, run.device)) is not None:
                yield case.name, call

    if share is not None:
        triton_kernels.compile_share(int(share[0]), Path(share[1]), benchmark.tunes_once, calls)
    elif next(iter(calls()), None) is not None:
        program = [sys.executable, sys.argv[0], *(sys.argv[1:] if arguments is None else arguments)]
        with tempfile.TemporaryDirectory() as folder:
            seconds = triton_kernels.compile_ahead(program, Path(folder), benchmark.tunes_once, calls, benchmark.triton_seconds)
        print("before the first row, seconds: " + ", ".join(f"{step} {found}" for step, found in seconds.items()), flush=True)


def seconds_table(rows: Sequence[Row]) -> Table:
    """Where the time of a run went, by operator or kind of row."""
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = " ".join(str(row[key]) for key in ("operator", "kind", "layer", "dtype") if row.get(key))
        of_group = groups.setdefault(name, {"rows": 0, "seconds": {}})
        of_group["rows"] += 1
        for step, seconds in row.get("seconds", {}).items():
            of_group["seconds"][step] = of_group["seconds"].get(step, 0.0) + seconds
    steps = list(dict.fromkeys(step for of_group in groups.values() for step in of_group["seconds"]))

    def column(step: str) -> Column:
        return Column(step, lambda row: f"{row['seconds'].get(step, 0.0):.1f}")

    total = {
        "rows": len(rows),
        "seconds": {step: sum(of["seconds"].get(step, 0.0) for of in groups.values()) for step in steps},
    }
    lines = [{"name": name, **of_group} for name, of_group in [*groups.items(), ("all", total)]]
    every = Column("sum", lambda row: f"{sum(row['seconds'].values()):.1f}")
    return Table("seconds", [text("rows of", "name"), text("rows"), *map(column, steps), every], lines if steps else [])


def progress(row: Row) -> str:
    """The row's name and our times."""
    timed = {what: found for what, found in (row.get("ours") or row).items() if isinstance(found, dict) and "median" in found}
    times = [f"{what} {1e3 * found['median']:.4f} ms" for what, found in timed.items()]
    return f"{row['name']}: {', '.join(times)}"


def held(benchmark: Benchmark, options: argparse.Namespace) -> tuple[bars.Bars, list[str]]:
    """The bars, with the ratios that the options ask for, and the names of the rows that must meet theirs."""
    found, names = dict(bars.load(benchmark.name)), []
    for option, prefix in benchmark.required.items():
        asked = getattr(options, option)
        if asked is not None:
            names.append(f"{prefix}*")
        if asked:
            found |= {
                rows: {figure: {"at_least": asked} for figure in of_rows}
                for rows, of_rows in found.items()
                if rows.startswith(prefix)
            }
    return found, names


def main(benchmark: Benchmark, description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Measures, prints tables and bars, and writes JSON; 1 if a result is wrong, or a bar is missed that an option requires."""
    run, cases = parse(benchmark, description, arguments)
    where = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else machine()["cpu"]
    print(f"ssm_kernels {ssm_kernels.__version__}, torch {torch.__version__}, {where}", flush=True)
    compile_ahead(benchmark, run, cases, arguments)
    if getattr(run.options, "compile_share", None) is not None:
        return 0
    result = measured(benchmark, run, cases)
    for table in benchmark.tables(benchmark.layout(result)):
        if table.rows:
            show(table)
    if (spent := seconds_table(result["rows"])).rows:
        show(spent)
    asked, required = held(benchmark, run.options)
    judged = bars.judge(((row["name"], benchmark.figures(row, result)) for row in result["rows"]), asked)
    if judged:
        show(bars.table(judged))
    missed = [one for one in judged if not one["met"] and any(fnmatchcase(one["row"], rows) for rows in required)]
    for one in missed:
        print(f"{one['row']}: {one['figure']} is {one['found']:.3g}, required {bars.words(one['bar'])}", file=sys.stderr)
    wrong = [f"{row['name']}: {', '.join(row['wrong'])}" for row in result["rows"] if row.get("wrong")]
    if wrong:
        print("wrong results: " + "; ".join(wrong), file=sys.stderr)
    return 1 if wrong or missed else 0
