"""Compares how many pairs of a key and a value models can recall: Mamba-2, DeltaNet, Gated DeltaNet and mLSTM.

The task is multi-query associative recall (Arora et al., Zoology, arXiv 2312.04927). A sequence has pairs of a key and a value,
and then every key again in another order; the model has to name its value. In every other sequence, half of the keys come with
a second value before that, and the last value counts. All models have two blocks, and layers with as many numbers of state.
Each is trained on sequences of 4, 8, 16, ... keys and tested on each number. Nothing is downloaded.

    python examples/recall.py --plot recall.png
    python examples/recall.py --model mamba2 gated_deltanet --pairs 32 --steps 500

Ctrl-C saves the run and prints the command that resumes it. Batches, learning rate and tests depend only on the seed and the
number of steps, so the result equals a run that was never stopped. No file is replaced without ``--overwrite``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    # Ctrl-C while the packages load ends the script without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels import causal_conv1d
from ssm_kernels.nn import MLSTM, DeltaNet, GatedDeltaNet, Mamba2

try:
    import training
    from matplotlib.figure import Figure
    from training import Diverged, Session, number
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install tqdm matplotlib")

# Tokens are keys, then values.
KEYS, VALUES = 64, 32
FEWEST_PAIRS, MOST_PAIRS = 4, KEYS
TEST_SEQUENCES, TEST_SEED = 64, 2**32
# The share of the keys that come with a second value, by the title of its panel.
TASKS = {"every key has one value": 0.0, "half of the keys get a second value": 0.5}
# Heads of every layer, with a state of d_model / 4 columns of keys and d_model / 2 of values; mLSTM has a normalizer beside it.
HEADS = 4


class ShortConvolution(nn.Module):
    """Four steps of each channel and SiLU, (batch, seqlen, d_model), which the other layers have inside."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model, 4).uniform_(-0.5, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return causal_conv1d(x, self.weight, activation="silu")


MIXERS: dict[str, Callable[[int], nn.Module]] = {
    "mamba2": lambda d_model: Mamba2(d_model, d_state=d_model // HEADS, headdim=2 * d_model // HEADS),
    "deltanet": lambda d_model: DeltaNet(hidden_size=d_model, num_heads=HEADS, expand_v=2, use_gate=True),
    "gated_deltanet": lambda d_model: GatedDeltaNet(d_model, num_heads=HEADS, head_dim=d_model // HEADS, expand_v=2),
    "mlstm": lambda d_model: nn.Sequential(
        ShortConvolution(d_model), MLSTM(d_model, num_heads=HEADS, qk_dim_factor=1, v_dim_factor=2)
    ),
}


class Block(nn.Module):
    """A mixer with a norm before it and a residual connection around it; (batch, seqlen, d_model)."""

    def __init__(self, d_model: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class RecallModel(nn.Module):
    """Names a value at every step: (batch, seqlen) -> logits (batch, seqlen, values)."""

    def __init__(self, model: str, d_model: int, n_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(d_model, MIXERS[model](d_model)) for _ in range(n_layers)))
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, VALUES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return logits


def sequences(pairs: int, rewritten: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys with values, ``rewritten`` of them again, and queries, (batch, seqlen); the value of each query, (batch, pairs)."""
    keys = torch.rand(batch, KEYS, generator=generator).argsort(dim=1)[:, :pairs]
    first, second = torch.randint(VALUES, (2, batch, pairs), generator=generator)
    last = torch.where(torch.arange(pairs) < rewritten, second, first)
    stored = torch.stack(
        [torch.cat([keys, keys[:, :rewritten]], 1), KEYS + torch.cat([first, second[:, :rewritten]], 1)], dim=2
    )
    order = torch.rand(batch, pairs, generator=generator).argsort(dim=1)
    return torch.cat([stored.flatten(1), keys.gather(1, order)], dim=1), last.gather(1, order)


def training_batch(step: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The batch of a step: sequences of one number of keys and of one task, about ``--tokens`` in all."""
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + step)
    pairs: int = args.pairs[int(torch.randint(len(args.pairs), (), generator=generator))]
    share = [*TASKS.values()][int(torch.randint(len(TASKS), (), generator=generator))]
    rewritten = int(share * pairs)
    tokens, values = sequences(pairs, rewritten, max(1, args.tokens // (3 * pairs + 2 * rewritten)), generator)
    return tokens.to(args.device), values.to(args.device)


def recall_loss(model: nn.Module, tokens: Tensor, values: Tensor) -> Tensor:
    logits = model(tokens)[:, -values.shape[1] :]
    return F.cross_entropy(logits.flatten(0, 1), values.flatten())


@torch.no_grad()
def accuracies(model: nn.Module, args: argparse.Namespace) -> list[list[float]]:
    """The share of queries that the model answers correctly, for each task and number of keys."""
    generator = torch.Generator().manual_seed(TEST_SEED)

    def accuracy(pairs: int, share: float) -> float:
        tokens, values = sequences(pairs, int(share * pairs), TEST_SEQUENCES, generator)
        found = model(tokens.to(args.device))[:, -pairs:].argmax(dim=2).cpu()
        return (found == values).float().mean().item()

    return [[accuracy(pairs, share) for pairs in args.pairs] for share in TASKS.values()]


class History(NamedTuple):
    """The measurements of a run.

    Attributes:
        losses: training loss of every step.
        tests: (steps done, accuracy for each task and number of keys), at equal distances and at the end.
    """

    losses: list[float]
    tests: list[tuple[int, list[list[float]]]]


def recall_curves(pairs: list[int], histories: dict[str, History], d_model: int) -> Figure:
    """Draws the last accuracies of each model over the number of keys, a panel for each task."""
    figure = Figure(figsize=(6.6, 3.1), layout="constrained")
    for task, (axes, title) in enumerate(zip(figure.subplots(1, 2, sharey=True), TASKS, strict=True)):
        for index, (name, history) in enumerate(histories.items()):
            shares = [100 * share for share in history.tests[-1][1][task]]
            axes.plot(pairs, shares, color=f"C{index + 1}", marker=".", label=name if task == 0 else None)
        axes.axhline(100 / VALUES, color="C7", linewidth=0.8, linestyle=":", label="chance" if task == 0 else None)
        axes.set_xscale("log", base=2)
        axes.set_xticks(pairs, [str(each) for each in pairs])
        axes.minorticks_off()
        axes.set(xlabel="keys in a sequence", ylim=(0, 102))
        axes.set_title(title[0].upper() + title[1:], loc="left")
        if task == 0:
            axes.set_ylabel("values recalled (%)")
    figure.suptitle(f"Recall with a state of {d_model * d_model // 2} numbers a layer")
    # The legend is below the panels, so that it covers no data.
    figure.legend(loc="outside lower center", ncols=len(histories) + 1)
    return figure


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = training.Parser(__file__, __doc__)
    parser.add_argument(
        "--model", nargs="+", default=[*MIXERS], choices=MIXERS, metavar="NAME", help=f"{', '.join(MIXERS)}; default: all"
    )
    parser.add_argument(
        "--pairs",
        type=number(int, FEWEST_PAIRS, MOST_PAIRS),
        default=MOST_PAIRS,
        help=f"most keys in a sequence, {FEWEST_PAIRS} to {MOST_PAIRS}; default: {MOST_PAIRS}",
    )
    parser.add_argument("--steps", type=number(int, 1, 10**9), default=1000, help="default: 1000")
    parser.add_argument("--tokens", type=number(int, 1, 10**6), default=1536, help="tokens of a step; default: 1536")
    training.add_options(parser, (), lr=5e-3, d_model=64, checkpoint="eight times")
    args = parser.parse_args(argv)

    args.model = list(dict.fromkeys(args.model))
    args.pairs = [FEWEST_PAIRS << doubled for doubled in range(8) if FEWEST_PAIRS << doubled <= args.pairs]
    if args.d_model % HEADS:
        parser.error(f"argument --d-model: expected a multiple of {HEADS}, got {args.d_model}")
    training.check_paths(parser, args, labels_of(args.model))

    def attempt(device: torch.device) -> None:
        for model in args.model:
            RecallModel(model, 16, 1).to(device)(torch.zeros(1, 2, dtype=torch.int64, device=device)).sum().item()

    training.check_device(parser, args, attempt)
    return args


def labels_of(models: list[str]) -> list[str]:
    """Parts of the names of the runs' checkpoints."""
    return models if len(models) > 1 else [""]


def train(model_name: str, label: str, args: argparse.Namespace, session: Session) -> History | None:
    """Trains a model from scratch or from a checkpoint, and prints its result; None if its loss was not finite."""
    torch.manual_seed(args.seed)
    model = RecallModel(model_name, args.d_model, args.n_layers).to(args.device)
    optimizer, schedule = training.make_optimizer(model, args.lr, args.steps, weight_decay=0.1, betas=(0.9, 0.95))
    options = ("pairs", "steps", "tokens", "lr", "d_model", "n_layers", "seed")
    run = training.Run(
        name=model_name,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        total_steps=args.steps,
        test_every=max(1, args.steps // 8),
        loss=lambda step: recall_loss(model, *training_batch(step, args)),
        test=lambda: accuracies(model, args),
        settings={"model": model_name} | {name: getattr(args, name) for name in options},
        length="steps",
        label=label,
        loss_format="{:.3f}".format,
        test_format=lambda tasks: f"{100 * sum(map(sum, tasks)) / sum(map(len, tasks)):.1f} %",
    )
    try:
        history, seconds = training.train(run, args, History, session)
    except Diverged as reason:
        if not label:
            raise
        print(f"{model_name}: {reason}")
        return None
    print(f"after {len(history.losses)} steps, {training.duration(seconds, args.device)}, {model_name} recalls")
    for task, shares in zip(TASKS, history.tests[-1][1], strict=True):
        recalled = ", ".join(f"{pairs}: {100 * share:.0f} %" for pairs, share in zip(args.pairs, shares, strict=True))
        print(f"  {task}: of {recalled}")
    return history


def main(argv: list[str] | None = None) -> None:
    with Session(__file__, argv) as session:
        args = parse_arguments(argv)
        torch.set_num_threads(args.threads)
        session.outputs = [args.plot]
        labels = labels_of(args.model)
        if args.checkpoint is not None and not args.resume:
            # With --overwrite. A resumed run would take the older checkpoints of its later models for its own.
            for label in labels:
                training.labelled(args.checkpoint, label).unlink(missing_ok=True)
        found = {name: train(name, label, args, session) for name, label in zip(args.model, labels, strict=True)}
        histories = {name: history for name, history in found.items() if history is not None}
        if args.plot is not None and histories:
            training.save_figure(args.plot, lambda: recall_curves(args.pairs, histories, args.d_model))
            print(f"recall: {args.plot}")


if __name__ == "__main__":
    main()
