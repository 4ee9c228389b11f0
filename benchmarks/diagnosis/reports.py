"""Public reports of runs, as histories or batches of the shape that the report describes. The numbers are made.

Some reports are held out: every third of the first fifteen, of the next fifteen those with the least hashes of their
names, and all of the last thirteen. No rule was changed after their result was seen, and `results/diagnosis.txt` has
the first one. A diagnosis, or the lint of a batch, is right, honestly unknown, or wrong.
`python -m benchmarks.diagnosis reports`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bars import Line
from benchmarks.diagnosis.curves import noise_of
from benchmarks.diagnosis.field_kinds import (
    RAW,
    Kind,
    World,
    drawn,
    later_turn,
    log_softmax,
    off,
    off_at,
    peaked,
    sampled_by,
)
from benchmarks.diagnosis.histories import Floats, Story, closed, names, told, with_lags
from foreshock.api.diagnosis import Diagnosis
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.quantities import REWARD_KEY
from foreshock.lint import lint_batch
from foreshock.rollouts import BatchAttributes

SEED = 2224
HELD_OUT_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Report:
    """A report: where it is, what happened, and the run with what a careful expert would say of it, or the batch."""

    source: str
    happened: str
    make: Callable[[np.random.Generator], Story] | Kind

    def judge(self, random: np.random.Generator) -> tuple[str, str]:
        """Return "right", "unknown" or "wrong", and what was said."""
        if isinstance(self.make, Kind):
            warnings = lint_batch(self.make.make(random).batch(), model_kind="dense").warnings
            names = {each.name for each in warnings} - {"sampling_not_declared"}
            said = "; ".join(each.title for each in warnings)
            if names - {*self.make.right, *self.make.allowed}:
                return "wrong", said
            return ("right" if names & {*self.make.right} else "unknown"), said
        story = self.make(random)
        found, _, _ = told(story)
        is_right = story.first(found)
        return "right" if is_right else "unknown" if found.verdict == "unknown" else "wrong", found.headline


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


def _grows(random: np.random.Generator) -> Story:
    # Mean |d| from 0.011 to 0.036 over 30 steps.
    k3 = np.asarray(np.square(np.linspace(0.011, 0.036, 30) / 0.8) / 2, np.float64)
    return Story(
        "", closed(random, k3),
        lambda found: "static_mismatch" not in names(found) and "mismatch_jump" not in names(found)
        and (found.verdict == "healthy" or "mismatch" in found.headline),
    )  # fmt: skip


def _derails(random: np.random.Generator) -> Story:
    step = np.arange(1, 551)
    k3 = 2e-4 * np.exp(np.clip((step - 200) * 0.016, 0.0, None))
    reward = 0.55 - 0.5 * np.clip((step - 450) / 60, 0, 1)
    return Story(
        "", closed(random, k3, reward),
        lambda found: found.verdict == "critical" and "the reward fell" in found.headline
        and ": the mismatch (k3) is" in found.headline and found.since is not None and found.since < 450,
    )  # fmt: skip


def _sawtooth(random: np.random.Generator) -> Story:
    # Stale state of the prompt's cache, thrown away at each restart of the engine.
    age = np.arange(102) % 17
    return Story(
        "", closed(random, 4e-4 * np.exp(0.22 * age)),
        lambda found: found.verdict in ("warning", "critical") and "mismatch" in found.headline
        and not {"static_mismatch", "mismatch_jump"} & {*names(found)},
    )  # fmt: skip


def _entropy_crash(random: np.random.Generator) -> Story:
    step = np.arange(1, 181)
    reward = 0.45 + 0.15 * np.minimum(step / 100, 1) - 0.55 * np.clip((step - 130) / 25, 0, 1)
    return Story(
        "", closed(random, np.full(180, 4e-4), reward),
        lambda found: _fallen(found, 130, 10) and "mismatch (k3)" not in found.headline,
    )  # fmt: skip


def _gibberish_at_the_cap(random: np.random.Generator) -> Story:
    step = np.arange(1, 141)
    grown = np.clip((step - 80) / 12, 0, 1)
    return Story(
        "", closed(random, np.full(140, 3e-4), 0.8 - 0.78 * np.clip((step - 84) / 10, 0, 1), 60.0 * 30.0**grown),
        lambda found: found.verdict == "critical" and "the reward fell" in found.headline
        and found.since is not None and 76 <= found.since <= 92,
    )  # fmt: skip


def _adapter_missing(random: np.random.Generator) -> Story:
    step = np.arange(1, 31)
    return Story(
        "", closed(random, np.asarray(2e-4 * (1.0 + 0.5 * (step - 1) ** 2), np.float64)),
        lambda found: names(found)[:1] == ["weights_not_delivered"] and found.verdict in ("warning", "critical"),
    )  # fmt: skip


def _small_numerics(random: np.random.Generator) -> Story:
    return Story(
        "", closed(random, np.full(40, np.square(0.012 / 0.8) / 2)), lambda found: found.verdict == "healthy"
    )  # fmt: skip


def _moe_numerics(random: np.random.Generator) -> Story:
    return Story(
        "", closed(random, np.full(30, 2.7e-3)), lambda found: found.verdict == "healthy", model_kind="moe"
    )  # fmt: skip


def _slow_decline(random: np.random.Generator) -> Story:
    step = np.arange(1, 601)
    reward = 0.3 + 0.35 * np.minimum(step / 250, 1) - 0.25 * np.clip((step - 350) / 250, 0, 1)
    return Story(
        "", closed(random, np.full(600, 4e-4), reward),
        lambda found: found.verdict in ("warning", "critical") and "the reward fell" in found.headline,
    )  # fmt: skip


def _tempered_trainer(random: np.random.Generator) -> World:
    world = drawn(random)
    return replace(world, pi=log_softmax(world.logits / 0.7)[world.states, world.ids], attributes=BatchAttributes())


def _scored_at_one(random: np.random.Generator) -> World:
    world = drawn(random, temperature=0.8)
    raw, cold = (log_softmax(world.logits / each)[world.states, world.ids] for each in (1.0, 0.8))
    return replace(world, mu=raw, pi=cold, attributes=BatchAttributes())


def _declared_temperature(random: np.random.Generator) -> World:
    attributes = replace(RAW, temperature=0.9, logprobs_mode="processed_logprobs")
    return replace(drawn(random, temperature=0.9), attributes=attributes)


def _from_the_start(random: np.random.Generator) -> Story:
    reward = 0.6 - 0.35 * np.linspace(0, 1, 300) + noise_of(0.02, 0.8, 300, random)
    return Story(
        "", closed(random, np.full(300, 4e-4), reward),
        lambda found: found.verdict in ("warning", "critical") and "the reward fell" in found.headline,
    )  # fmt: skip


def _after_400(random: np.random.Generator) -> Story:
    step = np.arange(1, 501)
    reward = 0.3 + 0.3 * np.minimum(step / 200, 1) - 0.35 * np.clip((step - 400) / 30, 0, 1)
    return Story(
        "", closed(random, np.full(500, 2e-4), reward),
        lambda found: _fallen(found, 400, 10) and "mismatch (k3)" not in found.headline,
    )  # fmt: skip


def _after_1500(random: np.random.Generator) -> Story:
    # A score of images of about 0.28, which falls to 0.15.
    reward = 0.7 - 0.5 * np.clip((np.arange(1, 1601) - 1500) / 10, 0, 1)
    steps = _scaled(closed(random, np.full(1600, 1e-4), reward), 0.1, 0.35)
    return Story("", steps, lambda found: _fallen(found, 1500, 10))


def _resumed_lower(random: np.random.Generator) -> Story:
    reward = np.where(np.arange(1, 101) <= 80, 0.7, 0.35)
    return Story(
        "", closed(random, np.full(100, 3e-4), reward), lambda found: _fallen(found, 81, 3), resumes=(80,)
    )  # fmt: skip


def _jitters_and_falls(random: np.random.Generator) -> Story:
    step = np.arange(1, 401)
    reward = 0.4 + 0.35 * np.minimum(step / 150, 1) - 0.25 * np.clip((step - 200) / 150, 0, 1)
    return Story(
        "", closed(random, np.full(400, 3e-4), reward + noise_of(0.06, 0.5, 400, random)),
        lambda found: found.verdict in ("warning", "critical") and "the reward fell" in found.headline,
    )  # fmt: skip


def _shorter_then_longer(random: np.random.Generator) -> Story:
    step = np.arange(1, 151)
    length = 800.0 - 400.0 * np.minimum(step / 30, 1) + 300.0 * np.clip((step - 30) / 90, 0, 1)
    return Story(
        "", closed(random, np.full(150, 3e-4), 0.2 + 0.4 * step / 150, length),
        lambda found: found.verdict == "healthy",
    )  # fmt: skip


def _corrupted_by_the_first_sync(random: np.random.Generator) -> Story:
    first = np.arange(1, 41) == 1
    return Story(
        "", closed(random, np.where(first, 2e-3, 1.5), np.where(first, 0.4, 0.0)),
        lambda found: found.verdict == "critical" and "mismatch" in found.headline
        and "static_mismatch" not in names(found),
        model_kind="moe",
    )  # fmt: skip


def _leaking_packs(random: np.random.Generator) -> World:
    """Return a world in which the trainer packs four rollouts, and all but the first of a pack see those before."""
    world = drawn(random)
    off(world, (world.row % 4 > 0) / np.sqrt(1.0 + world.index / 10.0), random.uniform(0.8, 1.5), random)
    return world


def _none_if_certain(random: np.random.Generator) -> World:
    world = peaked(random)
    return replace(world, mu=np.where(world.mu > -1e-3, np.nan, world.mu))


def _one_seed(random: np.random.Generator) -> World:
    """Return a world whose second engine has the seed of the first: the same responses to the same prompts."""
    world = drawn(random)
    rows = world.offsets.size // 2
    end = world.offsets[rows]
    halves: dict[str, Any] = {name: np.tile(getattr(world, name)[:end], 2) for name in ("states", "ids", "mu", "pi")}
    offsets = np.concatenate([world.offsets[: rows + 1], world.offsets[1 : rows + 1] + end])
    return replace(world, offsets=offsets, truncated=np.tile(world.truncated[:rows], 2), **halves)


def _repetition_penalty(random: np.random.Generator) -> World:
    """Return a world whose engine divides the logits of ids that it has sampled, and logs what it sampled from."""
    world, penalty = drawn(random), random.uniform(1.05, 1.2)
    ids, mu, seen = world.ids.copy(), world.mu.copy(), np.zeros((world.offsets.size - 1, world.logits.shape[1]), bool)
    for index in range(int(world.index.max()) + 1):
        places = np.flatnonzero(world.index == index)
        rows, logits = world.row[places], world.logits[world.states[places]]
        logs = log_softmax(np.where(seen[rows], np.where(logits > 0, logits / penalty, logits * penalty), logits))
        ids[places] = (logs + random.gumbel(size=logs.shape)).argmax(axis=1)
        mu[places] = logs[np.arange(places.size), ids[places]]
        seen[rows, ids[places]] = True
    noisy = log_softmax(world.logits[world.states] + random.normal(0, 0.024, (ids.size, world.logits.shape[1])))
    return replace(world, ids=ids, mu=mu, pi=noisy[np.arange(ids.size), ids], attributes=BatchAttributes())


def _from_a_block_on(world: World, random: np.random.Generator) -> NDArray[np.bool_]:
    return np.asarray((world.index >= 33) & (random.random(world.ids.size) < 0.5))


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
LATER_REPORTS = (
    Report("vllm-project/vime#64", "mean |d| rises from 0.011 to 0.036 over 30 steps", _grows),
    Report("allenai/open-instruct#1473", "the log-probs drift apart until the run derails at about step 450", _derails),
    Report("NVIDIA-NeMo/RL#4018", "a prefix cache stays stale across updates until the engine restarts", _sawtooth),
    Report("verl-project/verl#2738", "the entropy rises suddenly and training crashes", _entropy_crash),
    Report("huggingface/trl#3138", "responses become very long gibberish", _gibberish_at_the_cap),
    Report("NovaSky-AI/SkyRL#1776", "with an adapter the divergence explodes, without it not", _adapter_missing),
    Report("huggingface/trl#4772", "mean |d| of 0.012: numerics, whatever ratios of sequences are", _small_numerics),
    Report("NVIDIA-NeMo/RL#2269", "a mixture with k3 2.7e-3 whose sequence weights are small", _moe_numerics),
    Report("rllm-org/rllm#116", "the entropy keeps rising, the performance falls slowly", _slow_decline),
    Report(
        "GMISWE/tinker-cloud#26", "the trainer's logits are divided by 0.7, the engine's are not",
        Kind(_tempered_trainer, ("temperatures_differ", "temperature_of_trainer"), ("mean_ratio",)),
    ),
    Report(
        "radixark/miles#1345", "log μ is scored again at another temperature than that of sampling",
        Kind(_scored_at_one, ("temperatures_differ", "raw_log_probs"), ("mean_ratio",)),
    ),
    Report(
        "modelscope/ms-swift#8442", "processed log-probs, filtered by top-p",
        Kind(sampled_by(top_p=(0.85, 0.95)), ("processed_log_probs",)),
    ),
    Report(
        "huggingface/trl#3029", "the trainer leaves out the temperature of 0.9",
        Kind(_declared_temperature, ("temperature_of_trainer", "temperatures_differ")),
    ),
    Report(
        "PrimeIntellect-ai/prime-rl#1402", "tokens of later turns are aligned wrongly",
        Kind(off_at(later_turn, 1.0, 2.0), ("mismatch_by_place",)),
    ),
    Report(
        "unslothai/unsloth#1167", "the trainer's mode changes its log-probs",
        Kind(off_at(lambda world, _: np.ones(world.ids.size, bool), 0.25, 0.6), ("mismatch_everywhere",)),
    ),
)  # fmt: skip

UNSEEN_REPORTS = (
    Report("OpenBMB/DeepThinkVLA#1", "the accuracy falls slowly from the first steps on", _from_the_start),
    Report("modelscope/ms-swift#6550", "after 400 good steps all rewards fall together", _after_400),
    Report("XueZeyue/DanceGRPO#45", "after 1,500 flat steps the policy collapses within a few", _after_1500),
    Report("verl-project/verl#3754", "the score is lower at once after a resume", _resumed_lower),
    Report("IDEA-Research/Rex-Omni#53", "the reward jitters, and falls late in training", _jitters_and_falls),
    Report(
        "hkust-nlp/simpleRL-reason#4", "lengths halve, as code is left out, and grow again; the reward rises",
        _shorter_then_longer,
    ),
    Report(
        "NovaSky-AI/SkyRL#1680", "the first weight sync corrupts the experts of the engine",
        _corrupted_by_the_first_sync,
    ),
    Report(
        "NVIDIA-NeMo/RL#2105", "the rows of a pack see each other in the trainer",
        Kind(_leaking_packs, ("mismatch_by_place", "mismatch_everywhere"), ("mean_ratio",)),
    ),
    Report(
        "huggingface/trl#6693", "the engine has no log-prob for tokens that are nearly certain",
        Kind(_none_if_certain, ("non_finite_log_probs",), ("tokens_without_engine", "k3_per_entropy")),
    ),
    Report(
        "modelscope/ms-swift#7858", "two engines with one seed return the same responses",
        Kind(_one_seed, ("duplicated_rollouts",)),
    ),
    Report(
        "PrimeIntellect-ai/prime-rl#886", "the engine applies a repetition penalty, the trainer does not",
        Kind(_repetition_penalty, ("penalty_of_engine",)),
    ),
    Report(
        "vllm-project/vllm#54035", "with an FP8 cache half of the log-probs differ from one block on",
        Kind(off_at(_from_a_block_on, 0.1, 0.3), ("mismatch_by_place",)),
    ),
    Report(
        "modelscope/twinkle#254", "processed log-probs of which truncation cut off a quarter of a percent",
        Kind(sampled_by(top_p=(0.994, 0.998)), ("processed_log_probs",)),
    ),
)  # fmt: skip


def held_out() -> frozenset[str]:
    """Return the sources of the reports that are held out."""
    by_hash = sorted(LATER_REPORTS, key=lambda each: sha256(each.source.encode()).hexdigest())
    return frozenset(each.source for each in (*REPORTS[2::3], *by_hash[: len(by_hash) // 3], *UNSEEN_REPORTS))


def measure() -> list[Line]:
    """Measure the reports."""
    right: list[str] = []
    held: list[str] = []
    apart = held_out()
    for number, report in enumerate((*REPORTS, *LATER_REPORTS, *UNSEEN_REPORTS), start=1):
        word, said = report.judge(np.random.default_rng([SEED, number]))
        (held if report.source in apart else right).append(word)
        print(f"{report.source:32} {'held out' if report.source in apart else '':9} {word:8} {said}")
    return [
        Line("reports_right", f"of {len(right)} reports, right", right.count("right"), len(right), at_least=True),
        Line(
            "reports_held_out", f"of {len(held)} held out, right", held.count("right"), HELD_OUT_SHARE * len(held),
            at_least=True,
        ),
        Line("reports_wrong", "reports, wrong", (right + held).count("wrong"), 0),
    ]  # fmt: skip
