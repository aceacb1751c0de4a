#!/usr/bin/env python3
"""Models of transformers on these kernels, beside the models' own path in PyTorch and, where it imports, mamba_ssm.

    python benchmarks/bench_clients.py [--device cpu] [--json FILE] [--cases NAME ...] [--trials N]

Host times, from an idle device until it is idle again, of a forward, of forward and backward, and of 32 tokens generated with a
cache. Contenders share random weights: float32 on the CPU, bfloat16 on CUDA. Their logits are first compared with the model's
own path in float32. Exits with 1 if logits are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.benchmark import PEER, Benchmark, Case, Contest, Result, Run, main, speedups
from benchmarks.harness import Stages, synchronize
from benchmarks.tables import Column, Table, figure, text, versus
from ssm_kernels.integrations.transformers import patched

OWN = "PyTorch"
WHATS = {"forward": "forward", "both": "forward + backward", "generate": "generation"}
LAYERS, PROMPT, NEW_TOKENS = 4, 16, 32
ROUNDING = 8  # the limit on the relative error of logits, in units of the dtype's epsilon, for each layer
Functions = Mapping[str, Callable[..., Any]]


def configurations(hidden: int) -> dict[str, dict[str, Any]]:
    """Returns each model's options other than its sizes, in the order of the tables."""
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 2 * hidden}
    hybrid = attention | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}
    heads = {"mamba_n_heads": hidden // 32, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_chunk_size": 128}
    nemotron = {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "head_dim": hidden // 4, "ssm_state_size": 64}
    granite = {"layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 0}
    return {
        "mamba": {"state_size": 16},
        "falcon_mamba": {"state_size": 16},
        "jamba": attention | {"num_experts": 1, "attn_layer_period": 4, "attn_layer_offset": 1},
        "zamba": hybrid,
        "mamba2": {"num_heads": hidden // 32, "n_groups": 1, "chunk_size": 128, "state_size": 64},
        "bamba": attention | heads | {"attn_layer_indices": [1]},
        "zamba2": hybrid | {"n_mamba_heads": hidden // 32, "chunk_size": 128},
        "nemotron_h": attention | nemotron | {"mamba_num_heads": hidden // 32, "mamba_head_dim": 64, "n_groups": 1},
        "falcon_h1": attention | heads | {"mamba_d_ssm": 2 * hidden},
        "granitemoehybrid": attention | heads | granite,
    }


def contenders(module: Any) -> dict[str, Functions]:
    """The functions that a modeling module calls, by contender."""
    found = {name: value for name, value in vars(module).items() if hasattr(value, "__wrapped__") and inspect.isfunction(value)}
    with patched():
        ours = {name: getattr(module, name) for name, value in found.items() if getattr(module, name) is not value}
    theirs = {name: found[name] for name in ours}
    own = {name: value.__wrapped__ for name, value in theirs.items()}
    # Where mamba_ssm imports, transformers took its functions as the module was imported.
    return {"ours": ours, OWN: own} | ({PEER: theirs} if torch.cuda.is_available() and peers.layers() else {})


@dataclass(frozen=True)
class ModelCase(Case):
    """A model with four layers."""

    model: str  # its type, in transformers
    batch: int = 2
    hidden: int = 128
    seqlen: int = 512

    @property
    def name(self) -> str:
        return f"{self.model} B{self.batch} L{self.seqlen}, {LAYERS} layers of {self.hidden}"

    def timing(self, run: Run) -> dict[str, Any]:
        return {"device": "cpu"}

    def make(self, module: Any) -> Any:
        # Not by AutoModelForCausalLM: other packages put their own classes there.
        (make_model,) = (value for name, value in vars(module).items() if name.endswith("ForCausalLM"))
        sizes = {"hidden_size": self.hidden, "num_hidden_layers": LAYERS, "vocab_size": 1024, "pad_token_id": 0}
        torch.manual_seed(0)
        model = make_model(make_model.config_class(**sizes, **configurations(self.hidden)[self.model])).eval()
        model.generation_config.eos_token_id = None
        return model

    def contest(self, run: Run) -> Contest:
        module = importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        found, exact = contenders(module), self.make(module)
        dtype = torch.float32 if run.device.type == "cpu" else torch.bfloat16
        model = copy.deepcopy(exact).to(run.device, dtype)
        ids = (tokens := torch.randint(3, 1024, (self.batch, self.seqlen))).to(run.device)

        def use(functions: Functions, *, training: bool = False) -> None:
            model.train(training)  # mamba_ssm's fused functions are for training
            for name, function in functions.items():
                setattr(module, name, function)

        def logits(functions: Functions, of: Any = model, ids: Tensor = ids) -> Tensor:
            use(functions)
            with torch.no_grad():
                return of(ids, use_cache=False).logits

        def both(functions: Functions) -> None:
            use(functions, training=True)
            model.zero_grad(set_to_none=True)
            model(ids, use_cache=False).logits.float().sum().backward()

        def generate(functions: Functions) -> None:
            use(functions)
            model.generate(ids[:, :PROMPT], max_new_tokens=NEW_TOKENS, do_sample=False)

        def prepare(who: str, functions: Functions, figures: dict[str, Any]) -> Mapping[str, Stages]:
            calls = {"forward": logits, "both": both, "generate": generate}
            return {what: [lambda call=call: (call(functions), synchronize(run.device))] for what, call in calls.items()}

        wanted, allowed = logits(found[OWN], exact, tokens).double(), ROUNDING * LAYERS * torch.finfo(dtype).eps
        return Contest(found, lambda of: {"logits": logits(of)}, {"logits": wanted}, prepare, lambda name: allowed)


def cases(options: argparse.Namespace) -> list[ModelCase]:
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit('bench_clients.py: expected transformers to be installed: pip install -e ".[clients]"')
    sizes = {} if options.device == "cpu" else {"batch": 4, "hidden": 1024, "seqlen": 1024}
    return [ModelCase(model, **sizes) for model in configurations(1)]


def versions(run: Run) -> dict[str, Any]:
    """The settings: the versions of the packages that are compared."""
    found = {}
    for package in ("transformers", "mamba_ssm", "causal_conv1d"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {"settings": {"versions": found}}


def tables(result: Result) -> list[Table]:
    def columns(what: str) -> list[Column]:
        others = [name for name in (OWN, PEER) if any(name in row for row in result["rows"])]
        compared = [column for name in others for column in versus(name, name, what)]
        return [text("model", "name"), figure("ours", "ours", what), *compared]

    return [Table(f"{title}, milliseconds", columns(what), result["rows"]) for what, title in WHATS.items()]


BENCHMARK = Benchmark(
    "clients",
    cases,
    tables,
    lambda row, result: speedups(row, {OWN: OWN, PEER: PEER}, WHATS),
    trials=5,
    warmup=1,
    context=versions,
    add_options=lambda parser: parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
