"""Trains a language model on the bytes of any text file, and lets it write: Mamba, Mamba-2, minGRU or minLSTM by one word.

Without ``--text`` it reads the reference pages that ship with Python (what ``help("for")`` shows): nothing is downloaded. The
last tenth of the text is kept for testing; the loss is in bits per byte, of which an untrained model has 8.

    python examples/char_lm.py --plot curve.png
    python examples/char_lm.py --model mingru --text book.txt --steps 3000
    python examples/char_lm.py --discretization foh --prompt "def "

Stop and continue with ``--checkpoint run.pt`` and ``--checkpoint run.pt --resume``: batches, learning rate and tests depend on
the seed and the number of steps done alone, so the result is that of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import ssm_kernels
from ssm_kernels.models import MambaConfig, MambaLM

try:
    import matplotlib.style
    from matplotlib.figure import Figure
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install tqdm matplotlib")

# As the figures of the benchmarks; a copy of this script elsewhere draws in matplotlib's style.
STYLE = Path(__file__).resolve().parents[1] / "benchmarks" / "style.mplstyle"

MIXERS = {"mamba": "Mamba", "mamba2": "Mamba2", "mingru": "MinGRU", "minlstm": "MinLSTM"}


def make_model(name: str, d_model: int, n_layers: int, discretization: str) -> MambaLM:
    """A model whose tokens are bytes."""
    # Mamba2's defaults, 64 channels a head and 128 states, suit larger models.
    sizes = {"mamba2": {"headdim": math.gcd(2 * d_model, 32), "d_state": 32}}
    if name in ("mingru", "minlstm"):
        discretization = "zoh"  # these recurrences have none
    return MambaLM(
        MambaConfig(
            d_model=d_model,
            n_layer=n_layers,
            vocab_size=256,
            mixer=MIXERS[name],
            ssm_cfg=sizes.get(name, {}),
            discretization=discretization,
        )
    )


def default_text() -> bytes:
    """Python's reference pages, some 450 kB of English; the sources of its modules where they are not installed."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return b"\n\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def load_text(path: Path | None, seqlen: int) -> tuple[Tensor, Tensor]:
    """The bytes for training and those for testing, each at least a sequence long."""
    name = "Python's reference pages" if path is None else path
    data = default_text() if path is None else path.read_bytes()
    split = len(data) * 9 // 10
    if len(data) - split <= seqlen:
        fail(f"{name}: {len(data)} bytes are too few for --seqlen {seqlen}, which needs {10 * (seqlen + 1)}")
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return text[:split], text[split:]


def windows(text: Tensor, starts: Tensor, seqlen: int) -> Tensor:
    """Sequences of ``seqlen`` tokens and the one after each, (batch, seqlen + 1)."""
    return text[starts[:, None] + torch.arange(seqlen + 1)].long()


def training_batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """The batch of a step, from random places."""
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + step)
    starts = torch.randint(len(text) - args.seqlen, (args.batch_size,), generator=generator)
    return windows(text, starts, args.seqlen).to(args.device)


def bits_per_byte(model: MambaLM, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / math.log(2)


@torch.no_grad()
def test_loss(model: MambaLM, text: Tensor, args: argparse.Namespace) -> float:
    """The loss of 32 sequences that are evenly spread over the text, or of as many as it has."""
    count = min(32, len(text) // (args.seqlen + 1))
    starts = torch.linspace(0, len(text) - args.seqlen - 1, count, dtype=torch.float64).long()
    batches = windows(text, starts, args.seqlen).split(args.batch_size)
    return sum(bits_per_byte(model, batch.to(args.device)).item() * len(batch) for batch in batches) / count


def make_optimizer(model: nn.Module, lr: float, total_steps: int) -> tuple[Optimizer, LRScheduler]:
    """AdamW without weight decay on vectors and on the SSM's own parameters; warm-up, then a cosine down to a tenth."""
    decay, no_decay = [], []
    for parameter in model.parameters():
        exempt = parameter.dim() < 2 or getattr(parameter, "_no_weight_decay", False)
        (no_decay if exempt else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=lr, betas=(0.9, 0.95))
    warmup = min(50, max(1, total_steps // 10))
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / total_steps)))
    return optimizer, schedule


def write(model: MambaLM, args: argparse.Namespace) -> str:
    """The prompt and the bytes that the model draws after it."""
    prompt = torch.tensor([[*args.prompt.encode()]], device=args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    tokens = model.generate(
        prompt, max_new_tokens=args.sample, temperature=args.temperature, top_p=args.top_p, generator=generator
    )
    return bytes(tokens[0].tolist()).decode(errors="replace")


def fail(message: str) -> NoReturn:
    sys.exit(f"{Path(__file__).name}: error: {message}")


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes beside the old checkpoint, then replaces it, so that a run killed here loses nothing."""
    partial = path.with_name(path.name + ".partial")
    torch.save(checkpoint, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint, if it is one of this run."""
    try:
        # On the CPU, where the optimizer keeps its step counts; what belongs on another device is copied there.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not {"run", "model", "optimizer", "schedule", "losses", "tests"} <= checkpoint.keys():
            raise KeyError
        other = {name: (checkpoint["run"][name], value) for name, value in run.items() if checkpoint["run"][name] != value}
    except (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
        fail(f"{path} is not a checkpoint of this script")
    if other:
        fail(f"{path} is of another run: " + ", ".join(f"{name} {was}, not {now}" for name, (was, now) in other.items()))
    return checkpoint


class History(NamedTuple):
    """The losses of a run, in bits per byte.

    Attributes:
        losses: training loss of every step.
        tests: (steps done, test loss), at equal distances and at the end.
    """

    losses: list[float]
    tests: list[tuple[int, float]]


def learning_curve(history: History, title: str) -> Figure:
    """Training loss, of every step and its running mean, and test loss."""
    losses, tests = history
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    window = max(1, len(losses) // 50)
    smooth = torch.tensor(losses).unfold(0, window, 1).mean(dim=-1).tolist()
    axes.plot(range(1, len(losses) + 1), losses, color="C0", alpha=0.3, linewidth=0.8)
    label = f"training, mean of {window} steps (light: of each)" if window > 1 else "training"
    axes.plot(range(window, len(losses) + 1), smooth, color="C0", label=label)
    steps, values = zip(*tests, strict=True)
    axes.plot(steps, values, color="C1", marker=".", label=f"test: {values[-1]:.2f}")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_title(title, loc="left")
    # The legend goes below the panel, so that it covers no data.
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def plot_learning_curve(path: Path, history: History, title: str) -> None:
    with matplotlib.style.context([STYLE] if STYLE.is_file() else []):
        learning_curve(history, title).savefig(path, dpi=200)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line."""

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


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=Path(__file__).name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mamba", choices=MIXERS, help="default: mamba")
    parser.add_argument(
        "--discretization",
        default="zoh",
        choices=ssm_kernels.discretizations,
        help="of mamba and, those of the exponential family, mamba2; default: zoh",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="what to learn; default: Python's reference pages")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--steps", type=number(int, 1, 10**9), default=1000, help="default: 1000")
    parser.add_argument("--batch-size", type=number(int, 1, 10_000), default=8, help="sequences of a step; default: 8")
    parser.add_argument("--seqlen", type=number(int, 1, 10**6), default=256, help="bytes of a sequence; default: 256")
    parser.add_argument("--lr", type=number(float, 1e-9, 10), default=6e-3, help="peak learning rate; default: 0.006")
    parser.add_argument("--d-model", type=number(int, 1, 4096), default=128, help="channels; default: 128")
    parser.add_argument("--n-layers", type=number(int, 1, 100), default=2, help="blocks; default: 2")
    parser.add_argument("--seed", type=number(int, 0, 2**32 - 1), default=0, help="default: 0")
    parser.add_argument("--threads", type=number(int, 1, 1024), default=1, help="CPU threads, default: 1 (the model is small)")
    parser.add_argument("--max-steps", type=number(int, 1, 10**9), help="stop early, to be resumed")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="written eight times and at the end")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write the learning curve there")
    parser.add_argument("--prompt", default="The ", help="what the sample begins with; default: 'The '")
    parser.add_argument("--sample", type=number(int, 0, 10**6), default=400, help="bytes to write at the end; default: 400")
    parser.add_argument("--temperature", type=number(float, 0, 100), default=0.8, help="of the sample; default: 0.8")
    parser.add_argument("--top-p", type=number(float, 0, 1), default=0.95, help="of the sample; default: 0.95")
    args = parser.parse_args(argv)

    for option, path in (("--checkpoint", args.checkpoint), ("--plot", args.plot)):
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
            parser.error(f"argument {option}: cannot write {path}")
    if args.plot is not None and args.plot.suffix != ".png":
        parser.error(f"argument --plot: expected a name that ends in .png, got {args.plot}")
    if args.text is not None and not (args.text.is_file() and os.access(args.text, os.R_OK)):
        parser.error(f"argument --text: cannot read {args.text}")
    if args.resume and (args.checkpoint is None or not args.checkpoint.is_file()):
        parser.error(f"argument --resume: no checkpoint to continue from: {args.checkpoint or 'give --checkpoint FILE'}")
    if not args.prompt:
        parser.error("argument --prompt: expected at least one character")
    try:
        args.device = torch.device(args.device)
        model = make_model(args.model, 16, 1, args.discretization).to(args.device)
        model(torch.zeros(1, 2, dtype=torch.int64, device=args.device)).logits.sum().item()
    except ValueError as error:  # of the rules of mamba, mamba2 has some
        reason, *_ = str(error).splitlines()
        parser.error(f"argument --discretization: {reason}")
    except (AssertionError, RuntimeError) as error:  # no such device, or no kernels for it
        reason, *_ = str(error).splitlines()
        parser.error(f"argument --device {args.device}: {reason}")
    return args


def train(args: argparse.Namespace) -> tuple[MambaLM, History]:
    """Trains a model, or goes on with it, and says how it did."""
    train_text, test_text = load_text(args.text, args.seqlen)
    last_step = min(args.max_steps or args.steps, args.steps)
    interval = max(1, args.steps // 8)

    torch.manual_seed(args.seed)
    model = make_model(args.model, args.d_model, args.n_layers, args.discretization).to(args.device)
    optimizer, schedule = make_optimizer(model, args.lr, args.steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    losses: list[float] = []
    tests: list[tuple[int, float]] = []

    # All parts of an interrupted run must agree on these.
    options = ("model", "discretization", "steps", "batch_size", "seqlen", "lr", "d_model", "n_layers", "seed")
    run = {name: getattr(args, name) for name in options}
    run["text"] = hashlib.sha256(train_text.numpy().tobytes()).hexdigest()[:8]
    if args.resume:
        checkpoint = load_checkpoint(args.checkpoint, run)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        losses, tests = checkpoint["losses"], checkpoint["tests"]
        if len(losses) >= last_step:
            fail(f"{args.checkpoint} has done {len(losses)} steps already, and this run ends after {last_step}")

    start = time.perf_counter()
    with tqdm(total=last_step, initial=len(losses), unit="step", desc=describe(args), mininterval=0.5) as progress:
        for step in range(len(losses), last_step):
            loss = bits_per_byte(model, training_batch(train_text, step, args))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()

            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                fail(f"the loss is {losses[-1]} in step {step + 1}: try a lower --lr or, of a mamba, another discretization")
            if (step + 1) % interval == 0 or step + 1 == last_step:
                tests.append((step + 1, test_loss(model, test_text, args)))
                if args.checkpoint is not None:
                    states = {name: part.state_dict() for name, part in parts.items()}
                    save_checkpoint(args.checkpoint, states | {"run": run, "losses": losses, "tests": tests})
            test = f"{tests[-1][1]:.2f}" if tests else "-"
            progress.set_postfix(loss=f"{losses[-1]:.2f}", test=test, refresh=False)
            progress.update()

    place = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else str(args.device)
    seconds = time.perf_counter() - start
    print(f"test loss: {tests[-1][1]:.2f} bits per byte after {last_step} steps, {seconds:.0f} s on {place}, {describe(args)}")
    return model, History(losses, tests)


def describe(args: argparse.Namespace) -> str:
    return f"{args.model} (discretization {args.discretization})" if args.model in ("mamba", "mamba2") else args.model


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    model, history = train(args)
    if args.plot is not None:
        source = "Python's reference pages" if args.text is None else args.text.name
        plot_learning_curve(args.plot, history, f"{describe(args)} on {source}")
        print(f"learning curve: {args.plot}")
    if args.sample:
        print(f"sample:\n{write(model, args)}")


if __name__ == "__main__":
    main()
