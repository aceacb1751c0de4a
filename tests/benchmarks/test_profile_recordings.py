"""Recorded input of profile_discretization.py: time axes, channels, decimal commas, sample rates, damaged files."""

# ruff: noqa: F811
from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import METHODS

pytest.importorskip("rich", reason="the profiler prints its tables with rich")
pytest.importorskip("matplotlib", reason="the profiler draws with matplotlib")

from profile_helpers import ACCURACY_ONLY, SIGNAL, TIMES, in_a_folder_of_its_own, measure, profiler, recorded, refuse, table  # noqa: F401

OPERATOR = "selective_scan"


@pytest.mark.parametrize("name", ["signal.npy", "signal.csv", "signal.wav"])
def test_recorded_input(measure, name):
    recorded(Path(name), np.random.default_rng(0).standard_normal(40).cumsum())
    # A step of 1/8000 leaves the rules of higher orders nothing but rounding.
    found = measure(*ACCURACY_ONLY, "--input", name, "--hold", "zero", "--plot", "found.svg", "--quiet", "--step", "0.008")
    assert "constant between samples" in found["signal"]
    assert Path("found.svg").read_text().lstrip().startswith("<?xml")
    for accuracy in found["accuracies"]:
        finest, order = accuracy["sampled_at_end"]["errors"][-1], accuracy["sampled_at_end"]["order"]
        expected = METHODS[accuracy["method"]].step_order if accuracy["method"] in METHODS else 1  # two samples across a jump
        if expected is None:
            assert finest < 1e-12
        else:
            assert order == pytest.approx(expected, abs=0.15)


def wave(path: Path, rate: int = 100) -> np.ndarray:
    wavfile = pytest.importorskip("scipy.io.wavfile", reason="writes the WAV file")
    samples = np.round(2**14 * np.sin(0.3 * np.arange(40))).astype(np.int16)
    wavfile.write(path, rate, samples)
    return samples


@pytest.mark.parametrize(
    ("heading", "column", "spacing", "separator", "point", "quote"),
    [
        *((heading, TIMES, 0.25, ",", ".", "") for heading in ("time,x", "t [s],x", "Seconds,x", "# time,x", "time_s,x", "")),
        # A column that is headed with a capital is time only in even steps.
        ("T,x", SIGNAL, None, ",", ".", ""),
        ("T,x", TIMES, 0.25, ",", ".", ""),
        *((heading, TIMES, 0.25, separator, ",", "") for separator in ";\t" for heading in (f"time{separator}x", "")),
        *((heading, TIMES, 0.25, separator, ",", '"') for separator in ",;" for heading in (f'"time"{separator}"x, y"', "")),
    ],
)
def test_time_column_is_the_axis_and_no_signal(profiler, heading, column, spacing, separator, point, quote):
    rows = np.stack([column, SIGNAL], axis=1)
    found = profiler.signals.load_recording(table(Path("signal.csv"), heading, rows, separator, point, quote))
    assert found.spacing == (None if spacing is None else pytest.approx(spacing))
    assert ("(x, y)" in found.description) == ("x, y" in heading)
    written = SIGNAL.round(4)
    np.testing.assert_allclose(found.samples, written / np.abs(written).max(), rtol=1e-12, atol=0)


def test_time_column_is_not_counted_as_a_channel(profiler, tmp_path):
    path = table(tmp_path / "signal.csv", "left,time,right", np.stack([SIGNAL, TIMES, 0 * SIGNAL + 3], axis=1))
    found = profiler.signals.load_recording(path, channel=1)
    assert found.spacing == pytest.approx(0.25) and "(right)" in found.description
    np.testing.assert_array_equal(found.samples, 1.0)


def test_column_that_only_looks_like_time_has_to_be_chosen(profiler, tmp_path):
    path = table(tmp_path / "signal.csv", "ramp,x", np.stack([TIMES, SIGNAL], axis=1))
    with pytest.raises(ValueError, match="choose the signal by --channel"):
        profiler.signals.load_recording(path)
    found = profiler.signals.load_recording(path, channel=0)
    assert found.spacing is None
    np.testing.assert_allclose(found.samples, TIMES / TIMES.max(), atol=1e-3)


@pytest.mark.parametrize(
    ("heading", "says"),
    [
        ("time,x", r"times that increase evenly in column 'time', got steps .*: resample the signal, or rename the column"),
        ("", r"choose the signal by --channel \(0, 1\)"),
        ("T,x", r"choose the signal by --channel \(0 is 'T', 1 is 'x'\)"),
    ],
)
def test_uneven_times_are_refused(profiler, tmp_path, heading, says):
    path = table(tmp_path / "signal.csv", heading, np.stack([TIMES**2, SIGNAL], axis=1))
    with pytest.raises(ValueError, match=says):
        profiler.signals.load_recording(path)


def test_one_column_of_decimal_commas_below_its_name(profiler, tmp_path):
    path = table(tmp_path / "signal.csv", "volts", SIGNAL[:, None], point=",")
    with path.open("a") as file:
        file.write("1\n1,5E-05\n")
    samples = np.append(SIGNAL, [1.0, 1.5e-5])
    found = profiler.signals.load_recording(path)
    assert "(volts)" in found.description
    np.testing.assert_allclose(found.samples, samples / np.abs(samples).max(), atol=1e-3)


@pytest.mark.parametrize("heading", ["", "# recorded in the laboratory"])
def test_comma_that_may_be_decimal_or_separate_channels_is_refused(profiler, tmp_path, heading):
    rows = np.stack([7 - np.arange(30) % 7, np.arange(30) % 5], axis=1)
    lines = [f"{left},{right}" for left, right in rows]
    path = tmp_path / "signal.csv"
    path.write_text("\n".join([*([heading] if heading else []), *lines]) + "\n")
    with pytest.raises(ValueError, match=r"decimal comma or separate two channels.*heading of one name.*--channel 0"):
        profiler.signals.load_recording(path)
    np.testing.assert_array_equal(profiler.signals.load_recording(path, channel=1).samples, rows[:, 1] / 4)
    path.write_text("\n".join(["left,right", *lines]) + "\n")
    np.testing.assert_allclose(profiler.signals.load_recording(path).samples, rows.sum(1) / rows.sum(1).max())


@pytest.mark.parametrize(("arguments", "spacing"), [((), 0.01), (("--step", "0.5"), 0.5)])
def test_sample_rate_is_the_step(profiler, measure, arguments, spacing):
    samples = wave(Path("signal.wav"))
    found = profiler.signals.load_recording(Path("signal.wav"))
    assert found.spacing == 0.01
    np.testing.assert_allclose(found.samples, samples / np.abs(samples).max())
    chosen = ["--methods", "foh", "--input", "signal.wav", "--plot", "none", "--quiet", *arguments]
    written = measure(*ACCURACY_ONLY, *chosen)
    assert written["sample_spacing"] == pytest.approx(spacing)
    assert written["accuracies"][0]["steps"][-1] == pytest.approx(spacing / profiler.signals.REFINEMENT)


def saved(save: Callable[..., None], *arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    save(file, *arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.npy", b"", "cannot be read as npy"),
        ("text.npy", b"no array", "cannot be read as npy"),
        ("text.csv", b"some\ntext\n", "cannot be read as csv"),
        ("empty.csv", b"", "expected at least 17 samples, got 0"),
        ("short.csv", b"1\n2\n3\n", "expected at least 17 samples, got 3"),
        ("nan.csv", b"1\n" * 20 + b"nan\n", "sample 20 is not finite"),
        ("zero.csv", b"0\n" * 20, "zero everywhere"),
        ("ragged.csv", b"1,2\n" * 20 + b"1\n", "cannot be read as csv"),
        ("cut.wav", b"RIFF\x24\x00\x00\x00WAVE", "cannot be read as wav"),
        ("text.wav", b"no sound", "cannot be read as wav"),
        ("archive.npy", saved(np.savez, np.ones(20)), "expected one array, got NpzFile"),
        ("array.npy", saved(np.save, np.ones(20, dtype=np.complex128)), "expected real numbers"),
        ("array.npy", saved(np.save, np.ones((20, 3, 3))), "expected samples or (samples, channels)"),
        ("array.npy", saved(np.save, np.array([{}] * 20)), "cannot be read as npy"),
        ("array.npy", saved(np.save, np.ones((20, 2))), "channel 2 asked for, but there are 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_recordings_give_one_line(refuse, name, content, says):
    Path(name).write_bytes(content)
    refuse(["--input", name, *(["--channel", "2"] if name == "array.npy" else [])], says)


def damaged(content: bytes) -> Iterator[bytes]:
    """Cut after every byte, and with every byte zeroed."""
    for place in range(len(content)):
        yield content[:place]
        yield content[:place] + b"\0" + content[place + 1 :]


@pytest.mark.parametrize("name", ["signal.npy", "signal.csv", "signal.wav"])
def test_damaged_recordings_are_read_or_refused(profiler, tmp_path, name):
    path = recorded(tmp_path / name, np.random.default_rng(0).standard_normal(20))
    whole, refused = path.read_bytes(), 0
    for content in damaged(whole):
        path.write_bytes(content)
        try:
            samples = profiler.signals.load_recording(path).samples
        except ValueError as error:
            refused += 1
            assert str(error).startswith(f"{path}: ")
            assert len(str(error).splitlines()) == 1
        else:
            assert samples.ndim == 1 and np.isfinite(samples).all()
    assert refused > 0
