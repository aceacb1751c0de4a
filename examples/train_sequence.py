"""Classifies handwritten digits read pixel by pixel, with a small stack of Mamba, Mamba-2, minGRU or minLSTM blocks.

The images are scikit-learn's digits (8 x 8 pixels, 10 classes, part of the package: nothing is downloaded). Each is a sequence
of 64 numbers. ``--model`` chooses the model and ``--discretization`` Mamba's discretization. Several models or discretizations
are trained one after another and compared in one table and one plot:

    python examples/train_sequence.py --model mingru
    python examples/train_sequence.py --discretization bilinear --plot curve.png
    python examples/train_sequence.py --model mamba mamba2 mingru minlstm --plot curves.png
    python examples/train_sequence.py --discretization zoh zoh_exact bilinear

``--discretization all`` trains classifiers of signals with every rule, five seeds each, and tests them at half, equal and twice
the sampling rate, with step sizes scaled with the rate and not scaled; sampling_rates.py has the signals and the model.
``--task signals`` does so with some rules:

    python examples/train_sequence.py --discretization all --device cuda --results rates.json --plot rates.png
    python examples/train_sequence.py --task signals --discretization zoh foh_ramp --seeds 1 --steps 200

Ctrl-C saves the run and prints the command that resumes it. Batches, learning rate and tests depend only on the seed and the
number of steps, so the result equals a run that was never stopped. A larger ``--epochs`` lengthens a run, also a finished one.
No file is replaced without ``--overwrite``.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # Ctrl-C while the packages load ends the script without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels.choices import DiscretizationName, TwoSampleDiscretizationName
from ssm_kernels.nn import Mamba, Mamba2, MinGRU, MinLSTM
from ssm_kernels.reference import ALIASES

try:
    import sampling_rates
    import training
    from matplotlib.figure import Figure
    from sampling_rates import RULES
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from training import RULED, Diverged, Mistake, Session, describe, number
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install scikit-learn tqdm matplotlib")


RuleName = DiscretizationName | TwoSampleDiscretizationName


class MinRNNMixer(nn.Module):
    """A minGRU or minLSTM with Mamba's short convolution before it, and a gate and a projection after it."""

    def __init__(self, d_model: int, layer: type[MinGRU] | type[MinLSTM], d_conv: int = 4, expand: int = 2) -> None:
        super().__init__()
        d_inner = expand * d_model
        self.conv = nn.Conv1d(d_model, d_model, d_conv, groups=d_model)
        self.rnn = layer(d_model, d_inner, batch_first=True)
        self.gate = nn.Linear(d_model, d_inner)
        self.out_proj = nn.Linear(d_inner, d_model)
        # With small biases the input gate is near 1/2 and a state lasts two steps. With these it lasts up to about thirty steps
        # in a minLSTM, fifty in a minGRU.
        with torch.no_grad():
            self.rnn.bias_ih_l0[-2 * d_inner : -d_inner].uniform_(-4, 0)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (self.conv.kernel_size[0] - 1, 0))
        h, _ = self.rnn(F.silu(self.conv(padded).transpose(1, 2)))
        return self.out_proj(h * F.silu(self.gate(x)))


MIXERS: dict[str, Callable[[int, Any], nn.Module]] = {
    "mamba": lambda d_model, discretization: Mamba(d_model, d_state=8, discretization=discretization),
    "mamba2": lambda d_model, discretization: Mamba2(
        d_model, d_state=16, headdim=math.gcd(2 * d_model, 16), discretization=discretization
    ),
    "mingru": lambda d_model, _: MinRNNMixer(d_model, MinGRU),
    "minlstm": lambda d_model, _: MinRNNMixer(d_model, MinLSTM),
}


class Block(nn.Module):
    """A mixer with a norm before it and a residual connection around it; (batch, seqlen, d_model)."""

    def __init__(self, d_model: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class SequenceClassifier(nn.Module):
    """Classifies sequences of numbers: (batch, seqlen) -> logits (batch, n_classes)."""

    def __init__(self, model: str, d_model: int, n_layers: int, n_classes: int, discretization: RuleName) -> None:
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


def batch_indices(step: int, n_samples: int, batch_size: int, seed: int) -> Tensor:
    """The batch of a step. Every epoch visits the samples in its own order and drops the incomplete last batch."""
    epoch, position = divmod(step, n_samples // batch_size)
    order = torch.randperm(n_samples, generator=torch.Generator().manual_seed(10_000 * seed + epoch))
    return order[position * batch_size : (position + 1) * batch_size]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of sequences that the model classifies correctly."""
    return (model(x).argmax(dim=-1) == y).float().mean().item()


class History(NamedTuple):
    """The measurements of a run.

    Attributes:
        losses: training loss of every step.
        accuracies: (steps done, test accuracy) after every epoch and at the end.
    """

    losses: list[float]
    accuracies: list[tuple[int, float]]


class Result(NamedTuple):
    """A run's history, or None if its loss was not finite, and the seconds of its steps."""

    history: History | None
    seconds: float


def learning_curves(histories: dict[str, History], title: str) -> Figure:
    """Draws training loss (every step and running mean) and test accuracy of every epoch, for each run."""
    figure = Figure(figsize=(7.35, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    window = max(1, min(len(losses) for losses, _ in histories.values()) // 50)
    for index, (name, (losses, accuracies)) in enumerate(histories.items()):
        training.plot_losses(left, losses, window, f"C{index}", 0.3 / len(histories))
        steps, values = zip(*accuracies, strict=True)
        label = f"{name}: {100 * values[-1]:.1f} %"
        right.plot(steps, [100 * value for value in values], color=f"C{index}", marker=".", label=label)
    smoothed = f", mean of {window} steps" if window > 1 else ""
    left.set(xlabel="step", ylabel=f"cross-entropy{smoothed}", yscale="log")
    left.set_title("Training loss (light: of each step)", loc="left")
    right.set(xlabel="step", ylabel="test accuracy (%)", ylim=(0, 102))
    right.set_title("Test accuracy", loc="left")
    figure.suptitle(title)
    # The legend is below the panels, so that it covers no data.
    figure.legend(loc="outside lower center", ncols=4, title="last test accuracy")
    return figure


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = training.Parser(__file__, __doc__)
    parser.add_argument(
        "--model", nargs="+", default=["mamba"], choices=MIXERS, metavar="NAME", help=f"{', '.join(MIXERS)}; default: mamba"
    )
    parser.add_argument(
        "--task",
        choices=["digits", "signals"],
        help="what to classify; default: digits, and with --discretization all signals",
    )
    parser.add_argument("--epochs", type=number(int, 1, 10_000), help="of digits; default: 25")
    parser.add_argument("--steps", type=number(int, 1, 10**7), help="of signals; default: 2000")
    parser.add_argument("--seeds", type=number(int, 1, 100), help="models of each rule on signals, from --seed on; default: 5")
    parser.add_argument("--batch-size", type=number(int, 1, 10_000), help="default: 16 digits or 32 signals")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE.json",
        help="of signals: receives the accuracies after each rule; with --resume its rules are not trained again",
    )
    checkpoint = "after every epoch of digits, and after the steps of signals"
    training.add_options(parser, [*RULES, "all"], lr=4e-3, d_model=48, checkpoint=checkpoint, several_rules=True)
    args = parser.parse_args(argv)

    if args.task is None:
        args.task = "signals" if "all" in (args.discretization or ()) else "digits"
    of_signals = args.task == "signals"
    training.check_effect(parser, args, ["epochs"] if of_signals else ["steps", "seeds", "results"], f"--task {args.task}")
    defaults = {"epochs": 25, "batch_size": 16} if not of_signals else {"steps": 2000, "seeds": 5, "batch_size": 32}
    for option, value in defaults.items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    args.model = list(dict.fromkeys(args.model))
    if of_signals and args.model != ["mamba"]:
        parser.error("argument --model: has no effect with --task signals: leave out one of them")
    training.check_rule(parser, args, args.model)
    args.discretization = chosen_rules(args)
    training.check_paths(
        parser, args, labels_of(args), continued=args.results, **({"results": args.results} if of_signals else {})
    )

    def attempt(device: torch.device) -> None:
        for model, rule in runs_of(args):
            MIXERS[model](8, rule).to(device)(torch.zeros(1, 2, 8, device=device)).sum().item()

    training.check_device(parser, args, attempt)
    return args


def runs_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The models to train, each with every discretization if it has one."""
    return [(model, rule) for model in args.model for rule in (args.discretization if model in RULED else ["zoh"])]


def chosen_rules(args: argparse.Namespace) -> list[str]:
    """The rules of ``--discretization``; on signals each has one name."""
    rules = args.discretization or ["zoh"]
    if args.task == "signals":
        rules = [ALIASES.get(rule, rule) for rule in rules]
    return list(RULES if "all" in rules else dict.fromkeys(rules))


def labels_of(args: argparse.Namespace) -> list[str]:
    """Parts of the names of the runs' checkpoints."""
    if args.task == "signals":
        return args.discretization
    runs = runs_of(args)
    if len(runs) == 1:
        return [""]
    return [f"{model}-{rule}" if model in RULED else model for model, rule in runs]


def train(model_name: str, discretization: RuleName, label: str, args: argparse.Namespace, session: Session) -> Result:
    """Trains a model from scratch or from a checkpoint, and prints its result."""
    train_x, train_y, test_x, test_y = load_data(args.device)
    if args.batch_size > len(train_x):
        raise Mistake(f"--batch-size {args.batch_size} is more than the {len(train_x)} training images")
    steps_per_epoch = len(train_x) // args.batch_size
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(args.seed)
    model = SequenceClassifier(model_name, args.d_model, args.n_layers, n_classes=10, discretization=discretization)
    model = model.to(args.device)
    optimizer, schedule = training.make_optimizer(model, args.lr, total_steps, weight_decay=0.05)

    def loss(step: int) -> Tensor:
        batch = batch_indices(step, len(train_x), args.batch_size, args.seed)
        return F.cross_entropy(model(train_x[batch]), train_y[batch])

    options = ("epochs", "batch_size", "lr", "d_model", "n_layers", "seed")
    settings = {"model": model_name, "discretization": discretization}
    run = training.Run(
        name=(name := describe(model_name, discretization)),
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        total_steps=total_steps,
        test_every=steps_per_epoch,
        loss=loss,
        test=lambda: accuracy(model, test_x, test_y),
        settings=settings | {option: getattr(args, option) for option in options},
        length="epochs",
        label=label,
        loss_format="{:.3f}".format,
        test_format=lambda share: f"{100 * share:.1f} %",
    )
    try:
        history, seconds = training.train(run, args, History, session)
    except Diverged as reason:
        if not label:
            raise
        print(f"{name}: {reason}")
        return Result(None, 0.0)
    steps = len(history.losses)
    print(
        f"test accuracy: {100 * history.accuracies[-1][1]:.1f} % after {steps} steps ({steps / steps_per_epoch:.3g} epochs), "
        f"{training.duration(seconds, args.device)}, {name}"
    )
    return Result(history, seconds)


def comparison(results: dict[str, Result]) -> str:
    """A table of the runs' results."""
    rows = [("", "test accuracy", "training loss", "seconds")]
    for name, (history, seconds) in results.items():
        if history is None:
            rows.append((name, "diverges", "", ""))
        else:
            recent = history.losses[-50:]
            loss = sum(recent) / len(recent)
            rows.append((name, f"{100 * history.accuracies[-1][1]:.1f} %", f"{loss:.3f}", f"{seconds:.0f}"))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:<{width}}" + "".join(f"{value:>15}" for value in values) for name, *values in rows)


def main(argv: list[str] | None = None) -> None:
    with Session(__file__, argv) as session:
        args = parse_arguments(argv)
        torch.set_num_threads(args.threads)
        session.outputs = [args.plot, args.results]
        if args.checkpoint is not None and not args.resume:
            # With --overwrite. A resumed run would take the older checkpoints of its later models for its own.
            for label in labels_of(args):
                training.labelled(args.checkpoint, label).unlink(missing_ok=True)
        if args.task == "signals":
            sampling_rates.run(args, session)
            return
        runs, results = runs_of(args), {}
        for (model, rule), label in zip(runs, labels_of(args), strict=True):
            both = label if len(args.model) > 1 and len(args.discretization) > 1 else ""
            name = both or (model if len(args.discretization) == 1 else rule)
            results[name] = train(model, rule, label, args, session)
        if len(runs) > 1:
            print(comparison(results))
        histories = {name: result.history for name, result in results.items() if result.history is not None}
        if args.plot is not None and histories:
            rules = f" (discretization {args.discretization[0]})" if len(args.discretization) == 1 else ""
            names = [f"{model}{rules if model in RULED else ''}" for model in args.model]
            training.save_figure(args.plot, lambda: learning_curves(histories, f"digits pixel by pixel: {', '.join(names)}"))
            print(f"{'learning curve' if len(histories) == 1 else 'learning curves'}: {args.plot}")


if __name__ == "__main__":
    main()
