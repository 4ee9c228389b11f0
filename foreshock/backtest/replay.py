"""Replay a recorded run through the detectors, row by row as if live: episodes of each rule, and the cost of advice.

For `apply` mode: the scales that a trainer which follows the advice would have got, and their Σ η.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from foreshock.diagnosis.collapse import BASELINE_OBSERVATIONS, collapse_step, floor_of
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.diagnosis.quantities import LEARNING_RATE_KEY, REWARD_KEY
from foreshock.learning_rate.control_loop import LoopState
from foreshock.learning_rate.decisions import AdviceState, Observation, decide, fold_on
from foreshock.learning_rate.length_decay import warmed
from foreshock.severity import Severity

SURGE_STEPS = 50
"""A surge never clears: its episode lasts the steps that follow it without another detection."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A rule in alarm from step ``start`` to step ``end``, both included; ``end`` is None if it had not cleared.

    Rules of one ``cause`` are one episode when all warnings are counted together; the rule's name stands for its cause
    if it has none. ``lowers_rate``: the advice may lower the learning rate for it.
    """

    rule: str
    severity: Severity
    start: int
    end: int | None
    cause: str = ""
    lowers_rate: bool = False

    def holds(self, step: int) -> bool:
        return self.start <= step and (self.end is None or step <= self.end)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A replayed run: its steps, whether a surge could be detected at each, its episodes and its collapse.

    ``usable`` is false if the collapse leaves no baseline before it.
    """

    name: str
    steps: tuple[int, ...]
    armed: tuple[bool, ...]
    episodes: tuple[Episode, ...]
    collapse: int | None
    usable: bool


def replay_episodes(
    steps: Sequence[ClosedStep], configuration: WarningConfiguration
) -> tuple[tuple[Episode, ...], tuple[bool, ...]]:
    """Return the episodes, by start and rule, and whether the length detector was armed at each step.

    The episodes of a prefix of the steps are those of all steps that start in it, with end None if they end beyond it.
    """
    state, armed = WarningState(), list[bool]()
    open_at: dict[tuple[str, int], int] = {}
    episodes: list[Episode] = []
    for closed in steps:
        armed.append(state.armed(configuration.surge))
        state, events = advance(state, closed, configuration)
        for event in events:
            if event.change == "fired":
                open_at[event.rule, event.fired_step] = len(episodes)
                ends = event.rule.startswith("length_") and event.rule != "length_fall"
                end = event.step + SURGE_STEPS if ends else None
                cause = str(event.evidence.get("cause", event.rule))
                lowers = event.moves_learning_rate
                episodes.append(Episode(event.rule, event.severity, event.step, end, cause, lowers))
            else:
                place = open_at.pop((event.rule, event.fired_step), None)
                if place is not None:
                    episodes[place] = replace(episodes[place], end=event.step)
    return tuple(episodes), tuple(armed)


def replay_run(
    name: str, steps: Sequence[ClosedStep], configuration: WarningConfiguration, floor: float | None = None
) -> RecordedRun:
    """Replay a run. ``floor`` is the reward of a policy that learned nothing; None: 0 if no reward is below
    −0.1, −1 if none is below −1, else the lowest one."""
    episodes, armed = replay_episodes(steps, configuration)
    rewards = [(step.step, step.values[REWARD_KEY]) for step in steps if REWARD_KEY in step.values]
    collapse = None
    if rewards:
        lowest = min(reward for _, reward in rewards)
        known = floor_of(lowest) if floor is None else floor
        collapse = collapse_step([step for step, _ in rewards], [reward for _, reward in rewards], known)
    before = sum(1 for step, _ in rewards if collapse is not None and step < collapse)
    usable = collapse is not None and before >= BASELINE_OBSERVATIONS
    return RecordedRun(name, tuple(step.step for step in steps), armed, episodes, collapse, usable)


class AppliedAdvice:
    """The advice of a run in `apply` mode, step by step: each decision holds from the step after its cause.

    ``starts``: the run starts in that mode, with a warm-up.
    """

    def __init__(self, configuration: WarningConfiguration, *, starts: bool = False) -> None:
        self._configuration, self._starts = configuration, starts
        self._state, self._advice = WarningState(), AdviceState()

    def scale(self, step: int) -> float:
        """Return the advised scale of a step, from the decisions so far."""
        scale = self._advice.scale(step)
        return warmed(scale, step, self._advice.floor) if self._starts else scale

    @property
    def loop(self) -> LoopState:
        """The control loop's state after the newest step."""
        return self._state.loop

    def observe(self, closed: ClosedStep) -> None:
        """Judge a closed step; steps come in ascending order."""
        self._state, _ = advance(self._state, closed, self._configuration)
        surge = self._state.surge_step
        seen = Observation(
            1, closed.step, closed.step, surge, 0, self._configuration.schedule,
            loop=self._state.loop, loop_settings=self._configuration.loop,
        )  # fmt: skip
        self._advice = reduce(fold_on, decide(self._advice, seen), self._advice)


def scales_under_apply(steps: Sequence[ClosedStep], configuration: WarningConfiguration) -> list[float]:
    """Return the advised scale of each step if each decision holds from the step after the one that caused it."""
    advice, scales = AppliedAdvice(configuration), list[float]()
    for closed in steps:
        scales.append(advice.scale(closed.step))
        # The recorded rate is not the one that the advice would have left in force.
        values = {key: value for key, value in closed.values.items() if key != LEARNING_RATE_KEY}
        advice.observe(replace(closed, values=values))
    return scales


def lost_learning_rate(steps: Sequence[ClosedStep], scales: Sequence[float]) -> float:
    """Return the share of Σ η that the scales take away; a step without a logged rate has the last one, or 1."""
    rate, total, kept, last = 1.0, 0.0, 0.0, None
    for closed, scale in zip(steps, scales, strict=True):
        logged = closed.values.get(LEARNING_RATE_KEY, math.nan)
        rate = logged if math.isfinite(logged) and logged >= 0.0 else rate
        passed = 1 if last is None else closed.step - last
        total, kept, last = total + passed * rate, kept + passed * rate * scale, closed.step
    return 1.0 - kept / total if total > 0.0 else 0.0
