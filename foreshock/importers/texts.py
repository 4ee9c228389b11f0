"""Recognise dumps of texts: verl's rollout dumps and TRL's completions. Nothing can be measured without tokens.

verl writes `N.jsonl` to `trainer.rollout_data_dir` with `input`, `output` and `score`; TRL writes
`completions/completions_NNNNN.parquet` with `log_completions=True`: `prompt`, `completion` and rewards.
"""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.importers.dumps import find_numbered
from foreshock.parsing import parse_json

_VERL_NAME = re.compile(r"(\d+)\.jsonl")
_TRL_NAME = re.compile(r"completions_(\d+)\.parquet")
_NEEDED = "has texts and scores only; token ids and log-probs of each token are needed"
_VERL = (
    f"verl's rollout dump {_NEEDED}, and no dump of verl has them: set FORESHOCK_URL when you start verl, and "
    "actor_rollout_ref.rollout.calculate_log_probs=True, so that verl logs its rollouts itself"
)
_TRL = (
    f"TRL's dump of completions {_NEEDED}, and no dump of TRL has them: add "
    "foreshock.integrations.trl.ForeshockCallback to the trainer, which logs its rollouts"
)


def lacks_tokens(path: Path) -> str | None:
    """Return what is needed in place of a dump of texts at `path`, a file or folder; None if it is no such dump."""
    for dump in find_numbered(path, _VERL_NAME)[:1]:
        if {"input", "output"} <= _fields_of_first_line(dump.files[0]):
            return _VERL
    for dump in (find_numbered(path, _TRL_NAME) or find_numbered(path / "completions", _TRL_NAME))[:1]:
        if {"prompt", "completion"} <= _columns_of(dump.files[0]):
            return _TRL
    return None


def _fields_of_first_line(file: Path) -> set[str]:
    try:
        with file.open("rb") as lines:
            line = parse_json(lines.readline(1 << 24))
    except (OSError, ValueError):
        return set()
    return set(line) if isinstance(line, dict) else set()


def _columns_of(file: Path) -> set[str]:
    try:
        return set(pq.read_schema(file).names)
    except (pa.ArrowException, OSError, ValueError):
        return set()
