"""The result of a weights search: a step replayed with the weights of other announced steps, whole and by part.

An engine that missed an update, or a part of one, holds weights that no checkpoint of its step has. The search replays
the step's rollouts with the announced weights, then with those of earlier steps, then with the announced ones of which
one part (head, embeddings, layers) comes from an earlier step, and compares each replay with the logged `rollout`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from foreshock.api.records import parse, to_json

__all__ = [
    "WHOLE",
    "WeightsReplay",
    "WeightsSearch",
    "interleaved",
    "joined_parts",
]

WHOLE = "all"

# k3 of a replay with the right weights in the right environment: 4e-14 to 5e-7, the latter where an engine's decode and
# prefill round differently. Other batches (the rebatched floor) may differ by more, on GPUs, and by nothing, on CPUs.
_LEAST_BOUND = 1e-6
_FLOORS = 4.0
# A replay is clearly better than another one if its k3 is so many times smaller.
_CLEARLY = 10.0
_EXACT_K3 = 1e-12


@dataclass(frozen=True, slots=True)
class WeightsReplay:
    """A replay with the announced weights of the searched step, of which `part` is that of the announced `step`.

    `part` is "all", or names of parts joined by "+": "lm_head", "embeddings", "layers", "layers.3", "layers.0-17",
    "other". k3 (nats per token, with its bootstrap-t interval by prompt group) and max |d| (nats) compare the replay
    with the logged `rollout`; None if it was not made, and `skipped` says why.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    step: int
    part: str
    k3_kl: float | None = None
    k3_low: float | None = None
    k3_high: float | None = None
    max_abs_d: float | None = None
    skipped: str = ""

    @property
    def done(self) -> bool:
        """True if the replay was made and could be compared."""
        return self.k3_kl is not None and math.isfinite(self.k3_kl)


@dataclass(frozen=True, slots=True)
class WeightsSearch:
    """All replays of a step, in the order in which they were made; the first has the announced weights.

    `scorer` replayed them; `floor_k3` is its k3 against itself in other batches. `tied`: the model's head and
    embeddings are one tensor; the part "embeddings" is then both, and "lm_head" a head that kept a copy of its own.
    `confirmed_k3` is the best replay with other weights again, in an engine that was started with them: replays of the
    search exchange the weights of a running engine. `ended` says why the search ended.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    step: int
    scorer: str
    rollouts: int
    tokens: int
    floor_k3: float | None = None
    tied: bool = False
    replays: tuple[WeightsReplay, ...] = field(default_factory=tuple)
    confirmed_k3: float | None = None
    ended: str = ""

    @property
    def done(self) -> tuple[WeightsReplay, ...]:
        """The replays that were made, the one nearest to the logged `rollout` first."""
        return tuple(sorted((each for each in self.replays if each.done), key=lambda each: _k3(each)))

    @property
    def announced(self) -> WeightsReplay | None:
        """The replay with the announced weights."""
        return next((each for each in self.replays if self.is_announced(each) and each.done), None)

    @property
    def others(self) -> tuple[WeightsReplay, ...]:
        """The replays with other weights than the announced ones, the best first."""
        return tuple(each for each in self.done if not self.is_announced(each))

    @property
    def bound(self) -> float:
        """The largest k3 that is called reproduced: four noise floors, at least 1e-6."""
        return max(_LEAST_BOUND, _FLOORS * (self.floor_k3 or 0.0))

    @property
    def best_is_confirmed(self) -> bool:
        """Return whether the best other weights gave the same k3 in an engine that was started with them."""
        if not self.others or self.confirmed_k3 is None:
            return False
        return abs(self.confirmed_k3 - _k3(self.others[0])) <= max(_EXACT_K3, self.floor_k3 or 0.0)

    def is_announced(self, replay: WeightsReplay) -> bool:
        """Return whether the replay has the announced weights of the searched step."""
        return replay.step == self.step

    def reproduces(self, replay: WeightsReplay) -> bool:
        """Return whether the replay is at or near the noise floor: its k3 is within `bound`."""
        return replay.done and _k3(replay) <= self.bound

    def is_clearly_better(self, replay: WeightsReplay, other: WeightsReplay) -> bool:
        """Return whether k3 of `replay` is ten times smaller; k3 below the floor, or 1e-12, counts as that."""
        return _k3(other) >= _CLEARLY * max(_k3(replay), self.floor_k3 or 0.0, _EXACT_K3)

    def is_at_floor(self, replay: WeightsReplay) -> bool:
        """Return whether no replay can be nearer: the search may end."""
        return replay.done and _k3(replay) <= max(_EXACT_K3, self.floor_k3 or 0.0)

    def as_good_as(self, best: WeightsReplay) -> tuple[WeightsReplay, ...]:
        """Return the other replays that `best` is not clearly better than, the announced weights included."""
        return tuple(each for each in self.done if each is not best and not self.is_clearly_better(best, each))

    def describe(self, replay: WeightsReplay) -> str:
        """Return the weights of the replay in words: "the weights of step 59", "the lm_head of step 1"."""
        if replay.part == WHOLE:
            return f"the weights of step {replay.step}"
        return f"{joined_parts(replay.part, tied=self.tied)} of step {replay.step}"

    def to_dict(self) -> dict[str, Any]:
        """Return the search as JSON values."""
        return to_json(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WeightsSearch:
        """Return the search of `to_dict()`."""
        return parse(cls, values)


def joined_parts(part: str, *, tied: bool = False) -> str:
    """Return a replay's part in words: "the lm_head", "the embeddings and the layers", "layer 3"."""
    words = [_words(name, tied) for name in part.split("+")]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _words(name: str, tied: bool) -> str:
    kind, _, number = name.partition(".")
    if kind == "layers" and number:
        return f"layers {number.replace('-', ' to ')}" if "-" in number else f"layer {number}"
    if name == "embeddings" and tied:
        return "the tied embeddings and head"
    return {"other": "the other weights (such as the final norm)"}.get(name, f"the {name}")


def _k3(replay: WeightsReplay) -> float:
    return math.inf if replay.k3_kl is None else replay.k3_kl


def interleaved(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the ascending `steps`, nearest and first ones in turn: the last, the first, …"""
    left, order = list(steps), list[int]()
    while left and len(order) < most:
        order.append(left.pop() if len(order) % 2 == 0 else left.pop(0))
    return order
