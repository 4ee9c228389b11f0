"""Constants in the place of log-probs are named with their number, and never called rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreshock.lint import LintReport, collect_evidence, lint_batch, run_checks
from foreshock.lint.constants import constants_among
from foreshock.rollouts import RolloutBatch
from tests.foreshock.lint.conftest import real_mu, real_pi
from tests.foreshock.lint.healthy import Policy, healthy_batch
from tests.foreshock.lint.test_corruptions import names, rounded_to_bfloat16, rounded_to_float16

_WIDE = Policy(vocabulary=64, sharpness=1.5)


def with_tool_output(batch: RolloutBatch, value: float, *, column: str = "rollout_log_probs") -> RolloutBatch:
    """Return the batch with ids that nobody sampled, a constant log-prob and a real one, at tokens 3 to 6."""
    random = np.random.default_rng(7)
    place = np.arange(batch.num_tokens) - np.repeat(batch.response_offsets[:-1], batch.response_lengths)
    tool = (place >= 3) & (place < 7)
    ids = np.where(tool, random.integers(0, 64, tool.size), batch.response_token_ids).astype(np.int32)
    scored = -random.gamma(6.0, 1.0, tool.size).astype(np.float32)
    values: dict[str, Any] = {
        name: np.where(tool, np.float32(value) if name == column else scored, getattr(batch, name))
        for name in ("rollout_log_probs", "trainer_log_probs")
    }
    return replace(batch, response_token_ids=ids, entropy=None, **values)


def seen_of(report: LintReport, name: str) -> str:
    return next(warning.seen for warning in report.warnings if warning.name == name)


@pytest.mark.parametrize("value", [-3.0, -0.1, -50.0])
def test_constant_at_tool_output_is_no_rounding_but_tokens_without_an_engine(value: float) -> None:
    report = lint_batch(with_tool_output(healthy_batch(1, _WIDE), value))
    assert names(report) == {"tokens_without_engine"}
    shown = f"{value:g}".replace("-", "−")
    assert f"tokens have log μ = {shown} exactly" in seen_of(report, "tokens_without_engine")
    assert "in runs: tokens that the model did not sample" in seen_of(report, "tokens_without_engine")
    assert f"log μ {shown}, log π" in report.warnings[0].where[0].text


def test_constant_of_the_trainer_is_no_rounding_but_tokens_without_a_trainer() -> None:
    report = lint_batch(with_tool_output(healthy_batch(2, _WIDE), -3.0, column="trainer_log_probs"))
    assert names(report) == {"tokens_without_trainer"}
    assert "ids have log π = −3 while log μ is below −0.5" in seen_of(report, "tokens_without_trainer")


def test_constants_of_small_shards_are_found_in_the_step() -> None:
    whole = with_tool_output(healthy_batch(3, _WIDE), -3.0)
    parts = [collect_evidence(whole.select(np.arange(row, row + 4))) for row in range(0, whole.num_rollouts, 4)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert names(run_checks(merged)) == {"tokens_without_engine"}


def test_k3_without_the_constants_is_that_of_the_rest() -> None:
    healthy = healthy_batch(4, _WIDE)
    seen = seen_of(lint_batch(with_tool_output(healthy, -3.0)), "tokens_without_engine")
    place = np.arange(healthy.num_tokens) - np.repeat(healthy.response_offsets[:-1], healthy.response_lengths)
    d = (real_pi(healthy) - real_mu(healthy)).astype(np.float64)[(place < 3) | (place >= 7)]
    assert float(seen.rsplit(" ", 1)[1].rstrip(".").replace("−", "-")) == pytest.approx(
        (np.expm1(d) - d).mean(), rel=0.05
    )


def test_scattered_constants_are_named_without_a_place() -> None:
    batch = healthy_batch(5, _WIDE)
    holes = np.random.default_rng(0).random(batch.num_tokens) < 0.1
    report = lint_batch(replace(batch, rollout_log_probs=np.where(holes, np.float32(-3), real_mu(batch)), entropy=None))
    assert names(report) == {"tokens_without_engine"}
    assert "in runs" not in seen_of(report, "tokens_without_engine")


@pytest.mark.parametrize("value", [-1.0, -3.0, -0.25])
def test_constant_at_a_hundredth_of_the_tokens_is_named(value: float) -> None:
    batch = healthy_batch(11, _WIDE, longest=60)
    end = np.repeat(batch.response_offsets[1:], batch.response_lengths) - np.arange(batch.num_tokens)
    of_few = np.repeat(np.arange(batch.num_rollouts) % 10 == 0, batch.response_lengths) & (end <= 3)
    mu = np.where(of_few, np.float32(value), real_mu(batch))
    assert 0.005 < of_few.mean() < 0.02
    assert names(lint_batch(replace(batch, rollout_log_probs=mu, entropy=None))) == {"tokens_without_engine"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", [Policy(), _WIDE, Policy(vocabulary=256, sharpness=0.3)])
def test_log_probs_of_a_policy_have_no_constants(seed: int, policy: Policy) -> None:
    batch = healthy_batch(seed, policy)
    for values in (real_mu(batch), rounded_to_bfloat16(real_mu(batch)), rounded_to_float16(real_mu(batch))):
        assert constants_among(values, batch).size == 0
        assert constants_among(np.round(values, 2), batch).size == 0


def test_uniform_policy_has_no_constants() -> None:
    batch = healthy_batch(6, _WIDE)
    assert constants_among(np.full(batch.num_tokens, -4.0, np.float32), batch).size == 0


def test_rounding_beside_constants_is_still_found() -> None:
    batch = with_tool_output(healthy_batch(7, _WIDE), -3.0)
    rounded = lint_batch(replace(batch, trainer_log_probs=rounded_to_bfloat16(real_pi(batch))))
    assert names(rounded) == {"tokens_without_engine", "rounded_log_probs"}


@pytest.mark.parametrize("value", [-3.0, -0.5, 1.0, -9999.0])
def test_constant_at_masked_tokens_is_ignored_and_counted(value: float) -> None:
    batch = with_tool_output(healthy_batch(8, _WIDE), value)
    place = np.arange(batch.num_tokens) - np.repeat(batch.response_offsets[:-1], batch.response_lengths)
    mask = ((place < 3) | (place >= 7)).astype(np.uint8)
    report = lint_batch(replace(batch, response_mask=mask))
    assert report.is_clean
    why = {check.name: check.why for check in report.checks}["placeholder_log_probs"]
    assert why == f"{int((mask == 0).sum()):,} placeholders at masked tokens are ignored"


def test_constant_at_masked_padding_is_no_pad_id_that_was_sampled() -> None:
    batch = healthy_batch(9, _WIDE)
    place = np.repeat(batch.response_offsets[1:], batch.response_lengths) - np.arange(batch.num_tokens)
    mask = (place > 2).astype(np.uint8)
    ids = np.where(mask, batch.response_token_ids % 63 + 1, 0).astype(np.int32)
    mu = np.where(mask, real_mu(batch), np.float32(-3))
    assert lint_batch(replace(batch, response_token_ids=ids, response_mask=mask, rollout_log_probs=mu)).is_clean


def test_one_log_mu_at_every_token_is_named_unless_the_policy_is_uniform() -> None:
    healthy = healthy_batch(4, _WIDE)
    uniform = np.full(healthy.num_tokens, -np.log(64), np.float32)
    report = lint_batch(replace(healthy, rollout_log_probs=uniform, entropy=None))
    (found,) = [each for each in report.warnings if each.name == "tokens_without_engine"]
    assert (found.title, found.severity) == ("log μ is −4.16 at every token", "critical")
    assert "loaded any weights" in found.remedy
    both = replace(healthy, rollout_log_probs=uniform, trainer_log_probs=uniform + np.float32(1e-3), entropy=None)
    assert "tokens_without_engine" not in names(lint_batch(both))
