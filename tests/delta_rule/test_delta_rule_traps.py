"""The traps of the delta rule, by number: known mistakes of kernels and of their callers, each with its tests.

| trap | tests |
|---|---|
| 1, 2 a gradient is wrong where forward is right | test_delta_rule.py: test_each_gradient_alone, test_matches_reference |
| 3 bits differ between calls | test_delta_rule.py: test_same_bits_again |
| 4 reads out of bounds | test_operators_offsets.py and, here, test_no_value_outside_of_the_inputs |
| 5 32-bit offsets | test_delta_rule.py: test_states_of_many_elements |
| 6, 7 empty sequences, tails | test_delta_rule.py: test_packed_is_one_by_one, test_lengths |
| 8 the initial state is ignored or transposed | test_delta_rule.py: test_layout_of_the_state |
| 9 gradient paths through states | test_delta_rule.py: test_gradients_of_one_result |
| 10, 11, 12 gates of all sizes | test_delta_rule_numerics.py |
| 13 the convention of the gate | test_delta_rule.py: test_reference_of_raw_arguments |
| 14, 20 signatures, refusals of the peers' functions | tests/clients/test_fla.py |
| 15, 16, 19, 21 masks, options and lengths of layers | tests/layers |
| 17, 18 sizes of heads, dtypes of beta and gates | test_delta_rule.py |
| 22 graph breaks | tests/operators/test_operators_compile.py |
| 23 inverse by Neumann series | test_delta_rule_numerics.py: test_correlated_keys and, here, test_inverse_of_a_chunk |
| 24, 25 mLSTM and sLSTM | not of the delta rule |
| 26 waits for the device | test_delta_rule_cuda.py |
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from delta_rule_helpers import DELTA_RULE, GATES, evaluate, every_gate, make_inputs, scan
from torch import Tensor

from ssm_kernels import delta_rule_step

OPERATOR = "delta_rule_scan"


@pytest.mark.parametrize("options", [{}, {"qk_l2norm": True}, {"beta_sigmoid": True, "allow_neg_eigval": True}], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_gradcheck_of_gates_and_options(gate, options):
    """Traps 1 and 9: every way to make a gate with every way to make keys and betas, over two chunks."""
    inputs = make_inputs(**GATES[gate], **options, batch=1, seqlen=66, heads=1, value_heads=2)
    names = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]
    leaves = [inputs[name].requires_grad_() for name in names]

    def function(*tensors):
        return scan(**inputs | dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g", "initial_states"])
@every_gate
def test_no_value_outside_of_the_inputs(gate, name, device):
    """Trap 4: tails of a chunk read no element beside those of the inputs, where NaN is."""
    for seqlen in (1, 17, 65, 127):
        inputs = make_inputs(batch=1, seqlen=seqlen, gate=gate, device=device)
        if inputs[name] is None:
            continue
        cotangents = DELTA_RULE.make_cotangents(inputs)
        expected = evaluate(scan, inputs, cotangents)
        value = inputs[name]
        memory = value.new_full((value.numel() + 256,), math.nan)
        inside = memory[128 : 128 + value.numel()].view(value.shape)
        inside.copy_(value)
        actual = evaluate(scan, inputs | {name: inside}, cotangents)
        for result, found in actual.items():
            torch.testing.assert_close(found, expected[result], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"qk_l2norm": True, "num_householder": 2}], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_steps_are_the_scan(gate, options, device):
    """Traps 8 and 13: decoding has the scan's gates, norms and layout of states."""
    inputs = make_inputs(**GATES[gate], **options, seqlen=7, device=device)
    out, final = scan(**inputs)
    states, outputs, n = inputs["initial_states"].clone(), [], inputs["num_householder"]
    shared = ("scale", "qk_l2norm", "A_log", "dt_bias", "gate_lower_bound", "beta_sigmoid", "allow_neg_eigval")
    for t in range(7):
        token = {name: inputs[name][:, t] for name in ("q", "g") if inputs[name] is not None}
        for name in ("k", "v", "beta"):
            token[name] = inputs[name][:, n * t : n * t + n] if n > 1 else inputs[name][:, t]
        kept = {name: inputs[name] for name in shared}
        outputs.append(delta_rule_step(states, **token, **kept, num_householder=n))
    torch.testing.assert_close(torch.stack(outputs, 1), out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(states, final, rtol=1e-11, atol=1e-11)


def read_out_inverse(k: Tensor, beta: Tensor) -> Tensor:
    """(I + tril(diag(beta) k k^T, -1))^-1 diag(beta) of one chunk: what a state that begins with zero writes for unit values.

    With the value of step j the unit vector e_j, step i writes the number M_ij beta_j in its value's direction, which the final
    state gives back where the keys are orthogonal to one another in coordinates that only the state reads.
    """
    steps, size = k.shape
    own = torch.eye(steps, dtype=k.dtype, device=k.device)
    # q and the state see keys with a coordinate of each step's own; it has no weight in the products of keys.
    tiny = 2.0**-12
    keys = torch.cat([k, tiny * own], dim=1)
    v = own.view(1, steps, 1, steps)
    _, states = scan(
        **{"q": keys.view(1, steps, 1, -1), "k": keys.view(1, steps, 1, -1), "v": v, "beta": beta.view(1, steps, 1)}
    )
    assert states.shape == (1, 1, steps, size + steps)
    return states[0, 0, :, size:].T / tiny


# Bars of 16-bit calls on CUDA, whose kernel multiplies blocks of the inverse in TF32 and rounds what each step adds: twice the
# largest error of an emulation in PyTorch, over eleven draws and both dtypes.
BARS_OF_TF32 = {
    ("random", 1.0): 2.2e-3,
    ("random", 2.0): 3.4e-3,
    ("cosine 0.9", 1.0): 2.7e-3,
    ("cosine 0.9", 2.0): 1.2e-2,
    ("identical", 1.0): 4e-3,
    ("identical", 2.0): 8.2e-2,
}


@pytest.mark.parametrize(("keys", "beta"), [*itertools.product(("random", "cosine 0.9", "identical"), (1.0, 2.0))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inverse_of_a_chunk(dtype, keys, beta, device):
    """Trap 23: the elements of the inverse, of badly conditioned triangles, which a Neumann series loses."""
    generator = torch.Generator().manual_seed(1)
    own, shared = torch.randn(64, 32, generator=generator).double(), torch.randn(1, 32, generator=generator).double()
    weight = {"random": 0.0, "cosine 0.9": 0.9, "identical": 1.0}[keys]
    unit = torch.nn.functional.normalize
    k = unit(math.sqrt(weight) * unit(shared, dim=-1) + math.sqrt(1 - weight) * unit(own, dim=-1), dim=-1).to(dtype)
    betas = torch.full((64,), beta, dtype=dtype)
    actual = read_out_inverse(k.to(device), betas.to(device)).double().cpu()
    tiny = 2.0**-12
    products = k.double() @ k.double().T
    A = (beta * products).tril(-1)
    assert tiny**2 < 1e-7
    exact = torch.linalg.solve_triangular(A + torch.eye(64).double(), beta * torch.eye(64).double(), upper=False)
    error = (actual - exact).norm() / exact.norm()
    if device == "cuda" and dtype.itemsize == 2:
        assert error < BARS_OF_TF32[keys, beta]
    else:
        assert error < (1e-9 if dtype == torch.float64 else 2e-4)
