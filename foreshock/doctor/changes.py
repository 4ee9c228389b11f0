"""A change of a forward pass, and the experimenter who replays rollouts under it.

A change is a set of named values. The doctor combines and compares changes; only an experimenter interprets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

SIDES = ("rollout", "trainer")
"""The side of μ, logged by the engine, and the side of π, logged by the trainer."""


class CannotTryError(Exception):
    """An experiment that cannot be made; the text says why."""


class BudgetSpentError(CannotTryError):
    """The time for experiments has run out, before a replay or in the middle of one."""

    def __init__(self) -> None:
        super().__init__("the budget is spent")


@dataclass(frozen=True, slots=True)
class Change:
    """Values by name, such as weights="step_0045" or positions="zero"; `probes/foreshock_probes/doctor` has torch's."""

    values: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, **values: Any) -> Change:
        """Return a change; the order of the values has no meaning."""
        return cls(tuple(sorted(values.items())))

    def plus(self, other: Change) -> Change:
        """Return both changes; a value of `other` replaces one of the same name."""
        return Change.of(**(dict(self.values) | dict(other.values)))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value."""
        return dict(self.values).get(name, default)


class Items(tuple[tuple[str, Any], ...]):
    """The sorted items of a dictionary, which can be hashed."""


def hashable(value: Any) -> Any:
    """Return a JSON value as a part of a change: dictionaries as `Items`, lists as tuples."""
    if isinstance(value, Mapping):
        return Items(sorted((name, hashable(each)) for name, each in value.items()))
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def json_value(value: Any) -> Any:
    """Return the JSON value of `hashable`."""
    if isinstance(value, Items):
        return {name: json_value(each) for name, each in value}
    return [json_value(each) for each in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Subject:
    """Facts about the models and their weights; the catalogue fills its rows with them.

    `announced`: the name of the weights that each side should hold. `weights`: the names of all weights, in the order
    given. `versions`: the version or step that a name stands for, if known. `configurations`: the config.json of each
    name. `unusable`: names that could not be loaded, and why. `layers`: their number; `tensors`: the engine's announced
    names; `longest`: the longest sequence,
    in tokens; `ends`: known ids that end a sequence. `engines`: scorers of real engines that may be used; names with an
    option have a colon. `shortest_prompt` is a length, `common_prompt` the number of first ids that all prompts have in
    common, `first_ids` the ids that a prompt may begin with.
    """

    announced: Mapping[str, str]
    weights: tuple[str, ...]
    configurations: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, int] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    layers: int = 0
    tensors: tuple[str, ...] = ()
    longest: int = 0
    ends: tuple[int, ...] = ()
    engines: tuple[str, ...] = ()
    shortest_prompt: int = 0
    common_prompt: int = 0
    first_ids: tuple[int, ...] = ()


class Experimenter(Protocol):
    """Replays one batch of rollouts.

    `check` raises BudgetSpentError if the time has run out; a replay calls it between its parts.
    """

    check: Callable[[], None]

    @property
    def subject(self) -> Subject:
        """Return the facts about the models and weights that are replayed."""

    def logits(self, change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """Return the logits [T, V] before each response token of `rows` (empty: all rollouts) under `change`.

        Raises CannotTryError.
        """

    def log_probs(self, engine: str) -> NDArray[np.float32]:
        """Return the log-probs [T] of one of the subject's engines with the engine's announced weights.

        Raises CannotTryError with the engine's message.
        """
