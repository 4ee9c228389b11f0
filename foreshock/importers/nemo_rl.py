"""NeMo-RL's training data: `train_data_stepN.jsonl` in the log folder, one line per rollout.

Written by `Logger.log_batched_dict_as_jsonl` of `nemo_rl/utils/logger.py`, called by `nemo_rl/algorithms/grpo.py`,
`grpo_sync.py` and `ppo.py` (NeMo-RL 0.6.0), unless `env.should_log_nemo_gym_responses` is true. A line is a slice of
one rollout of the batch, so that most values are lists with one element: `token_ids`, `token_loss_mask`,
`generation_logprobs` (μ), `prev_logprobs` (π before the update) and `advantages` have one value per token of the padded
sequence, and belong to the token at the same place; `input_lengths` is the length without padding.

With `force_on_policy_ratio` NeMo-RL writes zeros for `prev_logprobs`: they are left out. Rollouts that NeMo-RL masks
(`sample_loss_mask` 0) are measured too: to leave them out would bias the measures.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from foreshock.importers.rows import Row, floats, integers, make_batch, mask, number, prompt_group

_NAME = re.compile(r"train_data_step(\d+)\.jsonl")
_SWITCHED_ON_BY = {
    "rollout_log_probs": "`generation_logprobs` holds no log-probs; use a generation backend that returns them",
    "trainer_log_probs": "`prev_logprobs` holds no log-probs; NeMo-RL skips them with force_on_policy_ratio=true, "
    "set it to false or set seq_logprob_error_threshold",
}


def _find(path: Path) -> list[Dump]:
    """Return the steps in `path`: a file, the folder of the files, or a log folder with one experiment below."""
    found = find_numbered(path, _NAME)
    if found or not path.is_dir():
        return found
    # The newest experiment `exp_NNN`, which NeMo-RL makes in its log folder at each start.
    experiments = sorted(folder for folder in path.glob("exp_*") if folder.is_dir() and find_numbered(folder, _NAME))
    return find_numbered(experiments[-1], _NAME) if experiments else []


def _read(dump: Dump, options: ReadOptions) -> ImportedStep:
    attributes = options.attributes_or(trainer_policy="recomputed_old")
    masked = 0
    rows = []
    for row, weight in _rows(dump, options):
        rows.append(row)
        masked += weight == 0
    batch, notes = make_batch(rows, attributes, _SWITCHED_ON_BY, _FIELDS)
    if masked:
        notes.append(f"{masked} rollouts that NeMo-RL masks (`sample_loss_mask` 0) are measured too")
    return ImportedStep(dump.step, (batch,), {}, tuple(notes))


def _rows(dump: Dump, options: ReadOptions) -> Iterator[tuple[Row, float | None]]:
    for index, (place, line) in enumerate(read_lines(dump.files[0], options.limits)):
        # A slice [1, S] of the batch is the list of one rollout.
        values = {
            name: value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
            for name, value in line.items()
        }
        tokens = integers(required(values, "token_ids", place), place, "token_ids")
        trained = mask(required(values, "token_loss_mask", place), place, "token_loss_mask", tokens.size)
        length = number(_only(required(values, "input_lengths", place)), place, "input_lengths")
        if length is None or length != int(length) or not 0 < length <= tokens.size:
            raise refusal(
                place, "input_lengths", f"expected 1 to {tokens.size}, the length of `token_ids`, got {length}"
            )
        end = int(length)
        if trained[end:].any():
            raise refusal(place, "token_loss_mask", f"is 1 in the padding, after the {end} tokens of `input_lengths`")
        start = int(trained.argmax()) if trained.any() else end
        columns: dict[str, Any] = {"group_ids": prompt_group(tokens[:start])}
        for column, field in _FIELDS.items():
            if values.get(field) is not None:
                columns[column] = floats(values[field], place, field, tokens.size)[start:end]
        # With dynamic sampling `rewards` are those of all prompts, in another order.
        field = "filtered_rewards" if "filtered_rewards" in values else "rewards"
        columns["reward"] = number(_only(values.get(field)), place, field)
        row = Row(place, f"{dump.step}-{index}", tokens[:start], tokens[start:end], trained[start:end], columns)
        yield row, number(_only(values.get("sample_loss_mask")), place, "sample_loss_mask")


_FIELDS = {"rollout_log_probs": "generation_logprobs", "trainer_log_probs": "prev_logprobs", "advantage": "advantages"}


def _only(value: Any) -> Any:
    """Return the number of one rollout from a slice [1] of the batch."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


FORMAT = DumpFormat("nemo-rl", "NeMo-RL", "train_data_stepN.jsonl", _find, _read)
