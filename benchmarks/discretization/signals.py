"""Part 3, the inputs: signals for which the continuous system's exact response is known.

The system is ``h'(t) = A h(t) + B u(t)``, ``y(t) = <C, h(t)>``, ``h(0) = 0``, where A is diagonal or a matrix, and
``y(t) = 2 Re <C, h(t)>`` where A is complex. Step k goes from ``t_{k-1}`` to ``t_k = k * step``; its result is compared with
``y(t_k)``. A rule with one input sample per step holds that sample over the step, so the place of the sample in the step
matters as much as the rule (``SAMPLINGS``). A model on samples reads the one at the step's end, which is half a step early on
average: an error of first order that no rule removes. A sample from the middle leaves an error of second order and shows the
rule itself, but no model has it.
"""

from __future__ import annotations

import csv
import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FINEST_STEP = 0.001
"""The smallest step of Mamba's initialization, in units of time in which A is -1 .. -dstate."""

SAMPLINGS = {"end": "the end of the step", "middle": "the middle of the step"}

HOLDS = {
    "linear": "linear between samples",
    "zero": "constant between samples, at the value of the later one",
}

REFINEMENT = 8
"""Steps per recorded sample at the finest step size: between samples the declared continuation is known as well."""

MAX_SAMPLES = 2**13 + 1

_ROUNDED_TIMES = 0.1
"""Largest relative deviation of a time axis's steps from their mean: files write times with few digits."""


STATES = {"real": "real", "s4d-lin": "S4D-Lin", "s4d-inv": "S4D-Inv", "matrix": "HiPPO-LegS"}
"""Names of the states: real ones, one of each conjugate pair of S4D, or real ones that the matrix of HiPPO-LegS couples."""

COMPLEX_STATES = ("s4d-lin", "s4d-inv")


def s4d_rates(states: str, dstate: int) -> Tensor:
    """A of S4D's initializations, (dstate,), complex128: ``-1/2 + i pi n`` of S4D-Lin, and those of S4D-Inv.

    S4D-Inv has ``-1/2 + i (N / pi) (N / (2 n + 1) - 1)`` with ``N = 2 dstate``, which counts both states of a pair.
    """
    n, both = torch.arange(dstate, dtype=torch.float64), 2 * dstate
    imaginary = math.pi * n if states == "s4d-lin" else both / math.pi * (both / (2 * n + 1) - 1)
    return torch.complex(torch.full_like(n, -0.5), imaginary)


def legs_matrices(dstate: int) -> tuple[Tensor, Tensor]:
    """A, (dstate, dstate), and B, (dstate,), of HiPPO-LegS as S4 has them, float64.

    A is lower triangular, with -1 .. -dstate in its diagonal and ``-sqrt((2 n + 1) (2 k + 1))`` below it; B is
    ``sqrt(2 n + 1)``. The eigenvalues are those of Mamba's initialization, but the eigenvectors are dependent in practice: A is
    far from normal.
    """
    B = torch.sqrt(2 * torch.arange(dstate, dtype=torch.float64) + 1)
    rates = torch.arange(1, dstate + 1, dtype=torch.float64)
    return -(torch.tril(B[:, None] * B, diagonal=-1) + torch.diag(rates)), B


@dataclass(frozen=True)
class System:
    """A stable system; A, B and C are (dim, dstate), float64 or complex128, or A is one matrix of all channels.

    A matrix is (1, dstate, dstate), float64 and lower triangular.
    """

    A: Tensor
    B: Tensor
    C: Tensor

    @classmethod
    def random(cls, dim: int, dstate: int, seed: int, A_range: tuple[float, float] | None = None) -> System:
        """A is log-uniform in a range and includes both ends in every channel; B and C are normal.

        Args:
            A_range: the smallest and the largest ``|A|``; None for 1 and ``dstate``.
        """
        low, high = (1.0, float(dstate)) if A_range is None else A_range
        generator = torch.Generator().manual_seed(seed)
        exponent = torch.rand(dim, dstate, generator=generator, dtype=torch.float64)
        exponent[:, 0], exponent[:, -1] = 0.0, 1.0
        B, C = torch.randn(2, dim, dstate, generator=generator, dtype=torch.float64)
        return cls(-low * (high / low) ** exponent, B, C)

    @classmethod
    def s4d(cls, states: str, dim: int, dstate: int, seed: int) -> System:
        """A of :func:`s4d_rates` in every channel, B one, and C normal."""
        A = s4d_rates(states, dstate).repeat(dim, 1)
        generator = torch.Generator().manual_seed(seed)
        return cls(A, torch.ones_like(A), torch.randn(dim, dstate, generator=generator, dtype=A.dtype))

    @classmethod
    def legs(cls, dim: int, dstate: int, seed: int) -> System:
        """A and B of :func:`legs_matrices`, one matrix and one B for all channels, and C normal."""
        A, B = legs_matrices(dstate)
        generator = torch.Generator().manual_seed(seed)
        return cls(A[None], B.repeat(dim, 1), torch.randn(dim, dstate, generator=generator, dtype=A.dtype))

    @property
    def is_matrix(self) -> bool:
        return self.A.dim() == 3

    @property
    def rates(self) -> Tensor:
        """The absolute values of the eigenvalues, which a triangular matrix has in its diagonal."""
        return (self.A.diagonal(dim1=-2, dim2=-1) if self.is_matrix else self.A).abs()

    @property
    def norm(self) -> float:
        """The 2-norm of A, which is far above the largest eigenvalue of HiPPO-LegS."""
        return (torch.linalg.matrix_norm(self.A, 2) if self.is_matrix else self.rates).max().item()

    def out(self, y: Tensor) -> Tensor:
        """The output of ``<C, h>``: twice the real part where states are one of each conjugate pair."""
        return 2 * y.real if self.A.is_complex() else y.real


@dataclass(frozen=True)
class Response:
    """A sampled input and the exact output at the times ``step, 2 step, .. seqlen step``.

    Attributes:
        u: (dim, seqlen), the input at these times, float64.
        u_middle: (dim, seqlen), the input half a step earlier.
        u_start: (dim,), the input at time 0.
        y: (dim, seqlen), the output, exact up to rounding.
        step: the finest step.
        resolved: the largest step at which the input is smooth, or of the declared form, within a step.
        description: describes the input, also between the samples.
    """

    u: Tensor
    u_middle: Tensor
    u_start: Tensor
    y: Tensor
    step: float
    resolved: float
    description: str

    def at(self, factor: int, sampling: str) -> tuple[Tensor, Tensor]:
        """The input of each step of ``factor * step``, for a power of two, and the exact output at each step's end."""
        if sampling == "end":
            u = self.u[:, factor - 1 :: factor]
        else:
            u = self.u_middle if factor == 1 else self.u[:, factor // 2 - 1 :: factor]
        y = self.y[:, factor - 1 :: factor]
        return u[:, : y.shape[1]], y

    def before(self, factor: int, sampling: str) -> Tensor | None:
        """The input of the step before the first one; None if it is not known: it began before time 0."""
        return self.u_start if sampling == "end" else None

    def factors(self, fewest: int = 8) -> list[int]:
        """Powers of two by which the step can be multiplied so that ``fewest`` steps remain; largest first."""
        largest = (self.u.shape[1] // fewest).bit_length() - 1
        return [2**k for k in range(largest, -1, -1)]


def sinusoids(system: System, seed: int, seqlen: int = 4096, step: float = FINEST_STEP) -> Response:
    """The sum of three sinusoids, with another phase in every channel."""
    frequencies = torch.tensor([1.0, 3.1, 9.7], dtype=torch.float64)
    dim = system.C.shape[0]
    generator = torch.Generator().manual_seed(seed)
    phases = 2 * torch.pi * torch.rand(dim, len(frequencies), generator=generator, dtype=torch.float64)
    t = step * torch.arange(1, seqlen + 1, dtype=torch.float64)
    u, u_middle = (torch.sin(frequencies[:, None] * time + phases[..., None]).sum(1) for time in (t, t - step / 2))
    y = (_matrix_response if system.is_matrix else _diagonal_response)(system, frequencies, phases, t)
    listed = ", ".join(f"{frequency:g}" for frequency in frequencies.tolist())
    return Response(u, u_middle, torch.sin(phases).sum(1), y, step, math.inf, f"sum of sinusoids of angular frequency {listed}")


def _diagonal_response(system: System, frequencies: Tensor, phases: Tensor, t: Tensor) -> Tensor:
    """The response to sinusoids, (dim, seqlen).

    ``e^{i(wt+p)}`` drives a state to ``B e^{ip} (e^{iwt} - e^{At}) / (iw - A)``. A sinusoid is the difference of two of these
    inputs, with opposite signs of w and p, over 2i.
    """
    y = torch.empty(len(phases), len(t), dtype=torch.float64)
    waves = torch.exp(1j * frequencies[:, None] * t)
    for d in range(len(phases)):  # one channel at a time bounds the memory of (dstate, seqlen)
        transient, parts = torch.exp(system.A[d][:, None] * t).to(waves.dtype), []
        for sign in (1, -1):
            response = torch.exp(1j * sign * phases[d])[:, None] / (1j * sign * frequencies[:, None] - system.A[d])
            weighted = response * (system.B[d] * system.C[d])
            wave = waves if sign == 1 else waves.conj()
            parts.append((weighted.sum(1)[:, None] * wave).sum(0) - weighted.sum(0) @ transient)
        y[d] = system.out((parts[0] - parts[1]) / 2j)
    return y


def _matrix_response(system: System, frequencies: Tensor, phases: Tensor, t: Tensor) -> Tensor:
    """:func:`_diagonal_response` for a matrix A and evenly spaced times, where the quotient is a solve.

    The state is ``Im(sum of e^{ip} (e^{iwt} - e^{At}) (iw - A)^{-1} B)`` over the frequencies, because A and B are real.
    """
    A, dstate, seqlen = system.A[0], system.A.shape[-1], len(t)
    waves = torch.exp(1j * frequencies[:, None] * t)
    shifted = 1j * frequencies[:, None, None] * torch.eye(dstate, dtype=torch.complex128) - A
    of_B = torch.linalg.solve(shifted, system.B.mT.to(shifted.dtype).expand(len(frequencies), -1, -1))
    states = torch.exp(1j * phases.mT)[:, None] * of_B  # (frequencies, dstate, dim)
    y = torch.einsum("dn,fnd,ft->dt", system.C.to(states.dtype), states, waves).imag
    # e^{A k step} times the states at time 0: each power of the exponential doubles the number of steps.
    power, decayed = torch.matrix_exp(t[0] * A), states.imag.sum(0)[None]
    decayed = power @ decayed
    while len(decayed) < seqlen:
        decayed = torch.cat([decayed, power @ decayed])
        power = power @ power
    return y - torch.einsum("dn,tnd->dt", system.C, decayed[:seqlen])


def _phi(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``phi1(z) = (e^z - 1) / z`` and ``phi2(z) = (phi1 - 1) / z`` for z != 0; phi2 by its series where it cancels."""
    phi1 = np.expm1(z) / z
    is_small = np.abs(z) < 0.5
    series, small = np.zeros_like(z), np.where(is_small, z, 0)
    for k in range(18, -1, -1):
        series = 1.0 + series * small / (k + 3)
    return phi1, np.where(is_small, series / 2, (phi1 - 1.0) / z)


def _matrix_phi(system: System, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``e^Z``, (dstate, dstate), and ``step phi1(Z) B`` and ``step phi2(Z) B``, both (dim, dstate), for ``Z = step A``.

    They are parts of the exponential of ``Z`` bordered by ``step B`` and by the integrators of a constant and of a ramp.
    """
    dim, dstate = system.B.shape
    bordered = torch.zeros(dim, dstate + 2, dstate + 2, dtype=torch.float64)
    bordered[:, :dstate, :dstate], bordered[:, :dstate, dstate] = step * system.A, step * system.B
    bordered[:, dstate, dstate + 1] = 1.0
    found = torch.matrix_exp(bordered).numpy()
    return found[0, :dstate, :dstate], found[:, :dstate, dstate], found[:, :dstate, dstate + 1]


def recording(system: System, samples: np.ndarray, hold: str, step: float = FINEST_STEP) -> Response:
    """The response to recorded samples ``REFINEMENT * step`` apart, the first at time 0, continued according to
    ``HOLDS[hold]``.

    Over one step the input is a polynomial of degree at most one, so the state at its end is exact:
    ``e^z h + step B ((phi1 - phi2) u_{k-1} + phi2 u_k)`` for a line, ``e^z h + step B phi1 u_k`` for a constant.
    """
    A, B, C = (tensor.numpy() for tensor in (system.A, system.B, system.C))
    if system.is_matrix:
        exponential, held, ramp = _matrix_phi(system, step)
    else:
        z = step * A
        exponential, (phi1, phi2) = np.exp(z), _phi(z)
        held, ramp = step * B * phi1, step * B * phi2
    if hold == "linear":
        times = np.arange((len(samples) - 1) * REFINEMENT + 1) / REFINEMENT
        u = np.interp(times, np.arange(len(samples)), samples)
        middle = (u[1:] + u[:-1]) / 2
        now, before = ramp, held - ramp
    else:
        u = np.concatenate([samples[:1], np.repeat(samples[1:], REFINEMENT)])
        middle = u[1:]
        now, before = held, np.zeros_like(held)
    dim, h = C.shape[0], np.zeros_like(held)
    y = np.empty((len(u) - 1, dim))
    for k in range(1, len(u)):
        h = (h @ exponential.T if system.is_matrix else exponential * h) + now * u[k] + before * u[k - 1]
        y[k - 1] = (C * h).sum(1).real
    start = torch.full((dim,), float(u[0]), dtype=torch.float64)
    u, middle = (torch.from_numpy(values).expand(dim, -1) for values in (u[1:], middle))
    exact = system.out(torch.from_numpy(y)).T.contiguous()
    return Response(u, middle, start, exact, step, REFINEMENT * step, f"{HOLDS[hold]}, {REFINEMENT * step:g} apart")


@dataclass(frozen=True)
class Recording:
    """A signal from a file.

    Attributes:
        samples: (seqlen,), float64, scaled to 1.
        spacing: the distance between samples according to the file, in its unit of time (seconds for a .wav file), or
            None.
        description: one line on the channel and samples.
    """

    samples: np.ndarray
    spacing: float | None
    description: str


@dataclass(frozen=True)
class _Contents:
    """The contents of a file.

    Attributes:
        data: the numbers.
        names: the columns' names; None without a heading.
        rate: the sample rate, or None.
        is_ambiguous: the two columns may be one column with decimal commas.
    """

    data: np.ndarray
    names: tuple[str, ...] | None = None
    rate: float | None = None
    is_ambiguous: bool = False


def load_recording(path: Path, channel: int | None = None) -> Recording:
    """Reads a signal from a .npy, .csv or .wav file, at most its first ``MAX_SAMPLES`` samples.

    A column is a time axis if its heading says so ("time", "t", "seconds", ...) or, where there are no headings, if it is the
    first of several and increases in even steps. A column headed "T" or "S" is one only if it increases in even steps.

    Args:
        path: two-dimensional data is (samples, channels) or, without headings, its transpose: time is the longer axis.
        channel: number of the channel, without the time axis; None for the mean of all.

    Raises:
        ValueError: the file cannot be read as a signal, its commas may be decimal commas or separate two channels, or its time
            axis is not evenly sampled.
        OSError: the file cannot be opened.
        ModuleNotFoundError: a .wav file, and SciPy is not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".csv", ".wav"):
        raise ValueError(f"{path}: expected a .npy, .csv or .wav file")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        contents = _READERS[suffix](path)
    except (OSError, ModuleNotFoundError):
        raise
    except Exception as error:  # readers raise many types for damaged files, such as struct.error and tokenize.TokenError
        # Messages of these types describe the file; messages of other types describe the reader's internals.
        spoken = str(error).splitlines() if isinstance(error, (ValueError, EOFError, csv.Error)) else []
        reason = spoken[0] if spoken else "the file is damaged or incomplete"
        raise ValueError(f"{path}: cannot be read as {suffix[1:]}: {reason}") from error
    if contents.is_ambiguous and channel is None:
        raise ValueError(
            f"{path}: every line is two numbers and a comma, which may be a decimal comma or separate two channels. For "
            "decimal commas, add a heading of one name or write decimal points; for two channels, add a heading of two names "
            "or pass --channel 0 or --channel 1"
        )
    data, names = contents.data, contents.names
    if not isinstance(data, np.ndarray):
        raise ValueError(f"{path}: cannot be read as {suffix[1:]}: expected one array, got {type(data).__name__}")
    if data.dtype.kind not in "biuf":
        raise ValueError(f"{path}: expected real numbers, got {data.dtype}")
    data = data if names is not None else np.atleast_1d(np.squeeze(data))
    if data.ndim > 2:
        raise ValueError(f"{path}: expected samples or (samples, channels), got an array of shape {list(data.shape)}")
    if data.ndim == 1:
        data = data[:, None]
    elif names is None and data.shape[0] < data.shape[1]:
        data = data.T
    total = len(data)
    data = data[:MAX_SAMPLES].astype(np.float64)
    spacing = None if contents.rate is None else 1 / contents.rate
    axis = None if contents.rate is not None else _time_axis(path, data, names, channel)
    if axis is not None:
        spacing = _even_spacing(path, data[:, axis], None if names is None else names[axis])
        data = np.delete(data, axis, axis=1)
        names = None if names is None else (*names[:axis], *names[axis + 1 :])
    channels = data.shape[1]
    if channels == 0:
        raise ValueError(f"{path}: expected a signal besides the time axis")
    if channel is not None and not 0 <= channel < channels:
        raise ValueError(f"{path}: channel {channel} asked for, but there are {channels} (0 to {channels - 1})")
    samples = data.mean(1) if channel is None else data[:, channel]
    if len(samples) < 17:
        raise ValueError(f"{path}: expected at least 17 samples, got {len(samples)}")
    if not np.isfinite(samples).all():
        raise ValueError(f"{path}: sample {int(np.flatnonzero(~np.isfinite(samples))[0])} is not finite")
    if not samples[1:].any():
        raise ValueError(f"{path}: the signal is zero everywhere")
    which = ""
    if channels > 1:
        which = f", mean of {channels} channels" if channel is None else f", channel {channel} of {channels}"
    if names is not None and (channels == 1 or channel is not None):
        which += f" ({names[channel or 0]})"
    taken = f"{total} samples" if total == len(samples) else f"the first {len(samples)} of {total} samples"
    description = f"{path.name}: {taken}{which}, scaled to 1"
    return Recording(np.ascontiguousarray(samples / np.abs(samples).max()), spacing, description)


_TIME_HEADING = re.compile(r"(t|time|times|timestamp|seconds|secs?|s|ms)(\W.*|_.*)?", re.IGNORECASE)

_CAPITAL_HEADING = re.compile(r"[TS](\W.*|_.*)?")
"""Headings that may mean another quantity, such as a temperature."""


def _is_increasing(values: np.ndarray, spread: float = math.inf) -> bool:
    """Checks that all steps are above 0 and differ by no more than ``spread`` of their mean."""
    steps = np.diff(values)
    return len(steps) > 1 and bool(np.isfinite(values).all() and steps.min() > 0 and np.ptp(steps) <= spread * steps.mean())


def _time_axis(path: Path, data: np.ndarray, names: tuple[str, ...] | None, channel: int | None) -> int | None:
    """The column that is a time axis, if there is one."""
    for column, name in enumerate(names or ()):
        if _TIME_HEADING.fullmatch(name) and (
            not _CAPITAL_HEADING.fullmatch(name) or _is_increasing(data[:, column], _ROUNDED_TIMES)
        ):
            return column
    if data.shape[1] < 2 or not _is_increasing(data[:, 0]):
        return None
    if names is None and _is_increasing(data[:, 0], _ROUNDED_TIMES):
        return 0
    if channel is None:
        columns = ", ".join(f"{k} is '{names[k]}'" if names else str(k) for k in range(data.shape[1]))
        raise ValueError(
            f"{path}: the first column increases as a time axis does: choose the signal by --channel ({columns}), "
            "or name the first column 'time' if it has even steps"
        )
    return None


def _even_spacing(path: Path, times: np.ndarray, name: str | None) -> float:
    """The distance between samples; the times may be rounded."""
    if not _is_increasing(times, _ROUNDED_TIMES):
        steps = np.diff(times)
        found = f"steps from {steps.min():.3g} to {steps.max():.3g}" if len(steps) else f"{len(times)} times"
        column = "" if name is None else f" in column '{name}'"
        raise ValueError(
            f"{path}: expected times that increase evenly{column}, got {found}: resample the signal, or rename the column if "
            "it holds no times"
        )
    return float(times[-1] - times[0]) / (len(times) - 1)


def _read_npy(path: Path) -> _Contents:
    return _Contents(np.load(path, allow_pickle=False))


_QUOTED = re.compile(r'"([^"]*)"')
_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+,\d+([eE][+-]?\d+)?\s*")
_INTEGER_OR_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+(,\d+)?([eE][+-]?\d+)?\s*")


def _read_csv(path: Path) -> _Contents:
    """Reads columns, one per channel, separated by commas, semicolons or tabs; a first line without numbers is a heading.

    A comma is a decimal point inside quotes, if semicolons or tabs separate the columns, and below a heading of one name.
    Without a heading, lines such as ``0,123`` are ambiguous.
    """
    lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    try:
        delimiter = csv.Sniffer().sniff("\n".join(lines[:50]), delimiters=";\t").delimiter
    except csv.Error:  # commas, or one column
        delimiter = ","
    first = [cell.strip() for cell in next(csv.reader([lines[0].lstrip("# ")], delimiter=delimiter))] if lines else []
    lines = [_QUOTED.sub(lambda cell: cell[1].replace(",", "."), line) for line in lines]
    has_decimal_commas, is_ambiguous = delimiter != ",", False
    if not has_decimal_commas and lines:
        # A comment or a number is also a single cell, but names no column.
        if len(first) == 1 and not lines[0].startswith("#") and not _INTEGER_OR_DECIMAL_COMMA.fullmatch(lines[0]):
            has_decimal_commas = all(map(_INTEGER_OR_DECIMAL_COMMA.fullmatch, lines[1:]))
        elif len(first) == 1 or _DECIMAL_COMMA.fullmatch(lines[0]):
            is_ambiguous = len(lines) > 1 and all(map(_DECIMAL_COMMA.fullmatch, lines[1:]))
    if has_decimal_commas:
        lines = [line.replace(",", ".") for line in lines]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the length check reports an empty file
        try:
            data, heading = np.loadtxt(lines, delimiter=delimiter, ndmin=2), lines and lines[0].startswith("#")
        except ValueError:
            data, heading = np.loadtxt(lines[1:], delimiter=delimiter, ndmin=2), True
    names = tuple(first) if heading and len(first) == data.shape[1] else None
    return _Contents(data, names, is_ambiguous=is_ambiguous)


def _read_wav(path: Path) -> _Contents:
    from scipy.io import wavfile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # chunks that hold no samples
        rate, data = wavfile.read(path)
    if rate <= 0:
        raise ValueError(f"expected a sample rate above 0, got {rate}")
    return _Contents(data.astype(np.float64) - 128.0 if data.dtype == np.uint8 else data, rate=float(rate))


_READERS = {".npy": _read_npy, ".csv": _read_csv, ".wav": _read_wav}
