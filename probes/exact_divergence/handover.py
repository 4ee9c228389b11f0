"""What the engine's process is given and gives back: files of one folder, read by nobody else."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from probes.exact_divergence.result import ExactDivergences
from probes.exact_divergence.sources import LogitSource
from probes.scorers.vllm_prefill import PrefillOptions

__all__ = ["Handover", "Job", "Refusal"]

_ADJUSTMENTS = ("temperature", "softcap")


class Job(BaseModel):
    """What to compare the target with: the engine of these weights and options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights_folder: Path
    options: PrefillOptions
    top_ks: tuple[int, ...]


class Refusal(BaseModel):
    """Why there are no divergences."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["unsupported", "not_reproduced"]
    reason: str


class Handover:
    """The files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.job = folder / "job.json"
        self.rollouts = folder / "rollouts.parquet"
        self.refusal = folder / "refusal.json"
        self.log = folder / "engine.log"
        self._target = folder / "target.safetensors"
        self._found = folder / "found.npz"

    def write_target(self, source: LogitSource) -> None:
        """The states and the head of the distribution that the engine's is compared with."""
        from safetensors.torch import save_file

        tensors = {"hidden": source.hidden, "weight": source.weight}
        if source.bias is not None:
            tensors["bias"] = source.bias
        known = {name: getattr(source, name) for name in _ADJUSTMENTS}
        known["logits_dtype"] = None if source.logits_dtype is None else str(source.logits_dtype).removeprefix("torch.")
        # Cloned, because the file's format knows no tensors that share memory.
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(copies, self._target, metadata={"adjustments": json.dumps(known)})

    def read_target(self, device: torch.device) -> LogitSource:
        """What `write_target` wrote, on `device`."""
        from safetensors import safe_open

        with safe_open(self._target, "pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            known = json.loads(file.metadata()["adjustments"])
        dtype = known.pop("logits_dtype")
        return LogitSource(**tensors, **known, logits_dtype=None if dtype is None else getattr(torch, dtype))

    def write_found(self, found: ExactDivergences) -> None:
        """What the engine's side found."""
        values: dict[str, Any] = {field.name: getattr(found, field.name) for field in fields(found)}
        with self._found.open("wb") as file:
            np.savez(file, **{name: value for name, value in values.items() if value is not None})

    def read_found(self) -> ExactDivergences:
        """What `write_found` wrote."""
        with np.load(self._found, allow_pickle=False) as arrays:
            values = dict(arrays)
        top_ks = tuple(int(k) for k in values.pop("top_ks"))
        return ExactDivergences(**values, top_ks=top_ks)
