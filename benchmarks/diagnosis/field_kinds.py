"""Batches with one fault of a kind that public reports describe. Its size, place and share are drawn at random.

Each batch has 128 rollouts of 16 prompts from random softmax policies. μ sampled the tokens, π is a slightly different
computation of the same policy, and the fault is injected. A finding is right if it is that of the kind, and false if it
is not true of the batch. A batch without any finding is silent. `python -m benchmarks.diagnosis field_kinds`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bars import Line
from foreshock.lint import lint_batch
from foreshock.rollouts import BatchAttributes, RolloutBatch

Floats = NDArray[np.float64]
Random = np.random.Generator

RAW = BatchAttributes(temperature=1.0, logprobs_mode="raw_logprobs", trainer_policy="recomputed_old")
LEAST_RIGHT = 0.9
_BATCHES = 40
_ROLLOUTS, _PROMPTS, _VOCABULARY, _CONTEXTS = 128, 16, 64, 400


@dataclass(slots=True)
class World:
    """Tokens sampled from μ = softmax(logits / temperature) with top-p, and both log-probs of them.

    `logits` [C, V] are those of C contexts, `states` [T] is the context of each token, `row` and `index` [T] its place.
    """

    logits: Floats
    states: NDArray[np.int64]
    ids: NDArray[np.int64]
    mu: Floats
    pi: Floats
    offsets: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    columns: dict[str, Any] = field(default_factory=dict)
    attributes: BatchAttributes = RAW

    @property
    def row(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(_ROLLOUTS), np.diff(self.offsets))

    @property
    def index(self) -> NDArray[np.int64]:
        return np.arange(self.ids.size) - self.offsets[:-1][self.row]

    @property
    def from_end(self) -> NDArray[np.int64]:
        return self.offsets[1:][self.row] - 1 - np.arange(self.ids.size)

    def batch(self) -> RolloutBatch:
        rewards = np.random.default_rng(self.ids.size).integers(0, 2, _ROLLOUTS)
        columns: dict[str, Any] = {
            "group_ids": [f"prompt-{row % _PROMPTS}" for row in range(_ROLLOUTS)],
            "finish_reasons": ["length" if cut else "stop" for cut in self.truncated],
            "reward": rewards.astype(np.float32),
            **self.columns,
        }
        return RolloutBatch.from_arrays(
            [f"rollout-{row}" for row in range(_ROLLOUTS)], np.arange(_ROLLOUTS) % _PROMPTS, np.arange(_ROLLOUTS + 1),
            self.ids, self.offsets,
            rollout_log_probs=self.mu.astype(np.float32), trainer_log_probs=self.pi.astype(np.float32),
            attributes=self.attributes, **columns,
        )  # fmt: skip


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def drawn(random: Random, temperature: float = 1.0, top_p: float = 1.0) -> World:
    """Return a healthy world: k3 of about 3e-4."""
    logits = random.normal(0.0, random.uniform(1.5, 2.5), (_CONTEXTS, _VOCABULARY))
    sampling = log_softmax(logits / temperature)
    if top_p < 1.0:
        order = np.argsort(-sampling, axis=1)
        kept = np.take_along_axis(np.exp(sampling), order, axis=1).cumsum(axis=1)
        drop = kept - np.take_along_axis(np.exp(sampling), order, axis=1) >= top_p
        np.put_along_axis(sampling, order, np.where(drop, -np.inf, np.take_along_axis(sampling, order, axis=1)), axis=1)
        sampling -= np.log(np.exp(sampling).sum(axis=1, keepdims=True))
    lengths = np.minimum(random.geometric(1 / 35, _ROLLOUTS) + 2, 64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    states = random.integers(0, _CONTEXTS, offsets[-1])
    return World(logits, states, *sample(logits, sampling, states, random), offsets, lengths == 64)


def sample(logits: Floats, sampling: Floats, states: NDArray[np.int64], random: Random) -> tuple[Any, Floats, Floats]:
    """Return tokens of `sampling` [C, V], their log μ, and their log π: that of `logits` [C, V] with numeric noise."""
    ids = (sampling[states] + random.gumbel(size=(states.size, _VOCABULARY))).argmax(axis=1)
    noisy = log_softmax(logits[states] + random.normal(0, 0.024, (states.size, _VOCABULARY)))
    return ids, sampling[states, ids], noisy[np.arange(states.size), ids]


def off(
    world: World, where: NDArray[np.bool_] | Floats, size: float | NDArray[np.floating[Any]], random: Random
) -> None:
    """Replace π at the chosen tokens by the policy of logits with noise of this size."""
    scale = np.broadcast_to(np.asarray(size, np.float64), world.ids.shape) * where
    noisy = log_softmax(world.logits[world.states] + random.normal(size=(world.ids.size, _VOCABULARY)) * scale[:, None])
    world.pi = np.where(scale > 0, noisy[np.arange(world.ids.size), world.ids], world.pi)


def shifted(random: Random) -> World:
    world, by = drawn(random), int(random.choice([-1, 1]))
    rows = random.random(_ROLLOUTS) < random.choice([0.1, 1.0])
    moved = world.pi.copy()
    for row in np.flatnonzero(rows):
        own = slice(world.offsets[row], world.offsets[row + 1])
        moved[own] = np.roll(world.pi[own], by)
    world.pi = moved
    return world


def sampled_by(**sampling: tuple[float, float]) -> Callable[[Random], World]:
    """Return worlds sampled with an undeclared temperature or top-p between two values."""

    def make(random: Random) -> World:
        values = {name: random.uniform(*between) for name, between in sampling.items()}
        return replace(drawn(random, **values), attributes=BatchAttributes())

    return make


def off_at(where: Callable[[World, Random], NDArray[np.bool_]], least: float, most: float) -> Callable[[Random], World]:
    """Return worlds in which π is off at the chosen tokens, by noise of a size between two values."""

    def make(random: Random) -> World:
        world = drawn(random)
        off(world, where(world, random), random.uniform(least, most), random)
        return world

    return make


def zero_at_end(random: Random) -> World:
    world = drawn(random)
    ends = (world.from_end == 0) & ~world.truncated[world.row]
    column = random.choice(["mu", "pi"])
    setattr(world, column, np.where(ends, 0.0, getattr(world, column)))
    return world


def short_mu(random: Random) -> World:
    world, last = drawn(random), int(random.integers(2, 6))
    rows = random.random(_ROLLOUTS) < random.uniform(0.1, 0.5)
    world.mu = np.where((world.from_end < last) & rows[world.row], 0.0, world.mu)
    return world


def tool_tokens(random: Random) -> World:
    """Return a world with unmasked tool output: ids that are unlikely under the policy, and a placeholder for log μ."""
    world = drawn(random)
    first = int(random.integers(3, 8))
    inside = (world.index >= first) & (world.index < first + 5)
    worst = log_softmax(world.logits[world.states]).min(axis=1)
    world.pi, world.mu = np.where(inside, worst, world.pi), np.where(inside, random.choice([0.0, 1.0]), world.mu)
    return world


def sentinels(random: Random) -> World:
    world, column = drawn(random), random.choice(["mu", "pi"])
    values = getattr(world, column).copy()
    places = random.integers(0, values.size, int(random.integers(1, 5)))
    values[places] = random.choice([-9999.0, -800.0, -65504.0, -1e9, 1.0])
    setattr(world, column, values)
    return world


def later_turn(world: World, random: Random) -> NDArray[np.bool_]:
    later = world.index >= int(random.integers(8, 20))
    world.columns["turn"] = later.astype(np.int16)
    return np.asarray(later)


def truncated_tail(world: World, random: Random) -> NDArray[np.bool_]:
    return (world.from_end < random.integers(1, 5)) & world.truncated[world.row]


def stale_prefix(random: Random) -> World:
    world = drawn(random)
    off(world, np.ones(world.ids.size), random.uniform(0.8, 1.2) / np.sqrt(1.0 + world.index / 3.0), random)
    return world


def lagged(random: Random) -> World:
    world = drawn(random)
    lag = (np.arange(_ROLLOUTS) // _PROMPTS % 4)[world.row]
    world.columns["weights_version"] = (9 - lag).astype(np.int32)
    world.attributes = replace(RAW, trainer_weights_version=9)
    off(world, np.ones(world.ids.size), random.uniform(0.3, 0.6) * lag, random)
    return world


def stale_head(random: Random) -> World:
    """Return a world in which each token id has its own noise, the same everywhere."""
    world = drawn(random)
    moved = log_softmax(world.logits + random.normal(0, random.uniform(0.3, 0.8), _VOCABULARY))
    world.pi = moved[world.states, world.ids]
    return world


def banned_early(random: Random) -> World:
    """Return a world whose first tokens were sampled without the ends of sequence: a minimum length."""
    world, least = drawn(random), int(random.choice([8, 16]))
    sampling = world.logits.copy()
    sampling[:, : int(random.integers(2, 6))] = -np.inf
    first = world.index < least
    banned = sample(world.logits, log_softmax(sampling), world.states, random)
    plain = world.ids, world.mu, world.pi
    world.ids, world.mu, world.pi = (np.where(first, one, other) for one, other in zip(banned, plain, strict=True))
    return replace(world, attributes=replace(RAW, logprobs_mode="processed_logprobs"))


def flat_rewards(random: Random) -> World:
    world = drawn(random)
    world.columns["reward"] = (np.arange(_ROLLOUTS) % _PROMPTS % int(random.integers(1, 4))).astype(np.float32)
    return world


def other_rows(random: Random) -> World:
    """Return a world with the rows of log π in another order, as if the batch was balanced over ranks in between."""
    world = drawn(random)
    rows = [world.pi[first:last] for first, last in pairwise(world.offsets)]
    order = random.permutation(_ROLLOUTS)
    world.pi = np.concatenate([np.resize(rows[other], rows[row].size) for row, other in enumerate(order)])
    return world


def likeliest(random: Random) -> World:
    """Return a world with the log μ of each position's likeliest token in place of the sampled token's."""
    world = drawn(random)
    return replace(world, mu=log_softmax(world.logits).max(axis=1)[world.states])


def other_temperature(random: Random) -> World:
    """Return a world with a quarter of the rollouts sampled at temperature 0.6, as by an evaluation in the queue."""
    world = drawn(random)
    chosen = (random.random(_ROLLOUTS) < 0.25)[world.row]
    sharp = sample(world.logits, log_softmax(world.logits / 0.6), world.states, random)
    plain = world.ids, world.mu, world.pi
    world.ids, world.mu, world.pi = (np.where(chosen, one, other) for one, other in zip(sharp, plain, strict=True))
    world.attributes = BatchAttributes()
    return world


def top_k(random: Random) -> World:
    """Return a world whose tokens are among the likeliest few, with processed log μ."""
    world, kept = drawn(random), int(random.integers(6, 16))
    logs = log_softmax(world.logits)
    logs = np.where(logs >= np.sort(logs, axis=1)[:, -kept, None], logs, -np.inf)
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    ids, mu, pi = sample(world.logits, logs, world.states, random)
    return replace(world, ids=ids, mu=mu, pi=pi, attributes=BatchAttributes())


def first_of_chunks(world: World, random: Random) -> NDArray[np.bool_]:
    """Return the first token of each chunk of a context-parallel trainer."""
    return np.asarray((world.index % int(random.choice([8, 16])) == 0) & (world.index > 0))


def data_source(world: World, random: Random) -> NDArray[np.bool_]:
    chosen = np.arange(_ROLLOUTS) % _PROMPTS < int(random.integers(3, 7))
    world.columns["data_sources"] = ["vision" if each else "text" for each in chosen]
    return chosen[world.row]


def retokenised(world: World, random: Random) -> NDArray[np.bool_]:
    """Return the tokens after a random position in a fifth of the rollouts, whose text was tokenised differently."""
    begins = (random.random(_ROLLOUTS) * np.diff(world.offsets))[world.row]
    return (world.index >= begins) & (random.random(_ROLLOUTS) < 0.2)[world.row]


def appended_end(random: Random) -> World:
    """Return a world with NaN for the log μ of an end of sequence that the framework appended."""
    world = drawn(random)
    world.mu = np.where((world.from_end == 0) & ~world.truncated[world.row], np.nan, world.mu)
    return world


def clamped(random: Random) -> World:
    world = drawn(random)
    return replace(world, mu=np.maximum(world.mu, -random.uniform(2.0, 4.0)), attributes=BatchAttributes())


def half_precision(random: Random) -> World:
    world = drawn(random)
    return replace(world, pi=world.pi.astype(np.float16).astype(np.float64))


def adapter_twice(random: Random) -> World:
    """Return a world whose π has an adapter of twice the scale."""
    world = drawn(random)
    adapter = random.normal(size=(_CONTEXTS, 4)) @ random.normal(size=(4, _VOCABULARY)) * random.uniform(0.2, 0.5)
    return replace(world, pi=log_softmax(world.logits + adapter)[world.states, world.ids])


def partly_copied(random: Random) -> World:
    world = drawn(random)
    return replace(world, pi=np.where((random.random(_ROLLOUTS) < 0.3)[world.row], world.mu, world.pi))


def peaked(random: Random) -> World:
    """Return a healthy world with a policy that is nearly certain."""
    world = drawn(random)
    world.logits = 4.0 * world.logits
    world.ids, world.mu, world.pi = sample(world.logits, log_softmax(world.logits), world.states, random)
    return world


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault. `right`: findings that name it. `allowed`: other findings that are true too."""

    make: Callable[[Random], World]
    right: tuple[str, ...]
    allowed: tuple[str, ...] = ()


_PLACE, _EVEN = "mismatch_by_place", "mismatch_everywhere"
KINDS: dict[str, Kind] = {
    "healthy": Kind(drawn, ()),
    "shift": Kind(shifted, ("shifted_log_probs",)),
    "top-p, not declared": Kind(sampled_by(top_p=(0.8, 0.92)), ("processed_log_probs",)),
    "temperature, not declared": Kind(sampled_by(temperature=(0.5, 0.75)), ("temperatures_differ",)),
    "0 at the end of sequence": Kind(
        zero_at_end, ("tokens_without_engine", "tokens_without_trainer"), ("pad_id_sampled",)
    ),
    "engine's last log-probs are 0": Kind(short_mu, ("tokens_without_engine",)),
    "tool output without a mask": Kind(tool_tokens, ("tokens_without_engine", "placeholder_log_probs")),
    "sentinels": Kind(sentinels, ("placeholder_log_probs",)),
    "from a later turn on": Kind(off_at(later_turn, 0.5, 1.5), (_PLACE,)),
    "last tokens of truncated responses": Kind(off_at(truncated_tail, 1.5, 3.0), (_PLACE,)),
    "sliding window": Kind(
        off_at(lambda world, random: world.index >= int(random.choice([16, 32])), 0.5, 1.5), (_PLACE,)
    ),
    "stale prompt cache": Kind(stale_prefix, (_PLACE,)),
    "mixed versions": Kind(lagged, (_PLACE,)),
    "one replica": Kind(
        off_at(lambda world, random: (random.random(_ROLLOUTS) < random.uniform(0.08, 0.25))[world.row], 0.5, 1.5),
        (_PLACE,),
    ),
    "dropout or FP8": Kind(off_at(lambda world, _: np.ones(world.ids.size, bool), 0.25, 1.0), (_EVEN,)),
    "stale head": Kind(stale_head, (_PLACE,), (_EVEN, "mean_ratio")),
    "rows in another order": Kind(other_rows, ("rows_exchanged",)),
    "log μ of the likeliest token": Kind(likeliest, ("likelier_token_logged",), ("duplicated_rollouts",)),
    "another temperature in a quarter": Kind(other_temperature, (_PLACE, "temperatures_differ")),
    "top-k, not declared": Kind(top_k, ("processed_log_probs",)),
    "first token of each chunk": Kind(off_at(first_of_chunks, 1.5, 3.0), (_PLACE,)),
    "ends banned for the first tokens": Kind(banned_early, ("banned_early",)),
    "one data source": Kind(off_at(data_source, 0.5, 1.5), (_PLACE,)),
    "tokenised again in a fifth": Kind(off_at(retokenised, 1.0, 2.0), (_PLACE,)),
    "appended end of sequence is NaN": Kind(appended_end, ("non_finite_log_probs", "tokens_without_engine")),
    "log μ is clamped": Kind(clamped, ("mean_ratio", "likelier_token_logged")),
    "log π in float16": Kind(half_precision, ("rounded_log_probs",)),
    "adapter at twice the scale": Kind(adapter_twice, (_EVEN, "mean_ratio")),
    "copies in a part": Kind(partly_copied, ("identical_log_probs",)),
    "healthy, nearly certain": Kind(peaked, ()),
    "rewards without spread": Kind(flat_rewards, ("no_reward_spread",)),
}


def measure_kind(kind: Kind, batches: int, seed: int) -> tuple[int, int, Counter[str]]:
    """Return the number of batches with a right finding, the number without any finding, and the false findings."""
    right, silent, false = 0, 0, Counter[str]()
    for number in range(batches):
        report = lint_batch(kind.make(np.random.default_rng([seed, number])).batch(), model_kind="dense")
        names = {warning.name for warning in report.warnings} - {"sampling_not_declared"}
        right += bool(names & set(kind.right)) or not (kind.right or names)
        silent += not names and bool(kind.right)
        false.update(names - set(kind.right) - set(kind.allowed))
    return right, silent, false


def measure() -> list[Line]:
    """Return the worst kind's share of right findings and the number of false findings; print a line for each kind."""
    least, false_findings = 1.0, 0
    for place, (name, kind) in enumerate(KINDS.items()):
        right, silent, false = measure_kind(kind, _BATCHES, place)
        wrong = ", ".join(f"{found} {count}" for found, count in false.items()) or "none"
        print(f"{name:36s} right {right:3d} of {_BATCHES}, silent {silent:3d}, false: {wrong}", flush=True)
        least, false_findings = min(least, right / _BATCHES), false_findings + sum(false.values())
    return [
        Line("field_kinds_least_right", "right findings of the worst kind", least, LEAST_RIGHT, at_least=True),
        Line("field_kinds_false", "false findings", false_findings, 0),
    ]
