"""Trains a language model on the bytes of any text file: Mamba, Mamba-2, Mamba-3, a delta rule, mLSTM, minGRU or minLSTM.

Without ``--text`` it reads the reference pages that ship with Python (the text of ``help("for")``): nothing is downloaded. The
last tenth of the text is for testing. The loss is in bits per byte; an untrained model has 8.

    python examples/char_lm.py --plot curve.png
    python examples/char_lm.py --model mingru --text book.txt --steps 3000
    python examples/char_lm.py --discretization zoh_exact --prompt "def "

Ctrl-C saves the run and prints the command that resumes it. Batches, learning rate and tests depend only on the seed and the
number of steps, so the result equals a run that was never stopped. A larger ``--steps`` lengthens a run, also a finished one.
No file is replaced without ``--overwrite``.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    # Ctrl-C while the packages load ends the script without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.nn.functional as F
from torch import Tensor

import ssm_kernels
from ssm_kernels.choices import DiscretizationName, MixerName
from ssm_kernels.models import MambaConfig, MambaLM

try:
    import training
    from matplotlib.figure import Figure
    from training import Mistake, Session, describe, number
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install tqdm matplotlib")

MIXERS: dict[str, MixerName] = {
    "mamba": "Mamba",
    "mamba2": "Mamba2",
    "mamba3": "Mamba3",
    "gated_deltanet": "GatedDeltaNet",
    "mlstm": "MLSTM",
    "mingru": "MinGRU",
    "minlstm": "MinLSTM",
}


def make_model(name: str, d_model: int, n_layers: int, discretization: DiscretizationName) -> MambaLM:
    """A model whose tokens are bytes."""
    # The defaults of Mamba2 and Mamba3, 64 channels a head and 128 states, of GatedDeltaNet, six heads of 256, and of MLSTM,
    # eight heads, suit larger models.
    heads = math.gcd(d_model, 4)
    sizes = {
        "mamba2": {"headdim": math.gcd(2 * d_model, 32), "d_state": 32},
        "mamba3": {"headdim": math.gcd(2 * d_model, 32), "d_state": 32},
        "gated_deltanet": {"num_heads": heads, "head_dim": d_model // heads},
        "mlstm": {"num_heads": heads},
    }
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
    """Python's reference pages, some 450 kB of English, or the sources of its modules if the pages are not installed."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return b"\n\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def load_text(path: Path | None, seqlen: int) -> tuple[Tensor, Tensor]:
    """Returns the bytes for training and for testing, each at least one sequence long."""
    name = "Python's reference pages" if path is None else path
    data = default_text() if path is None else path.read_bytes()
    split = len(data) * 9 // 10
    if len(data) - split <= seqlen:
        raise Mistake(f"{name}: {len(data)} bytes are too few for --seqlen {seqlen}, which needs {10 * (seqlen + 1)}")
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return text[:split], text[split:]


def windows(text: Tensor, starts: Tensor, seqlen: int) -> Tensor:
    """Sequences of ``seqlen`` tokens and the next token, (batch, seqlen + 1)."""
    return text[starts[:, None] + torch.arange(seqlen + 1)].long()


def training_batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """The batch of a step, from random positions."""
    generator = torch.Generator().manual_seed(1_000_000 * args.seed + step)
    starts = torch.randint(len(text) - args.seqlen, (args.batch_size,), generator=generator)
    return windows(text, starts, args.seqlen).to(args.device)


def bits_per_byte(model: MambaLM, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / math.log(2)


@torch.no_grad()
def test_loss(model: MambaLM, text: Tensor, args: argparse.Namespace) -> float:
    """Mean loss of up to 32 sequences, evenly spread over the text."""
    count = min(32, len(text) // (args.seqlen + 1))
    starts = torch.linspace(0, len(text) - args.seqlen - 1, count, dtype=torch.float64).long()
    batches = windows(text, starts, args.seqlen).split(args.batch_size)
    return sum(bits_per_byte(model, batch.to(args.device)).item() * len(batch) for batch in batches) / count


def write(model: MambaLM, args: argparse.Namespace) -> bytes:
    """Returns the prompt and the bytes that the model samples after it."""
    prompt = torch.tensor([[*args.prompt.encode(errors="surrogateescape")]], device=args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    tokens = model.generate(
        prompt, max_new_tokens=args.sample, temperature=args.temperature, top_p=args.top_p, generator=generator
    )
    return bytes(tokens[0].tolist())


def printable(text: bytes) -> str:
    """The text for a terminal: a model of bytes also samples control characters, which are escaped."""
    return "".join(
        character if character in "\n\t" or character.isprintable() else character.encode("unicode_escape").decode()
        for character in text.decode(errors="replace")
    )


class History(NamedTuple):
    """The losses of a run, in bits per byte.

    Attributes:
        losses: training loss of every step.
        tests: (steps done, test loss), at equal distances and at the end.
    """

    losses: list[float]
    tests: list[tuple[int, float]]


def learning_curve(history: History, title: str) -> Figure:
    """Draws training loss (every step and running mean) and test loss."""
    losses, tests = history
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    window = max(1, len(losses) // 50)
    label = f"training, mean of {window} steps (light: of each)" if window > 1 else "training"
    training.plot_losses(axes, losses, window, "C0", 0.3, label)
    steps, values = zip(*tests, strict=True)
    axes.plot(steps, values, color="C1", marker=".", label=f"test: {values[-1]:.2f}")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_title(title, loc="left")
    # The legend is below the panel, so that it covers no data.
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = training.Parser(__file__, __doc__)
    parser.add_argument("--model", default="mamba", choices=MIXERS, help="default: mamba")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text file to learn; default: Python's reference pages")
    parser.add_argument("--steps", type=number(int, 1, 10**9), default=1000, help="default: 1000")
    parser.add_argument("--batch-size", type=number(int, 1, 10_000), default=8, help="sequences of a step; default: 8")
    parser.add_argument("--seqlen", type=number(int, 1, 10**6), default=256, help="bytes of a sequence; default: 256")
    training.add_options(parser, ssm_kernels.discretizations, lr=6e-3, d_model=128, checkpoint="eight times")
    parser.add_argument("--prompt", help="beginning of the sample; default: 'The '")
    parser.add_argument("--sample", type=number(int, 0, 10**6), default=400, help="bytes to write at the end; default: 400")
    parser.add_argument(
        "--sample-file", type=Path, metavar="FILE", help="write the sample's bytes there; the terminal escapes some"
    )
    parser.add_argument("--temperature", type=number(float, 0, 100), help="of the sample; default: 0.8")
    parser.add_argument("--top-p", type=number(float, 0, 1), help="of the sample; default: 0.95")
    args = parser.parse_args(argv)

    training.check_rule(parser, args, [args.model])
    args.discretization = args.discretization or "zoh"
    of_the_sample = ("prompt", "sample_file", "temperature", "top_p")
    training.check_effect(parser, args, of_the_sample if args.sample == 0 else (), "--sample 0")
    training.check_effect(parser, args, ("top_p",) if args.temperature == 0 else (), "--temperature 0")
    args.prompt = "The " if args.prompt is None else args.prompt
    args.temperature = 0.8 if args.temperature is None else args.temperature
    args.top_p = 0.95 if args.top_p is None else args.top_p
    training.check_paths(parser, args, sample_file=args.sample_file)
    if args.text is not None and not (args.text.is_file() and os.access(args.text, os.R_OK)):
        parser.error(f"argument --text: cannot read {args.text}")
    if not args.prompt:
        parser.error("argument --prompt: expected at least one character")

    def attempt(device: torch.device) -> None:
        model = make_model(args.model, 16, 1, args.discretization).to(device)
        model(torch.zeros(1, 2, dtype=torch.int64, device=device)).logits.sum().item()

    training.check_device(parser, args, attempt)
    return args


def train(args: argparse.Namespace, session: Session) -> tuple[MambaLM, History]:
    """Trains a model from scratch or from a checkpoint, and prints its result."""
    train_text, test_text = load_text(args.text, args.seqlen)
    torch.manual_seed(args.seed)
    model = make_model(args.model, args.d_model, args.n_layers, args.discretization).to(args.device)
    optimizer, schedule = training.make_optimizer(model, args.lr, args.steps, weight_decay=0.1, betas=(0.9, 0.95), last_lr=0.1)
    options = ("model", "discretization", "steps", "batch_size", "seqlen", "lr", "d_model", "n_layers", "seed")
    settings = {name: getattr(args, name) for name in options}
    settings["text"] = hashlib.sha256(train_text.numpy().tobytes()).hexdigest()[:8]
    run = training.Run(
        name=(name := describe(args.model, args.discretization)),
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        total_steps=args.steps,
        test_every=max(1, args.steps // 8),
        loss=lambda step: bits_per_byte(model, training_batch(train_text, step, args)),
        test=lambda: test_loss(model, test_text, args),
        settings=settings,
        length="steps",
        label="",
        loss_format="{:.2f}".format,
        test_format="{:.2f}".format,
    )
    history, seconds = training.train(run, args, History, session)
    duration = training.duration(seconds, args.device)
    print(f"test loss: {history.tests[-1][1]:.2f} bits per byte after {len(history.losses)} steps, {duration}, {name}")
    return model, history


def main(argv: list[str] | None = None) -> None:
    with Session(__file__, argv) as session:
        args = parse_arguments(argv)
        session.outputs = [args.plot, args.sample_file]
        torch.set_num_threads(args.threads)
        model, history = train(args, session)
        if args.plot is not None:
            source = "Python's reference pages" if args.text is None else args.text.name
            title = f"{describe(args.model, args.discretization)} on {source}"
            training.save_figure(args.plot, lambda: learning_curve(history, title))
            print(f"learning curve: {args.plot}")
        if args.sample:
            sample = write(model, args)
            training.say(f"sample:\n{printable(sample)}")
            if args.sample_file is not None:
                args.sample_file.write_bytes(sample)
                print(f"the sample's bytes: {args.sample_file}")


if __name__ == "__main__":
    main()
