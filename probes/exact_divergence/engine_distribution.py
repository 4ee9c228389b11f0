"""The distribution of vLLM itself, taken from the logits from which it computes prompt log-probs.

The logits are reduced inside the engine's process against the target's hidden states and head. They are not recomputed
from a copy of the weights, because the engine's kernels, dtypes and rounding are what is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.engines.process import EngineError, process_variables
from foreshock_probes.exact_divergence.divergences import ExactDivergences, exact_divergences
from foreshock_probes.exact_divergence.logit_sources import LogitSource, SourceError
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.tokens import vocabulary_size
from foreshock_probes.scorers.vllm_engine import VllmOptions
from foreshock_probes.work_folder import ENGINE_DISTRIBUTION, work_folder

__all__ = ["EngineDistribution", "JobFolder"]

_ADJUSTMENTS = ("temperature", "softcap")
_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class EngineDistribution:
    """The distribution of vLLM's prefill with the weights in the folder `weights`.

    `options` are those of the scorer `vllm.prefill`, such as dtype, head_dtype and temperature (None: 1). The engine
    gets one rollout at a time, prompt and response as one prompt: `batch_size` must not be set, and
    tensor_parallel_size must be 1. If another model shares the GPU, choose gpu_memory_utilization so that both fit,
    with room for the target's head and two tiles of logits. `environment` applies to the engine's process only, not to
    the process that computes the target's states.
    """

    weights: Path
    options: VllmOptions = field(default_factory=VllmOptions)
    environment: EngineEnvironment = AS_IT_IS

    def __post_init__(self) -> None:
        if self.options.tensor_parallel_size != 1:
            raise UnsupportedScoreError(
                f"exact divergences need tensor_parallel_size=1, got {self.options.tensor_parallel_size}"
            )
        if "batch_size" in self.options.model_fields_set:
            raise UnsupportedScoreError("the engine gets one rollout at a time; remove the option batch_size")

    def divergences(self, target: LogitSource, rollouts: RolloutBatch, top_ks: Sequence[int]) -> ExactDivergences:
        """Return the divergences [T] of `target` (π) and the engine (μ) at the state before each response token.

        Starts an engine and stops it. Compares the log-probs that vLLM returns with those of the observed logits.
        Raises EngineError if one of them differs, a state was not observed or the engine crashed;
        UnsupportedScoreError if the engine cannot score these rollouts; SourceError if the numbers of states or the
        vocabularies differ.
        """
        vocabulary = vocabulary_size(self.weights)
        if target.tokens != rollouts.num_tokens or vocabulary not in (None, target.vocabulary):
            raise SourceError(
                f"the target's logits have the shape [{target.tokens}, {target.vocabulary}], the engine's "
                f"[{rollouts.num_tokens}, {vocabulary}]; they must be equal"
            )
        if not target.tokens:
            return exact_divergences(target, target, token_ids=[], top_ks=top_ks)
        with work_folder(ENGINE_DISTRIBUTION) as folder:
            files = JobFolder(folder)
            job = Job(weights_folder=self.weights.resolve(), options=self.options, top_ks=tuple(top_ks))
            files.job.write_text(job.model_dump_json(), "utf-8")
            files.rollouts.write_bytes(encode_rollouts(rollouts))
            files.write_target(target)
            status = _run(files, folder, self.environment)
            if files.refusal.exists():
                refusal = Refusal.model_validate_json(files.refusal.read_bytes())
                if refusal.kind == "unsupported":
                    raise UnsupportedScoreError(refusal.reason)
                raise EngineError(refusal.reason, "final")
            if status:
                lines = files.log.read_text("utf-8", errors="replace").splitlines()[-_LAST_LINES:]
                raise EngineError(f"the engine exited with status {status}:\n" + "\n".join(lines), "retry", gone=True)
            return files.read_divergences()


class Job(BaseModel):
    """The weights and options of the engine that the target is compared with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights_folder: Path
    options: VllmOptions
    top_ks: tuple[int, ...]


class Refusal(BaseModel):
    """The reason why there are no divergences."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["unsupported", "not_reproduced"]
    reason: str


class JobFolder:
    """The files by which this process and the engine's exchange a job and its result, all in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.job = folder / "job.json"
        self.rollouts = folder / "rollouts.parquet"
        self.refusal = folder / "refusal.json"
        self.log = folder / "engine.log"
        self._target = folder / "target.safetensors"
        self._divergences = folder / "divergences.npz"

    def write_target(self, source: LogitSource) -> None:
        """Write the hidden states and the head of the target."""
        from safetensors.torch import save_file

        tensors = {"hidden": source.hidden, "weight": source.weight}
        if source.bias is not None:
            tensors["bias"] = source.bias
        known = {name: getattr(source, name) for name in _ADJUSTMENTS}
        known["logits_dtype"] = None if source.logits_dtype is None else str(source.logits_dtype).removeprefix("torch.")
        # safetensors cannot store tensors that share memory.
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(copies, self._target, metadata={"adjustments": json.dumps(known)})

    def read_target(self, device: torch.device) -> LogitSource:
        """Read what `write_target` wrote, to `device`."""
        from safetensors import safe_open

        with safe_open(self._target, "pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            known = json.loads(file.metadata()["adjustments"])
        dtype = known.pop("logits_dtype")
        return LogitSource(**tensors, **known, logits_dtype=None if dtype is None else getattr(torch, dtype))

    def write_divergences(self, divergences: ExactDivergences) -> None:
        """Write the result."""
        values: dict[str, Any] = {field.name: getattr(divergences, field.name) for field in fields(divergences)}
        with self._divergences.open("wb") as file:
            np.savez(file, **{name: value for name, value in values.items() if value is not None})

    def read_divergences(self) -> ExactDivergences:
        """Read what `write_divergences` wrote."""
        with np.load(self._divergences, allow_pickle=False) as arrays:
            values = dict(arrays)
        top_ks = tuple(int(k) for k in values.pop("top_ks"))
        return ExactDivergences(**values, top_ks=top_ks)


def _run(files: JobFolder, folder: Path, environment: EngineEnvironment) -> int:
    """Run the engine's process and return its exit status."""
    command = [sys.executable, "-m", "foreshock_probes.exact_divergence.engine_process", str(folder)]
    with files.log.open("wb") as log:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=process_variables(environment),
            start_new_session=True,  # Ctrl-C goes to the caller only
            check=False,
        )
    return done.returncode
