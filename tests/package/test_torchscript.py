"""TorchScript: what ``torch.jit.script`` refuses, and what ``torch.jit.trace`` computes at other sizes or refuses."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import itertools
import pickle
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from decoding_helpers import DECODING_STEPS
from layer_helpers import LAYERS, MIXERS, RECURRENCES, WIDTH, assert_all_close, make_layer, make_sequence, new_layer, width_of
from model_helpers import make_model, make_tokens
from operator_spec import Inputs, OperatorSpec, tensor_names
from operators import ALL_SCANS, OPERATORS, over
from plain_delta_layers import DELTA_LAYERS, make_delta_layer
from process_pool import Mesh, Place, Processes
from recurrence_helpers import PLAIN, make_inputs, step_inputs
from summary_helpers import SUMMARIES
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import ssm_kernels
from ssm_kernels import models, reference

# torch.jit.script and torch.jit.trace warn that they are deprecated, and of Python's values in each check of a shape.
pytestmark = pytest.mark.filterwarnings("ignore")

PACKAGES = ("ssm_kernels", "ssm_kernels.reference", "ssm_kernels.distributed.functions", "ssm_kernels.models")
COMPAT = ("selective_scan", "causal_conv1d", "ssd", "fla", "layer_norm", "layernorm", "norms")
COMPAT += ("conv_extensions", "scan_extensions")
LOOPS = "the loops of ssm_kernels.reference over steps and sequences"
NOT_OF_TENSORS = {"build_info", "parameter_groups"}


def functions_of(package: str) -> dict[str, Callable[..., Any]]:
    module = importlib.import_module(package)
    found = {name: getattr(module, name) for name in module.__all__ if name not in NOT_OF_TENSORS}
    return {name: value for name, value in found.items() if isinstance(value, types.FunctionType)}


def refuses_script(target: Any, name: str) -> None:
    sentence = f"{name}: torch.jit.script is not supported, and PyTorch has deprecated TorchScript; use torch.compile or "
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}torch.export$"):
        torch.jit.script(target)


def refuses_trace(function: Callable[..., Any], inputs: Iterable[Tensor], name: str, what: str) -> None:
    message = f"{name}: torch.jit.trace does not support {what}; use torch.compile or torch.export"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        torch.jit.trace(function, tuple(inputs))


# ----- torch.jit.script


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_refuse_script(package: str) -> None:
    functions = functions_of(package)
    assert functions
    for name, function in functions.items():
        refuses_script(function, name)
        # The hook changes nothing else of a function.
        assert pickle.loads(pickle.dumps(function)) is function is copy.deepcopy(function)
        assert inspect.signature(function) == inspect.signature(inspect.unwrap(function)) and function.__name__ == name


@pytest.mark.parametrize("module", COMPAT)
def test_functions_of_peers_refuse_script(module: str) -> None:
    functions = functions_of(f"ssm_kernels.compat.{module}")
    decorated = {name: function for name, function in functions.items() if hasattr(function, "__wrapped__")}
    assert decorated
    for function in decorated.values():
        refuses_script(function, function.__name__)


def test_functions_that_call_those_of_peers_refuse_script() -> None:
    refuses_script(importlib.import_module("ssm_kernels.compat.causal_conv1d").causal_conv1d_fn, "causal_conv1d_fn")


def test_references_and_norms_of_peers_refuse_script() -> None:
    for name, function in functions_of("ssm_kernels.compat.references").items():
        refuses_script(function, name)
    for module, name in (("norms", "RMSNorm"), ("norms", "LayerNorm"), ("layer_norm", "RMSNorm")):
        refuses_script(getattr(importlib.import_module(f"ssm_kernels.compat.{module}"), name)(4), name)


def a_block() -> nn.Module:
    return ssm_kernels.nn.Block(WIDTH, lambda _: new_layer("Mamba"), mlp_cls=a_mlp)


def a_mlp(width: int = WIDTH) -> nn.Module:
    return ssm_kernels.nn.GatedMLP(width)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: new_layer(name) for name in LAYERS},  # type: ignore[misc]
    **{name: lambda name=name: make_delta_layer(name) for name in DELTA_LAYERS},  # type: ignore[misc]
    "MLSTM": lambda: ssm_kernels.nn.MLSTM(8, 2),
    "Mamba3": lambda: ssm_kernels.nn.Mamba3(8, headdim=8),
    "Block": a_block,
    "GatedMLP": a_mlp,
    "MambaLM": lambda: make_model("Mamba"),
    "MixerModel": lambda: make_model("Mamba2").backbone,
    "RecurrentMixer": lambda: models.RecurrentMixer(WIDTH),
}


def test_every_module_is_in_the_table() -> None:
    public = [getattr(package, name) for package in (ssm_kernels.nn, models) for name in package.__all__]
    assert {each.__name__ for each in public if isinstance(each, type) and issubclass(each, nn.Module)} == MAKERS.keys()


@pytest.mark.parametrize("name", MAKERS)
def test_modules_refuse_script(name: str) -> None:
    module = MAKERS[name]()
    refuses_script(module, name)
    refuses_script(type(module), name)
    refuses_script(nn.ModuleDict({"of_user": nn.Sequential(nn.Linear(2, 2), copy.deepcopy(module))}), name)
    mine = type("Mine", (type(module),), {})
    refuses_script(mine, "Mine")
    for method in ("forward", "step"):
        if name in LAYERS:
            refuses_script(getattr(module, method), f"{name}.{method}")


def test_code_of_a_user_refuses_script() -> None:
    def scan(a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(ssm_kernels.linear_scan(a, b))

    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ssm_kernels.causal_conv1d(x, torch.ones(1, 2))

    refuses_script(scan, "linear_scan")
    refuses_script(Mine(), "causal_conv1d")


def test_operators_of_the_dispatcher_are_scripted() -> None:
    """``torch.ops`` has no Python: with gradients, saved and loaded."""

    def scan(a: Tensor, b: Tensor, u: Tensor, A: Tensor, B: Tensor) -> Tensor:
        h, last = torch.ops.ssm_kernels.linear_scan(a, b, reverse=True)
        out, _ = torch.ops.ssm_kernels.selective_scan(u, u, A, B, B, discretization="bilinear")
        return h.sum() + 2 * last.sum() + 3 * out.square().sum()

    scripted = saved(torch.jit.script(scan))
    for batch, seqlen in ((2, 5), (3, 9)):
        a, b = torch.rand(2, batch, seqlen, 4, dtype=torch.float64).unbind()
        u, A, B = torch.rand(batch, 6, seqlen).double(), -torch.rand(6, 3).double(), torch.rand(batch, 3, seqlen).double()
        inputs = [tensor.requires_grad_() for tensor in (a, b, u, A, B)]
        actual, expected = (torch.autograd.grad(function(*inputs), inputs) for function in (scripted, scan))
        assert_all_close(actual, expected)


# ----- torch.jit.trace


def saved(program: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    return torch.jit.load(file)


def results_of(function: Callable[..., Any], inputs: Inputs, modified: bool = False) -> list[Tensor]:
    """The results, and the gradients of a loss or else the tensors themselves, which the function may modify."""
    leaves = {name: value.clone() for name, value in inputs.items()}
    names = [] if modified else tensor_names(leaves)
    for name in names:
        leaves[name].requires_grad_()
    found = function(*leaves.values())
    results = [found] if isinstance(found, Tensor) else [*torch.utils._pytree.tree_leaves(found)]
    parameters = [*function.parameters()] if isinstance(function, nn.Module) and not modified else []
    wanted = [*parameters, *(leaves[name] for name in names)]
    if modified or not wanted:
        return [*results, *leaves.values()]
    loss = sum(result.square().sum() for result in results if result.requires_grad)
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    return results + [torch.zeros(()) if gradient is None else gradient for gradient in gradients]


def is_traced(function: Callable[..., Any], example: Inputs, others: Iterable[Inputs], modified: bool = False) -> None:
    """Traces and compares results and gradients at the sizes of the example and at others."""
    program = saved(torch.jit.trace(function, tuple(value.clone() for value in example.values()), check_trace=False))
    for inputs in (example, *others):
        assert_all_close(results_of(program, inputs, modified), results_of(function, inputs, modified))


def call_of(function: Callable[..., Any], inputs: Inputs) -> tuple[Callable[..., Any], list[str]]:
    """A function of the tensors among the inputs, by position, and their names."""
    names = [name for name, value in inputs.items() if isinstance(value, Tensor)]
    others = {name: value for name, value in inputs.items() if name not in names}
    return lambda *tensors: function(**dict(zip(names, tensors, strict=True)), **others), names


def is_traced_by_name(function: Callable[..., Any], example: Inputs, others: Iterable[Inputs], modified: bool = False) -> None:
    call, names = call_of(function, example)
    first, *rest = ({name: inputs[name] for name in names} for inputs in (example, *others))
    is_traced(call, first, rest, modified)


def sizes_of(options: Inputs) -> Inputs:
    """Options of ``make_inputs`` for another batch and length."""
    return options | ({"cu_seqlens": (0, 2, 2, 7, 11)} if "cu_seqlens" in options else {"batch": 3, "seqlen": 11})


@over(OPERATORS | ALL_SCANS | SUMMARIES)
def test_operators_are_traced(operator: OperatorSpec) -> None:
    for key in operator.compiled:
        options = operator.options[key]
        if "resets" not in options:
            is_traced_by_name(operator, operator.make_inputs(**options), [operator.make_inputs(**sizes_of(options), seed=1)])


@pytest.mark.parametrize("name", PLAIN)
def test_steps_of_recurrences_are_traced(name: str) -> None:
    variant = PLAIN[name]
    example, other = (step_inputs(variant, make_inputs(variant, batch=batch)) for batch in (2, 3))
    is_traced_by_name(variant.step, example, [other])


def test_steps_in_place_are_traced() -> None:
    for function, step in DECODING_STEPS.items():
        for slots in (None, 5):
            example, other = (step.make_inputs(batch=batch, slots=slots) for batch in (2, 3))
            is_traced_by_name(getattr(ssm_kernels, function), example, [other], modified=True)


class Wrapped(nn.Module):
    """Calls a layer with one argument by keyword."""

    def __init__(self, layer: nn.Module, keyword: str | None = None, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layer, self.keyword, self.call = layer, keyword, call

    def forward(self, *tensors: Tensor) -> Any:
        if self.call is not None:
            return self.call(self.layer, *tensors)
        return self.layer(tensors[0], **({} if self.keyword is None else {self.keyword: tensors[1]}))


def of_layer(name: str, keyword: str | None, batch: int, seqlen: int) -> Inputs:
    x = make_sequence(batch, seqlen, width_of(new_layer(name)))
    starts = make_sequence(batch, seqlen, seed=1) > 0.5
    lengths = torch.arange(1, batch + 1)
    offsets = torch.tensor([*range(batch), batch * seqlen])
    others = {"reset": starts, "seq_idx": starts.cumsum(1), "lengths": lengths, "cu_seqlens": offsets}
    if keyword == "cu_seqlens":
        x = x.reshape(1, batch * seqlen, -1)
    return {"x": x} | ({} if keyword is None else {keyword: others[keyword]})


OF_LAYERS = [
    *itertools.product(LAYERS, (None, "cu_seqlens")),
    *itertools.product((*MIXERS, "SelectiveSSM"), ("seq_idx",)),
    *itertools.product(RECURRENCES, ("reset", "lengths")),
]


@pytest.mark.parametrize(("name", "keyword"), OF_LAYERS)
def test_layers_are_traced(name: str, keyword: str | None) -> None:
    """From one example, of one row and one step too, at other sizes."""
    options = {"batch_first": True, "bidirectional": True} if name in RECURRENCES else {}
    sizes = ((2, 5), (3, 9), (1, 1)) if keyword != "lengths" else ((2, 5), (3, 9))
    first, *others = (of_layer(name, keyword, *each) for each in sizes)
    module = Wrapped(make_layer(name, **options), keyword)
    is_traced(module, first, others)
    if keyword is None:
        is_traced(module, others[-1], [first])


@pytest.mark.parametrize("name", MIXERS)
def test_steps_of_mixers_are_traced(name: str) -> None:
    layer = make_layer(name).requires_grad_(False)

    def inputs(batch: int) -> Inputs:
        states = [make_sequence(*state.shape, seed=i) for i, state in enumerate(layer.allocate_inference_cache(batch, 9))]
        return {"x": make_sequence(batch, 1, WIDTH)} | dict(zip(("conv_state", "ssm_state"), states, strict=True))

    is_traced(Wrapped(layer, call=lambda layer, *tensors: layer.step(*tensors)), inputs(2), [inputs(3)], modified=True)


def test_packed_sequences_are_traced() -> None:
    def call(layer: nn.Module, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        output, state = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return output.data, state

    layer = make_layer("MinGRU")
    inputs = [
        {"x": make_sequence(len(lengths), max(lengths), width_of(layer)), "lengths": torch.tensor(lengths)}
        for lengths in ((2, 5, 3), (9, 5, 3, 1), (4, 7))
    ]
    is_traced(Wrapped(layer, call=call), inputs[0], inputs[1:])


@pytest.mark.parametrize("mixer", ["Mamba", "Mamba2", "MinGRU"])
def test_models_are_traced(mixer: str) -> None:
    """A mask that the example does not need takes effect later."""

    def call(model: nn.Module, tokens: Tensor, mask: Tensor) -> Any:
        return model(tokens, attention_mask=mask, labels=tokens)

    def inputs(batch: int, seqlen: int, padding: int) -> Inputs:
        mask = torch.ones(batch, seqlen, dtype=torch.int64)
        mask[0, :padding] = 0
        return {"tokens": make_tokens(batch, seqlen), "mask": mask}

    is_traced(Wrapped(make_model(mixer), call=call), inputs(2, 5, 0), [inputs(3, 9, 4)])


def test_a_traced_layer_in_a_scripted_module() -> None:
    layer, x = make_layer("Mamba"), make_sequence(3, 9, WIDTH)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), torch.jit.trace(layer, make_sequence(2, 5, WIDTH)))
    torch.testing.assert_close(torch.jit.script(module)(x), layer(module[0](x)))


def test_arguments_refuse_trace() -> None:
    """Values that would become constants: the pieces between positions, and the offset and the states of a cache."""
    for name, length in (("selective_scan", 5), ("ssd_chunk_scan", 5)):
        for grad in (False, True):
            inputs = OPERATORS[name].make_inputs(seqlen=length)
            call, names = call_of(getattr(ssm_kernels, name), inputs | {"states_at": [2, length]})
            refuses_trace(call, [inputs[each].requires_grad_(grad) for each in names], name, "states_at")
    for name in MIXERS:
        layer, cache = make_layer(name), models.InferenceParams(9, 2)
        for offset in (0, 3):
            cache.seqlen_offset = offset
            call = lambda x, layer=layer: layer(x, inference_params=cache)  # noqa: E731, B023
            refuses_trace(call, [make_sequence(2, 1, WIDTH)], name, "inference_params")
    refuses_trace(
        lambda ids: make_model("Mamba").generate(ids, 4), [make_tokens(1, 2)], "MambaLM.generate", "loops over tokens"
    )


@over({name: spec for name, spec in OPERATORS.items() if "scan" in name})
def test_references_of_scans_refuse_trace(operator: OperatorSpec) -> None:
    inputs = operator.make_inputs()
    call, names = call_of(operator.reference, inputs)
    refuses_trace(call, [inputs[name] for name in names], operator.name, LOOPS)


def test_reference_of_the_convolution() -> None:
    operator = OPERATORS["causal_conv1d"]
    is_traced_by_name(reference.causal_conv1d, operator.make_inputs(), [operator.make_inputs(batch=3, seqlen=11)])
    inputs = operator.make_inputs(cu_seqlens=(0, 4, 9))
    call, names = call_of(reference.causal_conv1d, inputs)
    refuses_trace(call, [inputs[name] for name in names], "causal_conv1d", LOOPS)


def check_ranks(mesh: Mesh) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import ContextParallel, TensorParallel, linear_scan

    a = torch.rand(2, 4, 3)
    refuses_trace(lambda a: linear_scan(a, a, group=mesh.get_group()), [a], "linear_scan", "several ranks")
    x = make_sequence(2, 4, WIDTH)
    for style, name in ((ContextParallel(), "Mamba: causal_conv1d"), (TensorParallel(), "TensorParallel")):
        layer = parallelize_module(make_layer("Mamba"), mesh, style)
        expected = layer(x)
        with pytest.raises(RuntimeError, match=f"{name}: torch.jit.trace does not support several ranks; "):
            torch.jit.trace(layer, x)
        assert torch.equal(layer(x), expected)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_ranks_refuse_trace(processes: Processes) -> None:
    processes.check(Place((2,)), check_ranks)
