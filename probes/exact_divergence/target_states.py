"""A file of the states and the head of an exact pair's target, by which another process computes its distributions.

The states are read a rollout at a time, so that the memory of the reader does not depend on their number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint
from foreshock_probes.exact_divergence.logit_sources import LogitSource

__all__ = ["TargetStates", "open_states", "write_states"]

_FINGERPRINT, _SOFTCAP = "fingerprint", "softcap"


def write_states(
    path: Path, source: LogitSource, known: NDArray[np.bool_], divisor: NDArray[np.float64], fingerprint: Fingerprint
) -> None:
    """Write the states [T, H] and the head of `source` to `path`.

    `known` [T] is False where a response token has no state before it. `divisor` [N] divides the logits of each
    rollout; the source's own temperature must be 1.
    """
    from safetensors.torch import save_file

    if source.temperature != 1.0 or source.logits_dtype is not None:
        raise ValueError("the states of a source with a temperature or a logits_dtype of its own cannot be written")
    tensors = {"hidden": source.hidden, "weight": source.weight}
    if source.bias is not None:
        tensors["bias"] = source.bias
    tensors |= {"known": torch.from_numpy(known), "divisor": torch.from_numpy(divisor)}
    # safetensors cannot store tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    metadata = {_FINGERPRINT: fingerprint.to_json(), _SOFTCAP: json.dumps(source.softcap)}
    save_file(copies, path, metadata=metadata)


class TargetStates:
    """The target's distributions in an open file, on `device`."""

    def __init__(self, file: Any, device: torch.device) -> None:
        metadata = file.metadata()
        self.fingerprint = Fingerprint.from_json(metadata[_FINGERPRINT])
        self.known: NDArray[np.bool_] = file.get_tensor("known").numpy()
        self._softcap: float | None = json.loads(metadata[_SOFTCAP])
        self._divisor: NDArray[np.float64] = file.get_tensor("divisor").numpy()
        self._hidden = file.get_slice("hidden")
        self._weight = file.get_tensor("weight").to(device)
        self._bias = file.get_tensor("bias").to(device) if "bias" in file.keys() else None  # noqa: SIM118 (not a dict)
        self._device = device

    @property
    def vocabulary(self) -> int:
        """The size of the target's vocabulary."""
        return int(self._weight.shape[0])

    def source(self, row: int, start: int, stop: int) -> LogitSource:
        """Return the logits of the states `start` … `stop`, which belong to the rollout `row`."""
        hidden = self._hidden[start:stop].to(self._device)
        return LogitSource(hidden, self._weight, self._bias, float(self._divisor[row]), self._softcap)


@contextmanager
def open_states(path: Path, device: torch.device) -> Iterator[TargetStates]:
    """Open the file that `write_states` wrote."""
    from safetensors import safe_open

    with safe_open(path, "pt", device="cpu") as file:
        yield TargetStates(file, device)
