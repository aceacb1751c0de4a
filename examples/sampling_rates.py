"""Trains one classifier per discretization on sampled signals and tests it at other sampling rates; see train_sequence.py.

A signal is the position of an oscillator that white noise drives, a continuous-time process. Its frequency and damping are the
class. :func:`sample_paths` draws samples with the exact transition of the stochastic differential equation: a slower rate
is every second sample of the same path, without interpolation. The blocks have no convolution, so that time enters a model
through the step sizes of its scans alone.

The models of all seeds train at once: every parameter has a first axis over models, and one scan has the channels of all of
them, with a group of B and C for each. Each model has its own weights, signals, loss and gradient norm.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import training
from matplotlib.figure import Figure
from torch import Tensor
from training import Mistake, Session

import ssm_kernels
from ssm_kernels import selective_scan

ALPHA = 0.7
"""The number of the generalized bilinear rules."""

RULES: tuple[str, ...] = (
    *ssm_kernels.discretizations,
    f"gbt({ALPHA})",
    "dirac",
    *(f"{name}({ALPHA})" if name.startswith("gbt") else name for name in ssm_kernels.two_sample_discretizations),
)

SAMPLES_PER_SECOND = 100
SAMPLES = 128
"""The samples of a signal, at the rate of the training."""

FREQUENCIES = tuple(3.0 * 4 ** (place / 7) for place in range(8))
DAMPINGS = (0.05, 0.3)
CLASSES = [(frequency, damping) for frequency in FREQUENCIES for damping in DAMPINGS]
"""Frequency of the undamped oscillator in hertz, 3 to 12, and damping ratio."""

TEST_SIGNALS = 2048
STEPS_OF_A_BLOCK = 64
"""Training steps whose signals are drawn together."""


class Condition(NamedTuple):
    """A test.

    Attributes:
        rate: samples of the test signals for one sample in training.
        scaled: the step sizes are divided by ``rate``.
    """

    rate: float
    scaled: bool


CONDITIONS = {
    "half": Condition(0.5, True),
    "equal": Condition(1, True),
    "twice": Condition(2, True),
    "half, not scaled": Condition(0.5, False),
    "twice, not scaled": Condition(2, False),
}


def sample_paths(labels: Tensor, spacing: float, samples: int, generator: torch.Generator) -> Tensor:
    """Samples of one path for each label, at ``spacing``, 2 ``spacing``, ... seconds: (paths, samples).

    With position x, velocity divided by omega v, white noise W and the variance of both equal to 1:
    dx = omega v dt, dv = -omega (x + 2 zeta v) dt + 2 sqrt(zeta omega) dW.
    """
    frequency, zeta = torch.tensor(CLASSES, dtype=torch.float64).unbind(-1)
    turn = 2 * math.pi * frequency * spacing
    generators = torch.stack([torch.zeros_like(turn), turn, -turn, -2 * zeta * turn], -1).view(-1, 2, 2)
    transition = torch.linalg.matrix_exp(generators)
    # The stationary covariance is the identity, and a step keeps it.
    noise = torch.linalg.cholesky(torch.eye(2, dtype=torch.float64) - transition @ transition.mT)
    transition, noise = transition[labels].float(), noise[labels].float()
    kicks = noise @ torch.randn(len(labels), 2, samples, generator=generator)
    state = torch.randn(len(labels), 2, 1, generator=generator)
    positions = []
    for kick in kicks.split(1, dim=-1):
        state = transition @ state + kick
        positions.append(state[:, 0])
    return torch.cat(positions, dim=-1)


def training_block(seed: int, block: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Signals (paths, ``SAMPLES``) and labels (paths,) of ``STEPS_OF_A_BLOCK`` batches of one model."""
    generator = torch.Generator().manual_seed(100_000 * seed + block)
    labels = torch.randint(len(CLASSES), (STEPS_OF_A_BLOCK * batch_size,), generator=generator)
    return sample_paths(labels, 1 / SAMPLES_PER_SECOND, SAMPLES, generator), labels


def test_set(device: torch.device) -> tuple[dict[float, Tensor], Tensor]:
    """The same paths at every rate, {rate: (paths, rate * ``SAMPLES``)}, and their labels; they never change."""
    rates = sorted({condition.rate for condition in CONDITIONS.values()})
    generator = torch.Generator().manual_seed(2**40)
    labels = torch.arange(TEST_SIGNALS) % len(CLASSES)
    finest = rates[-1]
    paths = sample_paths(labels, 1 / (finest * SAMPLES_PER_SECOND), int(finest * SAMPLES), generator).to(device)
    strides = {rate: int(finest / rate) for rate in rates}
    return {rate: paths[:, stride - 1 :: stride] for rate, stride in strides.items()}, labels.to(device)


def uniform(*shape: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape).uniform_(-(fan_in**-0.5), fan_in**-0.5))


def product(x: Tensor, weights: Tensor) -> Tensor:
    """(models, batch, ..., in) times (models, in, out)."""
    return (x.flatten(1, -2) @ weights).unflatten(1, x.shape[1:-1])


class Mixer(nn.Module):
    """Mamba's block without its convolution, of several models: (models, batch, seqlen, d_model)."""

    def __init__(self, models: int, d_model: int, rule: str, d_state: int = 8) -> None:
        super().__init__()
        d_inner, dt_rank = 2 * d_model, math.ceil(d_model / 16)
        self.rule, self.sizes = rule, (dt_rank, d_state, d_state)
        self.in_proj = uniform(models, d_model, 2 * d_inner, fan_in=d_model)
        self.x_proj = uniform(models, d_inner, sum(self.sizes), fan_in=d_inner)
        self.dt_proj = uniform(models, dt_rank, d_inner, fan_in=dt_rank)
        self.out_proj = uniform(models, d_inner, d_model, fan_in=d_inner)
        step = 0.001 * 100 ** torch.rand(models, d_inner)
        self.dt_bias = nn.Parameter(step.expm1().log())
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(models, d_inner, 1))
        self.D = nn.Parameter(torch.ones(models, d_inner))
        if rule == "exp_trapezoidal":
            self.lam_logit = nn.Parameter(torch.zeros(models, d_inner))

    def projections(self, hidden: Tensor, step_scale: float) -> tuple[Tensor, ...]:
        """``u``, ``delta``, ``A``, ``B``, ``C`` and ``z`` of the scan, with a first axis over models."""
        x, z = product(hidden, self.in_proj).chunk(2, dim=-1)
        u = F.silu(x)
        dt, B, C = product(u, self.x_proj).split(self.sizes, dim=-1)
        delta = step_scale * F.softplus(product(dt, self.dt_proj) + self.dt_bias[:, None, None])
        return u, delta, -self.A_log.exp(), B, C, z

    def forward(self, hidden: Tensor, step_scale: float) -> Tensor:
        u, delta, A, B, C, z = self.projections(hidden, step_scale)
        options: dict[str, Any] = {"discretization": self.rule}
        if self.rule.startswith(ssm_kernels.two_sample_discretizations):
            options["previous"] = "repeat"
        if self.rule == "exp_trapezoidal":
            options |= {"lam": self.lam_logit.flatten()[:, None], "lam_sigmoid": True}
        # Channels of all models side by side, (batch, models * d_inner, seqlen), and a group of B and C for each model.
        u, delta, z = (each.permute(1, 2, 0, 3).flatten(2).mT for each in (u, delta, z))
        B, C = (each.permute(1, 0, 3, 2) for each in (B, C))
        y = selective_scan(u, delta, A.flatten(0, 1), B, C, self.D.flatten(), z, **options)
        return product(y.mT.unflatten(2, self.D.shape).permute(2, 0, 1, 3), self.out_proj)


class RMSNorm(nn.Module):
    """The norms of several models: (models, batch, seqlen, d_model)."""

    def __init__(self, models: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(models, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) * self.weight[:, None, None]


class SignalClassifiers(nn.Module):
    """Several classifiers of signals: (models, batch, seqlen) -> logits (models, batch, n_classes)."""

    def __init__(self, models: int, d_model: int, n_layers: int, rule: str) -> None:
        super().__init__()
        self.embedding = uniform(models, 1, d_model, fan_in=1)
        self.embedding_bias = uniform(models, d_model, fan_in=1)
        self.norms = nn.ModuleList(RMSNorm(models, d_model) for _ in range(n_layers + 1))
        self.mixers = nn.ModuleList(Mixer(models, d_model, rule) for _ in range(n_layers))
        self.head = uniform(models, d_model, len(CLASSES), fan_in=d_model)
        self.head_bias = nn.Parameter(torch.zeros(models, len(CLASSES)))

    @classmethod
    def of_seeds(cls, seeds: Iterable[int], *sizes: Any) -> SignalClassifiers:
        """One model for each seed, with the weights that it has alone."""
        states = []
        for seed in seeds:
            torch.manual_seed(seed)
            states.append(cls(1, *sizes).state_dict())
        models = cls(len(states), *sizes)
        models.load_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]})
        return models

    def forward(self, signals: Tensor, step_scale: float = 1.0) -> Tensor:
        """``step_scale`` multiplies the step sizes of all scans."""
        x = product(signals[..., None], self.embedding) + self.embedding_bias[:, None, None]
        for norm, mixer in zip(self.norms, self.mixers, strict=False):
            x = x + mixer(norm(x), step_scale)
        # The mean over time is the same integral at every rate.
        return product(self.norms[-1](x).mean(dim=2), self.head) + self.head_bias[:, None]

    @torch.no_grad()
    def clip_gradients(self, largest: float = 1.0) -> None:
        """Limits the norm of each model's own gradient."""
        gradients = [parameter.grad.flatten(1) for parameter in self.parameters()]
        norms = torch.cat(gradients, dim=1).norm(dim=1, keepdim=True)
        for gradient in gradients:
            gradient.mul_((largest / (norms + 1e-6)).clamp(max=1))

    @torch.no_grad()
    def accuracies(self, paths: dict[float, Tensor], labels: Tensor, batch_size: int = 256) -> dict[str, list[float]]:
        """The share of test signals that each model classifies correctly, under every condition.

        A signal whose logits are not finite counts as wrong.
        """
        found = {}
        for name, (rate, scaled) in CONDITIONS.items():
            correct: list[Tensor] = []
            for part, label in zip(paths[rate].split(batch_size), labels.split(batch_size), strict=True):
                logits = self(part.expand(len(self.head), -1, -1), 1 / rate if scaled else 1.0)
                correct.append((logits.argmax(dim=-1) == label) & logits.isfinite().all(dim=-1))
            found[name] = torch.cat(correct, dim=1).double().mean(dim=1).tolist()
        return found

    @torch.no_grad()
    def reach(self, signals: Tensor, share: float = 0.9) -> list[float | None]:
        """The |delta * A| that a share of all steps and states of each model is below, on signals (batch, seqlen).

        None for a model that diverged.
        """
        found: list[list[Tensor]] = [[] for _ in self.head]

        def record(mixer: Mixer, inputs: tuple[Tensor, float]) -> None:
            _, delta, A, *_ = mixer.projections(*inputs)
            for values, steps, rates in zip(found, delta, A, strict=True):
                values.append((steps[..., None] * rates.abs()).flatten())

        hooks = [mixer.register_forward_pre_hook(record) for mixer in self.mixers]
        self(signals.expand(len(self.head), -1, -1))
        for hook in hooks:
            hook.remove()
        values = [torch.cat(each).sort().values for each in found]
        reached = [each[int(share * (len(each) - 1))].item() for each in values]
        return [value if math.isfinite(value) else None for value in reached]

    def diverged(self) -> int:
        """The number of models with a weight that is not finite."""
        finite = [parameter.isfinite().flatten(1).all(dim=1) for parameter in self.parameters()]
        return int((~torch.stack(finite).all(dim=0)).sum())


class History(NamedTuple):
    """The measurements of a run.

    Attributes:
        losses: training loss of every step, mean of the models whose loss is finite.
        accuracies: (steps done, shares by condition and model) at the end.
    """

    losses: list[float]
    accuracies: list[tuple[int, dict[str, list[float]]]]


def mean_of_finite(losses: Tensor) -> Tensor:
    """The mean of the finite losses, of which each gradient is that of its own loss."""
    finite = losses.isfinite()
    mine = losses[finite] if not finite.all() else losses
    # The value is a mean, and the gradient is that of a sum, so that no model's depends on the number of models.
    return mine.sum() + (mine.mean() - mine.sum()).detach()


def train_rule(rule: str, args: Any, session: Session) -> dict[str, Any]:
    """Trains the models of all seeds with one rule, or continues them; returns the rule's entry of the results."""
    seeds = range(args.seed, args.seed + args.seeds)
    models = SignalClassifiers.of_seeds(seeds, args.d_model, args.n_layers, rule).to(args.device)
    optimizer, schedule = training.make_optimizer(models, args.lr, args.steps, weight_decay=0.0)
    paths, labels = test_set(args.device)
    drawn: dict[int, tuple[Tensor, Tensor]] = {}

    def loss(step: int) -> Tensor:
        block, place = divmod(step, STEPS_OF_A_BLOCK)
        if block not in drawn:
            drawn.clear()
            parts = [training_block(seed, block, args.batch_size) for seed in seeds]
            drawn[block] = tuple(torch.stack(part).to(args.device) for part in zip(*parts, strict=True))
        here = slice(place * args.batch_size, (place + 1) * args.batch_size)
        signals, wanted = (part[:, here] for part in drawn[block])
        return mean_of_finite(F.cross_entropy(models(signals).movedim(2, 1), wanted, reduction="none").mean(dim=1))

    options = ("steps", "batch_size", "lr", "d_model", "n_layers", "seed", "seeds")
    run = training.Run(
        name=rule,
        model=models,
        optimizer=optimizer,
        schedule=schedule,
        total_steps=args.steps,
        test_every=args.steps,
        loss=loss,
        test=lambda: models.accuracies(paths, labels),
        settings={"task": "signals", "discretization": rule} | {option: getattr(args, option) for option in options},
        length="steps",
        label=rule,
        loss_format="{:.3f}".format,
        test_format=lambda shares: f"{100 * statistics.mean(shares['equal']):.1f} %",
        clip=models.clip_gradients,
    )
    history, seconds = training.train(run, args, History, session)
    recent = history.losses[-50:]
    return {
        "accuracies": history.accuracies[-1][1],
        "loss": statistics.mean(recent),
        "steps": len(history.losses),
        "diverged": models.diverged(),
        "reach": models.reach(paths[1][:16]),
        "seconds": round(seconds, 1),
    }


def settings_of(args: Any) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("steps", "batch_size", "lr", "d_model", "n_layers", "seed", "seeds")}


def read_results(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The results of a run with these settings.

    Raises:
        Mistake: the file has none, or those of another run.
    """
    try:
        results = json.loads(path.read_text())
        saved = {name: results["settings"][name] for name in settings}
        assert isinstance(results["rules"], dict)
    except (AssertionError, KeyError, OSError, TypeError, ValueError):
        raise Mistake(f"{path} has no results of this script") from None
    if saved["steps"] < settings["steps"]:  # a longer run continues the checkpoints
        saved["steps"] = settings["steps"]
    different = [f"{name} {saved[name]}, not {settings[name]}" for name in settings if saved[name] != settings[name]]
    if different:
        raise Mistake(f"{path} belongs to another run: {', '.join(different)}")
    return results | {"settings": settings}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Writes a temporary file and then replaces the old one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(partial, path)


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def run(args: Any, session: Session) -> None:
    """Trains the models of every rule, prints a table, and writes the results and the figure."""
    settings = settings_of(args)
    machine = {"machine": machine_name(args.device), "torch": torch.__version__, "classes": len(CLASSES)}
    results: dict[str, Any] = {**machine, "settings": settings, "rules": {}}
    if args.resume and args.results is not None and args.results.is_file():
        results = read_results(args.results, settings)
    for rule in args.discretization:
        if results["rules"].get(rule, {}).get("steps", -1) >= (args.max_steps or args.steps):
            continue
        try:
            results["rules"][rule] = train_rule(rule, args, session)
        except training.Diverged as reason:
            print(f"{rule}: {reason}")
            nothing = {name: [0.0] * args.seeds for name in CONDITIONS}
            lost = {"loss": None, "steps": args.steps, "diverged": args.seeds, "reach": [None] * args.seeds}
            results["rules"][rule] = {"accuracies": nothing, **lost}
        if args.results is not None:
            write_results(args.results, results)
    results["rules"] = {rule: results["rules"][rule] for rule in RULES if rule in results["rules"]}
    print(table_of(results))
    if args.plot is not None:
        training.save_figure(args.plot, lambda: figure_of(results))
        print(f"accuracy at each rate: {args.plot}")
    if args.results is not None:
        write_results(args.results, results)
        print(f"results: {args.results}")


def spread(values: Sequence[float]) -> float:
    """The standard deviation of a sample."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table_of(results: dict[str, Any]) -> str:
    """Accuracies in percent, mean and standard deviation over the seeds, as text."""
    rows = [("test accuracy, %", *CONDITIONS)]
    for rule, entry in results["rules"].items():
        shares = [entry["accuracies"][name] for name in CONDITIONS]
        rows.append((rule, *(f"{100 * statistics.mean(each):.1f} +- {100 * spread(each):.1f}" for each in shares)))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{first:<{width}}" + "".join(f"{value:>19}" for value in rest) for first, *rest in rows)


def figure_of(results: dict[str, Any]) -> Figure:
    """A row for each rule: mean and standard deviation at every rate, with step sizes scaled (left) and not scaled (right)."""
    rules = list(results["rules"])
    figure = Figure(figsize=(7.35, 1.3 + 0.24 * len(rules)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    looks = {0.5: ("C1", "v", "half", -0.22), 1: ("C0", "o", "equal", 0.0), 2: ("C2", "^", "twice", 0.22)}
    for axes, scaled in ((left, True), (right, False)):
        shown = {name: each for name, each in CONDITIONS.items() if each.scaled is scaled or each.rate == 1}
        for name, (rate, _) in shown.items():
            color, marker, label, shift = looks[rate]
            for row, rule in enumerate(rules):
                shares = [100 * share for share in results["rules"][rule]["accuracies"][name]]
                axes.errorbar(
                    statistics.mean(shares),
                    row + shift,
                    xerr=spread(shares),
                    fmt=marker,
                    color=color,
                    markersize=3.5,
                    elinewidth=0.9,
                    capsize=1.5,
                    label=label if row == 0 and scaled else None,
                )
        axes.axvline(100 / len(CLASSES), color="#888888", lw=0.7, ls=":", label="chance" if scaled else None)
        axes.set(xlabel="test accuracy (%)", ylim=(len(rules) - 0.5, -0.5), xlim=(0, 102))
        axes.grid(axis="y", lw=0.3)
        axes.set_title("Step sizes scaled with the rate" if scaled else "Step sizes not scaled", loc="left")
    left.set_yticks(range(len(rules)), rules)
    left.tick_params(axis="y", length=0)
    seeds = results["settings"]["seeds"]
    figure.legend(
        loc="outside lower center", ncols=4, title=f"sampling rate of the test; mean and standard deviation of {seeds} seeds"
    )
    return figure
