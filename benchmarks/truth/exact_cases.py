"""Exact divergences whose true size is known: equal precision, float32 against bfloat16, few rollouts against many.

The runs log no log-probs of their own: the chain is `vllm.prefill → torch.trainer`, so that the only cause that may be
named is engine against trainer numerics, which is true by construction. Each case reads what the product shows and
raises if its exact divergence is not the true one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.recorded_runs import shipped_run
from benchmarks.truth.bench import Bench
from benchmarks.truth.case import Case, Outcome
from benchmarks.truth.policies import addition_prompts, sample_rollouts
from foreshock.rollouts import RolloutBatch
from foreshock.scorers import EXACT_PAIRS

__all__ = ["CASES"]

(PAIR,) = EXACT_PAIRS.values()
_NUMERICS = ("engine against trainer numerics",)
_PER_PROMPT, _PROMPTS, _FEW_PROMPTS = 8, 48, 8
_STEP = 160
# vLLM in float32, as the torch model in float32 that sampled the rollouts: its distribution is μ, up to rounding.
_FLOAT32_ENGINE = {PAIR.behaviour: {"dtype": "float32"}}
_FLOAT32_TRAINER = {PAIR.target: {"autocast": None, "master_dtype": "float32"}}
# Divergences of two float32 forward passes are below this, those of bfloat16 above: 4e-14 and 1e-5 were measured.
_ROUNDING = 1e-10


def rollouts_of(bench: Bench, prompts: int = _PROMPTS) -> RolloutBatch:
    """Return rollouts of the first prompts, sampled in float32, without logged log-probs."""

    def sample() -> RolloutBatch:
        weights = shipped_run().checkpoint(_STEP)
        sampled = sample_rollouts(weights, addition_prompts(_PROMPTS, seed=4), _PER_PROMPT, seed=4)
        return dataclasses.replace(sampled, rollout_log_probs=None, trainer_log_probs=None, entropy=None)

    whole = bench.once("exact rollouts", sample)
    return whole.select(np.arange(prompts * _PER_PROMPT))


def probed(
    bench: Bench, key: str, options: Mapping[str, Any], prompts: int = _PROMPTS
) -> tuple[Outcome, dict[str, Any]]:
    """Log, probe both scorers and their pair; return what is shown and the exact divergences."""
    weights = shipped_run().checkpoint(_STEP)
    run = bench.log_run(key, {_STEP: rollouts_of(bench, prompts)}, checkpoints={_STEP: weights}, model_kind="dense")
    bench.probe(run, _STEP, (PAIR.target, PAIR.behaviour), options=options, exact_pairs=[PAIR.key])
    return bench.shown(run, _STEP), exact_of(bench, run)


def exact_of(bench: Bench, run: str) -> dict[str, Any]:
    """Return the exact divergences of the step."""
    items = bench.connection.get_json(f"/v1/runs/{run}/steps/{_STEP}/exact")["items"]
    found: dict[str, Any] = items[0]
    return found


def require(holds: bool, exact: Mapping[str, Any]) -> None:
    """Raise RuntimeError with the divergences unless the statement holds."""
    if not holds:
        raise RuntimeError(f"the exact divergence is not the true one: {dict(exact)}")


def float32_pair(bench: Bench) -> tuple[Outcome, dict[str, Any]]:
    """Return engine and trainer in float32."""
    return bench.once("exact float32", lambda: probed(bench, "exact-float32", {**_FLOAT32_ENGINE, **_FLOAT32_TRAINER}))


def bfloat16_pair(bench: Bench) -> tuple[Outcome, dict[str, Any]]:
    """Return the engine in float32, the trainer with bfloat16 autocast."""
    return bench.once("exact bfloat16", lambda: probed(bench, "exact-bfloat16", _FLOAT32_ENGINE))


def same_weights_and_precision(bench: Bench) -> Outcome:
    """Float32 on both sides differs by rounding only."""
    outcome, exact = float32_pair(bench)
    require(exact["kl"]["mean"] < _ROUNDING and exact["top1_flip"]["mean"] == 0, exact)
    return outcome


def sampled_estimate_agrees(bench: Bench) -> Outcome:
    """The exact KL lies in the interval of k3."""
    outcome, exact = bfloat16_pair(bench)
    kl, k3 = exact["kl"], exact["k3_kl"]
    require(kl["mean"] > _ROUNDING and k3["low"] <= kl["mean"] <= k3["high"], exact)
    return outcome


def few_rollouts(bench: Bench) -> Outcome:
    """The interval of few prompts holds the exact figure of many."""
    outcome, few = probed(bench, "exact-few", _FLOAT32_ENGINE, prompts=_FEW_PROMPTS)
    _, many = bfloat16_pair(bench)
    require(few["kl"]["low"] <= many["kl"]["mean"] <= few["kl"]["high"], few)
    require(few["kl"]["high"] - few["kl"]["low"] > many["kl"]["high"] - many["kl"]["low"], few)
    return outcome


def other_settings(bench: Bench) -> Outcome:
    """A pair that is computed with other settings than the scores of its link says so."""
    weights = shipped_run().checkpoint(_STEP)
    batch = rollouts_of(bench, _FEW_PROMPTS)
    run = bench.log_run("exact-settings", {_STEP: batch}, checkpoints={_STEP: weights}, model_kind="dense")
    bench.probe(run, _STEP, (PAIR.target, PAIR.behaviour), options=_FLOAT32_ENGINE)
    options = {**_FLOAT32_ENGINE, **_FLOAT32_TRAINER}
    bench.probe(run, _STEP, (PAIR.behaviour,), options=options, exact_pairs=[PAIR.key])
    return bench.shown(run, _STEP)


CASES = (
    Case("engine and trainer both float32", None, True, same_weights_and_precision, also_true=_NUMERICS),
    Case(
        "float32 against bfloat16: exact KL in k3's interval",
        "KL(μ‖π) over the whole vocabulary",
        True,
        sampled_estimate_agrees,
        also_true=_NUMERICS,
    ),
    Case(
        "few rollouts: interval holds the exact KL of many",
        "KL(μ‖π) over the whole vocabulary",
        True,
        few_rollouts,
        also_true=_NUMERICS,
    ),
    Case(
        "pair with other settings than its link",
        "Its settings are not those of the link's scores",
        True,
        other_settings,
        also_true=_NUMERICS,
    ),
)
