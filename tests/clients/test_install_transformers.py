"""transformers' models on ssm_kernels.compat, in a process that installs it before it imports a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or newer: the extra [clients]")

CLIENT = "transformers"
ROOT = Path(__file__).resolve().parents[2]

# Prints for each model the logits, the gradients, the tokens of greedy generation with and without a cache, and the calls.
PROGRAM = """
import collections, json, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if sys.argv[1] == "installed":
    import ssm_kernels.compat

    ssm_kernels.compat.install()
import transformers

transformers.logging.set_verbosity_error()
SMALL = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=None)
CONFIGS = {
    "Mamba": dict(state_size=8),
    "Mamba2": dict(state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=16),
}

class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "ssm_kernels":
            self.calls[function._schema.name.split("::")[1]] += 1
        return function(*args, **(kwargs or {}))

reports = {}
for name, options in CONFIGS.items():
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**SMALL, **options)
    model = getattr(transformers, name + "ForCausalLM")(config).double()
    tokens = torch.randint(2, 49, (2, 21), generator=torch.Generator().manual_seed(1))
    report = reports[name] = {}
    with Count() as count:
        logits = model(tokens).logits
        logits.square().mean().backward()
    report["training"] = count.calls
    report["logits"] = logits.detach().tolist()
    report["gradients"] = {key: parameter.grad.tolist() for key, parameter in model.named_parameters()}
    model.eval()
    with Count() as count:
        cached = model.generate(tokens, max_new_tokens=6, do_sample=False)
    report["generation"] = count.calls
    uncached = tokens
    with torch.no_grad():
        for _ in range(cached.shape[1] - tokens.shape[1]):
            new = model(uncached, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            uncached = torch.cat([uncached, new], dim=1)
    report["cached"], report["uncached"] = cached.tolist(), uncached.tolist()
print(json.dumps(reports))
"""
# Calls of a training step of two layers. The steps of the cache are those after the prompt: 5 of 6 tokens.
TRAINING = {
    "Mamba": {"_causal_conv1d": 2, "_selective_scan": 2},
    "Mamba2": {"_causal_conv1d": 2, "_ssd_chunk_scan": 2, "_norm_gated": 2},
}


def run(installed: str) -> dict:
    result = subprocess.run([sys.executable, "-c", PROGRAM, installed], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reports_of_models() -> tuple[dict, dict]:
    """With our operators, and with transformers' own path."""
    return run("installed"), run("not installed")


@pytest.fixture(params=TRAINING)
def model(request) -> str:
    return request.param


@pytest.fixture
def reports(model, reports_of_models) -> list[dict]:
    return [of_models[model] for of_models in reports_of_models]


@pytest.mark.serves("logits and gradients")
def test_logits_and_gradients(model, reports):
    ours, theirs = reports
    assert not theirs["training"]
    expected = {f"{name}_{direction}": calls for name, calls in TRAINING[model].items() for direction in ("fwd", "bwd")}
    assert ours["training"] == expected
    torch.testing.assert_close(ours["logits"], theirs["logits"], rtol=1e-5, atol=1e-6)
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for name, gradient in ours["gradients"].items():
        torch.testing.assert_close(gradient, theirs["gradients"][name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.serves("cached generation")
def test_cached_generation(model, reports):
    ours, theirs = reports
    assert ours["cached"] == ours["uncached"] == theirs["uncached"]
    steps = len(ours["cached"][0]) - 21 - 1
    assert steps == 5
    assert ours["generation"]["selective_state_update"] == ours["generation"]["causal_conv1d_update"] == 2 * steps
