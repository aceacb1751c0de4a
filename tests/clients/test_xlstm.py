"""transformers' xLSTM: mlstm_scan beside its functions in plain PyTorch, and models on these kernels beside their own path."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from mlstm_helpers import SEQUENCES, make_inputs
from torch import Tensor

pytest.importorskip("transformers", reason="the tests run models of transformers, in the extra [clients]")

import transformers
from transformers_models import (
    VOCABULARY,
    close,
    counting,
    counting_compiled,
    distance,
    logits_and_gradients,
    tokens,
    without_tf32,  # noqa: F401
)

from ssm_kernels import mlstm_scan
from ssm_kernels.integrations.transformers import patched, served

CLIENT = "transformers"
OPERATOR = "mlstm_scan"

xlstm = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
LAYERS, SEQLEN, NEW = 2, 37, 6
FORWARD = Counter({"_mlstm_scan_fwd": LAYERS})
TRAINING = FORWARD + Counter({"_mlstm_scan_bwd": LAYERS})
STEP = Counter({"mlstm_step": LAYERS})
# Each step of each layer rounds two recurrences, the memory and its normalizer.
ROUNDING = 2 * LAYERS * SEQLEN * torch.finfo(torch.float32).eps

# In transformers 4.57 chunks raise errors in the models' own path.
own_models = pytest.mark.skipif(
    not hasattr(xlstm, "xLSTMBackend") or transformers.__version__.startswith("4."),
    reason="transformers 4, or a package xlstm whose layers take the place of transformers'",
)


@pytest.mark.parametrize("initial_states", [False, True])
def test_recurrent_function(initial_states, device):
    """Outputs, states and the gradients of the outputs, without eps, through which alone they depend on the unit."""
    if not hasattr(xlstm, "mlstm_recurrent_sequence_native"):
        pytest.skip("the package xlstm takes the place of these functions")
    inputs = make_inputs(seqlen=70, key_dim=8, value_dim=12, initial_states=initial_states, device=device)
    leaves = {name: inputs[name].clone().requires_grad_() for name in SEQUENCES}
    states, theirs = None, {}
    if initial_states:
        C, n, m = states = tuple(inputs[f"initial_{name}"] for name in "Cnm")
        theirs = {"c_initial": C.transpose(2, 3), "n_initial": n, "m_initial": m[..., None]}
    out, (C, n, m) = mlstm_scan(**leaves, eps=0.0, initial_states=states, return_final_states=True)

    def head_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    expected, last = xlstm.mlstm_recurrent_sequence_native(
        *(head_first(leaves[name]) for name in SEQUENCES),
        **theirs,
        return_last_states=True,
        eps=0.0,
        dtype_state=torch.float64,
    )
    torch.testing.assert_close(out, head_first(expected).to(out.dtype), rtol=1e-5, atol=1e-7)
    # In units of the largest of both.
    unit = torch.maximum(m, last[2].squeeze(-1))
    for actual, wanted in ((C, last[0].transpose(2, 3)), (n, last[1])):
        shape = (..., *(None,) * (actual.dim() - 2))
        own, other = actual * (m - unit).exp()[shape], wanted * (last[2].squeeze(-1) - unit).exp()[shape]
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-10)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(device)
    of_ours = torch.autograd.grad(out, [*leaves.values()], weights)
    of_theirs = torch.autograd.grad(expected, [*leaves.values()], head_first(weights).to(expected.dtype))
    for name, actual, wanted in zip(leaves, of_ours, of_theirs, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def make_model(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A small random model in evaluation mode; the same weights at every call.

    A cache of the model rounds the sizes of queries and values up to multiples of 64.
    """
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": LAYERS, "num_heads": 4, "chunk_size": 16}
    torch.manual_seed(0)
    model = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**sizes | options))
    with torch.no_grad():
        for parameter in model.parameters():  # initial gates have weights of zero
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config.eos_token_id = None
    return model.to(device, dtype).eval()


@own_models
@pytest.mark.serves("training", model="xLSTM")
@pytest.mark.parametrize("options", [{}, {"mode": "train", "chunk_size": SEQLEN}])
def test_logits_and_gradients_equal_the_models_own_path(options: dict[str, Any], device: str) -> None:
    net, ids = make_model(device, **options), tokens(2, SEQLEN, device)
    expected = logits_and_gradients(net, ids)
    assert set(expected) == {"logits", *(name for name, _ in net.named_parameters())}
    with patched(), counting() as calls:
        actual = logits_and_gradients(net, ids)
    assert calls == TRAINING
    for name, value in actual.items():
        close(value, expected[name], ROUNDING, name)


@own_models
def test_training_at_a_length_that_chunks_do_not_divide(device: str) -> None:
    """The models' own path raises an error in this mode."""
    net, ids = make_model(device, mode="train"), tokens(1, SEQLEN, device)
    expected = logits_and_gradients(make_model(device), ids)
    with patched():
        actual = logits_and_gradients(net, ids)
    for name, value in actual.items():
        close(value, expected[name], ROUNDING, name)


@own_models
@pytest.mark.serves("cached generation", model="xLSTM")
def test_cached_generation_equals_uncached_and_the_models_own(device: str) -> None:
    net, ids = make_model(device), tokens(2, SEQLEN - NEW, device)
    options = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = net.generate(ids, use_cache=True, **options)
    with patched():
        with counting() as calls:
            cached = net.generate(ids, use_cache=True, **options)
        assert calls == FORWARD + Counter({"mlstm_step": LAYERS * (NEW - 1)})
        with counting() as calls:
            uncached = net.generate(ids, use_cache=False, **options)
        assert calls == Counter({"_mlstm_scan_fwd": LAYERS * NEW})
    assert torch.equal(cached.sequences, expected.sequences)
    assert torch.equal(cached.sequences, uncached.sequences)
    for step in range(NEW):
        close(cached.logits[step], expected.logits[step], ROUNDING)
        close(cached.logits[step], uncached.logits[step], ROUNDING)


@own_models
def test_a_prompt_in_parts(device: str) -> None:
    """Calls of several tokens continue the cache, and so do the parts of a long prompt."""
    net, ids = make_model(device), tokens(2, SEQLEN, device)
    in_parts = make_model(device, max_inference_chunksize=10)
    with torch.no_grad(), patched():
        expected = net(ids, use_cache=False).logits
        first = net(ids[:, :20], use_cache=True)
        name = "cache" if hasattr(first, "cache") else "cache_params"  # by the version of transformers
        rest = net(ids[:, 20:], **{name: getattr(first, name)}, use_cache=True).logits
        with counting() as calls:
            parts = in_parts(ids).logits
    assert calls == Counter({"_mlstm_scan_fwd": 4 * LAYERS})
    close(torch.cat([first.logits, rest], 1), expected, ROUNDING)
    close(parts, expected, ROUNDING)


@own_models
@pytest.mark.serves("bf16", model="xLSTM")
def test_bfloat16_is_as_close_to_float32_as_the_models_own_path(device: str) -> None:
    # The models' own chunks multiply bf16 by float32, which is an error: shorter sequences than a chunk take their loop.
    options = {"chunk_size": 64}
    net, ids = make_model(device, torch.bfloat16, **options), tokens(2, SEQLEN, device)
    exact = make_model(device, **options).to(torch.bfloat16).float()  # the same rounded weights
    with torch.no_grad():
        expected, own = exact(ids, use_cache=False).logits, net(ids, use_cache=False).logits
        with patched(), counting() as calls:
            actual = net(ids, use_cache=False).logits
            cached = net.generate(ids, max_new_tokens=3, do_sample=False)
    assert cached.shape == (2, SEQLEN + 3)
    assert calls == FORWARD + FORWARD + STEP + STEP and actual.dtype == own.dtype
    # Twice PyTorch's error and the rounding of the result, as everywhere.
    close(actual, expected, 2 * distance(own, expected) + torch.finfo(torch.bfloat16).eps)


@own_models
@pytest.mark.serves("torch.compile", model="xLSTM")
def test_compile_fullgraph(device: str) -> None:
    net, ids = make_model(device), tokens(2, SEQLEN, device)
    expected = logits_and_gradients(net, ids)
    torch._dynamo.reset()
    with patched():
        compiled = torch.compile(net, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        logits_and_gradients(compiled, ids)
        net.zero_grad()
        with counting_compiled() as calls:
            actual = logits_and_gradients(compiled, ids)
    assert calls["_mlstm_scan_fwd"] == calls["_mlstm_scan_bwd"] == LAYERS
    for name, value in actual.items():
        close(value, expected[name.removeprefix("_orig_mod.")], ROUNDING, name)


def make_backend(**options: Any) -> Any:
    return xlstm.xLSTMBackend(transformers.xLSTMConfig(hidden_size=64, num_heads=2, chunk_size=16, **options))


def call_of(seqlen: int, key_dim: int = 8, value_dim: int = 12) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, 2, *shape, generator=source)

    gates = {"igate": draw(seqlen), "fgate": draw(seqlen) + 2}
    states = {"c_initial": draw(key_dim, value_dim), "n_initial": draw(key_dim), "m_initial": draw(1)}
    return {"query": draw(seqlen, key_dim), "key": draw(seqlen, key_dim), "value": draw(seqlen, value_dim)} | gates | states


@own_models
@pytest.mark.parametrize("seqlen", [1, 16])
def test_the_backend_alone(seqlen: int) -> None:
    """The same results and shapes as the original, in each mode. The initial states keep their values."""
    call = call_of(seqlen)
    for options in ({}, {"mode": "train"}) if seqlen > 1 else ({}, {"inference_state_dtype": "bfloat16"}):
        backend = make_backend(**options)
        h, states = backend(**call)
        copies = {name: value.clone() for name, value in call.items()}
        with patched(), counting() as calls:
            own_h, own_states = backend(**copies)
            without = backend(**copies, mode="train", return_last_states=False)
        assert calls == Counter({"mlstm_step" if seqlen == 1 else "_mlstm_scan_fwd": 2})
        assert all(torch.equal(value, call[name]) for name, value in copies.items())
        assert torch.equal(without, own_h)
        rounding = 1e-6 if "inference_state_dtype" not in options else 0.01  # the original rounds before it reads
        close(own_h, h, rounding)
        for own, state in zip(own_states, states, strict=True):
            if options.get("mode") is None:  # in training the original returns slices of the states of chunks
                assert (own.shape, own.dtype) == (state.shape, state.dtype)
                close(own, state, rounding)
    with patched(), pytest.raises(ValueError, match="Unknown mode: other"):
        make_backend()(**call, mode="other")


@own_models
def test_a_token_that_needs_gradients_takes_the_scan() -> None:
    call = call_of(1)
    call["query"].requires_grad_()
    with patched(), counting() as calls:
        make_backend()(**call)[0].sum().backward()
    assert calls == Counter({"_mlstm_scan_fwd": 1, "_mlstm_scan_bwd": 1})


@own_models
def test_heads_with_many_query_channels_keep_the_original() -> None:
    backend, call = make_backend(), call_of(16, key_dim=257)
    expected = backend(**call)[0]
    with patched() as report, counting() as calls:
        assert report.modules["transformers.models.xlstm.modeling_xlstm.xLSTMBackend"] == {"forward": "mlstm_scan"}
        actual = backend(**call)[0]
    assert torch.equal(actual, expected) and not calls
    assert not served().modules
