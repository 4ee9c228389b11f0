"""Recognise dumps without log-probs, by the fields of their rows. Nothing can be measured without tokens.

Their writers: verl's `trainer.rollout_data_dir`, TRL's and ms-swift's `log_completions`, AReaL's dump of trajectories,
ROLL's `rollout_dump_dir`, tinker-cookbook's `rollout_json_export`, SkyRL's dump of evaluations, Agent-Lightning's
trajectories, and torchtitan's recorder, whose records have no step.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.parsing import parse_json
from foreshock.rollouts.rollout_files import OTHER_NAMES

_CONNECT = "foreshock.integrations.connect.connect"
_VERL = (
    "set FORESHOCK_URL when you start verl, and actor_rollout_ref.rollout.calculate_log_probs=True, so that verl logs "
    "its rollouts itself"
)
_TRL = "add foreshock.integrations.trl.ForeshockCallback to the trainer, which logs its rollouts"
_TEXTS: Final[tuple[tuple[str, frozenset[str], str], ...]] = (
    ("verl's rollout dump", frozenset({"input", "output", "score"}), _VERL),
    ("AReaL's dump of trajectories", frozenset({"prompt_len", "head_version"}), f"log them by {_CONNECT}(trainer)"),
    ("ms-swift's dump of completions", frozenset({"prompt", "completion", "advantages"}), _TRL),
    ("TRL's dump of completions", frozenset({"prompt", "completion"}), _TRL),
    ("ROLL's rollout dump", frozenset({"responses", "scores"}), f"log its batches by {_CONNECT}(pipeline)"),
    (
        "tinker-cookbook's summary of rollouts",
        frozenset({"traj_idx", "total_reward"}),
        f"log them by {_CONNECT}(tinker_cookbook.rl.train)",
    ),
    ("SkyRL's dump of evaluations", frozenset({"input_prompt", "output_response"}), "set trainer.dump_data_batch=true"),
    ("Agent-Lightning's file of trajectories", frozenset({"rollout_id", "prompt", "response"}), _VERL),
    ("torchtitan's record of rollouts", frozenset({"turns", "reward_breakdown"}), "log them in the trainer's step"),
)  # fmt: skip


def lacks_tokens(path: Path) -> str | None:
    """Return what is needed in place of a dump without log-probs at `path`, a file or folder; None if it is none."""
    for file in [path] if path.is_file() else _first_files(path):
        fields = _columns_of(file) if file.suffix == ".parquet" else _fields_of_first_line(file)
        for name, needed, instead in _TEXTS:
            if needed <= fields and not fields & {"response_token_ids", *OTHER_NAMES["response_token_ids"]}:
                return (
                    f"{name} has texts and scores only; token ids and log-probs of each token are needed, and these "
                    f"dumps have no log-probs: {instead}"
                )
    return None


def _first_files(path: Path) -> Iterator[Path]:
    """Yield the first file of each level down to the third."""
    for level in ("*", "*/*", "*/*/*"):
        yield from [file for file in sorted(path.glob(level)) if file.suffix in (".jsonl", ".parquet")][:1]


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
