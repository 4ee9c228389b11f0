"""A run as several ranks upload it: its requests, and the order in which each sender makes them.

Everything is drawn from a seed, so that the same requests can be sent to another service. The rollouts grow longer and
the engine's log-probs drift, so that alerts open and the advice decides.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock.scorers import ENGINE_REPLAY, TRAINER_REPLAY
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS
from foreshock.statistics_shards import FullRollouts, encode_statistics_shard
from tests.service.sending import PARQUET
from tests.service.working import WEIGHTS

Kind = Literal["rollouts", "statistics", "scalars", "poll", "checkpoint", "probe"]

_FULL = FullRollouts(2, 1)
_PHASE_STEPS = 9
_SCORERS = (ENGINE_REPLAY, TRAINER_REPLAY)
LATE, TWICE = 0.15, 0.12


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One request of a trainer. `path` is below the run's; the trainer also acknowledges each poll."""

    kind: Kind
    step: int
    attempt: int
    method: str
    path: str
    query: dict[str, Any] = field(default_factory=dict)
    content: bytes = b""
    media_type: str = ""
    body: dict[str, Any] | None = None

    @property
    def is_shard(self) -> bool:
        """Return whether it is a shard of rollouts."""
        return self.kind in ("rollouts", "statistics")

    @property
    def shard(self) -> int:
        """Return the number of the shard."""
        return int(self.path.rpartition("/")[2])

    @property
    def key(self) -> tuple[int, int, int]:
        """Return (attempt, step, shard)."""
        return self.attempt, self.step, self.shard


@dataclass(slots=True)
class Phase:
    """Some steps of one attempt. `queues` are the items of each sender, in order; afterwards a probe may be scored."""

    attempt: int
    resume_step: int
    queues: list[list[Item]] = field(default_factory=list)
    canonical: list[Item] = field(default_factory=list)
    """Each item once, in the order of steps."""
    probe: list[Item] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run. `serial`: one sender sends every item in order, so that the advice depends on nothing else."""

    key: str
    serial: bool
    some_never_sent: bool
    phases: list[Phase]

    @property
    def steps(self) -> int:
        """Return the number of steps that are uploaded, those of superseded tails included."""
        return len({(item.attempt, item.step) for phase in self.phases for item in phase.canonical if item.is_shard})

    def is_superseded(self, attempt: int, step: int) -> bool:
        """Return whether a later attempt begins at or before the step."""
        return any(phase.attempt > attempt and phase.resume_step <= step for phase in self.phases)


def plan_run(seed: int, *, serial: bool, phases: int = 5, senders: int = 4) -> RunPlan:
    """Return the run of a seed: `phases` phases of nine steps, with a rewind before the last but one."""
    draw = random.Random(seed)
    some_never_sent = not serial and draw.random() < 0.25
    made: list[Phase] = []
    first, attempt = 0, 1
    for number in range(phases):
        if number == phases - 2 and number > 0:
            attempt, first = 2, first - 4
        steps = range(first, first + _PHASE_STEPS)
        resume = first if attempt == 2 else 0
        if made and made[-1].attempt == attempt:
            resume = made[-1].resume_step
        phase = Phase(attempt, resume)
        for step in steps:
            # The first step of a phase is probed: its tokens travel, in one shard.
            probed = step == first
            phase.canonical += _items_of_step(draw, seed, attempt, step, probed=probed, never=some_never_sent)
        phase.queues = [_with_repeats(draw, phase.canonical)] if serial else _queues(draw, phase.canonical, senders)
        if number % 2 == 0:
            phase.probe = _probe(attempt, first)
        made.append(phase)
        first += _PHASE_STEPS
    return RunPlan(f"run-{seed}", serial, some_never_sent, made)


def _items_of_step(draw: random.Random, seed: int, attempt: int, step: int, *, probed: bool, never: bool) -> list[Item]:
    shards = 1 if probed else draw.choice((1, 2, 3))
    items = []
    for shard in range(shards):
        if never and shards > 1 and shard == shards - 1 and draw.random() < 0.2:
            continue
        batch = make_batch(seed, attempt, step, shard)
        as_statistics = not probed and draw.random() < 0.25
        content = encode_statistics_shard(batch, seed="a", full=_FULL) if as_statistics else encode_rollouts(batch)
        kind: Kind = "statistics" if as_statistics else "rollouts"
        query, media_type = {"attempt": attempt, "shards": shards}, STATISTICS if as_statistics else PARQUET
        items.append(Item(kind, step, attempt, "PUT", f"steps/{step}/{kind}/{shard}", query, content, media_type))
    values = {"grad_norm": 0.3 + 0.01 * draw.random() + (0.5 if step > 30 else 0.0), "entropy": 1.0 + draw.random() / 9}
    scalars = {"source": "trainer", "values": values}
    items.insert(0, Item("scalars", step, attempt, "PUT", f"steps/{step}/scalars", {"attempt": attempt}, body=scalars))
    items.append(Item("poll", step, attempt, "GET", "lr-advice", {"step": step + 1}))
    return items


def make_batch(seed: int, attempt: int, step: int, shard: int, rollouts: int = 8) -> RolloutBatch:
    """Return the rollouts of a shard: the lengths double from step 18 on, d drifts from step 24 on."""
    random_numbers = np.random.default_rng((seed, attempt, step, shard))
    longest = 16 + int(min(max(step - 17, 0), 14) * 3)
    lengths = random_numbers.integers(longest // 2, longest, rollouts)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    behaviour = -random_numbers.exponential(0.6, offsets[-1]).astype(np.float32)
    scale = 0.02 if step < 24 else 0.02 * 1.35 ** min(step - 23, 10)
    target = np.minimum(behaviour + random_numbers.normal(0, scale, offsets[-1]), 0.0).astype(np.float32)
    return RolloutBatch.from_arrays(
        sample_ids=[f"{seed}-{attempt}-{step}-{shard}-{number}" for number in range(rollouts)],
        prompt_token_ids=np.arange(rollouts, dtype=np.int32),
        prompt_offsets=np.arange(rollouts + 1),
        response_token_ids=random_numbers.integers(0, 1000, offsets[-1]).astype(np.int32),
        response_offsets=offsets,
        rollout_log_probs=behaviour,
        trainer_log_probs=target,
        group_ids=[f"{step}-{shard}-{number // 2}" for number in range(rollouts)],
        reward=random_numbers.integers(0, 2, rollouts).astype(np.float32),
        finish_reasons=["stop"] * rollouts,
    )


def _probe(attempt: int, step: int) -> list[Item]:
    checkpoint = {"root": "runs", "path": f"step-{step}", "format": "hf_safetensors", "digest": WEIGHTS}
    scorers = [{"scorer": name, "variant": ""} for name in _SCORERS]
    return [
        Item(
            "checkpoint", step, attempt, "PUT", f"checkpoints/{step}", {"attempt": attempt}, body=checkpoint
        ),
        Item("probe", step, attempt, "POST", "probes", body={"step": step, "attempt": attempt, "scorers": scorers}),
    ]  # fmt: skip


def _with_repeats(draw: random.Random, items: Sequence[Item]) -> list[Item]:
    """Return the items in order, some of them twice in a row."""
    found: list[Item] = []
    for item in items:
        found += [item, item] if item.kind != "poll" and draw.random() < TWICE else [item]
    return found


def _queues(draw: random.Random, items: Sequence[Item], senders: int) -> list[list[Item]]:
    """Return the queue of each rank, with late and repeated items: rank s sends shard s, the first rank the rest."""
    queues: list[list[tuple[float, Item]]] = [[] for _ in range(senders)]
    for place, item in enumerate(items):
        rank = 1 + item.shard % (senders - 1) if item.is_shard else 0
        at = place + (draw.uniform(5, 25) if item.kind != "poll" and draw.random() < LATE else 0.0)
        queues[rank].append((at, item))
        if item.kind != "poll" and draw.random() < TWICE:
            queues[draw.randrange(senders)].append((at + draw.uniform(0, 20), item))
    return [[item for _, item in sorted(queue, key=lambda pair: pair[0])] for queue in queues]
