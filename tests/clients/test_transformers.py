"""Models of transformers on these kernels against their own path, with the same weights.

A silent fallback to that path would pass every comparison. Each test therefore also counts the calls of the kernels: exactly
those that the configuration asks for.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="the tests run models of transformers, in the extra [clients]")

from transformers_models import (
    CONV,
    CONV_STEP,
    DELTA_MODELS,
    MODELS,
    SCAN,
    SSD,
    STEP,
    backward,
    close,
    counting,
    counting_compiled,
    distance,
    logits_and_gradients,
    rounding,
    tokens,
    trained,
    without_tf32,  # noqa: F401
)

from ssm_kernels.integrations._transformers_mixers import calls_dt_proj
from ssm_kernels.integrations.transformers import patched, served

CLIENT, OPERATOR = "transformers", "ssd_chunk_scan"
SEQLEN, NEW = 37, 6
models = pytest.mark.parametrize("model", MODELS)
packing = pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.serves(of.packs_as)) for name, of in MODELS.items() if of.packs is not None]
)


@pytest.mark.serves("training")
@models
def test_logits_and_gradients_equal_the_models_own_path(model: str, device: str) -> None:
    of = MODELS[model]
    net, ids = of.make(device), tokens(2, SEQLEN, device)
    expected = logits_and_gradients(net, ids)
    assert set(expected) == {"logits", *trained(net)}
    with patched(), counting() as calls:
        actual = logits_and_gradients(net, ids)
    assert calls == of.training_calls()
    assert set(actual) == set(expected)
    for name, value in actual.items():
        close(value, expected[name], rounding(of, SEQLEN), name)


class Int8Linear(torch.nn.Module):
    """A linear layer with int8 weights, by which one cannot multiply."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight * self.scale, self.bias)


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("model", ["Mamba", "FalconMamba", "Jamba"])
def test_a_quantized_dt_proj(model: str, is_marked: bool, device: str) -> None:
    of, ids = MODELS[model], tokens(2, SEQLEN, device)
    net, exact = of.make(device), of.make(device)
    if is_marked:
        net.config._is_quantized = True
    for mixer, rounded in zip(net.modules(), list(exact.modules()), strict=False):
        if hasattr(mixer, "dt_proj"):
            mixer.dt_proj = Int8Linear(mixer.dt_proj)
            rounded.dt_proj.weight.data = mixer.dt_proj.weight * mixer.dt_proj.scale
    expected = logits_and_gradients(exact, ids)
    with patched(), counting() as calls:
        actual = logits_and_gradients(net, ids)
        tokens_of_net = net.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert calls == of.training_calls() + of.calls(1, steps=NEW - 1)
    assert torch.equal(tokens_of_net, exact.generate(ids, max_new_tokens=NEW, do_sample=False))
    assert {name for name in expected if not name.endswith("dt_proj.weight")} == set(actual)
    for name, value in actual.items():
        close(value, expected[name], rounding(of, SEQLEN), name)


class OnlyLinear(torch.Tensor):
    """A quantized weight as a tensor subclass: ``linear`` is its only product."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("matmul", "__matmul__"):
            raise NotImplementedError
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if func is torch.nn.functional.linear else out


def test_a_quantized_weight_of_dt_proj(device: str) -> None:
    of, ids = MODELS["Mamba"], tokens(2, SEQLEN, device)
    net = of.make(device)
    with patched(), torch.no_grad():
        expected = net(ids, use_cache=False).logits
        for mixer in net.modules():
            if hasattr(mixer, "dt_proj"):
                mixer.dt_proj.weight = torch.nn.Parameter(mixer.dt_proj.weight.detach().as_subclass(OnlyLinear))
        actual = net(ids, use_cache=False).logits
    close(actual, expected, rounding(of, SEQLEN))


@pytest.mark.parametrize("model", ["Mamba", "FalconMamba", "Jamba"])
def test_a_plain_dt_proj_is_not_called(model: str) -> None:
    net = MODELS[model].make()
    mixers = [module for module in net.modules() if hasattr(module, "dt_proj")]
    assert mixers and not any(calls_dt_proj(mixer) for mixer in mixers)


@pytest.mark.serves("left padding")
@models
def test_left_padding_equals_the_models_own_path(model: str, device: str) -> None:
    of = MODELS[model]
    net, ids = of.make(device), tokens(2, SEQLEN, device)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    expected = logits_and_gradients(net, ids, attention_mask=mask)
    with patched(), counting() as calls:
        actual = logits_and_gradients(net, ids, attention_mask=mask)
        with torch.no_grad():
            alone = net(ids[:1, 11:], use_cache=False)[0]
    assert calls == of.training_calls() + of.calls(1)
    for name, value in actual.items():
        if name != "logits":
            close(value, expected[name], rounding(of, SEQLEN), name)
    for row, first in ((0, 11), (1, 0)):
        close(actual["logits"][row, first:], expected["logits"][row, first:], rounding(of, SEQLEN))
    close(actual["logits"][:1, 11:], alone, rounding(of, SEQLEN))


@pytest.mark.serves("cached generation")
@pytest.mark.parametrize("model", [name for name, of in MODELS.items() if of.head is None])
def test_cached_generation_equals_uncached_and_the_models_own(model: str, device: str) -> None:
    of = MODELS[model]
    net, ids = of.make(device), tokens(2, 9, device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = net.generate(ids, use_cache=True, **options)
    with patched():
        with counting() as calls:
            cached = net.generate(ids, use_cache=True, **options)
        assert calls == of.calls(1, steps=NEW - 1)
        with counting() as calls:
            uncached = net.generate(ids, use_cache=False, **options)
        assert calls == of.calls(NEW)
    assert torch.equal(cached.sequences, expected.sequences)
    assert torch.equal(cached.sequences, uncached.sequences)
    for step in range(NEW):
        close(cached.logits[step], expected.logits[step], rounding(of, 9 + NEW))
        close(cached.logits[step], uncached.logits[step], rounding(of, 9 + NEW))


@pytest.mark.parametrize("by", ["seq_idx", "cu_seqlens"])
@packing
def test_packed_sequences_equal_separate_ones(model: str, by: str, device: str) -> None:
    of, lengths = MODELS[model], (9, 1, 20, 7)
    assert of.packs is not None
    net = of.make(device, **of.packs).base_model  # Mamba2ForCausalLM does not pass seq_idx on
    parts = [tokens(1, length, device, seed) for seed, length in enumerate(lengths)]
    ids = torch.cat(parts, dim=1)
    seq_idx = torch.repeat_interleave(torch.arange(4, device=device), torch.tensor(lengths, device=device))[None].int()
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    packing = {"seq_idx": seq_idx} if by == "seq_idx" else {"cu_seqlens": cu_seqlens}
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    with patched():
        with counting() as calls:
            packed = logits_and_gradients(net, ids, **packing, position_ids=positions)
        assert calls == of.training_calls()
        net.train().zero_grad()
        hidden = torch.cat([net(part, use_cache=False)[0] for part in parts], dim=1)
        backward(hidden)
    close(packed["logits"], hidden, rounding(of, SEQLEN))
    for name, parameter in net.named_parameters():
        close(packed[name], parameter.grad, rounding(of, SEQLEN), name)


HYBRIDS = ("Bamba", "Zamba2", "NemotronH", "FalconH1")


@pytest.mark.parametrize("by", ["seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("model", HYBRIDS)
def test_hybrids_refuse_packing_that_attention_would_mix(model: str, by: str) -> None:
    """The result of the one call that they take is that of separate sequences; the others differ from it without patch()."""
    net, ids = MODELS[model].make("cpu").base_model.train(), tokens(1, 16, "cpu")
    seq_idx, positions = (torch.arange(16) >= 9).int()[None], torch.cat([torch.arange(9), torch.arange(7)])[None]
    packing = {"seq_idx": seq_idx} if by == "seq_idx" else {"cu_seqlens": torch.tensor([0, 9, 16])}
    right = {"position_ids": positions, "use_cache": False}
    own = torch.ones(1, 1, 16, 16).tril().bool() & (seq_idx[:, None, :, None] == seq_idx[:, None, None, :])
    with patched(), torch.no_grad():
        out = net(ids, **packing, **right)[0]
        close(out[:, 9:], net(ids[:, 9:], use_cache=False)[0], rounding(MODELS[model], 16))
        # A mask of four dimensions is the caller's own.
        close(net(ids, **packing, **right, attention_mask=own)[0][:, 9:], out[:, 9:], rounding(MODELS[model], 16))
        for wrong, words in (
            ({"use_cache": None}, "expected use_cache=False"),
            ({"use_cache": True}, "expected use_cache=False"),
            ({"attention_mask": torch.ones_like(ids)}, "expected no attention_mask"),
            ({"position_ids": None}, "expected position_ids that restart"),
            ({"position_ids": torch.arange(16)[None]}, "got some that go on"),
        ):
            with pytest.raises(ValueError, match=f"{words}.*otherwise attention mixes the sequences that {by} packs"):
                net(ids, **packing, **right | wrong)
    assert "packing" not in str(served())


def test_granite_refuses_packing_without_flash_attention() -> None:
    net, ids = MODELS["GraniteMoeHybrid"].make("cpu").base_model, tokens(1, 16, "cpu")
    positions, seq_idx = torch.arange(16)[None] % 8, torch.arange(16)[None] // 8
    with patched(), pytest.raises(ValueError, match="GraniteMoeHybridModel: expected FlashAttention"):
        net(ids, seq_idx=seq_idx.int(), position_ids=positions, use_cache=False)


def test_the_convolution_of_mambas_kind_refuses_packed_sequences(device: str) -> None:
    """Zamba's mixer passes seq_idx to the convolution only: its scan would continue the state of the sequence before."""
    net = MODELS["Zamba"].make(device)
    mixer = next(module for module in net.modules() if type(module).__name__ == "ZambaMambaMixer")
    seq_idx = (torch.arange(SEQLEN, device=device) > 10).int()[None]
    with patched(), pytest.raises(NotImplementedError, match="causal_conv1d_fn: seq_idx is not supported"):
        mixer(torch.zeros(1, SEQLEN, 32, device=device), seq_idx=seq_idx)


@pytest.mark.parametrize("model", ["Mamba", "FalconMamba", "Jamba", "Zamba", "Mamba2"])
def test_models_that_drop_packed_sequences_refuse_them(model: str) -> None:
    net, ids = MODELS[model].make("cpu"), tokens(1, 16, "cpu")
    packings = {"seq_idx": torch.arange(16)[None].int() // 8, "cu_seqlens": torch.tensor([0, 8, 16])}
    with patched(), torch.no_grad():
        for by, packing in packings.items():
            for owner in (net,) if model == "Mamba2" else (net, net.base_model):
                words = f"{type(owner).__name__}: {by} is not supported, because transformers does not pass it to the mixers"
                with pytest.raises(NotImplementedError, match=words):
                    owner(ids, **{by: packing}, use_cache=False)
        net(ids, seq_idx=None, use_cache=False)


def test_a_step_refuses_packed_sequences(device: str) -> None:
    net, ids = MODELS["Mamba2"].make(device).base_model, tokens(1, SEQLEN, device)
    with patched(), torch.no_grad():
        cache = net(ids, use_cache=True).cache_params
        with pytest.raises(NotImplementedError, match="selective_state_update: seq_idx is not supported: a decoding step"):
            net(ids[:, :1], cache_params=cache, use_cache=True, seq_idx=torch.zeros(1, 1, dtype=torch.int32, device=device))


@pytest.mark.serves("bf16")
@models
def test_bfloat16_is_as_close_to_float32_as_the_models_own_path(model: str, device: str) -> None:
    of = MODELS[model]
    ids = tokens(2, SEQLEN, device)
    net = of.make(device, torch.bfloat16)
    exact = of.make(device).to(torch.bfloat16).float()  # the same rounded weights
    with torch.no_grad():
        expected, own = exact(ids, use_cache=False)[0], net(ids, use_cache=False)[0]
        with patched(), counting() as calls:
            actual = net(ids, use_cache=False)[0]
            if net.can_generate():
                cached = net.generate(ids, max_new_tokens=3, do_sample=False)
                assert cached.shape == (2, SEQLEN + 3)
    assert actual.dtype == own.dtype
    assert calls == (of.calls(2, steps=2) if net.can_generate() else of.calls(1))
    # Twice PyTorch's error and the rounding of the result, as everywhere.
    close(actual, expected, 2 * distance(own, expected) + torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("model", ["Mamba", "Mamba2"])
def test_autocast_and_checkpointing(model: str, device: str) -> None:
    of = MODELS[model]
    net, ids = of.make(device), tokens(2, SEQLEN, device)
    exact = logits_and_gradients(net, ids)
    with torch.autocast(device, torch.bfloat16):
        own = logits_and_gradients(net, ids)
        with patched():
            actual = logits_and_gradients(net, ids)
    floor = torch.finfo(torch.bfloat16).eps
    for name, expected in exact.items():
        close(actual[name], expected, 2 * distance(own[name], expected) + floor, name)
    net.gradient_checkpointing_enable()
    with patched(), counting() as calls:
        again = logits_and_gradients(net, ids)
    assert calls == of.training_calls() + of.calls(1)
    for name, expected in exact.items():
        close(again[name], expected, rounding(of, SEQLEN), name)


@pytest.mark.serves("torch.compile")
@pytest.mark.parametrize(
    "model", ["Mamba", "Mamba2", "Bamba", *(name for name in DELTA_MODELS if name in ("Qwen3_5", "KimiLinear"))]
)
def test_compile_fullgraph(model: str, device: str) -> None:
    of = MODELS[model]
    net, ids = of.make(device), tokens(2, SEQLEN, device)
    expected = logits_and_gradients(net, ids)
    torch._dynamo.reset()
    with patched():
        compiled = torch.compile(net, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        logits_and_gradients(compiled, ids)
        net.zero_grad()
        with counting_compiled() as calls:
            actual = logits_and_gradients(compiled, ids)
    assert calls == of.training_calls()
    for name, value in actual.items():
        close(value, expected[name.removeprefix("_orig_mod.")], rounding(of, SEQLEN), name)


def test_compiled_code_follows_the_patch(device: str) -> None:
    of = MODELS["Mamba2"]
    net, ids = of.make(device), tokens(1, SEQLEN, device)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager")
    with torch.no_grad():
        compiled(ids, use_cache=False)
        with patched():
            compiled(ids, use_cache=False)
            with counting_compiled() as calls:
                compiled(ids, use_cache=False)
        with counting_compiled() as after:
            compiled(ids, use_cache=False)
    assert calls == of.calls(1)
    assert not after


@pytest.mark.serves("torch.export")
@pytest.mark.parametrize("model", ["Mamba", "Mamba2"])
def test_export(model: str, device: str) -> None:
    of = MODELS[model]
    net, ids = of.make(device), tokens(2, SEQLEN, device)
    with patched(), torch.no_grad():
        expected = net(ids, use_cache=False).logits
        program = torch.export.export(net, (ids,), {"use_cache": False}, strict=False)
    names = [node.target._opname for node in program.graph.nodes if getattr(node.target, "namespace", None) == "ssm_kernels"]
    kernels = {CONV: "causal_conv1d", SCAN: "selective_scan", SSD: "ssd_chunk_scan", STEP: STEP, CONV_STEP: CONV_STEP}
    assert sorted(names) == sorted(kernels[name] for name in of.calls(1).elements())
    with torch.no_grad(), counting() as calls:
        actual = program.module()(ids, use_cache=False).logits
    assert calls == of.calls(1)
    assert torch.equal(actual, expected)
