"""Debug dumps of slime and miles: `.pt` files of `--save-debug-{rollout,train}-data` or `--dump-details`.

slime 0.3.1 writes rollouts by `save_debug_rollout_data` of `slime/observability/rollout_data_utils.py` (`samples`:
token ids, loss mask, μ, reward, group, status) and training data by `save_debug_train_data` of
`slime/observability/train_data_utils.py` (`samples` of all ranks with `log_probs`: π before the update). miles 0.1
writes the same rollouts (`miles/ray/rollout/debug_data.py`) and training data per rank
(`miles/utils/train_dump_utils.py`, `rollout_data`), several times under tensor parallelism.

miles' `--save-logprob-comparison-data` (`save_logprob_comparison_data` of the same file) has μ and π of each rank's
samples; its `reward` is the one after normalisation and is not read, `raw_reward` is.

A folder with `rollout_data` and `train_data`, as `--dump-details` makes it, is joined: μ, masks, rewards, groups from
the rollouts, π and advantages from the training data. The loss mask of training data is 0 for removed samples; that of
the rollouts is not. `ref_log_probs` and `kl` concern the reference model and are not read.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.importers.dumps import Dump, DumpFormat, ImportedStep, ReadOptions, refusal
from foreshock.importers.pickles import read_pickled
from foreshock.importers.rows import Row, WrongLength, floats, integers, make_batch, mask, number, prompt_group, rows_of

_NAME = re.compile(r"(?:.*?\D)??(?P<step>\d+)(?:_(?P<rank>\d+))?\.pt")
_ROLLOUT_FOLDER, _TRAIN_FOLDER = "rollout_data", "train_data"
_COLUMNS = (
    # of rollouts
    "tokens", "response_length", "loss_mask", "rollout_log_probs", "reward", "group_index", "index", "status",
    "weight_versions",
    # of training data
    "response_lengths", "loss_masks", "log_probs", "advantages", "entropy", "sample_index", "rollout_position",
    "sample_indices", "truncated", "megatron_log_probs", "raw_reward", "response_token_ids",
)  # fmt: skip
_JOINED = ("log_probs", "advantages", "entropy")
_FINISH_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "error"}
_SWITCHED_ON_BY = {
    "rollout_log_probs": "the engine returned none; SGLang returns them for the default rollout function",
    "trainer_log_probs": "rollout dumps have none; add --save-debug-train-data, or use --dump-details for both",
}

Sample = dict[str, Any]


def _find(path: Path) -> list[Dump]:
    """Return the steps: a file, a folder of `.pt` files, or a folder with `rollout_data` and `train_data`."""
    folders = [path / name for name in (_ROLLOUT_FOLDER, _TRAIN_FOLDER) if (path / name).is_dir()]
    if not folders:
        return [Dump(step, tuple(files)) for step, files in sorted(_files(path).items())]
    rollouts, trained = _files(path / _ROLLOUT_FOLDER), _files(path / _TRAIN_FOLDER)
    dumps = []
    for step in sorted({*rollouts, *trained}):
        missing = [] if step in trained else [f"{_TRAIN_FOLDER}/{step}.pt"]
        missing += [] if step in rollouts else [f"{_ROLLOUT_FOLDER}/{step}.pt"]
        dumps.append(Dump(step, (*rollouts.get(step, ()), *trained.get(step, ())), missing=tuple(missing)))
    return dumps


def _read(dump: Dump, options: ReadOptions) -> ImportedStep:
    rollouts: list[Sample] = []
    trained: list[Sample] = []
    notes = [f"step {dump.step} has no {name}" for name in dump.missing]
    for file in dump.files:
        is_trained, samples = _samples(file, dump.step, options)
        (trained if is_trained else rollouts).extend(samples)
    if trained:
        trained, repeated = _distinct(trained)
        if repeated:
            notes.append("training data of ranks that hold the same samples (tensor parallelism) were read once")
    samples = _joined(rollouts, trained) if rollouts and trained else rollouts or trained
    if any(len(_version_names(sample.get("weight_versions"))) > 1 for sample in samples):
        notes.append(
            "rollouts that several versions of the weights sampled are read without versions: the dump does not "
            "say which tokens each sampled"
        )
    rows, left_out = rows_of(samples, lambda sample: _row(sample, dump.step, options))
    attributes = (
        options.attributes_or(trainer_policy="recomputed_old", entropy_policy="trainer")
        if trained
        else options.attributes
    )
    batch, remarks = make_batch(rows, attributes, _SWITCHED_ON_BY, _TOKEN_FIELDS)
    return ImportedStep(dump.step, (batch,), {}, tuple(dict.fromkeys(notes + remarks)), tuple(left_out))


def _files(path: Path) -> dict[int, list[Path]]:
    files = [path] if path.is_file() else sorted(path.glob("*.pt")) if path.is_dir() else []
    found: dict[int, list[Path]] = {}
    for file in files:
        match = _NAME.fullmatch(file.name)
        if match is not None and "eval_" not in file.name:
            found.setdefault(int(match["step"]), []).append(file)
    return found


def _samples(file: Path, step: int, options: ReadOptions) -> tuple[bool, list[Sample]]:
    """Return whether a file has training data, not rollouts, and its samples."""
    rows, metadata = read_pickled(file, "pt", _COLUMNS, options.limits, allowed=options.allow_pickle)
    if metadata.get("rollout_id") != step:
        raise InvalidRolloutsError(
            f"{file.name} has rollout_id {metadata.get('rollout_id')!r}, but its name says {step}: "
            "let the name end with the rollout id, as in rollout_{rollout_id}.pt"
        )
    if metadata.get("cp_size", 1) not in (1, None):
        raise InvalidRolloutsError(
            f"{file.name} has sequences that are split over {metadata['cp_size']} context-parallel ranks; slime 0.3.1 "
            "writes them whole, miles does not: log by its hooks instead"
        )
    fields = metadata.get("fields", [])
    compared = "megatron_log_probs" in fields
    trained = compared or metadata["kind"] == "rollout_data" or "log_probs" in fields or "loss_masks" in fields
    samples = [{**row, "place": f"{file.name}, sample {number}"} for number, row in enumerate(rows)]
    for sample in samples if compared else ():
        sample |= {"log_probs": sample.get("megatron_log_probs"), "reward": sample.get("raw_reward")}
    if trained:
        _add_raw_rewards(samples, metadata.get("raw_reward"))
    return trained, samples


def _add_raw_rewards(samples: list[Sample], rewards: Any) -> None:
    """Add rewards before normalisation, which slime writes once for the whole batch, in the order of the rollouts."""
    if not isinstance(rewards, list):
        return
    for index, sample in enumerate(samples):
        position = sample.get("rollout_position", index if len(rewards) == len(samples) else None)
        if isinstance(position, int) and 0 <= position < len(rewards):
            sample["reward"] = rewards[position]


def _distinct(samples: list[Sample]) -> tuple[list[Sample], bool]:
    """Return each training sample once: ranks of tensor parallelism hold the same."""
    found: dict[Any, Sample] = {}
    for sample in samples:
        key: Any = _index(sample)
        if key is None:
            key = tuple(np.asarray(sample.get(name)).tobytes() for name in ("tokens", "log_probs"))
        found.setdefault(key, sample)
    return list(found.values()), len(found) < len(samples)


def _index(sample: Mapping[str, Any]) -> int | None:
    for name in ("sample_index", "sample_indices", "index"):
        if isinstance(sample.get(name), int):
            return int(sample[name])
    return None


def _joined(rollouts: list[Sample], trained: list[Sample]) -> list[Sample]:
    """Return the rollouts with what the trainer computed for them; a rollout that was not trained on has no π."""
    by_position = {
        sample["rollout_position"]: sample for sample in trained if isinstance(sample.get("rollout_position"), int)
    }
    by_index = {_index(sample): sample for sample in trained if _index(sample) is not None}
    joined = []
    for position, sample in enumerate(rollouts):
        partner = by_position.get(position) or by_index.get(_index(sample))
        if partner is not None and not np.array_equal(partner.get("tokens", ()), sample.get("tokens", ())):
            raise InvalidRolloutsError(
                f"{sample['place']} and {partner['place']} have other tokens: the folders are of different runs"
            )
        extra = partner or {}
        joined.append({**sample, **{name: extra[name] for name in _JOINED if name in extra}})
    return joined


def _row(sample: Sample, step: int, options: ReadOptions) -> Row:
    place = str(sample["place"])
    tokens = integers(sample.get("tokens"), place, "tokens")
    name = "response_length" if sample.get("response_length") is not None else "response_lengths"
    length = number(sample.get(name), place, name)
    if length is None or length != int(length) or not 0 <= length <= tokens.size:
        raise WrongLength(str(refusal(place, name, f"expected 0 to {tokens.size}, the number of tokens, got {length}")))
    start = tokens.size - int(length)
    response = tokens[start:]
    if not np.array_equal(sample.get("response_token_ids", response), response):
        # miles cuts a response whose columns differ in length at its end.
        raise WrongLength(str(refusal(place, "response_token_ids", "they are not the last ones of `tokens`")))
    columns: dict[str, Any] = {
        "group_ids": _group(sample, step, tokens[:start]),
        "reward": _reward(sample.get("reward"), place, options.reward_key),
        "finish_reasons": _finish_reason(sample),
        "weights_version": _version(sample.get("weight_versions"), response.size),
    }
    for column, field in _TOKEN_FIELDS.items():
        if sample.get(field) is not None:
            columns[column] = floats(sample[field], place, field, response.size)
    loss_mask = sample.get("loss_mask") if sample.get("loss_mask") is not None else sample.get("loss_masks")
    sampled = np.ones(response.size, np.bool_)
    if loss_mask is not None:
        sampled = mask(loss_mask, place, "loss_mask", response.size)
    index = _index(sample)
    name = f"{step}-{place.rpartition(' ')[2] if index is None else index}"
    return Row(place, name, tokens[:start], response, sampled, columns)


_TOKEN_FIELDS = {
    "rollout_log_probs": "rollout_log_probs",
    "trainer_log_probs": "log_probs",
    "advantage": "advantages",
    "entropy": "entropy",
}


def _group(sample: Sample, step: int, prompt: NDArray[np.int64]) -> str:
    group = sample.get("group_index")
    return f"step-{step}-group-{group}" if isinstance(group, int) else prompt_group(prompt)


def _reward(value: Any, place: str, key: str | None) -> float | None:
    """Return a reward; if there are several by name, that of --reward-key, None without it."""
    if isinstance(value, Mapping):
        if key is None:
            return None
        if key not in value:
            raise refusal(place, "reward", f"has no {key!r}; --reward-key must be one of {', '.join(map(str, value))}")
        value = value[key]
    return number(value, place, "reward")


def _finish_reason(sample: Sample) -> str | None:
    if isinstance(sample.get("status"), str):
        return _FINISH_REASONS.get(sample["status"], sample["status"])
    return {0: None, 1: "length"}.get(sample.get("truncated", 0))


def _version(versions: Any, length: int) -> NDArray[np.int64] | None:
    """Return the weights version of each token; None if several sampled them, as the dump does not say which."""
    distinct = _version_names(versions)
    if len(distinct) != 1 or not (name := distinct.pop()).isdecimal():
        return None
    return np.full(length, int(name), np.int64)


def _version_names(versions: Any) -> set[str]:
    return set(map(str, versions)) if isinstance(versions, list) else set()


FORMAT = DumpFormat(
    "slime",
    "slime",
    (
        "{rollout_id}.pt of --save-debug-rollout-data, --save-debug-train-data or --save-logprob-comparison-data, or "
        "the folder of --dump-details"
    ),
    _find,
    _read,
)
