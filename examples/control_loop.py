"""Measures the latency of a policy in a control loop of 60 frames a second: minGRU, minLSTM and torch.nn.GRU.

The task is a pole on a cart of which the policy sees positions, not velocities, so that it needs a memory. Each policy learns
from a linear controller that sees everything, and then balances the pole. In every frame it reads an observation of the CPU and
returns a force to the CPU. The policy keeps its state, so that a frame is one step of the recurrent layers; ``window`` is the
alternative, a policy that reads the last 32 observations again in each frame.

    python examples/control_loop.py --plot control_loop.png
    python examples/control_loop.py --device cuda --frames 100000 --results latencies.json

The frames follow each other without a pause. ``--paced`` waits for the next sixtieth of a second, as a robot or a game does: a
processor that has slept in between answers later.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import training
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm
from training import Session, number

from ssm_kernels.nn import MinGRU, MinLSTM

RATE = 60  # frames a second
WINDOW = 32
FORCE, POSITION, ANGLE = 10.0, 2.4, 0.4  # the largest force (N), and where an episode ends (m, rad)
GRAVITY, CART, POLE, HALF_LENGTH = 9.81, 1.0, 0.1, 0.5  # m / s^2, kg, kg, m
PERCENTILES = (50.0, 99.0, 99.9)


def advance(state: Tensor, force: Tensor) -> Tensor:
    """The next frame's state, (..., 4): position, velocity, angle and angular velocity of Barto, Sutton and Anderson's pole."""
    for _ in range(2):
        x, v, angle, w = state.unbind(-1)
        sin, cos = angle.sin(), angle.cos()
        push = (force + POLE * HALF_LENGTH * w * w * sin) / (CART + POLE)
        turn = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4 / 3 - POLE * cos * cos / (CART + POLE)))
        v = v + (push - POLE * HALF_LENGTH * turn * cos / (CART + POLE)) / (2 * RATE)
        w = w + turn / (2 * RATE)
        state = torch.stack([x + v / (2 * RATE), v, angle + w / (2 * RATE), w], dim=-1)
    return state


def observe(state: Tensor) -> Tensor:
    """What the policy sees of a state: position and angle, in fractions of where an episode ends."""
    return torch.stack([state[..., 0] / POSITION, state[..., 2] / ANGLE], dim=-1)


def has_fallen(state: Tensor) -> Tensor:
    return (state[..., 0].abs() > POSITION) | (state[..., 2].abs() > ANGLE)


def first_states(count: int, generator: torch.Generator) -> Tensor:
    """Poles near the top and carts near the middle, (count, 4), at rest."""
    return torch.tensor([1.0, 0.0, 0.1, 0.0]) * (2 * torch.rand(count, 4, generator=generator) - 1)


def controller() -> Tensor:
    """Gains of the linear controller that minimizes a quadratic cost, (4,), by iteration of the Riccati equation."""
    at_rest, no_force = torch.zeros(4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    A, B = torch.func.jacrev(advance, argnums=(0, 1))(at_rest, no_force)
    cost = torch.diag(torch.tensor([1.0, 0.1, 10.0, 0.1], dtype=torch.float64))
    value = cost
    for _ in range(2000):
        gains = (value @ B) @ A / (0.01 + B @ value @ B)
        value = cost + A.T @ value @ (A - B[:, None] * gains)
        value = (value + value.T) / 2  # Rounding would grow in the antisymmetric part.
    return gains.float()


class Policy(nn.Module):
    """Two recurrent layers between two projections; observations (batch, seqlen, 2) -> forces (batch, seqlen)."""

    def __init__(self, layer: type[nn.Module], width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.layers = layer(width, width, num_layers=2, batch_first=True)
        self.leave = nn.Linear(width, 1)

    def forward(self, observations: Tensor) -> Tensor:
        return self._force(self.layers(self.enter(observations))[0])

    def step(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One frame: observation (batch, 2) and state (2, batch, width) -> force (batch,) and the next state."""
        x = self.enter(observation)
        if isinstance(self.layers, nn.GRU):
            output, state = self.layers(x[:, None], state)
            return self._force(output)[:, 0], state
        output, state = self.layers.step(x, state)
        return self._force(output), state

    def first_state(self, batch: int) -> Tensor:
        weight = self.enter.weight
        return weight.new_zeros(2, batch, weight.shape[0])

    def _force(self, output: Tensor) -> Tensor:
        force: Tensor = FORCE * self.leave(output).squeeze(-1).tanh()
        return force


LAYERS: dict[str, type[nn.Module]] = {"mingru": MinGRU, "minlstm": MinLSTM, "torch-gru": nn.GRU}


def play(policy: Policy, gains: Tensor, frames: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Observations (batch, frames, 2) of episodes, and the controller's forces (batch, frames).

    ``share`` of the episodes are the controller's own. In the others the policy acts, and learns to correct its mistakes.
    """
    device = gains.device
    states = first_states(64, generator).to(device)
    is_controllers = (torch.arange(64) < share * 64).to(device)
    memory, seen, wanted = policy.first_state(64), [], []
    for _ in range(frames):
        force = (-states @ gains).clamp(-FORCE, FORCE)
        seen.append(observe(states))
        wanted.append(force)
        with torch.no_grad():
            acted, memory = policy.step(seen[-1], memory)
        states = advance(states, torch.where(is_controllers, force, acted))
        # A fallen pole teaches nothing, and its numbers grow without bound.
        states = torch.where(has_fallen(states)[:, None], 0.0, states)
    return torch.stack(seen, dim=1), torch.stack(wanted, dim=1)


def train(name: str, args: argparse.Namespace) -> Policy:
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    policy = Policy(LAYERS[name], args.d_model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, args.steps))
    gains = controller()
    for step in tqdm(range(args.steps), desc=f"training {name}", leave=False, disable=None):
        observations, forces = play(policy, gains, 2 * RATE, max(0.2, 1 - 2 * step / args.steps), generator)
        loss = F.mse_loss(policy(observations), forces)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return policy.to(args.device).eval()


Act = Callable[[Tensor, bool], float]
"""Returns the force for an observation (1, 2) of the CPU; the flag says that an episode begins, with an empty memory."""


def eager(policy: Policy) -> Act:
    """One step a frame, by calls from Python."""
    device, state = policy.enter.weight.device, policy.first_state(1)

    def act(observation: Tensor, begins: bool) -> float:
        nonlocal state
        if begins:
            state = torch.zeros_like(state)
        force, state = policy.step(observation.to(device), state)
        return force.item()

    return act


def graph(policy: Policy) -> Act:
    """One step a frame, recorded in a CUDA graph that reads and writes the same memory in every frame."""
    seen = torch.zeros(1, 2, device=policy.enter.weight.device)
    state = policy.first_state(1)
    sent, returned = torch.zeros(1, 2).pin_memory(), torch.zeros(1).pin_memory()
    stream = torch.cuda.Stream()

    def frame() -> None:
        seen.copy_(sent, non_blocking=True)
        force, after = policy.step(seen, state)
        state.copy_(after)
        returned.copy_(force, non_blocking=True)

    with torch.cuda.stream(stream):
        for _ in range(3):
            frame()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, stream=stream):
            frame()

    def act(observation: Tensor, begins: bool) -> float:
        if begins:
            state.zero_()
        sent.copy_(observation)
        recorded.replay()
        torch.cuda.current_stream().synchronize()
        return returned.item()

    return act


def window(policy: Policy) -> Act:
    """The last observations again in every frame, from a state of zero."""
    device = policy.enter.weight.device
    seen: deque[Tensor] = deque(maxlen=WINDOW)

    def act(observation: Tensor, begins: bool) -> float:
        if begins:
            seen.clear()
        seen.append(observation)
        return policy(torch.stack(tuple(seen), dim=1).to(device))[0, -1].item()

    return act


WAYS: dict[str, Callable[[Policy], Act]] = {"eager": eager, "graph": graph, "window": window}


class Measurement(NamedTuple):
    """Frames of one policy: ``latencies`` in microseconds, one a frame, and how often the pole fell."""

    name: str
    way: str
    latencies: Tensor
    falls: int


@torch.no_grad()
def measure(name: str, way: str, policy: Policy, args: argparse.Namespace) -> Measurement:
    generator = torch.Generator().manual_seed(args.seed)
    states, act, latencies, falls = first_states(1, generator), WAYS[way](policy), [], 0
    for _ in range(min(1000, args.frames)):  # The clocks, caches and allocations of the first frames are not measured.
        act(observe(states), False)
    begins, due = True, time.perf_counter()
    for _ in tqdm(range(args.frames), desc=f"{name}, {way}", leave=False, disable=None):
        if args.paced:
            due = max(due + 1 / RATE, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
        observation = observe(states)
        begin = time.perf_counter_ns()
        force = act(observation, begins)
        latencies.append((time.perf_counter_ns() - begin) / 1000)
        states = advance(states, torch.tensor([force]))
        begins = bool(has_fallen(states))
        if begins:
            states, falls = first_states(1, generator), falls + 1
    return Measurement(name, way, torch.tensor(latencies, dtype=torch.float64), falls)


def summary(measured: Measurement) -> dict[str, Any]:
    """A row of the table and of ``--results``; latencies in microseconds."""
    found = torch.quantile(measured.latencies, torch.tensor(PERCENTILES, dtype=torch.float64) / 100).tolist()
    percentiles = {f"p{percent:g}": value for percent, value in zip(PERCENTILES, found, strict=True)}
    return {
        "policy": measured.name,
        "way": measured.way,
        **percentiles,
        "max": measured.latencies.max().item(),
        "falls": measured.falls,
        "frames": len(measured.latencies),
    }


def label_of_tick(latency: float, _: object) -> str:
    """Labels 2 and 5 times a power of ten: more labels would overlap."""
    return f"{latency:g}" if f"{latency:.0e}"[0] in "25" else ""


def histograms(measurements: list[Measurement], device: str) -> Figure:
    """Draws how many frames took how long: a panel for each way of running the policies."""
    ways = list(dict.fromkeys(each.way for each in measurements))
    figure = Figure(figsize=(6.6, 1.5 + 1.5 * len(ways)), layout="constrained")
    low = min(each.latencies.min().item() for each in measurements)
    high = max(each.latencies.max().item() for each in measurements)
    edges = torch.logspace(math.log10(0.9 * low), math.log10(1.1 * high), 120, dtype=torch.float64)
    names = list(dict.fromkeys(each.name for each in measurements))
    panels = figure.subplots(len(ways), 1, sharex=True, squeeze=False)[:, 0]
    for axes, way in zip(panels, ways, strict=True):
        for each in measurements:
            if each.way == way:
                counts = torch.histogram(each.latencies, edges).hist
                label = each.name if way == ways[0] else None
                axes.stairs(counts.numpy(), edges.numpy(), color=f"C{names.index(each.name) + 1}", label=label)
        axes.set_yscale("log")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(label_of_tick)
        axes.set_ylim(bottom=0.7)
        axes.set_ylabel("frames")
        axes.set_title(f"{way[0].upper()}{way[1:]}", loc="left")
    panels[-1].set_xlabel("latency of a frame (µs)")
    figure.suptitle(f"Frames of a policy with two layers on {device}")
    figure.legend(loc="outside lower center", ncols=len(names))
    return figure


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = training.Parser(__file__, __doc__)
    parser.add_argument(
        "--model", nargs="+", default=[*LAYERS], choices=LAYERS, metavar="NAME", help=f"{', '.join(LAYERS)}; default: all"
    )
    parser.add_argument("--frames", type=number(int, 10, 10**7), default=10_000, help="measured frames; default: 10000")
    parser.add_argument("--steps", type=number(int, 0, 10**6), default=150, help="training steps, on the CPU; default: 150")
    parser.add_argument("--d-model", type=number(int, 1, 4096), default=256, help="width of the layers; default: 256")
    parser.add_argument("--paced", action="store_true", help="one frame every sixtieth of a second")
    parser.add_argument("--device", default="cpu", help="of the measured policies, cpu or cuda; default: cpu")
    parser.add_argument("--threads", type=number(int, 1, 4096), default=1, help="of the CPU while it is measured; default: 1")
    parser.add_argument("--seed", type=number(int, 0, 2**31), default=0, help="default: 0")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="histograms of the latencies")
    parser.add_argument("--results", type=Path, metavar="FILE", help="the table as JSON, written after each row")
    parser.add_argument("--overwrite", action="store_true", help="replace --plot and --results")
    args = parser.parse_args(argv)
    args.model = list(dict.fromkeys(args.model))
    args.checkpoint, args.resume = None, False
    training.check_paths(parser, args, results=args.results)
    training.check_device(
        parser, args, lambda device: Policy(MinGRU, 4).to(device)(torch.zeros(1, 2, 2, device=device)).sum().item()
    )
    return args


def main(argv: list[str] | None = None) -> None:
    with Session(__file__, argv):
        args = parse_arguments(argv)
        is_cuda = args.device.type == "cuda"
        device = (
            torch.cuda.get_device_name(args.device)
            if is_cuda
            else f"a CPU with {args.threads} thread{'s' * (args.threads > 1)}"
        )
        policies = {name: train(name, args) for name in args.model}
        torch.set_num_threads(args.threads)
        ways = [way for way in WAYS if is_cuda or way != "graph"]
        measurements = []
        print(
            f"{'policy':10} {'way':7} {'p50':>8} {'p99':>8} {'p99.9':>8} {'max':>8} us  falls in {args.frames} frames, {device}"
        )
        for name, policy in policies.items():
            for way in ways:
                measurements.append(measure(name, way, policy, args))
                row = summary(measurements[-1])
                times = " ".join(f"{row[column]:8.1f}" for column in ("p50", "p99", "p99.9", "max"))
                print(f"{name:10} {way:7} {times}  {row['falls']}", flush=True)
                if args.results is not None:
                    rows = [summary(each) for each in measurements]
                    args.results.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")
        if args.plot is not None:
            training.save_figure(args.plot, lambda: histograms(measurements, device))
            print(f"histograms: {args.plot}")


if __name__ == "__main__":
    main()
