"""delta_rule_scan against the reference, and the reference against the loops that define the operators."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from delta_rule_helpers import (
    CASES,
    DELTA_RULE,
    OPTIONS,
    assert_close,
    assert_matches_reference,
    at_steps,
    evaluate,
    every_gate,
    every_option,
    make_inputs,
    scan,
    states_like,
)
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference

OPERATOR = "delta_rule_scan"

# Trap 7: tails of a chunk of 64 steps, and lengths around it.
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 129)


# ----- the reference


def gated_delta_rule_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, n: int = 1) -> tuple[Tensor, Tensor]:
    """Yang et al.'s definition of gated delta products, for a state (key_dim, value_dim); g one number a head or channel."""
    batch, seqlen, heads, key_dim = q.shape
    value_heads = v.shape[2]
    q, k = (x.repeat_interleave(value_heads // heads, 2) for x in (q * key_dim**-0.5, k))
    g = g if g.dim() == 4 else g[..., None]
    state, outputs = q.new_zeros(batch, value_heads, key_dim, v.shape[3]), []
    for t in range(seqlen):
        state = g[:, t].exp()[..., None] * state
        for j in range(n * t, n * t + n):
            erased = torch.einsum("bhk,bhkv->bhv", k[:, j], state)
            state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, j], k[:, j], v[:, j] - erased)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("n", [1, 3])
@every_gate
def test_reference_is_the_loop_over_steps(gate, n):
    inputs = make_inputs(seqlen=9, gate=gate, num_householder=n, initial_states=False)
    g = torch.zeros(2, 9, 4, dtype=torch.float64) if gate is None else inputs["g"]
    out, state = gated_delta_rule_loop(*(inputs[name] for name in "qkv"), g, inputs["beta"], n)
    actual, states = reference.delta_rule_scan(**inputs, return_final_states=True)
    torch.testing.assert_close(actual, out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(states, state.transpose(2, 3), rtol=1e-13, atol=1e-13)


def test_reference_of_raw_arguments():
    """Trap 13: a raw gate, with and without a bound, and sigmoids and norms, as computed by hand."""
    inputs = make_inputs(seqlen=4, gate="channel", raw="softplus", beta_sigmoid=True, allow_neg_eigval=True, qk_l2norm=True)
    g = -inputs["A_log"].exp()[:, None] * F.softplus(inputs["g"] + inputs["dt_bias"])
    unit = {name: inputs[name] / (inputs[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in "qk"}
    given = {"A_log": None, "dt_bias": None, "qk_l2norm": False, "beta_sigmoid": False, "allow_neg_eigval": False}
    by_hand = inputs | unit | given | {"g": g, "beta": 2 / (1 + (-inputs["beta"]).exp())}
    torch.testing.assert_close(reference.delta_rule_scan(**inputs), reference.delta_rule_scan(**by_hand))
    bounded = -5 * torch.sigmoid(inputs["A_log"].exp()[:, None] * (inputs["g"] + inputs["dt_bias"]))
    actual = reference.delta_rule_scan(**inputs | {"gate_lower_bound": -5.0})
    torch.testing.assert_close(actual, reference.delta_rule_scan(**by_hand | {"g": bounded}))


def test_layout_of_the_state():
    """Trap 8: value_dim comes before key_dim. After one step from zero the state is beta v k^T."""
    inputs = make_inputs(seqlen=1, gate=None, initial_states=False, value_heads=2)
    states = scan(**inputs)[1]
    assert states.shape == (2, 2, 2, 3)
    expected = inputs["beta"][:, 0, :, None, None] * inputs["v"][:, 0, :, :, None] * inputs["k"][:, 0, :, None, :]
    torch.testing.assert_close(states, expected)


# ----- the operator against the reference


@every_option
def test_matches_reference(options, device):
    assert_matches_reference(make_inputs(**options, device=device))


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matches_reference_in_low_precision(options, dtype, device):
    assert_matches_reference(make_inputs(**options, dtype=dtype, device=device))


@pytest.mark.parametrize("seqlen", LENGTHS)
@every_gate
def test_lengths(seqlen, gate, device):
    """Traps 7, 8 and 9: tails, more than two chunks, initial states, and a value_dim that is not key_dim."""
    assert_matches_reference(make_inputs(seqlen=seqlen, gate=gate, batch=1, heads=1, value_heads=2, device=device))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (20, 1), (96, 192), (100, 60)])
@every_gate
def test_sizes_of_heads(sizes, gate, device):
    """Trap 17."""
    key_dim, value_dim = sizes
    options = {"key_dim": key_dim, "value_dim": value_dim, "gate": gate}
    assert_matches_reference(make_inputs(seqlen=70, batch=1, heads=1, value_heads=2, **options, device=device))


@pytest.mark.parametrize("value_heads", [2, 4, 6, 8])
def test_grouped_value_heads(value_heads, device):
    """Trap 17: value head h reads key head h // (value_heads / heads)."""
    inputs = make_inputs(value_heads=value_heads, seqlen=20, device=device)
    repeated = inputs | {name: inputs[name].repeat_interleave(value_heads // 2, 2) for name in "qk"}
    torch.testing.assert_close(scan(**inputs), scan(**repeated), rtol=1e-12, atol=1e-12)
    assert_matches_reference(inputs)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g", "initial_states", "A_log", "dt_bias"])
def test_each_gradient_alone(name, device):
    """Traps 1 and 2: each gradient is the one that all gradients together have."""
    inputs = make_inputs(**OPTIONS["everything"], seqlen=70, device=device)
    cotangents = DELTA_RULE.make_cotangents(inputs)
    every, alone = (evaluate(scan, inputs, cotangents, names) for names in (None, [name]))
    torch.testing.assert_close(alone[f"grad_{name}"], every[f"grad_{name}"], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("result", ["out", "final_states", "last step"])
@every_gate
def test_gradients_of_one_result(result, gate, device):
    """Trap 9: through three chunks, from the final state alone and from the last step alone."""
    inputs = make_inputs(seqlen=150, batch=1, heads=1, value_heads=1, gate=gate, device=device)
    grad_out, grad_states = DELTA_RULE.make_cotangents(inputs)
    if result == "last step":
        grad_out[:, :-1] = 0
    cotangents = (None, grad_states) if result == "final_states" else (grad_out, None)
    assert_matches_reference(inputs, cotangents=cotangents)


@pytest.mark.parametrize(
    "options", [OPTIONS[name] for name in ("head_raw", "channel_bounded", "everything", "updates", "resets")]
)
def test_gradcheck(options):
    inputs = make_inputs(**options)
    names = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]
    leaves = [inputs[name].requires_grad_() for name in names]
    function = lambda *tensors: scan(**inputs | dict(zip(names, tensors, strict=True)))  # noqa: E731
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


# ----- the same scan, called otherwise


@pytest.mark.parametrize("options", [{}, {"gate": "channel", "num_householder": 2}, {"gate": None}])
def test_packed_is_one_by_one(options, device):
    """Traps 6 and 7: sequences of many lengths, empty ones among them, first and last, all gradients included."""
    bounds = [0, 0, *itertools.accumulate((*LENGTHS[:7], 0, 70, 0))]
    inputs = make_inputs(cu_seqlens=bounds, **options, device=device)

    def one_by_one(**inputs):
        outputs, states = [], []
        for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
            own = at_steps(inputs, begin, end) | {"cu_seqlens": None, "initial_states": inputs["initial_states"][i : i + 1]}
            out, state = scan(**own)
            outputs.append(out)
            states.append(state)
        return torch.cat(outputs, 1), torch.cat(states)

    cotangents = DELTA_RULE.make_cotangents(inputs)
    actual, expected = (evaluate(function, inputs, cotangents) for function in (scan, one_by_one))
    assert_close(actual, expected, 1e-11)
    empty = torch.tensor([a == b for a, b in itertools.pairwise(bounds)])
    assert torch.equal(actual["final_states"][empty], inputs["initial_states"][empty])
    assert torch.equal(actual["grad_initial_states"][empty], cotangents[1][empty])


@pytest.mark.parametrize("split", [1, 20, 64, 100, 129])
@pytest.mark.parametrize("options", [{}, {"gate": "channel"}, {"gate": None, "num_householder": 3}])
def test_split_anywhere_is_whole(split, options, device):
    """The state and its gradient carry everything: trap 128 != 127 + 1 of lengths too."""
    inputs = make_inputs(seqlen=130, batch=1, **options, device=device)

    def in_two(**inputs):
        first, state = scan(**at_steps(inputs, 0, split))
        second, state = scan(**at_steps(inputs, split, 130) | {"initial_states": state})
        return torch.cat([first, second], 1), state

    DELTA_RULE.assert_same_as(in_two, inputs)


@every_gate
def test_updates_are_steps(gate, device):
    """A step of n updates is n steps: the first decays, the last reads."""
    n = 3
    inputs = make_inputs(seqlen=50, gate=gate, num_householder=n, device=device)

    def expanded(**inputs):
        q, g = inputs["q"], inputs["g"]
        every = q.new_zeros(2, n * 50, *q.shape[2:])
        every[:, n - 1 :: n] = q
        if g is not None:
            decays = g.new_zeros(2, n * 50, *g.shape[2:])
            decays[:, ::n] = g
            g = decays
        out, states = scan(**inputs | {"q": every, "g": g, "num_householder": 1})
        return out[:, n - 1 :: n], states

    DELTA_RULE.assert_same_as(expanded, inputs)


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("reverse", "reverse_packed_with_resets", "reverse_updates")])
def test_reverse_is_flipped(options, device):
    inputs = make_inputs(**options, device=device)
    assert_matches_reference(inputs)


@pytest.mark.parametrize("packed", [False, True])
@every_gate
def test_states_at_positions(gate, packed, device):
    """The states are those of the reference, with their gradients, at multiples of the chunk and between."""
    bounds = (0, 0, 3, 70, 70, 131)
    inputs = make_inputs(**({"cu_seqlens": bounds} if packed else {"seqlen": 131, "batch": 1}), gate=gate, device=device)
    positions = (64, 0, 3, 65, 130, 131, 3)

    def with_states(function):
        return lambda **inputs: function(**inputs, return_final_states=True, states_at=positions)

    leaves = {name: value.requires_grad_() for name, value in inputs.items() if name in "qkv" or name == "initial_states"}
    results = []
    for function in (ssm_kernels.delta_rule_scan, DELTA_RULE.reference_function):
        outputs = with_states(function)(**inputs)
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype).to(device) for x in outputs]
        loss = sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True))
        results.append((*outputs, *torch.autograd.grad(loss, [*leaves.values()])))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_positions_of_no_steps(device):
    inputs = make_inputs(seqlen=0, device=device)
    _, states, chosen = ssm_kernels.delta_rule_scan(**inputs, return_final_states=True, states_at=(0,))
    assert torch.equal(states, inputs["initial_states"]) and torch.equal(chosen[:, 0], states)
    packed = make_inputs(cu_seqlens=(0, 0), device=device)
    assert not ssm_kernels.delta_rule_scan(**packed, states_at=(0,))[1].any()


def test_positions_are_refused():
    inputs = make_inputs()
    with pytest.raises(ValueError, match=r"^delta_rule_scan: expected states_at from 0 to seqlen = 5, got 6"):
        ssm_kernels.delta_rule_scan(**inputs, states_at=(6,))
    with pytest.raises(ValueError, match=r"^delta_rule_scan: expected states_at without reverse, got both"):
        ssm_kernels.delta_rule_scan(**inputs | {"reverse": True}, states_at=(1,))


def test_same_bits_again(device):
    """Trap 3."""
    inputs = make_inputs(seqlen=130, dtype=torch.float32, device=device)
    cotangents = DELTA_RULE.make_cotangents(inputs)
    first, second = (evaluate(scan, inputs, cotangents) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_betas_and_gates_in_either_dtype(dtype, device):
    """Trap 18: beta and g may be float32 beside 16-bit vectors; gradients have their dtypes."""
    inputs = make_inputs(dtype=dtype, seqlen=20, device=device)
    wide = inputs | {name: inputs[name].float() for name in ("beta", "g")}
    actual = assert_matches_reference(wide)
    assert actual["grad_beta"].dtype == actual["grad_g"].dtype == torch.float32
    torch.testing.assert_close(scan(**wide), scan(**inputs), rtol=0, atol=0)


def test_states_of_many_elements():
    """Trap 5: more than 2^31 elements of states, on the Meta device."""
    q = torch.empty(4096, 2, 64, 64, device="meta", dtype=torch.bfloat16)
    v = torch.empty(4096, 2, 64, 256, device="meta", dtype=torch.bfloat16)
    out, states = ssm_kernels.delta_rule_scan(q, q, v, v[..., 0], return_final_states=True)
    assert out.shape == v.shape and states.shape == (4096, 64, 256, 64) and states.numel() > 2**31
    assert states_like({"q": q[:1], "v": v[:1], "cu_seqlens": None}).shape == (1, 64, 256, 64)
