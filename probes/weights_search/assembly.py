"""Checkpoints assembled from two announced ones: the base, with some parts taken from another step's weights.

Tied embeddings are written twice, as embeddings and as a head, with `tie_word_embeddings` false: the engine computes
the same (bit for bit with vLLM on a CPU), its weights can be exchanged in place, which on a CPU leaves a tied head
stale, and a head that kept an old copy of its own can be assembled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshock.errors import WeightsError
from foreshock_probes.weights_search.tensors import Tensor, digest_of_tensors, part_of, read_tensors, write_tensors

__all__ = ["Ingredients", "NotComparableError", "assemble", "read_ingredients", "why_not_comparable"]

_HEAD = "lm_head.weight"
_EMBEDDINGS = "model.embed_tokens.weight"


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
    if _EMBEDDINGS not in tensors:
        raise WeightsError(
            f"the embeddings of {folder.name!r} are tied and not named {_EMBEDDINGS!r}: a search of such a model is "
            "not supported"
        )
    for part in (configuration, configuration.get("text_config")):
        if part is not None:
            part["tie_word_embeddings"] = False
    return Ingredients(tensors | {_HEAD: tensors[_EMBEDDINGS]}, configuration, True, None)


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
