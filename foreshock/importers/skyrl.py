"""SkyRL's training inputs: `dumped_data/global_step_N_training_input.pkl` of `trainer.dump_data_batch=true`.

Written by `RayPPOTrainer.dump_data` of `skyrl/train/trainer.py` (SkyRL of August 2026) as a pickle of
`TrainingInputBatch` (`skyrl/backends/skyrl_train/training_batch.py`): `sequences` [N, S] with `attention_mask`, and
right-aligned arrays [N, R] of the response: `response_mask`, `loss_mask`, `rollout_logprobs` (μ), `action_log_probs` (π
before the update), `advantages`. The last `pad_size` rows are copies that fill the batch: they are dropped. SkyRL
removes rewards and prompt ids before it writes; `policy_prompt_boundaries` separates the prompts.
`base_action_log_probs` and `kl` concern the reference model and are not read.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from foreshock.errors import InvalidRolloutsError
from foreshock.importers.dumps import Dump, DumpFormat, ImportedStep, ReadOptions, find_numbered, refusal
from foreshock.importers.pickles import read_pickled
from foreshock.importers.rows import Row, floats, integers, make_batch, mask, prompt_group

_NAME = re.compile(r"global_step_(\d+)_training_input\.pkl")
_COLUMNS = (
    "sequences",
    "attention_mask",
    "response_mask",
    "loss_mask",
    "rollout_logprobs",
    "action_log_probs",
    "advantages",
)
_SWITCHED_ON_BY = {
    "rollout_log_probs": "set generator.sampling_params.logprobs=0, so that the engine returns them",
    "trainer_log_probs": "SkyRL skips the forward pass for losses that use the rollout's log-probs",
}


def _find(path: Path) -> list[Dump]:
    """Return the steps: a file, the folder `dumped_data`, or the export path above it."""
    return find_numbered(path, _NAME) or find_numbered(path / "dumped_data", _NAME)


def _read(dump: Dump, options: ReadOptions) -> ImportedStep:
    (file,) = dump.files
    rows, metadata = read_pickled(file, "pickle", _COLUMNS, options.limits, allowed=options.allow_pickle)
    lacking = [name for name in _COLUMNS[:3] if rows and name not in rows[0]]
    if metadata.get("kind") != "tensor batch" or lacking or not rows:
        raise InvalidRolloutsError(
            f"{file.name} is no training input of SkyRL: it lacks {', '.join(lacking) or 'rollouts'}; "
            f"fields: {', '.join(metadata.get('fields', []))}"
        )
    own = metadata.get("metadata") or {}
    padded = own.get("pad_size") or 0
    if not isinstance(padded, int) or not 0 <= padded < len(rows):
        raise InvalidRolloutsError(f"{file.name}: pad_size must be 0 to {len(rows) - 1}, got {padded!r}")
    real = rows[: len(rows) - padded]
    groups = _groups(own.get("policy_prompt_boundaries"), len(real))
    made = [_row(row, f"{file.name}, row {number}", dump.step, number, groups) for number, row in enumerate(real)]
    attributes = options.attributes_or(trainer_policy="recomputed_old")
    batch, notes = make_batch(made, attributes, _SWITCHED_ON_BY, _FIELDS)
    scalars = {name: float(value) for name, value in (own.get("metrics") or {}).items() if _is_number(value)}
    return ImportedStep(dump.step, (batch,), scalars, tuple(notes))


def _row(values: dict[str, Any], place: str, step: int, index: int, groups: list[int] | None) -> Row:
    tokens = integers(values["sequences"], place, "sequences")
    real = mask(values["attention_mask"], place, "attention_mask", tokens.size)
    inside = mask(values["response_mask"], place, "response_mask")
    if inside.size > tokens.size:
        raise refusal(place, "response_mask", f"is longer ({inside.size}) than `sequences` ({tokens.size})")
    ends = np.zeros(tokens.size, np.bool_)
    ends[tokens.size - inside.size :] = inside
    if (ends & ~real).any():
        raise refusal(place, "response_mask", "is 1 where `attention_mask` is 0")
    prompt = tokens[real & ~ends]
    sampled = np.ones(int(inside.sum()), np.bool_)
    if "loss_mask" in values:
        sampled = floats(values["loss_mask"], place, "loss_mask", inside.size)[inside] > 0
    columns: dict[str, Any] = {
        "group_ids": prompt_group(prompt) if groups is None else f"step-{step}-prompt-{groups[index]}"
    }
    for column, field in _FIELDS.items():
        if field in values:
            columns[column] = floats(values[field], place, field, inside.size)[inside]
    return Row(place, f"{step}-{index}", prompt, tokens[ends], sampled, columns)


_FIELDS = {"rollout_log_probs": "rollout_logprobs", "trainer_log_probs": "action_log_probs", "advantage": "advantages"}


def _groups(boundaries: Any, rows: int) -> list[int] | None:
    """Return the number of the prompt of each row from [start, stop] per prompt; None if they do not cover the rows."""
    groups: list[int] = []
    for number, pair in enumerate(boundaries if isinstance(boundaries, list) else ()):
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] != len(groups) or not pair[0] <= pair[1] <= rows:
            return None
        groups += [number] * (pair[1] - pair[0])
    return groups if len(groups) == rows else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


FORMAT = DumpFormat("skyrl", "SkyRL", "dumped_data/global_step_N_training_input.pkl", _find, _read)
