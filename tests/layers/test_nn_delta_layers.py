"""The layers around a delta rule: names of flash-linear-attention, values and gradients of the formulas, decoding, packing."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import says
from layer_helpers import assert_all_close, assert_same_gradients, gradients, make_sequence
from plain_delta_layers import DELTA_LAYERS, VARIANTS, WIDTH, make_delta_layer, plain_delta_layer
from torch import Tensor

from ssm_kernels import nn
from ssm_kernels.models import parameter_groups
from ssm_kernels.nn import delta_rule

OPERATOR = "delta_rule_scan"

every_layer = pytest.mark.parametrize("name", DELTA_LAYERS)
every_variant = pytest.mark.parametrize("name", VARIANTS)
# Those whose states or updates differ.
WAYS = ("default", "no_conv", "conv_of_one_step", "more_value_heads", "one_update", "three_updates")
every_way_to_continue = pytest.mark.parametrize("name", [name for name in VARIANTS if name.partition("-")[2] in WAYS])

PRODUCTS = [f"GatedDeltaProduct-{way}" for way in ("default", "one_update", "no_forget_gate")]

# The constructors of flash-linear-attention 0.6, without **kwargs.
SIGNATURES = {
    "DeltaNet": """mode="chunk", d_model=None, hidden_size=1024, expand_k=1.0, expand_v=1.0, num_heads=4, use_beta=True,
        use_gate=False, use_short_conv=True, conv_size=4, conv_bias=False, allow_neg_eigval=False, layer_idx=None,
        qk_activation="silu", qk_norm="l2", norm_eps=1e-5""",
    "GatedDeltaNet": """hidden_size=2048, expand_v=2, head_dim=256, num_heads=6, num_v_heads=None, mode="chunk",
        use_gate=True, use_short_conv=True, allow_neg_eigval=False, conv_size=4, conv_bias=False, layer_idx=None,
        norm_eps=1e-5, output_gate_activation="swish\"""",
    "KimiDeltaAttention": """hidden_size=2048, expand_v=1, head_dim=128, num_heads=16, num_v_heads=None, mode="chunk",
        use_short_conv=True, allow_neg_eigval=False, safe_gate=False, lower_bound=None, conv_size=4, conv_bias=False,
        layer_idx=None, norm_eps=1e-5""",
    "GatedDeltaProduct": """hidden_size=2048, expand_v=2, head_dim=256, num_heads=6, num_v_heads=None, mode="chunk",
        use_output_gate=True, use_short_conv=True, conv_size=4, conv_bias=False, layer_idx=None, norm_eps=1e-5,
        use_forget_gate=True, allow_neg_eigval=True, num_householder=2""",
}
# The state_dict of each default layer of d = 64, in its order. D: hidden_size, H: heads, K: all columns of keys, V: of values.
SHAPES = {
    "DeltaNet": """q_proj.weight:K,D k_proj.weight:K,D v_proj.weight:V,D b_proj.weight:H,D q_conv1d.weight:K,1,4
        k_conv1d.weight:K,1,4 v_conv1d.weight:V,1,4 o_norm.weight:V/H o_proj.weight:D,V""",
    "GatedDeltaNet": """A_log:H dt_bias:H q_proj.weight:K,D k_proj.weight:K,D v_proj.weight:V,D a_proj.weight:H,D
        b_proj.weight:H,D q_conv1d.weight:K,1,4 k_conv1d.weight:K,1,4 v_conv1d.weight:V,1,4 g_proj.weight:V,D
        o_norm.weight:V/H o_proj.weight:D,V""",
    "KimiDeltaAttention": """A_log:H dt_bias:K q_proj.weight:K,D k_proj.weight:K,D v_proj.weight:V,D q_conv1d.weight:K,1,4
        k_conv1d.weight:K,1,4 v_conv1d.weight:V,1,4 f_proj.0.weight:V/H,D f_proj.1.weight:K,V/H b_proj.weight:H,D
        g_proj.0.weight:V/H,D g_proj.1.weight:V,V/H g_proj.1.bias:V o_norm.weight:V/H o_proj.weight:D,V""",
    "GatedDeltaProduct": """A_log:H dt_bias:H q_proj.weight:K,D k_proj.weight:2*K,D v_proj.weight:2*V,D b_proj.weight:2*H,D
        a_proj.weight:H,D q_conv1d.weight:K,1,4 k_conv1d.weight:2*K,1,4 v_conv1d.weight:2*V,1,4 g_proj.weight:V,D
        o_norm.weight:V/H o_proj.weight:D,V""",
}


def new_cache() -> Any:
    return SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})


def leaves_of(layer: torch.nn.Module, u: Tensor) -> dict[str, Tensor]:
    return {"u": u} | dict(layer.named_parameters())


# ----- names, shapes and initialization


@every_layer
def test_constructor_is_that_of_fla(name):
    parameters = list(inspect.signature(DELTA_LAYERS[name].type).parameters.values())
    theirs = inspect.signature(eval(f"(lambda {SIGNATURES[name]}: None)")).parameters.values()
    ours = [(p.name, p.default) for p in parameters]
    assert ours == [*((p.name, p.default) for p in theirs), ("device", None), ("dtype", None)]


@every_layer
def test_state_dict_is_that_of_fla(name):
    """The order of the entries counts: optimizers save their states by position."""
    options = {"num_heads": 4} if name == "DeltaNet" else {"head_dim": 16, "num_heads": 4}
    layer = DELTA_LAYERS[name].type(hidden_size=64, **options)
    sizes = {"D": 64, "H": 4, "K": 64, "V": layer.value_dim}
    expected = {}
    for entry in SHAPES[name].split():
        key, _, shape = entry.partition(":")
        expected[key] = tuple(int(eval(size, {}, sizes)) for size in shape.split(","))
    assert [(key, tuple(value.shape)) for key, value in layer.state_dict().items()] == list(expected.items())
    assert [key for key, _ in layer.named_parameters()] == list(expected)
    checkpoint = {key: make_sequence(*shape, dtype=torch.float32) for key, shape in expected.items()}
    layer.load_state_dict(checkpoint, strict=True)
    torch.testing.assert_close(dict(layer.state_dict()), checkpoint, rtol=0, atol=0)


@every_layer
def test_default_sizes(name):
    """On meta, without memory."""
    layer = DELTA_LAYERS[name].type(device="meta")
    assert all(p.is_meta and p.dtype is torch.float32 for p in layer.parameters())
    states = layer.allocate_inference_cache(2, 0)
    assert all(state.is_meta for state in states)
    assert states[1].shape == (2, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
    assert layer(torch.empty(2, 7, layer.hidden_size, device="meta")).shape == (2, 7, layer.hidden_size)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_of_parameters(name, dtype):
    layer = make_delta_layer(name, dtype=dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    is_wide = ("A_log", "dt_bias") if "g_proj" in dict(layer.named_children()) else ("o_norm.weight",)
    for key, parameter in layer.named_parameters():
        assert parameter.dtype is (wide if key in is_wide else dtype), key
    assert [state.dtype for state in layer.allocate_inference_cache(1, 0)] == [dtype, wide]


@every_layer
def test_meta_layer_is_initialized_as_one_made_at_once(name):
    spec = DELTA_LAYERS[name]
    torch.manual_seed(0)
    expected = spec.type(**spec.sizes)
    layer = spec.type(**spec.sizes, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    for module in layer.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
    for (key, actual), value in zip(layer.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.isfinite(actual).all(), key
        assert actual.std(correction=0) <= 2.5 * value.std(correction=0) + 1e-3, key


def test_initial_gates():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "head_dim": 4, "num_heads": 512}
    for layer, low in ((nn.GatedDeltaNet(**sizes), 0), (nn.GatedDeltaProduct(**sizes), 0), (nn.KimiDeltaAttention(**sizes), 1)):
        rates, steps = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
        assert low <= rates.min() < low + 1 and 15 < rates.max() <= 16.001
        assert 0.00099 < steps.min() < 0.0015 and 0.08 < steps.max() < 0.1001
        assert layer.no_weight_decay() == {"A_log", "dt_bias"}
        assert all(p._no_weight_decay for p in (layer.A_log, layer.dt_bias))
    bounded = nn.KimiDeltaAttention(**sizes, safe_gate=True, lower_bound=-5.0)
    assert not bounded.A_log.any()
    with torch.no_grad():
        bounded.A_log.fill_(1)
    bounded.reset_parameters()
    assert not bounded.A_log.any()


@every_layer
def test_parameter_groups(name):
    layer = make_delta_layer(name)
    kept = {id(p) for group in parameter_groups(layer, 0.1) if group["weight_decay"] == 0 for p in group["params"]}
    for key, parameter in layer.named_parameters():
        assert (id(parameter) in kept) == (parameter.dim() < 2), key


# ----- values and gradients


@every_variant
def test_values_and_gradients(name, device):
    """More steps than a chunk would make every variant slow: ``test_several_chunks`` has them."""
    layer, u = make_delta_layer(name, device), make_sequence(2, 9, WIDTH, device=device).requires_grad_()
    actual, expected = layer(u), plain_delta_layer(layer, u)
    assert_all_close(actual, expected, 1e-9, 1e-11)
    assert_same_gradients(actual, expected, leaves_of(layer, u), 1e-7, 1e-9)


@every_layer
def test_several_chunks(name, device):
    steps = 70 if name == "GatedDeltaProduct" else 130  # of one or two updates: three chunks of 64
    layer, u = make_delta_layer(name, device), make_sequence(1, steps, WIDTH, device=device).requires_grad_()
    actual, expected = layer(u), plain_delta_layer(layer, u)
    assert_all_close(actual, expected, 1e-8, 1e-10)
    assert_same_gradients(actual, expected, leaves_of(layer, u), 1e-6, 1e-8)


@every_layer
def test_gradcheck(name):
    layer, u = make_delta_layer(name), make_sequence(1, 4, WIDTH).requires_grad_()
    names = [key for key, _ in layer.named_parameters()]

    def run(u: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (u,))

    assert torch.autograd.gradcheck(run, (u, *layer.parameters()), fast_mode=True)


@every_layer
def test_negative_eigenvalues_change_the_output(name):
    """A layer that ignored the option would pass no other test of one layer against itself."""
    u = make_sequence(1, 6, WIDTH)
    one, two = (make_delta_layer(name, allow_neg_eigval=value) for value in (False, True))
    assert (one(u) - two(u)).abs().max() > 1e-3


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(name, dtype, device):
    layer, u = make_delta_layer(name, device, dtype), make_sequence(2, 70, WIDTH, device=device, dtype=dtype)
    exact = plain_delta_layer(layer, u.double(), {key: p.double() for key, p in layer.named_parameters()})
    actual = layer(u)
    assert actual.dtype is dtype
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert (actual.double() - exact).norm() <= bound * exact.norm()


@every_layer
def test_autocast(name, device):
    layer, u = make_delta_layer(name, device, torch.float32), make_sequence(2, 20, WIDTH, device=device, dtype=torch.float32)
    u.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        actual = layer(u)
    assert actual.dtype is torch.bfloat16
    expected = layer(u)
    assert (actual - expected).norm() <= 5e-2 * expected.norm()
    actual.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        states = layer.allocate_inference_cache(2, 20)
        steps = torch.cat([layer.step(u[:, t : t + 1], *states)[0] for t in range(20)], dim=1)
    assert (steps - expected).norm() <= 5e-2 * expected.norm()


@every_layer
def test_layer_converted_to_half(name, device):
    """The gates' parameters are then bf16, too."""
    layer = make_delta_layer(name, device, torch.float32).bfloat16()
    u = make_sequence(1, 5, WIDTH, device=device, dtype=torch.bfloat16)
    out = layer(u)
    states = layer.allocate_inference_cache(1, 0)
    steps = torch.cat([layer.step(u[:, t : t + 1], *states)[0] for t in range(5)], dim=1)
    assert (out - steps).norm() <= 3e-2 * out.norm()


# ----- decoding


@every_variant
def test_steps(name, device):
    layer, u = make_delta_layer(name, device), make_sequence(2, 7, WIDTH, device=device)
    states = layer.allocate_inference_cache(2, 7)
    steps = torch.cat([layer.step(u[:, t : t + 1], *states)[0] for t in range(7)], dim=1)
    assert_all_close(steps, layer(u).detach(), 1e-9, 1e-11)


@pytest.mark.parametrize("name", ["DeltaNet-default", "GatedDeltaNet-default", "KimiDeltaAttention-default", *PRODUCTS])
def test_steps_of_long_keys(name, monkeypatch, device):
    """The scan takes steps whose keys are longer than those of the decoding step."""
    monkeypatch.setattr(delta_rule, "_COLUMNS_OF_A_STEP", 3)
    monkeypatch.setattr(delta_rule, "delta_rule_step", None)
    test_steps(name, device)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_steps_of_a_key_of_520_columns(dtype, device):
    layer = nn.GatedDeltaNet(8, head_dim=520, num_heads=1, expand_v=1 / 260, device=device)
    u = make_sequence(2, 3, 8, device=device, dtype=torch.float32)
    states = layer.allocate_inference_cache(2, 3, dtype)
    steps = torch.cat([layer.step(u[:, t : t + 1], *states)[0] for t in range(3)], dim=1)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    assert_all_close(steps, layer(u).detach(), tolerance, tolerance)
    assert all(state.any() for state in states)


@every_way_to_continue
def test_prefill_then_continue(name, device):
    """By a segment, by one step under no_grad, and by one step with gradients."""
    layer, u = make_delta_layer(name, device), make_sequence(2, 9, WIDTH, device=device)
    for segments in ([0, 5, 8, 9], [0, 1, 2, 9]):
        for enabled in (False, True):
            cache, outputs = new_cache(), []
            with torch.set_grad_enabled(enabled):
                for begin, end in itertools.pairwise(segments):
                    cache.seqlen_offset = begin
                    outputs.append(layer(u[:, begin:end], cache))
            assert_all_close(torch.cat(outputs, dim=1).detach(), layer(u).detach(), 1e-9, 1e-11)
    # A cache that is used again starts anew.
    cache.seqlen_offset = 0
    assert_all_close(layer(u, inference_params=cache).detach(), layer(u).detach(), 1e-9, 1e-11)


@every_layer
def test_gradients_of_a_continued_segment(name, device):
    """The parameters' gradients of a segment that begins from cached states are those of a sequence whose start is fixed."""
    layer, u = make_delta_layer(name, device), make_sequence(1, 8, WIDTH, device=device).requires_grad_()
    cache = new_cache()
    with torch.no_grad():
        layer(u[:, :5], cache)
    cache.seqlen_offset = 5
    whole = plain_delta_layer(layer, torch.cat([u[:, :5].detach(), u[:, 5:]], dim=1))[:, 5:]
    (expected,) = torch.autograd.grad(whole.square().sum(), u)
    (actual,) = torch.autograd.grad(layer(u[:, 5:], cache).square().sum(), u)
    assert_all_close(actual, expected, 1e-7, 1e-9)


@every_layer
def test_states_of_other_dtypes(name, device):
    layer, u = make_delta_layer(name, device, torch.float32), make_sequence(2, 6, WIDTH, device=device, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        states = layer.allocate_inference_cache(2, 6, dtype=dtype)
        assert {state.dtype for state in states} == {dtype}
        steps = torch.cat([layer.step(u[:, t : t + 1], *states)[0] for t in range(6)], dim=1)
        expected = layer(u).detach()
        assert (steps - expected).norm() <= (5e-2 if dtype is torch.bfloat16 else 1e-5) * expected.norm()


# ----- packed sequences

OFFSETS = (0, 0, 1, 3, 3, 9, 11)


def one_by_one(layer: Any, u: Tensor, offsets: tuple[int, ...] = OFFSETS) -> Tensor:
    bounds = itertools.pairwise(dict.fromkeys(offsets))
    return torch.cat([plain_delta_layer(layer, u[:, begin:end]) for begin, end in bounds], dim=1)


@every_way_to_continue
def test_packed_sequences(name, device):
    """Shorter than the convolution is wide, and empty ones, too."""
    layer, u = make_delta_layer(name, device), make_sequence(1, 11, WIDTH, device=device).requires_grad_()
    expected, leaves = one_by_one(layer, u), leaves_of(layer, u)
    expected_gradients = gradients(expected, leaves.values())
    cu_seqlens = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    seq_idx = torch.tensor([[0, 1, 1, *[2] * 6, 3, 3]], dtype=torch.int32, device=device)
    both = {"cu_seqlens": cu_seqlens.long(), "seq_idx": seq_idx}
    for options in ({"cu_seqlens": cu_seqlens}, {"seq_idx": seq_idx}, both):
        actual = layer(u, **options)
        assert_all_close(actual, expected, 1e-9, 1e-11)
        assert_all_close(gradients(actual, leaves.values()), expected_gradients, 1e-7, 1e-9)


@every_layer
def test_packed_prompts_then_steps(name, device):
    """Prompts of unequal lengths with padding behind, then one step of all."""
    layer, lengths = make_delta_layer(name, device), (1, 6, 2)
    sequences = [make_sequence(1, length + 2, WIDTH, device=device, seed=i) for i, length in enumerate(lengths)]
    padding = torch.full((1, 3, WIDTH), float("nan"), device=device, dtype=torch.float64)
    prompts = torch.cat([*(s[:, :n] for s, n in zip(sequences, lengths, strict=True)), padding], dim=1)
    cu_seqlens, cache = torch.tensor([0, 1, 7, 9], device=device), new_cache()
    expected = [plain_delta_layer(layer, s).detach() for s in sequences]
    with torch.no_grad():
        out = layer(prompts, cache, cu_seqlens=cu_seqlens)
        assert_all_close(out[:, :9], torch.cat([e[:, :n] for e, n in zip(expected, lengths, strict=True)], dim=1))
        for t in range(2):
            cache.seqlen_offset = 6 + t
            u = torch.cat([s[:, n + t : n + t + 1] for s, n in zip(sequences, lengths, strict=True)])
            step = layer(u, cache)
            assert_all_close(step, torch.cat([e[:, n + t : n + t + 1] for e, n in zip(expected, lengths, strict=True)]))


# ----- saving, copies, hooks


@every_layer
def test_saved_and_loaded(name, tmp_path):
    layer, other, u = make_delta_layer(name), make_delta_layer(name, seed=1), make_sequence(1, 5, WIDTH)
    expected = layer(u)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt"), strict=True)
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(u), expected)


@every_layer
def test_calls_its_modules(name):
    """Hooks, adapters and FSDP act on every projection and on the norm."""
    layer, called = make_delta_layer(name), []
    for key, module in layer.named_modules():
        if not isinstance(module, torch.nn.Conv1d):
            module.register_forward_hook(lambda *_, key=key: called.append(key))
    layer(make_sequence(1, 3, WIDTH))
    modules = {key for key, module in layer.named_modules() if not isinstance(module, torch.nn.Conv1d)}
    assert set(called) == modules and len(called) == len(modules)


@pytest.mark.parametrize("recompute", ["cheap", "all"])
@every_variant
def test_recompute(name, recompute, device):
    """Recomputation changes no bit, whether the operator contains the norm and the out-projection or modules are called."""
    layer, u = make_delta_layer(name, device, torch.float32), make_sequence(2, 70, WIDTH, device=device, dtype=torch.float32)
    other = copy.deepcopy(layer)
    layer.recompute = recompute
    for module in (other.o_norm, other.o_proj):
        module.register_forward_hook(lambda *_: None)
    results = {}
    for each in (other, layer):
        out, leaves = each(u.requires_grad_()), leaves_of(each, u)
        results[each] = {"out": out} | dict(zip(leaves, gradients(out, leaves.values()), strict=True))
    for key, value in results[layer].items():
        assert torch.equal(value, results[other][key]), key


@every_layer
def test_kept_bytes(name, device):
    layer = make_delta_layer(name, device, torch.bfloat16)
    u = make_sequence(2, 20, WIDTH, device=device, dtype=torch.bfloat16)
    kept = {}
    for layer.recompute in ("none", "cheap", "all"):
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(u.requires_grad_())
        kept[layer.recompute] = sum(saved.values())
    y = 2 * 20 * layer.value_dim * 2
    assert kept["none"] - y == kept["cheap"] == kept["all"] + y


@every_layer
def test_checkpointing(name):
    from torch.utils.checkpoint import checkpoint

    layer, u = make_delta_layer(name), make_sequence(1, 6, WIDTH).requires_grad_()
    assert_same_gradients(checkpoint(layer, u, use_reentrant=False), layer(u), leaves_of(layer, u), 0, 0)


@every_layer
def test_compiled(name):
    layer, u = make_delta_layer(name), make_sequence(2, 6, WIDTH).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_same_gradients(compiled(u), layer(u), leaves_of(layer, u), 1e-9, 1e-11)


# ----- errors


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "DeltaNet",
            {"hidden_size": 30, "num_heads": 4},
            "DeltaNet: expected num_heads that divide hidden_size * expand_k = 30",
        ),
        ("DeltaNet", {"expand_v": 1.37}, "DeltaNet: expected a whole hidden_size * expand_v of at least 1, got 12 * 1.37"),
        ("DeltaNet", {"qk_norm": "l1"}, "DeltaNet: unknown qk_norm 'l1'"),
        ("DeltaNet", {"qk_activation": "gelu"}, "DeltaNet: unknown qk_activation 'gelu'"),
        ("GatedDeltaNet", {"mode": "fused_chunk"}, "GatedDeltaNet: unknown mode 'fused_chunk'"),
        ("GatedDeltaNet", {"num_v_heads": 3}, "GatedDeltaNet: expected num_v_heads a multiple of num_heads = 2, got 3"),
        ("GatedDeltaNet", {"num_v_heads": 1}, "GatedDeltaNet: expected num_v_heads a multiple of num_heads = 2, got 1"),
        ("GatedDeltaNet", {"expand_v": 1.3}, "GatedDeltaNet: expected a whole head_dim * expand_v of at least 1, got 4 * 1.3"),
        ("GatedDeltaNet", {"output_gate_activation": "gelu"}, "GatedDeltaNet: unknown output_gate_activation 'gelu'"),
        ("GatedDeltaNet", {"conv_size": 0}, "GatedDeltaNet: expected conv_size to be at least 1, got 0"),
        ("KimiDeltaAttention", {"safe_gate": True}, "KimiDeltaAttention: expected a lower_bound with safe_gate, got None"),
        ("KimiDeltaAttention", {"lower_bound": 1.0}, "KimiDeltaAttention: expected lower_bound to be finite and negative"),
        ("GatedDeltaProduct", {"num_householder": 0}, "GatedDeltaProduct: expected num_householder to be at least 1, got 0"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=says(message)):
        make_delta_layer(name, **options)


@every_layer
def test_bad_types(name):
    for option, value in (("hidden_size", 2.0), ("num_heads", True), ("use_short_conv", 1), ("layer_idx", "0"), ("mode", 3)):
        with pytest.raises(TypeError, match=says(f"{name}: expected {option}")):
            make_delta_layer(name, **{option: value})


@every_layer
def test_bad_calls(name):
    layer, u = make_delta_layer(name), make_sequence(2, 3, WIDTH)
    for call, message in (
        (lambda: layer(u[0]), f"{name}: expected hidden_states of shape (batch, seqlen, d_model)"),
        (lambda: layer(u, cu_seqlens=torch.tensor([0, 3])), f"{name}: expected a batch of 1 with cu_seqlens, got 2"),
        (lambda: layer(u[:1], cu_seqlens=torch.tensor([0, 2])), f"{name}: causal_conv1d: expected cu_seqlens to end at seqlen"),
        (lambda: layer(u, seq_idx=torch.zeros(2, 2, dtype=torch.int32)), f"{name}: expected seq_idx of shape (batch, seqlen)"),
        (lambda: layer.step(u, *layer.allocate_inference_cache(2, 0)), f"{name}.step: expected hidden_states"),
        (
            lambda: layer.step(u[:, :1], *layer.allocate_inference_cache(3, 0)),
            f"{name}.step: expected conv_state of shape (batch, channels, d_conv)",
        ),
    ):
        with pytest.raises(ValueError, match=says(message)):
            call()
    with pytest.raises(RuntimeError, match=says(f"{name}: expected hidden_states of dtype torch.float64")):
        layer(u.float())
    with pytest.raises(ValueError, match="needs a layer_idx"):
        make_delta_layer(name, layer_idx=None)(u, new_cache())


@every_layer
def test_fully_shard(name):
    """FSDP2 acts on the layer, on projections and on the parameters of the gates."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer, u = make_delta_layer(name), make_sequence(1, 6, WIDTH).requires_grad_()
        expected = gradients(layer(u), leaves_of(layer, u).values())
        mesh = dist.init_device_mesh("cpu", (1,))
        sharded = make_delta_layer(name)
        fully_shard(sharded.o_proj, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        out = sharded(u)
        (out * make_sequence(*out.shape, seed=5)).sum().backward()
        actual = (u.grad, *(parameter.grad.full_tensor() for parameter in sharded.parameters()))
        assert_all_close(actual, expected, 1e-9, 1e-11)
    finally:
        dist.destroy_process_group()
