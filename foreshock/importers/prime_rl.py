"""prime-rl's token exports: `token_exports/step_N/rank_R.jsonl`, finished when `step_N/STABLE` is there.

Written by `TokenExporter` of `src/prime_rl/trainer/rl/token_export.py` (prime-rl 0.8.0, schema version 1) with
`trainer.enable_token_export = true`. A line is a trained sequence with one value per token of prompt and response:
`token_ids`, `loss_mask`, `inference_logprobs` (μ), `trainer_logprobs` (π of the weights before the update; both belong
to the token at the same place), `entropy`, `advantages`, `mismatch_kl` and the weights of the parts of the loss. The
prompt is what precedes the first trained token.

Tokens whose part of the loss is distillation (`rl_weights` and `ref_kl_weights` 0) were sampled by another model: they
are not measured, as in prime-rl's own `mismatch_kl/all/mean`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import ConfigurationError, InvalidRolloutsError
from foreshock.importers.dumps import Dump, DumpFormat, ImportedStep, ReadOptions, read_lines, refusal, required
from foreshock.importers.rows import Row, floats, integers, make_batch, mask, prompt_group
from foreshock.rollouts.batch import RolloutBatch

_STEP = re.compile(r"step_(\d+)")
_RANK = re.compile(r"rank_(\d+)\.jsonl")
_KNOWN_SCHEMA = 1
_SWITCHED_ON_BY = {
    "rollout_log_probs": "the export has no `inference_logprobs` of trained tokens, as in pure distillation",
    "trainer_log_probs": "the export has no `trainer_logprobs` of trained tokens",
}


def _find(path: Path) -> list[Dump]:
    """Return the steps below `path`: the run's folder, `token_exports`, or one `step_N`."""
    folders = (
        [path] if _STEP.fullmatch(path.name) else [*path.glob("step_*")] or [*path.rglob("token_exports/**/step_*")]
    )
    folders = [folder for folder in folders if _STEP.fullmatch(folder.name) and [*folder.glob("rank_*.jsonl")]]
    parents = sorted({folder.parent for folder in folders})
    if len(parents) > 1:
        names = ", ".join(str(parent) for parent in parents)
        raise ConfigurationError(f"{path} has the exports of several runs: import one of them: {names}")
    return sorted((_dump(folder) for folder in folders), key=lambda dump: dump.step)


def _read(dump: Dump, options: ReadOptions) -> ImportedStep:
    """Read a step, one shard per rank."""
    attributes = options.attributes_or(trainer_policy="current", entropy_policy="trainer")
    batches: list[RolloutBatch] = []
    notes: list[str] = []
    numbers: _Numbers = defaultdict(list)
    for file in dump.files:
        rows = list(_rows(file, dump.step, options, numbers, notes))
        batch, remarks = make_batch(rows, attributes, _SWITCHED_ON_BY, _FIELDS)
        batches.append(batch)
        notes += remarks
    return ImportedStep(dump.step, tuple(batches), _means(numbers), tuple(dict.fromkeys(notes)))


def _dump(folder: Path) -> Dump:
    ranks = sorted((int(match[1]), file) for file in folder.iterdir() if (match := _RANK.fullmatch(file.name)))
    match = _STEP.fullmatch(folder.name)
    assert match is not None
    return Dump(int(match[1]), tuple(file for _, file in ranks), finished=(folder / "STABLE").exists())


# prime-rl's own per-token numbers under its names: the finite values of each part of the step.
_Numbers = dict[str, list[NDArray[np.float64]]]


def _means(numbers: _Numbers) -> dict[str, float]:
    joined = {name: np.concatenate(parts) for name, parts in numbers.items()}
    return {name: math.fsum(values) / values.size for name, values in joined.items() if values.size}


def _rows(file: Path, step: int, options: ReadOptions, numbers: _Numbers, notes: list[str]) -> Iterator[Row]:
    rank = _RANK.fullmatch(file.name)
    for index, (place, line) in enumerate(read_lines(file, options.limits)):
        if line.get("step", step) != step:
            raise refusal(place, "step", f"is {line['step']!r} in the folder of step {step}")
        if line.get("schema_version") != _KNOWN_SCHEMA:
            notes.append(
                f"schema_version {line.get('schema_version')!r} is not {_KNOWN_SCHEMA}: fields were read by their names"
            )
        tokens = integers(required(line, "token_ids", place), place, "token_ids")
        trained = mask(required(line, "loss_mask", place), place, "loss_mask", tokens.size)
        if not trained.any():
            raise refusal(place, "loss_mask", "has no trained token: prime-rl does not export such sequences")
        sampled = trained & _sampled_by_policy(line, place, tokens.size)
        start = int(trained.argmax())
        columns: dict[str, Any] = {"group_ids": prompt_group(tokens[:start]), "data_sources": _name(line, place)}
        for column, field in _FIELDS.items():
            values = floats(required(line, field, place), place, field, tokens.size)
            columns[column] = values[start:]
        for name, field in (("mismatch_kl/all/mean", "mismatch_kl"), ("entropy/all/mean", "entropy")):
            values = floats(line.get(field, [None] * tokens.size), place, field, tokens.size)
            values = values[sampled if field == "mismatch_kl" else trained]
            numbers[name].append(values[np.isfinite(values)])
        sample_id = f"{step}-{rank[1] if rank else 0}-{index}"
        yield Row(place, sample_id, tokens[:start], tokens[start:], sampled[start:], columns)


_FIELDS = {
    "rollout_log_probs": "inference_logprobs",
    "trainer_log_probs": "trainer_logprobs",
    "entropy": "entropy",
    "advantage": "advantages",
}


def _sampled_by_policy(line: dict[str, Any], place: str, size: int) -> NDArray[np.bool_]:
    """Return True for tokens that the policy sampled: those of the parts `rl` and `ref_kl` of the loss."""
    weights = {
        field: floats(line[field], place, field, size)
        for field in ("rl_weights", "ref_kl_weights")
        if isinstance(line.get(field), list) and any(value is not None for value in line[field])
    }
    if not weights:
        return np.ones(size, np.bool_)
    sampled = weights["rl_weights"] != 0 if "rl_weights" in weights else np.ones(size, np.bool_)
    return sampled | (weights["ref_kl_weights"] != 0) if "ref_kl_weights" in weights else sampled


def _name(line: dict[str, Any], place: str) -> str | None:
    name = line.get("env_name")
    if name is not None and not isinstance(name, str):
        raise InvalidRolloutsError(f"{place}, field `env_name`: expected a string or null, got {type(name).__name__}")
    return name


FORMAT = DumpFormat("prime-rl", "prime-rl", "token_exports/step_N/rank_R.jsonl with step_N/STABLE", _find, _read)
