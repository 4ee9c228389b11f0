"""Recorded runs with checkpoints, to be replayed: the one that ships with the repository, and those found beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock.rollouts.jsonl import read_jsonl

REPOSITORY = Path(__file__).resolve().parents[1]
SHIPPED = REPOSITORY / "examples" / "tiny_rl" / "recorded"
SHARED = REPOSITORY.parent / "shared" / "data" / "tiny_rl"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Rollouts and checkpoints in `folder`. `cpu_isa` is the instruction set of the CPU that recorded them: torch's and
    vLLM's CPU kernels round differently under another one."""

    name: str
    folder: Path
    cpu_isa: str
    read: Callable[[Path, int], RolloutBatch]

    def steps(self) -> list[int]:
        """The steps whose weights were kept, ascending."""
        return sorted(int(path.name.removeprefix("step_")) for path in (self.folder / "checkpoints").glob("step_*"))

    def checkpoint(self, step: int) -> Path:
        """The folder of the weights that sampled and scored `step`."""
        return self.folder / "checkpoints" / f"step_{step:04d}"

    def rollouts(self, step: int) -> RolloutBatch:
        """The rollouts of `step` with log μ and log π as they were logged."""
        return self.read(self.folder, step)


def recorded_runs() -> list[RecordedRun]:
    """The recorded runs that are there."""
    found = []
    manifest = SHIPPED / "manifest.json"
    if manifest.exists():
        isa = json.loads(manifest.read_text()).get("engine_fingerprint", {}).get("cpu_isa", "unknown")
        found.append(RecordedRun("recorded", SHIPPED, isa, _read_parquet))
    # Their notes do not name the processor. Under AVX2 torch gives four of five of their log π bit for bit and the rest
    # within a rounding, so it was the other instruction set that torch knows of.
    beside = [RecordedRun(name, SHARED / name, "AVX512", _read_jsonl) for name in ("healthy", "collapsed")]
    return found + [run for run in beside if (run.folder / "checkpoints").is_dir()]


def _read_parquet(folder: Path, step: int) -> RolloutBatch:
    return decode_rollouts((folder / "rollouts" / f"step_{step:04d}.parquet").read_bytes())


def _read_jsonl(folder: Path, step: int) -> RolloutBatch:
    return read_jsonl(folder / "rollouts" / f"step_{step:04d}.jsonl.gz")
