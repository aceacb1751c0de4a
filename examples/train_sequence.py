"""Classifies handwritten digits read pixel by pixel, with a small stack of Mamba, Mamba-2, minGRU or minLSTM blocks.

The images are scikit-learn's digits (8 x 8 pixels, 10 classes, part of the package: nothing is downloaded). Each is a sequence
of 64 numbers that the model reads one after another. One word changes the model, one Mamba's discretization, and several models
are trained one after another and compared in one plot:

    python examples/train_sequence.py --model mingru
    python examples/train_sequence.py --discretization bilinear --plot curve.png
    python examples/train_sequence.py --model mamba mamba2 mingru minlstm --plot curves.png

Stop and continue with ``--checkpoint run.pt`` and ``--checkpoint run.pt --resume``: batches, learning rate and evaluations
depend on the seed and the number of steps done alone, so the result is that of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import ssm_kernels
from ssm_kernels.nn import Mamba, Mamba2, MinGRU, MinLSTM

try:
    import matplotlib.style
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install scikit-learn tqdm matplotlib")

# As the figures of the benchmarks; a copy of this script elsewhere draws in matplotlib's style.
STYLE = Path(__file__).resolve().parents[1] / "benchmarks" / "style.mplstyle"


class MinRNNMixer(nn.Module):
    """A minGRU or minLSTM in Mamba's surroundings: after a short convolution, before a gate and a projection."""

    def __init__(self, d_model: int, layer: type[MinGRU] | type[MinLSTM], d_conv: int = 4, expand: int = 2) -> None:
        super().__init__()
        d_inner = expand * d_model
        self.conv = nn.Conv1d(d_model, d_model, d_conv, groups=d_model)
        self.rnn = layer(d_model, d_inner, batch_first=True)
        self.gate = nn.Linear(d_model, d_inner)
        self.out_proj = nn.Linear(d_inner, d_model)
        # Small biases put the gate that lets the candidate in near 1/2, and a state lasts two steps. These: up to some thirty
        # in a minLSTM, fifty in a minGRU.
        with torch.no_grad():
            self.rnn.bias_ih_l0[-2 * d_inner : -d_inner].uniform_(-4, 0)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (self.conv.kernel_size[0] - 1, 0))
        h, _ = self.rnn(F.silu(self.conv(padded).transpose(1, 2)))
        return self.out_proj(h * F.silu(self.gate(x)))


MIXERS: dict[str, Callable[[int, str], nn.Module]] = {
    "mamba": lambda d_model, discretization: Mamba(d_model, d_state=8, discretization=discretization),
    "mamba2": lambda d_model, discretization: Mamba2(
        d_model, d_state=16, headdim=math.gcd(2 * d_model, 16), discretization=discretization
    ),
    "mingru": lambda d_model, _: MinRNNMixer(d_model, MinGRU),
    "minlstm": lambda d_model, _: MinRNNMixer(d_model, MinLSTM),
}


class Block(nn.Module):
    """A mixer with normalization before it and a residual connection around it; (batch, seqlen, d_model)."""

    def __init__(self, d_model: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class SequenceClassifier(nn.Module):
    """A class for each sequence of numbers: (batch, seqlen) -> logits (batch, n_classes)."""

    def __init__(self, model: str, d_model: int, n_layers: int, n_classes: int, discretization: str) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, d_model)
        self.blocks = nn.Sequential(*(Block(d_model, MIXERS[model](d_model, discretization)) for _ in range(n_layers)))
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, n_classes)

    def forward(self, sequence: Tensor) -> Tensor:
        x = self.blocks(self.embedding(sequence[..., None]))
        return self.head(self.norm(x).mean(dim=1))


def load_data(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequences (n, 64) in [-1, 1] and labels (n,), for training and for testing; the split never changes."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    train_x, test_x = (torch.tensor(part / 8 - 1, dtype=torch.float32, device=device) for part in parts[:2])
    train_y, test_y = (torch.tensor(part, device=device) for part in parts[2:])
    return train_x, train_y, test_x, test_y


def make_optimizer(model: nn.Module, lr: float, total_steps: int) -> tuple[Optimizer, LRScheduler]:
    """AdamW without weight decay on vectors and on the SSM's own parameters; warm-up, then a cosine down to zero."""
    decay, no_decay = [], []
    for parameter in model.parameters():
        exempt = parameter.dim() < 2 or getattr(parameter, "_no_weight_decay", False)
        (no_decay if exempt else decay).append(parameter)
    optimizer = AdamW([{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}], lr=lr)
    warmup = min(50, max(1, total_steps // 10))
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / total_steps)))
    return optimizer, schedule


def batch_indices(step: int, n_samples: int, batch_size: int, seed: int) -> Tensor:
    """The batch of a step. Every epoch visits the samples in an order of its own and drops the incomplete last batch."""
    epoch, position = divmod(step, n_samples // batch_size)
    order = torch.randperm(n_samples, generator=torch.Generator().manual_seed(10_000 * seed + epoch))
    return order[position * batch_size : (position + 1) * batch_size]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of sequences that the model classifies correctly."""
    return (model(x).argmax(dim=-1) == y).float().mean().item()


def fail(message: str) -> NoReturn:
    sys.exit(f"{Path(__file__).name}: error: {message}")


def save_checkpoint(path: Path, checkpoint: dict) -> None:
    """Writes beside the old checkpoint, then replaces it, so that a run killed here loses nothing."""
    partial = path.with_name(path.name + ".partial")
    torch.save(checkpoint, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, run: dict) -> dict:
    """The checkpoint, if it is one of this run."""
    try:
        # On the CPU, where the optimizer keeps its step counts; what belongs on another device is copied there.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not {"run", "model", "optimizer", "schedule", "losses", "accuracies"} <= checkpoint.keys():
            raise KeyError
        other = {name: (checkpoint["run"][name], value) for name, value in run.items() if checkpoint["run"][name] != value}
    except (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
        fail(f"{path} is not a checkpoint of this script")
    if other:
        fail(f"{path} is of another run: " + ", ".join(f"{name} {was}, not {now}" for name, (was, now) in other.items()))
    return checkpoint


class History(NamedTuple):
    """What a run measures.

    Attributes:
        losses: training loss of every step.
        accuracies: (steps done, test accuracy) after every epoch and at the end.
    """

    losses: list[float]
    accuracies: list[tuple[int, float]]


def learning_curves(histories: dict[str, History], title: str) -> Figure:
    """Training loss, of every step and its running mean, and test accuracy of every epoch, for each run."""
    figure = Figure(figsize=(7.35, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    window = max(1, min(len(losses) for losses, _ in histories.values()) // 50)
    for index, (name, (losses, accuracies)) in enumerate(histories.items()):
        smooth = torch.tensor(losses).unfold(0, window, 1).mean(dim=-1).tolist()
        left.plot(range(1, len(losses) + 1), losses, color=f"C{index}", alpha=0.3 / len(histories), linewidth=0.8)
        left.plot(range(window, len(losses) + 1), smooth, color=f"C{index}")
        steps, values = zip(*accuracies, strict=True)
        label = f"{name}: {100 * values[-1]:.1f} %"
        right.plot(steps, [100 * value for value in values], color=f"C{index}", marker=".", label=label)
    smoothed = f", mean of {window} steps" if window > 1 else ""
    left.set(xlabel="step", ylabel=f"cross-entropy{smoothed}", yscale="log")
    left.set_title("Training loss (light: of each step)", loc="left")
    right.set(xlabel="step", ylabel="test accuracy (%)", ylim=(0, 102))
    right.set_title("Test accuracy", loc="left")
    figure.suptitle(title)
    # The legend goes below the panels, so that it covers no data.
    figure.legend(loc="outside lower center", ncols=4, title="last test accuracy")
    return figure


def plot_learning_curves(path: Path, histories: dict[str, History], title: str) -> None:
    with matplotlib.style.context([STYLE] if STYLE.is_file() else []):
        learning_curves(histories, title).savefig(path, dpi=200)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message}\n")


def number(kind: Callable, low: float, high: float) -> Callable:
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


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=Path(__file__).name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", default=["mamba"], choices=MIXERS, metavar="NAME", help=f"{', '.join(MIXERS)}; default: mamba"
    )
    parser.add_argument(
        "--discretization",
        default="zoh",
        choices=ssm_kernels.discretizations,
        help="of mamba and, those of the exponential family, mamba2; default: zoh",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--epochs", type=number(int, 1, 10_000), default=25, help="default: 25")
    parser.add_argument("--batch-size", type=number(int, 1, 10_000), default=16, help="default: 16")
    parser.add_argument("--lr", type=number(float, 1e-9, 10), default=4e-3, help="peak learning rate; default: 0.004")
    parser.add_argument("--d-model", type=number(int, 1, 4096), default=48, help="channels; default: 48")
    parser.add_argument("--n-layers", type=number(int, 1, 100), default=2, help="blocks; default: 2")
    parser.add_argument("--seed", type=number(int, 0, 2**32 - 1), default=0, help="default: 0")
    parser.add_argument("--threads", type=number(int, 1, 1024), default=1, help="CPU threads, default: 1 (the model is small)")
    parser.add_argument("--max-steps", type=number(int, 1, 10**9), help="stop early, to be resumed")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="written after every epoch and at the end")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write the learning curve there")
    args = parser.parse_args(argv)

    args.model = list(dict.fromkeys(args.model))
    if args.checkpoint is not None and len(args.model) > 1:
        parser.error(f"argument --checkpoint: holds one model, not {' and '.join(args.model)}")
    for option, path in (("--checkpoint", args.checkpoint), ("--plot", args.plot)):
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
            parser.error(f"argument {option}: cannot write {path}")
    if args.plot is not None and args.plot.suffix != ".png":
        parser.error(f"argument --plot: expected a name that ends in .png, got {args.plot}")
    if args.resume and (args.checkpoint is None or not args.checkpoint.is_file()):
        parser.error(f"argument --resume: no checkpoint to continue from: {args.checkpoint or 'give --checkpoint FILE'}")
    try:
        args.device = torch.device(args.device)
        for model in args.model:
            MIXERS[model](8, args.discretization).to(args.device)(torch.zeros(1, 2, 8, device=args.device)).sum().item()
    except ValueError as error:  # of the rules of mamba, mamba2 has some
        reason, *_ = str(error).splitlines()
        parser.error(f"argument --discretization: {reason}")
    except (AssertionError, RuntimeError) as error:  # no such device, or no kernels for it
        reason, *_ = str(error).splitlines()
        parser.error(f"argument --device {args.device}: {reason}")
    return args


def train(model_name: str, args: argparse.Namespace) -> History:
    """Trains a model, or goes on with it, and says how it did."""
    train_x, train_y, test_x, test_y = load_data(args.device)
    if args.batch_size > len(train_x):
        fail(f"--batch-size {args.batch_size} is more than the {len(train_x)} training images")
    steps_per_epoch = len(train_x) // args.batch_size
    total_steps = args.epochs * steps_per_epoch
    last_step = min(args.max_steps or total_steps, total_steps)

    torch.manual_seed(args.seed)
    model = SequenceClassifier(model_name, args.d_model, args.n_layers, n_classes=10, discretization=args.discretization)
    model = model.to(args.device)
    optimizer, schedule = make_optimizer(model, args.lr, total_steps)
    losses: list[float] = []
    accuracies: list[tuple[int, float]] = []

    # What must be the same in all parts of an interrupted run.
    options = ("discretization", "epochs", "batch_size", "lr", "d_model", "n_layers", "seed")
    run = {"model": model_name} | {name: getattr(args, name) for name in options}
    if args.resume:
        checkpoint = load_checkpoint(args.checkpoint, run)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        losses, accuracies = checkpoint["losses"], checkpoint["accuracies"]
        if len(losses) >= last_step:
            fail(f"{args.checkpoint} has done {len(losses)} steps already, and this run ends after {last_step}")

    start = time.perf_counter()
    name = describe(model_name, args)
    with tqdm(total=last_step, initial=len(losses), unit="step", desc=name, mininterval=0.5) as progress:
        for step in range(len(losses), last_step):
            batch = batch_indices(step, len(train_x), args.batch_size, args.seed)
            loss = F.cross_entropy(model(train_x[batch]), train_y[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()

            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                fail(f"the loss is {losses[-1]} in step {step + 1}: try a lower --lr or, of a mamba, another discretization")
            if (step + 1) % steps_per_epoch == 0 or step + 1 == last_step:
                accuracies.append((step + 1, accuracy(model, test_x, test_y)))
                if args.checkpoint is not None:
                    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
                    states = {name: part.state_dict() for name, part in parts.items()}
                    save_checkpoint(args.checkpoint, states | {"run": run, "losses": losses, "accuracies": accuracies})
            test = f"{100 * accuracies[-1][1]:.1f} %" if accuracies else "-"
            progress.set_postfix(loss=f"{losses[-1]:.3f}", test=test, refresh=False)
            progress.update()

    place = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else str(args.device)
    print(
        f"test accuracy: {100 * accuracies[-1][1]:.1f} % after {last_step} steps ({last_step / steps_per_epoch:.3g} epochs), "
        f"{time.perf_counter() - start:.0f} s on {place}, {name}"
    )
    return History(losses, accuracies)


def describe(model_name: str, args: argparse.Namespace) -> str:
    return f"{model_name} (discretization {args.discretization})" if model_name in ("mamba", "mamba2") else model_name


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    histories = {name: train(name, args) for name in args.model}
    if args.plot is not None:
        names = ", ".join(describe(name, args) for name in args.model)
        plot_learning_curves(args.plot, histories, f"digits pixel by pixel: {names}")
        print(f"{'learning curve' if len(histories) == 1 else 'learning curves'}: {args.plot}")


if __name__ == "__main__":
    main()
