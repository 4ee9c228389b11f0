"""A run on disk, written by a run and read by the demo and the tests; `recorded/` is one.

manifest.json                 the description: model, trainer, engine, attempts, checkpoints with their digests
metrics.jsonl                 a step a line: the trainer's scalars
rollouts/step_0001.parquet    every rollout of the step, in Foreshock's rollout table
checkpoints/step_0001/        float32 master weights that sampled and scored that step (Hugging Face format)
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foreshock.digests import weights_digest
from foreshock.json_values import finite_or_none
from foreshock.rollouts import DecodeLimits, RolloutBatch, decode_rollouts, encode_rollouts

RECORDED = Path(__file__).parent / "recorded"
RECORDED_OF_SGLANG = Path(__file__).parent / "recorded_sglang"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights that sampled and scored the rollouts of `step`."""

    step: int
    path: str
    """Relative to the record's folder."""
    digest: str
    format: str = "hf_safetensors"


@dataclass(frozen=True, slots=True)
class RunDescription:
    """The name and settings of a run, as the service receives them."""

    key: str
    name: str
    model: str
    trainer: str
    engine: str
    hardware: str
    initial_learning_rate: float
    length_cap: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start or resume of the run."""

    key: str
    resume_step: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a run: settings, attempts, checkpoints and their digests."""

    run: RunDescription
    parameters: int
    task: str
    training: dict[str, Any]
    """Options of the training command."""
    scorer_options: dict[str, dict[str, Any]]
    """Options that a scorer needs to replay this run: scorer -> options."""
    engine_fingerprint: dict[str, Any]
    attempts: list[Attempt]
    steps: int
    checkpoints: list[Checkpoint]
    trainer_fingerprint: dict[str, Any] = field(default_factory=dict)

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Return the fingerprints of the logged scores, as an attempt's fingerprint."""
        known = {"rollout": self.engine_fingerprint, "trainer": self.trainer_fingerprint}
        return {name: fingerprint for name, fingerprint in known.items() if fingerprint}


class RunRecord:
    """A record in a folder with the layout above."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, folder: Path) -> RunRecord:
        """Create an empty record. Raises FileExistsError if the folder already holds one."""
        if (folder / "metrics.jsonl").exists():
            raise FileExistsError(f"{folder} already holds a run: choose another folder, or remove it")
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def write_step(self, step: int, batch: RolloutBatch, scalars: Mapping[str, float]) -> None:
        self.rollouts_file(step).write_bytes(encode_rollouts(batch))
        with (self.folder / "metrics.jsonl").open("a") as file:
            # JSON has no NaN.
            values = {name: finite_or_none(value) for name, value in scalars.items()}
            file.write(json.dumps({"step": step, **values}) + "\n")

    def write_checkpoint(self, step: int, weights: Path) -> Path:
        target = self.folder / "checkpoints" / f"step_{step:04d}"
        shutil.copytree(weights, target, dirs_exist_ok=True)
        return target

    def write_manifest(self, manifest: Manifest) -> None:
        (self.folder / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n")

    def manifest(self) -> Manifest:
        values = json.loads((self.folder / "manifest.json").read_text())
        values["run"] = RunDescription(**values["run"])
        values["attempts"] = [Attempt(**attempt) for attempt in values["attempts"]]
        values["checkpoints"] = [Checkpoint(**checkpoint) for checkpoint in values["checkpoints"]]
        return Manifest(**values)

    def steps(self) -> list[int]:
        """Return the recorded steps, ascending."""
        return sorted(
            int(path.stem.removeprefix("step_")) for path in (self.folder / "rollouts").glob("step_*.parquet")
        )

    def rollouts(self, step: int) -> RolloutBatch:
        return decode_rollouts(self.rollouts_file(step).read_bytes(), DecodeLimits())

    def rollouts_file(self, step: int) -> Path:
        return self.folder / "rollouts" / f"step_{step:04d}.parquet"

    def scalars(self) -> dict[int, dict[str, float]]:
        """Return the trainer's scalars by step; NaN for a missing value."""
        found = {}
        for line in (self.folder / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            step = values.pop("step")
            found[step] = {name: math.nan if value is None else value for name, value in values.items()}
        return found

    def checkpoints_found(self) -> list[Checkpoint]:
        """Return the checkpoints in the folder; their digests are computed now."""
        return [
            Checkpoint(int(path.name.removeprefix("step_")), str(path.relative_to(self.folder)), weights_digest(path))
            for path in sorted((self.folder / "checkpoints").glob("step_*"))
        ]
