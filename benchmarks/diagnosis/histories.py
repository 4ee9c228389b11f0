"""Histories with a known story, and healthy runs: what the detectors and the diagnosis say of them at their end.

Each step has the measures of drawn differences d, so that all rules on one mismatch see the same tokens. Of a run that
collapses, is stale, static, jumps, ramps, has single bad steps or bad steps that recur, the first cause is right, its
onset is within 5 steps or 5 % of the run and the same wherever it is told, and the first thing to do is not
harmful. `python -m benchmarks.diagnosis histories healthy_runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.bars import Line
from benchmarks.diagnosis.curves import noise_of
from foreshock.api.diagnosis import Diagnosis
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.course import causes_of_course
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.episodes import episodes_of, is_told
from foreshock.diagnosis.headline import MOST_CHARACTERS
from foreshock.diagnosis.history import WINDOW_STEPS, History, PastAlert, SteppedValues
from foreshock.diagnosis.lags import K3_KEYS, LAG_KEY, TOKENS_KEYS, StepLags
from foreshock.diagnosis.largest_token import without_largest_token
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import LENGTH_KEY, REWARD_KEY
from foreshock.diagnosis.reward import COLLAPSE_RULE
from foreshock.diagnosis.rule import Event
from foreshock.diagnosis.short_headline import MOST_CHARACTERS as MOST_OF_A_ROW
from foreshock.model_kind import ModelKind

Floats = NDArray[np.float64]
Values = dict[str, float]
TOKENS, TOKENS_KEY = 2000, f"{TRAINER_ROLLOUT}:tokens"
STEPS = 120
SEED = 470
"""Seed of the histories; the constants of the rules were chosen with other data."""

CLOSE_STEPS, CLOSE_SHARE = 5, 0.05
MOST_EPISODES, MOST_MESSAGES = 3, 4
LEAST_RIGHT, HISTORIES = 38, 40
LARGEST_WARNINGS_PER_1000, LARGEST_JUMPS = 1.0, 0.01


@dataclass(frozen=True, slots=True)
class Story:
    """A generated run: its steps in order, and what is true of it.

    `first` says if a diagnosis tells the right first cause; `onset` is the step at which it began, None if nothing did.
    `way_back` is the newest checkpoint that holds good weights, if the run collapsed.
    """

    kind: str
    steps: Sequence[ClosedStep]
    first: Callable[[Diagnosis], bool]
    onset: int | None = None
    way_back: int | None = None
    model_kind: ModelKind = "dense"
    resumes: tuple[int, ...] = ()


def measures_of(k3: float, random: np.random.Generator, wild: float | None = None) -> Values:
    """Return the measures of one step whose differences have this k3 and the tails of Student's t with 6 degrees."""
    sigma = np.sqrt(2.0 * min(k3, 2.0))
    d = random.standard_t(6, TOKENS) * sigma / np.sqrt(1.5)
    d = np.clip(d - sigma * sigma / 2.0, -12.0, 6.0)
    if wild is not None:
        d[0] = wild
    ratio, size = np.exp(d), np.abs(d)
    found = {
        "k3_kl": (np.expm1(d) - d).mean(),
        "tokens": TOKENS,
        "min_d": d.min(),
        "max_d": d.max(),
        "mean_abs_d": size.mean(),
        "tail_2": (size > np.log(2.0)).mean(),
        "tail_asymmetry_ln2": (d < -np.log(2.0)).mean() - (ratio * (d > np.log(2.0))).mean(),
        "mean_ratio": ratio.mean(),
        "chi2_token": np.square(ratio - 1.0).mean(),
        "reverse_chi2_token": (np.square(1.0 - ratio) / ratio).mean(),
        "ess_token": ratio.sum() ** 2 / (TOKENS * np.square(ratio).sum()),
        "max_abs_d": size.max(),
    }
    return {f"{TRAINER_ROLLOUT}:{name}": float(value) for name, value in found.items()}


def closed(
    random: np.random.Generator,
    k3: Floats,
    reward: Floats | None = None,
    length: Floats | None = None,
    wild: float | None = None,
) -> list[ClosedStep]:
    """Return steps from 1 on with these levels of k3, and with noise on reward (256 rollouts) and lengths."""
    count = len(k3)
    reward = np.full(count, 0.6) if reward is None else reward
    length = np.full(count, 700.0) if length is None else length
    rewards = random.binomial(256, np.clip(reward, 0.0, 1.0)) / 256
    lengths = length * np.exp(0.05 * random.normal(size=count))
    return [
        ClosedStep(
            place + 1,
            measures_of(float(k3[place]), random, wild)
            | {REWARD_KEY: float(rewards[place]), LENGTH_KEY: float(lengths[place])},
        )
        for place in range(count)
    ]


def with_lags(step: ClosedStep, levels: Mapping[str, float], shares: Mapping[str, float]) -> ClosedStep:
    """Return a step whose tokens are at several lags, with a k3 each; the lag of the step is their mean."""
    values, mean = dict(step.values), 0.0
    for lag, share in shares.items():
        values[TOKENS_KEYS[lag]], values[K3_KEYS[lag]] = share * TOKENS, levels[lag]
        mean += share * float(lag.partition("-")[0])
    values[LAG_KEY], values[K3] = mean, sum(levels[lag] * share for lag, share in shares.items())
    return replace(step, values=values)


def told(story: Story) -> tuple[Diagnosis, list[PastAlert], list[Event]]:
    """Return the diagnosis after the steps, all alerts, and the events that fired."""
    steps = list(story.steps)
    state, chosen = WarningState(), WarningConfiguration.for_model(story.model_kind)
    events: list[Event] = []
    for step in steps:
        state, found = advance(state, step, chosen)
        events.extend(found)
    over = {(each.rule, each.fired_step): each.step for each in events if each.change == "cleared"}
    fired = [each for each in events if each.change == "fired"]
    alerts = [
        PastAlert(
            each.rule, each.severity, each.step, (each.rule, each.step) not in over, each.why, each.what_to_do,
            each.value, each.threshold, each.evidence, over.get((each.rule, each.step)),
        )
        for each in fired
    ]  # fmt: skip
    return diagnose(_history(story, steps, alerts)), alerts, fired


def _history(story: Story, steps: Sequence[ClosedStep], alerts: Sequence[PastAlert]) -> History:
    newest, first = steps[-WINDOW_STEPS:], steps[: max(0, len(steps) - WINDOW_STEPS)][:16]
    judged = {step.step: without_largest_token(step.values) for step in (*newest, *first)}
    checkpoints = range(10, len(steps), 10)

    def series(key: str) -> SteppedValues:
        return SteppedValues([each.step for each in newest], [each.values[key] for each in newest])

    return History(
        alerts=tuple(alerts),
        observed_step=steps[-1].step,
        newest_step=steps[-1].step,
        k3=series(K3),
        tokens=[int(each.values[TOKENS_KEY]) for each in newest],
        k3_of_others=[judged[each.step].get(K3, each.values[K3]) for each in newest],
        lags=[StepLags.of(judged[each.step]) for each in newest],
        first_k3=SteppedValues(
            [each.step for each in first], [judged[each.step].get(K3, each.values[K3]) for each in first]
        ),
        first_lags=[StepLags.of(judged[each.step]) for each in first],
        reward=series(REWARD_KEY),
        length=series(LENGTH_KEY),
        model_kind=story.model_kind,
        checkpoints=list(checkpoints),
        resumes=story.resumes,
    )


def names(found: Diagnosis) -> list[str]:
    """Return the names of the causes, in their order."""
    return [each.name for each in found.causes]


def _collapse_by_mismatch(number: int, random: np.random.Generator) -> Story:
    onset, rate = int(random.integers(35, 60)), random.uniform(0.12, 0.25)
    step = np.arange(1, STEPS + 1)
    base = random.uniform(1e-4, 3e-4)
    k3 = base * np.exp(np.clip((step - onset) * rate, 0.0, 6.5))
    fall = np.clip((step - onset - 25) / 15, 0.0, 1.0)
    # The step at which k3 has doubled: the onset of a ramp that nobody could see earlier.
    rise = onset + int(np.ceil(np.log(2.0) / rate))
    return Story(
        "collapse by mismatch", closed(random, k3, 0.62 - 0.6 * fall),
        lambda found: found.headline.startswith("Critical") and "mismatch" in found.headline
        and "the reward fell" in found.headline,
        rise, 10 * ((rise - 1) // 10),
    )  # fmt: skip


def _collapse_by_reward(number: int, random: np.random.Generator) -> Story:
    onset = int(random.integers(40, 70))
    step = np.arange(1, STEPS + 1)
    fall = np.clip((step - onset) / random.uniform(5, 20), 0.0, 1.0)
    return Story(
        "collapse by reward", closed(random, np.full(STEPS, 2e-4), 0.7 - 0.68 * fall),
        lambda found: found.headline.startswith("Critical") and ": the reward fell" in found.headline
        and "the mismatch rose first" not in found.headline,
        onset, 10 * (onset // 10),
    )  # fmt: skip


def _collapse_by_length(number: int, random: np.random.Generator) -> Story:
    onset = int(random.integers(40, 60))
    step = np.arange(1, STEPS + 1)
    fall = np.clip((step - onset) / 20, 0.0, 1.0)
    return Story(
        "collapse by length", closed(random, np.full(STEPS, 2e-4), 0.6 - 0.58 * fall, 900.0 * 0.03**fall),
        lambda found: found.headline.startswith("Critical") and "the reward fell" in found.headline
        and "mismatch (k3)" not in found.headline,
        onset, 10 * (onset // 10),
    )  # fmt: skip


def _stale(number: int, random: np.random.Generator) -> Story:
    fresh, steps = random.uniform(1e-4, 6e-4), []
    for step in closed(random, np.full(STEPS, fresh)):
        levels = {"0": fresh, "1": fresh * random.uniform(20, 40), "2": fresh * random.uniform(60, 100)}
        steps.append(with_lags(step, levels, {"0": 0.4, "1": 0.3, "2": 0.3}))
    return Story(
        "staleness", steps, lambda found: found.verdict == "healthy" and "at lag 0 the mismatch" in found.headline
    )


def _static(number: int, random: np.random.Generator) -> Story:
    level = float(np.exp(random.uniform(np.log(5e-3), np.log(0.6))))
    return Story(
        "static", closed(random, level * np.exp(0.03 * random.normal(size=STEPS))),
        lambda found: names(found)[:1] == ["static_mismatch"] and "since step 1:" in found.headline, 1,
    )  # fmt: skip


def _step(number: int, random: np.random.Generator) -> Story:
    at, times = int(random.integers(70, 105)), random.uniform(20.0, 100.0)
    k3 = np.where(np.arange(1, STEPS + 1) < at, 3e-4, 3e-4 * times)
    return Story(
        "step", closed(random, k3),
        lambda found: names(found)[:1] == ["mismatch_jump"] and f"at step {at}" in found.headline, at,
    )  # fmt: skip


def _ramp(number: int, random: np.random.Generator) -> Story:
    start, rate = int(random.integers(30, 50)), random.uniform(0.06, 0.1)
    k3 = 2e-4 * np.exp(np.clip((np.arange(1, STEPS + 1) - start) * rate, 0.0, None))
    rise = start + int(np.ceil(np.log(2.0) / rate))
    return Story(
        "ramp", closed(random, k3),
        lambda found: found.verdict in ("warning", "critical") and "mismatch" in found.headline
        and "mismatch_jump" not in names(found) and "static_mismatch" not in names(found),
        rise,
    )  # fmt: skip


def _spike(number: int, random: np.random.Generator) -> Story:
    at, k3 = int(random.integers(62, 115)), np.full(STEPS, 3e-4)
    k3[at - 1] = random.uniform(0.05, 0.7)
    return Story(
        "spike", closed(random, k3),
        lambda found: found.verdict == "healthy" and names(found)[:1] == ["mismatch_in_steps"]
        and f"at step {at}, healthy since" in found.headline,
    )  # fmt: skip


def _periodic(number: int, random: np.random.Generator) -> Story:
    every, k3 = int(random.integers(3, 12)), np.full(STEPS, 3e-4)
    k3[every - 1 :: every] = random.uniform(0.1, 0.7)
    return Story(
        "periodic", closed(random, k3),
        lambda found: found.verdict in ("warning", "critical") and names(found)[:1] == ["mismatch_in_steps"]
        and f"every {every} steps" in found.headline,
        every,
    )  # fmt: skip


def _resume(number: int, random: np.random.Generator) -> Story:
    at, k3 = int(random.integers(70, 100)), np.full(STEPS, 3e-4)
    k3[at - 1 : at + 2] = random.uniform(0.1, 0.9)
    return Story(
        "resume", closed(random, k3),
        lambda found: names(found)[:1] == ["mismatch_in_steps"]
        and f"in steps {at} to {at + 2}, at the resume" in found.headline,
        resumes=(at,),
    )  # fmt: skip


KINDS: Mapping[Callable[[int, np.random.Generator], Story], int] = {
    _collapse_by_mismatch: 5, _collapse_by_reward: 5, _collapse_by_length: 4, _stale: 4, _static: 5, _step: 5, _ramp: 4,
    _spike: 3, _periodic: 3, _resume: 2,
}  # fmt: skip


def stories() -> Iterator[Story]:
    """Yield the 40 histories."""
    for kind, (make, count) in enumerate(KINDS.items()):
        for number in range(count):
            yield make(number, np.random.default_rng([SEED, kind, number]))


def measure() -> list[Line]:
    """Measure the histories."""
    right = onsets = harmless = dated = fits = 0
    most_episodes = most_messages = collapses = first = 0
    for story in stories():
        found, alerts, _ = told(story)
        is_right, is_close = story.first(found), _is_close(story, found)
        right += is_right
        onsets += is_close
        dated += _is_the_same(found)
        harmless += _is_harmless(story, found)
        fits += len(found.headline) <= MOST_CHARACTERS and len(found.short) <= MOST_OF_A_ROW
        if not (is_right and is_close and _is_the_same(found) and _is_harmless(story, found)):
            print(f"{story.kind} from step {story.onset}: {found.headline}\n    {found.next_steps[:1]} {names(found)}")
        if story.way_back is not None:
            collapses += 1
            episodes = episodes_of(each for each in alerts if each.is_open)
            first += bool(episodes) and episodes[0][0].rule == COLLAPSE_RULE
            most_episodes = max(most_episodes, len(episodes))
            most_messages = max(most_messages, _messages(alerts))
    all_of = f"of {HISTORIES} histories,"
    return [
        Line("histories_right", f"{all_of} first cause right", right, LEAST_RIGHT, at_least=True),
        Line("histories_onset", f"{all_of} onset within 5 steps or 5 %", onsets, HISTORIES, at_least=True),
        Line("histories_one_date", f"{all_of} one date in all texts", dated, HISTORIES, at_least=True),
        Line("histories_harmless", f"{all_of} first thing to do not harmful", harmless, HISTORIES, at_least=True),
        Line("histories_fit", f"{all_of} headline and row fit", fits, HISTORIES, at_least=True),
        Line("histories_collapse_first", f"of {collapses} collapses, told first", first, collapses, at_least=True),
        Line("histories_most_episodes", "open episodes after a collapse, most", most_episodes, MOST_EPISODES),
        Line("histories_most_messages", "messages to a person in a collapse, most", most_messages, MOST_MESSAGES),
    ]  # fmt: skip


def _is_close(story: Story, found: Diagnosis) -> bool:
    if story.onset is None:
        return found.since is None
    largest = max(CLOSE_STEPS, CLOSE_SHARE * len(story.steps))
    return found.since is not None and abs(found.since - story.onset) <= largest


def _is_the_same(found: Diagnosis) -> bool:
    """Return whether the headline's date is that of an event that is told, and no told event above info is older."""
    if found.since is None:
        return True
    onsets = [each.onset for each in found.events if each.is_told and each.severity == found.verdict]
    return f"since step {found.since}:" in found.headline and (not onsets or min(onsets) >= found.since)


def _is_harmless(story: Story, found: Diagnosis) -> bool:
    """Return whether a way back is told after a collapse only, and leads to weights from before its onset."""
    first = found.next_steps[0] if found.next_steps else ""
    if story.way_back is None:
        return "go back" not in first
    _, _, rest = first.partition("the checkpoint of step ")
    return bool(rest) and int(rest.split(",", 1)[0]) <= story.way_back


def _messages(alerts: Sequence[PastAlert]) -> int:
    """Return how many messages a person gets who is told about warnings and critical alerts as they open."""
    sent: list[PastAlert] = []
    for alert in sorted(alerts, key=lambda each: each.step):
        standing = [each for each in sent if each.cleared is None or each.cleared > alert.step]
        if alert.severity != "info" and not is_told(alert, standing):
            sent.append(alert)
    return len(sent)


HEALTHY: Mapping[str, int] = {
    "dense": 600, "moe": 200, "lags": 200, "wild": 200, "wander": 200, "waves": 100, "large waves": 20,
}  # fmt: skip
WAVES = {"waves": (0.02, 0.06), "large waves": (0.12, 0.12)}
"""Amplitudes of rewards about 0.5. A fall by a quarter is a warning by definition, so that large waves have no bar."""
HEALTHY_STEPS = 100


def healthy_run(group: str, number: int) -> Story:
    """Return a healthy run of a group."""
    random = np.random.default_rng([SEED, 100, list(HEALTHY).index(group), number])
    low, high = (1.5e-3, 8e-3) if group == "moe" else (1e-5, 8e-4)
    level = float(np.exp(random.uniform(np.log(low), np.log(high))))
    k3 = level * np.exp(0.1 * random.normal(size=HEALTHY_STEPS))
    reward = np.clip(np.linspace(0.3, 0.7, HEALTHY_STEPS), 0, 1)
    if group == "wander":
        k3 = 1.5e-4 * np.exp(noise_of(0.5, (0.9, 0.97)[number % 2], HEALTHY_STEPS, random))
    if group in WAVES:
        swing, period = random.uniform(*WAVES[group]), random.uniform(20.0, 60.0)
        reward = 0.5 + swing * np.sin(2 * np.pi * np.arange(HEALTHY_STEPS) / period)
    wild = float(random.choice([-7.2, 7.2, 12.0, -12.0])) if group == "wild" else None
    steps = closed(random, k3, reward, wild=wild)
    if group == "lags":
        levels = [{"0": value, "1": 30.0 * value, "2": 80.0 * value} for value in k3.tolist()]
        steps = [
            with_lags(step, of_step, {"0": 0.4, "1": 0.3, "2": 0.3})
            for step, of_step in zip(steps, levels, strict=True)
        ]
    return Story(group, steps, lambda _: True, model_kind="moe" if group == "moe" else "dense")


def _has_jump(story: Story, last: int) -> bool:
    """Return whether k3 of the 64 newest steps at step `last` is told to have a jump."""
    window = [step.values for step in story.steps[max(0, last - WINDOW_STEPS) : last]]
    key = K3_KEYS["0"] if K3_KEYS["0"] in window[0] else K3
    k3 = [without_largest_token(values).get(key, values[key]) for values in window]
    return any(each.name == "mismatch_jump" for each in causes_of_course(range(len(k3)), k3, ()))


def measure_healthy() -> list[Line]:
    """Measure false alarms, jumps and the lengths of sentences of healthy runs."""
    lines, critical, long = [], 0, 0
    for group, runs in HEALTHY.items():
        warnings = jumps = 0
        for number in range(runs):
            story = healthy_run(group, number)
            found, _, fired = told(story)
            warnings += sum(each.severity == "warning" for each in fired)
            critical += sum(each.severity == "critical" for each in fired)
            jumps += any(_has_jump(story, last) for last in (40, 70, HEALTHY_STEPS))
            long += len(found.headline) > MOST_CHARACTERS
        rate = 1000.0 * warnings / (runs * HEALTHY_STEPS)
        bar, key = None if group == "large waves" else LARGEST_WARNINGS_PER_1000, group.replace(" ", "_")
        lines += [
            Line(f"healthy_{key}_warnings", f"{group}: warnings per 1,000 steps", rate, bar),
            Line(f"healthy_{key}_jumps", f"{group}: jumps, of {runs} runs", jumps, LARGEST_JUMPS * runs),
        ]
    return [
        *lines,
        Line("healthy_critical", "healthy runs: critical alerts", critical, 0),
        Line("healthy_long", "healthy runs: headlines that do not fit", long, 0),
    ]
