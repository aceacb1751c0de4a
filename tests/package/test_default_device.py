"""Layers and models on data that is not on the default device. ``meta`` stands in for any other device on a CPU."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_helpers import HIDDEN, IN, assert_all_close, decode, every_layer, every_recurrence, make_layer, make_sequence, run
from layer_helpers import width_of as width
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ssm_kernels
from ssm_kernels.models import MambaConfig, MambaLM

# The functions of torch that make a tensor on the default device unless they are told one.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones"),
    *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def test_every_tensor_is_made_on_a_named_device():
    package, missing = Path(ssm_kernels.__file__).parent, []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_factory = ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES
            if is_factory and not {"device", None} & {keyword.arg for keyword in node.keywords}:
                missing.append(f"{path.relative_to(package)}:{node.lineno}")
    assert missing == []


def under_other_device(call: Any) -> Any:
    with torch.device("meta"):
        return call()


@every_layer
def test_layers(name):
    layer = make_layer(name)
    x = make_sequence(2, 5, width(layer))
    with torch.no_grad():
        for function in (run, decode):
            assert_all_close(under_other_device(lambda function=function: function(layer, x)), function(layer, x), 0, 0)


@pytest.mark.parametrize("enforce_sorted", [True, False])
@every_recurrence
def test_packed_sequences(name, enforce_sorted):
    """As torch.nn.GRU, whose data may be on any device. Also with lengths, resets and cu_seqlens."""
    layer = make_layer(name, bidirectional=True)
    packed = pack_sequence([make_sequence(n, IN, seed=n) for n in (5, 3, 1)], enforce_sorted=enforce_sorted)
    hx, x = make_sequence(4, 3, HIDDEN), make_sequence(5, 3, IN)
    for call in (
        lambda: layer(packed),
        lambda: layer(packed, hx),
        lambda: layer(x, hx, lengths=[5, 0, 2]),
        lambda: layer(x, hx, reset=x[..., 0] > 1),
        lambda: layer(x[:, :1], hx, cu_seqlens=packed.batch_sizes.new_tensor([0, 2, 3, 5])),
    ):
        results, expected = under_other_device(call), call()
        outputs = [r[0].data if isinstance(r[0], PackedSequence) else r[0] for r in (results, expected)]
        assert_all_close((outputs[0], results[1]), (outputs[1], expected[1]), 0, 0)


def test_models():
    model = MambaLM(MambaConfig(d_model=8, n_layer=2, vocab_size=16, pad_vocab_size_multiple=1), device="cpu")
    ids = torch.arange(6, device="cpu")[None]
    call = lambda: model.generate(ids, max_length=9, top_k=1)  # noqa: E731
    assert torch.equal(under_other_device(call), call())


@pytest.mark.cuda
@every_recurrence
def test_default_cuda_device(name):
    """CPU data where the default device is CUDA, and CUDA data where it is the CPU."""
    for default, device in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")):
        layer = make_layer(name, device)
        packed = pack_sequence([make_sequence(n, IN, device=device, seed=n) for n in (5, 3, 1)])
        expected = layer(packed)
        torch.set_default_device(default)
        try:
            output, h_n = layer(packed)
        finally:
            torch.set_default_device(None)
        assert_all_close((output.data, h_n), (expected[0].data, expected[1]), 0, 0)
