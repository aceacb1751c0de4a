"""A step of its own for A, ``delta_A``, against the reference: outputs, states and gradients of every rule that takes it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from two_sample_helpers import evaluate, make_scan_inputs, on, widened

from ssm_kernels import reference, selective_scan, selective_scan_summary

OPERATOR = "selective_scan"
RULES = ("zoh", "zoh_exact", "poly", "highorder", "rk4", "dirac", "exp_trapezoidal")
every_rule = pytest.mark.parametrize("rule", RULES)
OF_STEPS = ("u", "delta", "B", "C", "z", "lam", "delta_A", "seq_idx")
CHUNK = 32


def make_inputs(rule: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Any]:
    """Keyword arguments, also of the reference. Steps of A are from 0 to 4; every fifth is 0."""
    inputs = make_scan_inputs(rule, dtype=dtype, seed=3, **options)
    if rule != "exp_trapezoidal":
        del inputs["previous"]
    generator = torch.Generator().manual_seed(4)
    delta_A = (4 * torch.rand(inputs["u"].shape, generator=generator, dtype=torch.float64)).to(dtype)
    delta_A[..., ::5] = 0
    return {"delta_A": delta_A} | inputs


def reference_of(rule: str) -> Any:
    return reference.two_sample_scan if rule == "exp_trapezoidal" else reference.selective_scan


def state_of(last: Any) -> Tensor:
    return last if isinstance(last, Tensor) else last.state


def assert_matches_reference(inputs: dict[str, Any]) -> dict[str, Tensor]:
    found = evaluate(selective_scan, inputs)
    expected = evaluate(reference_of(inputs["discretization"]), widened(inputs))
    for name, value in expected.items():
        actual = found[name]
        if inputs["u"].dtype == torch.float64:
            torch.testing.assert_close(actual, value, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
            continue
        error = (actual.double() - value).norm() / max(value.norm().item(), 1e-30)
        assert error < 2e-6 + torch.finfo(actual.dtype).eps, (name, error)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "groups": {"B": "groups", "C": "groups"},
    "constant_B": {"B": "constant"},
    "constant_C": {"C": "constant"},
    "required_only": {**dict.fromkeys(("D", "z", "delta_bias", "initial_state")), "delta_softplus": False},
    "chunk": {"seqlen": CHUNK},
    "chunk_and_one": {"seqlen": CHUNK + 1},
    "several_chunks": {"seqlen": 3 * CHUNK - 1, "dim": 19, "dstate": 5},
    "long_chunks": {"seqlen": 130, "dstate": 17},
    "one_step": {"seqlen": 1},
    "no_steps": {"seqlen": 0},
    "reverse": {"reverse": True, "B": "groups", "seqlen": 70},
    "float32": {"dtype": torch.float32, "seqlen": 40},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16, "seqlen": 40},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@every_rule
def test_against_the_reference(rule, options, device):
    assert_matches_reference(on(device, make_inputs(rule, **options)))


@pytest.mark.parametrize("reverse", [False, True])
@every_rule
def test_packed_sequences(rule, reverse, device):
    """Empty sequences, one of a single step and one of several chunks."""
    ends = [0, 0, 4, 4, 5, 40, 40]
    inputs = on(device, make_inputs(rule, batch=1, seqlen=40, sequences=6, B="groups", reverse=reverse))
    found = assert_matches_reference(inputs | {"cu_seqlens": torch.tensor(ends, device=device)})
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        own = cut(inputs, begin, end) | {"initial_state": inputs["initial_state"][i : i + 1]}
        torch.testing.assert_close(found["out"][..., begin:end], selective_scan(**own), rtol=1e-12, atol=1e-12)


@every_rule
def test_resets(rule, device):
    inputs = on(device, make_inputs(rule, seqlen=2 * CHUNK + 3))
    seq_idx = torch.zeros(2, 2 * CHUNK + 3, dtype=torch.int32, device=device)
    seq_idx[0, CHUNK:] += 1
    seq_idx[:, CHUNK + 5 :] += 1
    assert_matches_reference(inputs | {"seq_idx": seq_idx})


def cut(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    def part(name: str, value: Any) -> Any:
        is_cut = name in OF_STEPS and isinstance(value, Tensor) and (value.dim() > 2 or name == "seq_idx")
        return value[..., begin:end] if is_cut else value

    return {name: part(name, value) for name, value in inputs.items()}


@pytest.mark.parametrize("split", [0, 1, CHUNK, 40])
@every_rule
def test_split_anywhere_is_the_whole(rule, split, device):
    inputs = on(device, make_inputs(rule, seqlen=40))

    def in_two_parts(return_last_state: bool, **given: Any) -> Any:
        first, middle = selective_scan(**cut(given, 0, split), return_last_state=True)
        later = cut(given, split, 40) | {"initial_state": state_of(middle)}
        if rule == "exp_trapezoidal":
            later["previous"] = (middle.u, middle.B)
        second, last = selective_scan(**later, return_last_state=True)
        return torch.cat([first, second], -1), last

    whole = evaluate(selective_scan, inputs)
    for name, value in evaluate(in_two_parts, inputs).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@every_rule
def test_states_at_positions(rule, device):
    inputs = on(device, make_inputs(rule, seqlen=40))
    positions = [0, 5, CHUNK, 40, 5]
    out, last, at = selective_scan(**inputs, return_last_state=True, states_at=positions)
    torch.testing.assert_close(out, selective_scan(**inputs))
    assert isinstance(at, Tensor) == (rule != "exp_trapezoidal")
    for i, p in enumerate(positions):
        expected = inputs["initial_state"]
        if p > 0:
            expected = state_of(selective_scan(**cut(inputs, 0, p), return_last_state=True)[1])
        torch.testing.assert_close(state_of(at)[:, i], expected)
    torch.testing.assert_close(state_of(last), state_of(at)[:, 3])
    assert state_of(selective_scan(**inputs, states_at=[])[1]).shape == (2, 0, 6, 3)


@every_rule
def test_gradcheck(rule, device):
    inputs = on(device, make_inputs(rule, batch=1, dim=2, seqlen=3, dstate=2))
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor)}

    def scan(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, last = selective_scan(**inputs | dict(zip(leaves, tensors, strict=True)), return_last_state=True)
        return out, state_of(last)

    assert torch.autograd.gradcheck(scan, [*leaves.values()])


@every_rule
def test_equal_steps_give_the_rule(rule, device):
    inputs = on(device, make_inputs(rule, seqlen=40))
    steps = reference.sequences.step_sizes(inputs["delta"], inputs["delta_bias"][:, None], True)
    without = {name: value for name, value in inputs.items() if name != "delta_A"}
    torch.testing.assert_close(selective_scan(**inputs | {"delta_A": steps}), selective_scan(**without), rtol=1e-13, atol=1e-13)


@every_rule
def test_zero_keeps_the_state_and_infinity_clears_it(rule, device):
    """Without NaN, in gradients too, and with a rate of zero, which keeps the state over an infinite time."""
    inputs = on(device, make_inputs(rule, seqlen=12))
    inputs["u"][..., 3] = 0
    if rule == "exp_trapezoidal":
        inputs["lam"] = torch.ones_like(inputs["u"])
        inputs["lam_sigmoid"] = False
    inputs["delta_A"][..., 3] = 0
    inputs["delta_A"][:, :, 7] = float("inf")
    inputs["A"][2, 1] = 0
    found = assert_matches_reference(inputs)
    assert all(value.isfinite().all() for name, value in found.items())
    at = state_of(selective_scan(**inputs, states_at=[3, 4])[1])
    assert torch.equal(at[:, 0], at[:, 1])
    after = selective_scan(**cut(inputs, 7, 12) | {"initial_state": None})
    decays = [c for c in range(6) if c != 2]
    torch.testing.assert_close(selective_scan(**inputs)[:, decays, 7:], after[:, decays])


@pytest.mark.parametrize("shape", [(), (6, 1), (2, 1, 7), (1, 6, 1), (7,)])
@pytest.mark.parametrize("rule", ["zoh", "exp_trapezoidal"])
def test_broadcasts(rule, shape, device):
    """By strides; the gradient is the sum over the axes that it lacks."""
    inputs = make_inputs(rule) | {"delta_A": torch.rand(shape, dtype=torch.float64)}
    assert_matches_reference(on(device, inputs))


@every_rule
def test_strides(rule, device):
    """Channels-last tensors, and ones that are contiguous along neither axis."""
    inputs = on(device, make_inputs(rule, B="groups", seqlen=40))
    expected = evaluate(selective_scan, inputs)
    for arrange in (
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda x: x[..., None].expand(*x.shape, 2)[..., 0],
    ):
        strided = {name: arrange(x) if name in OF_STEPS else x for name, x in inputs.items()}
        for name, value in evaluate(selective_scan, strided).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@every_rule
def test_later_arguments_do_not_reach_earlier_outputs(rule, device):
    inputs = on(device, make_inputs(rule, seqlen=70))
    before = selective_scan(**inputs)
    changed = inputs["delta_A"].clone()
    changed[..., CHUNK] += 1
    after = selective_scan(**inputs | {"delta_A": changed})
    assert torch.equal(after[..., :CHUNK], before[..., :CHUNK])
    assert not torch.equal(after[..., CHUNK:], before[..., CHUNK:])


def test_pulses_of_a_continuous_system(device):
    """zoh_exact is exact for inputs held for delta before each event, with the time since the event before in delta_A."""
    inputs = on(device, make_inputs("zoh_exact", delta_softplus=False, delta_bias=None, z=None, D=None, seqlen=5))
    inputs["delta"] = inputs["delta"].abs() / 8
    inputs["delta_A"] = inputs["delta"] + inputs["delta_A"]
    # Each step in two: a gap without input, and the pulse.
    halves = {name: x.repeat_interleave(2, -1) for name, x in inputs.items() if name in ("u", "delta", "B", "C")}
    halves["u"] = halves["u"] * torch.tensor([0, 1], dtype=torch.float64, device=device).repeat(5)
    halves["delta"] = torch.stack([inputs["delta_A"] - inputs["delta"], inputs["delta"]], -1).flatten(2)
    whole = {name: x for name, x in inputs.items() if name != "delta_A"} | halves
    torch.testing.assert_close(selective_scan(**inputs), selective_scan(**whole)[..., 1::2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["zoh_exact", "exp_trapezoidal"])
def test_opcheck(rule):
    ops = torch.ops.ssm_kernels
    given = make_inputs(rule, seqlen=5)
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state", "lam", "previous_u", "previous_B", "delta_A")
    tensors = [*(given.get(name) for name in names), None, None]
    with_grad = [x if x is None else x.clone().requires_grad_() for x in tensors]
    keywords = {"discretization": rule, "delta_softplus": True, "lam_sigmoid": rule == "exp_trapezoidal"}
    torch.library.opcheck(ops.selective_scan_two_sample.default, tuple(with_grad), keywords)
    options = (rule, rule == "exp_trapezoidal", False, True, False, False, True)
    out, last_state, states = ops._selective_scan_two_sample_fwd(*tensors, *options, True)
    torch.library.opcheck(ops._selective_scan_two_sample_fwd.default, (*tensors, *options, True))
    arguments = (torch.randn_like(out), torch.randn_like(last_state), *tensors, states, *options, [True] * 13)
    torch.library.opcheck(ops._selective_scan_two_sample_bwd.default, arguments)


@every_rule
def test_compile_vmap_and_autocast(rule):
    inputs = make_inputs(rule)
    compiled = torch.compile(lambda given: selective_scan(**given, return_last_state=True), backend="aot_eager", fullgraph=True)
    for found, value in zip(
        torch.utils._pytree.tree_leaves(compiled(inputs)),
        torch.utils._pytree.tree_leaves(selective_scan(**inputs, return_last_state=True)),
        strict=True,
    ):
        torch.testing.assert_close(found, value)

    def of_steps(delta_A: Tensor) -> Tensor:
        return selective_scan(**inputs | {"delta_A": delta_A})

    several = torch.stack([inputs["delta_A"], 2 * inputs["delta_A"]])
    torch.testing.assert_close(torch.vmap(of_steps)(several), torch.stack([of_steps(each) for each in several]))
    single = make_inputs(rule, dtype=torch.float32) | {"delta_A": torch.rand(7)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, last = selective_scan(**single, return_last_state=True)
    assert out.dtype == torch.bfloat16 and state_of(last).dtype == torch.float32


@pytest.mark.parametrize("resets", [False, True])
@every_rule
def test_summaries(rule, resets, device):
    """decay h + last_state is the last state for any h, and so are its gradients."""
    inputs = on(device, make_inputs(rule, seqlen=40))
    if resets:
        inputs["seq_idx"] = torch.zeros(2, 40, dtype=torch.int32, device=device)
        inputs["seq_idx"][0, 30:] = 1
    names = [name for name in ("u", "delta", "A", "B", "delta_bias", "initial_state", "lam", "delta_A") if name in inputs]
    results = []
    for summarize in (False, True):
        leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
        given = inputs | leaves
        if summarize:
            of_span = {name: given[name] for name in given if name not in ("C", "D", "z", "initial_state")}
            last_state, decay = selective_scan_summary(**of_span)
            last = decay * given["initial_state"] + last_state
        else:
            last = state_of(selective_scan(**given, return_last_state=True)[1])
        weight = torch.linspace(-1, 1, last.numel(), dtype=torch.float64, device=device).view_as(last)
        results.append((last, *torch.autograd.grad((last * weight).sum(), [*leaves.values()])))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


REFUSED = {
    "bilinear": (r"'bilinear', which advances the state and the input by one rational step", {}),
    "euler": ("'euler', which advances", {}),
    "backward_euler": ("'backward_euler', which advances", {}),
    "gbt": (r"'gbt\(0.7\)', which advances", {"alpha": 0.7}),
    "trapezoidal": ("'trapezoidal', whose two samples are the ends of the one step of the state", {}),
    "gbt_two_sample": (r"'gbt_two_sample\(0.7\)', whose two samples", {"alpha": 0.7}),
    "foh_ramp": ("'foh_ramp', whose two samples", {}),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_rules_without_a_meaning(rule):
    message, options = REFUSED[rule]
    inputs = {name: x for name, x in make_inputs("zoh").items() if name != "discretization"}
    with pytest.raises(ValueError, match=f"^selective_scan: expected delta_A with discretization 'zoh'.*{message}"):
        selective_scan(**inputs, discretization=rule, **options)
    with pytest.raises(ValueError, match="delta_A"):
        reference_of("exp_trapezoidal" if "two" in message else "zoh")(**inputs, discretization=rule, **options)


def test_the_alias_takes_it():
    inputs = make_inputs("zoh_exact")
    assert torch.equal(selective_scan(**inputs | {"discretization": "foh"}), selective_scan(**inputs))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"previous": "repeat"}, ValueError, "expected previous with a discretization that reads two"),
        ({"lam": torch.zeros(1)}, ValueError, "expected lam with discretization 'exp_trapezoidal' only, got 'zoh'"),
        ({"alpha": 0.5}, ValueError, "expected alpha with discretization 'gbt'"),
        ({"delta_A": torch.zeros(3, 1, dtype=torch.float64)}, ValueError, r"expected delta_A of shape \(batch, dim, seqlen\)"),
        ({"delta_A": torch.zeros(2, 6, 7)}, RuntimeError, "expected delta_A of dtype float64"),
        ({"discretization": "zho"}, ValueError, "unknown discretization 'zho'"),
        ({"reverse": True, "states_at": [0]}, ValueError, "expected states_at without reverse"),
    ],
)
def test_messages(changed, error, message):
    with pytest.raises(error, match=f"^selective_scan: {message}"):
        selective_scan(**make_inputs("zoh") | changed)
