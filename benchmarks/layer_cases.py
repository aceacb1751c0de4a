"""The cases of ``bench_layers.py``: layers, decoding steps and language models, ours and mamba_ssm's in turns.

A row has the figures of "ours", of "mamba_ssm" and of ours "before", where these are known: times as in ``harness.Timing``,
sizes as numbers of bytes. mamba_ssm's layers get the weights of ours. Every result is compared with ours in float64 on the CPU,
logits with ours in float32, before anything is timed.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ssm_kernels
import ssm_kernels.nn
from benchmarks import peers
from benchmarks.bench_selective_scan import on_h200
from benchmarks.harness import Stages, Timing, measure, time_graph

__all__ = [
    "PEER",
    "Bar",
    "Case",
    "DecodeCase",
    "GenerationCase",
    "LatencyCase",
    "LayerCase",
    "ModelCase",
    "Settings",
    "median_of",
    "models_are_missing",
]

PEER = "mamba_ssm"
Row = dict[str, Any]
Figures = dict[str, Any]

# Relative L2 errors in bfloat16 beyond which a result is wrong; rounding the exact result makes 1.7e-3, a layer some 5e-3.
WRONG_OUT, WRONG_GRADIENT = 1.2e-2, 4e-2
# A model of 24 layers adds theirs.
WRONG_LOGITS = 5e-2
# In float32.
WRONG_FP32 = 1e-5
# How many steps of the first sequence are compared. Layers are causal: those do not depend on the others.
COMPARED_STEPS = 256


class Settings(NamedTuple):
    device: torch.device
    trials: int
    warmup: int


@dataclass(frozen=True)
class Bar:
    """The bar and the goal of one quantity of a row.

    Attributes:
        quantity: its name in the row's figures.
        kind: "speed": the other's time over ours, at least; "share": ours over the other's, at most; "limit": ours, at most.
        other: whose figure, except for a limit.
    """

    quantity: str
    kind: str
    bar: float
    goal: float | None = None
    other: str = PEER

    def judge(self, row: Row) -> Row | None:
        """Compares the quantity with the bar; None where the other figure is not known."""
        ours = median_of(row["ours"], self.quantity)
        theirs = 1.0 if self.kind == "limit" else median_of(row.get(self.other), self.quantity)
        if ours is None or theirs is None:
            return None
        at_most = self.kind in ("share", "limit")
        found = ours / theirs if at_most else theirs / ours

        def reached(asked: float) -> bool:
            return found <= asked if at_most else found >= asked

        return {
            "quantity": self.quantity,
            "kind": self.kind,
            "other": None if self.kind == "limit" else self.other,
            "found": found,
            "bar": self.bar,
            "goal": self.goal,
            "met": reached(self.bar),
            "goal_met": None if self.goal is None else reached(self.goal),
        }


def median_of(figures: Mapping[str, Any] | None, quantity: str) -> float | None:
    """A figure of a row: the median of a time, or a size."""
    found = (figures or {}).get(quantity)
    return found["median"] if isinstance(found, dict) else found


@dataclass(frozen=True)
class Case:
    """A row. Subclasses say what is measured."""

    bars: tuple[Bar, ...] = ()
    kind = ""

    @property
    def name(self) -> str:
        raise NotImplementedError

    def measure(self, settings: Settings) -> Row:
        raise NotImplementedError

    def row(self, settings: Settings) -> Row:
        """The figures, and what became of the bars."""
        row = {"name": self.name, "kind": self.kind, "wrong": [], **self.measure(settings)}
        row["judged"] = [judged for bar in self.bars if (judged := bar.judge(row)) is not None]
        return row


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.cpu().double() - exact).norm() / exact.norm()).item()


def share_weights(ours: nn.Module, peer: nn.Module) -> None:
    """Loads each ``state_dict`` into the other, strictly; first into the peer, which rounds some parameters that ours keeps."""
    peer.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(peer.state_dict(), strict=True)


def make_layers(layer: str, d_model: int, settings: Settings, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Ours, and mamba_ssm's where it is installed, with the same weights."""
    torch.manual_seed(0)
    found = {"ours": getattr(ssm_kernels.nn, layer)(d_model, device=settings.device, dtype=dtype)}
    if layer in (installed := peers.layers()):
        found[PEER] = installed[layer](d_model, device=settings.device, dtype=dtype)
        share_weights(found["ours"], found[PEER])
    return found


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int | None:
    """Memory that ``step`` takes at its highest, over what was allocated before."""
    if device.type != "cuda":
        return None
    step()  # what is made once, at the first call, is none of its memory
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that a forward saves for backward, each storage once, without the parameters and the layer's own input."""
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, *layer.parameters(), *layer.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor  # so it lives on, and no later storage has its address

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    del out
    return sum(kept.values())


def held_bytes(layer: nn.Module, x: Tensor) -> int | None:
    """Bytes that are allocated between forward and backward beside the output: what hooks do not see counts too."""
    if x.device.type != "cuda":
        return None
    torch.cuda.synchronize(x.device)
    before = torch.cuda.memory_allocated(x.device)
    out = layer(x)
    torch.cuda.synchronize(x.device)
    return torch.cuda.memory_allocated(x.device) - before - out.untyped_storage().nbytes()


def attempts(found: Mapping[str, Any], work: Callable[[str, Any], Figures]) -> dict[str, Figures]:
    """Figures of ours and of the peer. Whatever the peer raises is its figure."""
    figures: dict[str, Figures] = {}
    for who, contender in found.items():
        try:
            figures[who] = {"recorded": False, "unsupported": None, **work(who, contender)}
        except Exception as error:
            if who != PEER:
                raise
            message = (str(error).strip().splitlines() or [""])[0]
            figures[who] = {"recorded": False, "unsupported": f"{type(error).__name__}: {message}"}
    return figures


def add_times(figures: dict[str, Figures], stages: Mapping[tuple[str, str], Stages], settings: Settings) -> None:
    """Times by (who, quantity), measured in turns, as triton.testing.do_bench measures: one write of the cache before each."""
    found = measure(stages, device=settings.device, trials=settings.trials, warmup=settings.warmup, cache_writes=1)
    for (who, quantity), measurement in found.items():
        figures[who][quantity] = measurement.total.to_dict()


def recorded_figures(recorded: Mapping[str, Figures] | None, figures: dict[str, Figures], device: torch.device) -> None:
    """Adds what is recorded and not measured."""
    if not on_h200(device):
        return
    for who, found in (recorded or {}).items():
        if who not in figures:
            times = {name: {"median": value} if name != "peak" else value for name, value in found.items()}
            figures[who] = {"recorded": True, "unsupported": None, **times}


@dataclass(frozen=True)
class LayerCase(Case):
    """Forward, forward and backward, and memory of a layer, projections included."""

    layer: str = "Mamba"
    batch: int = 8
    d_model: int = 2048
    seqlen: int = 2048
    kind = "layer"

    @property
    def name(self) -> str:
        return f"{self.layer} B{self.batch} L{self.seqlen} d_model {self.d_model}"

    def tensors(self, settings: Settings) -> tuple[Tensor, Tensor]:
        """Input and incoming gradient."""
        generator = torch.Generator(settings.device).manual_seed(1)
        shape = (self.batch, self.seqlen, self.d_model)
        x, grad_out = (torch.randn(shape, generator=generator, device=settings.device) for _ in range(2))
        return x.to(torch.bfloat16).requires_grad_(), grad_out.to(torch.bfloat16)

    def results(self, layer: nn.Module, x: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
        """Output and gradients, of ``x`` and ``grad_out`` the first steps of the first sequence only."""
        steps = min(COMPARED_STEPS, self.seqlen)
        masked, x = torch.zeros_like(grad_out), x.detach().requires_grad_()
        masked[:1, :steps] = grad_out[:1, :steps]
        out, parameters = layer(x), dict(layer.named_parameters())
        gradients = torch.autograd.grad(out, [x, *parameters.values()], masked)
        names = ["out", "grad_x", *(f"grad_{name}" for name in parameters)]
        tensors = (out.detach()[:1, :steps], gradients[0][:1, :steps], *gradients[1:])
        return dict(zip(names, tensors, strict=True))

    def measure(self, settings: Settings) -> Row:
        layers = make_layers(self.layer, self.d_model, settings, torch.bfloat16)
        x, grad_out = self.tensors(settings)
        first = (tensor[:1, :COMPARED_STEPS].detach().cpu().double() for tensor in (x, grad_out))
        exact = self.results(copy.deepcopy(layers["ours"]).cpu().double(), *first)
        errors: dict[str, dict[str, float]] = {}
        stages: dict[tuple[str, str], Stages] = {}

        def of_one(who: str, layer: nn.Module) -> Figures:
            actual = self.results(layer, x, grad_out)
            errors[who] = {name: relative_error(actual[name], expected) for name, expected in exact.items()}
            leaves = [x, *layer.parameters()]

            def infer() -> Tensor:
                with torch.no_grad():
                    return layer(x)

            def backward(out: Tensor) -> Sequence[Tensor]:
                return torch.autograd.grad(out, leaves, grad_out)

            stages[who, "forward"], stages[who, "both"] = [infer], [lambda: layer(x), backward]
            tokens = self.batch * self.seqlen
            held = held_bytes(layer, x)
            return {
                "peak": peak_bytes(lambda: backward(layer(x)), settings.device),
                "kept": kept_bytes(layer, x) / tokens,
                "held": None if held is None else held / tokens,
            }

        figures = attempts(layers, of_one)
        add_times(figures, stages, settings)
        recorded = peers.RECORDED_LAYERS.get((self.layer, self.batch, self.d_model)) if self.seqlen == 2048 else None
        recorded_figures(recorded, figures, settings.device)
        # The peer's gradients are its own affair: only its output says whether it computes the same layer.
        wrong = [
            f"{who}: {name}"
            for who, of_one_layer in errors.items()
            for name, error in of_one_layer.items()
            if (who == "ours" or name == "out") and not error <= (WRONG_OUT if name == "out" else WRONG_GRADIENT)
        ]
        return {**figures, "errors": errors, "wrong": wrong, "tokens": self.batch * self.seqlen}


class Step(NamedTuple):
    """A layer with its states and the next input."""

    layer: Any
    hidden_states: Tensor
    conv_state: Tensor
    ssm_state: Tensor

    def __call__(self) -> Tensor:
        return self.layer.step(self.hidden_states, self.conv_state, self.ssm_state)[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.conv_state, self.ssm_state, *self.layer.parameters()))


@dataclass(frozen=True)
class DecodeCase(Case):
    """A decoding step of a layer in a CUDA graph of many, each of another layer with other states: caches do not help."""

    layer: str = "Mamba"
    batch: int = 1
    d_model: int = 2048
    state_dtype: torch.dtype = torch.float32
    kind = "decode"

    @property
    def name(self) -> str:
        state = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.state_dtype]
        return f"{self.layer} step B{self.batch} d_model {self.d_model}, {state} state"

    def step_of(self, layer: Any, device: torch.device, seed: int = 0) -> Step:
        generator = torch.Generator(device).manual_seed(seed)

        def filled(tensor: Tensor) -> Tensor:
            return tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device))

        conv_state, ssm_state = layer.allocate_inference_cache(self.batch, 1)
        hidden_states = filled(torch.empty(self.batch, 1, self.d_model, device=device, dtype=torch.bfloat16))
        return Step(layer, hidden_states, filled(conv_state), filled(ssm_state.to(self.state_dtype)))

    @torch.no_grad()
    def measure(self, settings: Settings) -> Row:
        layers = make_layers(self.layer, self.d_model, settings, torch.bfloat16)
        rows = min(self.batch, 3)
        tensors = (tensor[:rows].cpu().double() for tensor in self.step_of(layers["ours"], settings.device)[1:])
        exact = copy.deepcopy(layers["ours"]).cpu().double().step(*tensors)
        errors: dict[str, dict[str, float]] = {}
        cache = torch.cuda.get_device_properties(settings.device).L2_cache_size or 2**26

        def of_one(who: str, layer: nn.Module) -> Figures:
            first = self.step_of(layer, settings.device)
            actual = zip(("out", "conv_state", "ssm_state"), first.layer.step(*first[1:]), exact, strict=True)
            errors[who] = {name: relative_error(tensor[:rows], expected) for name, tensor, expected in actual}
            count = max(2, math.ceil(4 * cache / first.nbytes))
            copies = (self.step_of(copy.deepcopy(layer), settings.device, seed) for seed in range(1, count))
            return {"step": time_graph(lambda step: step(), [first, *copies], settings.trials).to_dict()}

        figures = attempts(layers, of_one)
        wrong = [f"{who}: {name}" for who, one in errors.items() for name, error in one.items() if not error <= WRONG_OUT]
        return {**figures, "errors": errors, "wrong": wrong, "sequences": self.batch}


def replay_of(function: Callable[[], Any]) -> Callable[[], None]:
    """Captures a call in a CUDA graph."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


@dataclass(frozen=True)
class LatencyCase(Case):
    """A replay of a CUDA graph with the forward of two narrow layers on few steps, as real-time control runs them; float32."""

    layer: str = "Mamba"
    d_model: int = 256
    seqlen: int = 32
    kind = "latency"

    @property
    def name(self) -> str:
        return f"two {self.layer} B1 T{self.seqlen} d_model {self.d_model} fp32"

    @torch.no_grad()
    def measure(self, settings: Settings) -> Row:
        pairs = [make_layers(self.layer, self.d_model, settings, torch.float32) for _ in range(2)]
        models = {who: nn.Sequential(*(pair[who] for pair in pairs)) for who in pairs[0]}
        x = torch.randn(1, self.seqlen, self.d_model, generator=torch.Generator().manual_seed(1))
        exact = copy.deepcopy(models["ours"]).cpu().double()(x.double())
        given = x.to(settings.device)
        errors: dict[str, dict[str, float]] = {}
        stages: dict[tuple[str, str], Stages] = {}

        def of_one(who: str, model: nn.Module) -> Figures:
            errors[who] = {"out": relative_error(model(given), exact)}
            stages[who, "replay"] = [replay_of(lambda: model(given))]
            return {}

        figures = attempts(models, of_one)
        add_times(figures, stages, settings)
        recorded_figures(peers.RECORDED_REPLAYS.get(self.layer), figures, settings.device)
        wrong = [f"{who}: out" for who, one in errors.items() if who == "ours" and not one["out"] <= WRONG_FP32]
        return {**figures, "errors": errors, "wrong": wrong}


def models_are_missing() -> str | None:
    """Why there are no language models to measure, or None."""
    try:
        from ssm_kernels import models  # noqa: F401
    except ImportError as error:
        return f"ssm_kernels.models cannot be imported: {error}"
    return None


def make_models(case: ModelCase | GenerationCase, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Ours, and mamba_ssm's where it is installed, with the same weights."""
    from ssm_kernels.models import MambaConfig, MambaLM

    torch.manual_seed(0)
    config = {"d_model": case.d_model, "n_layer": case.n_layer, "vocab_size": case.vocab_size}
    found: dict[str, nn.Module] = {"ours": MambaLM(MambaConfig(**config, mixer=case.layer), device=device, dtype=dtype)}
    make_peer = peers.language_model()
    if make_peer is not None:
        found[PEER] = make_peer(case.layer, config, device=device, dtype=dtype)
        share_weights(found["ours"], found[PEER])
    return found


@torch.no_grad()
def exact_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Those of the same model in float32."""
    return copy.deepcopy(model).float()(tokens).logits.cpu().double()


def wrong_logits(errors: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [f"{who}: logits" for who, one in errors.items() if not one["logits"] <= WRONG_LOGITS]


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


@dataclass(frozen=True)
class ModelCase(Case):
    """Forward and backward of a language model with float32 parameters under autocast; the optimizer does not run."""

    layer: str = "Mamba"
    batch: int = 8
    seqlen: int = 2048
    d_model: int = 768
    n_layer: int = 24
    vocab_size: int = 50280
    kind = "model"

    @property
    def name(self) -> str:
        return f"{self.layer} B{self.batch} L{self.seqlen}, {self.n_layer} layers, d_model {self.d_model}"

    def measure(self, settings: Settings) -> Row:
        models = make_models(self, settings.device, torch.float32)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.vocab_size, (self.batch, self.seqlen + 1), generator=generator).to(settings.device)
        first = tokens[:1, : min(512, self.seqlen)]
        exact = exact_logits(models["ours"], first)
        errors: dict[str, dict[str, float]] = {}
        stages: dict[tuple[str, str], Stages] = {}

        def of_one(who: str, model: nn.Module) -> Figures:
            with torch.no_grad(), autocast(settings.device):
                errors[who] = {"logits": relative_error(model(first).logits, exact)}

            def step() -> None:
                with autocast(settings.device):
                    logits = model(tokens[:, :-1]).logits
                    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                del logits
                loss.backward()
                model.zero_grad(set_to_none=True)

            stages[who, "step"] = [step]
            return {"peak": peak_bytes(step, settings.device)}

        figures = attempts(models, of_one)
        add_times(figures, stages, settings)
        recorded_figures(peers.RECORDED_MODELS.get(self.layer), figures, settings.device)
        return {**figures, "errors": errors, "wrong": wrong_logits(errors), "tokens": self.batch * self.seqlen}


def host_times(functions: Mapping[str, Callable[[], Any]], trials: int, device: torch.device) -> dict[str, Timing]:
    """Wall-clock seconds of a call, in turns, each from an idle device until the device is idle again."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for trial in range(-1, trials):
        for name, function in functions.items():
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            function()
            torch.cuda.synchronize(device)
            if trial >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing.of(of_one) for name, of_one in seconds.items()}


@dataclass(frozen=True)
class GenerationCase(Case):
    """The most probable tokens after a prompt, the steps in a CUDA graph, in bfloat16; wall-clock time of the whole call."""

    layer: str = "Mamba"
    batch: int = 1
    prompt: int = 1024
    new_tokens: int = 256
    d_model: int = 768
    n_layer: int = 24
    vocab_size: int = 50280
    kind = "generation"

    @property
    def name(self) -> str:
        return f"{self.layer} B{self.batch}, prompt {self.prompt}, {self.new_tokens} tokens, {self.n_layer} layers"

    def measure(self, settings: Settings) -> Row:
        models = make_models(self, settings.device, torch.bfloat16)
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(self.vocab_size, (self.batch, self.prompt), generator=generator).to(settings.device)
        exact = exact_logits(models["ours"], prompt)
        errors: dict[str, dict[str, float]] = {}
        length = self.prompt + self.new_tokens
        functions: dict[str, Callable[[], Tensor]] = {}

        def of_one(who: str, model: Any) -> Figures:
            with torch.no_grad():
                errors[who] = {"logits": relative_error(model(prompt).logits, exact)}
            if who == PEER:
                functions[who] = lambda: model.generate(prompt, max_length=length, top_k=1, cg=True)
            else:
                functions[who] = lambda: model.generate(prompt, max_length=length, temperature=0)
            try:
                tokens = functions[who]()  # captures the graph
                assert tokens.shape == (self.batch, length) and torch.equal(tokens[:, : self.prompt], prompt)
            except Exception:
                del functions[who]
                raise
            return {}

        figures = attempts(models, of_one)
        for who, timing in host_times(functions, min(settings.trials, 5), settings.device).items():
            figures[who]["generate"] = timing.to_dict()
        return {**figures, "errors": errors, "wrong": wrong_logits(errors), "tokens": self.batch * self.new_tokens}
