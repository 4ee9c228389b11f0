"""Checkpoints assembled from two announced ones: the base, with some parts taken from another step's weights.

Tied embeddings are written twice, as embeddings and as a head, with `tie_word_embeddings` false: the engine computes
the same (bit for bit with vLLM on a CPU), its weights can be exchanged in place, which on a CPU leaves a tied head
stale, and a head that kept an old copy of its own can be assembled.

Tensors are copied as bytes and never decoded, so that any dtype is kept and a worker needs no torch for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from foreshock.errors import WeightsError

_HEAD_TENSOR = "lm_head.weight"
_TIED = "model.embed_tokens.weight"


class NotComparableError(WeightsError):
    """A mixture of two checkpoints cannot be replayed: there is no room for it, or the engine cannot load it."""


@dataclass(frozen=True, slots=True)
class Ingredients:
    """The tensors of a checkpoint by name, untied if its embeddings were `tied`, and its configuration to go with them.

    `folder` is what an engine loads as it is; None: it must be assembled, because the embeddings were untied.
    """

    tensors: dict[str, Tensor]
    configuration: dict[str, Any]
    tied: bool
    folder: Path | None

    @property
    def parts(self) -> list[str]:
        """The single parts: lm_head, embeddings, layers.0 …, other, as far as the model has them."""
        found = {part_of(name) for name in self.tensors}
        layers = sorted((part for part in found if part.startswith("layers.")), key=lambda part: int(part[7:]))
        return [part for part in ("lm_head", "embeddings") if part in found] + layers + sorted(found & {"other"})

    def names_of(self, parts: Collection[str]) -> list[str]:
        """Return the names of the tensors of single parts."""
        return [name for name in self.tensors if part_of(name) in parts]

    def digest_of(self, parts: Collection[str]) -> str:
        """Return a digest of the values of single parts."""
        return digest_of_tensors(self.tensors, self.names_of(parts))


def read_ingredients(folder: Path) -> Ingredients:
    """Read the headers of a checkpoint. Raises WeightsError if they are invalid, or if a tied head cannot be untied."""
    try:
        configuration = json.loads((folder / "config.json").read_text("utf-8"))
        text = configuration.get("text_config") or configuration
        tied = bool(text.get("tie_word_embeddings", configuration.get("tie_word_embeddings", False)))
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError(f"the config.json of {folder.name!r} cannot be read: {error}") from error
    tensors = read_tensors(folder)
    if not tied:
        return Ingredients(tensors, configuration, False, folder)
    if _TIED not in tensors:
        raise WeightsError(
            f"the embeddings of {folder.name!r} are tied and not named {_TIED!r}: a search of such a model is "
            "not supported"
        )
    for part in (configuration, configuration.get("text_config")):
        if part is not None:
            part["tie_word_embeddings"] = False
    return Ingredients(tensors | {_HEAD_TENSOR: tensors[_TIED]}, configuration, True, None)


def why_not_comparable(base: Ingredients, other: Ingredients) -> str | None:
    """Return why the two cannot be mixed: the first tensor that differs in name or shape; None if they can be."""
    for name in sorted(base.tensors.keys() | other.tensors.keys()):
        mine, theirs = base.tensors.get(name), other.tensors.get(name)
        if mine is None or theirs is None:
            return f"another architecture: only one of the two checkpoints has the tensor {name!r}"
        if mine.shape != theirs.shape:
            return f"another architecture: {name!r} has the shape {list(theirs.shape)}, expected {list(mine.shape)}"
    return None


def assemble(base: Ingredients, other: Ingredients, parts: Collection[str], folder: Path) -> None:
    """Write a checkpoint to the new `folder`: `base` with the tensors of the single `parts` taken from `other`.

    Raises NotComparableError if there is no room for it.
    """
    tensors = base.tensors | {name: other.tensors[name] for name in base.names_of(parts)}
    needed = sum(tensor.size for tensor in tensors.values())
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise NotComparableError(f"no room to assemble weights: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(base.configuration), "utf-8")
    write_tensors(tensors, folder / "model.safetensors")


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
