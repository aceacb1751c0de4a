"""The cases of ``bench_layers.py`` and ``bench_delta_rule_layers.py``: layers, decoding steps and language models, in turns.

A row has the figures of "ours", of "mamba_ssm" and of ours "before", where these are known: times as in ``harness.Timing``,
sizes as numbers of bytes. mamba_ssm's layers get the weights of ours. Every result is compared with ours in float64 on the CPU,
logits with ours in float32, before anything is timed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ssm_kernels
import ssm_kernels.nn
from benchmarks import peers
from benchmarks.benchmark import FLA, PEER, Case, Contender, Contest, Run, speedups
from benchmarks.harness import Stages, graph_of, peak_bytes, synchronize
from benchmarks.tables import Row, Table, errors_of, figure, largest_errors, median, ratio, text, versus
from ssm_kernels.choices import RecomputeName
from ssm_kernels.models import MambaConfig, MambaLM

Figures = dict[str, Any]

# Relative L2 errors in bfloat16 beyond which a result is wrong; rounding the exact result makes 1.7e-3, a layer some 5e-3.
WRONG_OUT, WRONG_GRADIENT = 1.2e-2, 4e-2
# A model of 24 layers adds theirs.
WRONG_LOGITS = 5e-2
# In float32.
WRONG_FP32 = 1e-5
# How many steps of the first sequence are compared. Layers are causal: those do not depend on the others.
COMPARED_STEPS = 256


@dataclass(frozen=True)
class PairedCase(Case):
    """Ours and mamba_ssm's, if it is installed, with the same weights."""

    layer: str = "Mamba"
    kind = ""

    @property
    def fields(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def allowed(self, result: str) -> float:
        """The error beyond which a result is wrong."""
        return WRONG_GRADIENT if result.startswith("grad_") else WRONG_OUT


def share_weights(ours: nn.Module, peer: nn.Module) -> None:
    """Loads each ``state_dict`` into the other, strictly; first into the peer, which rounds some parameters that ours keeps."""
    peer.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(peer.state_dict(), strict=True)


def make_layers(layer: str, d_model: int, device: torch.device, dtype: torch.dtype, **options: Any) -> dict[str, nn.Module]:
    """Ours, and that of mamba_ssm or flash-linear-attention where it is installed, with the same weights."""
    torch.manual_seed(0)
    found = {"ours": getattr(ssm_kernels.nn, layer)(d_model, device=device, dtype=dtype, **options)}
    if layer in (installed := peers.layers()):
        found[PEER] = installed[layer](d_model, device=device, dtype=dtype, **options)
        share_weights(found["ours"], found[PEER])
    if (make := peers.layer_of_fla(layer)) is not None:
        found[FLA] = make(d_model, device=device, dtype=dtype, **options)
        share_weights(found["ours"], found[FLA])
    return found


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
    """Bytes that are allocated between forward and backward beside the output, tensors that hooks do not see included."""
    if x.device.type != "cuda":
        return None
    synchronize(x.device)
    before = torch.cuda.memory_allocated(x.device)
    out = layer(x)
    synchronize(x.device)
    return torch.cuda.memory_allocated(x.device) - before - out.untyped_storage().nbytes()


_EXACT: dict[Any, dict[str, Tensor]] = {}


def exact_of(sizes: Any, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results in float64, which the cases of the same sizes share: their weights and inputs are the same."""
    if sizes not in _EXACT:
        _EXACT[sizes] = compute()
    return _EXACT[sizes]


@dataclass(frozen=True)
class LayerCase(PairedCase):
    """Forward, forward and backward, and memory of a layer, projections included.

    With ``recompute``, of ours with that value, without mamba_ssm's.
    """

    batch: int = 8
    d_model: int = 2048
    seqlen: int = 2048
    recompute: RecomputeName | None = None
    kind = "layer"
    judges_others = True

    @property
    def options(self) -> Mapping[str, Any]:
        """Arguments of the layer's constructor beside its channels."""
        return {}

    @property
    def name(self) -> str:
        suffix = "" if self.recompute is None else f", recompute {self.recompute}"
        return f"{self.layer} B{self.batch} L{self.seqlen} d_model {self.d_model}{suffix}"

    @property
    def fields(self) -> dict[str, Any]:
        return {"kind": self.kind, "layer": self.layer, "d_model": self.d_model, "recompute": self.recompute}

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Input and incoming gradient."""
        generator = torch.Generator(device).manual_seed(1)
        shape = (self.batch, self.seqlen, self.d_model)
        x, grad_out = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        return x.to(torch.bfloat16).requires_grad_(), grad_out.to(torch.bfloat16)

    def triton_call(self, device: torch.device) -> Callable[[], Any] | None:
        has_kernels = self.layer in ("Mamba2", "Mamba3") and self.recompute is None and self.layer in peers.layers()
        return functools.partial(self.call_peer, device) if has_kernels else None

    def call_peer(self, device: torch.device) -> None:
        self.call_layer(make_layers(self.layer, self.d_model, device, torch.bfloat16)[PEER], device)

    def call_layer(self, layer: nn.Module, device: torch.device) -> None:
        x, grad_out = self.tensors(device)
        with torch.no_grad():
            layer(x)
        torch.autograd.grad(layer(x), [x, *layer.parameters()], grad_out)

    def contest(self, run: Run) -> Contest:
        layers = make_layers(self.layer, self.d_model, run.device, torch.bfloat16, **self.options)
        if run.without_peers:
            layers = {"ours": layers["ours"]}
        if self.recompute is not None:
            layers = {"ours": layers["ours"]}
            layers["ours"].recompute = self.recompute  # type: ignore[assignment]
        x, grad_out = self.tensors(run.device)
        steps, tokens = min(COMPARED_STEPS, self.seqlen), self.batch * self.seqlen
        masked = torch.zeros_like(grad_out)
        masked[:1, :steps] = grad_out[:1, :steps]

        def contender(layer: nn.Module, x: Tensor, grad: Tensor) -> Contender:
            # The input's name differs between the layers.
            return Contender(lambda x: layer(x), {"x": x}, [grad], dict(layer.named_parameters()))

        def first(tensor: Tensor) -> Tensor:
            return tensor[:1, :steps] if tensor.shape == x.shape else tensor

        doubles = (first(tensor).detach().cpu().double() for tensor in (x, grad_out))
        exact = exact_of(
            (self.layer, self.batch, self.d_model, self.seqlen, *self.options.items()),
            lambda: contender(copy.deepcopy(layers["ours"]).cpu().double(), *doubles).results(),
        )

        def results(layer: nn.Module) -> dict[str, Tensor]:
            return {name: first(found) for name, found in contender(layer, x, masked).results().items()}

        def prepare(who: str, layer: nn.Module, figures: Figures) -> Mapping[str, Stages]:
            held, timed = held_bytes(layer, x), contender(layer, x, grad_out)
            figures["peak"] = timed.peak_bytes()
            figures["kept"] = kept_bytes(layer, x) / tokens
            figures["held"] = None if held is None else held / tokens
            return timed.stages("forward", "both")

        return Contest(layers, results, exact, prepare, self.allowed, {"tokens": tokens}, self.judges_others)


@dataclass(frozen=True)
class DeltaLayerCase(LayerCase):
    """The same of a layer of a delta rule, beside flash-linear-attention's: heads of keys / values, key_dim and value_dim."""

    layer: str = "GatedDeltaNet"
    seqlen: int = 4096
    heads: int = 6
    value_heads: int = 6
    key_dim: int = 256
    value_dim: int = 512
    kind = "delta rule layer"
    judges_others = False

    @property
    def name(self) -> str:
        return f"{super().name}, H{self.heads}/{self.value_heads} K{self.key_dim} V{self.value_dim}"

    @property
    def options(self) -> Mapping[str, Any]:
        sizes = {"num_heads": self.heads, "num_v_heads": self.value_heads, "head_dim": self.key_dim}
        return {**sizes, "expand_v": self.value_dim / self.key_dim}

    def triton_call(self, device: torch.device) -> Callable[[], Any] | None:
        return None if peers.layer_of_fla(self.layer) is None else functools.partial(self.call_peer, device)

    def call_peer(self, device: torch.device) -> None:
        self.call_layer(make_layers(self.layer, self.d_model, device, torch.bfloat16, **self.options)[FLA], device)


def layer_figures(row: Row, peer: str) -> dict[str, float]:
    """The speed-ups and the ratio of the peaks over the other's layer, and the largest error."""
    found = speedups(row, {peer: peer}, ("forward", "both"))
    ours, theirs = (median(row.get(who), "peak") for who in ("ours", peer))
    if ours and theirs:
        found[f"peak over {peer}"] = ours / theirs
    return found | {"largest error": max(errors_of(row).values())}


def layer_tables(title: str, rows: Sequence[Row], peer: str) -> list[Table]:
    """The times and the memory of ours beside the other's layer, and the errors of ours."""
    columns = [text("layer", "name")]
    for what, name in (("forward", "forward, ms"), ("both", "forward + backward, ms")):
        columns += [figure(name, "ours", what), *versus(peer, peer, what)]
    columns += [
        figure("peak, MB", "ours", "peak", 1e6, 0),
        figure(peer, peer, "peak", 1e6, 0),
        ratio("ratio", "peak", "ours", peer),
        figure("kept, kB", "ours", "kept", 1e3, 1),
    ]
    return [Table(title, columns, rows), largest_errors(rows, "name")]


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
class DecodeCase(PairedCase):
    """A decoding step of a layer in a CUDA graph of many, each of another layer with other states: caches do not help."""

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

    def triton_call(self, device: torch.device) -> Callable[[], Any] | None:
        return functools.partial(self.call_peer, device) if peers.layers() else None

    @torch.no_grad()
    def call_peer(self, device: torch.device) -> None:
        self.step_of(make_layers(self.layer, self.d_model, device, torch.bfloat16)[PEER], device)()

    @torch.no_grad()
    def contest(self, run: Run) -> Contest:
        layers = make_layers(self.layer, self.d_model, run.device, torch.bfloat16)
        rows = min(self.batch, 3)
        tensors = (tensor[:rows].cpu().double() for tensor in self.step_of(layers["ours"], run.device)[1:])
        names = ("out", "conv_state", "ssm_state")
        exact = dict(zip(names, copy.deepcopy(layers["ours"]).cpu().double().step(*tensors), strict=True))

        @torch.no_grad()
        def results(layer: Any) -> dict[str, Tensor]:
            found = layer.step(*self.step_of(layer, run.device)[1:])
            return {name: tensor[:rows] for name, tensor in zip(names, found, strict=True)}

        @torch.no_grad()
        def prepare(who: str, layer: nn.Module, figures: Figures) -> Mapping[str, Stages]:
            def make(seed: int) -> Step:
                return self.step_of(copy.deepcopy(layer) if seed else layer, run.device, seed)

            steps = run.sets(make, self.step_of(layer, run.device).nbytes)
            figures["step"] = run.time_graph(lambda step: step(), steps)
            return {}

        return Contest(layers, results, exact, prepare, self.allowed, {"sequences": self.batch})


@dataclass(frozen=True)
class LatencyCase(PairedCase):
    """A replay of a CUDA graph with the forward of two narrow layers on few steps, as real-time control runs them; float32."""

    d_model: int = 256
    seqlen: int = 32
    kind = "latency"

    @property
    def name(self) -> str:
        return f"two {self.layer} B1 T{self.seqlen} d_model {self.d_model} fp32"

    def allowed(self, result: str) -> float:
        return WRONG_FP32

    def triton_call(self, device: torch.device) -> Callable[[], Any] | None:
        return functools.partial(self.call_peer, device) if self.layer == "Mamba2" and peers.layers() else None

    @torch.no_grad()
    def call_peer(self, device: torch.device) -> None:
        layer = make_layers(self.layer, self.d_model, device, torch.float32)[PEER]
        layer(torch.randn(1, self.seqlen, self.d_model, device=device))

    @torch.no_grad()
    def contest(self, run: Run) -> Contest:
        pairs = [make_layers(self.layer, self.d_model, run.device, torch.float32) for _ in range(2)]
        models = {who: nn.Sequential(*(pair[who] for pair in pairs)) for who in pairs[0]}
        x = torch.randn(1, self.seqlen, self.d_model, generator=torch.Generator().manual_seed(1))
        exact = {"out": copy.deepcopy(models["ours"]).cpu().double()(x.double())}
        given = x.to(run.device)

        @torch.no_grad()
        def results(model: nn.Module) -> dict[str, Tensor]:
            return {"out": model(given)}

        @torch.no_grad()
        def prepare(who: str, model: nn.Module, figures: Figures) -> Mapping[str, Stages]:
            for _ in range(3):
                model(given)
            return {"replay": [graph_of(lambda: model(given), run.device)]}

        return Contest(models, results, exact, prepare, self.allowed, judges_others=False)


@dataclass(frozen=True)
class LanguageModelCase(PairedCase):
    """A language model, ours and mamba_ssm's with the same weights."""

    batch: int = 8
    d_model: int = 768
    n_layer: int = 24
    vocab_size: int = 50280

    def models(self, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
        torch.manual_seed(0)
        config = {"d_model": self.d_model, "n_layer": self.n_layer, "vocab_size": self.vocab_size}
        found: dict[str, nn.Module] = {"ours": MambaLM(MambaConfig(**config, mixer=self.layer), device=device, dtype=dtype)}
        make_peer = peers.language_model()
        if make_peer is not None:
            found[PEER] = make_peer(self.layer, config, device=device, dtype=dtype)
            share_weights(found["ours"], found[PEER])
        return found

    def tokens(self, count: int, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.vocab_size, (self.batch, count), generator=generator).to(device)

    def allowed(self, result: str) -> float:
        return WRONG_LOGITS

    def triton_call(self, device: torch.device) -> Callable[[], Any] | None:
        if peers.language_model() is None:
            return None
        # Two layers and two sequences have the kernels of all: the first layer adds no residual.
        return functools.partial(replace(self, n_layer=2, batch=min(self.batch, 2)).call_peer, device)

    def call_peer(self, device: torch.device) -> None:
        raise NotImplementedError

    @staticmethod
    @torch.no_grad()
    def exact_logits(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
        """The logits of the same model in float32."""
        return {"logits": copy.deepcopy(model).float()(tokens).logits.cpu().double()}


@dataclass(frozen=True)
class ModelCase(LanguageModelCase):
    """Forward and backward of a language model with float32 parameters under autocast; the optimizer does not run."""

    seqlen: int = 2048
    kind = "model"

    @property
    def name(self) -> str:
        return f"{self.layer} B{self.batch} L{self.seqlen}, {self.n_layer} layers, d_model {self.d_model}"

    @staticmethod
    def step(model: nn.Module, tokens: Tensor) -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        model.zero_grad(set_to_none=True)

    def call_peer(self, device: torch.device) -> None:
        model, tokens = self.models(device, torch.float32)[PEER], self.tokens(self.seqlen + 1, device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            model(tokens[:1, : min(512, self.seqlen)])
        self.step(model, tokens)

    def contest(self, run: Run) -> Contest:
        models, tokens = self.models(run.device, torch.float32), self.tokens(self.seqlen + 1, run.device)
        first = tokens[:1, : min(512, self.seqlen)]
        exact = self.exact_logits(models["ours"], first)

        def results(model: nn.Module) -> dict[str, Tensor]:
            with torch.no_grad(), torch.autocast(run.device.type, torch.bfloat16):
                return {"logits": model(first).logits}

        def prepare(who: str, model: nn.Module, figures: Figures) -> Mapping[str, Stages]:
            step = functools.partial(self.step, model, tokens)
            figures["peak"] = peak_bytes(step, run.device)
            return {"step": [step]}

        return Contest(models, results, exact, prepare, self.allowed, {"tokens": self.batch * self.seqlen})


@dataclass(frozen=True)
class GenerationCase(LanguageModelCase):
    """The most probable tokens after a prompt, the steps in a CUDA graph, in bfloat16; wall-clock time of the whole call."""

    batch: int = 1
    prompt: int = 1024
    new_tokens: int = 256
    kind = "generation"

    @property
    def name(self) -> str:
        return f"{self.layer} B{self.batch}, prompt {self.prompt}, {self.new_tokens} tokens, {self.n_layer} layers"

    def timing(self, run: Run) -> dict[str, Any]:
        """Uses the host's clock, from an idle device until the device is idle again."""
        return {"device": "cpu", "trials": min(run.trials, 4), "warmup": 0}  # `prepare` has called it

    @torch.no_grad()
    def call_peer(self, device: torch.device) -> None:
        model, prompt = self.models(device, torch.bfloat16)[PEER], self.tokens(self.prompt, device)
        model(prompt)
        model.generate(prompt, max_length=self.prompt + 2, top_k=1)

    def contest(self, run: Run) -> Contest:
        models, prompt = self.models(run.device, torch.bfloat16), self.tokens(self.prompt, run.device)
        exact = self.exact_logits(models["ours"], prompt)
        length = self.prompt + self.new_tokens

        @torch.no_grad()
        def results(model: nn.Module) -> dict[str, Tensor]:
            return {"logits": model(prompt).logits}

        def prepare(who: str, model: Any, figures: Figures) -> Mapping[str, Stages]:
            options = {"top_k": 1, "cg": True} if who == PEER else {"temperature": 0}

            def generate() -> Tensor:
                tokens = model.generate(prompt, max_length=length, **options)
                synchronize(run.device)
                return tokens

            tokens = generate()  # captures the graph
            assert tokens.shape == (self.batch, length) and torch.equal(tokens[:, : self.prompt], prompt)
            return {"generate": [generate]}

        return Contest(models, results, exact, prepare, self.allowed, {"tokens": self.batch * self.new_tokens})
