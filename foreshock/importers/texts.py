"""Formats that have texts and scores but no tokens: verl's rollout dumps and TRL's completions.

Without token ids and log-probs there is no mismatch to measure; the means of a step are imported as scalars.

verl 0.9.1 writes `N.jsonl` to `trainer.rollout_data_dir` (`RayPPOTrainer._write_generations` of
`verl/trainer/ppo/ray_trainer.py`): `input`, `output`, `gts`, `score`, `step` and what the reward function returned. The
mean score is imported as `critic/score/mean`, verl's own name of it.

TRL 1.16 writes `completions/completions_NNNNN.parquet` with `log_completions=True` (`GRPOTrainer.log` of
`trl/trainer/grpo_trainer.py`): `step`, `prompt`, `completion`, one column per reward function, columns that reward
functions add, and `advantage`. The mean of each column of numbers is imported as `completions/<column>/mean`.
"""

import math
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.importers.dumps import (
    Dump,
    DumpFormat,
    ImportedStep,
    ReadOptions,
    find_numbered,
    read_lines,
    refusal,
    required,
)
from foreshock.importers.rows import number

_VERL_NAME = re.compile(r"(\d+)\.jsonl")
_VERL_LACKS = (
    "verl's rollout dumps have texts and scores only, no token ids and no log-probs: nothing to measure. Set "
    "FORESHOCK_URL when you start verl, and actor_rollout_ref.rollout.calculate_log_probs=True: then verl logs its "
    "rollouts itself"
)


class VerlFormat(DumpFormat):
    """The format `verl`."""

    name = "verl"
    framework = "verl"
    layout = "N.jsonl of trainer.rollout_data_dir"

    def find(self, path: Path) -> list[Dump]:
        """Return the steps in `path`: a file, or the folder."""
        return find_numbered(path, _VERL_NAME)

    def read(self, dump: Dump, options: ReadOptions) -> ImportedStep:
        """Read the scores of a step."""
        scores = []
        for place, line in read_lines(dump.files[0], options.limits):
            if line.get("step", dump.step) != dump.step:
                raise refusal(place, "step", f"is {line['step']!r} in the file of step {dump.step}")
            for field in ("input", "output"):
                if not isinstance(required(line, field, place), str):
                    raise refusal(place, field, f"expected a text, got {type(line[field]).__name__}")
            score = number(required(line, "score", place), place, "score")
            if score is not None and math.isfinite(score):
                scores.append(score)
        scalars = {"critic/score/mean": math.fsum(scores) / len(scores)} if scores else {}
        return ImportedStep(dump.step, (), scalars, (_VERL_LACKS,))


_TRL_NAME = re.compile(r"completions_(\d+)\.parquet")
_TEXTS = ("step", "prompt", "completion", "image")
_TRL_LACKS = (
    "TRL's completions have texts and rewards only, no token ids and no log-probs: nothing to measure. Add "
    "foreshock.integrations.trl.ForeshockCallback to the trainer: then it logs its rollouts itself"
)


class TrlFormat(DumpFormat):
    """The format `trl`."""

    name = "trl"
    framework = "TRL"
    layout = "completions/completions_NNNNN.parquet"
    ending = b"PAR1"

    def find(self, path: Path) -> list[Dump]:
        """Return the steps in `path`: a file, the folder `completions`, or the output folder above it."""
        return find_numbered(path, _TRL_NAME) or find_numbered(path / "completions", _TRL_NAME)

    def read(self, dump: Dump, options: ReadOptions) -> ImportedStep:
        """Read the means of a step."""
        (file,) = dump.files
        try:
            with pq.ParquetFile(file) as parquet:
                columns = [field.name for field in parquet.schema_arrow if _is_number(field.type)]
                size = sum(
                    parquet.metadata.row_group(index).total_byte_size
                    for index in range(parquet.metadata.num_row_groups)
                )
                if size > options.limits.max_uncompressed_bytes:
                    raise LimitExceededError(
                        f"{file.name} has more than {options.limits.max_uncompressed_bytes:,} bytes"
                    )
                missing = {"step", "prompt", "completion"} - set(parquet.schema_arrow.names)
                if missing:
                    raise InvalidRolloutsError(
                        f"{file.name} has no column {', '.join(sorted(missing))}: not written by TRL"
                    )
                table = parquet.read(columns=columns)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, InvalidRolloutsError | LimitExceededError):
                raise
            raise InvalidRolloutsError(f"{file.name} is no complete Parquet file: {error}") from error
        scalars = {}
        for name in columns:
            values = np.asarray(table.column(name).to_numpy(), np.float64)
            values = values[np.isfinite(values)]
            if name not in _TEXTS and values.size:
                scalars[f"completions/{name}/mean"] = float(values.mean())
        return ImportedStep(dump.step, (), scalars, (_TRL_LACKS,))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))
