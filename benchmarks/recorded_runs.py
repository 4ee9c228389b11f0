"""Recorded runs with checkpoints for replays: the one that ships with the repository, and those found beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foreshock.environment import InstructionSet, MklKernels
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock.rollouts.rollout_files import read_rollout_file
from foreshock_probes.engines.environment import EngineEnvironment

REPOSITORY = Path(__file__).resolve().parents[1]
SHIPPED = REPOSITORY / "examples" / "tiny_rl" / "recorded"
SHARED = REPOSITORY.parent / "shared" / "data" / "tiny_rl"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Rollouts and checkpoints in `folder`, recorded in `environment`; in another one, kernels round differently."""

    name: str
    folder: Path
    environment: EngineEnvironment
    read: Callable[[Path, int], RolloutBatch]

    def steps(self) -> list[int]:
        """The steps whose weights were kept, ascending."""
        return sorted(int(path.name.removeprefix("step_")) for path in (self.folder / "checkpoints").glob("step_*"))

    def checkpoint(self, step: int) -> Path:
        """The folder of the weights that sampled and scored `step`."""
        return self.folder / "checkpoints" / f"step_{step:04d}"

    def rollouts(self, step: int) -> RolloutBatch:
        """The rollouts of `step` with logged log μ and log π."""
        return self.read(self.folder, step)


def shipped_run() -> RecordedRun:
    """Return the run that ships with the repository. Its data name the environment."""
    manifest = json.loads((SHIPPED / "manifest.json").read_text())
    environment = EngineEnvironment.of_fingerprint(Fingerprint.from_dict(manifest["engine_fingerprint"]))
    return RecordedRun("recorded", SHIPPED, environment, _read_parquet)


def recorded_runs() -> list[RecordedRun]:
    """Return the available recorded runs."""
    found = [shipped_run()] if (SHIPPED / "manifest.json").exists() else []
    # Their notes do not name the CPU. Only AMX on an Intel CPU reproduces their logged values, all of them bit for bit:
    # log μ with vLLM and log π with torch, at each of the six steps with checkpoints.
    with_amx = EngineEnvironment(InstructionSet.AMX, MklKernels.INTEL)
    beside = [RecordedRun(name, SHARED / name, with_amx, _read_jsonl) for name in ("healthy", "collapsed")]
    return found + [run for run in beside if (run.folder / "checkpoints").is_dir()]


def _read_parquet(folder: Path, step: int) -> RolloutBatch:
    return decode_rollouts((folder / "rollouts" / f"step_{step:04d}.parquet").read_bytes())


def _read_jsonl(folder: Path, step: int) -> RolloutBatch:
    return read_rollout_file(folder / "rollouts" / f"step_{step:04d}.jsonl.gz")
