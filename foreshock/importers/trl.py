"""TRL's completions: `completions/completions_NNNNN.parquet` of `log_completions=True`. They have texts, no tokens.

Written by `GRPOTrainer.log` of `trl/trainer/grpo_trainer.py` (TRL 1.16): `step`, `prompt`, `completion`, one column per
reward function, columns that reward functions add, and `advantage`. Without token ids and log-probs there is no
mismatch to measure. The mean of each column of numbers is imported as `completions/<column>/mean`.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.importers.dumps import Dump, ImportedStep, ReadOptions, ends_with, find_numbered

__all__ = ["TrlFormat"]

_NAME = re.compile(r"completions_(\d+)\.parquet")
_TEXTS = ("step", "prompt", "completion", "image")
_MISSING = (
    "TRL's completions have texts and rewards only, no token ids and no log-probs: nothing to measure. Add "
    "foreshock.integrations.trl.ForeshockCallback to the trainer: then it logs its rollouts itself"
)


class TrlFormat:
    """The format `trl`."""

    name = "trl"
    framework = "TRL"
    layout = "completions/completions_NNNNN.parquet"
    pickled = False

    def find(self, path: Path) -> list[Dump]:
        """Return the steps in `path`: a file, the folder `completions`, or the output folder above it."""
        return find_numbered(path, _NAME) or find_numbered(path / "completions", _NAME)

    def has_end(self, path: Path) -> bool:
        """Return True if the file ends with Parquet's magic."""
        return ends_with(path, b"PAR1")

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
        return ImportedStep(dump.step, (), scalars, (_MISSING,))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))
