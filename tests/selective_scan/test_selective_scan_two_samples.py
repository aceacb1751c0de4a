"""Discretizations that read two input samples a step, against the reference: outputs, last states and samples, gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from two_sample_helpers import evaluate, leaves_of, make_scan_inputs, on, widened

from ssm_kernels import reference, selective_scan, selective_scan_summary

OPERATOR = "selective_scan"
RULES = ("foh_ramp", "trapezoidal", "gbt_two_sample", "exp_trapezoidal")
every_rule = pytest.mark.parametrize("rule", RULES)
OF_STEPS = ("u", "delta", "B", "C", "z", "lam", "seq_idx")
CHUNK = 32


def assert_matches_reference(inputs: dict[str, Any]) -> dict[str, Tensor]:
    found = evaluate(selective_scan, inputs)
    if inputs["u"].dtype == torch.float64:
        expected = evaluate(reference.two_sample_scan, inputs)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
        return found
    exact = evaluate(reference.two_sample_scan, widened(inputs))
    for name, value in exact.items():
        actual = found[name]
        bound = 2e-6 + torch.finfo(actual.dtype).eps
        error = (actual.double() - value).norm() / max(value.norm().item(), 1e-30)
        assert error < bound, (name, error, bound)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "repeat": {"previous": "repeat"},
    "given": {"previous": "given"},
    "groups": {"B": "groups", "C": "groups", "previous": "given"},
    "constant_B": {"B": "constant", "previous": "given"},
    "constant_B_repeat": {"B": "constant", "C": "constant", "previous": "repeat"},
    "constant_C": {"C": "constant", "previous": "given"},
    "required_only": {
        **dict.fromkeys(("D", "z", "delta_bias", "initial_state")),
        "delta_softplus": False,
    },
    "chunk": {"seqlen": CHUNK, "previous": "given"},
    "chunk_and_one": {"seqlen": CHUNK + 1, "previous": "repeat"},
    "several_chunks": {"seqlen": 3 * CHUNK - 1, "dim": 19, "dstate": 5, "previous": "given"},
    "long_chunks": {"seqlen": 130, "dstate": 17, "previous": "given"},
    "one_step": {"seqlen": 1, "previous": "given"},
    "one_step_repeat": {"seqlen": 1, "previous": "repeat"},
    "no_steps": {"seqlen": 0, "previous": "given"},
    "no_steps_repeat": {"seqlen": 0, "previous": "repeat"},
    "reverse": {"reverse": True, "previous": "given", "B": "groups"},
    "reverse_repeat": {"reverse": True, "previous": "repeat", "seqlen": 70},
    "float32": {"dtype": torch.float32, "previous": "given", "seqlen": 40},
    "float16": {"dtype": torch.float16, "previous": "given"},
    "bfloat16": {"dtype": torch.bfloat16, "previous": "repeat", "seqlen": 40},
}


def inputs_of(rule: str, options: dict[str, Any]) -> dict[str, Any]:
    return make_scan_inputs(rule, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@every_rule
def test_against_the_reference(rule, options, device):
    assert_matches_reference(on(device, inputs_of(rule, options)))


@pytest.mark.parametrize("z", [-0.7, -1.4, -3.0, -30.0, -300.0])
@every_rule
def test_gradients_in_float32_of_large_steps(rule, z):
    """Of steps with delta A near z, where differences of the factors would cancel. Some vanish: they are below e^z."""
    inputs = make_scan_inputs(rule, seqlen=40, previous="given", dtype=torch.float32)
    inputs |= {"A": inputs["A"].clamp(-1.2, -0.8), "delta_softplus": False, "delta_bias": None}
    inputs["delta"] = -z * torch.sigmoid(inputs["delta"] / 4) * 2
    found = evaluate(selective_scan, inputs)
    for name, exact in evaluate(reference.two_sample_scan, widened(inputs)).items():
        error = (found[name].double() - exact).norm() / max(exact.norm().item(), 1e-30)
        assert error < 1e-6, (name, error)


@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
@pytest.mark.parametrize("reverse", [False, True])
@every_rule
def test_packed_sequences(rule, reverse, name, device):
    """Empty sequences, one of a single step and one of several chunks: values, last samples and gradients."""
    ends = [0, 0, 4, 4, 5, 40, 40]
    inputs = on(device, make_scan_inputs(rule, batch=1, seqlen=40, sequences=6, previous=name, B="groups", reverse=reverse))
    found = assert_matches_reference(inputs | {"cu_seqlens": torch.tensor(ends, device=device)})
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        own = cut(inputs, begin, end) | {"initial_state": inputs["initial_state"][i : i + 1]}
        if name == "given":
            own["previous"] = tuple(x[i : i + 1] for x in inputs["previous"])
        torch.testing.assert_close(found["out"][..., begin:end], selective_scan(**own), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
@every_rule
def test_resets(rule, name, device):
    """A sequence that begins at a chunk's first step, and one inside of a chunk."""
    inputs = on(device, make_scan_inputs(rule, seqlen=2 * CHUNK + 3, previous=name))
    seq_idx = torch.zeros(2, 2 * CHUNK + 3, dtype=torch.int32, device=device)
    seq_idx[0, CHUNK:] += 1
    seq_idx[1, 1:] += 1
    seq_idx[:, CHUNK + 5 :] += 1
    assert_matches_reference(inputs | {"seq_idx": seq_idx})


@every_rule
def test_resets_inside_of_packed_sequences(rule, device):
    inputs = on(device, make_scan_inputs(rule, batch=1, seqlen=12, sequences=3, previous="given"))
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3]], device=device)
    assert_matches_reference(inputs | {"seq_idx": seq_idx, "cu_seqlens": torch.tensor([0, 5, 5, 12], device=device)})


def cut(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    def part(name: str, value: Any) -> Any:
        is_cut = name in OF_STEPS and isinstance(value, Tensor) and (value.dim() > 2 or name == "seq_idx")
        return value[..., begin:end] if is_cut else value

    return {name: part(name, value) for name, value in inputs.items()}


@pytest.mark.parametrize("split", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 40])
@pytest.mark.parametrize("form", ["per step", "groups", "constant"])
@every_rule
def test_split_anywhere_is_the_whole(rule, form, split, device):
    """Outputs, the last state and sample, and the gradients of all arguments, the first state and sample included."""
    inputs = on(device, make_scan_inputs(rule, seqlen=40, B=form, previous="given"))

    def in_two_parts(return_last_state: bool, **given: Any) -> Any:
        first, middle = selective_scan(**cut(given, 0, split), return_last_state=True)
        later = cut(given, split, 40) | {"initial_state": middle.state, "previous": (middle.u, middle.B)}
        second, last = selective_scan(**later, return_last_state=True)
        return torch.cat([first, second], -1), last

    whole = evaluate(selective_scan, inputs)
    for name, value in evaluate(in_two_parts, inputs).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
@every_rule
def test_states_at_positions(rule, name, device):
    inputs = on(device, make_scan_inputs(rule, seqlen=40, previous=name))
    positions = [0, 5, CHUNK, 40, 5]
    out, last, at = selective_scan(**inputs, return_last_state=True, states_at=positions)
    expected, expected_last, expected_at = reference.two_sample_scan(**inputs, return_last_state=True, states_at=positions)
    torch.testing.assert_close(out, expected)
    for found, value in zip(last, expected_last, strict=True):
        torch.testing.assert_close(found, value)
    for i, p in enumerate(positions):
        later = cut(inputs, p, 40) | {"initial_state": at.state[:, i], "previous": (at.u[:, i], at.B[:, i])}
        torch.testing.assert_close(selective_scan(**later), expected[..., p:])
        torch.testing.assert_close(at.state[:, i], expected_at[i].state)
        torch.testing.assert_close(at.u[:, i], expected_at[i].u)
        torch.testing.assert_close(at.B[:, i], expected_at[i].B)
    empty = selective_scan(**inputs, states_at=[])[1]
    assert [x.shape[1] for x in empty] == [0, 0, 0]


@every_rule
def test_states_of_packed_sequences(rule):
    inputs = make_scan_inputs(rule, batch=1, seqlen=12, sequences=3, previous="repeat") | {
        "cu_seqlens": torch.tensor([0, 0, 5, 12])
    }
    positions = [0, 3, 5, 6, 12]
    out, at = selective_scan(**inputs, states_at=positions)
    expected, expected_at = reference.two_sample_scan(**inputs, states_at=positions)
    torch.testing.assert_close(out, expected)
    for i, value in enumerate(expected_at):
        torch.testing.assert_close(at.state[:, i], value.state)
        torch.testing.assert_close(at.u[:, i], value.u)
        torch.testing.assert_close(at.B[:, i], value.B)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
@every_rule
def test_states_at_with_resets(rule, name, is_packed, device):
    """Sequences begin inside a piece, at a position, and in one row alone: outputs, states, samples and all gradients."""
    if is_packed:
        inputs = make_scan_inputs(rule, batch=1, seqlen=12, sequences=3, previous=name)
        inputs["cu_seqlens"] = torch.tensor([0, 0, 5, 12], dtype=torch.int32)
        inputs["seq_idx"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3]])
    else:
        inputs = make_scan_inputs(rule, previous=name)
        inputs["seq_idx"] = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 3]])
    positions = [2, 3, 5, 8, 11] if is_packed else [2, 3, 5]

    def with_states(function: Any) -> Any:
        def call(return_last_state: bool, **given: Any) -> Any:
            out, last, at = function(**given, return_last_state=return_last_state, states_at=positions)
            return out, (*last, *([torch.stack(x, 1) for x in zip(*at, strict=True)] if isinstance(at, list) else at))

        return call

    inputs = on(device, inputs)
    found = evaluate(with_states(selective_scan), inputs)
    for key, value in evaluate(with_states(reference.two_sample_scan), inputs).items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")


@every_rule
def test_gradcheck(rule, device):
    given, leaves, names = leaves_of(on(device, make_scan_inputs(rule, batch=1, dim=2, seqlen=3, dstate=2, previous="given")))

    def scan(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(names, tensors, strict=True))
        previous = (arguments.pop("previous_0"), arguments.pop("previous_1"))
        out, last = selective_scan(**given | arguments | {"previous": previous}, return_last_state=True)
        return (out, *last)

    assert torch.autograd.gradcheck(scan, leaves)


@every_rule
def test_later_arguments_do_not_reach_earlier_outputs(rule, device):
    inputs = on(device, make_scan_inputs(rule, seqlen=70))
    before = selective_scan(**inputs)
    for name in ("u", "delta", "B", "C", "z", "lam"):
        if name in inputs:
            changed = inputs[name].clone()
            changed[..., CHUNK] += 1
            after = selective_scan(**inputs | {name: changed})
            assert torch.equal(after[..., :CHUNK], before[..., :CHUNK])
            assert not torch.equal(after[..., CHUNK:], before[..., CHUNK:])


@every_rule
def test_a_step_of_size_zero_advances_the_sample(rule, device):
    inputs = on(device, make_scan_inputs(rule, delta_softplus=False, delta_bias=None, previous="given"))
    inputs["delta"] = inputs["delta"].abs()
    inputs["delta"][..., 3] = 0
    assert_matches_reference(inputs)
    _, at = selective_scan(**inputs, states_at=[3, 4])
    torch.testing.assert_close(at.state[:, 0], at.state[:, 1], rtol=0, atol=0)
    assert torch.equal(at.u[:, 1], inputs["u"][..., 3])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_lam_at_its_ends(value, device):
    """1 is zoh; with 0 only the previous sample enters."""
    inputs = on(device, make_scan_inputs("exp_trapezoidal", previous="given", lam_sigmoid=False, seqlen=40))
    inputs["lam"] = torch.full_like(inputs["u"], value)
    assert_matches_reference(inputs)
    if value == 1:
        one_sample = {name: x for name, x in inputs.items() if name not in ("lam", "lam_sigmoid", "previous")}
        expected = selective_scan(**one_sample | {"discretization": "zoh"})
        torch.testing.assert_close(selective_scan(**inputs), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(), (6, 1), (2, 1, 7), (1, 6, 1), (7,)])
def test_lam_broadcasts(shape, device):
    """By strides; its gradient is the sum over the axes that it lacks."""
    inputs = make_scan_inputs("exp_trapezoidal") | {"lam": torch.randn(shape, dtype=torch.float64)}
    assert_matches_reference(on(device, inputs))


def test_special_cases(device):
    inputs = on(device, make_scan_inputs("trapezoidal", seqlen=40))
    half = inputs | {"discretization": "gbt_two_sample", "alpha": 0.5}
    torch.testing.assert_close(selective_scan(**inputs), selective_scan(**half), rtol=1e-13, atol=1e-13)
    named = inputs | {"discretization": "gbt_two_sample(0.5)"}
    torch.testing.assert_close(selective_scan(**inputs), selective_scan(**named), rtol=1e-13, atol=1e-13)
    euler = {name: value for name, value in inputs.items() if name != "previous"} | {"discretization": "backward_euler"}
    implicit = inputs | {"discretization": "gbt_two_sample", "alpha": 1.0}
    torch.testing.assert_close(selective_scan(**euler), selective_scan(**implicit), rtol=1e-13, atol=1e-13)


@every_rule
def test_strides(rule, device):
    """Channels-last tensors, and ones that are contiguous along neither axis."""
    inputs = on(device, make_scan_inputs(rule, previous="given", B="groups", seqlen=40))
    expected = evaluate(selective_scan, inputs)
    for arrange in (
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda x: x[..., None].expand(*x.shape, 2)[..., 0],
    ):
        strided = {name: arrange(x) if name in OF_STEPS else x for name, x in inputs.items()}
        strided["previous"] = tuple(torch.stack([x, x], -1)[..., 0] for x in inputs["previous"])
        for name, value in evaluate(selective_scan, strided).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("previous", "orders"), [("zero", (1, 1, 1, 1)), ("repeat", (2, 2, 1, 2)), ("true", (2, 2, 1, 2))])
def test_orders_of_convergence(previous, orders):
    """The orders for h' = A h + cos 3t, with the true first sample, a repeated one or none."""
    A = -1.3
    for rule, order in zip(RULES, orders, strict=True):
        errors = []
        for steps in (256, 512, 1024):
            delta = 2.0 / steps
            t = torch.arange(1, steps + 1, dtype=torch.float64) * delta
            ones = torch.ones(1, 1, steps, dtype=torch.float64)
            before = (torch.ones(1, 1, dtype=torch.float64),) * 2 if previous == "true" else previous
            options = {"gbt_two_sample": {"alpha": 0.7}, "exp_trapezoidal": {"lam": ones / 2}}.get(rule, {})
            state = torch.full((1, 1), A, dtype=torch.float64)
            y = selective_scan(
                torch.cos(3 * t)[None, None], ones * delta, state, ones, ones, discretization=rule, previous=before, **options
            )
            wave = (torch.exp(3j * t) - torch.exp(A * t)) / (3j - A)
            errors.append((y[0, 0] - wave.real).abs().max().item())
        found = math.log2(errors[-2] / errors[-1])
        assert abs(found - order) < 0.1, (rule, errors)


def test_opcheck():
    ops = torch.ops.ssm_kernels
    for rule, options in (("exp_trapezoidal", {"previous": "given"}), ("foh_ramp", {"B": "constant", "previous": "given"})):
        given = make_scan_inputs(rule, seqlen=5, **options)
        u, B = given.pop("previous")
        names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state", "lam")
        tensors = [given.get(name) for name in names] + [u, B, None, None, None]
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
    inputs = make_scan_inputs(rule, previous="given")
    compiled = torch.compile(lambda given: selective_scan(**given, return_last_state=True), backend="aot_eager", fullgraph=True)
    for found, value in zip(
        torch.utils._pytree.tree_leaves(compiled(inputs)),
        torch.utils._pytree.tree_leaves(selective_scan(**inputs, return_last_state=True)),
        strict=True,
    ):
        torch.testing.assert_close(found, value)

    def of_u(u: Tensor) -> Tensor:
        return selective_scan(**inputs | {"u": u})

    several = torch.stack([inputs["u"], -inputs["u"]])
    torch.testing.assert_close(torch.vmap(of_u)(several), torch.stack([of_u(u) for u in several]))
    single = make_scan_inputs(rule, previous="given", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, last = selective_scan(**single, return_last_state=True)
    assert out.dtype == last.u.dtype == torch.bfloat16 and last.state.dtype == torch.float32


def test_autocast_of_an_expanded_lam():
    """It is cast before its expansion: of the same values and gradient."""
    inputs = make_scan_inputs("exp_trapezoidal", dtype=torch.float32)
    lam = torch.randn(6, 1, requires_grad=True)
    results = []
    for given in (lam, lam.expand(2, 6, 7), lam.expand(2, 6, 7).contiguous()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = selective_scan(**inputs | {"lam": given})
        results.append((out, *torch.autograd.grad(out.float().sum(), lam)))
    for out, gradient in results[1:]:
        assert torch.equal(out, results[0][0])
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"discretization": "zoh", "previous": "repeat"}, ValueError, "expected previous with a discretization that reads two"),
        ({"discretization": "zoh", "lam": 1}, ValueError, "expected lam with discretization 'exp_trapezoidal' only, got 'zoh'"),
        (
            {"lam": torch.zeros(2, 6, 7)},
            ValueError,
            "expected lam with discretization 'exp_trapezoidal' and no other, got 'trap",
        ),
        ({"discretization": "exp_trapezoidal"}, ValueError, "got 'exp_trapezoidal' without lam"),
        (
            {"lam_sigmoid": True},
            ValueError,
            "expected lam_sigmoid with discretization 'exp_trapezoidal' only, got 'trapezoidal'",
        ),
        ({"discretization": "gbt_two_sample"}, ValueError, "expected discretization 'gbt_two_sample' with alpha"),
        ({"discretization": "gbt_two_sample", "alpha": 1.5}, ValueError, "expected alpha from 0 to 1"),
        ({"alpha": 0.5}, ValueError, "expected alpha with discretization 'gbt' or 'gbt_two_sample' only, got 'trapezoidal'"),
        ({"previous": "first"}, ValueError, r"unknown previous 'first', expected 'zero', 'repeat' or a pair \(u, B\)"),
        ({"previous": 3}, TypeError, r"expected previous to be 'zero', 'repeat' or a pair \(u, B\), got int"),
        ({"previous": (None, None)}, TypeError, "expected the u of previous to be a tensor, got NoneType"),
        (
            {"previous": (torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))},
            ValueError,
            r"expected previous_u of shape \(batch, dim\) = \[2, 6\]",
        ),
        (
            {"previous": (torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64))},
            ValueError,
            r"expected previous_B of shape \(batch, dstate\) = \[2, 3\]",
        ),
        (
            {"previous": (torch.zeros(2, 6, dtype=torch.float64), None)},
            ValueError,
            "expected previous_B together with previous_u, unless B is constant",
        ),
        (
            {"discretization": "exp_trapezoidal", "lam": torch.zeros(3, 1)},
            ValueError,
            r"expected lam of shape \(batch, dim, seqlen\) = \[2, 6, 7\], or one that broadcasts to it, got \[3, 1\]",
        ),
        ({"reverse": True, "states_at": [0]}, ValueError, "expected states_at without reverse"),
    ],
)
def test_messages(changed, error, message):
    with pytest.raises(error, match=f"^selective_scan: {message}" if not message.startswith("got") else message):
        selective_scan(**make_scan_inputs("trapezoidal") | changed)


@pytest.mark.parametrize("resets", [False, True])
@every_rule
def test_summaries(rule, resets, device):
    """decay h + last_state is the last state for any h, and so are its gradients."""
    inputs = on(device, make_scan_inputs(rule, seqlen=40, previous="given"))
    if resets:
        seq_idx = torch.zeros(2, 40, dtype=torch.int32, device=device)
        seq_idx[0, 30:] = 1
        inputs["seq_idx"] = seq_idx
    names = ("u", "delta", "A", "B", "delta_bias", "initial_state", "lam", "previous_0", "previous_1")
    results = []
    for summarize in (False, True):
        given, leaves, found = leaves_of(inputs)
        if summarize:
            of_span = {name: given[name] for name in given if name not in ("C", "D", "z", "initial_state")}
            last_state, decay = selective_scan_summary(**of_span)
            last = decay * given["initial_state"] + last_state
        else:
            last = selective_scan(**given, return_last_state=True)[1].state
        weight = torch.linspace(-1, 1, last.numel(), dtype=torch.float64, device=device).view_as(last)
        wanted = [leaf for name, leaf in zip(found, leaves, strict=True) if name in names]
        results.append((last, *torch.autograd.grad((last * weight).sum(), wanted)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_summary_refuses_what_one_sample_has_not():
    of_span = {name: value for name, value in make_scan_inputs("foh_ramp").items() if name in ("u", "delta", "A", "B")}
    with pytest.raises(ValueError, match=r"^selective_scan_summary: expected previous with a discretization that reads two"):
        selective_scan_summary(**of_span, previous="repeat")


OPTIONAL = ("D", "z", "delta_bias", "initial_state", "lam", "previous_u", "previous_B", "delta_A", "seq_idx", "cu_seqlens")


@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", *OPTIONAL])
def test_wrong_kinds_of_each_tensor(name):
    """Through torch.ops: None for a required tensor, and sparse ones."""
    given = make_scan_inputs("exp_trapezoidal", previous="given")
    given["previous_u"], given["previous_B"] = given.pop("previous")
    given |= {"delta_A": torch.zeros(2, 6, 7, dtype=torch.float64)}
    given |= {"seq_idx": torch.zeros(2, 7, dtype=torch.int32), "cu_seqlens": torch.tensor([0, 7])}
    operator = torch.ops.ssm_kernels.selective_scan_two_sample
    names = ("u", "delta", "A", "B", "C", *OPTIONAL)
    options = {key: value for key, value in given.items() if key not in names}
    for value, error, kind in (
        (None, TypeError, "to be a tensor, got None"),
        (given[name].to_sparse(), NotImplementedError, "to be a dense tensor"),
    ):
        if value is not None or name not in OPTIONAL:
            with pytest.raises(error, match=f"^selective_scan: expected {name} {kind}"):
                operator(*[value if key == name else given[key] for key in names], **options)
