"""The tensors of a checkpoint's safetensors files, read one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open


class CheckpointTensors:
    """The tensors in the safetensors files of `folder`, each in its own dtype."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    @property
    def names(self) -> set[str]:
        """The names of the tensors."""
        return set(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        with safe_open(self._files[name], framework="pt") as file:
            found: torch.Tensor = file.get_tensor(name)
            return found

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the rows from `start` to `stop` of a tensor's first dimension; others are not read."""
        with safe_open(self._files[name], framework="pt") as file:
            found: torch.Tensor = file.get_slice(name)[start:stop]
            return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())
