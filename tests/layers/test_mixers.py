"""The operators between the projections of mLSTM, the delta rules and Mamba-2: comparison with the composed operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from delta_rule_mixer_helpers import DELTA_RULE_MIXER
from mamba2_mixer_helpers import MAMBA2_MIXER, MAMBA2_PROJECTED
from mixer_spec import MixerSpec, assert_close, assert_vmap_is_a_loop, leaves_of
from mlstm_mixer_helpers import MLSTM_MIXER

OPERATOR = "every operator"
MIXERS = (MLSTM_MIXER, DELTA_RULE_MIXER, MAMBA2_MIXER, MAMBA2_PROJECTED)
every_mixer = pytest.mark.parametrize("mixer", MIXERS, ids=repr)


def for_each(name: str, values_of: Callable[[MixerSpec], Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrizes ``mixer`` and an argument with the values that it has for each of them."""
    cases = [pytest.param(mixer, value, id=f"{mixer}-{value}") for mixer in MIXERS for value in values_of(mixer)]
    return pytest.mark.parametrize(("mixer", name), cases)


@for_each("name", lambda mixer: mixer.options)
def test_is_the_composition(mixer, name, device):
    actual, expected = mixer.evaluate_both(mixer.make_inputs(device=device, **mixer.options[name]))
    assert_close(actual, expected, 1e-10)


@for_each("case", lambda mixer: [f"{name}-{result}" for name in mixer.of_one_result for result in mixer.results])
def test_gradient_of_one_result(mixer, case, device):
    name, result = case.split("-")
    actual, expected = mixer.evaluate_both(mixer.make_inputs(device=device, **mixer.options[name]), (result,))
    assert_close(actual, expected, 1e-10)


@for_each("name", lambda mixer: mixer.of_a_subset)
def test_gradients_of_a_subset(mixer, name, device):
    inputs = mixer.make_inputs(device=device, **mixer.options[name] | {"states": True})
    whole = mixer.evaluate(mixer.operator, inputs)
    for leaf in leaves_of(inputs):
        alone = mixer.evaluate(mixer.operator, inputs, leaves=[leaf])
        assert_close({leaf: alone[f"grad_{leaf}"]}, {leaf: whole[f"grad_{leaf}"]}, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@for_each("options", lambda mixer: mixer.of_low_precision)
def test_low_precision(mixer, options, dtype, device):
    """Forward and backward are those of the composed operators: the same kernels run on the same numbers."""
    actual, expected = mixer.evaluate_both(mixer.make_inputs(dtype=dtype, device=device, **mixer.sizes, **options))
    assert_close(actual, expected, 4 * torch.finfo(dtype).eps)
    assert torch.equal(actual["out"], expected["out"])


@for_each("name", lambda mixer: mixer.of_opcheck)
def test_opcheck(mixer, name, device):
    """Traces the operator of a mixer's first and last case, and forward and backward alone of the first."""
    traced = {mixer.of_opcheck[-1]: [""], mixer.of_opcheck[0]: ["", "_fwd", "_bwd"]}.get(name, [])
    mixer.opcheck(mixer.make_inputs(device=device, **mixer.options[name]), traced)


@pytest.mark.exhaustive
@for_each("name", lambda mixer: mixer.of_opcheck)
def test_opcheck_traced(mixer, name, device):
    mixer.opcheck(mixer.make_inputs(device=device, **mixer.options[name]), ["", "_fwd", "_bwd"])


@every_mixer
def test_gradcheck(mixer, device):
    options, results = mixer.of_gradcheck
    inputs = mixer.make_inputs(batch=1, seqlen=4, device=device, **mixer.whole | options)
    leaves = leaves_of(inputs)

    def run(*tensors: torch.Tensor) -> Any:
        found = mixer.operator(*(inputs | dict(zip(leaves, tensors, strict=True))).values())
        return tuple(value for name, value in zip(mixer.all_results, found, strict=True) if name in results)

    assert torch.autograd.gradcheck(run, [inputs[name].requires_grad_() for name in leaves])


@every_mixer
def test_vmap(mixer, device):
    assert_vmap_is_a_loop(mixer.operator, mixer.make_inputs(device=device, **mixer.whole))


@every_mixer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(mixer, dtype, device):
    inputs = mixer.make_inputs(dtype=torch.float32, device=device, **mixer.whole)
    with torch.autocast(device, dtype=dtype):
        actual, expected = mixer.evaluate_both(inputs)
    assert actual["out"].dtype == dtype and torch.equal(actual["out"], expected["out"])
    assert all(actual[f"grad_{name}"].dtype == inputs[name].dtype for name in leaves_of(inputs))
    assert_close(actual, {name: value.float() for name, value in expected.items()}, 4 * torch.finfo(dtype).eps)


@every_mixer
def test_second_derivatives_raise(mixer, device):
    inputs = mixer.make_inputs(device=device)
    first = next(iter(inputs.values())).requires_grad_()
    out, *_ = mixer.operator(*inputs.values())
    with pytest.raises((NotImplementedError, RuntimeError), match=mixer.layer):
        torch.autograd.grad(out.sum(), first, create_graph=True)[0].sum().backward()
