"""Shared by the training scripts of this folder: optimizer, training loop, checkpoints, options and figures."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pickle
import sys
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


class Mistake(Exception):
    """A mistake of the user that ends the script with one line."""


@contextlib.contextmanager
def mistakes_in_one_line(script: str) -> Iterator[None]:
    try:
        yield
    except Mistake as mistake:
        sys.exit(f"{Path(script).name}: error: {mistake}")


def make_optimizer(
    model: nn.Module,
    lr: float,
    total_steps: int,
    *,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    last_lr: float = 0.0,
) -> tuple[Optimizer, LRScheduler]:
    """AdamW without weight decay on vectors and the SSM's own parameters; warm-up, then a cosine down to ``last_lr * lr``."""
    optimizer = AdamW(parameter_groups(model, weight_decay), lr=lr, betas=betas)
    warmup = min(50, max(1, total_steps // 10))
    middle, amplitude = (1 + last_lr) / 2, (1 - last_lr) / 2
    schedule = LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, middle + amplitude * math.cos(math.pi * step / total_steps))
    )
    return optimizer, schedule


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes a temporary file and then replaces the old checkpoint, so that a run killed here loses nothing."""
    partial = path.with_name(path.name + ".partial")
    torch.save(checkpoint, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, keys: set[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Loads the checkpoint if it has these keys and belongs to a run with these settings."""
    try:
        # Load on the CPU, where the optimizer keeps its step counts; `load_state_dict` copies the rest to the device.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not keys | {"run"} <= checkpoint.keys():
            raise KeyError
        saved = checkpoint["run"]
        other = {name: (saved[name], value) for name, value in settings.items() if saved[name] != value}
    except (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
        raise Mistake(f"{path} is not a checkpoint of this script") from None
    if other:
        differences = ", ".join(f"{name} {was}, not {now}" for name, (was, now) in other.items())
        raise Mistake(f"{path} belongs to another run: {differences}")
    return checkpoint


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
        loss_format, test_format: format the progress bar's loss and result.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    total_steps: int
    test_every: int
    loss: Callable[[int], Tensor]
    test: Callable[[], float]
    settings: dict[str, Any]
    loss_format: Callable[[float], str]
    test_format: Callable[[float], str]


def train(run: Run, args: argparse.Namespace, history_type: type) -> tuple[Any, str]:
    """Trains until the last step or ``--max-steps``, from a checkpoint with ``--resume``.

    Args:
        run: the model and its optimizer, loss and test.
        args: the options of ``add_options``.
        history_type: a NamedTuple of two lists: training loss of every step, and (steps done, result) of every test.

    Returns:
        The history, and a text with the seconds of the steps and the device.
    """
    last_step = min(args.max_steps or run.total_steps, run.total_steps)
    parts: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, "schedule": run.schedule}
    history: Any = history_type([], [])
    if args.resume:
        checkpoint = load_checkpoint(args.checkpoint, {*parts, *history._fields}, run.settings)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        history = history_type(*(checkpoint[name] for name in history._fields))
        if len(history[0]) >= last_step:
            raise Mistake(f"{args.checkpoint} has done {len(history[0])} steps already, and this run ends after {last_step}")
    losses, tests = history

    start = time.perf_counter()
    with tqdm(total=last_step, initial=len(losses), unit="step", desc=run.name, mininterval=0.5) as progress:
        for step in range(len(losses), last_step):
            loss = run.loss(step)
            run.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimizer.step()
            run.schedule.step()

            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise Mistake(
                    f"the loss is {losses[-1]} in step {step + 1}: try a lower --lr or, with a mamba, another discretization"
                )
            if (step + 1) % run.test_every == 0 or step + 1 == last_step:
                tests.append((step + 1, run.test()))
                if args.checkpoint is not None:
                    states = {name: part.state_dict() for name, part in parts.items()}
                    save_checkpoint(args.checkpoint, states | {"run": run.settings} | history._asdict())
            test = run.test_format(tests[-1][1]) if tests else "-"
            progress.set_postfix(loss=run.loss_format(losses[-1]), test=test, refresh=False)
            progress.update()
    place = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else str(args.device)
    return history, f"{time.perf_counter() - start:.0f} s on {place}"


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
        super().__init__(prog=Path(script).name, description=description, formatter_class=formatter)

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
    parser: Parser, discretizations: Sequence[str], *, lr: float, d_model: int, checkpoint: str, metavar: str = "FILE"
) -> None:
    """Adds the options of every script.

    Args:
        lr, d_model: the defaults.
        checkpoint: when the script writes one.
        metavar: what the checkpoint is, a FILE or a FOLDER.
    """
    parser.add_argument(
        "--discretization",
        default="zoh",
        choices=[*discretizations, *ALIASES],
        help="for mamba; for mamba2 one of the exponential family; default: zoh",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--lr", type=number(float, 1e-9, 10), default=lr, help="peak learning rate; default: %(default)s")
    parser.add_argument("--d-model", type=number(int, 1, 4096), default=d_model, help="channels; default: %(default)s")
    parser.add_argument("--n-layers", type=number(int, 1, 100), default=2, help="blocks; default: 2")
    parser.add_argument("--seed", type=number(int, 0, 2**32 - 1), default=0, help="default: 0")
    parser.add_argument("--threads", type=number(int, 1, 1024), default=1, help="CPU threads, default: 1 (the model is small)")
    parser.add_argument("--max-steps", type=number(int, 1, 10**9), help="stop early, to be resumed")
    parser.add_argument("--checkpoint", type=Path, metavar=metavar, help=f"written {checkpoint} and at the end")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write the learning curve there")


def check_paths(parser: Parser, args: argparse.Namespace) -> None:
    """Ends the script if ``--checkpoint``, ``--resume`` or ``--plot`` cannot work."""
    for option, path in (("--checkpoint", args.checkpoint), ("--plot", args.plot)):
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
            parser.error(f"argument {option}: cannot write {path}")
    if args.plot is not None and args.plot.suffix != ".png":
        parser.error(f"argument --plot: expected a name that ends in .png, got {args.plot}")
    if args.resume and (args.checkpoint is None or not args.checkpoint.is_file()):
        parser.error(f"argument --resume: no checkpoint to continue from: {args.checkpoint or 'give --checkpoint FILE'}")


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
    return f"{model} (discretization {discretization})" if model in ("mamba", "mamba2") else model
