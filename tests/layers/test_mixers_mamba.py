"""The convolution of a Mamba mixer, whose backward writes the gradient of the in-projection's output into one buffer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import plain_layers
import pytest
import torch
from layer_helpers import assert_all_close
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ssm_kernels
import ssm_kernels.nn as snn

OPERATOR = "selective_scan"
operator = torch.ops.ssm_kernels._mamba_conv
CHANNELS, NAMES = 6, ("xz", "weight", "bias", "initial_state")


def make_inputs(dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"xz": (2, 5, 2 * CHANNELS), "weight": (CHANNELS, 4), "bias": (CHANNELS,), "initial_state": (2, CHANNELS, 3)}
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}


def compose(xz: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    x, z = xz.chunk(2, dim=-1)
    x = ssm_kernels.causal_conv1d(x, weight, bias, activation="silu", initial_state=initial_state)
    return x, x, z


def loss_of(outputs: tuple[Tensor, Tensor, Tensor], used: str = "xaz") -> Tensor:
    x, again, z = outputs
    terms = {"x": x.sin().sum(), "a": again.square().sum(), "z": z.cos().sum()}
    return sum((terms[name] for name in used), torch.zeros((), dtype=x.dtype, device=x.device))


def grads_of(function: Callable, inputs: dict[str, Tensor | None], names=NAMES, used: str = "xaz") -> Sequence[Tensor]:
    leaves = {name: value if value is None else value.detach().clone() for name, value in inputs.items()}
    wanted = [leaves[name].requires_grad_() for name in names]
    return torch.autograd.grad(loss_of(function(**leaves), used), wanted, allow_unused=True, materialize_grads=True)


# The inputs that need gradients, the results that are used, and an argument that is absent.
GRADIENT_CASES = [
    *((NAMES, used, None) for used in ("xaz", "xa", "xz", "az", "x", "z")),
    *((names, "xaz", None) for k in (1, 2, 3) for names in itertools.combinations(NAMES, k)),
    *((tuple(name for name in NAMES if name != absent), "xaz", absent) for absent in ("bias", "initial_state")),
]


@pytest.mark.parametrize(
    "names, used, absent", GRADIENT_CASES, ids=lambda value: "-".join(value) if isinstance(value, tuple) else value
)
def test_gradients(names, used, absent, device):
    inputs = make_inputs(device=device) | ({absent: None} if absent else {})
    assert_all_close(grads_of(operator, inputs, names, used), grads_of(compose, inputs, names, used), 1e-12, 1e-12)


def test_the_two_results_share_their_memory(device):
    inputs = make_inputs(device=device)
    inputs["xz"].requires_grad_()
    x, again, z = operator(**inputs)
    assert x.data_ptr() == again.data_ptr() and x is not again
    assert z.untyped_storage().data_ptr() == inputs["xz"].untyped_storage().data_ptr()


def mixer_loss(layer: snn.Mamba, xz: Tensor, watch: Callable[[Tensor], None] = lambda z: None) -> Tensor:
    """A loss of the layer after its in-projection; ``watch`` receives the gate."""
    x, scanned, z = operator(xz, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, None)
    watch(z)
    return layer._scan(x, z, None, scanned)[0].square().sum()


def make_mixer(device: str, dtype: torch.dtype = torch.float64, d_model: int = 8, seqlen: int = 5) -> tuple[snn.Mamba, Tensor]:
    torch.manual_seed(0)
    layer = snn.Mamba(d_model, d_state=4, dtype=dtype).to(device)
    return layer, torch.randn(2, seqlen, 2 * layer.d_inner, dtype=dtype, device=device, requires_grad=True)


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def operators_of(node: str, run: Callable[[], None]) -> list[str]:
    """Names of the operators that backward of a node calls, without those that allocate."""

    def inside(event) -> list[str]:
        return [name for child in event.cpu_children for name in (child.name, *inside(child))]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    (event,) = (e for e in profiler.events() if node in e.name and "evaluate_function" not in e.name)
    # Calls of the CUDA runtime are among the events, too; operators alone have a namespace.
    return [name for name in inside(event) if "::" in name and not name.startswith("aten::empty")]


def test_the_gradient_is_one_buffer(device):
    """The scan's backward and the convolution's each write their half: neither half is copied. The convolution's CUDA kernel
    reads both gradients of its result; on the CPU they are added in place first.
    """
    # float64 has no kernel that reads both.
    layer, xz = make_mixer(device, torch.float64 if device == "cpu" else torch.float32)
    loss = mixer_loss(layer, xz)
    names = operators_of("MambaConv", loss.backward)
    views = ("aten::as_strided", "aten::narrow", "aten::slice", "aten::squeeze", "aten::view")
    added = ["aten::add_"] if device == "cpu" else []
    assert [n for n in names if n not in views] == [*added, "ssm_kernels::_causal_conv1d_bwd_out"]
    assert xz.grad.is_contiguous() and xz.grad.untyped_storage().nbytes() == xz.grad.numel() * xz.grad.element_size()


class Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["kept", "kept_half", "replaced", "second_consumer", "recorded"])
def test_a_gradient_that_others_see_is_copied(kind, device):
    layer, xz = make_mixer(device)
    mixer_loss(layer, xz).backward()
    expected, xz.grad = xz.grad, None
    kept: list[Tensor] = []
    if kind == "second_consumer":
        gates: list[Tensor] = []
        loss = mixer_loss(layer, xz, gates.append)
        (loss + 0 * gates[0].square().sum()).backward()
    elif kind == "recorded":
        with Record() as record:
            mixer_loss(layer, xz).backward()
        assert "cat" in record.names
    else:
        hooks = {
            "kept": lambda grad: kept.append(grad),
            "kept_half": lambda grad: kept.append(grad[:, 1:]),
            "replaced": lambda grad: grad.clone(),
        }
        mixer_loss(layer, xz, lambda z: z.register_hook(hooks[kind])).backward()
    torch.testing.assert_close(xz.grad, expected, rtol=1e-12, atol=1e-12)
    for grad in kept:
        half = expected[..., layer.d_inner :]
        torch.testing.assert_close(grad, half if kind == "kept" else half[:, 1:], rtol=1e-12, atol=1e-12)
        assert address(grad) != address(xz.grad)


def test_backward_twice(device):
    layer, xz = make_mixer(device)
    loss = mixer_loss(layer, xz)
    (first,) = torch.autograd.grad(loss, xz, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, xz)
    assert torch.equal(first, kept) and torch.equal(second, kept)


def test_backward_twice_with_the_sequential_scan(device):
    """Only the last backward may write to the saved states."""
    torch.manual_seed(0)
    layer = snn.Mamba(128, d_state=16, device=device, dtype=torch.bfloat16)
    x = torch.randn(2, 96, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    loss = layer(x).float().square().sum()
    leaves = [x, *layer.parameters()]
    first, second, last = (torch.autograd.grad(loss, leaves, retain_graph=retain) for retain in (True, True, False))
    for values in zip(first, second, last, strict=True):
        assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


def test_second_derivatives_raise(device):
    layer, xz = make_mixer(device)
    (grad,) = torch.autograd.grad(mixer_loss(layer, xz), xz, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward .* is not supported"):
        grad.sum().backward()


def test_projections_that_write_into_their_input(device):
    """A hook changes the memory that the scan reads as well; gradients match the changed values."""
    layer, xz = make_mixer(device)
    layer.x_proj.register_forward_pre_hook(lambda module, inputs: inputs[0].mul_(2) if torch.is_grad_enabled() else None)
    mixer_loss(layer, xz).backward()
    layer.x_proj._forward_pre_hooks.clear()
    other = xz.detach().clone().requires_grad_()
    x, _, z = compose(other, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, None)
    layer._scan(2 * x, z, None)[0].square().sum().backward()
    torch.testing.assert_close(xz.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_changes_of_the_input_are_noticed(device):
    inputs = make_inputs(device=device)
    leaf = inputs["xz"].requires_grad_()
    xz = leaf * 1
    loss = loss_of(operator(**inputs | {"xz": xz}))
    with torch.no_grad():
        xz.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, device):
    """The modes that are active in forward need not be active when it runs again."""
    layer, xz = make_mixer(device)
    mixer_loss(layer, xz).backward()
    expected, xz.grad = xz.grad, None
    with Record():
        loss = checkpoint(lambda xz: mixer_loss(layer, xz), xz, use_reentrant=reentrant)
    loss.backward()
    torch.testing.assert_close(xz.grad, expected, rtol=1e-12, atol=1e-12)


def test_autocast(device):
    inputs = make_inputs(torch.float32, device)
    inputs["xz"].requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        outputs = operator(**inputs)
        expected = compose(*(value.bfloat16() if name in ("xz", "initial_state") else value for name, value in inputs.items()))
    for actual, value in zip(outputs, expected, strict=True):
        assert actual.dtype == torch.bfloat16 and torch.equal(actual, value)
    loss_of(outputs).backward()
    assert inputs["xz"].grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_cast_to_its_dtype(dtype, device):
    """A_log, D and the bias of dt_proj in the layer's dtype are read as they are, and have gradients in it."""
    torch.manual_seed(0)
    layer = snn.Mamba(8, d_state=4, dtype=torch.float64).to(device, dtype)
    exact, x = copy.deepcopy(layer).double(), torch.randn(2, 5, 8, dtype=dtype, device=device)
    layer(x).sum().backward()
    plain_layers.mamba(exact, x.double()).sum().backward()
    for (name, parameter), other in zip(layer.named_parameters(), exact.parameters(), strict=True):
        error = (parameter.grad.double() - other.grad).norm() / other.grad.norm()
        assert parameter.grad.dtype == dtype and error < (1e-5 if dtype == torch.float32 else 4e-2), name


def test_vmap(device):
    inputs = make_inputs(device=device)
    xz = torch.stack([inputs["xz"], inputs["xz"] + 1])
    others = {name: inputs[name] for name in NAMES[1:]}
    batched = torch.vmap(lambda xz: operator(xz, **others))(xz)
    for i in range(2):
        assert_all_close([result[i] for result in batched], operator(xz[i], **others), 1e-12, 1e-12)


def test_opcheck(device):
    inputs = make_inputs(device=device)
    for value in inputs.values():
        value.requires_grad_()
    torch.library.opcheck(operator.default, tuple(inputs.values()))


def test_compiled_equals_eager(device):
    inputs = make_inputs(device=device)
    compiled = torch.compile(lambda *args: operator(*args), backend="aot_eager", fullgraph=True)
    actual = grads_of(lambda **inputs: compiled(*inputs.values()), inputs)
    assert_all_close(actual, grads_of(operator, inputs), 1e-12, 1e-12)


def test_odd_columns(device):
    inputs = make_inputs(device=device)
    with pytest.raises(ValueError, match=r"expected xz of shape \(batch, seqlen, 2 \* channels\), got \[2, 5, 11\]"):
        operator(**inputs | {"xz": inputs["xz"][..., :-1]})


parameters = torch.ops.ssm_kernels._mixer_parameters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_parameters(dtype, device):
    torch.manual_seed(0)
    A_log, bias, D = (torch.randn(shape, device=device).to(dtype) for shape in ((7, 3), (7,), (7, 5)))
    for wide, others in itertools.product((torch.float32, torch.float64), ((bias, D), (None, D), (bias, None), (None, None))):
        pieces = [-torch.exp(A_log.to(wide)), *(v.to(wide) for v in others if v is not None)]
        expected = torch.cat([piece.flatten() for piece in pieces])
        torch.testing.assert_close(parameters(A_log, *others, wide), expected, rtol=2e-6, atol=0)


def test_parameters_in_any_strides(device):
    A_log = torch.randn(3, 7, device=device).t()
    expected = -torch.exp(A_log).flatten()
    torch.testing.assert_close(parameters(A_log, None, None, torch.float32), expected, rtol=2e-6, atol=0)
    torch.library.opcheck(parameters.default, (A_log, A_log[0], None, torch.float32))


def test_scan_backward_into_a_slice(device):
    torch.manual_seed(0)
    layer, _ = make_mixer(device)
    u, delta, z, grad_out = torch.randn(4, 2, 6, 5, dtype=torch.float64, device=device)
    B, C = torch.randn(2, 2, 4, 5, dtype=torch.float64, device=device)
    A, D, bias = layer.A_log.detach()[:6], layer.D.detach()[:6], layer.dt_proj.bias.detach()[:6]
    _, _, states = torch.ops.ssm_kernels._selective_scan_fwd(u, delta, -A.exp(), B, C, D, z, bias, None, "zoh", True, True)
    arguments = (grad_out, None, u, delta, -A.exp(), B, C, D, z, bias, states, "zoh", True, None, None, None, False, [True] * 9)
    expected = list(torch.ops.ssm_kernels._selective_scan_bwd(*arguments))
    wide = torch.full((2, 6, 10), 7.0, dtype=torch.float64, device=device)
    others = torch.ops.ssm_kernels._selective_scan_bwd_out(*arguments, wide[..., 5:])
    assert torch.equal(wide[..., 5:], expected.pop(6)) and bool((wide[..., :5] == 7).all())
    assert all(torch.equal(a, e) for a, e in zip(others, expected, strict=True))
    torch.library.opcheck(torch.ops.ssm_kernels._selective_scan_bwd_out.default, (*arguments, wide[..., 5:]))
    again = torch.ops.ssm_kernels._selective_scan_bwd_out(*arguments, wide[..., 5:], wide[..., :5])
    torch.library.opcheck(torch.ops.ssm_kernels._selective_scan_bwd_out.default, (*arguments, wide[..., 5:], wide[..., :5]))
    assert torch.equal(wide[..., :5], expected.pop(1)) and again[1].numel() == 0
    assert all(torch.equal(a, e) for a, e in zip((again[0], *again[2:]), expected, strict=True))


def test_rounding_of_the_gradient_does_not_depend_on_the_path(device):
    """Backward that is recorded, and so runs the composition, has the same bits in bfloat16 on the CPU.

    The CUDA kernel does not round the sum of the two gradients of x.
    """
    layer, xz = make_mixer(device, torch.bfloat16)
    mixer_loss(layer, xz).backward()
    grad, xz.grad = xz.grad, None
    with Record():
        mixer_loss(layer, xz).backward()
    if device == "cpu":
        assert torch.equal(grad, xz.grad)
    else:
        assert (grad - xz.grad).norm() <= 2**-7 * xz.grad.norm()


@pytest.mark.parametrize("keeps_grad_of_delta", [False, True])
@pytest.mark.parametrize("seqlen", [1, 2, 3, 65, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_many_channels(dtype, seqlen, keeps_grad_of_delta, device):
    """The kernels for many channels give the composition's gradients, also where a kept gradient of delta forces a copy."""
    layer, xz = make_mixer(device, dtype, d_model=128, seqlen=seqlen)
    kept: list[Tensor] = []
    if keeps_grad_of_delta:
        layer.dt_proj.register_forward_hook(lambda module, args, out: out.register_hook(kept.append) and None)
    mixer_loss(layer, xz).backward()
    found, xz.grad = [xz.grad, *(p.grad for p in layer.parameters() if p.grad is not None)], None
    layer.zero_grad()
    with Record():
        mixer_loss(layer, xz).backward()
    expected = [xz.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    # Nothing was written over the gradient of delta of the first run.
    for actual, wanted in zip([*found, *kept[:1]], [*expected, *kept[1:]], strict=True):
        assert (actual - wanted).norm() <= (2**-6 if dtype == torch.bfloat16 else 1e-5) * wanted.norm()
