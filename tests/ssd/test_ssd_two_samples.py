"""``ssd_chunk_scan`` with discretizations that read two input samples a step, against the reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from two_sample_helpers import evaluate as evaluate_with
from two_sample_helpers import leaves_of, on, widened

from ssm_kernels import reference, ssd_chunk_scan

OPERATOR = "ssd_chunk_scan"
RULES = ("foh_ramp", "exp_trapezoidal")
every_rule = pytest.mark.parametrize("rule", RULES)
OF_STEPS = ("x", "dt", "B", "C", "z", "lam", "seq_idx")
CHUNK = 16


def make_inputs(
    rule: str,
    *,
    batch: int = 2,
    seqlen: int = 7,
    heads: int = 4,
    headdim: int = 3,
    groups: int = 2,
    dstate: int = 5,
    D: str = "heads",
    previous: str = "zero",
    sequences: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments, also of the reference. ``previous``: ``"given"`` for samples of both x and B."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    rows = batch if sequences is None else sequences
    inputs: dict[str, Any] = {
        "x": normal(batch, seqlen, heads, headdim),
        "dt": normal(batch, seqlen, heads) - 1,
        "A": -normal(heads, dtype=torch.float64).exp().to(wide),
        "B": normal(batch, seqlen, groups, dstate),
        "C": normal(batch, seqlen, groups, dstate),
        "D": normal(heads, *([headdim] if D == "headdim" else []), dtype=wide),
        "z": normal(batch, seqlen, heads, headdim),
        "dt_bias": normal(heads, dtype=wide),
        "initial_states": normal(rows, heads, headdim, dstate, dtype=wide),
        "dt_softplus": True,
        "chunk_size": CHUNK,
        "discretization": rule,
    }
    if rule == "exp_trapezoidal":
        inputs |= {"lam": normal(batch, seqlen, heads), "lam_sigmoid": True}
    samples = (normal(rows, heads, headdim), normal(rows, groups, dstate))
    return inputs | {"previous": samples if previous == "given" else previous} | options


def exact_scan(**inputs: Any) -> Any:
    return reference.two_sample_chunk_scan(**{name: value for name, value in inputs.items() if name != "chunk_size"})


def evaluate(function: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    return evaluate_with(function, inputs, "return_final_states")


def assert_matches_reference(inputs: dict[str, Any]) -> dict[str, Tensor]:
    found = evaluate(ssd_chunk_scan, inputs)
    if inputs["x"].dtype == torch.float64:
        for name, value in evaluate(exact_scan, inputs).items():
            # The gates of the matmuls are float64, their differences of sums too.
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
        return found
    is_short = inputs["x"].element_size() == 2 and inputs["x"].is_cuda
    for name, value in evaluate(exact_scan, widened(inputs)).items():
        actual = found[name]
        # The kernels round the operands of products: 2.5e-3 is the bound of their gradients.
        bound = max(2.5e-3 if is_short else 2e-6, 2e-6 + 1.15 * torch.finfo(actual.dtype).eps)
        if is_short:
            bound *= torch.finfo(inputs["x"].dtype).eps / torch.finfo(torch.bfloat16).eps * 4
        error = (actual.double() - value).norm() / max(value.norm().item(), 1e-30)
        assert error < bound, (name, error, bound)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "repeat": {"previous": "repeat"},
    "given": {"previous": "given"},
    "one_group": {"groups": 1, "previous": "given", "D": "headdim"},
    "group_of_each_head": {"groups": 4, "previous": "given"},
    "required_only": {**dict.fromkeys(("D", "z", "dt_bias", "initial_states")), "dt_softplus": False},
    "limits": {"dt_limit": (0.1, 0.6), "previous": "given"},
    "no_limits": {"dt_limit": None, "dt_softplus": False, "dt_bias": None, "previous": "given"},
    "chunk": {"seqlen": CHUNK, "previous": "given"},
    "chunk_and_one": {"seqlen": CHUNK + 1, "previous": "repeat"},
    "several_chunks": {"seqlen": 3 * CHUNK - 1, "previous": "given"},
    "default_chunk": {"seqlen": 130, "chunk_size": None, "previous": "given"},
    "one_step": {"seqlen": 1, "previous": "given"},
    "one_step_repeat": {"seqlen": 1, "previous": "repeat"},
    "no_steps": {"seqlen": 0, "previous": "given"},
    "no_initial_states": {"initial_states": None, "previous": "given", "seqlen": 20},
    "reverse": {"reverse": True, "previous": "given", "seqlen": 20},
    "reverse_repeat": {"reverse": True, "previous": "repeat", "seqlen": 70},
    "float32": {"dtype": torch.float32, "previous": "given", "seqlen": 40},
    "float16": {"dtype": torch.float16, "previous": "given"},
    "bfloat16": {"dtype": torch.bfloat16, "previous": "repeat", "seqlen": 40},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@every_rule
def test_against_the_reference(rule, options, device):
    assert_matches_reference(on(device, make_inputs(rule, **options)))


@pytest.mark.parametrize("z", [-1e-4, -0.7, -3.0, -30.0, -300.0])
@every_rule
def test_large_and_small_steps(rule, z, device):
    """Steps with dt A near z are accurate: no weight is divided by a decay, which underflows."""
    inputs = make_inputs(rule, seqlen=40, previous="given", dtype=torch.float32)
    inputs |= {"A": inputs["A"].clamp(-1.2, -0.8), "dt_softplus": False, "dt_bias": None}
    inputs["dt"] = -z * torch.sigmoid(inputs["dt"] / 4) * 2
    assert_matches_reference(on(device, inputs))


@every_rule
def test_a_strong_decay_beside_weak_ones(rule, device):
    inputs = make_inputs(rule, seqlen=40, previous="given", dt_softplus=False, dt_bias=None)
    inputs["dt"] = inputs["dt"].abs() / 10
    inputs["dt"][:, [3, CHUNK, 25]] = 1000
    found = assert_matches_reference(on(device, inputs))
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
@pytest.mark.parametrize("reverse", [False, True])
@every_rule
def test_packed_sequences(rule, reverse, name, device):
    """Empty sequences, one of a single step and one of several chunks: values, last samples and gradients."""
    ends = [0, 0, 4, 4, 5, 40, 40]
    inputs = on(device, make_inputs(rule, batch=1, seqlen=40, sequences=6, previous=name, reverse=reverse))
    found = assert_matches_reference(inputs | {"cu_seqlens": torch.tensor(ends, device=device)})
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        own = cut(inputs, begin, end) | {"initial_states": inputs["initial_states"][i : i + 1]}
        if name == "given":
            own["previous"] = tuple(x[i : i + 1] for x in inputs["previous"])
        out, last = ssd_chunk_scan(**own, return_final_states=True)
        torch.testing.assert_close(found["out"][:, begin:end], out, rtol=1e-12, atol=1e-12)
        for place, value in enumerate(last):
            torch.testing.assert_close(found[f"last_{place}"][i : i + 1], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
@pytest.mark.parametrize("reverse", [False, True])
@every_rule
def test_resets(rule, reverse, name, device):
    """Sequences that begin at a chunk's first and last step, and inside of a chunk."""
    inputs = on(device, make_inputs(rule, seqlen=2 * CHUNK + 3, previous=name, reverse=reverse))
    seq_idx = torch.zeros(2, 2 * CHUNK + 3, dtype=torch.int32, device=device)
    seq_idx[0, CHUNK:] += 1
    seq_idx[1, 1:] += 1
    seq_idx[1, CHUNK - 1 :] += 1
    seq_idx[:, CHUNK + 5 :] += 1
    assert_matches_reference(inputs | {"seq_idx": seq_idx})


@every_rule
def test_resets_inside_of_packed_sequences(rule, device):
    inputs = on(device, make_inputs(rule, batch=1, seqlen=12, sequences=3, previous="given"))
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3]], device=device)
    assert_matches_reference(inputs | {"seq_idx": seq_idx, "cu_seqlens": torch.tensor([0, 5, 5, 12], device=device)})


def cut(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    return {name: value[:, begin:end] if name in OF_STEPS else value for name, value in inputs.items()}


@pytest.mark.parametrize("split", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 40])
@every_rule
def test_split_anywhere_is_the_whole(rule, split, device):
    """Outputs, the last states and samples, and the gradients of all arguments, the first states and sample included."""
    inputs = on(device, make_inputs(rule, seqlen=40, previous="given"))

    def in_two_parts(return_final_states: bool, **given: Any) -> Any:
        first, middle = ssd_chunk_scan(**cut(given, 0, split), return_final_states=True)
        later = cut(given, split, 40) | {"initial_states": middle.state, "previous": (middle.u, middle.B)}
        second, last = ssd_chunk_scan(**later, return_final_states=True)
        return torch.cat([first, second], 1), last

    whole = evaluate(ssd_chunk_scan, inputs)
    for name, value in evaluate(in_two_parts, inputs).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
@every_rule
def test_states_at_positions(rule, name, device):
    inputs = on(device, make_inputs(rule, seqlen=40, previous=name))
    positions = [0, 5, CHUNK, 40, 5]
    out, last, at = ssd_chunk_scan(**inputs, return_final_states=True, states_at=positions)
    expected, expected_last, expected_at = exact_scan(**inputs, return_final_states=True, states_at=positions)
    torch.testing.assert_close(out, expected)
    for found, value in zip(last, expected_last, strict=True):
        torch.testing.assert_close(found, value)
    for i, p in enumerate(positions):
        later = cut(inputs, p, 40) | {"initial_states": at.state[:, i], "previous": (at.u[:, i], at.B[:, i])}
        torch.testing.assert_close(ssd_chunk_scan(**later), expected[:, p:])
        for found, value in zip(at, expected_at[i], strict=True):
            torch.testing.assert_close(found[:, i], value)
    empty = ssd_chunk_scan(**inputs, states_at=[])[1]
    assert [x.shape[1] for x in empty] == [0, 0, 0]


@every_rule
def test_states_of_packed_sequences(rule):
    inputs = make_inputs(rule, batch=1, seqlen=12, sequences=3, previous="repeat") | {"cu_seqlens": torch.tensor([0, 0, 5, 12])}
    positions = [0, 3, 5, 6, 12]
    out, at = ssd_chunk_scan(**inputs, states_at=positions)
    expected, expected_at = exact_scan(**inputs, states_at=positions)
    torch.testing.assert_close(out, expected)
    for i, values in enumerate(expected_at):
        for found, value in zip(at, values, strict=True):
            torch.testing.assert_close(found[:, i], value)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["zero", "repeat", "given"])
@every_rule
def test_states_at_with_resets(rule, name, is_packed, device):
    """Sequences begin inside a piece, at a position, and in one row alone: outputs, states, samples and all gradients."""
    if is_packed:
        inputs = make_inputs(rule, batch=1, seqlen=12, sequences=3, previous=name)
        inputs["cu_seqlens"] = torch.tensor([0, 0, 5, 12], dtype=torch.int32)
        inputs["seq_idx"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3]])
    else:
        inputs = make_inputs(rule, previous=name)
        inputs["seq_idx"] = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 3]])
    positions = [2, 3, 5, 8, 11] if is_packed else [2, 3, 5]

    def with_states(function: Any) -> Any:
        def call(return_final_states: bool, **given: Any) -> Any:
            out, last, at = function(**given, return_final_states=return_final_states, states_at=positions)
            return out, (*last, *([torch.stack(x, 1) for x in zip(*at, strict=True)] if isinstance(at, list) else at))

        return call

    inputs = on(device, inputs)
    found = evaluate(with_states(ssd_chunk_scan), inputs)
    for key, value in evaluate(with_states(exact_scan), inputs).items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"cu_seqlens": torch.tensor([0, 2, 2, 5])}], ids=str)
@every_rule
def test_gradcheck(rule, options):
    sizes = {"batch": 1, "seqlen": 5, "heads": 2, "headdim": 2, "dstate": 2, "groups": 1, "previous": "given", "chunk_size": 2}
    sequences = 3 if "cu_seqlens" in options else None
    given, leaves, names = leaves_of(make_inputs(rule, **sizes, sequences=sequences) | options)

    def scan(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(names, tensors, strict=True))
        previous = (arguments.pop("previous_0"), arguments.pop("previous_1"))
        out, last = ssd_chunk_scan(**given | arguments | {"previous": previous}, return_final_states=True)
        return (out, *last)

    assert torch.autograd.gradcheck(scan, leaves)


@pytest.mark.parametrize("step", [CHUNK - 1, CHUNK, CHUNK + 3])
@every_rule
def test_later_arguments_do_not_reach_earlier_outputs(rule, step, device):
    """Not the step size and the weight of step t + 1 either, which the weight of sample t has."""
    inputs = on(device, make_inputs(rule, seqlen=40))
    before = ssd_chunk_scan(**inputs)
    for name in ("x", "dt", "B", "C", "z", "lam"):
        if name in inputs:
            changed = inputs[name].clone()
            changed[:, step] += 1
            after = ssd_chunk_scan(**inputs | {name: changed})
            assert torch.equal(after[:, :step], before[:, :step])
            assert not torch.equal(after[:, step:], before[:, step:])


@every_rule
def test_a_step_of_size_zero_advances_the_sample(rule, device):
    inputs = on(device, make_inputs(rule, dt_softplus=False, dt_bias=None, previous="given"))
    inputs["dt"] = inputs["dt"].abs()
    inputs["dt"][:, 3] = 0
    assert_matches_reference(inputs)
    _, at = ssd_chunk_scan(**inputs, states_at=[3, 4])
    torch.testing.assert_close(at.state[:, 0], at.state[:, 1], rtol=0, atol=0)
    assert torch.equal(at.u[:, 1], inputs["x"][:, 3])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_lam_at_its_ends(value, device):
    """1 is zoh; with 0 only the previous sample enters."""
    inputs = on(device, make_inputs("exp_trapezoidal", previous="given", lam_sigmoid=False, seqlen=40))
    inputs["lam"] = torch.full_like(inputs["dt"], value)
    assert_matches_reference(inputs)
    if value == 1:
        one_sample = {name: x for name, x in inputs.items() if name not in ("lam", "lam_sigmoid", "previous")}
        expected = ssd_chunk_scan(**one_sample | {"discretization": "zoh"})
        torch.testing.assert_close(ssd_chunk_scan(**inputs), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(), (4,), (2, 1, 4), (1, 7, 1)])
def test_lam_broadcasts(shape, device):
    """By strides; its gradient is the sum over the axes that it lacks."""
    inputs = make_inputs("exp_trapezoidal") | {"lam": torch.randn(shape, dtype=torch.float64)}
    assert_matches_reference(on(device, inputs))


@pytest.mark.parametrize("value", [-60.0, 60.0])
def test_saturated_lam(value, device):
    inputs = on(device, make_inputs("exp_trapezoidal", previous="given", seqlen=20))
    assert_matches_reference(inputs | {"lam": torch.full_like(inputs["dt"], value)})


@every_rule
def test_strides(rule, device):
    inputs = on(device, make_inputs(rule, previous="given", seqlen=40))
    expected = evaluate(ssd_chunk_scan, inputs)
    for arrange in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x[..., None].expand(*x.shape, 2)[..., 0],
    ):
        strided = {name: arrange(x) if name in OF_STEPS else x for name, x in inputs.items()}
        strided["previous"] = tuple(torch.stack([x, x], -1)[..., 0] for x in inputs["previous"])
        for name, value in evaluate(ssd_chunk_scan, strided).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("needed", ["x", "dt", "A", "B", "lam", "previous_0", "initial_states"])
def test_each_gradient_alone(needed, device):
    inputs = on(device, make_inputs("exp_trapezoidal", previous="given", seqlen=20))
    expected = evaluate(ssd_chunk_scan, inputs)[f"grad_{needed}"]
    given, leaves, names = leaves_of(inputs)
    for name, leaf in zip(names, leaves, strict=True):
        leaf.requires_grad_(name == needed)
    out, last = ssd_chunk_scan(**given, return_final_states=True)
    results = [out, *last]
    generator = torch.Generator().manual_seed(5)
    weights = [(torch.randint(-4, 5, x.shape, generator=generator) / 4).to(x) for x in results]
    loss = sum((x * weight).sum() for x, weight in zip(results, weights, strict=True))
    torch.testing.assert_close(torch.autograd.grad(loss, leaves[names.index(needed)])[0], expected)


@pytest.mark.parametrize(("previous", "order"), [("zero", 1), ("repeat", 2), ("true", 2)])
def test_orders_of_convergence(previous, order):
    """The orders for h' = A h + cos 3t, with the true first sample, a repeated one or none."""
    A = -1.3
    for rule in RULES:
        errors = []
        for steps in (256, 512, 1024):
            dt = 2.0 / steps
            t = torch.arange(1, steps + 1, dtype=torch.float64) * dt
            ones = torch.ones(1, steps, 1, 1, dtype=torch.float64)
            before = (torch.ones(1, 1, 1, dtype=torch.float64),) * 2 if previous == "true" else previous
            options = {"lam": ones[..., 0] / 2} if rule == "exp_trapezoidal" else {}
            rate = torch.full((1,), A, dtype=torch.float64)
            x = torch.cos(3 * t)[None, :, None, None]
            y = ssd_chunk_scan(x, ones[..., 0] * dt, rate, ones, ones, discretization=rule, previous=before, **options)
            wave = (torch.exp(3j * t) - torch.exp(A * t)) / (3j - A)
            errors.append((y[0, :, 0, 0] - wave.real).abs().max().item())
        found = math.log2(errors[-2] / errors[-1])
        assert abs(found - order) < 0.1, (rule, errors)


def test_three_steps_by_hand():
    """h of one state, with the weights of the trapezoid: A = -1, steps of 1, lam = 1/4."""
    one = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    e, x = math.exp(-1), torch.tensor([2.0, -1.0, 4.0], dtype=torch.float64)
    lam = torch.full((1, 3, 1), 0.25, dtype=torch.float64)
    out, last = ssd_chunk_scan(
        x.view(1, 3, 1, 1), one[..., 0], -one[0, 0, 0], one, one, discretization="exp_trapezoidal", lam=lam,
        return_final_states=True,
    )  # fmt: skip
    h1 = 0.25 * 2
    h2 = e * h1 + 0.25 * -1 + 0.75 * e * 2
    h3 = e * h2 + 0.25 * 4 + 0.75 * e * -1
    torch.testing.assert_close(out.flatten(), torch.tensor([h1, h2, h3], dtype=torch.float64))
    assert last.state.item() == pytest.approx(h3) and last.u.item() == 4 and last.B.item() == 1


def test_opcheck():
    ops = torch.ops.ssm_kernels
    for rule in RULES:
        given = make_inputs(rule, seqlen=5, previous="given")
        x, B = given.pop("previous")
        names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "lam")
        tensors = [given.get(name) for name in names] + [x, B]
        with_grad = [each if each is None else each.clone().requires_grad_() for each in tensors]
        rest = (None, None, rule, rule == "exp_trapezoidal", False, 2, True, -1e300, 1e300, False)
        torch.library.opcheck(ops._ssd_chunk_scan_two_sample.default, (*with_grad, *rest))
        torch.library.opcheck(ops._ssd_chunk_scan_two_sample_fwd.default, (*tensors, *rest))


@every_rule
def test_compile_vmap_and_autocast(rule):
    inputs = make_inputs(rule, previous="given")

    def scan(given: dict[str, Any], returns_states: bool) -> Any:
        return ssd_chunk_scan(**given, return_final_states=returns_states)

    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    for returns_states in (True, False):
        for found, value in zip(
            torch.utils._pytree.tree_leaves(compiled(inputs, returns_states)),
            torch.utils._pytree.tree_leaves(scan(inputs, returns_states)),
            strict=True,
        ):
            torch.testing.assert_close(found, value)

    def of_x(x: Tensor) -> Tensor:
        return ssd_chunk_scan(**inputs | {"x": x})

    several = torch.stack([inputs["x"], -inputs["x"]])
    torch.testing.assert_close(torch.vmap(of_x)(several), torch.stack([of_x(x) for x in several]))
    single = make_inputs(rule, previous="given", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, last = ssd_chunk_scan(**single, return_final_states=True)
    assert out.dtype == last.u.dtype == torch.bfloat16 and last.state.dtype == torch.float32


SAMPLES = (torch.zeros(2, 4, 3, dtype=torch.float64), torch.zeros(2, 2, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"discretization": "zoh", "previous": "repeat"}, ValueError, "expected previous with a discretization that reads two"),
        ({"discretization": "zoh", "lam": 1}, ValueError, "expected lam with discretization 'exp_trapezoidal' only, got 'zoh'"),
        (
            {"lam": torch.zeros(2, 7, 4)},
            ValueError,
            "expected lam with discretization 'exp_trapezoidal' and no other, got 'foh",
        ),
        ({"discretization": "exp_trapezoidal"}, ValueError, "expected lam with .* got 'exp_trapezoidal' without lam"),
        ({"lam_sigmoid": True}, ValueError, "expected lam_sigmoid with discretization 'exp_trapezoidal' only, got 'foh_ramp'"),
        (
            {"discretization": "trapezoidal"},
            ValueError,
            "discretization 'trapezoidal' is not supported, expected one of: zoh, ",
        ),
        ({"discretization": "gbt_two_sample(0.5)"}, ValueError, "discretization 'gbt_two_sample.* is not supported"),
        ({"previous": "first"}, ValueError, r"unknown previous 'first', expected 'zero', 'repeat' or a pair \(x, B\)"),
        ({"previous": 3}, TypeError, r"expected previous to be 'zero', 'repeat' or a pair \(x, B\), got int"),
        ({"previous": (SAMPLES[0], None)}, TypeError, "expected the B of previous to be a tensor, got NoneType"),
        (
            {"previous": (SAMPLES[0][:, :3], SAMPLES[1])},
            ValueError,
            r"expected previous_x of shape \(batch, heads, headdim\) = \[2, 4, 3\]",
        ),
        (
            {"previous": (SAMPLES[0], SAMPLES[1][:, :1])},
            ValueError,
            r"expected previous_B of shape \(batch, groups, dstate\) = \[2, 2, 5\]",
        ),
        (
            {"discretization": "exp_trapezoidal", "lam": torch.zeros(3, 1)},
            ValueError,
            r"expected lam of shape \(batch, seqlen, heads\) = \[2, 7, 4\], or one that broadcasts to it, got \[3, 1\]",
        ),
        ({"reverse": True, "states_at": [0]}, ValueError, "expected states_at without reverse"),
        ({"gain": torch.zeros(2, 7, 4)}, ValueError, "expected dt and A, without gain, with a discretization that reads two"),
        (
            {"dt": None, "A": None, "log_decay": torch.zeros(2, 7, 4), "dt_bias": None, "dt_softplus": False},
            ValueError,
            "expected discretization with dt and A only, got it with log_decay",
        ),
    ],
)
def test_messages(changed, error, message):
    with pytest.raises(error, match=f"^ssd_chunk_scan: {message}"):
        ssd_chunk_scan(**make_inputs("foh_ramp") | changed)


OPTIONAL = ("D", "z", "dt_bias", "initial_states", "lam", "previous_x", "previous_B", "seq_idx", "cu_seqlens")


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", *OPTIONAL])
def test_wrong_kinds_of_each_tensor(name):
    """Through torch.ops: None for a required tensor, and sparse ones."""
    given = make_inputs("exp_trapezoidal", previous="given")
    given["previous_x"], given["previous_B"] = given.pop("previous")
    given |= {"seq_idx": torch.zeros(2, 7, dtype=torch.int32), "cu_seqlens": torch.tensor([0, 7])}
    operator = torch.ops.ssm_kernels.ssd_chunk_scan_two_sample
    required = ("x", "dt", "A", "B", "C")
    for value, error, kind in (
        (None, TypeError, "to be a tensor, got None"),
        (given[name].to_sparse(), NotImplementedError, "to be a dense tensor"),
    ):
        if value is not None or name not in OPTIONAL:
            changed = given | {name: value}
            with pytest.raises(error, match=f"^ssd_chunk_scan: expected {name} {kind}"):
                operator(*[changed.pop(key) for key in required], **changed)
