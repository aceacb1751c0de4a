"""selective_scan with a matrix A for each channel, or one for all."""

import math

import pytest
import torch

import ssm_kernels
from ssm_kernels import reference, selective_scan
from ssm_kernels.reference import ScanState, dense_coefficients

RULES = {
    "bilinear": {},
    "trapezoidal": {},
    "gbt": {"alpha": 0.7},
    "gbt_two_sample": {"alpha": 0.3},
    "euler": {},
    "backward_euler": {},
    "rk4": {},
}
OPERATOR = "selective_scan"
TWO_SAMPLES = ("trapezoidal", "gbt_two_sample")


def matrices(dim, dstate, generator, kind="random"):
    """Stable matrices: with complex eigenvalues, defective, symmetric, or far from normal."""
    eye = torch.eye(dstate, dtype=torch.float64)
    random = torch.randn(dim, dstate, dstate, dtype=torch.float64, generator=generator)
    if kind == "defective":  # one Jordan block in a random orthogonal basis
        basis = torch.linalg.qr(random).Q
        return basis @ (torch.diag(torch.ones(dstate - 1, dtype=torch.float64), 1) - 0.7 * eye) @ basis.mT
    if kind == "oscillating":
        return random - random.mT - 0.1 * eye
    if kind == "stiff":  # decay rates from 1 to 1e5
        basis = torch.linalg.qr(random).Q
        return basis @ torch.diag(-torch.logspace(0, 5, dstate, dtype=torch.float64)) @ basis.mT
    if kind == "legs":  # HiPPO-LegS, whose eigenvectors are dependent in practice
        n = torch.arange(dstate, dtype=torch.float64)
        lower = -torch.sqrt(2 * n[:, None] + 1) * torch.sqrt(2 * n + 1)
        return (torch.tril(lower, -1) - torch.diag(n + 1)).expand(dim, dstate, dstate).contiguous()
    return 0.5 * random / dstate**0.5 - eye


def inputs_of(
    batch=2, dim=3, seqlen=7, dstate=4, *, groups=None, shared=False, kind="random", seed=0, dtype=torch.float64, B=3, **options
):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    wide = torch.promote_types(dtype, torch.float32)
    shape = (batch, dstate, seqlen) if groups is None else (batch, groups, dstate, seqlen)
    constant = (dim, dstate)
    return {
        "u": randn(batch, dim, seqlen).to(dtype),
        "delta": randn(batch, dim, seqlen).to(dtype),
        "A": matrices(1 if shared else dim, dstate, generator, kind).to(wide),
        "B": randn(*constant).to(wide) if B == 2 else randn(*shape).to(dtype),
        "C": randn(*constant).to(wide) if options.pop("C", 3) == 2 else randn(*shape).to(dtype),
        "D": randn(dim).to(wide),
        "z": randn(batch, dim, seqlen).to(dtype),
        "delta_bias": (0.3 * randn(dim) - 1).to(wide),
        "delta_softplus": True,
    } | options


def expected_of(inputs, **options):
    double = {name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
              for name, value in inputs.items()}  # fmt: skip
    scan = reference.two_sample_scan if options["discretization"] in TWO_SAMPLES else reference.selective_scan
    return scan(**double | options)


def on(device, inputs):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def close(found, expected, tolerance=1e-11):
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for each, other in zip(found, expected, strict=True):
            close(each, other, tolerance)
    elif expected is not None:
        assert found.shape == expected.shape
        error = (found.double().cpu() - expected.double()).norm() / max(1e-30, expected.double().norm().item())
        assert error <= tolerance, error.item()


def compare(inputs, options, device="cpu", tolerance=1e-10, seed=1, **further):
    """Results and all gradients against the reference in float64."""
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    leaves = {name: inputs[name].detach().clone().to(device).requires_grad_() for name in names}
    originals = {name: inputs[name].detach().double().clone().requires_grad_() for name in names}
    rest = {name: value for name, value in inputs.items() if name not in names}
    found = selective_scan(**leaves, **on(device, rest), **options, return_last_state=True, **on(device, further))
    expected = expected_of({**originals, **rest}, **options, return_last_state=True, **further)
    close(found, expected, tolerance)
    generator = torch.Generator().manual_seed(seed)
    flat = [found[0], *(found[1] if isinstance(found[1], tuple) else found[1:])][:2]
    flat_expected = [expected[0], *(expected[1] if isinstance(expected[1], tuple) else expected[1:])][:2]
    grads = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in flat_expected]
    torch.autograd.backward(flat_expected, grads)
    torch.autograd.backward(flat, [g.to(x.dtype).to(device) for g, x in zip(grads, flat, strict=True)])
    for name in names:
        if originals[name].grad.norm() > 0:
            close(leaves[name].grad, originals[name].grad, tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_equals_reference(rule, device):
    state = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    compare(inputs_of(seqlen=37, initial_state=state), {"discretization": rule, **RULES[rule]}, device)


@pytest.mark.parametrize("dstate", [1, 2, 3, 5, 8, 15, 16, 17, 31, 32])
def test_sizes(dstate, device):
    compare(inputs_of(1, 2, 19, dstate), {"discretization": "trapezoidal"}, device)


@pytest.mark.parametrize("kind", ["defective", "oscillating", "stiff", "legs"])
@pytest.mark.parametrize("rule", ["bilinear", "backward_euler", "gbt_two_sample"])
def test_kinds_of_matrices(rule, kind, device):
    options = {"discretization": rule} | ({"alpha": 0.6} if rule == "gbt_two_sample" else {})
    compare(inputs_of(1, 3, 20, 9, kind=kind), options, device, tolerance=1e-9)


@pytest.mark.parametrize("layout", ["groups", "shared", "constant B", "constant C", "one step", "no z", "odd channels"])
def test_layouts(layout, device):
    changed = {
        "groups": {"dim": 6, "groups": 2},
        "shared": {"shared": True},
        "constant B": {"B": 2},
        "constant C": {"C": 2},
        "one step": {"seqlen": 1},
        "no z": {"z": None, "D": None, "delta_bias": None},
        "odd channels": {"dim": 37, "seqlen": 18},
    }[layout]
    inputs = {name: value for name, value in inputs_of(**changed).items() if value is not None}
    for rule in ("gbt_two_sample", "rk4"):
        compare(inputs, {"discretization": rule, **RULES[rule]}, device)


@pytest.mark.parametrize("previous", ["repeat", "given"])
@pytest.mark.parametrize("B", [2, 3])
def test_previous_sample(previous, B, device):
    inputs = inputs_of(seqlen=18, B=B)
    generator = torch.Generator().manual_seed(5)
    sample = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    matrix = None if B == 2 else torch.randn(2, 4, dtype=torch.float64, generator=generator)
    if previous == "repeat":
        compare(inputs, {"discretization": "trapezoidal"}, device, previous="repeat")
        return
    results = []
    for where, scan in ((device, selective_scan), ("cpu", expected_of)):
        leaves = on(
            where, {name: x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        )
        given = tuple(None if x is None else x.to(where).requires_grad_() for x in (sample.clone(), matrix))
        tensors = [x for x in (*leaves.values(), *given) if isinstance(x, torch.Tensor)]
        options = {"discretization": "gbt_two_sample", "alpha": 0.3, "previous": given}
        out = scan(**leaves, **options) if scan is selective_scan else scan(leaves, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    close(*results, 1e-10)


@pytest.mark.parametrize("rule", ["bilinear", "trapezoidal"])
@pytest.mark.parametrize("reverse", [False, True])
def test_packed(rule, reverse, device):
    generator = torch.Generator().manual_seed(2)
    state = torch.randn(4, 3, 4, dtype=torch.float64, generator=generator)
    inputs, options = inputs_of(1, 3, 41, initial_state=state), {"discretization": rule}
    compare(inputs, options, device, cu_seqlens=torch.tensor([0, 5, 5, 23, 41]), reverse=reverse)
    del inputs["initial_state"]
    seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 1, 20]))[None]
    compare(inputs, options, device, seq_idx=seq_idx, reverse=reverse)


def test_reverse(device):
    compare(inputs_of(seqlen=35), {"discretization": "trapezoidal"}, device, reverse=True)


@pytest.mark.parametrize("rule", RULES)
def test_gradcheck(rule):
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    inputs = inputs_of(1, 2, 18, 3, seed=4)
    state = torch.randn(1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))

    def scan(initial_state, *tensors):
        results = selective_scan(
            *tensors,
            discretization=rule,
            **RULES[rule],
            delta_softplus=True,
            initial_state=initial_state,
            return_last_state=True,
        )
        return results[0], results[1].state if rule in TWO_SAMPLES else results[1]

    tensors = [x.requires_grad_() for x in (state, *(inputs[name] for name in names))]
    assert torch.autograd.gradcheck(scan, tensors)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "rk4"])
def test_diagonal_matrices_equal_the_diagonal_scan(rule, device):
    inputs = on(device, inputs_of(seqlen=21, dstate=6))
    diagonal = -torch.rand(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(8)).to(device)
    options = {"discretization": rule, **RULES[rule]}
    found = selective_scan(**inputs | {"A": torch.diag_embed(diagonal)}, **options, return_last_state=True)
    expected = selective_scan(**inputs | {"A": diagonal}, **options, return_last_state=True)
    close(found, [x.cpu() if isinstance(x, torch.Tensor) else [y.cpu() for y in x] for x in expected], 1e-12)


@pytest.mark.parametrize("diagonal", [False, True])
def test_sample_before_the_first_position(diagonal):
    """It repeats the first one; a packed call without steps has none, and no state."""
    for seqlen, positions in ((5, [0, 3]), (0, [0])):
        inputs = inputs_of(batch=1, seqlen=seqlen)
        if diagonal:
            inputs["A"] = inputs["A"].diagonal(dim1=1, dim2=2)
        options = {"discretization": "trapezoidal", "previous": "repeat", "states_at": positions}
        if seqlen == 0:
            options |= {"cu_seqlens": torch.tensor([0, 0, 0]), "initial_state": torch.ones(2, 3, 4, dtype=torch.float64)}
        _, found = selective_scan(**inputs, **options)
        _, expected = expected_of(inputs, **options)
        for of_all, *of_each in zip(found, *expected, strict=True):
            close(of_all, torch.stack(of_each, dim=1))


@pytest.mark.parametrize("rule", ["bilinear", "trapezoidal"])
def test_split_equals_whole(rule, device):
    inputs = on(device, inputs_of(seqlen=40))
    options = {"discretization": rule, "return_last_state": True}
    whole, last, at = selective_scan(**inputs, **options, states_at=[0, 17, 40])
    first, state = selective_scan(**{k: v[..., :17] if k in "u delta B C z" else v for k, v in inputs.items()}, **options)
    given = {"initial_state": state}
    if rule == "trapezoidal":
        assert isinstance(state, ScanState)
        given = {"initial_state": state.state, "previous": (state.u, state.B)}
    rest = {k: v[..., 17:] if k in "u delta B C z" else v for k, v in inputs.items()}
    second, end = selective_scan(**rest, **options, **given)
    close(torch.cat([first, second], -1), whole.cpu(), 1e-12)
    states = at.state if rule == "trapezoidal" else at
    of = (lambda x: x.state) if rule == "trapezoidal" else (lambda x: x)
    close(states[:, 1], of(state).cpu(), 1e-12)
    close(of(end), of(last).cpu(), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dstate", [16, 24])
def test_dtypes(dtype, dstate, device):
    inputs = inputs_of(2, 5, 70, dstate, dtype=dtype, groups=1)
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    for rule in ("bilinear", "trapezoidal"):
        compare(inputs, {"discretization": rule}, device, tolerance)


def test_stiff_fp32_is_stable():
    inputs = inputs_of(1, 2, 200, 8, kind="stiff", dtype=torch.float32)
    for rule in ("bilinear", "backward_euler"):
        found = selective_scan(**inputs, discretization=rule)
        close(found, expected_of(inputs, discretization=rule), 1e-5)


def test_empty():
    for batch, dim, seqlen in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        inputs = inputs_of(batch, dim, seqlen)
        for name in "ABC":
            inputs[name].requires_grad_()
        out, state = selective_scan(**inputs, discretization="bilinear", return_last_state=True)
        assert out.shape == (batch, dim, seqlen) and torch.equal(state, torch.zeros(batch, dim, 4, dtype=torch.float64))
        (out.sum() + state.sum()).backward()
        for name in "ABC":
            assert torch.equal(inputs[name].grad, torch.zeros_like(inputs[name]))


def test_nan_stays_in_its_channel():
    inputs = inputs_of(seqlen=20)
    inputs["A"][1, 0, 0] = math.nan
    out = selective_scan(**inputs, discretization="bilinear")
    assert out[:, 1].isnan().all() and out[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize("rule", ["zoh", "zoh_exact", "poly", "highorder", "dirac", "foh_ramp", "exp_trapezoidal"])
def test_refuses_rules_with_exponentials_by_name(rule):
    inputs = inputs_of()
    lam = {"lam": torch.full((2, 3, 7), 0.5, dtype=torch.float64)} if rule == "exp_trapezoidal" else {}
    with pytest.raises(ValueError, match=f"'rk4' with A of shape .*, got '{rule}', which needs the exponential of a matrix"):
        selective_scan(**inputs, discretization=rule, **lam)
    scan = reference.selective_scan if rule in ssm_kernels.discretizations or rule == "dirac" else reference.two_sample_scan
    assert scan(**inputs, discretization=rule, **lam).isfinite().all()


def test_refuses_other_arguments():
    inputs = inputs_of()
    with pytest.raises(ValueError, match="expected no delta_A with A of shape"):
        selective_scan(**inputs, discretization="bilinear", delta_A=inputs["delta"])
    with pytest.raises(ValueError, match="expected lam with discretization 'exp_trapezoidal' only"):
        selective_scan(**inputs, discretization="trapezoidal", lam=inputs["delta"])
    with pytest.raises(ValueError, match="expected dstate from 1 to 32 with a matrix A for each channel, got 33"):
        selective_scan(**inputs_of(dstate=33), discretization="bilinear")
    with pytest.raises(ValueError, match=r"expected A of shape \(dim, dstate, dstate\)"):
        selective_scan(**inputs | {"A": inputs["A"][:, :, :3]}, discretization="bilinear")


@pytest.mark.parametrize(
    "rule", ["zoh", "zoh_exact", "poly", "highorder", "foh_ramp", "exp_trapezoidal", "bilinear", "trapezoidal"]
)
def test_reference_coefficients_of_a_diagonal_matrix(rule):
    diagonal = -torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)
    delta = torch.tensor(0.7, dtype=torch.float64)
    if rule in ssm_kernels.two_sample_discretizations:
        options = {"lam": torch.tensor(0.3, dtype=torch.float64)} if rule == "exp_trapezoidal" else {}
        expected = reference.two_sample_coefficients(rule, delta, diagonal, **options)
    else:
        options, expected = {}, (*reference.coefficients(rule, delta, diagonal), torch.zeros(3, dtype=torch.float64))
    for found, other in zip(dense_coefficients(rule, delta, torch.diag(diagonal), **options), expected, strict=True):
        torch.testing.assert_close(found, torch.diag(other.expand(3)), rtol=1e-12, atol=1e-12)


def test_operator_check():
    inputs = inputs_of(1, 2, 5, 3)
    tensors = [inputs[name].requires_grad_() for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    torch.library.opcheck(torch.ops.ssm_kernels.selective_scan_dense.default, tensors, {"discretization": "trapezoidal"})
