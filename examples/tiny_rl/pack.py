"""Copy a record with all steps and only a few checkpoints, small enough for the repository.

python -m examples.tiny_rl.pack my-run examples/tiny_rl/recorded --checkpoints 1 60 200
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from examples.tiny_rl.record import RunRecord


def pack(source: Path, target: Path, checkpoint_steps: list[int]) -> None:
    """Copy the record in `source` to `target` with the checkpoints of `checkpoint_steps` only."""
    for name in ("rollouts", "checkpoints"):
        shutil.rmtree(target / name, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source / "rollouts", target / "rollouts")
    shutil.copy(source / "metrics.jsonl", target)
    record = RunRecord(target)
    for step in checkpoint_steps:
        record.write_checkpoint(step, source / "checkpoints" / f"step_{step:04d}")
    record.write_manifest(replace(RunRecord(source).manifest(), checkpoints=record.checkpoints_found()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--checkpoints", type=int, nargs="+", required=True, metavar="STEP")
    arguments = parser.parse_args()
    pack(arguments.source, arguments.target, arguments.checkpoints)


if __name__ == "__main__":
    main()
