"""The columns and attributes of a slime batch; columns that are split over context-parallel ranks are gathered."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.client.reporting import LogOnce
from foreshock.fingerprint import Fingerprint
from foreshock.integrations import clip_range
from foreshock.model_kind import ModelKind, model_kind_of_folder
from foreshock.rollouts.attributes import BatchAttributes

# The source that these frameworks write for a sample of an unnamed data set.
_UNKNOWN_SOURCE = "unknown"


def columns_of(
    data: Mapping[str, Any],
    scores: Mapping[str, NDArray[Any]],
    *,
    step: int,
    samples_per_prompt: int,
    log: LogOnce,
) -> dict[str, Any]:
    """Return the columns for `Client.log_rollouts` of the N samples of one data-parallel rank.

    `data` is the framework's `rollout_data`; `scores` are the columns of its log-probs, advantages and entropies, flat
    over the T response tokens of all samples. Samples whose sampled tokens are unknown are left out with a warning.
    Raises KeyError naming what is missing if tokens, lengths or loss masks are absent.
    """
    lengths = np.asarray(data["response_lengths"], np.int64)
    totals = np.asarray(data["total_lengths"], np.int64)
    mask, kept = _sampled(flat(data["loss_masks"]).astype(np.uint8), lengths, log)
    rows = np.flatnonzero(kept)
    tokens = flat([row[:total] for row, total in zip(data["tokens"], totals, strict=True)])
    in_response = np.arange(tokens.size) >= np.repeat(np.cumsum(totals) - lengths, totals)
    of_kept = np.repeat(kept, lengths)
    positions = _per_sample(data, "partition", rows)
    columns = {
        "prompt_token_ids": tokens[~in_response & np.repeat(kept, totals)],
        "prompt_lengths": (totals - lengths)[rows],
        "response_token_ids": tokens[in_response][of_kept],
        "response_lengths": lengths[rows],
        "response_mask": None if mask is None else mask[of_kept],
        **{name: values[of_kept] for name, values in scores.items()},
        "sample_id": None if positions is None else [f"{step}-{position}" for position in positions],
        "group_id": _groups(_per_sample(data, "sample_indices", rows), samples_per_prompt),
        "data_source": _sources(_per_sample(data, "source_names", rows)),
        "reward": _rewards(data, rows, log),
        "finish_reason": _finish_reasons(_per_sample(data, "truncated", rows)),
        "weights_version": _weights_versions(_per_sample(data, "weight_versions", rows), lengths[rows], log),
    }
    return {name: value for name, value in columns.items() if value is not None}


def attributes_of(args: Any, *, trainer_policy: Any, trainer_fingerprint: Fingerprint) -> BatchAttributes:
    """Return the attributes of batches of a framework with these arguments; `trainer_policy` is that of its
    log-probs."""
    top_p, top_k = getattr(args, "rollout_top_p", None), getattr(args, "rollout_top_k", None)
    truncated = top_p not in (None, 1, 1.0) or top_k not in (None, -1)
    return BatchAttributes(
        trainer_fingerprint=trainer_fingerprint,
        temperature=getattr(args, "rollout_temperature", None),
        top_p=top_p,
        top_k=top_k,
        # Engines log after temperature. Whether also after truncation depends on their flags, which are unknown here.
        logprobs_mode=None if truncated else "processed_logprobs",
        trainer_policy=trainer_policy,
        entropy_policy="trainer",
        length_cap=getattr(args, "rollout_max_response_len", None),
        loss_aggregation="token-mean" if getattr(args, "calculate_per_token_loss", False) else "sample-mean",
        **clip_range("slime", args),
    )


def precision_of(args: Any) -> dict[str, Any]:
    """Return the precision of Megatron with these arguments: the dtype of its weights, and no autocast."""
    dtype = "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else "float32"
    return {"master_dtype": dtype}


def model_kind_of(args: Any) -> ModelKind | None:
    """Return the kind of the model: by Megatron's number of experts, else by the model's own configuration."""
    experts = getattr(args, "num_experts", None)
    if isinstance(experts, int) and experts > 1:
        return "moe"
    folder = getattr(args, "hf_checkpoint", None)
    found = model_kind_of_folder(folder) if folder and Path(folder).is_dir() else None
    return found or ("dense" if hasattr(args, "num_experts") else None)


def flat(values: Sequence[Any]) -> NDArray[Any]:
    """Return one flat array in the CPU's memory of one array or tensor per sample."""
    if not len(values):
        return np.zeros(0, np.float32)
    if hasattr(values[0], "detach"):
        import torch

        joined: NDArray[Any] = torch.cat([value.detach() for value in values]).cpu().numpy()
        return joined
    return np.concatenate([np.asarray(value) for value in values])


def _sampled(
    mask: NDArray[np.uint8], lengths: NDArray[np.int64], log: LogOnce
) -> tuple[NDArray[np.uint8] | None, NDArray[np.bool_]]:
    """Return the mask of the sampled tokens [T] (None: all), and which samples have a known one [N].

    The framework's loss mask is 0 for tool output, and for every token of a sample that it removed from the loss. All
    tokens of a removed sample were sampled, unless there are tools.
    """
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(mask, dtype=np.int64)])
    ends = np.cumsum(lengths)
    counted = running[ends] - running[ends - lengths]
    removed = (counted == 0) & (lengths > 0)
    if not np.any((counted > 0) & (counted < lengths)):
        return None, np.ones(lengths.size, np.bool_)
    if np.any(removed):
        log.warning(
            "removed",
            "samples that were removed from the loss have a loss mask of zeros, which does not tell tool output from "
            "sampled tokens, so they are not logged",
        )
    return mask, ~removed


def _per_sample(data: Mapping[str, Any], name: str, rows: NDArray[np.int64]) -> list[Any] | None:
    values = data.get(name)
    return None if values is None else [values[row] for row in rows]


def _rewards(data: Mapping[str, Any], rows: NDArray[np.int64], log: LogOnce) -> list[float] | None:
    """Return the rewards before normalisation. `raw_reward` has those of all ranks, `partition` the places of ours."""
    own = data.get("local_raw_reward")
    if own is None and data.get("raw_reward") is not None:
        every = data["raw_reward"]
        own = [every[position] for position in data["partition"]] if "partition" in data else every
    if own is None:
        return None
    samples = len(data["response_lengths"])
    try:
        rewards = [math.nan if each is None else float(each) for each in own]
    except (TypeError, ValueError):
        rewards = []
    if len(rewards) != samples:
        log.warning("rewards", f"the rewards are not one number for each of the {samples} samples: they are not logged")
        return None
    return [rewards[row] for row in rows]


def _groups(indices: list[Any] | None, samples_per_prompt: int) -> list[str] | None:
    """Return a name per prompt: the data source numbers the samples of each prompt consecutively."""
    if indices is None or any(index is None for index in indices):
        return None
    return [str(int(index) // samples_per_prompt) for index in indices]


def _sources(names: list[Any] | None) -> list[str] | None:
    if names is None or all(name == _UNKNOWN_SOURCE for name in names):
        return None
    return [str(name) for name in names]


def _finish_reasons(truncated: list[Any] | None) -> list[str] | None:
    return None if truncated is None else ["length" if int(each) else "stop" for each in truncated]


def _weights_versions(versions: list[Any] | None, lengths: NDArray[np.int64], log: LogOnce) -> NDArray[np.int32] | None:
    """Return the version that sampled each token. The framework has one per turn or partial generation."""
    if versions is None:
        return None
    try:
        first = np.array([int(each[0]) for each in versions], np.int32)
    except (TypeError, ValueError, IndexError):
        log.warning("versions", "weight_versions are not a list of numbers for each sample: they are not logged")
        return None
    if any(len(set(each)) > 1 for each in versions):
        log.warning(
            "mixed versions",
            "a rollout was sampled by several versions of the weights, and the trainer is not told which tokens by "
            "which: weights versions are not logged for such a step, and its mismatch contains staleness",
        )
        return None
    return np.repeat(first, lengths)


def response_ranges(total: int, response: int, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two ranges [begin, end) of response tokens that a rank holds, counted from the first of them."""
    chunk = -(-total // (2 * size))
    prompt = total - response
    found = []
    for number in (rank, 2 * size - 1 - rank):
        begin = max(number * chunk, prompt - 1)
        end = min((number + 1) * chunk, total - 1)
        found.append((begin - prompt + 1, end - prompt + 1) if begin < end else (0, 0))
    return found[0], found[1]


def gather_slices(
    slices: Mapping[str, Sequence[Any] | None],
    totals: Sequence[int],
    responses: Sequence[int],
    *,
    rank: int,
    size: int,
    group: Any,
    device: Any,
) -> dict[str, NDArray[np.float32]]:
    """Return each column flat over all response tokens [T]; every rank of `group` must call this with the same names.

    `slices` has one tensor per sample, the two ranges of this rank joined. A column that is None here, or a slice of
    another length, becomes NaN in this rank's ranges: a rank that stopped instead would leave the others waiting.
    """
    import torch

    names = list(slices)
    ends = np.cumsum(np.asarray(responses, np.int64))
    joined = torch.zeros((len(names), int(ends[-1]) if ends.size else 0), dtype=torch.float32, device=device)
    for sample, (total, response) in enumerate(zip(totals, responses, strict=True)):
        offset = int(ends[sample]) - int(response)
        (first, split), (second, last) = response_ranges(int(total), int(response), rank, size)
        width = split - first
        for row, name in enumerate(names):
            column = slices[name]
            values = None if column is None else column[sample]
            if values is None or values.shape != (width + last - second,):
                values = torch.full((width + last - second,), math.nan)
            joined[row, offset + first : offset + split] = values[:width].detach()
            joined[row, offset + second : offset + last] = values[width:].detach()
    torch.distributed.all_reduce(joined, group=group)
    gathered: NDArray[np.float32] = joined.cpu().numpy()
    return {name: gathered[row] for row, name in enumerate(names)}
