"""Shards sent as statistics: the same measures as from tokens, however a step is split; counted once; checked."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.lint import LintEvidence, LintReport, lint_batch, run_checks
from foreshock.measures import CONDITIONS, ComparisonStatistics
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock.rollouts import DecodeLimits, RolloutBatch, encode_rollouts
from foreshock.statistics_shards import FullRollouts, ShardPart, StatisticsShard, encode_statistics_shard
from foreshock_service.maintenance.remeasure import remeasure_step
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import MeasurementStatistics, ShardStatistics
from foreshock_service.platform.settings import Settings
from foreshock_service.runs import shard_decoding
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.shards import shard_versions, statistics_of_step
from tests.foreshock.batches import random_batch
from tests.foreshock.measures.test_merging import assert_alike
from tests.service.sending import Sender, make_batch, problem_of, start_run
from tests.service.stored import count_rows, list_files

_FULL = FullRollouts(3, 1)


def measured(batch: RolloutBatch, folder: Path, *, as_statistics: bool) -> shard_decoding.MeasuredShard:
    body = folder / "body"
    if as_statistics:
        body.write_bytes(encode_statistics_shard(batch, seed="a", full=_FULL))
        return shard_decoding.decode_statistics(body, folder / "stored", DecodeLimits(), None).measured
    body.write_bytes(encode_rollouts(batch))
    return shard_decoding.decode_shard(body, folder / "stored", DecodeLimits(), None).measured


def folded(shards: Sequence[shard_decoding.MeasuredShard]) -> dict[str, shard_decoding.FoldedStatistics]:
    parts = [part for shard in shards for part in shard.parts]
    return {each.comparison: each for each in shard_decoding.fold_step(parts)}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    rollouts=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    kinds=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_any_split_into_statistics_and_tokens_is_measured_alike(
    tmp_path: Path, seed: int, rollouts: int, cuts: list[int], kinds: list[bool]
) -> None:
    batch = random_batch(seed, rollouts)
    edges = [0, *sorted(min(cut, rollouts) for cut in cuts), rollouts]
    order = np.random.default_rng(seed).permutation(rollouts)
    ranks = [batch.select(order[start:end]) for start, end in pairwise(edges) if end > start]
    shards = [measured(rank, tmp_path, as_statistics=kind) for rank, kind in zip(ranks, kinds, strict=False)]
    assert [(shard.rollouts, shard.tokens) for shard in shards] == [(r.num_rollouts, r.num_tokens) for r in ranks]
    whole, split = folded([measured(batch, tmp_path, as_statistics=False)]), folded(shards)
    assert whole.keys() == split.keys() == {STEP_ROW, TRAINER_ROLLOUT}
    for comparison, expected in whole.items():
        # Measures, quantiles of the histograms and intervals by prompt: as equal as shards of tokens are.
        assert_alike(dict(split[comparison].measures), dict(expected.measures), 1e-9)
        assert not split[comparison].from_sample
    alone, merged = (
        ComparisonStatistics.from_bytes(bytes(each[TRAINER_ROLLOUT].statistics)) for each in (whole, split)
    )
    np.testing.assert_array_equal(merged.histogram, alone.histogram)
    for condition in CONDITIONS:
        expected_table, table = alone.condition_table(condition), merged.condition_table(condition)
        assert list(table.columns()["tokens"]) == list(expected_table.columns()["tokens"])
        for name, values in expected_table.columns().items():
            np.testing.assert_allclose(
                _floats(table.columns()[name]), _floats(values), rtol=1e-9, atol=1e-12, err_msg=f"{condition} {name}"
            )


def _floats(values: Sequence[float | None]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def test_worst_token_of_a_step_is_among_the_rollouts_in_full(http: httpx.Client) -> None:
    whole, split = start_run(http, "whole"), start_run(http, "split")
    parts = [make_batch(40, seed) for seed in range(3)]
    for shard, part in enumerate(parts):
        whole.put_shard(0, part, shard, 3).raise_for_status()
        split.put_statistics(0, part, shard, 3).raise_for_status()
    expected, found = (run.get("steps/0/tokens", worst=1).json()["items"] for run in (whole, split))
    assert found == expected


def test_shards_of_both_kinds_are_one_step_and_counted_once(http: httpx.Client, settings: Settings) -> None:
    whole, mixed = start_run(http, "whole"), start_run(http, "mixed")
    parts = [make_batch(30, seed) for seed in range(3)]
    for shard, part in enumerate(parts):
        whole.put_shard(5, part, shard, 3).raise_for_status()
    # Out of order, and one of them twice.
    assert mixed.put_statistics(5, parts[2], 2, 3).status_code == 201
    assert mixed.put_shard(5, parts[0], 0, 3).status_code == 201
    again = mixed.put_statistics(5, parts[2], 2, 3)
    assert (again.status_code, again.json()["status"]) == (200, "duplicate")
    last = mixed.put_statistics(5, parts[1], 1, 3)
    assert last.json()["full_rollouts"] < last.json()["rollouts"] == 30
    expected, found = (run.get("measurements").json()["columns"] for run in (whole, mixed))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if isinstance(values[0], str):
            assert found[name] == values
        else:
            np.testing.assert_allclose(_floats(found[name]), _floats(values), rtol=1e-9, err_msg=name)
    assert count_rows(settings)["shards"] == 6
    assert len(list_files(settings)) == 6


@pytest.mark.parametrize("first_as_statistics", [True, False])
def test_other_bytes_or_kinds_of_a_shard_are_refused(
    sender: Sender, settings: Settings, first_as_statistics: bool
) -> None:
    batch = make_batch(30)
    first = sender.put_statistics(0, batch) if first_as_statistics else sender.put_shard(0, batch)
    first.raise_for_status()
    before = count_rows(settings), list_files(settings)
    for answer in (
        sender.put_shard(0, make_batch(30, 1)),
        sender.put_statistics(0, make_batch(30, 1)),
        sender.put_shard(0, batch) if first_as_statistics else sender.put_statistics(0, batch),
    ):
        assert problem_of(answer) == (409, "shard-conflict")
    assert (count_rows(settings), list_files(settings)) == before


def test_statistics_that_are_not_of_their_rollouts_are_refused(sender: Sender, settings: Settings) -> None:
    batch, other = make_batch(30), make_batch(30, 1)
    assert batch.trainer_log_probs is not None
    moved = replace(batch, trainer_log_probs=batch.trainer_log_probs - np.float32(0.25))
    shard, of_other, of_moved = (
        StatisticsShard.from_bytes(encode_statistics_shard(each, seed="a", full=_FULL))
        for each in (batch, other, moved)
    )
    for damaged, message in (
        (replace(shard, full=of_moved.full), "are not of the rollouts in full"),
        (replace(shard, full=of_other.full), "is not in the statistics"),
        (replace(shard, rollouts=31), "but the header names 31"),
        (replace(shard, statistics=of_other.statistics), "header names|not those of the shard"),
        (replace(shard, rollout_set_digest="sha256:0"), "not those of the shard's statistics"),
        (replace(shard, statistics=shard.statistics[:1]), "must compare both log-probs"),
        (replace(shard, statistics=shard.statistics[1:]), "must have 'rollout'"),
        (replace(shard, sampled=0), "the sample first"),
        (replace(shard, sampled=25), "the sample first"),
        (replace(shard, full=b"no Parquet"), ""),
    ):
        answer = sender.put_statistics(0, damaged.to_bytes())
        assert answer.status_code == 422, damaged
        assert answer.headers["content-type"] == "application/problem+json"
        assert any(part in answer.json()["detail"] for part in message.split("|"))
    flipped = bytearray(shard.to_bytes())
    flipped[600] ^= 0xFF
    assert sender.put_statistics(0, bytes(flipped)).status_code == 422
    assert sender.put_statistics(0, b"").status_code == 422
    assert "shards" not in count_rows(settings)
    assert not list_files(settings)


def test_statistics_without_a_comparison_are_stored(sender: Sender) -> None:
    answer = sender.put_statistics(0, make_batch(30, trainer_log_probs=None))
    assert answer.status_code == 201
    columns = sender.get("measurements").json()["columns"]
    assert columns["comparison"] == [STEP_ROW]
    assert columns["num_rollouts"] == [30]


def test_every_answer_says_what_it_rests_on(sender: Sender) -> None:
    sender.put_statistics(0, make_batch(40), 0, 1, FullRollouts(6, 1)).raise_for_status()
    step = sender.get("steps").json()["items"][0]
    full = step["full_rollouts"]
    assert 6 <= full <= 7
    words = f"all tokens, in statistics; {full} of 40 rollouts in full"
    assert step["coverage"] == words
    expected = {"step": 0, "attempt": 1, "rollouts": 40, "full_rollouts": full, "text": words}
    assert sender.get("measurements").json()["statistics_steps"] == [expected]
    all_tokens = {"rests_on": "all tokens", "rollouts": 40, "used_rollouts": 40, "full_rollouts": full, "text": words}
    for path in ("buckets", "buckets?by=token_id", "corrections", "theory"):
        assert sender.get(f"steps/0/{path}").json()["coverage"] == all_tokens, path
    in_full = {"rests_on": "some rollouts", "used_rollouts": full, "text": f"{full} of 40 rollouts"}
    tokens = sender.get("steps/0/tokens").json()
    assert tokens["coverage"] == all_tokens | in_full
    # Not the rollouts that were chosen for their large differences: they would be no fair sample for a test.
    checked = sender.get("steps/0/lint").json()
    assert checked["rollouts"] == 6
    assert checked["coverage"] == all_tokens | in_full | {"used_rollouts": 6, "text": "6 of 40 rollouts"}
    whole = {each["sample_id"] for each in sender.get("steps/0/tokens", worst=1000).json()["items"]}
    absent = next(name for name in make_batch(40).sample_ids if name not in whole)
    missing = sender.get("steps/0/tokens", sample_id=absent)
    assert missing.status_code == 404
    assert f"{full} of 40 rollouts" in missing.json()["detail"]
    for page, said in (
        ("/runs/default/a-run/steps/0", words),
        ("/runs/default/a-run/steps/0", "Semantics: checked on 6 of 40 rollouts."),
        ("/runs/default/a-run", f"Step 0: {words}."),
        (f"/pages/runs/{sender.run}/steps/0/tokens", f"Among {full} of 40 rollouts in full."),
    ):
        assert said in sender.http.get(page).text


def of_prompts(*, seed: int, solved: float, with_target: bool = True) -> RolloutBatch:
    """Return 1,024 rollouts of 128 groups of 8, of which a share is rewarded with 1, the others with 0."""
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 12, 1024)
    mu = -random.exponential(0.5, lengths.sum()).astype(np.float32)
    return RolloutBatch.from_arrays(
        [f"rollout-{row}" for row in range(1024)],
        np.arange(1024) % 128,
        np.arange(1025),
        random.integers(0, 5_000, mu.size),
        np.concatenate([[0], np.cumsum(lengths)]),
        rollout_log_probs=mu,
        trainer_log_probs=np.minimum(mu + random.normal(0, 0.01, mu.size), 0).astype(np.float32)
        if with_target
        else None,
        group_ids=[f"prompt-{row % 128}" for row in range(1024)],
        reward=(random.random(1024) < solved).astype(np.float32),
        finish_reasons=["stop" if row % 50 == 0 else "length" for row in range(1024)],
    )


def lint_of_sample(batch: RolloutBatch, folder: Path, full: FullRollouts | None = None) -> LintReport:
    body = folder / "body"
    body.write_bytes(encode_statistics_shard(batch, seed="a", full=full or FullRollouts()))
    lint = shard_decoding.decode_statistics(body, folder / "stored", DecodeLimits(), None).measured.lint
    return run_checks(LintEvidence.from_bytes(lint.evidence, lint.examples))


@pytest.mark.parametrize("solved", [0.0, 0.05])
def test_spread_of_rewards_is_that_of_all_rollouts(tmp_path: Path, solved: float) -> None:
    for seed in range(5):
        batch = of_prompts(seed=seed, solved=solved)
        found, expected = (
            [warning.seen for warning in report.warnings if warning.name == "no_reward_spread"]
            for report in (lint_of_sample(batch, tmp_path), lint_batch(batch))
        )
        assert found == expected
        assert len(found) == (solved == 0)


def test_what_only_all_rollouts_show_is_not_checked_on_a_sample(tmp_path: Path) -> None:
    unknown = lint_of_sample(of_prompts(seed=0, solved=0.0, with_target=False), tmp_path)
    why = {check.name: check.why for check in unknown.not_checked}
    assert "only a sample of the rollouts" in why["no_reward_spread"]
    assert "only a sample of the rollouts" in why["duplicated_rollouts"]
    # 98 % are truncated, and all eight of the sample.
    few = lint_of_sample(of_prompts(seed=1, solved=0.5), tmp_path, FullRollouts(8, 0))
    assert "all_truncated" not in {warning.name for warning in few.warnings}
    whole = lint_of_sample(of_prompts(seed=1, solved=0.5), tmp_path, FullRollouts(1024, 0, 10_000_000))
    assert not {"no_reward_spread", "duplicated_rollouts"} & {check.name for check in whole.not_checked}


def parts_of(database: Database, key: StepKey) -> list[ShardPart]:
    with database.read() as session:
        return list(statistics_of_step(session, key))


def rows(database: Database) -> int:
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(ShardStatistics)) or 0


def test_statistics_of_the_only_shard_are_those_of_the_step(sender: Sender, app: FastAPI) -> None:
    sender.put_shard(0, make_batch()).raise_for_status()
    database, key = app.state.context.database, StepKey(sender.run, sender.attempt, 0)
    assert rows(database) == 0
    parts = parts_of(database, key)
    assert [part.comparison for part in parts] == [STEP_ROW, TRAINER_ROLLOUT]
    with database.read() as session:
        for part in parts:
            whole = session.get_one(MeasurementStatistics, (*key, part.comparison))
            assert (part.statistics, part.summaries) == (whole.statistics, whole.summaries)
        assert shard_versions(session, key) == {(0, STATISTICS_VERSION)}


def test_comparisons_of_probes_are_not_of_the_shard(sender: Sender, app: FastAPI) -> None:
    sender.put_shard(0, make_batch()).raise_for_status()
    database, key = app.state.context.database, StepKey(sender.run, sender.attempt, 0)
    parts = parts_of(database, key)

    def add_probe(session: Session) -> None:
        whole = {"statistics_version": 1, "statistics": b"of a probe", "summaries": None}
        session.add(MeasurementStatistics(**key._asdict(), comparison="torch.float32/vllm.prefill", **whole))

    database.write(add_probe)
    assert parts_of(database, key) == parts


def test_steps_of_several_shards_keep_the_rows_of_each(sender: Sender, app: FastAPI) -> None:
    database, key = app.state.context.database, StepKey(sender.run, sender.attempt, 0)
    sender.put_shard(0, make_batch(seed=1), 1, 2).raise_for_status()
    of_last = parts_of(database, key)
    assert [part.comparison for part in of_last] == [STEP_ROW, TRAINER_ROLLOUT]
    sender.put_shard(0, make_batch(seed=2), 0, 2).raise_for_status()
    both = parts_of(database, key)
    assert (len(both), [both[1], both[3]]) == (4, of_last)
    # Nothing is taken from the fold, should the rows of its shards be gone.
    database.write(lambda session: session.execute(delete(ShardStatistics)))
    assert parts_of(database, key) == []


def test_step_of_another_release_is_measured_again(sender: Sender, app: FastAPI) -> None:
    sender.put_shard(0, make_batch()).raise_for_status()
    context, key = app.state.context, StepKey(sender.run, sender.attempt, 0)
    before = sender.get("measurements").json()["columns"]
    parts = parts_of(context.database, key)
    context.database.write(lambda session: session.execute(update(MeasurementStatistics).values(statistics_version=1)))
    with context.database.read() as session:
        assert shard_versions(session, key) == {(0, 1)}
    assert remeasure_step(context, key) is None
    assert parts_of(context.database, key) == parts
    assert sender.get("measurements").json()["columns"] == before
