"""Launches every CUDA kernel of the package on small inputs and compares with the CPU: what compute-sanitizer is run on.

The inputs are made on the CPU and copied over whole, so that no kernel but the package's own runs and whatever the sanitizer
reports is theirs. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of its own, and a step past its end shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from helpers import METHODS, STEP_DTYPES, make_step_inputs
from torch import Tensor

from ssm_kernels import selective_state_update

Inputs = dict[str, Any]


def on_device(tensor: Tensor, device: str) -> Tensor:
    """The tensor in the same strides, its memory copied as it is."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.as_strided((elements,), (1,), 0)
    copied = memory.clone() if device == "cpu" else memory.to(device)
    return copied.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def state_update_cases() -> Iterator[tuple[str, Inputs]]:
    """Name and inputs: each kernel (dtypes, method, fast and tied, fast and not tied, general), then each path inside them."""
    for dtype, state_dtype in STEP_DTYPES:
        for method in METHODS:
            options = {"dtype": dtype, "state_dtype": state_dtype, "discretization": method}
            name = f"{dtype} {state_dtype} {method}"
            inputs = make_step_inputs(dim=37, dstate=32, **options)
            yield f"fast {name}", inputs
            yield f"fast, tied {name}", inputs | {"A": inputs["A"][:, :1].expand(37, 32)}
            yield f"general {name}", make_step_inputs(dim=37, dstate=7, **options)
        options = {"dtype": dtype, "state_dtype": state_dtype}
        name = f"{dtype} {state_dtype}"
        for dstate in (1, 8, 16, 64, 128, 255, 256):
            yield f"dstate {dstate} {name}", make_step_inputs(dim=9, dstate=dstate, **options)
        for layout in ("transposed", "permuted", "offset", "sliced"):
            yield f"{layout} {name}", make_step_inputs(heads=3, dim=5, dstate=16, groups=3, layout=layout, **options)
        yield f"groups {name}", make_step_inputs(heads=6, dim=11, dstate=64, groups=2, **options)
        absent = dict.fromkeys(("D", "z", "dt_bias", "dt_softplus"), False)
        yield f"required only {name}", make_step_inputs(dim=37, dstate=32, **absent, **options)
        inputs = make_step_inputs(dim=37, dstate=32, **options)
        yield f"parameters in the dtype of x {name}", inputs | {key: inputs[key].to(dtype) for key in ("D", "dt_bias")}
        for index_dtype in (torch.int32, torch.int64):
            indices = torch.tensor([4, -1, 0, 2], dtype=index_dtype)
            inputs = make_step_inputs(batch=4, dim=37, dstate=32, slots=5, **options)
            yield f"slots {index_dtype} {name}", inputs | {"state_batch_indices": indices}
    yield "several rows per lane group", make_step_inputs(batch=66, heads=64, dim=64, dstate=128, dtype=torch.float32)


def check(name: str, inputs: Inputs) -> str | None:
    """None, or what is wrong."""
    results = []
    for device in ("cpu", "cuda"):
        moved = {key: on_device(value, device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        out = selective_state_update(**moved)
        results.append((out.cpu(), on_device(moved["state"], "cpu") if device == "cpu" else moved["state"]))
    (out, state), (cuda_out, cuda_state) = results
    memory = cuda_state.untyped_storage().nbytes() // cuda_state.element_size()
    cuda_state = cuda_state.as_strided((memory,), (1,), 0).cpu().as_strided(state.shape, state.stride(), state.storage_offset())
    for what, actual, expected in (("out", cuda_out, out), ("state", cuda_state, state)):
        # A 16-bit result is one rounding of nearly the same number; a sum in another order differs by more roundings.
        roundings = 2 if actual.element_size() == 2 else 8
        tolerance = roundings * torch.finfo(actual.dtype).eps * (1 + expected.double().abs().max().item())
        difference = (actual.double() - expected.double()).abs().max().item()
        if not difference <= tolerance:
            return f"{name}: {what} differs from the CPU's by {difference:.3g}, more than {tolerance:.3g}"
    return None


def main() -> int:
    cases = [*state_update_cases()]
    wrong = [message for case in cases if (message := check(*case)) is not None]
    print("\n".join([*wrong, f"{len(cases)} cases, {len(wrong)} wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
