"""A smoke test of an installed package: imports it from where it should be, then scans, trains and generates on the CPU.

python smoke.py FOLDER, the site-packages that has the package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import ssm_kernels
from ssm_kernels.models import MambaConfig, MambaLM

folder = Path(sys.argv[1]).resolve()
assert folder in Path(ssm_kernels.__file__).resolve().parents, f"expected the package in {folder}, got {ssm_kernels.__file__}"
print(ssm_kernels.build_info())

torch.manual_seed(0)
u, delta = torch.randn(2, 8, 65), torch.rand(2, 8, 65)
A, B, C = -torch.rand(8, 4), torch.randn(2, 4, 65), torch.randn(2, 4, 65)
for discretization in ssm_kernels.discretizations:
    arguments = [tensor.clone().requires_grad_() for tensor in (u, delta, A, B, C)]
    out = ssm_kernels.selective_scan(*arguments, discretization=discretization)
    gradients = torch.autograd.grad(out.square().sum(), arguments)
    exact = [tensor.double().requires_grad_() for tensor in (u, delta, A, B, C)]
    expected = ssm_kernels.reference.selective_scan(*exact, discretization=discretization)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    for gradient, right in zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=1e-3, atol=1e-3)

model = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.arange(40).remainder(5).expand(4, 40)
losses = []
for _ in range(30):
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 4, losses
assert model.generate(tokens[:1, :5], max_new_tokens=3).shape == (1, 8)
subprocess.run([sys.executable, "-m", "ssm_kernels"], check=True)
