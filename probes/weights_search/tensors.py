"""The tensors of a safetensors checkpoint, read by their headers: names, shapes, parts of the model, bytes.

Tensors are copied as bytes and never decoded, so that any dtype is kept and a worker needs no torch for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from foreshock.errors import WeightsError

__all__ = ["Tensor", "digest_of_tensors", "part_of", "read_tensors", "write_tensors"]

_LONGEST_HEADER = 100_000_000  # the limit of the safetensors library
_CHUNK_BYTES = 4 << 20
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)\.")
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.")
# The layers and embeddings of an image or audio tower are no layers of the language model.
_TOWER = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|image\w*)\.")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file: `dtype` and `shape` as its header has them, its bytes at `start` … `end` of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.end - self.start

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes. Raises WeightsError if the file is shorter than its header says."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left:
                piece = file.read(min(left, _CHUNK_BYTES))
                if not piece:
                    raise WeightsError(f"{self.file.name!r} is shorter than its header says")
                left -= len(piece)
                yield piece


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all `*.safetensors` in `folder` by name. Raises WeightsError if a header is invalid."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                header, begin = _header(file)
            size = path.stat().st_size - begin
            for name, entry in header.items():
                if name != "__metadata__":
                    found[name] = _tensor(path, begin, size, entry)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise WeightsError(f"the header of {path.name!r} is not one of safetensors: {error}") from error
    return found


def part_of(name: str) -> str:
    """Return the part of the model that a tensor belongs to: lm_head, embeddings, layers.<number>, other."""
    if _TOWER.search(name):
        return "other"
    layer = _LAYER.search(name)
    if layer:
        return f"layers.{int(layer.group(1))}"
    if _HEAD.search(name):
        return "lm_head"
    return "embeddings" if _EMBEDDINGS.search(name) else "other"


def digest_of_tensors(tensors: Mapping[str, Tensor], names: Iterable[str]) -> str:
    """Return a digest of the names and bytes of some tensors: equal for equal values of one dtype."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tensor.size}\0".encode())
        for piece in tensor.pieces():
            digest.update(piece)
    return digest.hexdigest()


def write_tensors(tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write the tensors, which may come from several files, as one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with target.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for tensor in tensors.values():
            for piece in tensor.pieces():
                file.write(piece)


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LONGEST_HEADER:
        raise ValueError(f"it claims {length} bytes")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("it is not a JSON object")
    return header, 8 + length


def _tensor(path: Path, begin: int, size: int, entry: Mapping[str, Any]) -> Tensor:
    start, end = (int(value) for value in entry["data_offsets"])
    if not 0 <= start <= end <= size:
        raise ValueError("an offset is outside of the file")
    tensor = Tensor(path, str(entry["dtype"]), tuple(int(value) for value in entry["shape"]), start, end)
    return replace(tensor, start=begin + start, end=begin + end)
