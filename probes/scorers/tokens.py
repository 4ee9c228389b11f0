"""Token sequences of rollouts for engines: prompt and response as one sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from foreshock_probes.scorers.request import UnsupportedScoreError

__all__ = [
    "check_tokens",
    "known_states",
    "model_configuration",
    "sequence",
    "sequence_lengths",
    "sequences",
    "tokens_of_states",
    "vocabulary_size",
]


def sequence(rollouts: RolloutBatch, row: int) -> NDArray[np.int32]:
    """Return prompt and response of the rollout `row` as one array."""
    prompt = rollouts.prompt_token_ids[rollouts.prompt_offsets[row] : rollouts.prompt_offsets[row + 1]]
    response = rollouts.response_token_ids[rollouts.response_offsets[row] : rollouts.response_offsets[row + 1]]
    return np.concatenate([prompt, response])


def sequences(rollouts: RolloutBatch, rows: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """Return prompt and response of each of `rows`."""
    return [sequence(rollouts, int(row)) for row in rows]


def sequence_lengths(rollouts: RolloutBatch) -> NDArray[np.int64]:
    """Return the number of prompt and response tokens of each rollout, shape [N]."""
    return np.diff(rollouts.prompt_offsets) + np.diff(rollouts.response_offsets)


def known_states(rollouts: RolloutBatch) -> NDArray[np.bool_]:
    """Return which response tokens have a state before them, [T]: all but the first of a rollout without a prompt."""
    known = np.ones(rollouts.num_tokens, np.bool_)
    starts, ends = rollouts.response_offsets[:-1], rollouts.response_offsets[1:]
    known[starts[(np.diff(rollouts.prompt_offsets) == 0) & (ends > starts)]] = False
    return known


def tokens_of_states(rollouts: RolloutBatch, rows: NDArray[np.int64], known: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the response tokens (indices in [T]) of the known states of `rows`, in the order of a batch of them."""
    ranges = [np.arange(*rollouts.response_offsets[row : row + 2]) for row in rows.tolist()]
    tokens = np.concatenate(ranges).astype(np.int64) if ranges else np.zeros(0, np.int64)
    chosen: NDArray[np.int64] = tokens[known[tokens]]
    return chosen


def model_configuration(weights_folder: Path) -> dict[str, Any]:
    """Return the checkpoint's config.json, or its `text_config` if present.

    Raises UnsupportedScoreError if it cannot be read.
    """
    try:
        found = json.loads((weights_folder / "config.json").read_text("utf-8"))
        part = found.get("text_config") or found
        return dict(part)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UnsupportedScoreError(f"the checkpoint's config.json cannot be read: {error}") from error


def vocabulary_size(weights_folder: Path) -> int | None:
    """Return the model's number of token ids, None if its configuration has none."""
    size = model_configuration(weights_folder).get("vocab_size")
    return size if isinstance(size, int) else None


def check_tokens(rollouts: RolloutBatch, weights_folder: Path) -> None:
    """Raise UnsupportedScoreError if a token id is not in the model's vocabulary."""
    size = vocabulary_size(weights_folder)
    if size is None:
        return
    for column, values in (
        ("prompt_token_ids", rollouts.prompt_token_ids),
        ("response_token_ids", rollouts.response_token_ids),
    ):
        if values.size and int(values.max()) >= size:
            raise UnsupportedScoreError(
                f"`{column}` has the token id {int(values.max())}, and the checkpoint's vocabulary has {size} tokens: "
                "these weights did not sample these rollouts"
            )
