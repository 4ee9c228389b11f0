"""Whether a batch can teach anything: rewards without spread, groups of one, empty and truncated responses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshock.lint import collect_evidence, lint_batch, run_checks
from foreshock.rollouts import RolloutBatch
from tests.foreshock.lint.healthy import healthy_batch


@pytest.fixture
def batch() -> RolloutBatch:
    """Return 128 rollouts of 16 groups, without rewards and advantages."""
    groups: list[str | None] = [f"prompt-{row // 8}" for row in range(128)]
    return replace(healthy_batch(5), group_ids=groups, reward=None, advantage=None, finish_reasons=None)


def infos(batch: RolloutBatch) -> dict[str, str]:
    return {each.name: each.seen for each in lint_batch(batch).warnings}


def of_groups(batch: RolloutBatch, *, spread: bool) -> RolloutBatch:
    reward = np.arange(128, dtype=np.float32) // 8 % 2
    reward[5] += spread
    return replace(batch, reward=reward)


def test_equal_rewards_in_every_group_are_named(batch: RolloutBatch) -> None:
    assert "None of 16 groups" in infos(of_groups(batch, spread=False))["no_reward_spread"]
    assert "no_reward_spread" not in infos(of_groups(batch, spread=True))


def test_groups_are_whole_only_over_all_shards(batch: RolloutBatch) -> None:
    spread = of_groups(batch, spread=True)
    parts = [collect_evidence(spread.select(np.arange(start, 128, 2))) for start in (1, 0)]
    assert "no_reward_spread" not in {each.name for each in run_checks(parts[0].merge(parts[1])).warnings}


def test_advantages_other_than_0_are_a_signal(batch: RolloutBatch) -> None:
    flat = of_groups(batch, spread=False)
    assert "no_reward_spread" not in infos(replace(flat, advantage=np.linspace(-1, 1, 128, dtype=np.float32)))
    assert "all 128 advantages are 0" in infos(replace(flat, advantage=np.zeros(128, np.float32)))["no_reward_spread"]


def test_rollouts_that_are_each_a_group_are_named(batch: RolloutBatch) -> None:
    alone = replace(of_groups(batch, spread=True), group_ids=[f"prompt-{row}" for row in range(128)])
    flat = replace(alone, advantage=np.zeros(128, np.float32))
    assert "a group of its own; all 128 advantages are 0: there is no gradient" in infos(flat)["no_reward_spread"]


def test_one_rollout_of_each_prompt_is_no_finding_without_advantages(batch: RolloutBatch) -> None:
    # As for PPO, whose advantages are relative to a critic.
    alone = replace(of_groups(batch, spread=True), group_ids=[f"prompt-{row}" for row in range(128)])
    why = {check.name: check.why for check in lint_batch(alone).not_checked}
    assert "log advantages" in why["no_reward_spread"]


def test_truncated_and_empty_responses_are_counted(batch: RolloutBatch) -> None:
    truncated: list[str | None] = ["length"] * 128
    assert "100 %" in infos(replace(batch, finish_reasons=truncated))["all_truncated"]
    assert "all_truncated" not in infos(replace(batch, finish_reasons=[*truncated[:100], *["stop"] * 28]))
    responses = [[1, 2]] * 24 + [[]] * 8
    half = RolloutBatch.from_lists([str(row) for row in range(32)], [[1]] * 32, responses)
    assert "8 of 32 responses (25 %)" in infos(half)["empty_responses"]


def test_aborted_responses_are_counted_and_in_the_title(batch: RolloutBatch) -> None:
    reasons = ["abort" if row < 45 else "stop" for row in range(128)]
    (found,) = (each for each in lint_batch(replace(batch, finish_reasons=list(reasons))).warnings)
    assert (found.name, found.evidence) == ("aborted_responses", {"aborted": 45})
    assert found.title == "35.2 % of the responses were ended by an abort"
    few = ["abort"] * 6 + ["stop"] * 122
    assert "aborted_responses" not in infos(replace(batch, finish_reasons=list(few)))
    # Without reasons, nothing is known.
    assert "aborted_responses" in {check.name for check in lint_batch(batch).not_checked}


@pytest.mark.parametrize(("cut", "found"), [(0.35, True), (0.0, False)])
def test_responses_that_stop_on_ordinary_tokens_are_cut(cut: float, found: bool) -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(5, 40, 128)
    responses = [
        [*random.integers(10, 60, length).tolist(), *([2] if random.random() > cut else [])] for length in lengths
    ]
    batch = RolloutBatch.from_lists([str(row) for row in range(128)], [[1]] * 128, responses)
    assert ("unfinished_responses" in infos(batch)) is found
    # The same with a limit that was not declared: the longest responses are cut by it.
    limited = [response[:20] for response in responses]
    batch = RolloutBatch.from_lists([str(row) for row in range(128)], [[1]] * 128, limited)
    assert ("unfinished_responses" in infos(batch)) is False


def test_stop_strings_and_removed_ends_of_sequence_are_not_cut() -> None:
    random = np.random.default_rng(2)
    texts = [random.integers(10, 60, length).tolist() for length in random.integers(5, 40, 128)]
    stopped = [[*text, *([2] if row % 3 else [30, 31])] for row, text in enumerate(texts)]
    for responses in (texts, stopped):
        batch = RolloutBatch.from_lists([str(row) for row in range(128)], [[1]] * 128, responses)
        assert "unfinished_responses" not in infos(batch)


def test_groups_of_several_prompts_are_named() -> None:
    batch = healthy_batch(5, groups=16, per_group=8)
    assert batch.group_ids is not None
    order = np.random.default_rng(1).permutation(128)
    mixed = replace(batch, group_ids=[batch.group_ids[row] for row in order])
    assert "16 of 16 groups have rollouts of several prompts" in infos(mixed)["groups_not_prompts"]
    (found,) = (each for each in lint_batch(mixed).warnings)
    assert (found.severity, found.title) == ("warning", "groups have rollouts of several prompts")
    # Rows that are one place off reach into the next group only.
    moved = replace(batch, group_ids=[*batch.group_ids[1:], batch.group_ids[0]])
    assert "groups_not_prompts" in infos(moved)


def test_rollouts_of_a_prompt_without_a_common_group_are_named() -> None:
    batch = healthy_batch(5, groups=16, per_group=8)
    alone = replace(batch, group_ids=[f"row-{row}" for row in range(128)])
    assert "16 prompts have 8 rollouts each" in infos(alone)["groups_not_prompts"]
    # Half of a prompt's rollouts may come with another shard.
    parts = [collect_evidence(batch.select(np.arange(start, 128, 2))) for start in (1, 0)]
    assert "groups_not_prompts" not in {each.name for each in run_checks(parts[0].merge(parts[1])).warnings}


def test_a_prompt_in_two_groups_and_turns_as_rollouts_are_healthy() -> None:
    batch = healthy_batch(5, groups=16, per_group=8)
    assert batch.group_ids is not None
    assert "groups_not_prompts" not in infos(replace(batch, group_ids=[f"draw-{row // 4}" for row in range(128)]))
    # The second half of each group are second turns, each with a history of its own as its prompt.
    prompts = batch.prompt_token_ids.reshape(128, 3).copy()
    later = np.arange(128) % 8 >= 4
    prompts[later, 0] = 100 + np.arange(128)[later]
    assert "groups_not_prompts" not in infos(replace(batch, prompt_token_ids=prompts.ravel()))
    # One question about many images, each rollout with its own.
    same = replace(batch, prompt_token_ids=np.ones_like(batch.prompt_token_ids))
    assert "groups_not_prompts" not in infos(replace(same, group_ids=[f"image-{row}" for row in range(128)]))


@pytest.mark.parametrize(("rewarded", "found"), [(0, True), (1, False)])
def test_a_data_source_without_a_reward_is_named_with_its_interval(
    batch: RolloutBatch, rewarded: int, found: bool
) -> None:
    code = np.arange(128) // 8 % 2 == 1
    reward = np.where(code, 0, np.arange(128) % 3 == 0).astype(np.float32)
    reward[np.flatnonzero(code)[:rewarded]] = 1
    named: list[str | None] = ["code" if each else "math" for each in code]
    of_sources = replace(batch, reward=reward, data_sources=named)
    parts = [collect_evidence(of_sources.select(np.arange(start, 128, 2))) for start in (1, 0)]
    for report in (lint_batch(of_sources), run_checks(parts[0].merge(parts[1]))):
        titles = [each.title for each in report.warnings if each.name == "source_not_rewarded"]
        assert titles == ["no rollout of data source code is rewarded"] * found
    if found:
        assert infos(of_sources)["source_not_rewarded"] == (
            "All 64 rewards of data source code are 0, the lowest: of its prompts at most 37 % are rewarded (95 % "
            "range), of the others' 100 %."
        )


def test_few_prompts_or_rare_rewards_of_the_others_show_no_data_source_without_reward(batch: RolloutBatch) -> None:
    few = np.arange(128) // 8 < 3
    rare = np.arange(128) // 8 % 2 == 1
    for code, reward in ((few, ~few), (rare, np.arange(128) == 0), (rare, np.zeros(128))):
        named: list[str | None] = ["code" if each else "math" for each in code]
        found = infos(replace(batch, reward=reward.astype(np.float32), data_sources=named))
        assert "source_not_rewarded" not in found


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_entropies_and_advantages_that_are_not_finite_are_named(batch: RolloutBatch, value: float) -> None:
    tokens = batch.response_token_ids.size
    mask = np.ones(tokens, np.uint8)
    mask[7] = 0
    whole = replace(
        batch, response_mask=mask, entropy=np.full(tokens, 0.5, np.float32), advantage=np.ones(128, np.float32)
    )
    assert "non_finite_values" not in infos(whole)
    entropy, advantage = whole.entropy, whole.advantage
    assert entropy is not None
    assert advantage is not None
    entropy[7] = value
    assert "non_finite_values" not in infos(whole), "a token that was not sampled has no entropy"
    entropy[[3, 4]], advantage[0] = value, value
    seen = infos(whole)["non_finite_values"]
    parts = (f"2 of {tokens - 1:,} values of entropy", "1 of 128 values of advantage")
    assert seen == "; ".join(f"{part} are NaN or infinite" for part in parts) + "."


def with_advantages(batch: RolloutBatch, rows: np.ndarray) -> RolloutBatch:
    """Return rewards of 0 and 1 with advantages relative to each 8 of these rows, in order."""
    reward = np.random.default_rng(3).integers(0, 2, 128).astype(np.float32)
    advantage = np.zeros(128, np.float32)
    for start in range(0, rows.size, 8):
        group = reward[rows[start : start + 8]]
        advantage[rows[start : start + 8]] = (group - group.mean()) / (group.std() + 1e-4)
    return replace(batch, reward=reward, advantage=advantage).select(np.sort(rows))


def test_advantages_by_position_are_told_from_those_of_the_groups(batch: RolloutBatch) -> None:
    rows = np.arange(128)
    assert "advantages_not_of_group" not in infos(with_advantages(batch, rows))
    # A group lost a rollout: each later one is normalised with the first rollouts of the next.
    moved = with_advantages(batch, np.delete(rows, 3))
    assert "sets of rollouts with one group and one reward" in infos(moved)["advantages_not_of_group"]
    assert moved.reward is not None
    # A baseline of the whole batch, as of REINFORCE++, gives equal rewards equal advantages.
    whole = replace(moved, advantage=moved.reward - moved.reward.mean())
    assert "advantages_not_of_group" not in infos(whole)
    # Also in groups whose rewards are all equal, where those of a group are 0.
    assert moved.group_ids is not None
    solved = np.array([int(str(group)[-1], 36) % 2 for group in moved.group_ids], dtype=np.float32)
    equal = replace(moved, reward=solved, advantage=solved - np.float32(solved.mean()))
    assert "whose rewards are all equal the advantages are not 0" in infos(equal)["advantages_not_of_group"]
    assert "advantages_not_of_group" not in infos(replace(equal, advantage=np.zeros_like(solved)))


def test_advantages_of_the_opposite_sign_are_named(batch: RolloutBatch) -> None:
    given = with_advantages(batch, np.arange(128))
    assert given.advantage is not None
    assert "advantages_against_rewards" not in infos(given)
    turned = replace(given, advantage=-given.advantage)
    seen = infos(turned)["advantages_against_rewards"]
    assert seen.endswith("groups the advantage is lower where the reward is higher.")
    parts = [collect_evidence(turned.select(np.arange(start, 128, 2))) for start in (1, 0)]
    merged = run_checks(parts[0].merge(parts[1]))
    assert [each.seen for each in merged.warnings if each.name == "advantages_against_rewards"] == [seen]
    # Some groups turned are no sign that is wrong everywhere.
    some = np.where(np.arange(128) < 32, -given.advantage, given.advantage).astype(np.float32)
    assert "advantages_against_rewards" not in infos(replace(given, advantage=some))


def test_advantages_of_other_rows_do_not_follow_the_rewards(batch: RolloutBatch) -> None:
    given = with_advantages(batch, np.arange(128))
    assert given.advantage is not None
    moved = replace(given, advantage=np.random.default_rng(1).permutation(given.advantage))
    assert "Advantages of these rewards give 1" in infos(moved)["advantages_against_rewards"]
    # Rewards that are shaped after they are logged still lead.
    shaped = given.advantage + np.random.default_rng(2).normal(0.0, 0.5, 128).astype(np.float32)
    assert "advantages_against_rewards" not in infos(replace(given, advantage=shaped))


@pytest.mark.parametrize(("size", "is_found"), [(2.6, False), (-100.0, False), (-2000.0, True), (2000.0, True)])
def test_an_advantage_that_the_rewards_cannot_make_is_named(batch: RolloutBatch, size: float, is_found: bool) -> None:
    given = with_advantages(batch, np.arange(128))
    assert given.advantage is not None
    advantage = given.advantage.copy()
    advantage[7] = size
    assert ("advantage_outlier" in infos(replace(given, advantage=advantage))) == is_found
    of_tokens = np.full(batch.num_tokens, 0.5, np.float32)
    of_tokens[9] = size
    assert ("advantage_outlier" in infos(replace(given, advantage=of_tokens, advantage_per_token=True))) == is_found
    # Rewards of the same scale make such advantages.
    assert given.reward is not None
    assert "advantage_outlier" not in infos(replace(given, advantage=advantage, reward=given.reward * 3000))
