"""Weights of checkpoint files, mapped into memory: of ``torch.save``, in safetensors' format, or in shards with an index.

The files are not trusted. Nothing in them is executed, headers and indexes have bounded sizes, and every tensor lies within its
file: a file cannot make its reader allocate more than it holds.
"""

from __future__ import annotations

import json
import math
import os
import pickletools
import stat
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["INDEXES", "PICKLED", "SAFE", "find_weights", "open_weights", "read_json"]

PICKLED, SAFE = "pytorch_model.bin", "model.safetensors"
# Files with all weights, and indexes of shards, in the order in which they are preferred.
INDEXES = {f"{SAFE}.index.json": ".safetensors", f"{PICKLED}.index.json": ".bin"}
_PREFERRED = (SAFE, f"{SAFE}.index.json", PICKLED, f"{PICKLED}.index.json")

_NAME = "MambaLM.from_pretrained"
# The largest JSON file, and the largest header of a file with weights: ten times those of published models.
_MAX_JSON_BYTES, _MAX_HEADER_BYTES = 16 * 2**20, 64 * 2**20

_SAFE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# Globals that torch.save writes for a dict of tensors and parameters, besides the types of storages. PyTorch's own list also
# has functions and classes that allocate.
_PICKLED_GLOBALS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file is larger than 16 MiB, does not hold JSON, nests too deeply, or holds no object.
    """
    _check_regular(path)
    with path.open("rb") as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(f"{_NAME}: expected at most {_MAX_JSON_BYTES} bytes in {path}, got more")
    return _parse_json(text, path)


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"{_NAME}: expected JSON in {path}, got objects nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{_NAME}: expected JSON in {path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{_NAME}: expected an object in {path}, got {type(found).__name__}")
    return found


def find_weights(folder: Path) -> Path:
    """The file with the weights in a folder, or the index of its shards; safetensors before pickled files.

    Raises:
        FileNotFoundError: the folder has none.
    """
    for name in _PREFERRED:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{_NAME}: no {PICKLED}, {SAFE} or index of shards in {folder}")


def open_weights(path: Path) -> tuple[dict[str, Tensor], int]:
    """Maps a file of :func:`find_weights` into memory.

    Returns:
        The tensors on the CPU, which are read when they are used and must not outlive a change of the file, and the bytes of
        the files.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: a file is damaged, refers to places outside of its folder, or holds other things than tensors.
    """
    if path.name in INDEXES:
        return _open_shards(path)
    _check_regular(path)
    weights = _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickled(path)
    for name, weight in weights.items():
        if not isinstance(name, str) or not isinstance(weight, Tensor):
            kind = type(weight).__name__
            raise ValueError(f"{_NAME}: expected a state_dict, names and tensors, in {path}, got {name!r} of type {kind}")
        if weight.layout != torch.strided or weight.device.type != "cpu" or weight.is_quantized:
            raise ValueError(f"{_NAME}: expected dense tensors in {path}, got {name} of layout {weight.layout}")
        stored = weight.untyped_storage().nbytes() - weight.storage_offset() * weight.element_size()
        if weight.numel() * weight.element_size() > stored:
            raise ValueError(
                f"{_NAME}: expected {name} of shape {[*weight.shape]} to lie within {path}, which holds {stored} bytes of it"
            )
    return weights, path.stat().st_size


def _check_regular(path: Path) -> None:
    """Raises for pipes and devices, which have no size and may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{_NAME}: expected a regular file, got {path}")


# ----- shards


def _open_shards(index: Path) -> tuple[dict[str, Tensor], int]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, Mapping):
        raise ValueError(f"{_NAME}: expected weight_map, an object, in {index}, got {type(names).__name__}")
    by_shard: dict[str, list[str]] = {}
    for name, shard in names.items():
        _check_shard(index, shard)
        by_shard.setdefault(shard, []).append(name)
    weights: dict[str, Tensor] = {}
    total = 0
    for shard, wanted in by_shard.items():
        found, size = open_weights(index.parent / shard)
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ValueError(f"{_NAME}: expected {missing[0]} in {index.parent / shard}, as {index} says")
        weights |= {name: found[name] for name in wanted}
        total += size
    return weights, total


def _check_shard(index: Path, shard: Any) -> None:
    suffix = INDEXES[index.name]
    is_plain = isinstance(shard, str) and shard == os.path.basename(shard) and not set(shard) & set("\\:\0")
    if not is_plain or not shard.endswith(suffix) or shard == suffix:
        raise ValueError(f"{_NAME}: expected names of {suffix} files beside {index}, got {shard!r}")
    path, folder = index.parent / shard, index.parent.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{_NAME}: no {shard} in {index.parent}, to which {index.name} refers")
    # A snapshot in the cache of huggingface_hub links to the blobs of its repository.
    homes = [folder] + ([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])
    if path.resolve().parent not in homes:
        raise ValueError(f"{_NAME}: expected {shard} in {index.parent}, got a link to {path.resolve()}: copy the file instead")


# ----- files of torch.save


def _open_pickled(path: Path) -> dict[str, Tensor]:
    _check_archive(path)
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged archive raises whatever its reader stumbles over
        kind = type(error).__name__
        raise ValueError(f"{_NAME}: expected weights saved by torch.save in {path}, got a damaged file ({kind})") from None
    if not isinstance(weights, dict):
        raise ValueError(f"{_NAME}: expected a state_dict in {path}, got {type(weights).__name__}")
    return weights


def _check_archive(path: Path) -> None:
    """Reads the list of an archive's members, and the names that its pickle imports, and executes nothing."""
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{_NAME}: expected an archive of torch.save in {path}, got another format. Save weights of PyTorch before 1.6 "
            "again: torch.save(torch.load(path, weights_only=True), path)"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if not _is_one_archive(path):
                raise ValueError(f"{_NAME}: expected an archive of torch.save in {path}, got other bytes around one")
            # mmap reads members as they are, and a compressed member could be of any size.
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError(f"{_NAME}: expected uncompressed members in {path}")
            # PyTorch's reader does not distinguish upper and lower case.
            pickles = [member for member in members if member.filename.lower().endswith("data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > min(_MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError(f"{_NAME}: expected one data.pkl of at most {_MAX_HEADER_BYTES} bytes in {path}")
            pickled = archive.read(pickles[0])
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{_NAME}: expected an archive of torch.save in {path}, got a damaged one: {error}") from None
    try:
        imported = {str(arg) for op, arg, _ in pickletools.genops(pickled) if op.name in ("GLOBAL", "INST", "STACK_GLOBAL")}
    except Exception as error:  # as for torch.load
        raise ValueError(f"{_NAME}: expected a pickle in {path}, got a damaged one ({type(error).__name__})") from None
    others = sorted(name.replace(" ", ".") for name in imported if not _is_tensor_part(name))
    if others:
        raise ValueError(
            f"{_NAME}: expected a state_dict in {path}, got a pickle that asks for {', '.join(others)}. Nothing was executed: "
            "do not load this file unless you trust its source. Save model.state_dict() to get one that loads"
        )


def _is_one_archive(path: Path) -> bool:
    """Whether a zip file has its directory, and the record that says where this is, at the end, so that all readers find one.

    Python's reader skips bytes before an archive, PyTorch's does not. Only PyTorch's follows the locator of 64-bit archives.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - 98))
        tail = file.read()
    if tail[-22:-18] != b"PK\5\6":
        return False
    length, begin, end = *struct.unpack("<II", tail[-10:-2]), size - 22
    if tail[-42:-38] == b"PK\6\7":
        end = size - 98
        if struct.unpack("<Q", tail[-34:-26])[0] != end or tail[:4] != b"PK\6\6":
            return False
        length, begin = struct.unpack("<QQ", tail[40:56])
    return bool(begin + length == end)


def _is_tensor_part(name: str) -> bool:
    if name in _PICKLED_GLOBALS:
        return True
    module, _, attribute = name.partition(" ")
    return module == "torch" and attribute.endswith("Storage") and attribute.isalnum() and attribute != "UntypedStorage"


# ----- safetensors


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    """Reads the format by its description: eight bytes with the header's length, the header in JSON, the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{_NAME}: expected a safetensors header within {path} of {size} bytes, got one of {length} bytes")
        header = _parse_json(file.read(length), path)
    header.pop("__metadata__", None)
    data = torch.UntypedStorage.from_file(str(path), False, size) if size > 8 + length else torch.UntypedStorage(0)
    # A mapped tensor of bytes; a view of it shares the mapping.
    everything = torch.empty(0, dtype=torch.uint8, device="cpu").set_(data)  # type: ignore[arg-type]
    return {name: _view_safetensor(everything, 8 + length, name, entry, path) for name, entry in header.items()}


def _view_safetensor(everything: Tensor, first: int, name: str, entry: Any, path: Path) -> Tensor:
    if not isinstance(entry, dict):
        raise ValueError(f"{_NAME}: expected an object for {name} in the header of {path}, got {type(entry).__name__}")
    dtype = _SAFE_DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise ValueError(f"{_NAME}: expected a dtype of {[*_SAFE_DTYPES]} for {name} in {path}, got {entry.get('dtype')!r}")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    sizes = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    are_sizes = all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63 for number in sizes)
    if not are_sizes or not isinstance(offsets, list) or not isinstance(shape, list) or len(offsets) != 2 or len(shape) > 64:
        raise ValueError(f"{_NAME}: expected shape and data_offsets of sizes for {name} in {path}, got {shape} and {offsets}")
    begin, end = offsets
    held = max(0, everything.numel() - first)
    if not begin <= end <= held or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(
            f"{_NAME}: expected {name}, {dtype} of shape {shape}, within the {held} bytes of data in {path}, got data_offsets "
            f"{offsets}"
        )
    part = everything[first + begin : first + end]
    # A copy where bytes do not begin at a multiple of the dtype's size.
    if (first + begin) % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(shape)
