"""Trains language models of ``char_lm.py`` side by side: equal sizes, the same batches, several learning rates and seeds.

    python examples/compare_models.py --results losses.json --plot losses.png
    python examples/compare_models.py --model mamba2 mamba3 mingru --seeds 5 --steps 1000 --lr 6e-3 --results losses.json

It prints the test losses in bits per byte, mean and standard deviation over seeds, for each model and learning rate. It writes
the results after each run, and does not train runs again that are in the file. It runs on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from ssm_kernels.models import MambaLM

try:
    import char_lm
    import training
    from matplotlib.figure import Figure
    from training import Mistake, Parser, number
except ImportError as error:
    sys.exit(f"{Path(__file__).name}: error: {error}: pip install tqdm matplotlib")

# Mamba3 has no convolution. The last model shows what Mamba2 loses without it: its convolution has a width of 1.
WITHOUT_CONVOLUTION = "mamba2_without_convolution"
MODELS = (*char_lm.MIXERS, WITHOUT_CONVOLUTION)
SETTINGS = ("steps", "batch_size", "seqlen", "d_model", "n_layers")
TESTS = 16
Run = dict[str, Any]


def make_model(name: str, args: argparse.Namespace) -> MambaLM:
    if name != WITHOUT_CONVOLUTION:
        return char_lm.make_model(name, args.d_model, args.n_layers, "zoh")
    config = char_lm.make_model("mamba2", args.d_model, args.n_layers, "zoh").config
    return MambaLM(dataclasses.replace(config, ssm_cfg=config.ssm_cfg | {"d_conv": 1}))


def train(name: str, lr: float, seed: int, args: argparse.Namespace) -> Run:
    """Trains a model from scratch. Batches depend on the seed and the step alone."""
    args.seed = seed
    train_text, test_text = char_lm.load_text(None, args.seqlen)
    torch.manual_seed(seed)
    model = make_model(name, args)
    optimizer, schedule = training.make_optimizer(model, lr, args.steps, weight_decay=0.1, betas=(0.9, 0.95), last_lr=0.1)
    tests = []
    for step in range(args.steps):
        loss = char_lm.bits_per_byte(model, char_lm.training_batch(train_text, step, args))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, args.steps // TESTS) == 0 or step + 1 == args.steps:
            tests.append([step + 1, round(char_lm.test_loss(model, test_text, args), 4)])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"model": name, "lr": lr, "seed": seed, "parameters": parameters, "tests": tests}


def of_setting(runs: list[Run], model: str, lr: float) -> list[Run]:
    return [run for run in runs if (run["model"], run["lr"]) == (model, lr)]


def mean_and_deviation(runs: list[Run]) -> tuple[float, float]:
    """Returns the mean and the standard deviation of the last test losses."""
    losses = [run["tests"][-1][1] for run in runs]
    return statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0


def table(runs: list[Run], models: list[str], rates: list[float]) -> str:
    """A line for each model, a column for each learning rate."""
    lines = ["| model | parameters | " + " | ".join(f"learning rate {lr:g}" for lr in rates) + " |"]
    lines.append("|---" * (2 + len(rates)) + "|")
    for model in models:
        cells = ["{:.3f} ± {:.3f}".format(*mean_and_deviation(of_setting(runs, model, lr))) for lr in rates]
        parameters = of_setting(runs, model, rates[0])[0]["parameters"]
        lines.append(f"| {model} | {parameters:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(runs: list[Run], models: list[str], rates: list[float], title: str) -> Figure:
    """Draws the test loss over steps at each model's best learning rate: the mean of the seeds, and a line for each."""
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    for index, model in enumerate(models):
        best = min(rates, key=lambda lr, model=model: mean_and_deviation(of_setting(runs, model, lr))[0])
        found = [run["tests"] for run in of_setting(runs, model, best)]
        steps = [step for step, _ in found[0]]
        for tests in found:
            axes.plot(steps, [loss for _, loss in tests], color=f"C{index}", linewidth=0.8, alpha=0.35)
        means = [statistics.mean(losses) for losses in zip(*([loss for _, loss in tests] for tests in found), strict=True)]
        label = f"{model.replace('_', ' ')}, learning rate {best:g}: {means[-1]:.3f}"
        axes.plot(steps, means, color=f"C{index}", marker=".", label=label)
    axes.set(xlabel="step", ylabel="test loss (bits per byte)")
    axes.set_title(title, loc="left", fontsize="medium")
    # The legend is below the panel, so that it covers no data.
    figure.legend(loc="outside lower center", title=f"mean of {len(found)} seeds (light: each)", fontsize="small")
    return figure


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__file__, __doc__)
    models = ["mamba2", "mamba3", WITHOUT_CONVOLUTION]
    parser.add_argument("--model", nargs="+", default=models, choices=MODELS, metavar="NAME", help=f"{', '.join(MODELS)}")
    parser.add_argument("--seeds", type=number(int, 1, 1000), default=3, help="default: 3")
    parser.add_argument("--steps", type=number(int, 1, 10**9), default=500, help="default: 500")
    parser.add_argument("--lr", nargs="+", type=number(float, 0, 1), default=[3e-3, 6e-3, 12e-3], help="default: 3, 6, 12 e-3")
    parser.add_argument("--batch-size", type=number(int, 1, 10_000), default=8, help="sequences of a step; default: 8")
    parser.add_argument("--seqlen", type=number(int, 1, 10**6), default=256, help="bytes of a sequence; default: 256")
    parser.add_argument("--d-model", type=number(int, 8, 10**4), default=64, help="default: 64")
    parser.add_argument("--n-layers", type=number(int, 1, 100), default=2, help="default: 2")
    parser.add_argument("--threads", type=number(int, 1, 1024), default=1, help="default: 1")
    parser.add_argument("--results", type=Path, metavar="FILE", help="read and write settings and losses there, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the test losses there")
    args = parser.parse_args(argv)
    args.model, args.lr, args.device = list(dict.fromkeys(args.model)), sorted(set(args.lr)), torch.device("cpu")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    settings = {name: getattr(args, name) for name in SETTINGS}
    runs: list[Run] = []
    if args.results is not None and args.results.exists():
        found = json.loads(args.results.read_text())
        if found["settings"] != settings:
            raise Mistake(f"{args.results}: expected results of {settings}, got those of {found['settings']}")
        runs = found["runs"]
    done = {(run["model"], run["lr"], run["seed"]) for run in runs}
    for seed, lr, model in ((seed, lr, model) for seed in range(args.seeds) for lr in args.lr for model in args.model):
        if (model, lr, seed) in done:
            continue
        runs.append(train(model, lr, seed, args))
        print(f"{model}, learning rate {lr:g}, seed {seed}: {runs[-1]['tests'][-1][1]:.3f} bits per byte", flush=True)
        if args.results is not None:
            lines = ",\n  ".join(map(json.dumps, runs))
            args.results.write_text(f'{{\n "settings": {json.dumps(settings)},\n "runs": [\n  {lines}\n ]\n}}\n')
    print(table(runs, args.model, args.lr))
    if args.plot is not None:
        title = f"Python's reference pages, d_model {args.d_model}, {args.n_layers} layers"
        training.save_figure(args.plot, lambda: curves(runs, args.model, args.lr, title))


if __name__ == "__main__":
    main()
