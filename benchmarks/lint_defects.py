"""Defects that the benchmark puts into healthy rollouts, each with the checks that should name it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lint_rollouts import PLAIN, Logged, SamplingParameters
from foreshock.rollouts import BatchAttributes, RolloutBatch

Floats = NDArray[np.float32]
Edit = Callable[[RolloutBatch, np.random.Generator], RolloutBatch]

PAD = 31
AS_IS = Logged()


@dataclass(frozen=True, slots=True)
class Defect:
    """One defect. `right`: the checks that name it correctly; empty if it does not show in the data.

    `barred`: the benchmark fails unless the defect is found in every ordinary batch.
    """

    name: str
    right: tuple[str, ...]
    sampling: SamplingParameters = PLAIN
    logged: Logged = AS_IS
    edit: Edit | None = None
    barred: bool = True


def mu(batch: RolloutBatch) -> Floats:
    assert batch.rollout_log_probs is not None
    return batch.rollout_log_probs


def pi(batch: RolloutBatch) -> Floats:
    assert batch.trainer_log_probs is not None
    return batch.trainer_log_probs


def rows_of_tokens(batch: RolloutBatch) -> NDArray[np.int64]:
    return np.repeat(np.arange(batch.num_rollouts), batch.response_lengths)


def some_rollouts(batch: RolloutBatch, share: float) -> NDArray[np.bool_]:
    """Return True for the tokens of the last rollouts, shape [T], like those of one rank."""
    return rows_of_tokens(batch) >= batch.num_rollouts - max(1, round(share * batch.num_rollouts))


def bfloat16(values: Floats) -> Floats:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def float16(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def moved(values: Floats, offsets: NDArray[np.int64], by: int, end: float = 0.0) -> Floats:
    """Return each rollout's values moved by one place; `end` fills the free place."""
    result = np.empty_like(values)
    for start, stop in itertools.pairwise(offsets.tolist()):
        row = values[start:stop]
        result[start:stop] = np.concatenate([[end], row[:-1]]) if by > 0 else np.concatenate([row[1:], [end]])
    return result


def on(column: str, change: Callable[[Floats], Floats], share: float = 1.0) -> Edit:
    """Return an edit of a column ("rollout", "trainer", or "both") in a share of the rollouts."""

    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        where = some_rollouts(batch, share)
        columns: dict[str, Any] = {}
        if column in ("rollout", "both"):
            columns["rollout_log_probs"] = np.where(where, change(mu(batch)), mu(batch)).astype(np.float32)
        if column in ("trainer", "both"):
            columns["trainer_log_probs"] = np.where(where, change(pi(batch)), pi(batch)).astype(np.float32)
        return replace(batch, **columns)

    return edit


def shift(column: str, by: int, share: float = 1.0, end: float = 0.0) -> Edit:
    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        return on(column, lambda values: moved(values, batch.response_offsets, by, end), share)(batch, random)

    return edit


def bypass(share: float = 1.0) -> Edit:
    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        return replace(batch, trainer_log_probs=np.where(some_rollouts(batch, share), mu(batch), pi(batch)))

    return edit


def positive(count: int) -> Edit:
    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        values = mu(batch).copy()
        values[random.integers(0, values.size, count)] = 0.3
        return replace(batch, rollout_log_probs=values)

    return edit


def masked_values(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
    return replace(batch, response_mask=(random.random(batch.num_tokens) > 0.2).astype(np.uint8))


def pad_dropped(lost: float | None) -> Edit:
    """Return an edit by which the trainer (or the mask, for None) drops the sampled tokens of id PAD."""

    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        hit = batch.response_token_ids == PAD
        if lost is None:
            return replace(batch, response_mask=(~hit).astype(np.uint8))
        return replace(batch, trainer_log_probs=np.where(hit, np.float32(lost), pi(batch)))

    return edit


def with_noise(size: float, where: NDArray[np.bool_], batch: RolloutBatch, random: np.random.Generator) -> Floats:
    """Return log π with normal noise at some tokens, [T]; downwards at tokens that it would put above 0."""
    noise = random.normal(0.0, size, batch.num_tokens)
    noisy = pi(batch) + np.where(pi(batch) + noise < 0.0, noise, -np.abs(noise))
    return np.where(where, noisy, pi(batch)).astype(np.float32)


def mask_drops_id(size: float) -> Edit:
    """Return an edit by which the trainer's log-probs differ after the first occurrence of an id in a response.

    The id is the one whose share of the responses that have it is nearest to a quarter.
    """

    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        rows, ids = rows_of_tokens(batch), batch.response_token_ids
        having = [np.unique(rows[ids == each]).size / batch.num_rollouts for each in range(ids.max() + 1)]
        is_id = ids == np.argmin(np.abs(np.array(having) - 0.25))
        seen = np.cumsum(is_id)
        before = np.concatenate([[0], seen])[batch.response_offsets[:-1]]
        after_first = seen - np.repeat(before, batch.response_lengths) - is_id > 0
        return replace(batch, trainer_log_probs=with_noise(size, after_first, batch, random))

    return edit


def mismatch(size: float) -> Edit:
    """Return an edit by which the trainer's log-probs differ at every token."""

    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        everywhere = np.ones(batch.num_tokens, np.bool_)
        return replace(batch, trainer_log_probs=with_noise(size, everywhere, batch, random))

    return edit


def duplicated(count: float) -> Edit:
    """Return an edit that repeats the first rollouts, as a share of the batch."""

    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        more = max(1, round(count * batch.num_rollouts))
        again = batch.select([*range(batch.num_rollouts), *range(more)])
        return replace(again, sample_ids=[f"row-{row}" for row in range(again.num_rollouts)])

    return edit


def at_ends(*, first: bool, column: str, value: float) -> Edit:
    """Return an edit that sets the log-prob of the first or last token of each response to `value`."""

    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        places = batch.response_offsets[:-1] if first else batch.response_offsets[1:] - 1
        values = (mu(batch) if column == "rollout" else pi(batch)).copy()
        values[places] = value
        columns: dict[str, Any] = {f"{column}_log_probs": values}
        return replace(batch, **columns)

    return edit


def padded(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
    """Pad responses to the longest with PAD: no mask, log μ 0 there, and a trainer that scores the padding."""
    lengths = batch.response_lengths
    longest = int(lengths.max())
    ids = np.full((lengths.size, longest), PAD)
    kept = np.arange(longest) < lengths[:, None]
    ids[kept] = batch.response_token_ids
    behaviour = np.zeros(ids.shape, np.float32)
    behaviour[kept] = mu(batch)
    target = -random.gamma(2.0, 3.0, ids.shape).astype(np.float32)
    target[kept] = pi(batch)
    columns: dict[str, Any] = {}
    if batch.entropy is not None:
        entropy = random.gamma(1.0, 1.0, ids.shape).astype(np.float32)
        entropy[kept] = batch.entropy
        columns["entropy"] = entropy.ravel()
    return replace(
        batch,
        response_token_ids=ids.ravel().astype(np.int32),
        response_offsets=np.arange(lengths.size + 1, dtype=np.int64) * longest,
        rollout_log_probs=behaviour.ravel(),
        trainer_log_probs=target.ravel(),
        **columns,
    )


def prompt_token_included(value: float) -> Edit:
    """Return an edit that puts the prompt's last token before each response, with log μ `value` and some log π."""

    def edit(batch: RolloutBatch, random: np.random.Generator) -> RolloutBatch:
        heads = batch.response_offsets[:-1]
        columns: dict[str, Any] = {}
        for name, values in (("rollout", mu(batch)), ("trainer", pi(batch))):
            new = np.float32(value) if name == "rollout" else -random.gamma(2.0, 2.0, heads.size).astype(np.float32)
            columns[f"{name}_log_probs"] = np.insert(values, heads, new).astype(np.float32)
        if batch.entropy is not None:
            columns["entropy"] = np.insert(batch.entropy, heads, 0.0).astype(np.float32)
        ids = np.insert(batch.response_token_ids, heads, batch.prompt_token_ids[batch.prompt_offsets[1:] - 1])
        offsets = batch.response_offsets + np.arange(batch.num_rollouts + 1)
        return replace(batch, response_token_ids=ids.astype(np.int32), response_offsets=offsets, **columns)

    return edit


def scaled(column: str, factor: float) -> Edit:
    return on(column, lambda values: (values * np.float64(factor)).astype(np.float32))


def raw(
    sampling: SamplingParameters,
    *,
    entropies: bool = True,
    declared: bool = False,
    trainer_sampling: SamplingParameters = PLAIN,
) -> Logged:
    return Logged(
        False, trainer_sampling, entropies, sampling.attributes("raw_logprobs") if declared else BatchAttributes()
    )


def processed(
    sampling: SamplingParameters,
    *,
    entropies: bool = False,
    declared: bool = False,
    trainer_sampling: SamplingParameters = PLAIN,
) -> Logged:
    return Logged(
        True, trainer_sampling, entropies, sampling.attributes("processed_logprobs") if declared else BatchAttributes()
    )


SAMPLINGS = {
    "top-p 0.9": SamplingParameters(top_p=0.9),
    "top-p 0.95": SamplingParameters(top_p=0.95),
    "top-p 0.99": SamplingParameters(top_p=0.99),
    "top-k 5": SamplingParameters(top_k=5),
    "min-p 0.05": SamplingParameters(min_p=0.05),
    "temperature 0.6": SamplingParameters(temperature=0.6),
    "temperature 0.8": SamplingParameters(temperature=0.8),
    "temperature 0.95": SamplingParameters(temperature=0.95),
    "temperature 1.2": SamplingParameters(temperature=1.2),
}
EDITS = {
    "bypass": ("identical_log_probs", bypass()),
    "bypass, a quarter": ("identical_log_probs", bypass(0.25)),
    "shift trainer +1": ("shifted_log_probs", shift("trainer", 1)),
    "shift trainer -1": ("shifted_log_probs", shift("trainer", -1)),
    "shift trainer -1, NaN end": ("shifted_log_probs", shift("trainer", -1, end=np.nan)),
    "shift engine +1": ("shifted_log_probs", shift("rollout", 1)),
    "shift engine -1": ("shifted_log_probs", shift("rollout", -1)),
    "shift, half": ("shifted_log_probs", shift("trainer", 1, 0.5)),
    "shift, an eighth": ("shifted_log_probs", shift("trainer", 1, 0.125)),
    "shift both": ("", shift("both", 1)),
    "probabilities, trainer": ("probabilities_as_log_probs", on("trainer", np.exp)),
    "probabilities, engine": ("probabilities_as_log_probs", on("rollout", np.exp)),
    "probabilities, both": ("probabilities_as_log_probs", on("both", np.exp)),
    "probabilities, a quarter": ("placeholder_log_probs", on("rollout", np.exp, 0.25)),
    "log2, trainer": ("wrong_log_base", scaled("trainer", 1 / np.log(2))),
    "log2, engine": ("wrong_log_base", scaled("rollout", 1 / np.log(2))),
    "log2, both": ("raw_log_probs", scaled("both", 1 / np.log(2))),
    "log10, trainer": ("wrong_log_base", scaled("trainer", 1 / np.log(10))),
    "log10, engine": ("wrong_log_base", scaled("rollout", 1 / np.log(10))),
    "log10, both": ("raw_log_probs", scaled("both", 1 / np.log(10))),
    "negated, trainer": ("negated_log_probs", scaled("trainer", -1)),
    "negated, engine": ("negated_log_probs", scaled("rollout", -1)),
    "negated, both": ("negated_log_probs", scaled("both", -1)),
    "masked values": ("masked_values", masked_values),
    "pad sampled, log pi 0": ("pad_id_sampled", pad_dropped(0.0)),
    "pad sampled, log pi NaN": ("pad_id_sampled", pad_dropped(np.nan)),
    "pad sampled, masked": ("pad_id_sampled", pad_dropped(None)),
    "mask drops an id, d 0.3": ("mismatch_after_id", mask_drops_id(0.3)),
    "mask drops an id, d 1": ("mismatch_after_id", mask_drops_id(1.0)),
    "mask drops an id, d 2": ("mismatch_after_id", mask_drops_id(2.0)),
    "one mu > 1": ("placeholder_log_probs", positive(1)),
    "duplicated, 1 rollout": ("duplicated_rollouts", duplicated(0.0)),
    "duplicated, a tenth": ("duplicated_rollouts", duplicated(0.1)),
    "duplicated, all": ("duplicated_rollouts", duplicated(1.0)),
    "mean ratio 1.03": ("mean_ratio", on("trainer", lambda v: (v + np.float32(0.03)).clip(max=0))),
    "mean ratio 0.9": ("mean_ratio processed_log_probs", on("trainer", lambda v: v - np.float32(0.1))),
    "bfloat16, trainer": ("rounded_log_probs", on("trainer", bfloat16)),
    "bfloat16, engine": ("rounded_log_probs", on("rollout", bfloat16)),
    "float16, trainer": ("rounded_log_probs", on("trainer", float16)),
    "float16, both": ("rounded_log_probs", on("both", float16)),
    "bfloat16, a quarter": ("rounded_log_probs", on("trainer", bfloat16, 0.25)),
    "padding scored": ("tokens_without_engine", padded),
    "end's log mu 0": ("tokens_without_engine", at_ends(first=False, column="rollout", value=0.0)),
    "end's log mu NaN": ("non_finite_log_probs", at_ends(first=False, column="rollout", value=np.nan)),
    "end's log pi 0": ("pad_id_sampled tokens_without_trainer", at_ends(first=False, column="trainer", value=0.0)),
    "first log mu 0": ("tokens_without_engine", at_ends(first=True, column="rollout", value=0.0)),
    "prompt token, log mu 0": ("tokens_without_engine", prompt_token_included(0.0)),
    "prompt token, log mu NaN": ("non_finite_log_probs", prompt_token_included(np.nan)),
}


# The defects with a bar, of usual size: found in every ordinary batch.
_BARRED = {
    "bypass",
    "shift trainer +1",
    "shift trainer -1",
    "shift engine +1",
    "shift engine -1",
    "probabilities, trainer",
    "probabilities, engine",
    "negated, trainer",
    "negated, engine",
    "log2, trainer",
    "log10, engine",
    "masked values",
    "pad sampled, log pi 0",
    "pad sampled, log pi NaN",
    "pad sampled, masked",
    "mask drops an id, d 1",
    "mask drops an id, d 2",
    "k3 of d 1, entropies",
    "k3 of d 2, entropies",
    "one mu > 1",
    "duplicated, a tenth",
    "duplicated, all",
    "mean ratio 1.03",
    "bfloat16, trainer",
    "bfloat16, engine",
    "float16, trainer",
    "float16, both",
    "padding scored",
    "end's log mu 0",
    "prompt token, log mu 0",
    *(f"raw, {sampling}" for sampling in ("top-p 0.9", "top-p 0.95", "temperature 0.6", "temperature 0.8")),
    *(f"raw, {sampling}, declared" for sampling in SAMPLINGS),
    *(f"processed, {sampling}" for sampling in ("top-p 0.9", "top-p 0.95")),
    *(f"processed, temperature {sampling}, declared" for sampling in ("0.6", "0.8")),
    "raw, trainer at temperature 0.6",
}


def _defects() -> list[Defect]:
    found: list[Defect] = []

    def add(name: str, right: str, sampling: SamplingParameters, logged: Logged, edit: Edit | None = None) -> None:
        found.append(Defect(name, tuple(right.split()), sampling, logged, edit, name in _BARRED))

    for name, sampling in SAMPLINGS.items():
        cuts = sampling.temperature == 1.0
        add(f"raw, {name}", "raw_log_probs", sampling, raw(sampling))
        add(f"raw, {name}, declared", "raw_log_probs", sampling, raw(sampling, entropies=False, declared=True))
        add(f"raw, {name}, no entropy", "", sampling, raw(sampling, entropies=False))
        of_cut, of_heat = ("processed_log_probs",) * 2, ("entropy_of_trainer", "temperature_of_trainer")
        with_entropy, declared = of_cut if cuts else of_heat
        add(f"processed, {name}", "processed_log_probs" if cuts else "", sampling, processed(sampling))
        add(f"processed, {name}, entropy of π", with_entropy, sampling, processed(sampling, entropies=True))
        add(f"processed, {name}, declared", declared, sampling, processed(sampling, declared=True))
        if not cuts:
            add(
                f"raw, trainer at {name}",
                "mean_ratio",
                sampling,
                raw(sampling, entropies=False, trainer_sampling=sampling),
            )
    greedy = SamplingParameters(temperature=0.0)
    add("greedy, raw, declared", "raw_log_probs", greedy, raw(greedy, declared=True))
    add("greedy, raw", "raw_log_probs", greedy, raw(greedy))
    add("greedy, raw, no entropy", "", greedy, raw(greedy, entropies=False))
    add("greedy, processed", "processed_log_probs", greedy, processed(greedy))
    for size in (0.3, 1.0, 2.0):
        # k3 itself is beyond its range, so that its rule says it; k3 / entropy adds nothing.
        add(f"k3 of d {size:g}, entropies", "mean_ratio", PLAIN, raw(PLAIN), mismatch(size))
    for name, (right, edit) in EDITS.items():
        add(name, right, PLAIN, AS_IS, edit)
    return found


DEFECTS = _defects()
