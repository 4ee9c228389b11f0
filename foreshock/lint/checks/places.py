"""Locate the mismatch: by token id, or in turns, positions, lags, ends of responses, data sources, engines or rollouts.

A concentration is an observation, not a cause. It is reported if one part of the tokens has most of all k3, at a mean
far above that of the rest, in several prompts. Sums are over an even sample of the rollouts. Single tokens with a large
|d| carry most of a healthy k3, so a second measure must agree: the mean √|d| over uncertain tokens, which one token in
thirty hardly changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from foreshock.api.steps import LintExampleRecord
from foreshock.healthy_ranges import LARGEST_OF_NUMERICS, required_range
from foreshock.lint.checks.pairs import Pairs, PairsByGroup, if_invalid
from foreshock.lint.checks.temperature import two_temperatures
from foreshock.lint.checks.token_ids import by_token_id
from foreshock.lint.counting import LARGEST_D, Bools, Counting, Counts, Floats, Ints, Table
from foreshock.lint.judging import Check, Clean, Finding, Judging, Outcome, format_number, format_percent
from foreshock.measures.inputs import lag_of_tokens, truncated_rollouts
from foreshock.measures.statistics.clusters import keys_of_texts
from foreshock.rollouts.arrays import row_sums, take_rows
from foreshock.rollouts.schema import are_log_probs

_PLACES = ("turn", "position", "end_of_truncated", "end_of_stopped", "lag", "rollout", "data_source", "engine")
# Lengths: of the prompt, and up to a token, with the prompt and without; summed only if k3 is large enough. The buckets
# are 2^n steps of an octave.
_STEPS = {"prompt_length": 5, "context": 2, "response": 2}
# The place in the logged order, modulo a number that many sizes of packs divide; the part of the sequence.
_ROWS, _FRACTIONS = 24, 16
_DIMENSIONS = (*_PLACES, *_STEPS, "fraction")
# The dimensions whose buckets are names, and their batch fields. The names are kept as examples.
_NAMED = {"data_source": "data_sources", "engine": "engine_ids"}
_ROLLOUTS_OF = " rollouts of the "
OF_ENGINE = f"{_ROLLOUTS_OF}engine "  # in the title of a place that is one engine
# Buckets of a dimension are 0 to 999; a key is 1000 times the dimension's number plus the bucket.
_WIDTH = 1000
_MOST_TOKENS = 1 << 18
_MOST_NAMES = 64
# A token is uncertain if either log-prob is below this.
_UNCERTAIN = -0.1
# Position and distance from the end, in powers of two: bucket b holds 2^(b − 1) to 2^b − 1.
_FAR_FROM_END = 5
# Under this name an example says that turns were derived from the mask.
_OF_MASK = "turns_of_mask"
_DENSE = required_range("k3_kl", "dense").warning
assert _DENSE is not None
_LEAST_K3 = _DENSE / 4.0
_MOE = required_range("k3_kl", "moe").warning
assert _MOE is not None
_FAR_OFF = _MOE
# Engines of one model do not differ so much, whatever its kind.
_LEAST_OF_ENGINE = float(_DENSE)
# Half octaves above the median from which on a level is far above most.
_HIGH = 4
# A rollout is wrong inside if so many uncertain tokens come first, each with a |d| below a tenth of its mean. Of
# normal d, one token in sixteen is so small: so many in a row are no chance.
_LEAST_AGREEING, _OF_MEAN = 5, 0.1
_MOSTLY_INSIDE, _LEAST_INSIDE = 0.6, 4
# The level of a rollout is (mean √|d|)², in half octaves from 2^−40.
_LOWEST_LEVEL = -40


class SumsByPlace(Table):
    """Sums over the tokens at each place; a key holds the dimension and the bucket. k3 is in nats, `roots` is Σ √|d|
    over uncertain tokens. A group in several shards counts once per shard.
    """

    COLUMNS = ("tokens", "uncertain", "k3", "roots", "rollouts", "groups")

    @classmethod
    def of_segments(cls, segments: _Segments, groups: Ints, codes: Mapping[str, Ints]) -> Self:
        """Return the sums of S segments by their bucket `codes` [S] of each dimension; a code of −1 is left out.

        `groups` [N] numbers the group of each rollout, from 0.
        """
        places = np.array(
            [np.where(code < 0, -1, _WIDTH * _DIMENSIONS.index(name) + code) for name, code in codes.items()]
        )
        of_dimension, segment = np.nonzero(places >= 0)
        keys, slots = np.unique(places[of_dimension, segment], return_inverse=True)
        sums = [np.bincount(slots, column[segment], keys.size) for column in segments.sums.T]
        for numbers in (segments.rows, groups[segments.rows]):
            width = int(numbers.max(initial=0)) + 1
            sums.append(np.bincount(np.unique(slots * width + numbers[segment]) // width, minlength=keys.size))
        return cls.of(keys, *sums)

    def of_dimension(self, dimension: str) -> tuple[Ints, NDArray[np.float64]]:
        """Return the buckets [B] of a dimension and their rows [B, 6]."""
        chosen = self.rows(self.keys // _WIDTH == _DIMENSIONS.index(dimension))
        return (chosen.keys % _WIDTH).astype(np.int64), chosen.values


class BegunInside(Table):
    """The number of rollouts of a level, the key, whose first tokens agree and later ones do not."""

    COLUMNS = ("rollouts",)


class RolloutsByRow(Table):
    """Rollouts, those that are far off, and the tokens and k3 of either, by the place in the logged order, the key."""

    COLUMNS = ("rollouts", "off", "tokens", "k3", "tokens_off", "k3_off")


class SumsBySize(Table):
    """Uncertain tokens, their k3, and those with the least log-prob of a side in their shard, by |d|, the key: half
    octaves from 2^−40. Of tokens with a k3 above `_LEAST_OF_ENGINE`."""

    COLUMNS = ("tokens", "k3", "least")


@dataclass
class Places(Counts):
    """Sums by place over an even sample of the rollouts, and by the size of d."""

    sizes: SumsBySize = field(default_factory=SumsBySize)
    by_row: RolloutsByRow = field(default_factory=RolloutsByRow)
    sums: SumsByPlace = field(default_factory=SumsByPlace)
    begun_inside: BegunInside = field(default_factory=BegunInside)

    def add_batch(self, counting: Counting) -> None:
        """Sum over the places of a batch; names of data sources and engines are kept as examples, under their codes."""
        batch = counting.batch
        behaviour, target = batch.rollout_log_probs, batch.trainer_log_probs
        if behaviour is None or target is None or not batch.num_tokens:
            return
        rows = np.arange(0, batch.num_rollouts, max(1, -(-batch.num_tokens // _MOST_TOKENS)))
        rows = rows[batch.response_lengths[rows] > 0]
        positions, offsets = take_rows(batch.response_offsets, rows)
        of_tokens = {
            name: np.clip(column[positions].astype(np.int64), 0, _WIDTH - 1)
            for name, column in (("turn", batch.turn), ("lag", lag_of_tokens(batch)))
            if column is not None
        }
        mask = None if batch.response_mask is None else batch.response_mask[positions] != 0
        if batch.turn is None and mask is not None and not mask.all():
            of_tokens["turn"] = turns_of_mask(mask, offsets)
            counting.add_example(_OF_MASK, "")
        tokens = _columns(behaviour[positions], target[positions], mask)
        # Without the tokens above it the mean of the others is below it: smaller ones are nobody's reason.
        some = np.flatnonzero(tokens.uncertain & (tokens.k3 > _LEAST_OF_ENGINE))
        sizes = np.log2(np.maximum(np.square(tokens.roots[some]), 2.0 ** (_LOWEST_LEVEL + 1)))
        sides = (side[positions[some]] for side in (behaviour, target))
        is_least = np.logical_or.reduce([each <= each.min(initial=0.0) + _FLOOR for each in sides])
        self.sizes += SumsBySize.of(np.floor(2.0 * (sizes - _LOWEST_LEVEL)), 1.0, tokens.k3[some], is_least)
        segments = _segments(tokens, offsets, of_tokens)
        near_end = np.minimum(_octave(offsets[segments.rows + 1] - 1 - segments.starts), _FAR_FROM_END)
        truncated = truncated_rollouts(batch)[0][rows][segments.rows]
        levels = _levels(segments, rows.size)
        _keep_high(counting, rows, levels)
        begun = _begun_inside(tokens, offsets) & (levels >= 0)
        self.begun_inside += BegunInside.of(levels[begun], 1.0)
        codes = {
            "position": _octave(segments.starts - offsets[segments.rows]),
            "end_of_truncated": np.where(truncated, near_end, -1),
            "end_of_stopped": np.where(truncated, -1, near_end),
            "rollout": levels[segments.rows],
        }
        codes |= {name: column[segments.starts] for name, column in of_tokens.items()}
        for name in _NAMED:
            if (named := _codes_of_names(counting, name, rows)) is not None:
                codes[name] = named[segments.rows]
        _, groups = np.unique(counting.group_keys[rows], return_inverse=True)
        self.sums += SumsByPlace.of_segments(segments, groups, codes)
        count, _, k3, _ = segments.sums.sum(axis=0)
        if k3 > _LEAST_K3 * count:
            of_row = [np.bincount(segments.rows, segments.sums[:, column], rows.size) for column in (0, 2)]
            is_off = of_row[1] > _FAR_OFF * of_row[0]
            self.by_row += RolloutsByRow.of(rows % _ROWS, 1.0, is_off, *of_row, *(each * is_off for each in of_row))
            prompts, at = np.diff(batch.prompt_offsets)[rows], np.arange(offsets[-1])
            at -= np.repeat(offsets[:-1], np.diff(offsets))
            context = at + np.repeat(prompts, np.diff(offsets))
            of_tokens = {"context": _step_of(context, "context"), "response": _step_of(at, "response")}
            of_tokens["fraction"] = _FRACTIONS * context // np.repeat(prompts + np.diff(offsets), np.diff(offsets))
            segments = _segments(tokens, offsets, of_tokens)
            codes = {name: column[segments.starts] for name, column in of_tokens.items()}
            codes["prompt_length"] = _step_of(prompts, "prompt_length")[segments.rows]
            self.sums += SumsByPlace.of_segments(segments, groups, codes)

    def across_steps(self) -> Self:
        """Return the sums without levels of rollouts, which are compared within a step only."""
        of_rollouts = self.sums.keys // _WIDTH == _DIMENSIONS.index("rollout")
        return replace(self, sums=self.sums.rows(~of_rollouts), begun_inside=BegunInside())


def turns_of_mask(mask: Bools, offsets: Ints) -> Ints:
    """Return the turn of each token, [T], of rollouts that log none: the model's tokens between others are one turn."""
    begins = mask.copy()
    begins[1:] &= ~mask[:-1]
    first = offsets[:-1][np.diff(offsets) > 0]
    begins[first] = mask[first]
    before = np.repeat(np.r_[0, np.cumsum(begins)][offsets[:-1]], np.diff(offsets))
    turns: Ints = np.clip(np.cumsum(begins) - before - 1, 0, _WIDTH - 1)
    return turns


class _Columns(NamedTuple):
    """Of T tokens: which are compared, which of these are uncertain, k3, and √|d| of uncertain ones; 0 at others."""

    keep: Bools
    uncertain: Bools
    k3: NDArray[np.float64]
    roots: NDArray[np.float64]


class _Segments(NamedTuple):
    """S segments of the tokens: where each begins, the row of its rollout, and the sums of the columns, [S, 4]."""

    starts: Ints
    rows: Ints
    sums: NDArray[np.float64]


def _columns(mu: Floats, pi: Floats, mask: Bools | None) -> _Columns:
    keep = are_log_probs(mu) & are_log_probs(pi)
    if mask is not None:
        keep &= mask
    d = np.subtract(pi, mu, dtype=np.float64)
    d[~keep] = 0.0
    np.clip(d, -LARGEST_D, LARGEST_D, out=d)
    k3 = np.expm1(d)
    k3 -= d
    uncertain = keep & (np.minimum(mu, pi) < np.float32(_UNCERTAIN))
    roots = np.sqrt(np.abs(d, out=d), out=d)
    roots *= uncertain
    return _Columns(keep, uncertain, k3, roots)


def _segments(tokens: _Columns, offsets: Ints, of_tokens: Mapping[str, Ints]) -> _Segments:
    """Return the segments with a compared token; they begin at powers of two, and where a column [T] changes."""
    first, end = offsets[:-1, None], offsets[1:, None]
    powers = 1 << np.arange(np.diff(offsets).max(initial=1).item().bit_length())
    changes = np.zeros(offsets[-1], np.bool_)
    changes[first] = True
    changes[np.minimum(first + powers, end - 1)] = True
    changes[np.maximum(end - (1 << np.arange(_FAR_FROM_END)), first)] = True
    for column in of_tokens.values():
        changes[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(changes)
    sums = [np.add.reduceat(each.view(np.uint8), starts, dtype=np.int64) for each in tokens[:2]]
    filled = sums[0] > 0
    table = np.stack([*sums, *(np.add.reduceat(each, starts) for each in tokens[2:])], axis=1)
    return _Segments(starts[filled], np.searchsorted(offsets, starts[filled], "right") - 1, table[filled])


def _begun_inside(tokens: _Columns, offsets: Ints) -> Bools:
    """Return whether the first uncertain tokens of each rollout agree, by its own mean |d|, and later ones do not."""
    d = np.square(tokens.roots[tokens.uncertain])
    ends = np.r_[0, np.cumsum(tokens.uncertain)][offsets]
    counts = np.diff(ends)
    differs = d >= np.repeat(_OF_MEAN * row_sums(d, ends) / np.maximum(counts, 1), counts)
    # The number of uncertain tokens before the first one that differs.
    places = np.r_[np.flatnonzero(differs), d.size]
    first = places[np.searchsorted(places, ends[:-1])] - ends[:-1]
    return np.asarray((first >= _LEAST_AGREEING) & (first < counts))


def _keep_high(counting: Counting, rows: Ints, levels: Ints) -> None:
    """Keep the rollouts with a level far above most as examples of the level, each with its prompt group."""
    high = np.flatnonzero(levels > np.median(levels) + _HIGH) if levels.size else levels
    for place in high.tolist():
        name, row = f"rollout {levels[place]}", int(rows[place])
        group = None if counting.batch.group_ids is None else counting.batch.group_ids[row]
        counting.add_example(name, counting.batch.sample_ids[row], text=group or "")


def _octave(values: Any) -> Ints:
    """Return 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on."""
    return np.frexp(np.asarray(values, np.float64))[1].astype(np.int64)


def _step_of(lengths: Any, dimension: str) -> Ints:
    """Return the step of each length: the length itself at first, then so many for each octave."""
    octaves = np.maximum(_octave(lengths) - 1 - _STEPS[dimension], 0)
    return np.asarray((octaves << _STEPS[dimension]) + (lengths >> octaves))


def _first_of_step(steps: Any, dimension: str) -> Ints:
    """Return the least length of each step."""
    octaves = np.maximum((steps >> _STEPS[dimension]) - 1, 0)
    return np.asarray((steps - (octaves << _STEPS[dimension])) << octaves)


def _levels(segments: _Segments, rows: int) -> Ints:
    """Return the level of each rollout, [rows]; −1 for one without an uncertain token."""
    counts, roots = (np.bincount(segments.rows, segments.sums[:, column], rows) for column in (1, 3))
    level = np.floor(2.0 * (2.0 * np.log2(np.maximum(roots / np.maximum(counts, 1), 1e-9)) - _LOWEST_LEVEL))
    return np.where(counts > 0, np.clip(level, 0, _WIDTH - 1), -1).astype(np.int64)


def _codes_of_names(counting: Counting, dimension: str, rows: Ints) -> Ints | None:
    """Return a code for the name of each row, equal in all shards; None if there are no names, too many, or a clash."""
    named: list[str | None] | None = getattr(counting.batch, _NAMED[dimension])
    if named is None:
        return None
    names = [named[row] or "" for row in rows.tolist()]
    unique = sorted(set(names))
    codes = dict(zip(unique, (keys_of_texts(unique) % _WIDTH).tolist(), strict=True))
    if len(unique) > _MOST_NAMES or len(set(codes.values())) < len(unique):
        return None
    for name, code in codes.items():
        counting.add_example(f"{dimension} {code}", name)
    return np.array([codes[name] for name in names], np.int64)


# The part has this share of all k3, and a mean this many times that of the rest: in k3, and in (mean √|d|)².
_SHARE, _TIMES, _TIMES_OF_ROOTS = 0.6, 10.0, 3.0
_MOST_TOKENS_SHARE, _LEAST_UNCERTAIN, _LEAST_GROUPS = 0.9, 20, 3
_MOST_ROLLOUTS = 0.6
_MOST_ROLLOUTS_NAMED = 12
# Rollouts with this share of the tokens of their prompts are all those of these prompts.
_NEARLY_ALL = 0.9
_BY_CHANCE = 2e-3
# A length is named instead of another place if it separates the tokens so many times as well, or nearly as well as the
# rollouts, which are chosen by their own k3.
_BETTER, _AS_ROLLOUTS = 1.1, 0.9
# Rollouts differ a lot in healthy runs. Affected rollouts stand apart: few others have a level within a factor of 2.8
# in |d| below theirs, such as rollouts of which only the last tokens are affected.
_GAP, _BETWEEN = 3, 0.25


_LEAST_LAGS, _LEAST_POSITIONS, _TIMES_OF_LAGS, _TIMES_OF_POSITIONS = 2, 4, 2.0, 3.0
_EVEN, _MEAN_NEAR, _MEAN_T = 2.0, 0.02, 4.0
# The usual |d| divided by the mean of −log μ: at least 0.39 for rows of other rollouts, at most 0.25 for FP8, 0.3 to
# 0.7 for dropout, and 0.4 for weights of seven steps ago.
_LIKE_OTHER_ROWS = 0.3
# Nats: dropout of 0.1 to 0.3 makes no more.
_LARGEST_OF_DROPOUT = 1.0
_STATE_BEFORE = (
    " It looks as if π and μ had other contexts before the response: another prompt (a token or a template twice or "
    "missing), or a cache of the prompt made with other weights."
)
_HINTS = {
    "prompt_length": " One side may cut prompts, or pad them in another way.",
    "turn": " Look at what the trainer sees between turns: text that is tokenised again, other templates.",
    "engine": " Compare what this engine holds, and how it was started, with the others.",
    "lag": " What grows with the lag is staleness and not numerics.",
    "end_of_truncated": " Look at what the engine does near its length limit, such as speculative drafts.",
}
_OF_LATE_TOKENS = (
    " Look at what depends on the position: a window of attention, the scaling of RoPE, a cache, a penalty on tokens "
    "that occurred before."
)
_OF_PADDING = (
    " Compare padding and positions: if position ids count the padding on the left, only the longest prompts of a "
    "batch are right."
)
_OF_PACKS = (
    " Rollouts that share a row or a batch may see each other: look at the attention mask of packs, and at what is "
    "done for each so many rows."
)
_PACKS = (2, 3, 4, 6, 8, 12)
_ORDINALS = {2: "second", 3: "third", 4: "fourth", 6: "sixth", 8: "eighth", 12: "twelfth"}
_FEW_TOKENS, _FEW_PARTS, _WIDE, _MOST_LEAST = 0.25, 5, 0.5, 0.3
_FLOOR = 1e-4
_OF_CHUNKS = "so do borders of chunks (context parallelism)."
_TO_LABELS = "Compare the labels there: a shift within chunks, packs or turns gives the last token another one's."
_TO_DOCTOR = "`foreshock doctor` with the step's weights tries what could make it."


_OLD_WEIGHTS = "like weights of another step"
_TO_OLD_WEIGHTS = (
    "`foreshock doctor` with the weights of this step, of earlier ones and of the next one names those that a side "
    "has. Check when the trainer scores: before its update, or after it."
)
_LOST_INSIDE = "what the two sides have before it is not the same from there on (tokens lost, or tokenised again)."
_OF_STALENESS = (
    "Let the engine get new weights more often, let fewer updates happen between sampling and training, or correct for "
    "the lag with importance weights (token TIS)."
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the tokens, `low` to `high` of a dimension's buckets, against the others."""

    dimension: str
    low: int
    high: int
    last: int
    tokens: float
    rollouts: float
    k3: float
    k3_of_rest: float
    share: float
    share_of_tokens: float
    separation: float  # how much likelier √|d| is by two exponential distributions than by one, in nats

    @property
    def times(self) -> float:
        return self.k3 / max(self.k3_of_rest, 1e-9)

    @property
    def lengths(self) -> tuple[int, int]:
        """The least and the largest length of a part by length."""
        first = _first_of_step(np.array([self.low, self.high + 1]), self.dimension)
        return int(first[0]), int(first[1]) - 1


def _check(judging: Judging) -> Outcome:
    """Check if one part of the tokens has most of the mismatch; the part that differs most is reported."""
    sums, healthy = judging[Places].sums, judging.healthy_k3
    if judging[Pairs].mean_k3 > healthy and (of_ids := by_token_id(judging)) is not None:
        return of_ids
    # A single rollout is a place if the step is beyond its range by it.
    of_rollouts = 1 if judging[Pairs].mean_k3 > healthy else _LEAST_GROUPS
    least = dict.fromkeys(_PLACES, _LEAST_GROUPS) | {"rollout": of_rollouts}
    of_part = dict.fromkeys(_PLACES, healthy) | {"engine": min(healthy, _LEAST_OF_ENGINE)}
    found = [part for name in _PLACES for part in _parts(sums, name, least[name]) if part.k3 > of_part[name]]
    best = max(found, key=lambda part: (part.share >= 0.9, part.times * part.share), default=None)
    if best is not None and best.dimension == "rollout":
        # Prefer a data source or an engine that names the same rollouts.
        named = (part for part in found if part.dimension in _NAMED and part.share >= 0.9 * best.share)
        best = max(named, key=lambda part: part.share, default=best)
    best = _by_length(best, judging) or best
    # Most of the tokens are no place, and rollouts are one that their order may explain.
    is_wide = best is None or best.share_of_tokens > _WIDE
    if (is_wide or (best is not None and best.dimension == "rollout")) and (of_rows := _by_row(judging)) is not None:
        return of_rows
    if is_wide and (few := _few_tokens(judging)) is not None:
        return few
    if best is None:
        return _trend(sums, "lag", healthy) or _trend(sums, "position", healthy) or Clean()
    hint = _HINTS.get(best.dimension, "")
    if best.dimension in ("position", "context", "response") and best.high == best.last:
        hint = _OF_LATE_TOKENS
    elif best.dimension == "prompt_length" and best.high < best.last:
        hint = _OF_PADDING
    title = (
        f"k3 averages {format_number(best.k3)} {_words(best, judging)}, and {format_number(best.k3_of_rest)} elsewhere"
    )
    seen = (
        f"{format_percent(best.share_of_tokens, 1)} of the tokens have {format_percent(best.share, 1)} of all k3.{hint}"
    )
    where = None
    if best.dimension == "rollout":
        where = _rollouts_of(best, judging)
        seen += f" It is {where[0].sample_id}." if len(where) == best.rollouts == 1 else ""
        title += _prompts_of(best, judging[Pairs].by_group, where)
        begun = judging[Places].begun_inside
        inside = int(begun.values[(begun.keys >= best.low) & (begun.keys <= best.high)].sum())
        if inside >= max(_LEAST_INSIDE, _MOSTLY_INSIDE * best.rollouts):
            seen += f" In {inside} of them it begins inside the response: {_LOST_INSIDE}"
    elif best.dimension == "turn":
        of_mask = "are those of the response mask, " if judging.evidence.where(_OF_MASK) else "are "
        seen += f" Turns {of_mask}counted from 0."
    if best.k3_of_rest > healthy:
        seen += " The others are above the healthy range too."
    elif isinstance(two_temperatures(judging), Finding):
        seen += " It looks like another temperature there."
    numbers = {"k3": best.k3, "k3_elsewhere": best.k3_of_rest, "tokens": best.tokens, "share_of_k3": best.share}
    ends = best.lengths if best.dimension in _STEPS else (best.low, best.high)
    numbers |= {f"{best.dimension}_from": float(ends[0]), f"{best.dimension}_to": float(ends[1])}
    remedy = f"{hint.strip()} {_TO_DOCTOR}" if hint else ""
    if best.dimension == "lag":
        remedy = _OF_STALENESS if best.high == best.last else ""
    return Finding("warning", seen, numbers, where=where, title=title, remedy=remedy)


def _by_length(best: _Part | None, judging: Judging) -> _Part | None:
    """Return the part by a length that separates the tokens better than `best`, the best of other places."""
    sums, prompts = judging[Places].sums, judging[Pairs].by_group.column("prompt_tokens")
    names = _STEPS if prompts.min(initial=np.inf) < prompts.max(initial=0) else ("response",)
    parts = [part for name in names for part in _parts(sums, name) if part.k3 > judging.healthy_k3]
    # A position in the response needs no prompts to explain it.
    found = max(
        parts, key=lambda part: part.separation * (_BETTER if part.dimension == "response" else 1.0), default=None
    )
    if found is None or (best is not None and found.share < _NEARLY_ALL * best.share):
        return None
    if found.dimension == "prompt_length":
        inside = int(((prompts >= found.lengths[0]) & (prompts <= found.lengths[1])).sum())
        if math.comb(prompts.size, inside) * _BY_CHANCE < 1.0:
            return None
    times = 0.0 if best is None else _AS_ROLLOUTS if best.dimension == "rollout" else _BETTER
    return found if best is None or found.separation > times * best.separation else None


def _by_row(judging: Judging) -> Finding | None:
    """Return the finding if nearly all rollouts are far off but each nth in the logged order, or each nth only."""
    table = judging[Places].by_row
    if table.keys.size < _ROWS:
        return None
    for size in _PACKS:
        rollouts, off, tokens, k3, tokens_off, k3_off = np.array(
            [table.values[rest::size].sum(axis=0) for rest in range(size)]
        ).T
        share = off / rollouts
        low, high = share <= 1.0 - _NEARLY_ALL, share >= _NEARLY_ALL
        if not (low | high).all() or 1 not in (low.sum(), high.sum()) or rollouts.min() < _LEAST_GROUPS:
            continue
        far, rest = k3_off.sum() / tokens_off.sum(), (k3 - k3_off).sum() / max((tokens - tokens_off).sum(), 1.0)
        each, others = (rest, far) if low.sum() == 1 else (far, rest)
        title = (
            f"k3 averages {format_number(each)} in every {_ORDINALS[size]} rollout in the logged order, and "
            f"{format_number(others)} in the others"
        )
        seen = f"{int(off.sum()):,} of {int(rollouts.sum()):,} rollouts are far off.{_OF_PACKS}"
        numbers = {"rows": float(size), "k3": far, "k3_elsewhere": rest}
        return Finding("warning", seen, numbers, title=title, remedy=f"{_OF_PACKS.strip()} {_TO_DOCTOR}")
    return None


def _few_tokens(judging: Judging) -> Finding | None:
    """Return the finding if few uncertain tokens have nearly all k3 and the others are healthy: no mismatch of
    weights or numerics is so."""
    sizes, pairs = judging[Places].sizes.values[::-1], judging[Pairs]
    if pairs.mean_k3 <= _TIMES * judging.healthy_k3 or not sizes.size:
        return None
    everything = judging[Places].sums.of_dimension("position")[1].sum(axis=0)
    tokens, k3, least = sizes.cumsum(axis=0).T
    rest = (everything[2] - k3) / np.maximum(everything[0] - tokens, 1.0)
    is_few = (tokens >= _LEAST_UNCERTAIN) & (tokens <= _FEW_TOKENS * everything[1])
    # The tokens below a floor under one side all have its value.
    is_few &= least <= _MOST_LEAST * tokens
    found = [np.flatnonzero(is_few & (rest <= most)) for most in (_LEAST_OF_ENGINE, judging.healthy_k3)]
    place = next((int(each[0]) for each in found if each.size), None)
    if place is None:
        return None
    buckets, parts = judging[Places].sums.of_dimension("fraction")
    order = np.argsort(-parts[:, 2])
    held = int(np.argmax(parts[order, 2].cumsum() >= _NEARLY_ALL * parts[:, 2].sum())) + 1
    count = int(tokens[place])
    seen = (
        f"{count:,} of {int(everything[0]):,} tokens ({format_percent(count, everything[0])}) have "
        f"{format_percent(k3[place], everything[2])} of all k3. It looks as if at these tokens one side had the "
        "log-prob of another token, or another context."
    )
    if parts.shape[0] >= _FRACTIONS // 2 and held <= _FEW_PARTS:
        at = ", ".join(f"{100 * int(each) // _FRACTIONS} %" for each in np.sort(buckets[order[:held]]))
        seen += f" They stand at about {at} of the sequence: {_OF_CHUNKS}"
    title = f"few tokens have nearly all of the mismatch: without them k3 is {format_number(rest[place])}"
    numbers = {"tokens": float(count), "share_of_k3": k3[place] / everything[2], "k3_elsewhere": float(rest[place])}
    return Finding("warning", seen, numbers, title=title, remedy=f"{_TO_LABELS} {_TO_DOCTOR}")


def _rollouts_of(part: _Part, judging: Judging) -> tuple[LintExampleRecord, ...]:
    """Return some of the part's rollouts, each with its prompt group."""
    kept = (each for level in range(part.high, part.low - 1, -1) for each in judging.evidence.where(f"rollout {level}"))
    return tuple(kept)[:_MOST_ROLLOUTS_NAMED]


def _prompts_of(part: _Part, groups: PairsByGroup, where: tuple[LintExampleRecord, ...]) -> str:
    """Return the prompts of the part's rollouts in words, if these prompts have few other rollouts."""
    tokens, k3 = groups.column("tokens"), groups.column("k3")
    affected = k3 > math.sqrt(part.k3 * max(part.k3_of_rest, 1e-9)) * np.maximum(tokens, 1)
    count, share = int(affected.sum()), float(tokens[affected].sum() / max(tokens.sum(), 1))
    if count == tokens.size or count >= part.rollouts or part.share_of_tokens < _NEARLY_ALL * share:
        return ""
    names = sorted({each.text for each in where if each.text})
    named = f" ({', '.join(names)}{', …' if len(names) < count else ''})" if names else ""
    return f": all those of {count} prompt{'s' if count > 1 else ''}{named}"


def _trend(sums: SumsByPlace, dimension: str, healthy: float) -> Finding | None:
    """Return a finding if k3 rises or falls steadily over the buckets of a dimension."""
    buckets, table = sums.of_dimension(dimension)
    filled = (table[:, 1] >= 2 * _LEAST_UNCERTAIN) & (table[:, 5] >= _LEAST_GROUPS)
    buckets, table = buckets[filled], table[filled]
    if buckets.size < (_LEAST_LAGS if dimension == "lag" else _LEAST_POSITIONS):
        return None
    k3, roots = table[:, 2] / table[:, 0], np.square(table[:, 3] / table[:, 1])
    rises = k3[-1] > k3[0]
    order = slice(None) if rises else slice(None, None, -1)
    steady = all((np.diff(values[order]) > -0.1 * values[order][1:]).all() for values in (k3, roots))
    least, most = k3[order][0], k3[order][-1]
    times = _TIMES_OF_LAGS if dimension == "lag" else _TIMES_OF_POSITIONS
    if not steady or most < healthy or most < times * least or roots[order][-1] < math.sqrt(times) * roots[order][0]:
        return None
    if dimension == "lag":
        levels = ", ".join(f"{format_number(value)} at lag {lag}" for lag, value in zip(buckets, k3, strict=True))
        seen = f"k3 averages {levels}.{_HINTS['lag'] if rises else ''}"
    else:
        first = 2 ** (int(buckets[-1]) - 1)
        seen = (
            f"k3 averages {format_number(k3[0])} at the first token, {format_number(k3[-1])} from token {first} on."
            f"{_OF_LATE_TOKENS if rises else _STATE_BEFORE}"
        )
    numbers = {"k3_first": float(k3[0]), "k3_last": float(k3[-1])}
    along = "lag" if dimension == "lag" else "position in the response"
    remedy = _OF_STALENESS if dimension == "lag" else f"{_OF_LATE_TOKENS.strip()} {_TO_DOCTOR}"
    return Finding(
        "warning", seen, numbers,
        title=f"k3 {'rises' if rises else 'falls'} with the {along}",
        remedy=remedy if rises else "",
    )  # fmt: skip


def _check_everywhere(judging: Judging) -> Outcome:
    pairs = judging[Pairs]
    _, table = judging[Places].sums.of_dimension("position")
    mean, t = pairs.by_group.mean_and_t("ratio_minus_one")
    filled = table[:, 1] >= _LEAST_UNCERTAIN * 2
    levels = np.square(table[filled, 3] / table[filled, 1])
    if pairs.mean_k3 <= judging.healthy_k3 or levels.size < 2 or levels.max() > _EVEN * levels.min():
        return Clean()
    ratio = format_number(1.0 + mean)
    sides = f"π is above μ as much as below it (mean ρ {ratio})"
    if abs(mean) >= _MEAN_NEAR and abs(t) >= _MEAN_T:
        # Not significant enough for `mean_ratio`: with that finding, this check is not made.
        sides = f"mean ρ is {ratio}, which these prompt groups do not tell from 1"
    looks = [_OLD_WEIGHTS]
    if float(np.median(levels)) > _LIKE_OTHER_ROWS * pairs.surprisal / pairs.tokens:
        looks = ["like weights of another step or model", "like rows in another order"]
        looks[:0] = ["like dropout"] if pairs.mean_k3 <= _LARGEST_OF_DROPOUT else []
    elif pairs.mean_k3 <= LARGEST_OF_NUMERICS:
        looks[:0] = ["like numerics"]
    *others, last = looks
    words = f"{', '.join(others)} or {last}; the data alone do not tell which" if others else last
    seen = f"k3 averages {format_number(pairs.mean_k3)}, at every position about alike, and {sides}. It looks {words}."
    remedy = _TO_OLD_WEIGHTS if looks == [_OLD_WEIGHTS] else ""
    return Finding("info", seen, {"k3": pairs.mean_k3, "mean_ratio": 1.0 + mean}, remedy=remedy)


# In the order in which one of them is named.
_EXPLANATIONS = (
    "processed_log_probs",
    "mass_outside",
    "mean_ratio",
    "temperature_of_trainer",
    "penalty_of_engine",
    "mismatch_after_id",
    "mismatch_by_place",
    "taken_after_update",
    "temperatures_differ",
)


def _if_explained(judging: Judging) -> str:
    why = next((f"explained by {name}" for name in _EXPLANATIONS if judging.found(name)), "")
    return if_invalid(judging) or why


def _parts(sums: SumsByPlace, dimension: str, least_groups: int = _LEAST_GROUPS) -> Iterator[_Part]:
    """Yield the ranges of a dimension's buckets that stand out: the first ones, the last ones, or a single name."""
    buckets, table = sums.of_dimension(dimension)
    size, everything = buckets.size, table.sum(axis=0)
    if dimension.startswith("end_of"):
        # The rest includes the tokens of all other responses.
        cuts = [(0, stop) for stop in range(1, size) if buckets[stop - 1] < _FAR_FROM_END]
        everything = sums.of_dimension("position")[1].sum(axis=0)
    elif dimension in _NAMED:
        cuts = [(start, start + 1) for start in range(size)]
    else:
        cuts = [(start, size) for start in range(1, size)]
        cuts += [] if dimension == "rollout" else [(0, stop) for stop in range(1, size)]
    for start, stop in cuts:
        inside = table[start:stop].sum(axis=0)
        outside = np.maximum(everything - inside, 0.0)
        tokens, uncertain, k3, roots, rollouts, groups = inside
        if dimension not in ("rollout", "prompt_length"):
            # A group may be in several buckets: the largest number in one bucket is a lower bound.
            groups = table[start:stop, 5].max()
        if min(uncertain, outside[1]) < _LEAST_UNCERTAIN or groups < least_groups:
            continue
        if tokens > _MOST_TOKENS_SHARE * everything[0]:
            continue
        if dimension == "rollout":
            between = (buckets >= buckets[start] - _GAP) & (buckets < buckets[start])
            if rollouts > _MOST_ROLLOUTS * everything[4] or table[between, 4].sum() > _BETWEEN * rollouts:
                continue
        share, rest = k3 / everything[2] if everything[2] > 0 else 0.0, outside[2] / outside[0]
        roots_rest = (outside[3] / outside[1]) ** 2
        if share < _SHARE or k3 / tokens < _TIMES * rest or (roots / uncertain) ** 2 < _TIMES_OF_ROOTS * roots_rest:
            continue
        of_all, of_inside, of_rest = (
            each[1] * math.log(max(each[3] / each[1], 1e-9)) for each in (everything, inside, outside)
        )
        yield _Part(
            dimension, int(buckets[start]), int(buckets[stop - 1]), int(buckets[-1]), tokens, rollouts, k3 / tokens,
            rest, share, tokens / everything[0], of_all - of_inside - of_rest,
        )  # fmt: skip


def _words(part: _Part, judging: Judging) -> str:
    """Return the words for the place of a part's tokens."""
    low, high = part.low, part.high
    if part.dimension == "turn":
        if low == 0:
            return f"in turns 0 to {high}" if high else "in turn 0"
        return f"from turn {low} on" if high == part.last else f"in turns {low} to {high}"
    if part.dimension == "lag":
        return f"at lags of {low} or more" if high == part.last and high > low else f"at lag {low}"
    if part.dimension == "position":
        first, last = (0 if low == 0 else 2 ** (low - 1)), 2**high - 1 if high else 0
        # Buckets are powers of two.
        about = "about " if low > 2 or (high != part.last and high > 2) else ""
        if high == part.last:
            return f"from {about}token {first} of a response on"
        return f"at {about}the first {last + 1} tokens of a response"
    if part.dimension in _STEPS:
        least, most = part.lengths
        to_the_end = high == part.last
        if part.dimension == "prompt_length":
            which = f"longer than about {least - 1}" if to_the_end else f"of at most about {most}"
            return f"in the {int(part.rollouts):,} rollouts with prompts {which} tokens"
        of = "a response" if part.dimension == "response" else "the context (prompt included)"
        return f"from about token {least} of {of} on" if to_the_end else f"at about the first {most + 1} tokens of {of}"
    if part.dimension == "rollout":
        return "in 1 rollout" if part.rollouts == 1 else f"in {int(part.rollouts):,} rollouts"
    if part.dimension in _NAMED:
        name = next((each.sample_id for each in judging.evidence.where(f"{part.dimension} {low}")), "of one name")
        return f"in the {int(part.rollouts):,}{_ROLLOUTS_OF}{part.dimension.replace('_', ' ')} {name}"
    ends = "truncated" if part.dimension == "end_of_truncated" else "other than truncated"
    count = 2**high
    return f"at the last {count} tokens of {ends} responses" if count > 1 else f"at the last token of {ends} responses"


BY_PLACE = Check(
    "mismatch_by_place",
    "the mismatch is concentrated in one part of the tokens",
    "Means over all tokens hide it: most of the tokens are as they should be, and few are far off.",
    f"Look at what differs in the part that has the mismatch. The part names no cause: {_TO_DOCTOR}",
    _check,
    unless=if_invalid,
    yields_to=("mismatch_after_id", "banned_early", "penalty_of_engine"),
)
EVERYWHERE = Check(
    "mismatch_everywhere",
    "the mismatch is alike at all positions",
    "No single place, shift or temperature makes it.",
    "Let the trainer score one batch twice: with dropout the two passes differ. `foreshock doctor` with the "
    "weights of this step and of earlier ones tells numerics from weights of another step.",
    _check_everywhere,
    unless=_if_explained,
    proven=False,
    explains=False,
)
