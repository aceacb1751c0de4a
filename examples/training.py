"""Shared by the training scripts of this folder: optimizer, training loop, checkpoints, Ctrl-C, options and figures."""

from __future__ import annotations

import argparse
import contextlib
import glob
import math
import os
import pickle
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import matplotlib.style
import torch
import torch.nn as nn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from tqdm import tqdm

from ssm_kernels.models import parameter_groups
from ssm_kernels.reference import ALIASES

# The style of the benchmarks' figures. Copies of the scripts elsewhere use matplotlib's style.
STYLE = Path(__file__).resolve().parents[1] / "benchmarks" / "style.mplstyle"


RULED = ("mamba", "mamba2")
"""The models that have a discretization."""


class Mistake(Exception):
    """A mistake of the user that ends the script with one line."""


class Diverged(Mistake):
    """A run whose loss is not finite."""


class Session:
    """Ends a script without a traceback: in one line after a mistake; on Ctrl-C with a checkpoint and the command to resume.

    Inside :meth:`deferred` Ctrl-C takes effect at the next :meth:`pause`, between two steps, so that a resumed run repeats and
    loses nothing. A second Ctrl-C, a second or more later, ends the script at once.

    Attributes:
        saves: by the label of each run, the function that writes its checkpoint; see :func:`labelled`.
        checkpoint: ``--checkpoint``, if given.
        outputs: files that the script writes after the training; the command that resumes replaces those that exist by then.
        progress: the steps done, in words.
        saved: the last checkpoint, in words.
    """

    def __init__(self, script: str, argv: Sequence[str] | None, *, speaks: bool = True) -> None:
        self.script, self.argv, self.speaks = script, argv, speaks
        self.saves: dict[str, Callable[[Path], None]] = {}
        self.checkpoint: Path | None = None
        self.outputs: list[Path | None] = []
        self.progress, self.saved = "before the first step", ""
        self._is_deferring = self._is_ending = False
        self._requested: float | None = None

    def __enter__(self) -> Session:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:  # Python allows handlers of signals nowhere else.
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if isinstance(error, Mistake):
                sys.exit(f"{Path(self.script).name}: error: {error}")
            if isinstance(error, KeyboardInterrupt):
                self._is_ending = True
                self._report()
                sys.exit(130)
        finally:
            if self._is_main:
                signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, *_: object) -> None:
        now = time.monotonic()
        if self._is_ending:
            return
        if self._is_deferring:
            if self._requested is None:
                self._requested = now
                return
            if now - self._requested < 1:  # Some launchers forward the terminal's signal, which then comes twice.
                return
            self.saves.clear()  # in the middle of a step there is nothing to save
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Delays Ctrl-C to the next :meth:`pause` or the end of the block."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        self.pause()

    def pause(self, agree: Callable[[bool], bool] = bool) -> None:
        """Ends the script here if Ctrl-C was pressed.

        Args:
            agree: returns whether Ctrl-C was pressed in any process, given whether it was in this one; a collective.
        """
        if agree(self._requested is not None):
            raise KeyboardInterrupt

    def _report(self) -> None:
        text = f"stopped {self.progress}{self.saved and f'; {self.saved}'}"
        if self.saves:
            checkpoint = self.checkpoint or unused(Path(f"{Path(self.script).stem}-stopped.pt"))
            files = {labelled(checkpoint, label): save for label, save in self.saves.items()}
            for path, save in files.items():
                try:
                    save(path)
                except (OSError, RuntimeError) as error:  # torch.save raises both
                    sys.exit(f"{Path(self.script).name}: error: stopped {self.progress}, but cannot write {path}: {error}")
            saved = ", ".join(map(str, files))
            text = f"stopped {self.progress}, saved in {saved}; continue with\n{self.resume_command(checkpoint)}"
        if self.speaks:
            print(text, flush=True)

    def resume_command(self, checkpoint: Path) -> str:
        """The command of this script with ``--checkpoint`` and ``--resume``, quoted for a shell."""
        words = list(sys.argv[1:] if self.argv is None else self.argv)
        if self.checkpoint is None:
            words += ["--checkpoint", str(checkpoint)]
        if "--resume" not in words:
            words.append("--resume")
        if "--overwrite" not in words and any(path is not None and path.exists() for path in self.outputs):
            words.append("--overwrite")
        return shlex.join([*_start_of_command(self.script, self.argv), *words])


def _start_of_command(script: str, argv: Sequence[str] | None) -> list[str]:
    """The words before the script's arguments, as they were typed where the system knows them."""
    if argv is not None:
        return ["python", script]
    own = len(sys.argv) - 1
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return sys.orig_argv[: len(sys.orig_argv) - own]
    try:  # torchrun is this process's parent.
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")[:-1]
    except (OSError, UnicodeDecodeError):
        parent = []
    if parent[-len(sys.argv) :] == sys.argv:
        return parent[: len(parent) - own]
    return ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], sys.argv[0]]


def unused(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... with no file whose name begins like it."""
    candidates = [path, *(path.with_stem(f"{path.stem}-{count}") for count in range(2, 1000))]
    return next(each for each in candidates if not any(each.parent.glob(f"{glob.escape(each.stem)}[.-]*")))


def labelled(path: Path, label: str) -> Path:
    """The file of one of several runs: ``run.pt`` becomes ``run.label.pt``."""
    return path.with_suffix(f".{label}{path.suffix}") if label else path


class LearningRate:
    """The learning rate as a share of its peak: linear warm-up, then a cosine down to ``last`` at the last step.

    A run that is lengthened moves from the rate that it has reached to the cosine of the longer run: linearly, in as many steps
    as a warm-up takes.

    Attributes:
        lengths: [first step, steps of the whole run] of the run and of every lengthening.
    """

    def __init__(self, total_steps: int, last: float) -> None:
        self.last = last
        self.lengths = [[0, total_steps]]

    def __call__(self, step: int) -> float:
        return self._rate(step, len(self.lengths) - 1)

    def _rate(self, step: int, part: int) -> float:
        start, total = self.lengths[part]
        warmup = min(50, max(1, total // 10))
        middle, amplitude = (1 + self.last) / 2, (1 - self.last) / 2
        cosine = middle + amplitude * math.cos(math.pi * step / total)
        if part == 0:
            return min((step + 1) / warmup, cosine)
        share = min(1.0, (step - start + 1) / warmup)
        return (1 - share) * self._rate(start, part - 1) + share * cosine


def lengthen(schedule: LRScheduler, step: int, total_steps: int) -> None:
    """Lengthens the run at a step."""
    (rate,) = set(schedule.lr_lambdas)
    rate.lengths.append([step, total_steps])
    for group, peak in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
        group["lr"] = peak * rate(step)


def make_optimizer(
    model: nn.Module,
    lr: float,
    total_steps: int,
    *,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    last_lr: float = 0.0,
) -> tuple[Optimizer, LRScheduler]:
    """AdamW without weight decay on vectors and the SSM's own parameters; :class:`LearningRate` down to ``last_lr * lr``."""
    # Fused: one kernel updates all parameters of a group.
    optimizer = AdamW(parameter_groups(model, weight_decay), lr=lr, betas=betas, fused=True)
    return optimizer, LambdaLR(optimizer, LearningRate(total_steps, last_lr))


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes a temporary file and then replaces the old checkpoint, so that a run killed here loses nothing."""
    partial = path.with_name(path.name + ".partial")
    torch.save(checkpoint, partial)
    os.replace(partial, path)


def check_run(path: Path, saved: dict[str, Any], settings: dict[str, Any], length: str) -> bool:
    """Ends the script if a checkpoint belongs to a run of other settings. Returns whether this run is longer.

    Args:
        length: the setting that may be larger than in the checkpoint.

    Raises:
        LookupError: the checkpoint lacks a setting.
        TypeError: the length saved in the checkpoint is not a number.
    """
    longer = settings[length] > saved[length]
    other = {
        name: (saved[name], now) for name, now in settings.items() if saved[name] != now and not (longer and name == length)
    }
    if other:
        differences = ", ".join(f"{name} {was}, not {now}" for name, (was, now) in other.items())
        hint = f"; --{length} can only grow, --max-steps stops a run early" if length in other else ""
        raise Mistake(f"{path} belongs to another run: {differences}{hint}")
    return longer


def load_checkpoint(path: Path, keys: set[str], settings: dict[str, Any], length: str) -> tuple[dict[str, Any], bool]:
    """Loads the checkpoint if it has these keys and belongs to a run with these settings; see :func:`check_run`."""
    try:
        # Load on the CPU, where the optimizer keeps its step counts; `load_state_dict` copies the rest to the device.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not keys | {"run"} <= checkpoint.keys():
            raise KeyError
        return checkpoint, check_run(path, checkpoint["run"], settings, length)
    except (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
        raise Mistake(f"{path} is not a checkpoint of this script") from None


def check_last_step(path: Path, done: int, max_steps: int | None) -> None:
    """Ends the script if the checkpoint is past ``--max-steps``."""
    if max_steps is not None and done > max_steps:
        raise Mistake(f"{path} has done {done} steps already: choose a larger --max-steps than {max_steps}, or leave it out")


class Run(NamedTuple):
    """A training run.

    Attributes:
        name: text of the progress bar.
        model, optimizer, schedule: saved in the checkpoint, together with the history.
        total_steps: steps of the whole run, in all its parts.
        test_every: steps between two tests; the last step is followed by a test too.
        loss: the loss of a step's batch.
        test: the model's result on the test data.
        settings: must be equal in all parts of an interrupted run.
        length: the setting that may grow in a later part; the option that sets the number of steps.
        label: part of the checkpoint's name if the script trains several runs, otherwise empty.
        loss_format, test_format: format the progress bar's loss and result.
        clip: limits the gradients; by default their norm to 1.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    total_steps: int
    test_every: int
    loss: Callable[[int], Tensor]
    test: Callable[[], Any]
    settings: dict[str, Any]
    length: str
    label: str
    loss_format: Callable[[float], str]
    test_format: Callable[[Any], str]
    clip: Callable[[], None] | None = None


def train(run: Run, args: argparse.Namespace, history_type: type, session: Session) -> tuple[Any, float]:
    """Trains until the last step or ``--max-steps``, from a checkpoint with ``--resume``.

    Args:
        run: the model and its optimizer, loss and test.
        args: the options of ``add_options``.
        history_type: a NamedTuple of two lists: training loss of every step, and (steps done, result) of every test.
        session: saves the run on Ctrl-C.

    Returns:
        The history, and the seconds of the steps.

    Raises:
        Diverged: the loss is not finite.
    """
    last_step = min(args.max_steps or run.total_steps, run.total_steps)
    parts: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, "schedule": run.schedule}
    history: Any = history_type([], [])
    path = None if args.checkpoint is None else labelled(args.checkpoint, run.label)
    if args.resume and path is not None and path.is_file():
        checkpoint, longer = load_checkpoint(path, {*parts, *history._fields}, run.settings, run.length)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        history = history_type(*(checkpoint[name] for name in history._fields))
        check_last_step(path, len(history[0]), args.max_steps)
        if longer:
            lengthen(run.schedule, len(history[0]), run.total_steps)
    losses, tests = history

    def save(path: Path) -> None:
        states = {name: part.state_dict() for name, part in parts.items()}
        save_checkpoint(path, states | {"run": run.settings} | history._asdict())

    def tell_session() -> None:
        session.progress = f"after {len(losses)} of {run.total_steps} steps of {run.name}"

    tell_session()
    session.checkpoint = args.checkpoint
    session.saves[run.label] = save
    start = time.perf_counter()
    bar = tqdm(total=last_step, initial=len(losses), unit="step", desc=run.name, mininterval=0.5)
    with bar as progress, session.deferred():
        for step in range(len(losses), last_step):
            loss = run.loss(step)
            run.optimizer.zero_grad()
            loss.backward()
            if run.clip is None:
                nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            else:
                run.clip()
            run.optimizer.step()
            run.schedule.step()

            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                del session.saves[run.label]
                raise Diverged(
                    f"the loss is {losses[-1]} in step {step + 1}: try a lower --lr or, with a mamba, another discretization"
                )
            if (step + 1) % run.test_every == 0 or step + 1 == last_step:
                tests.append((step + 1, run.test()))
                if path is not None:
                    save(path)
                    session.saved = f"{path} has {step + 1} steps"
            test = run.test_format(tests[-1][1]) if tests else "-"
            progress.set_postfix(loss=run.loss_format(losses[-1]), test=test, refresh=False)
            progress.update()
            tell_session()
            session.pause()
        if not tests or tests[-1][0] < len(losses):  # Ctrl-C stopped the run here, and nothing is left to train.
            tests.append((len(losses), run.test()))
    return history, time.perf_counter() - start


def duration(seconds: float, device: torch.device) -> str:
    return f"{seconds:.0f} s on {torch.cuda.get_device_name(device) if device.type == 'cuda' else device}"


def plot_losses(axes: Axes, losses: list[float], window: int, color: str, light: float, label: str | None = None) -> None:
    """Draws the loss of every step in a light line and its running mean over it."""
    smooth = torch.tensor(losses).unfold(0, window, 1).mean(dim=-1).tolist()
    axes.plot(range(1, len(losses) + 1), losses, color=color, alpha=light, linewidth=0.8)
    axes.plot(range(window, len(losses) + 1), smooth, color=color, label=label)


def save_figure(path: Path, draw: Callable[[], Figure]) -> None:
    with matplotlib.style.context([STYLE] if STYLE.is_file() else []):
        draw().savefig(path, dpi=200)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line."""

    def __init__(self, script: str, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=Path(script).name, description=description, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def number(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """Reads an int or a float from ``low`` to ``high``."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if low <= value <= high:
            return value
        raise argparse.ArgumentTypeError(f"expected {kind.__name__} from {low} to {high}, got {text!r}")

    return read


def add_options(
    parser: Parser,
    discretizations: Sequence[str],
    *,
    lr: float,
    d_model: int,
    checkpoint: str,
    metavar: str = "FILE",
    several_rules: bool = False,
) -> None:
    """Adds the options of every script.

    Args:
        discretizations: the names that ``--discretization`` accepts; the parser has the option only if there are any.
        lr, d_model: the defaults.
        checkpoint: when the script writes one.
        metavar: what the checkpoint is, a FILE or a FOLDER.
        several_rules: ``--discretization`` takes several names.
    """
    if discretizations:
        several = {"nargs": "+", "metavar": "NAME"} if several_rules else {}
        parser.add_argument(
            "--discretization",
            choices=[*discretizations, *ALIASES],
            help="for mamba; for mamba2 one of the exponential family; default: zoh",
            **several,
        )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--lr", type=number(float, 1e-9, 10), default=lr, help="peak learning rate; default: %(default)s")
    parser.add_argument("--d-model", type=number(int, 1, 4096), default=d_model, help="channels; default: %(default)s")
    parser.add_argument("--n-layers", type=number(int, 1, 100), default=2, help="blocks; default: 2")
    parser.add_argument("--seed", type=number(int, 0, 2**32 - 1), default=0, help="default: 0")
    parser.add_argument("--threads", type=number(int, 1, 1024), default=1, help="CPU threads, default: 1 (the model is small)")
    parser.add_argument("--max-steps", type=number(int, 1, 10**9), help="stop early, to be resumed")
    parser.add_argument("--checkpoint", type=Path, metavar=metavar, help=f"written {checkpoint}, on Ctrl-C and at the end")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint, or lengthen a finished run")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist; with --resume, not the checkpoint")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write the learning curve there")


def check_paths(
    parser: Parser,
    args: argparse.Namespace,
    labels: Sequence[str] = ("",),
    *,
    continued: Path | None = None,
    **outputs: Path | None,
) -> None:
    """Ends the script if ``--checkpoint``, ``--resume`` or an output cannot work, or would overwrite a file.

    Args:
        labels: of the runs; see :func:`labelled`.
        continued: an output that ``--resume`` continues, as it does checkpoints.
        outputs: files that the script writes besides the checkpoint and the plot, by option.
    """
    outputs = {"plot": args.plot, **outputs}
    for option, path in {"checkpoint": args.checkpoint, **outputs}.items():
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
            parser.error(f"argument --{option.replace('_', '-')}: cannot write {path}")
    is_kept = args.resume and continued is not None
    check_outputs(parser, args, {option: path for option, path in outputs.items() if not (is_kept and path == continued)})
    files = [] if args.checkpoint is None else [labelled(args.checkpoint, label) for label in labels]
    files += [continued] if is_kept else []
    found = [path for path in files if path.exists()]
    if args.resume and not found:
        parser.error(f"argument --resume: no checkpoint to continue from: {args.checkpoint or 'give --checkpoint FILE'}")
    if found and not args.resume and not args.overwrite:
        parser.error(f"argument --checkpoint: {found[0]} exists: continue it with --resume, or replace it with --overwrite")


def check_outputs(parser: Parser, args: argparse.Namespace, outputs: dict[str, Path | None]) -> None:
    """Ends the script if it would overwrite a file that it writes at its end."""
    if args.plot is not None and args.plot.suffix != ".png":
        parser.error(f"argument --plot: expected a name that ends in .png, got {args.plot}")
    for option, path in outputs.items():
        if path is not None and path.exists() and not args.overwrite:
            resumed = " (with --resume it leaves the checkpoint alone)" if args.checkpoint is not None else ""
            parser.error(f"argument --{option.replace('_', '-')}: {path} exists: replace it with --overwrite{resumed}")
    files = {"checkpoint": args.checkpoint, **outputs, "text": getattr(args, "text", None)}
    given = {option: path.resolve() for option, path in files.items() if path is not None}
    if len(set(given.values())) < len(given):
        parser.error(f"arguments --{', --'.join(given)}: expected different files".replace("_", "-"))


def check_rule(parser: Parser, args: argparse.Namespace, models: Sequence[str]) -> None:
    """Ends the script if ``--discretization`` was given and has no effect on any of the models."""
    if args.discretization is not None and not any(model in RULED for model in models):
        parser.error(
            f"argument --discretization: {' and '.join(models)} {'has' if len(models) == 1 else 'have'} none: leave it out, or "
            f"choose --model {' or '.join(RULED)}"
        )


def check_effect(parser: Parser, args: argparse.Namespace, options: Sequence[str], beside: str) -> None:
    """Ends the script if an option was given that has no effect beside another one."""
    for option in options:
        if getattr(args, option) is not None:
            parser.error(f"argument --{option.replace('_', '-')}: has no effect with {beside}: leave out one of them")


def say(text: str) -> None:
    """Prints a text, with escapes for characters that the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def check_device(parser: Parser, args: argparse.Namespace, attempt: Callable[[torch.device], object]) -> None:
    """Makes ``args.device`` a device; ends the script if ``attempt``, a small model, does not run there."""
    try:
        args.device = torch.device(args.device)
        attempt(args.device)
    except ValueError as error:  # mamba2 has only some of mamba's rules
        reason, *_ = str(error).splitlines()
        parser.error(f"argument --discretization: {reason}")
    except (AssertionError, RuntimeError) as error:  # no such device, or no kernels for it
        reason, *_ = str(error).splitlines()
        parser.error(f"argument --device {args.device}: {reason}")


def describe(model: str, discretization: str) -> str:
    return f"{model} (discretization {discretization})" if model in RULED else model
