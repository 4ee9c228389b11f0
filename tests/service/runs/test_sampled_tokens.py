"""A random sample of a step's tokens: of the right ones, the same every time, from a bounded part of the files."""

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.runs import chosen_tokens
from foreshock_service.runs.chosen_tokens import MOST_GROUPS_READ, TokenSample, sample_tokens
from tests.service.sending import Sender, log_probs_of, make_batch, start_run

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
ROLLOUTS = 1280
"""20 row groups of a file."""


def sample(app: FastAPI, sender: Sender, step: int = 1, most: int = 2000) -> TokenSample:
    return sample_tokens(app.state.context, UNRESTRICTED, sender.run, step, None, TRAINER_ROLLOUT, most)


def numbered(rollouts: int, prefix: str = "a") -> RolloutBatch:
    """Rollouts whose tokens are numbered in log μ, and of which d says the same number."""
    tokens = make_batch(rollouts).num_tokens
    behaviour = -(np.arange(tokens) + 1) / 1024
    return make_batch(
        rollouts,
        sample_ids=[f"{prefix}{row}" for row in range(rollouts)],
        rollout_log_probs=behaviour.astype(np.float32),
        trainer_log_probs=(2 * behaviour).astype(np.float32),
    )


def test_small_step_gives_every_generated_token_with_two_log_probs(app: FastAPI, http: httpx.Client) -> None:
    batch = make_batch(40)
    behaviour, trainer = (each.copy() for each in log_probs_of(batch))
    trainer[3] = np.nan
    mask = np.ones(batch.num_tokens, dtype=np.uint8)
    mask[::5] = 0
    sender = start_run(http)
    sender.put_shard(1, make_batch(40, trainer_log_probs=trainer, response_mask=mask)).raise_for_status()
    found = sample(app, sender)
    wanted = np.flatnonzero((mask == 1) & np.isfinite(trainer))
    assert found.drawn_from == wanted.size
    assert found.is_all_read
    pairs = sorted(zip(found.log_behaviour.tolist(), found.d.tolist(), strict=True))
    d = trainer.astype(np.float64) - behaviour
    assert pairs == sorted(zip(behaviour[wanted].tolist(), d[wanted].tolist(), strict=True))


def test_large_step_is_sampled_from_some_row_groups_without_repetition(app: FastAPI, sender: Sender) -> None:
    sender.put_shard(1, numbered(ROLLOUTS)).raise_for_status()
    found = sample(app, sender, most=500)
    assert found.d.size == 500
    assert np.unique(found.log_behaviour).size == 500
    assert found.d == pytest.approx(found.log_behaviour, rel=1e-6)
    assert (found.groups_read, found.is_all_read) == (MOST_GROUPS_READ, False)
    # Every row group has 64 rollouts of 6.5 tokens each, on average.
    assert found.drawn_from == pytest.approx(64 * MOST_GROUPS_READ * 6.5, rel=0.15)


def test_sample_is_the_same_each_time_and_another_at_another_step(app: FastAPI, sender: Sender) -> None:
    for step in (1, 2):
        sender.put_shard(step, numbered(ROLLOUTS)).raise_for_status()
    first, again, other = sample(app, sender, 1), sample(app, sender, 1), sample(app, sender, 2)
    assert first.log_behaviour.tolist() == again.log_behaviour.tolist()
    assert set(first.log_behaviour.tolist()) != set(other.log_behaviour.tolist())


def test_every_token_is_as_likely_as_any_other(app: FastAPI, sender: Sender) -> None:
    """Over many steps with the same tokens, each is drawn about equally often: χ² of the tenths of the numbers."""
    tokens = make_batch(100).num_tokens
    counts = np.zeros(10)
    for step in range(1, 31):
        sender.put_shard(step, numbered(100)).raise_for_status()
        numbers = np.rint(-sample(app, sender, step, most=100).log_behaviour * 1024) - 1
        counts += np.bincount((numbers * 10 // tokens).astype(int), minlength=10)
    expected = counts.sum() / 10
    # The 0.999 quantile of χ² with 9 degrees of freedom.
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9


def test_statistics_shard_gives_tokens_of_the_rollouts_in_full(app: FastAPI, sender: Sender) -> None:
    sender.put_statistics(1, numbered(40)).raise_for_status()
    found = sample(app, sender)
    assert found.coverage.text == "3 of 40 rollouts"
    assert 0 < found.drawn_from < make_batch(40).num_tokens


def test_reading_ends_with_enough_tokens_or_files(
    app: FastAPI, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.put_shard(1, numbered(ROLLOUTS)).raise_for_status()
    monkeypatch.setattr(chosen_tokens, "ENOUGH_TOKENS", 600)
    assert sample(app, sender).groups_read == 2
    monkeypatch.setattr(chosen_tokens, "MOST_GROUPS_READ", 3)
    for shard in range(6):
        sender.put_shard(2, numbered(8, prefix=f"{shard}-"), shard, 6).raise_for_status()
    found = sample(app, sender, 2)
    assert (found.groups_read, found.is_all_read) == (3, False)
    assert found.drawn_from == 3 * make_batch(8).num_tokens
