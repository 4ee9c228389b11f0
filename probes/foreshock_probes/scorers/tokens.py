"""Token sequences of rollouts for engines (prompt and response concatenated), and their grouping into batches.

Floating-point sums depend on how rows are grouped and padded, so the composition of batches is part of a score's
fingerprint. The same scorer with another composition gives its noise floor.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.parsing import parse_json
from foreshock.rollouts import RolloutBatch
from foreshock.scorers import NOISE_FLOOR_VARIANT, VARIANTS
from foreshock_probes.scorers.request import Report, UnsupportedScoreError


def sequence(rollouts: RolloutBatch, row: int) -> NDArray[np.int32]:
    """Return prompt and response of the rollout `row` as one array."""
    prompt = rollouts.prompt_token_ids[rollouts.prompt_offsets[row] : rollouts.prompt_offsets[row + 1]]
    response = rollouts.response_token_ids[rollouts.response_offsets[row] : rollouts.response_offsets[row + 1]]
    return np.concatenate([prompt, response])


def sequences(rollouts: RolloutBatch, rows: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """Return prompt and response of each of `rows`."""
    return [sequence(rollouts, int(row)) for row in rows]


LogProbsOf = Callable[[float, list[NDArray[np.int32]], list[int]], Iterable[NDArray[np.float64]]]
"""Returns, at a temperature, the log-probs of each sequence's tokens from its position `first` ≥ 1 on."""


def score_by_temperature(
    rollouts: RolloutBatch,
    batches: Iterable[NDArray[np.int64]],
    temperature: NDArray[np.float64],
    is_scored: NDArray[np.bool_],
    log_probs_of: LogProbsOf,
    report: Report,
) -> NDArray[np.float32]:
    """Return the log-probs [T] of the responses. Of each batch, the rows of one `temperature` [N] are scored together.

    Rows that are not scored (`is_scored` [N]) and the first token of a response without a prompt have NaN.
    """
    log_probs = np.full(rollouts.num_tokens, np.nan, dtype=np.float32)
    prompts = np.maximum(np.diff(rollouts.prompt_offsets), 1)
    done = 0
    for rows in batches:
        for value in np.unique(temperature[rows]):
            chosen = rows[(temperature[rows] == value) & is_scored[rows]]
            if not chosen.size:
                continue
            found = log_probs_of(float(value), sequences(rollouts, chosen), prompts[chosen].tolist())
            for row, values in zip(chosen.tolist(), found, strict=True):
                stop = int(rollouts.response_offsets[row + 1])
                log_probs[stop - values.size : stop] = values
        done += int(np.diff(rollouts.response_offsets)[rows].sum())
        report(done)
    return log_probs


def sequence_lengths(rollouts: RolloutBatch) -> NDArray[np.int64]:
    """Return the number of prompt and response tokens of each rollout, shape [N]."""
    return np.diff(rollouts.prompt_offsets) + np.diff(rollouts.response_offsets)


def known_states(rollouts: RolloutBatch) -> NDArray[np.bool_]:
    """Return [T], True for response tokens with a state before them: all but the first one without a prompt."""
    known = np.ones(rollouts.num_tokens, np.bool_)
    starts, ends = rollouts.response_offsets[:-1], rollouts.response_offsets[1:]
    known[starts[(np.diff(rollouts.prompt_offsets) == 0) & (ends > starts)]] = False
    return known


def model_configuration(weights_folder: Path) -> dict[str, Any]:
    """Return the checkpoint's config.json, or its `text_config` if present.

    Raises UnsupportedScoreError if it cannot be read.
    """
    try:
        found = parse_json((weights_folder / "config.json").read_text("utf-8"))
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


# Largest share of padding in a batch of rows of similar length.
MOST_PADDING = 0.05


@dataclass(frozen=True, slots=True)
class Composition:
    """Batches of row indices that contain each row exactly once; `name` describes them in a fingerprint."""

    name: str
    batches: tuple[NDArray[np.int64], ...]


def compose(
    lengths: NDArray[np.int64],
    batch_size: int,
    variant: str,
    padding: str = "",
    batch_tokens: int | None = None,
    *,
    packed: bool = False,
    by_length: bool = False,
) -> Composition:
    """Group rows of `lengths` tokens into batches of at most `batch_size` rows, in their own order.

    With `batch_tokens`, a batch also has at most that many tokens, padding included; a longer row is a batch by itself.
    `packed`: the rows of a batch have no padding. `by_length`: rows of similar length, so that at most 5 % of a batch
    is padding. Raises UnsupportedScoreError for an unknown variant.

    The variant of the noise floor changes neighbours and padding: the rows are sorted by length, longest first (of
    batches by length: shortest first), in batches of a quarter of the size (of batches by length: of the largest one);
    where that is one row, of up to eight rows of any length.
    """
    if variant not in VARIANTS:
        raise UnsupportedScoreError(f"unknown variant {variant!r}; variants: {', '.join(map(repr, VARIANTS))}")
    most = math.inf if batch_tokens is None else batch_tokens
    falling = np.argsort(-lengths, kind="stable").astype(np.int64)
    order, name, most_padding = np.arange(lengths.size, dtype=np.int64), "in order", 1.0
    if by_length:
        order, name, most_padding = falling, "by length", MOST_PADDING
    rows = batch_size
    if variant == NOISE_FLOOR_VARIANT:
        order, name = falling, "by length"
        if by_length:
            plain = _cut(falling, lengths, rows, most, most_padding, packed)
            rows = max((batch.size for batch in plain), default=1)
            order, name = falling[::-1], "by length from the shortest"
        rows, most_padding = (8, 1.0) if rows == 1 else (max(1, rows // 4), most_padding)
    batches = _cut(order, lengths, rows, most, most_padding, packed)
    bounds = f"{rows} rows" if batch_tokens is None else f"up to {rows} rows or {batch_tokens} tokens"
    described = f"{name}, {bounds}" if by_length else f"{bounds} {name}"
    return Composition(name=f"{described}, {padding}" if padding else described, batches=batches)


def _cut(
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    rows: int,
    tokens: float,
    most_padding: float,
    packed: bool,
) -> tuple[NDArray[np.int64], ...]:
    """Cut `order` before each row for which the batch has no room."""
    cuts, start, real, width = [], 0, 0, 0
    for index, row in enumerate(order.tolist()):
        length = int(lengths[row])
        wide = max(width, length)
        padded = real + length if packed else wide * (index - start + 1)
        full = index - start == rows or padded > tokens or padded - real - length > most_padding * padded
        if index > start and full:
            cuts.append(index)
            start, real, wide = index, 0, length
        real, width = real + length, wide
    return tuple(part.copy() for part in np.split(order, cuts) if part.size)
