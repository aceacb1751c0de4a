#!/usr/bin/env python3
"""Measures cost and error of every discretization on this machine.

Without arguments it measures everything, at sizes that finish within a minute:

1. the elementary operations of the rules;
2. each rule's forward and backward through ``ssm_kernels.selective_scan``, against a loop over time in PyTorch;
3. each rule's error against the exact solution of the continuous system, for a known input or a recorded one (``--input``):
   that of a model on samples, which reads the input at the end of each step.

``--states`` takes complex states and a matrix A in place of real states with a diagonal one. The rules by exponentials of
matrices have no operator: part 2 leaves them out, and part 3 has them from ``ssm_kernels.reference``.

Tables go to standard output, a figure to ``--plot``, all numbers to ``--json`` and ``--csv``. ``docs/discretizations.md``
explains the rules and how to choose.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

PROGRAM = "profile_discretization.py"

try:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    import ssm_kernels
    from benchmarks.discretization import accuracy, operations, plots, report, scans, signals
    from benchmarks.harness import available_memory, machine, measure
    from ssm_kernels._discretizations import is_rule
    from ssm_kernels.ops._arguments import did_you_mean
    from ssm_kernels.reference import ALIASES, DISCRETIZATIONS
except ImportError as error:
    missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "ssm_kernels"
    advice = '; pip install -e ".[profile]" installs what this program needs' if missing else ""
    print(f"{PROGRAM}: error: {' '.join(str(error).split())}{advice}", file=sys.stderr)
    sys.exit(2)

# `--methods all` plots "gbt" and "gbt_two_sample" with one alpha, exp_trapezoidal with lam 1/2, and leaves out "dirac", whose
# input is a sum of impulses.
METHODS = [*DISCRETIZATIONS, "gbt(0.7)", "foh_ramp", "trapezoidal", "gbt_two_sample(0.7)", "exp_trapezoidal"]
COMPLEX_METHODS = ["zoh", "zoh_exact", "bilinear", "trapezoidal", "exp_trapezoidal"]
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}
SIZES = {  # the program takes the largest that fits the time
    "cpu": [
        (1, 64, 128, 16),
        (1, 128, 256, 16),
        (2, 256, 512, 16),
        (2, 512, 1024, 16),
        (4, 1024, 1024, 16),
        (8, 1024, 2048, 16),
    ],
    "cuda": [(1, 256, 512, 16), (4, 1024, 1024, 16), (8, 2048, 2048, 16)],
}
ACCURACY_DIM = 16
TRIALS = 20
LOOP_TRIALS = 3
SECONDS = {"operations": 4.0, "scans": 14.0, "loop": 12.0}  # for sizes that the program chooses


class UsageError(Exception):
    """A mistake of the user, described in one line."""


class Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def at_least(lowest: int, highest: float = math.inf) -> Callable[[str], int]:
    """Returns an argument type: an integer in a range."""
    wanted = f"an integer of at least {lowest}" if highest == math.inf else f"an integer from {lowest} to {highest}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
        return value

    return parse


def positive(text: str) -> float:
    """An argument type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    switch = {"action": argparse.BooleanOptionalAction, "default": True}
    sizes = parser.add_argument_group("sizes (each chosen to fit the time if not given)")
    sizes.add_argument("--batch", type=at_least(1), metavar="B", help="sequences")
    sizes.add_argument("--dim", type=at_least(1), metavar="D", help="channels")
    sizes.add_argument("--seqlen", type=at_least(1), metavar="L", help="steps of a sequence")
    sizes.add_argument("--dstate", type=at_least(1, 256), metavar="N", help="states per channel, in the accuracy part too")
    sizes.add_argument("--n-trials", type=at_least(1), metavar="T", help=f"trials of each benchmark (default: up to {TRIALS})")
    what = parser.add_argument_group("what to measure")
    what.add_argument("--methods", nargs="+", default=["all"], metavar="NAME", help=f"'all' or a list of {', '.join(METHODS)}")
    what.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where the kernels run (default: a usable GPU, else the CPU)",
    )
    what.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of parts 1 and 2; errors use float64")
    what.add_argument("--profile-ops", **switch, help="part 1, the elementary operations")
    what.add_argument("--profile-scan", **switch, help="part 2, time of each method")
    what.add_argument("--profile-accuracy", **switch, help="part 3, error of each method")
    what.add_argument("--backward", **switch, help="time backward as well as forward")
    what.add_argument("--seed", type=at_least(0, 2**31 - 1), default=0, help="of all random numbers (default: %(default)s)")
    what.add_argument(
        "--sampling",
        choices=list(signals.SAMPLINGS),
        default="end",
        help="where a step reads the input, in the figure and the advice: 'end', as a model on samples does (default), or "
        "'middle', which shows the rule itself, but which no model on samples does",
    )
    what.add_argument(
        "--A-range",
        type=positive,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="smallest and largest |A| of part 3, one over the time constants in the unit of the steps (default: 1 and dstate)",
    )
    what.add_argument(
        "--states",
        choices=list(signals.STATES),
        default="real",
        help="real, or complex with the A of S4D's initializations and dstate conjugate pairs, for the rules "
        f"{', '.join(COMPLEX_METHODS)}, or real with one matrix A for all channels, HiPPO-LegS (default: %(default)s)",
    )
    record = parser.add_argument_group("recorded input")
    record.add_argument("--input", type=Path, metavar="FILE", help=".npy, .csv or .wav, evenly sampled; A is in its time unit")
    record.add_argument(
        "--hold", choices=list(signals.HOLDS), default="linear", help="the input between its samples (default: %(default)s)"
    )
    record.add_argument(
        "--channel",
        type=at_least(0),
        metavar="K",
        help="channel of the recording, without its time axis (default: the mean of all)",
    )
    record.add_argument(
        "--step",
        type=positive,
        metavar="S",
        help="time between samples (default: the file's time axis or sample rate, else "
        f"{signals.REFINEMENT * signals.FINEST_STEP:g})",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--plot",
        default="profile_discretization.png",
        metavar="FILE",
        help=".png, .pdf or .svg (default: %(default)s); or 'none'",
    )
    output.add_argument("--layout", choices=["page", "column"], default="page", help="panels side by side, or stacked")
    output.add_argument("--json", type=Path, metavar="FILE", help="receives all numbers")
    output.add_argument("--csv", type=Path, metavar="FILE", help="receives all numbers, one a line")
    output.add_argument("--quiet", action="store_true", help="print only the paths of written files")
    # One spelling of options; the first versions of this program wrote --n_trials.
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args([with_hyphens(word) for word in words])

    options.methods = chosen_methods(options.methods, COMPLEX_METHODS if options.states in signals.COMPLEX_STATES else METHODS)
    if options.states != "real" and options.A_range is not None:
        raise UsageError(f"--A-range is for real states, --states {options.states} has an A of its own")
    if options.states in signals.COMPLEX_STATES and (options.dstate or 0) > 128:
        raise UsageError(f"--dstate: expected at most 128 complex states, got {options.dstate}")
    if options.states == "matrix" and (options.dstate or 0) > 32:
        raise UsageError(f"--dstate: expected at most 32 states of a matrix, got {options.dstate}")
    if not (options.profile_ops or options.profile_scan or options.profile_accuracy):
        raise UsageError("nothing to measure: every part is switched off")
    if options.profile_scan and not (options.profile_accuracy or timed_methods(options.methods, options.states)):
        raise UsageError(
            f"--methods: {', '.join(options.methods)} take exponentials of matrices, so that no operator has them to time: "
            "leave out --no-profile-accuracy"
        )
    if options.input is not None and not options.profile_accuracy:
        raise UsageError("--input is for the accuracy part, which --no-profile-accuracy switches off")
    if options.input is None and options.step is not None:
        raise UsageError("--step is for a recorded input: give --input FILE")
    if options.A_range is not None and not options.profile_accuracy:
        raise UsageError("--A-range is for the accuracy part, which --no-profile-accuracy switches off")
    if options.A_range is not None and options.A_range[0] > options.A_range[1]:
        raise UsageError(f"--A-range: expected MIN up to MAX, got {options.A_range[0]:g} and {options.A_range[1]:g}")
    options.plot = None if options.plot.lower() == "none" else Path(options.plot)
    if options.plot is not None and options.plot.suffix.lower().removeprefix(".") not in plots.FORMATS:
        raise UsageError(f"--plot {options.plot}: expected a name that ends in .{', .'.join(plots.FORMATS)}, or 'none'")
    outputs = {name: getattr(options, name) for name in ("plot", "json", "csv") if getattr(options, name) is not None}
    for name, path in outputs.items():
        check_writable(f"--{name}", path)
    files = [*outputs.values(), *([] if options.input is None else [options.input])]
    if len({path.resolve() for path in files}) < len(files):
        raise UsageError("--input, --plot, --json and --csv: expected different files")
    return options


def with_hyphens(word: str) -> str:
    """``--n_trials=3`` as ``--n-trials=3``; anything but the name of an option as it is."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else word


def chosen_methods(words: Sequence[str], every: Sequence[str] = METHODS) -> list[str]:
    """The methods' names, in the order asked for, from words separated by commas or spaces. "all" is ``every``."""
    names = [name for word in words for name in word.replace(",", " ").split()]
    if not names:
        raise UsageError("--methods: expected at least one name")
    methods: list[str] = []
    for name in names:
        if name != "all" and (not is_rule(name) or name == "dirac"):
            known = [*METHODS, *ALIASES]
            raise UsageError(
                f"--methods: unknown discretization {name!r}, expected 'all' or some of {', '.join(known)}"
                f"{did_you_mean(name, ['all', *known])}"
            )
        name = ALIASES.get(name, name)
        if every == COMPLEX_METHODS and name not in ("all", *every):
            raise UsageError(f"--methods: {name!r} has no complex states, expected 'all' or some of {', '.join(every)}")
        methods += every if name == "all" else [name]
    return list(dict.fromkeys(methods))


def timed_methods(methods: Sequence[str], states: str) -> list[str]:
    """The methods that have an operator for these states."""
    return [method for method in methods if scans.has_operator(method, is_matrix=states == "matrix")]


def check_writable(option: str, path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder, expected a file")
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: no such folder: {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{option} {path}: no permission to write there")


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def usable_device(wanted: str, dtype: torch.dtype) -> torch.device:
    """Returns the device to run on, after a trial run of its kernels."""
    if wanted == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one possible reason is a driver that is too old
        available = torch.cuda.is_available()
    if not available:
        if wanted == "cuda":
            raise UsageError(f"--device cuda: torch {torch.__version__} finds no CUDA device")
        return torch.device("cpu")
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        run_once(scans.ScanSize(1, 2, 4, 2), device, dtype)
    except RuntimeError as error:
        if wanted == "cuda":
            raise UsageError(f"--device cuda: {first_line(error)}") from error
        print(f"{PROGRAM}: the CPU is measured, not the CUDA device: {first_line(error)}", file=sys.stderr)
        return torch.device("cpu")
    return device


def run_once(size: scans.ScanSize, device: torch.device, dtype: torch.dtype, method: str = "zoh", states: str = "real") -> None:
    inputs = scans.scan_inputs(size, device=device, dtype=dtype, seed=0, states=states)
    forward, backward = scans.scan_stages(
        ssm_kernels.selective_scan, inputs, torch.ones_like(inputs["u"]), method, backward=True
    )
    backward(forward())


def with_kernels(methods: Sequence[str], device: torch.device, dtype: torch.dtype, states: str = "real") -> list[str]:
    """The methods that have kernels on the device, or are the reference's alone; names the others on standard error."""
    found, timed = [], timed_methods(methods, states)
    for method in methods:
        if method not in timed:
            found.append(method)
            continue
        try:
            run_once(scans.ScanSize(1, 2, 4, 2), device, dtype, method, states)
            found.append(method)
        except NotImplementedError as error:
            print(f"{PROGRAM}: {method} is left out: {first_line(error)}", file=sys.stderr)
    if not found:
        raise UsageError(f"--methods: none of them has kernels on {device}")
    return found


def choose_size(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> scans.ScanSize:
    """Completes the requested sizes from the largest of ``SIZES`` at which all trials are expected to fit the time."""
    wanted = (options.batch, options.dim, options.seqlen, options.dstate)
    candidates = [
        scans.ScanSize(*(given or default for given, default in zip(wanted, sizes, strict=True)))
        for sizes in SIZES[device.type]
    ]
    chosen = candidates[0]
    timed = timed_methods(options.methods, options.states)
    rounds = 2 + (options.n_trials or TRIALS)
    memory = available_memory(device)
    for candidate in candidates if None in wanted and options.profile_scan and timed else []:
        if memory is not None and needed_bytes(candidate, dtype, options.states) > memory / 4:
            break
        inputs = scans.scan_inputs(candidate, device=device, dtype=dtype, seed=0, states=options.states)
        grad_out = torch.ones_like(inputs["u"])
        trial = {
            name: scans.scan_stages(ssm_kernels.selective_scan, inputs, grad_out, timed[0], backward=backward)
            for name, backward in (("forward", False), ("training", options.backward))
        }
        # Count the fast trials: on a busy machine some wait for a core, and the time is limited later anyway.
        probed = measure(trial, device=device, trials=40, warmup=1, budget=1.0, least=2)
        seconds = sum(measured.total.p20 for measured in probed.values())
        if 1.2 * seconds * len(timed) * rounds > SECONDS["scans"]:
            break
        chosen = candidate
    return chosen


def needed_bytes(size: scans.ScanSize, dtype: torch.dtype, states: str = "real") -> int:
    """Estimates the memory of one training step: arguments, results, gradients, and the saved states, one in 32."""
    width = torch.finfo(dtype).bits // 8
    tokens = size.batch * size.seqlen
    is_complex = states in signals.COMPLEX_STATES
    of_matrices = 2 * max(width, 4) if is_complex else width
    arguments = tokens * (3 * width * size.dim + 2 * of_matrices * size.dstate) + 4 * size.dim * (size.dstate + 2)
    return 3 * arguments + 2 * width * tokens * size.dim + size.updates // (4 if is_complex else 8)


def choose_loop(options: argparse.Namespace, size: scans.ScanSize, device: torch.device, dtype: torch.dtype) -> int:
    """Chooses the loop's number of steps: all, or as many doublings of 8 as fit time and memory, twice over."""
    memory = available_memory(device)
    cost = 1.6 if options.backward else 1.2  # forward alone, and the rules with more terms
    timed = timed_methods(options.methods, options.states)
    length = min(8, size.seqlen)
    while length < size.seqlen:
        head = scans.ScanSize(size.batch, size.dim, length, size.dstate)
        inputs = scans.scan_inputs(head, device=device, dtype=dtype, seed=0, states=options.states)
        stages = scans.scan_stages(scans.loop_scan, inputs, torch.ones_like(inputs["u"]), timed[0], backward=options.backward)
        seconds = measure({"loop": stages}, device=device, trials=2, warmup=1)["loop"].total.median
        if 2 * 2 * seconds * cost * len(timed) > SECONDS["loop"]:
            break
        if memory is not None and 2 * scans.loop_bytes(head, dtype, options.states) > memory / 4:
            break
        length = min(2 * length, size.seqlen)
    return length


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Yields a function that starts a bar and returns its advance function; on standard error, on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:

        def start(description: str, total: int) -> Callable[[], None]:
            for task in progress.task_ids:  # a part may end early, at its time limit
                progress.update(task, completed=progress.tasks[task].total)
            task = progress.add_task(description, total=total)
            return lambda: progress.advance(task)

        yield start


def profile(options: argparse.Namespace) -> report.Report:
    """Measures what the options ask for."""
    device, dtype = usable_device(options.device, DTYPES[options.dtype]), DTYPES[options.dtype]
    fixed_trials = options.n_trials is not None
    trials = options.n_trials or TRIALS
    methods, seed = with_kernels(options.methods, device, dtype, options.states), options.seed
    found = report.Report(machine(device), {}, sampling=options.sampling)

    response = system = None
    if options.profile_accuracy:  # before the long parts, to report a bad file at once
        dstate = options.dstate or SIZES["cpu"][0][3]
        if options.states == "real":
            system = signals.System.random(ACCURACY_DIM, dstate, seed, options.A_range)
        elif options.states == "matrix":
            system = signals.System.legs(ACCURACY_DIM, dstate, seed)
        else:
            system = signals.System.s4d(options.states, ACCURACY_DIM, dstate, seed)
        if options.input is None:
            finest, seqlen = signals.FINEST_STEP, 4096
            small = 1 / 32 if system.is_matrix else 1 / 16 if system.A.is_complex() else math.inf
            while finest * system.norm > small:  # for the order, at small |delta A|
                finest /= 2
            if system.is_matrix:  # the norm asks for a fine step, and large steps show which rules are unstable
                seqlen = min(16384, round(seqlen * signals.FINEST_STEP / finest))
            response = signals.sinusoids(system, seed, seqlen, finest)
            found.signal = response.description
        else:
            recording = signals.load_recording(options.input, options.channel)
            spacing = options.step or recording.spacing or signals.REFINEMENT * signals.FINEST_STEP
            response = signals.recording(system, recording.samples, options.hold, spacing / signals.REFINEMENT)
            found.signal, found.sample_spacing = f"{recording.description}; {response.description}", response.resolved

    size = choose_size(options, device, dtype)
    found.settings = {
        "batch": size.batch,
        "dim": size.dim,
        "seqlen": size.seqlen,
        "dstate": size.dstate,
        "dtype": options.dtype,
        "device": str(device),
        "n_trials": trials,
        "methods": methods,
        "backward": options.backward,
        "seed": seed,
        "states": options.states,
        "input": None if options.input is None else str(options.input),
        "hold": None if options.input is None else options.hold,
        "A_range": None if system is None else [system.rates.min().item(), system.rates.max().item()],
    }
    timed = timed_methods(methods, options.states) if options.profile_scan else []
    if timed:
        memory, needed = available_memory(device), needed_bytes(size, dtype, options.states)
        if memory is not None and needed > memory:
            raise UsageError(f"{size} needs about {needed / 2**30:.3g} GiB, {memory / 2**30:.3g} GiB are available on {device}")

    with progress_bar(options.quiet) as start:
        if options.profile_ops:
            found.operations = operations.time_operations(
                size.dstate,
                device=device,
                dtype=dtype,
                trials=trials,
                budget=None if fixed_trials else SECONDS["operations"],
                seed=seed,
                on_trial=start("elementary operations", 10 * (trials + 2)),
            )
        if timed:
            loop_seqlen = choose_loop(options, size, device, dtype)
            rounds = len(timed) * (1 + options.backward)
            found.scans = scans.time_scans(
                timed,
                size,
                device=device,
                dtype=dtype,
                backward=options.backward,
                trials=trials,
                budget=None if fixed_trials else SECONDS["scans"],
                loop_seqlen=loop_seqlen,
                loop_trials=LOOP_TRIALS,
                loop_budget=SECONDS["loop"],
                seed=seed,
                states=options.states,
                on_trial=start("scan, forward, backward", rounds * (trials + 2 + LOOP_TRIALS)),
            )
        if options.profile_accuracy:
            found.accuracies = accuracy.measure_accuracy(
                methods,
                system,
                response,
                device=device,
                dtype=dtype,
                spacing=found.sample_spacing,
                on_method=start("error", len(methods)),
            )
            step = found.accuracies[0].headline_step(found.sample_spacing)
            found.advice = accuracy.advice(found.accuracies, system, step, options.sampling)
    return found


def run(arguments: Sequence[str] | None) -> None:
    options = parse_arguments(arguments)
    began = time.perf_counter()
    found = profile(options)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    if not options.quiet:
        found.print_header(console)
        found.print_tables(console)
        console.print()
    if options.plot is not None:
        plots.draw(found, options.plot, METHODS, column=options.layout == "column")
    if options.json is not None:
        found.write_json(options.json)
    if options.csv is not None:
        found.write_csv(options.csv)
    for path in (options.plot, options.json, options.csv):
        if path is not None:
            print(f"wrote {path}")
    if not options.quiet:
        console.print(f"{time.perf_counter() - began:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for a mistake of the user, 130 if interrupted."""
    try:
        run(arguments)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except (UsageError, ValueError, RuntimeError, OSError, MemoryError, ImportError) as error:
        print(f"{PROGRAM}: error: {first_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
