"""Faults of the logged data, injected into the rollouts of recorded runs and named by the lint; the same runs clean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded_runs import RecordedRun, recorded_runs
from benchmarks.truth.bench import Bench, RefusedError
from benchmarks.truth.case import Case, Outcome, Sentence
from benchmarks.truth.policies import addition_prompts, log_probs, sample_rollouts, save_llama, save_with_sampled_pad
from examples.tiny_rl.task import PAD
from foreshock.rollouts import BatchAttributes, RolloutBatch

Edit = Callable[[RolloutBatch], RolloutBatch]
Steps = dict[int, RolloutBatch]

_OTHER_NAME_OF_A_SHIFT = ("mean_ratio", "tokens_without_engine", "tokens_without_trainer")


def with_target(change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Edit:
    """Return the edit that changes log π."""
    return lambda batch: replace(batch, trainer_log_probs=change(_target(batch)))


def in_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values rounded to bfloat16."""
    return ((values.view(np.uint32) + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32)


def mask_shifted(batch: RolloutBatch) -> RolloutBatch:
    """Shift the response mask by one token: the last token of each response is masked although it has a log μ."""
    mask = np.ones(batch.num_tokens, np.uint8)
    mask[batch.response_offsets[1:] - 1] = 0
    return replace(batch, response_mask=mask)


def duplicated(batch: RolloutBatch, share: float = 1.0) -> RolloutBatch:
    """Log a share of the rollouts twice, as if a batch was padded to a multiple or logged by two ranks."""
    again = batch.select([*range(batch.num_rollouts), *range(round(share * batch.num_rollouts))])
    return replace(again, sample_ids=[f"row-{row}" for row in range(again.num_rollouts)])


def logged(run: RecordedRun, step: int, edit: Edit | None = None, name: str = "clean") -> Callable[[Bench], Outcome]:
    """Return a case's function: log one recorded step, edited, and return what is shown for it."""

    def case(bench: Bench) -> Outcome:
        batch = run.rollouts(step)
        return _shown(bench, f"{run.name}-{step}-{name.replace(' ', '-')}", {step: edit(batch) if edit else batch})

    return case


def pad_sampled(step: int, *, dropped: bool, prompts: int = 16, per_prompt: int = 16) -> Callable[[Bench], Outcome]:
    """Return a case of a model that sometimes samples the pad id; `dropped`: the trainer's attention mask drops it."""

    def case(bench: Bench) -> Outcome:
        weights, batch = bench.once(
            f"pad {step} {prompts}", lambda: _sampled_with_pad(bench, step, prompts, per_prompt)
        )
        target = log_probs(weights, batch, dropped_id=PAD if dropped else None)
        return _shown(bench, f"pad-{step}-{prompts}-{dropped}", {step: replace(batch, trainer_log_probs=target)})

    return case


def pad_masked_in_loss(step: int) -> Callable[[Bench], Outcome]:
    """Return a case of a response mask that drops the sampled pad id; the attention mask is right."""

    def case(bench: Bench) -> Outcome:
        weights, batch = bench.once(f"pad {step} 16", lambda: _sampled_with_pad(bench, step, 16, 16))
        mask = (batch.response_token_ids != PAD).astype(np.uint8)
        target = log_probs(weights, batch)
        return _shown(bench, f"pad-loss-{step}", {step: replace(batch, trainer_log_probs=target, response_mask=mask)})

    return case


def sampled_at(temperature: float, *, declared: bool = False, step: int = 1) -> Callable[[Bench], Outcome]:
    """Return a case of 1,024 rollouts sampled at a temperature and logged raw, from the weights of a step."""

    def case(bench: Bench) -> Outcome:
        weights = recorded_runs()[0].checkpoint(step)
        batch = sample_rollouts(weights, addition_prompts(32), 32, temperature=temperature)
        attributes = BatchAttributes(temperature=temperature, logprobs_mode="raw_logprobs") if declared else None
        batch = replace(batch, trainer_log_probs=log_probs(weights, batch), attributes=attributes or BatchAttributes())
        return _shown(bench, f"temperature-{temperature}-{declared}-{step}", {1: batch})

    return case


def one_step_lag(bench: Bench) -> Outcome:
    """Log one step of rollouts sampled with the weights of step 45, with log π of those of step 160; no replay."""
    run = recorded_runs()[0]
    batch = run.rollouts(45)
    return _shown(bench, "lag", {45: replace(batch, trainer_log_probs=log_probs(run.checkpoint(160), batch))})


def other_architecture(bench: Bench) -> Outcome:
    """Sample from a small Llama with random weights and score it under bfloat16 autocast."""
    weights = save_llama(bench.folder / "llama", seed=3)
    batch = sample_rollouts(weights, [[3, 4, number] for number in range(5, 21)], 16, end=1, longest=40)
    return _shown(bench, "llama", {1: replace(batch, trainer_log_probs=log_probs(weights, batch))})


def certain_policy(mismatch: float) -> Callable[[Bench], Outcome]:
    """Return a case of a nearly certain policy and a trainer with noise of this size; the entropy is a scalar."""

    def case(bench: Bench) -> Outcome:
        batch = recorded_runs()[0].rollouts(160)
        assert batch.entropy is not None
        entropy = float(batch.entropy.mean())
        noise = np.random.default_rng(0).normal(0.0, mismatch, batch.num_tokens)
        target = np.minimum(_target(batch) + noise, 0.0).astype(np.float32)
        stored = replace(batch, trainer_log_probs=target, entropy=None)
        run = bench.log_run(
            f"certain-{mismatch}", {160: stored}, scalars={160: {"actor/entropy": entropy}}, model_kind="dense"
        )
        return bench.shown(run)

    return case


def _sampled_with_pad(bench: Bench, step: int, prompts: int, per_prompt: int) -> tuple[Path, RolloutBatch]:
    weights = save_with_sampled_pad(
        recorded_runs()[0].checkpoint(step), bench.folder / f"pad-{step}-{prompts}", _LOGIT[step]
    )
    return weights, sample_rollouts(weights, addition_prompts(prompts), per_prompt)


def _shown(bench: Bench, key: str, steps: Steps) -> Outcome:
    try:
        stored = bench.log_run(key, steps, model_kind="dense")
    except RefusedError as error:
        return Outcome((Sentence("refused", str(error), names_cause=True),))
    return bench.shown(stored)


def _behaviour(batch: RolloutBatch) -> NDArray[np.float32]:
    assert batch.rollout_log_probs is not None
    return batch.rollout_log_probs


def _target(batch: RolloutBatch) -> NDArray[np.float32]:
    assert batch.trainer_log_probs is not None
    return batch.trainer_log_probs


# By step: the factor on the head's row of the pad id at which it is about 1 % of the sampled tokens.
_LOGIT = {1: 0.8, 45: 1.05}


def _cases() -> tuple[Case, ...]:
    found = [
        Case(f"clean, run {run.name}, step {step}", None, True, logged(run, step))
        for run in recorded_runs()
        for step in run.steps()
    ]
    shipped = recorded_runs()[0]
    found += [
        Case("clean, a Llama with random weights", None, True, other_architecture),
        Case(
            "clean, 16 rollouts of one prompt",
            None,
            True,
            logged(shipped, 45, lambda batch: batch.select(range(16)), "sixteen"),
        ),
        Case("clean, the pad id sampled and kept", None, True, pad_sampled(45, dropped=False)),
        Case("clean, sampled at temperature 1", None, True, sampled_at(1.0)),
        Case("pad id dropped by the attention mask, step 45", _AFTER_ID, True, pad_sampled(45, dropped=True)),
        Case("pad id dropped by the attention mask, step 1", _AFTER_ID, True, pad_sampled(1, dropped=True)),
        Case("the same in 16 rollouts", _AFTER_ID, False, pad_sampled(45, dropped=True, prompts=1)),
        Case("pad id dropped by the response mask", "pad_id_sampled", True, pad_masked_in_loss(45)),
        Case("temperature 0.6, logged raw", "raw_log_probs", True, sampled_at(0.6)),
        Case("temperature 0.6, logged raw, declared", "raw_log_probs", True, sampled_at(0.6, declared=True)),
        Case("temperature 1.4, logged raw", "raw_log_probs", True, sampled_at(1.4)),
        Case("temperature 0.6, a nearly certain policy", "raw_log_probs", False, sampled_at(0.6, step=160)),
        Case("stale rollouts, no replay", "wrong-weights", False, one_step_lag),
        Case("mismatch of a nearly certain policy", "k3_per_entropy", True, certain_policy(0.05)),
        Case("a certain policy without it", None, True, certain_policy(0.0)),
    ]
    faults: tuple[tuple[str, str, Edit, tuple[str, ...]], ...] = (
        (
            "log π shifted by one token", "shifted_log_probs", with_target(lambda pi: np.roll(pi, 1)),
            _OTHER_NAME_OF_A_SHIFT,
        ),
        (
            "log μ shifted by one token", "shifted_log_probs",
            lambda batch: replace(batch, rollout_log_probs=np.roll(_behaviour(batch), -1)), _OTHER_NAME_OF_A_SHIFT,
        ),
        ("response mask shifted by one token", "the mask is shifted by one token", mask_shifted, ()),
        ("negative log-likelihood logged", "logged with the opposite sign", with_target(np.negative), ()),
        ("probabilities logged", "log natural-log probabilities, not probabilities", with_target(np.exp), ()),
        ("log π to base 2", "wrong_log_base", with_target(lambda pi: pi / np.float32(np.log(2))), ("mean_ratio",)),
        ("log π to base 10", "wrong_log_base", with_target(lambda pi: pi / np.float32(np.log(10))), ("mean_ratio",)),
        (
            "log π copied from log μ", "identical_log_probs",
            lambda batch: replace(batch, trainer_log_probs=batch.rollout_log_probs), (),
        ),
        ("log π rounded to bfloat16", "rounded_log_probs", with_target(in_bfloat16), ()),
        (
            "log π NaN at every twentieth token", "non_finite_log_probs",
            with_target(lambda pi: np.where(np.arange(pi.size) % 20 == 7, np.float32(np.nan), pi)), (),
        ),
        ("rollouts logged twice", "duplicated_rollouts", duplicated, ()),
    )  # fmt: skip
    for name, cause, edit, also_true in faults:
        found.append(Case(name, cause, True, logged(shipped, 45, edit, name), also_true, not_healthy=True))
    # Of 128 short answers to 8 prompts, 70 equal another one by chance, so 32 more could be chance too.
    few = logged(shipped, 45, lambda batch: duplicated(batch, 0.25), "quarter twice")
    found.append(Case("a quarter of short rollouts logged twice", "duplicated_rollouts", False, few))
    return tuple(found)


_AFTER_ID = "mismatch_after_id"
CASES = _cases()
