"""Public reports of runs, as histories with the shape that the report describes. The numbers between are made.

Every third report is held out: no rule was changed after its result was seen, and `results/diagnosis.txt` has the first
one. A diagnosis is right, honestly unknown, or wrong. `python -m benchmarks.diagnosis reports`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.bars import Line
from benchmarks.diagnosis.histories import Floats, Story, closed, names, told, with_lags
from foreshock.api.diagnosis import Diagnosis
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.quantities import REWARD_KEY

SEED = 2224
HELD_OUT_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Report:
    """A report: where it is, what happened, the run, and whether a diagnosis says what a careful expert would say."""

    source: str
    happened: str
    make: Callable[[np.random.Generator], Story]


def _fallen(found: Diagnosis, step: int, near: int = 6) -> bool:
    return found.since is not None and abs(found.since - step) <= near and "the reward fell" in found.headline


def _resume(bad: int, level: float) -> Callable[[np.random.Generator], Story]:
    def make(random: np.random.Generator) -> Story:
        k3, reward = np.full(110, 4e-4), np.full(110, 0.5)
        k3[80 : 80 + bad], reward[80 : 80 + bad] = level, 0.2
        where = "at step 81" if bad == 1 else f"in steps 81 to {80 + bad}"
        return Story(
            "", closed(random, k3, reward),
            lambda found: names(found)[:1] == ["mismatch_in_steps"] and f"{where}, at the resume" in found.headline,
            resumes=(80,),
        )  # fmt: skip

    return make


def _scaled(steps: Sequence[ClosedStep], low: float, high: float) -> list[ClosedStep]:
    """Return the steps with rewards between two values instead of 0 and 1."""
    return [
        replace(step, values={**step.values, REWARD_KEY: low + (high - low) * step.values[REWARD_KEY]})
        for step in steps
    ]


def _gibberish(random: np.random.Generator) -> Story:
    step = np.arange(1, 121)
    reward = np.where(step < 63, 0.75, 0.0)
    steps = _scaled(closed(random, np.where(step < 63, 3e-4, 1e-6), reward), -5.5, 0.5)
    return Story("", steps, lambda found: _fallen(found, 63) and "mismatch (k3)" not in found.headline)


def _late_zero(random: np.random.Generator) -> Story:
    step = np.arange(1, 701)
    reward = np.where(step < 650, 0.3 + 0.4 * np.minimum(step / 400, 1), 0.0)
    return Story("", closed(random, np.full(700, 2e-4), reward), lambda found: _fallen(found, 650))


def _explodes(random: np.random.Generator) -> Story:
    step = np.arange(1, 201)
    k3 = 2e-4 * np.exp(np.clip((step - 140) * 0.25, 0, 7))
    reward = 0.4 - 0.39 * np.clip((step - 160) / 10, 0, 1)
    return Story(
        "", closed(random, k3, reward),
        lambda found: _fallen(found, 143) and ": the mismatch (k3) is" in found.headline,
    )  # fmt: skip


def _to_one_token(random: np.random.Generator) -> Story:
    step = np.arange(1, 151)
    shrunk = np.clip((step - 70) / 40, 0, 1)
    reward = np.where(shrunk < 1, 0.55, 0.02)
    return Story(
        "", closed(random, np.full(150, 3e-4), reward, 120.0 * 0.012**shrunk),
        lambda found: "the reward fell" in found.headline and any(each.rule == "length_fall" for each in found.events),
    )  # fmt: skip


def _shorter(random: np.random.Generator) -> Story:
    step = np.arange(1, 101)
    return Story(
        "", closed(random, np.full(100, 3e-4), 0.4 + 0.2 * step / 100, 52.0 * 0.3 ** (step / 100)),
        lambda found: found.verdict == "healthy",
    )  # fmt: skip


def _with_shares(steps: Sequence[ClosedStep], k3: Floats, shares: dict[str, float]) -> list[ClosedStep]:
    times = {"0": 1.0, "1": 20.0, "2": 40.0, "3-4": 80.0}
    return [
        with_lags(step, {lag: times[lag] * float(level) for lag in shares}, shares)
        for step, level in zip(steps, k3, strict=True)
    ]


def _async_collapse(random: np.random.Generator) -> Story:
    step = np.arange(1, 101)
    reward = 0.24 - 0.24 * np.clip((step - 60) / 4, 0, 1)
    k3 = np.full(100, 3e-4)
    steps = _with_shares(closed(random, k3, reward), k3, {"0": 0.3, "1": 0.4, "2": 0.3})
    return Story("", steps, lambda found: _fallen(found, 60))


def _length_spikes(random: np.random.Generator) -> Story:
    length = np.full(120, 400.0)
    length[[25, 47, 48, 80, 101]] *= 2.5
    return Story(
        "", closed(random, np.full(120, 3e-4), np.linspace(0.3, 0.6, 120), length),
        lambda found: found.verdict == "healthy",
    )  # fmt: skip


def _staleness(random: np.random.Generator) -> Story:
    k3 = np.full(80, 2e-5)
    steps = _with_shares(closed(random, k3), k3, {"0": 0.25, "1": 0.25, "2": 0.5})
    return Story("", steps, lambda found: found.verdict == "healthy" and "at lag 0" in found.headline)


def _repeats_to_the_cap(random: np.random.Generator) -> Story:
    step = np.arange(1, 161)
    grown = np.clip((step - 100) / 15, 0, 1)
    return Story(
        "", closed(random, np.full(160, 3e-4), 0.6 - 0.55 * np.clip((step - 105) / 10, 0, 1), 300.0 * 4.0**grown),
        lambda found: "the reward fell" in found.headline and found.since is not None and 95 <= found.since <= 111,
    )  # fmt: skip


def _sudden_drop(random: np.random.Generator) -> Story:
    step = np.arange(1, 204)
    reward = np.where(step < 120, 0.25 + 0.2 * np.minimum(step / 80, 1), 0.03)
    return Story("", closed(random, np.full(203, 5e-4), reward), lambda found: _fallen(found, 120))


def _never_rewarded(random: np.random.Generator) -> Story:
    return Story(
        "", closed(random, np.full(60, 1e-5), np.zeros(60)),
        lambda found: found.verdict != "critical" and "fell" not in found.headline,
    )  # fmt: skip


def _healthy_sync(random: np.random.Generator) -> Story:
    return Story(
        "", closed(random, np.full(60, 3e-3)), lambda found: found.verdict == "healthy" and not found.causes,
        model_kind="moe",
    )  # fmt: skip


def _silent_regression(random: np.random.Generator) -> Story:
    k3 = np.where(np.arange(1, 121) < 90, 2e-4, 6e-3)
    return Story(
        "", closed(random, k3),
        lambda found: names(found)[:1] == ["mismatch_jump"] and "at step 90" in found.headline
        and found.verdict == "warning",
    )  # fmt: skip


REPORTS = (
    Report(
        "THUDM/slime#2224",
        "reference weights for three steps after a resume; reward falls, then heals",
        _resume(3, 0.4),
    ),
    Report("THUDM/slime#2380", "the first rollout after a resume is of the reference weights", _resume(1, 0.15)),
    Report("mll-lab-nu/RAGEN#52", "from step 63 on every response is `!`, the score stays at −5.5", _gibberish),
    Report("facebookresearch/SPG#2", "the reward is 0 after 650 steps", _late_zero),
    Report("PeterGriffinJin/Search-R1#88", "the run explodes at about step 160", _explodes),
    Report("huggingface/trl#522", "responses shrink to the end token, then the reward falls", _to_one_token),
    Report("huggingface/trl#986", "lengths fall slowly while the reward rises", _shorter),
    Report(
        "marin-community/marin#8955", "an asynchronous run with staleness 3 collapses at update 60", _async_collapse
    ),
    Report("OpenRLHF/OpenRLHF#236", "spikes of the response length at single steps", _length_spikes),
    Report("Tencent-Hunyuan/UniRL#310", "a budget of staleness: numerics are small, the rest is lag", _staleness),
    Report("OpenLMLab/MOSS-RLHF#2", "a failing run repeats itself up to the length cap", _repeats_to_the_cap),
    Report("Alibaba-NLP/ZeroSearch#23", "a sudden drop of the reward", _sudden_drop),
    Report("modelscope/ms-swift#3372", "all rewards are 0 from the start", _never_rewarded),
    Report("Tencent-Hunyuan/UniRL#226", "a full weight sync of a mixture of experts is as it should be", _healthy_sync),
    Report("verl-project/verl-omni#291", "a regression of the log-probs that no number showed", _silent_regression),
)


def measure() -> list[Line]:
    """Measure the reports; every third one is held out."""
    right: list[str] = []
    held: list[str] = []
    for number, report in enumerate(REPORTS, start=1):
        story = report.make(np.random.default_rng([SEED, number]))
        found, _, _ = told(story)
        is_right = story.first(found)
        word = "right" if is_right else "unknown" if found.verdict == "unknown" else "wrong"
        (held if number % 3 == 0 else right).append(word)
        print(f"{report.source:32} {'held out' if number % 3 == 0 else '':9} {word:8} {found.headline}")
    return [
        Line("reports_right", f"of {len(right)} reports, right", right.count("right"), len(right), at_least=True),
        Line(
            "reports_held_out", f"of {len(held)} held out, right", held.count("right"), HELD_OUT_SHARE * len(held),
            at_least=True,
        ),
        Line("reports_wrong", "reports, wrong", (right + held).count("wrong"), 0),
    ]  # fmt: skip
