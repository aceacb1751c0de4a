"""ssm_kernels.compat: tensors that no operator takes. Messages name the function that was called, not an operator under it."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from helpers import COMPAT_VERSION
from test_compat_arguments import COMPLETE

from ssm_kernels import compat

CLIENT = "mamba_ssm"
CLIENT_VERSION = COMPAT_VERSION


def nested(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor, tensor])


KINDS = {
    "sparse coo": torch.Tensor.to_sparse,
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    "nested": nested,
}


@pytest.mark.parametrize("case", COMPLETE)
def test_messages_of_functions_name_them(case):
    function, arguments = COMPLETE[case]
    for name, value in arguments().items():
        if not isinstance(value, torch.Tensor):
            continue
        for kind, make in KINDS.items():
            try:
                function(**arguments() | {name: make(value)})
            except (RuntimeError, TypeError, ValueError) as error:
                message = str(error)
                assert message.startswith(f"{function.__name__}: "), (kind, name, message)
                assert "ssm_kernels::" not in message and "\n" not in message
            else:
                assert kind == "sparse coo", name  # PyTorch multiplies by sparse weights and adds sparse sums


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_extension_modules_name_their_functions(kind):
    with compat.installed(only=["selective_scan_cuda", "causal_conv1d_cuda"]):
        scan, conv = (importlib.import_module(name) for name in ("selective_scan_cuda", "causal_conv1d_cuda"))
    t, wrong = torch.randn(2, 3, 4), KINDS[kind](torch.randn(2, 3, 4))
    A, message = -torch.rand(3, 4), f"to be a dense tensor of numbers, got a {kind} tensor"
    calls = [
        ("selective_scan_cuda.bwd", "u", lambda x: scan.bwd(x, t, A, t, t, None, t, None, t, None, t, None, True, False)),
        ("selective_scan_cuda.bwd", "dout", lambda x: scan.bwd(t, t, A, A, A, None, t, None, x, None, t, None, True, False)),
        ("causal_conv1d_cuda.causal_conv1d_fwd", "x", lambda x: conv.causal_conv1d_fwd(x, A, None, True)),
        ("causal_conv1d_cuda.causal_conv1d_bwd", "dout", lambda x: conv.causal_conv1d_bwd(t, A, None, x, None, True)),
    ]
    for function, name, call in calls:
        with pytest.raises((RuntimeError, TypeError)) as error:
            call(wrong)
        text = str(error.value)
        assert text.startswith(f"{function}: expected {name} ") and (message in text or "dtype" in text), text


def test_a_gradient_on_another_device_has_the_name_of_the_module():
    with compat.installed(only=["selective_scan_cuda", "causal_conv1d_cuda"]):
        scan, conv = (importlib.import_module(name) for name in ("selective_scan_cuda", "causal_conv1d_cuda"))
    t, A, meta = torch.randn(2, 3, 4), -torch.rand(3, 4), torch.empty(2, 3, 4, device="meta")
    with pytest.raises(RuntimeError, match=r"^selective_scan_cuda\.bwd: expected dout on cpu "):
        scan.bwd(t, t, A, A, A, None, None, None, meta, None, None, None, True, False)
    with pytest.raises(RuntimeError, match=r"^causal_conv1d_cuda\.causal_conv1d_bwd: expected dout on cpu "):
        conv.causal_conv1d_bwd(t, A, None, meta, None, True)
