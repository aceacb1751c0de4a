"""MambaLM.from_pretrained on damaged and malicious folders: an error names the file, no code runs, no memory is taken."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import safetensors_bytes, write_index, write_safetensors, write_shards
from helpers import says
from model_helpers import make_model

from ssm_kernels.models import MambaConfig, MambaLM

PICKLED, SAFE = "pytorch_model.bin", "model.safetensors"
HUGE = 10**12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint."""
    make_model("Mamba", dtype=torch.float32).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Lets the process map 2 GiB more than it has; the folders claim far larger sizes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def set_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def write_config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


def weights_of(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / PICKLED, weights_only=True))


def save_weights(**changes: Any) -> Callable[[Path], None]:
    """Replaces tensors by ``_``-for-dot names; None removes one."""

    def change(folder: Path) -> None:
        weights = weights_of(folder) | {name.replace("__", "."): value for name, value in changes.items()}
        torch.save({name: value for name, value in weights.items() if value is not None}, folder / PICKLED)

    return change


def save_object(value: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / PICKLED)


def many_from_one(folder: Path) -> None:
    """Weights that are all views of one number: small on disk, large in memory."""
    config = MambaConfig(d_model=2**15, n_layer=1, vocab_size=2**20)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in MambaLM(config).state_dict().items()}
    one = torch.zeros(1)
    torch.save({name: one.expand(shape) for name, shape in shapes.items()}, folder / PICKLED)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


def layers_from_one(folder: Path) -> None:
    """Layers that share one storage."""
    weights = weights_of(folder)
    layer = {name.split(".", 3)[3]: value for name, value in weights.items() if name.startswith("backbone.layers.0.")}
    weights |= {f"backbone.layers.{i}.{name}": value for i in range(200) for name, value in layer.items()}
    torch.save(weights, folder / PICKLED)
    set_config(n_layer=200)(folder)


def claims_more(folder: Path) -> None:
    """An archive whose pickle claims a storage and a tensor of many more numbers than its file has."""
    rows, columns = pickle_int(24), pickle_int(16)

    def change(pickled: bytes) -> bytes:
        assert pickled.count(rows + columns) == 2
        pickled = pickled.replace(pickle_int(24 * 16), pickle_int(2**40))
        return pickled.replace(rows + columns, pickle_int(2**36) + columns)

    edit_pickle(folder, change)


def pickle_int(value: int) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]


def edit_pickle(folder: Path, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    path = folder / PICKLED
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, value in members.items():
            archive.writestr(name, change(value) if name.endswith("data.pkl") else value)


def evil_pickle(folder: Path) -> bytes:
    """A pickle that allocates."""
    torch.save({"a": Reduces(torch.UntypedStorage, (2**40,))}, folder / "evil.bin")
    with zipfile.ZipFile(folder / "evil.bin") as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))


def second_pickle(folder: Path) -> None:
    """PyTorch reads DATA.PKL, where it looks for data.pkl."""
    with zipfile.ZipFile(folder / PICKLED) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(members)).partition("/")[0]
    with zipfile.ZipFile(folder / PICKLED, "w") as archive:
        for name, value in ({f"{root}/DATA.PKL": evil_pickle(folder)} | members).items():
            archive.writestr(name, value)


def two_archives(folder: Path) -> None:
    """A file in which Python's reader finds the harmless archive and PyTorch's the other one."""
    path = folder / PICKLED
    edit_pickle(folder, lambda pickled: pickled)
    harmless = path.read_bytes()
    edit_pickle(folder, lambda _: evil_pickle(folder))
    (records, directory, _), (own_records, own_directory, end) = map(split_archive, (path.read_bytes(), harmless))
    # The end says where PyTorch finds a directory; Python takes the last bytes before the end.
    records += bytes(max(0, len(own_records) - len(records)))
    # Python adds the distance between the two directories to each offset.
    distance = len(directory) + len(own_records)
    moved = bytearray(own_directory)
    shift_offsets(moved, 0, len(moved), len(records) + len(directory) - distance)
    sizes = struct.pack("<II", len(directory), len(records))
    path.write_bytes(records + directory + own_records + moved + end[:12] + sizes + b"\0\0")


def second_end(folder: Path) -> None:
    """A 64-bit archive behind another one, to whose end its locator points: PyTorch follows the locator, Python does not.

    Python 3.12.3 sees no archive at all.
    """
    harmless = bytearray((folder / PICKLED).read_bytes())
    evil_pickle(folder)
    evil = (folder / "evil.bin").read_bytes()
    (size, begin), at = struct.unpack_from("<QQ", harmless, len(harmless) - 58), len(evil)
    shift_offsets(harmless, begin, begin + size, at)
    struct.pack_into("<Q", harmless, len(harmless) - 50, begin + at)
    struct.pack_into("<Q", harmless, len(harmless) - 34, len(evil) - 98)
    struct.pack_into("<I", harmless, len(harmless) - 6, begin + at)
    (folder / PICKLED).write_bytes(evil + harmless)


def shift_offsets(directory: bytearray, at: int, end: int, distance: int) -> None:
    """Adds to the offsets of the members in a central directory."""
    while at < end:
        name, extra, comment = struct.unpack_from("<3H", directory, at + 28)
        (offset,) = struct.unpack_from("<I", directory, at + 42)
        struct.pack_into("<I", directory, at + 42, offset + distance)
        at += 46 + name + extra + comment


def split_archive(archive: bytes) -> tuple[bytes, bytes, bytes]:
    """The members, the central directory and the end of an archive without a comment."""
    end = archive.rfind(b"PK\5\6")
    size, offset = struct.unpack_from("<II", archive, end + 12)
    return archive[:offset], archive[offset : offset + size], archive[end:]


def compressed(folder: Path) -> None:
    edit_pickle(folder, lambda pickled: pickled, zipfile.ZIP_DEFLATED)


def truncated(name: str, keep: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if name == SAFE:
            as_safetensors(folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(keep * len(content))])

    return change


def as_safetensors(folder: Path) -> None:
    write_safetensors(folder / SAFE, weights_of(folder))
    (folder / PICKLED).unlink()


def safetensors(**entry: Any) -> Callable[[Path], None]:
    """Changes the entry of one tensor in the header."""

    def change(folder: Path) -> None:
        as_safetensors(folder)
        content = (folder / SAFE).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        header["backbone.norm_f.weight"] |= entry
        (folder / SAFE).write_bytes(safetensors_bytes(header, content[end:]))

    return change


def long_header(folder: Path) -> None:
    (folder / SAFE).write_bytes((2**60).to_bytes(8, "little") + b"{}")


def index(places: Any, kind: str = "bin") -> Callable[[Path], None]:
    """An index in which a shard has another place."""

    def change(folder: Path) -> None:
        good = write_shards(folder, weights_of(folder), kind)
        (folder / PICKLED).rename(folder.parent / "outside.bin")
        write_index(folder, kind, good | {"backbone.norm_f.weight": places} if isinstance(places, str) else places)

    return change


def linked(folder: Path) -> None:
    index("pytorch_model-link.bin")(folder)
    os.symlink(folder.parent / "outside.bin", folder / "pytorch_model-link.bin")


class Reduces:
    """Calls a function when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


INDEX = f"{PICKLED}.index.json"
NORM = "backbone__norm_f__weight"
FOLDERS: dict[str, tuple[Callable[[Path], Any], type[Exception], list[str]]] = {
    # config.json
    "deep": (write_config('{"a":' * 200_000 + "1" + "}" * 200_000), ValueError, ["config.json", "nested too deeply"]),
    "list": (write_config("[]"), ValueError, ["expected an object in", "config.json", "got list"]),
    "not JSON": (write_config("{"), ValueError, ["expected JSON in", "config.json: "]),
    "not text": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), ValueError, ["config.json"]),
    "number": (write_config("1" * 10_000), ValueError, ["config.json"]),
    "nan": (set_config(d_model=math.nan), ValueError, ["config.json", "expected d_model to be an int, got float"]),
    "string": (set_config(n_layer="2"), ValueError, ["config.json", "expected n_layer to be an int, got str"]),
    "huge d_model": (set_config(d_model=HUGE), ValueError, ["config.json", "expected d_model from 1 to", f"got {HUGE}"]),
    "huge layers": (set_config(n_layer=60_000), RuntimeError, [PICKLED, "expected 60000 layers", "got 2"]),
    "huge vocabulary": (set_config(vocab_size=2**31 - 1), RuntimeError, [PICKLED, "size mismatch", "2147483648, 16"]),
    "huge state": (set_config(ssm_cfg={"d_state": HUGE}), ValueError, ["config.json", "ssm_cfg['d_state']", f"{HUGE}"]),
    "huge width": (set_config(ssm_cfg={"expand": 2**24}), RuntimeError, [PICKLED, "size mismatch"]),
    "large state": (set_config(ssm_cfg={"d_state": 2**23, "expand": 2**23}), ValueError, ["config.json"]),
    "state nan": (set_config(ssm_cfg={"d_state": math.nan}), ValueError, ["config.json", "d_state"]),
    "unknown option": (set_config(ssm_cfg={"d_stat": 3}), ValueError, ["config.json", "arguments of Mamba", "'d_stat'"]),
    "option of the model": (set_config(ssm_cfg={"dtype": "x"}), ValueError, ["config.json", "ssm_cfg without dtype"]),
    # pytorch_model.bin
    "missing": (save_weights(**{NORM: None}), RuntimeError, [PICKLED, "missing backbone.norm_f.weight"]),
    "wrong shape": (save_weights(**{NORM: torch.ones(8)}), RuntimeError, [PICKLED, "size mismatch", "expected [16], got [8]"]),
    "unexpected": (save_weights(other=torch.ones(8)), RuntimeError, [PICKLED, "unexpected other"]),
    "integers": (save_weights(**{NORM: torch.ones(16).int()}), RuntimeError, [PICKLED, "floating-point", "torch.int32"]),
    "no tensor": (save_weights(epoch=3), ValueError, [PICKLED, "expected a state_dict", "'epoch' of type int"]),
    "sparse": (save_weights(**{NORM: torch.ones(16).to_sparse()}), ValueError, [PICKLED]),
    "stretched": (save_weights(**{NORM: torch.ones(1).expand(2**40)}), ValueError, [PICKLED, "to lie within"]),
    "many from one": (many_from_one, ValueError, [PICKLED, "to lie within"]),
    "layers from one": (layers_from_one, RuntimeError, [PICKLED, "bytes of parameters", "got"]),
    "claims more": (claims_more, ValueError, [PICKLED]),
    "compressed": (compressed, ValueError, [PICKLED, "uncompressed"]),
    "second pickle": (second_pickle, ValueError, [PICKLED, "expected one data.pkl"]),
    "two archives": (two_archives, ValueError, [PICKLED, "got other bytes around one"]),
    "second end": (second_end, ValueError, [PICKLED, "expected an archive of torch.save"]),
    "storage": (save_object({"a": Reduces(torch.UntypedStorage, (2**40,))}), ValueError, [PICKLED, "UntypedStorage"]),
    "no weights": (save_object({"a": Reduces(torch.Tensor, (2**20, 2**20))}), ValueError, [PICKLED, "torch.Tensor"]),
    "bytes object": (save_object({"a": bytearray(2**10)}), ValueError, [PICKLED, "bytearray"]),
    "tensor": (save_object(torch.ones(3)), ValueError, [PICKLED, "expected a state_dict", "got Tensor"]),
    "empty": (lambda folder: (folder / PICKLED).write_bytes(b""), ValueError, [PICKLED]),
    "bytes": (lambda folder: (folder / PICKLED).write_bytes(b"PK\3\4" + bytes(99)), ValueError, [PICKLED]),
    "truncated": (truncated(PICKLED, 0.5), ValueError, [PICKLED]),
    "pickle": (lambda folder: (folder / PICKLED).write_bytes(pickle.dumps({})), ValueError, [PICKLED, "another format"]),
    # model.safetensors
    "long header": (long_header, ValueError, [SAFE, "header", f"{2**60}"]),
    "cut header": (truncated(SAFE, 0.01), ValueError, [SAFE, "header"]),
    "cut data": (truncated(SAFE, 0.5), ValueError, [SAFE, "within"]),
    "larger shape": (safetensors(shape=[HUGE]), ValueError, [SAFE, "backbone.norm_f.weight", f"[{HUGE}]"]),
    "larger offsets": (safetensors(shape=[HUGE], data_offsets=[0, 4 * HUGE]), ValueError, [SAFE, "within"]),
    "negative": (safetensors(data_offsets=[-64, 0]), ValueError, [SAFE, "data_offsets"]),
    "real shape": (safetensors(shape=[16.0]), ValueError, [SAFE, "[16.0]"]),
    "unknown dtype": (safetensors(dtype="F3"), ValueError, [SAFE, "'F3'"]),
    # *.index.json
    "above": (index("../outside.bin"), ValueError, [INDEX, "../outside.bin"]),
    "absolute": (index("/etc/passwd"), ValueError, [INDEX, "/etc/passwd"]),
    "other suffix": (index("config.json"), ValueError, [INDEX, "config.json"]),
    "number as shard": (index({"a": 3}), ValueError, [INDEX, "got 3"]),
    "list as map": (index(["a"]), ValueError, [INDEX, "weight_map", "list"]),
    "link": (linked, ValueError, ["pytorch_model-link.bin", "outside.bin"]),
    "no shard": (index("none.bin"), FileNotFoundError, ["none.bin", INDEX]),
    "not in the shard": (index({"a": "pytorch_model-00001-of-00003.bin"}), ValueError, [INDEX, "expected a in"]),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_bad_folders(name, folder, little_memory):
    """Each error names the file; none comes from a failed allocation, and none advises to trust the file."""
    change, error, words = FOLDERS[name]
    change(folder)
    with pytest.raises(error, match=says("MambaLM.from_pretrained: ")) as raised:
        MambaLM.from_pretrained(folder)
    text = str(raised.value)
    assert str(folder) in text and [word for word in words if word not in text] == []
    assert not any(word in text for word in ("weights_only=False", "alloc", "memory", "Memory"))


@pytest.mark.parametrize("as_file", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "model.safetensors"])
def test_nothing_is_executed(as_file, folder):
    made, content = folder.parent / "made", io.BytesIO()
    torch.save(weights_of(folder) | {"a": Reduces(os.mkdir, (str(made),))}, content)
    (folder / PICKLED).unlink()
    (folder / as_file).write_bytes(content.getvalue())
    if "of" in as_file:
        write_index(folder, "bin", {"a": as_file})
    with pytest.raises(ValueError, match=as_file) as raised:
        MambaLM.from_pretrained(folder)
    assert not made.exists() and "weights_only" not in str(raised.value)
    if as_file != SAFE:
        assert "posix.mkdir" in str(raised.value)


def test_folders_that_are_none(tmp_path, monkeypatch):
    make_model("Mamba").save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("", " "):
        with pytest.raises(ValueError, match=says("MambaLM.from_pretrained: expected a folder or a name")):
            MambaLM.from_pretrained(name)
    with pytest.raises(TypeError, match=says("expected folder to be a path or a name, got int")):
        MambaLM.from_pretrained(3)
    with pytest.raises(TypeError, match=says("expected fields of MambaConfig", "got d_modle")):
        MambaLM.from_pretrained(tmp_path, d_modle=3)
    os.unlink(PICKLED)
    os.mkfifo(PICKLED)
    with pytest.raises(FileNotFoundError, match=r"no pytorch_model\.bin"):
        MambaLM.from_pretrained(".")
