"""Part 2: every discretization's forward and backward through ``ssm_kernels.selective_scan``, against the loop over time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ssm_kernels
from benchmarks.benchmark import Contender
from benchmarks.discretization.signals import COMPLEX_STATES, legs_matrices, s4d_rates
from benchmarks.harness import Stages, Timing, measure
from ssm_kernels import reference
from ssm_kernels._discretizations import is_two_sample, split_name

MATRIX_RULES = ("bilinear", "trapezoidal", "gbt", "gbt_two_sample", "euler", "backward_euler", "rk4")
"""The rules that the operators take for a matrix A; the others, by exponentials of matrices, are the reference's alone."""


def has_operator(method: str, *, is_matrix: bool) -> bool:
    """Whether ``selective_scan`` computes the method, for a diagonal A or a matrix."""
    return not is_matrix or split_name(method)[0] in MATRIX_RULES


@dataclass(frozen=True)
class ScanSize:
    """Sizes of a selective scan in the field's terms."""

    batch: int
    dim: int
    seqlen: int
    dstate: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen

    @property
    def updates(self) -> int:
        """Number of updates of one state: the work of a scan."""
        return self.batch * self.dim * self.seqlen * self.dstate

    def __str__(self) -> str:
        return f"batch {self.batch}, dim {self.dim}, seqlen {self.seqlen}, dstate {self.dstate}"


@dataclass(frozen=True)
class Scan:
    """One discretization's cost.

    Attributes:
        forward: without recording a graph, as in inference.
        backward: backward of a training step; None if not requested.
        training: forward (recording) and backward of a training step.
        forward_bytes, training_bytes: see :func:`scan_bytes`.
        loop_forward, loop_training: the loop over time in PyTorch, scaled to the operator's seqlen.
    """

    method: str
    size: ScanSize
    forward: Timing
    backward: Timing | None
    training: Timing | None
    forward_bytes: int
    training_bytes: int
    loop_seqlen: int
    loop_forward: Timing | None
    loop_training: Timing | None

    @property
    def step(self) -> Timing:
        """The training step if it was timed, else the forward."""
        return self.training or self.forward

    @property
    def loop_step(self) -> Timing | None:
        return self.loop_training or self.loop_forward

    @property
    def tokens_per_second(self) -> float:
        return self.size.tokens / self.step.median

    @property
    def bytes_per_second(self) -> float:
        return (self.training_bytes if self.training else self.forward_bytes) / self.step.median

    @property
    def speedup(self) -> float | None:
        """Speed-up over the loop, per token."""
        return None if self.loop_step is None else self.loop_step.median / self.step.median

    def unreliable(self) -> list[str]:
        """The operator's timings whose spread is too large to compare them, by name."""
        timings = {"forward": self.forward, "backward": self.backward, "both": self.training}
        return [f"{self.method} {name}" for name, timing in timings.items() if timing is not None and not timing.is_reliable]

    def to_dict(self) -> dict[str, object]:
        def timing(value: Timing | None) -> dict[str, float] | None:
            return None if value is None else value.to_dict()

        return {
            "method": self.method,
            "forward": timing(self.forward),
            "backward": timing(self.backward),
            "forward_backward": timing(self.training),
            "tokens_per_second": self.tokens_per_second,
            "bytes_per_second": self.bytes_per_second,
            "forward_bytes": self.forward_bytes,
            "forward_backward_bytes": self.training_bytes,
            "loop_seqlen": self.loop_seqlen,
            "loop_forward_scaled": timing(self.loop_forward),
            "loop_forward_backward_scaled": timing(self.loop_training),
            "speedup_over_loop": self.speedup,
            "unreliable": self.unreliable(),
        }


def scan_inputs(
    size: ScanSize,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    groups: int | None = None,
    states: str = "real",
) -> dict[str, Tensor]:
    """Random arguments like those in Mamba's layer: B and C per step, D, gate and bias; A is -1 .. -dstate.

    ``softplus(delta + delta_bias)`` is spread log-uniformly over about [0.001, 0.1], as at Mamba's initialization. B and C are
    (batch, groups, dstate, seqlen), without ``groups`` (batch, dstate, seqlen). With complex ``states`` A, B and C are complex,
    and A is that of ``s4d_rates``; with "matrix" A is the one of ``legs_matrices`` for all channels.
    """
    generator = torch.Generator(device).manual_seed(seed)
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    step = 0.001 * 100.0 ** torch.rand(size.dim, generator=generator, device=device)
    bias = torch.log(torch.expm1(step))
    A = -torch.arange(1.0, size.dstate + 1, device=device).repeat(size.dim, 1).to(parameter_dtype)
    number = dtype
    if states == "matrix":
        A = legs_matrices(size.dstate)[0][None].to(device, parameter_dtype)
    elif states in COMPLEX_STATES:
        number = torch.complex128 if parameter_dtype == torch.float64 else torch.complex64
        A = s4d_rates(states, size.dstate).repeat(size.dim, 1).to(device, number)

    def matrices(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=number) if A.is_complex() else normal(*shape)

    matrix = (size.batch, *(() if groups is None else (groups,)), size.dstate, size.seqlen)
    return {
        "u": normal(size.batch, size.dim, size.seqlen),
        "delta": 0.1 * normal(size.batch, size.dim, size.seqlen),
        "A": A,
        "B": matrices(*matrix),
        "C": matrices(*matrix),
        "D": torch.ones(size.dim, device=device, dtype=parameter_dtype),
        "z": normal(size.batch, size.dim, size.seqlen),
        "delta_bias": bias.to(parameter_dtype),
    }


def options_of(method: str, u: Tensor) -> dict[str, Any]:
    """The options of a scan that choose the method: exp_trapezoidal weighs the two samples alike."""
    weight = {"lam": u.new_full((1, 1, 1), 0.5)} if method == "exp_trapezoidal" else {}
    return {"discretization": method} | weight


def scan_bytes(inputs: dict[str, Tensor]) -> tuple[int, int]:
    """Bytes of (forward, forward and backward) if every argument, result and gradient moves once and nothing else.

    Forward reads the arguments and writes ``out``; backward reads the arguments and ``grad_out`` and writes one gradient per
    argument. States that a kernel saves for backward are not counted, so the rate is that of useful traffic.
    """
    arguments = sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())
    out = inputs["u"].numel() * inputs["u"].element_size()
    return arguments + out, 3 * arguments + 2 * out


def loop_bytes(size: ScanSize, dtype: torch.dtype, states: str = "real") -> int:
    """Estimates the memory that autograd keeps for the loop: a dozen tensors (batch, dim, seqlen, dstate) of 4 to 16 bytes.

    With a matrix A they have dstate numbers for each state.
    """
    numbers = size.dstate if states == "matrix" else 2 if states in COMPLEX_STATES else 1
    return 12 * size.updates * (8 if dtype == torch.float64 else 4) * numbers


def _loop_coefficients(method: str, z: Tensor) -> tuple[Tensor, Tensor]:
    """``Abar`` and the gain. The reference's phi1 is a series near zero, in 18 passes over memory; users
    write ``expm1(z) / z``, which is accurate enough for z < 0."""
    if method == "zoh_exact":
        return torch.exp(z), torch.expm1(z) / z
    return reference.discretization_of(method).coefficients(z)


def _loop_coefficients_of_two(method: str, step: Tensor, A: Tensor, lam: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``Abar`` and the factors of both samples; foh_ramp without the reference's series, whose terms autograd would keep."""
    name, alpha = split_name(method)
    if name == "foh_ramp":
        z = step * A
        phi1 = torch.expm1(z) / z
        phi2 = (phi1 - 1) / z
        return torch.exp(z), step * phi2, step * (phi1 - phi2)
    weight = None if lam is None else lam.to(A.dtype)[..., None]
    return reference.two_sample_coefficients(name, step, A, alpha=alpha, lam=weight)


def loop_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    *,
    discretization: str,
    delta_softplus: bool,
    lam: Tensor | None = None,
) -> Tensor:
    """The scan in plain PyTorch: the coefficients of all steps at once, then a loop over time.

    Arguments and result match :func:`ssm_kernels.selective_scan`, with B and C (batch, dstate, seqlen). It computes in the
    dtype of A.
    """
    step = delta.to(delta_bias.dtype) + delta_bias[:, None]
    step = F.softplus(step) if delta_softplus else step
    B, C = (matrix.to(A.dtype).mT[:, None] for matrix in (B, C))
    is_matrix = A.dim() == 3
    if is_matrix:
        Abar, *factors = reference.dense_coefficients(discretization, step, A[:, None], lam=lam)
        samples = (u[..., None] * B)[..., None]
        earlier = F.pad(samples[:, :, :-1], (0, 0, 0, 0, 1, 0))
        inputs = factors[0] @ samples
        inputs = inputs + factors[1] @ earlier if is_two_sample(discretization) else inputs
    elif is_two_sample(discretization):
        Abar, now, before = _loop_coefficients_of_two(discretization, step[..., None], A[:, None], lam)
        samples = u[..., None] * B
        inputs = now * samples + before * F.pad(samples[:, :, :-1], (0, 0, 1, 0))
    else:
        Abar, gain = _loop_coefficients(discretization, step[..., None] * A[:, None])
        inputs = (step * u)[..., None] * gain * B
    h, states = torch.zeros_like(inputs[:, :, 0]), []
    for Abar_t, input_t in zip(Abar.unbind(2), inputs.unbind(2), strict=True):
        h = (Abar_t @ h if is_matrix else Abar_t * h) + input_t
        states.append(h)
    h = torch.stack(states, dim=2)
    y = ((h[..., 0] if is_matrix else h) * C).sum(-1)
    y = (2 * y.real if y.is_complex() else y) + D[:, None] * u
    return (y * F.silu(z.to(y.dtype))).to(u.dtype)


def scan_stages(
    scan: Callable[..., Tensor], inputs: dict[str, Tensor], grad_out: Tensor, method: str, *, backward: bool
) -> Stages:
    """The stages of one trial: forward without a graph, or forward and backward to every argument."""
    function = functools.partial(scan, delta_softplus=True, **options_of(method, inputs["u"]))
    what = "both" if backward else "forward"
    return Contender(function, inputs, [grad_out]).stages(what)[what]


def _time(
    scan: Callable[..., Tensor],
    methods: Sequence[str],
    inputs: dict[str, Tensor],
    *,
    backward: bool,
    **options: object,
) -> dict[str, tuple[Timing, Timing | None, Timing | None]]:
    """Returns by method: forward, backward, training step."""
    grad_out = torch.ones_like(inputs["u"])
    benchmarks = {f"{method}/forward": scan_stages(scan, inputs, grad_out, method, backward=False) for method in methods}
    if backward:
        benchmarks |= {f"{method}/training": scan_stages(scan, inputs, grad_out, method, backward=True) for method in methods}
    measured = measure(benchmarks, device=inputs["u"].device, **options)
    found = {}
    for method in methods:
        forward, training = measured[f"{method}/forward"].total, measured.get(f"{method}/training")
        found[method] = (forward, None, None) if training is None else (forward, training.stages[1], training.total)
    return found


def time_scans(
    methods: Sequence[str],
    size: ScanSize,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backward: bool,
    trials: int,
    budget: float | None,
    loop_seqlen: int,
    loop_trials: int,
    loop_budget: float | None,
    seed: int,
    states: str = "real",
    on_trial: Callable[[], None] | None = None,
) -> list[Scan]:
    """Times every method through the operator, and through the loop over the first ``loop_seqlen`` steps (0: no loop).

    The loop's time is scaled by ``seqlen / loop_seqlen``. Its cost per token does not fall with the sequence's length (in
    backward it may grow), so the scaling does not overstate it.
    """
    inputs = scan_inputs(size, device=device, dtype=dtype, seed=seed, states=states)
    options = {"backward": backward, "on_trial": on_trial}
    operator = _time(ssm_kernels.selective_scan, methods, inputs, trials=trials, warmup=2, budget=budget, **options)
    loop = {}
    if loop_seqlen > 0:
        per_step = ("u", "delta", "B", "C", "z")
        head = {name: tensor[..., :loop_seqlen].contiguous() if name in per_step else tensor for name, tensor in inputs.items()}
        loop = _time(loop_scan, methods, head, trials=loop_trials, warmup=0, budget=loop_budget, least=1, **options)
    forward_bytes, training_bytes = scan_bytes(inputs)
    scale = size.seqlen / loop_seqlen if loop_seqlen else 1.0
    scans = []
    for method in methods:
        forward, back, training = operator[method]
        loop_forward, _, loop_training = loop.get(method, (None, None, None))
        scans.append(
            Scan(
                method,
                size,
                forward,
                back,
                training,
                forward_bytes,
                training_bytes,
                loop_seqlen,
                None if loop_forward is None else loop_forward.scaled(scale),
                None if loop_training is None else loop_training.scaled(scale),
            )
        )
    return scans
