"""Attribution to a chain: links telescope, shares add to one, links of missing scores are merged."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock.errors import ConfigurationError, InvalidRolloutsError
from foreshock.measures import attribute
from foreshock.measures.estimators.attribution import environment_link, excess_over_environments
from foreshock.scorers import CHAIN
from tests.foreshock.batches import compared, random_batch

OFFSETS = np.arange(0, 801, 20)
GROUPS = [f"prompt-{row // 4}" for row in range(40)]


def chain_scores(seed: int, sizes: tuple[float, ...] = (0.001, 0.002, 0.01, 0.005)) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(seed)
    current = -generator.exponential(1.0, 800) - 0.2
    scores = {"rollout": current.astype(np.float32)}
    for name, size in zip(CHAIN[1:], sizes, strict=True):
        current = current + generator.normal(0, size, 800)
        scores[name] = np.minimum(current, 0).astype(np.float32)
    return scores


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), left_out=st.sets(st.sampled_from(CHAIN[1:-1])))
def test_links_telescope_and_shares_add_to_one(seed: int, left_out: set[str]) -> None:
    scores = {name: values for name, values in chain_scores(seed).items() if name not in left_out}
    found = attribute(scores, OFFSETS, group_ids=GROUPS)
    assert found.chain == tuple(name for name in CHAIN if name not in left_out)
    assert found.missing == tuple(name for name in CHAIN if name in left_out)
    assert found.telescoping_error <= 1e-12
    assert math.fsum(link.share for link in found.links) == pytest.approx(1.0, rel=1e-12)
    assert math.fsum(link.mean_d for link in found.links) == pytest.approx(found.whole.mean_d, rel=1e-9, abs=1e-12)
    names = [f"{later}/{earlier}" for earlier, later in zip(found.chain[:-1], found.chain[1:], strict=True)]
    assert [link.name for link in found.links] == names
    assert found.whole.name == "trainer/rollout"
    assert (found.rollouts, found.tokens, found.groups) == (40, 800, 10)


def test_link_moments_are_those_of_the_comparison() -> None:
    batch = random_batch(0, 20)
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    scores = {"rollout": batch.rollout_log_probs, "trainer": batch.trainer_log_probs}
    found = attribute(scores, batch.response_offsets, batch.response_mask, batch.group_ids)
    measures = compared(batch).statistics.measures()
    (link,) = found.links
    assert link.share == pytest.approx(1.0, rel=1e-15)
    for one in (link, found.whole):
        assert one.k3_kl == pytest.approx(measures["k3_kl"], rel=1e-12)
        assert one.mean_d == pytest.approx(-measures["kl"], rel=1e-12)
        assert one.rms_d == pytest.approx(measures["rms_d"], rel=1e-12)
        assert one.max_abs_d == measures["max_abs_d"]
    assert found.cancellation == pytest.approx(1.0)


def test_share_interval_contains_the_known_share() -> None:
    found = attribute(chain_scores(1, (1e-5, 1e-5, 0.1, 0.05)), OFFSETS, group_ids=GROUPS)
    shares = {link.name: link for link in found.links}
    engine, trainer = shares["torch.trainer/vllm.prefill"], shares["trainer/torch.trainer"]
    assert engine.share == pytest.approx(0.8, abs=0.05)
    assert trainer.share == pytest.approx(0.2, abs=0.05)
    for link in (engine, trainer):
        assert link.share_low < link.share < link.share_high
        assert link.share_high - link.share_low < 0.2
    assert found.cancellation == pytest.approx(1.0, abs=0.1)


def test_cancelling_link_has_a_negative_share() -> None:
    generator = np.random.default_rng(0)
    start = np.full(800, -2.0)
    noise, rest = generator.normal(0, 0.1, 800), generator.normal(0, 0.1, 800)
    scores = {"rollout": start, "vllm.prefill": start + noise, "torch.trainer": start + rest - 0.5 * noise,
              "trainer": start + rest}  # fmt: skip
    scores["torch.trainer"] = start + rest + 0.5 * rest
    found = attribute(scores, OFFSETS, group_ids=GROUPS)
    negative = found.links[-1]
    assert negative.share == pytest.approx(-0.5, abs=0.01)
    assert found.cancellation > 2
    assert sum(link.share for link in found.links) == pytest.approx(1.0)


def test_intervals_are_wider_by_group_than_by_rollout() -> None:
    generator = np.random.default_rng(0)
    start = np.full(800, -2.0)
    of_groups = np.repeat(generator.normal(0, 0.1, 10), 80)
    scores = {
        "rollout": start,
        "torch.trainer": start + of_groups,
        "trainer": start + of_groups + generator.normal(0, 0.1, 800),
    }
    grouped, alone = (attribute(scores, OFFSETS, group_ids=ids).links[0] for ids in (GROUPS, None))
    assert grouped.share == alone.share
    assert grouped.share_high - grouped.share_low > 1.3 * (alone.share_high - alone.share_low)


def test_one_group_has_no_interval() -> None:
    link = attribute(chain_scores(0), OFFSETS, group_ids=["one"] * 40).links[0]
    assert math.isfinite(link.share)
    assert math.isnan(link.share_low)


def test_moments_are_over_rollouts_that_all_scores_have() -> None:
    scores = chain_scores(2)
    scores["torch.trainer"] = scores["torch.trainer"].copy()
    scores["torch.trainer"][200:] = np.nan
    mask = np.ones(800, np.uint8)
    mask[:20] = 0
    found = attribute(scores, OFFSETS, mask)
    kept = {name: values[20:200] for name, values in scores.items()}
    alone = attribute(kept, OFFSETS[:10])
    assert (found.rollouts, found.tokens) == (9, 180)
    assert found.links == alone.links
    assert found.whole == alone.whole


def test_equal_scores_have_no_shares() -> None:
    same = np.full(800, -1.0, np.float32)
    found = attribute({"rollout": same, "vllm.prefill": same, "trainer": same}, OFFSETS)
    assert all(math.isnan(link.share) and link.k3_kl == 0.0 for link in found.links)
    assert math.isnan(found.cancellation)


def test_scores_without_common_tokens_have_no_values() -> None:
    found = attribute({"rollout": np.full(20, np.nan), "trainer": np.full(20, -1.0)}, [0, 20])
    assert (found.tokens, found.rollouts, found.groups) == (0, 0, 0)
    assert math.isnan(found.whole.k3_kl)


def test_merged_links_name_all_their_causes() -> None:
    scores = chain_scores(0)
    full = {link.name: link.cause for link in attribute(scores, OFFSETS).links}
    assert full["vllm.decode/rollout"].startswith("engine sampling against replay")
    assert full["vllm.prefill/vllm.decode"].startswith("decode against prefill")
    assert full["torch.trainer/vllm.prefill"].startswith("numerics between engine and trainer")
    assert full["trainer/torch.trainer"].startswith("trainer against replay")
    del scores["vllm.decode"], scores["torch.trainer"]
    collapsed = {link.name: link.cause for link in attribute(scores, OFFSETS).links}
    assert collapsed["vllm.prefill/rollout"].startswith("engine sampling against replay or decode against prefill: ")
    assert collapsed["trainer/vllm.prefill"].startswith(
        "numerics between engine and trainer or trainer against replay: "
    )


def side_branch_scores(engine: float, trainer: float) -> dict[str, NDArray[np.float64]]:
    generator = np.random.default_rng(0)
    truth = -generator.exponential(1.0, 800) - 0.5
    return {
        "torch.float32": truth,
        "rollout": truth + generator.normal(0, engine, 800),
        "vllm.prefill": truth + generator.normal(0, engine, 800),
        "torch.trainer": truth + generator.normal(0, trainer, 800),
    }


@pytest.mark.parametrize(
    ("engine", "trainer", "nearer"), [(0.1, 0.01, "torch.trainer"), (0.01, 0.1, "vllm.prefill"), (0.0, 0.0, "equal")]
)
def test_side_branch_names_the_score_nearer_to_float32(engine: float, trainer: float, nearer: str) -> None:
    branch = attribute(side_branch_scores(engine, trainer), OFFSETS).side_branch
    assert branch is not None
    assert (branch.engine, branch.trainer, branch.nearer) == ("vllm.prefill", "torch.trainer", nearer)
    assert [link.name for link in branch.links] == [
        "torch.float32/rollout", "torch.float32/vllm.prefill", "torch.float32/torch.trainer"
    ]  # fmt: skip
    k3 = {link.name: link.k3_kl for link in branch.links}
    assert k3["torch.float32/torch.trainer"] == pytest.approx(trainer**2 / 2, rel=0.2)


def test_side_branch_needs_float32_and_its_verdict_needs_both_sides() -> None:
    assert attribute(chain_scores(0), OFFSETS).side_branch is None
    scores = side_branch_scores(0.1, 0.1)
    del scores["torch.trainer"]
    branch = attribute(scores, OFFSETS).side_branch
    assert branch is not None
    assert branch.nearer is None


def test_single_score_and_wrong_sizes_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="at least two"):
        attribute({"rollout": np.zeros(20)}, [0, 20])
    with pytest.raises(InvalidRolloutsError) as caught:
        attribute({"rollout": np.zeros(20), "trainer": np.zeros(19)}, [0, 20])
    assert caught.value.column == "trainer"
    scores = {"rollout": np.zeros(20), "trainer": np.ones(20)}
    for offsets in ([], [0, 15, 10, 20], [[0, 20]], [1, 20]):
        with pytest.raises(InvalidRolloutsError, match="offsets must rise from 0"):
            attribute(scores, offsets)
    for groups in (["a"], ["a", "b", "c"]):
        with pytest.raises(InvalidRolloutsError, match="each of the 2 rollouts"):
            attribute(scores, [0, 10, 20], group_ids=groups)


TOKENS = 25
Float64 = NDArray[np.float64]


def cut(prompts: int, per_prompt: int = 4) -> tuple[NDArray[np.int64], list[str]]:
    """The offsets of the rollouts and their prompts."""
    rollouts = prompts * per_prompt
    return np.arange(0, rollouts * TOKENS + 1, TOKENS), [f"p{row // per_prompt}" for row in range(rollouts)]


def made(prompts: int, systematic: float, noise: tuple[float, float, float], seed: int = 0) -> list[Float64]:
    """A logged score and two replays: a common part, a difference of both replays, and noise of each environment."""
    generator = np.random.default_rng(seed)
    size = prompts * 4 * TOKENS
    common = -generator.exponential(1.0, size) - 2.0
    shift = systematic * generator.standard_normal(size)
    e0, e1, e2 = (scale * generator.standard_normal(size) for scale in noise)
    return [common + e0, common + shift + e1, common + shift + e2]


def test_link_has_the_moments_of_the_difference() -> None:
    _, first, second = made(8, 0.0, (0.0, 0.01, 0.02))
    offsets, groups = cut(8)
    found = environment_link(first, second, None, offsets, None, groups)
    d = second - first
    assert found.k3_kl == pytest.approx(np.mean(np.expm1(d) - d), rel=1e-9)
    assert found.max_abs_d == np.abs(d).max()
    assert np.isnan(found.share)


def test_share_is_that_of_the_whole_chain() -> None:
    logged, first, second = made(16, 0.0, (0.0, 0.0, 0.1))
    offsets, groups = cut(16)
    trainer = second + 0.1 * np.random.default_rng(1).standard_normal(logged.size)
    found = environment_link(first, second, (trainer, logged), offsets, None, groups)
    assert found.share_low < 0.5 < found.share_high
    assert found.share == pytest.approx(0.5, abs=0.05)


def test_tokens_without_one_of_the_scores_are_excluded() -> None:
    logged, first, second = made(8, 0.0, (0.0, 0.01, 0.02))
    offsets, groups = cut(8)
    second[:TOKENS] = np.nan
    mask = np.ones(logged.size, np.uint8)
    mask[TOKENS : 2 * TOKENS] = 0
    found = environment_link(first, second, None, offsets, mask, groups)
    assert found.rms_d == pytest.approx(np.sqrt(np.mean(np.square(second - first)[2 * TOKENS :])), rel=1e-12)
    assert np.isnan(environment_link(first, first * np.nan, None, offsets).k3_kl)


def test_excess_is_the_formula() -> None:
    logged, first, second = made(8, 0.02, (0.01, 0.01, 0.01))
    offsets, groups = cut(8)
    value, low, high = excess_over_environments(logged, first, second, offsets, None, groups)
    expected = 0.5 * (np.mean((first - logged) * (second - logged)) - 0.5 * np.mean(np.square(first - second)))
    assert value == pytest.approx(expected, rel=1e-9)
    assert low < value < high


@pytest.mark.parametrize("systematic", [0.0, 0.02])
def test_interval_of_the_excess_covers_what_is_no_environments(systematic: float) -> None:
    offsets, groups = cut(24)
    covered = 0
    for seed in range(100):
        logged, first, second = made(24, systematic, (0.03, 0.03, 0.03), seed)
        _, low, high = excess_over_environments(logged, first, second, offsets, None, groups)
        covered += low <= 0.5 * systematic**2 <= high
    assert covered >= 88
