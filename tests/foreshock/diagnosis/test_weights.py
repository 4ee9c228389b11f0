"""Conclusions on the weights that the engine held: named if exactly one replay is at the noise floor."""

from __future__ import annotations

import dataclasses

import pytest

from foreshock.diagnosis.attribution import conclude_attribution
from foreshock.diagnosis.conclusion import Conclusion, DriftPoint
from foreshock.diagnosis.weights import conclude_weights
from foreshock.weights_search import WeightsReplay, WeightsSearch
from tests.foreshock.diagnosis.evidence import attributed, evidence_of

LINK = "vllm.prefill/rollout"
STEP = 60


def replay(step: int, part: str, k3: float) -> WeightsReplay:
    return WeightsReplay(step, part, k3, k3, k3, 3 * k3**0.5)


def searched(*replays: WeightsReplay, **changes: object) -> WeightsSearch:
    """A search whose best other weights were confirmed, unless `changes` say otherwise."""
    found = WeightsSearch(STEP, "vllm.prefill", 128, 4_000, 0.0, replays=replays)
    confirmed = {"confirmed_k3": found.others[0].k3_kl} if found.others else {}
    return dataclasses.replace(found, **(confirmed | changes))  # type: ignore[arg-type]


def concluded(search: WeightsSearch, *so_far: Conclusion, **changes: object) -> Conclusion:
    found = attributed((0.02, 0.01, 0.01))
    (said,) = conclude_weights(evidence_of(found, weights_search=search, **changes), so_far)
    assert said.link == LINK
    return said


ANNOUNCED = replay(STEP, "all", 1.8e-2)


def test_without_a_search_nothing_is_said() -> None:
    assert conclude_weights(evidence_of(attributed((0.02, 0.01, 0.01))), ()) == []


def test_stale_head_is_named() -> None:
    said = concluded(searched(ANNOUNCED, replay(59, "all", 1.7e-2), replay(1, "lm_head", 4e-14)))
    assert (said.kind, said.names_cause) == ("wrong-weights", True)
    assert said.sentence == (
        "The engine at step 60 ran with the lm_head of step 1 and the announced weights otherwise: that replay gives "
        "its log-probs (k3 4.0e-14, at the noise floor, against 1.8e-2 with the announced weights); the other "
        "replay does not come near."
    )


@pytest.mark.parametrize(("step", "words"), [(59, "one step behind"), (1, "59 steps behind")])
def test_stale_weights_are_named_with_their_lag(step: int, words: str) -> None:
    said = concluded(searched(ANNOUNCED, replay(step, "all", 0.0), replay(30, "all", 2e-2)))
    assert said.names_cause
    assert f"ran with the weights of step {step} ({words}): " in said.sentence


def test_link_that_wrong_weights_explain_gets_no_second_sentence() -> None:
    search = searched(ANNOUNCED, replay(59, "all", 0.0), replay(1, "all", 0.1))
    found = attributed((0.05, 0.001, 0.001))
    said = conclude_attribution(evidence_of(found, weights_search=search))
    assert [each.kind for each in said if each.link == LINK] == ["wrong-weights"]


def test_announced_weights_that_reproduce_are_not_blamed() -> None:
    said = concluded(searched(replay(STEP, "all", 5e-7), replay(59, "all", 2e-5), replay(59, "lm_head", 4e-7)))
    assert (said.kind, said.names_cause) == ("cannot-tell", False)
    assert "nearly (k3 5.0e-7), and none of 2 other replays is clearly nearer" in said.sentence
    floor = searched(replay(STEP, "all", 3e-4), replay(59, "all", 3.2e-4), floor_k3=4e-4)
    assert concluded(floor).kind == "weights-held"
    alone = concluded(searched(replay(STEP, "all", 0.0)))
    assert (alone.kind, alone.names_cause) == ("weights-held", False)


def test_tiny_update_is_told_by_exact_replay() -> None:
    # Both are below the bound, and only one of them is exact.
    said = concluded(searched(replay(STEP, "all", 6e-7), replay(59, "all", 3e-14)))
    assert said.names_cause
    assert "the weights of step 59" in said.sentence


def test_two_weights_that_fit_are_both_told_and_neither_is_named() -> None:
    said = concluded(searched(ANNOUNCED, replay(1, "lm_head", 3e-14), replay(2, "lm_head", 5e-14)))
    assert (said.kind, said.names_cause) == ("wrong-weights", True)
    assert "did not run with the announced weights" in said.sentence
    assert "the lm_head of step 1 or the lm_head of step 2 give its log-probs as well as each other" in said.sentence

    assert said.sentence.endswith("so the search cannot tell which it held.")


def test_nothing_at_the_floor_names_nothing() -> None:
    said = concluded(searched(ANNOUNCED, replay(59, "all", 1.7e-2), replay(1, "lm_head", 9e-3)))
    assert (said.kind, said.names_cause) == ("cannot-tell", False)
    assert said.sentence.startswith("No announced weights give the log-probs of the engine at step 60: of 3 replays")
    assert "held weights that were not announced" in said.sentence


def test_differing_environment_ranks_weights_and_names_none() -> None:
    differs = Conclusion("environment-differs", "…", LINK)
    search = searched(ANNOUNCED, replay(1, "lm_head", 2.7e-5), replay(59, "all", 1.7e-2))
    said = concluded(search, differs, drift={LINK: (DriftPoint(1, 2.5e-5), DriftPoint(2, 3e-5))})
    assert (said.kind, said.names_cause) == ("cannot-tell", False)
    assert "with the lm_head of step 1, has k3 2.7e-5, against 1.8e-2 with the announced weights" in said.sentence
    assert "the least at the run's other probed steps is 2.5e-5" in said.sentence
    assert said.sentence.endswith("the search ranks weights and names none.")


def test_replay_at_the_floor_counts_also_where_the_environment_is_unknown() -> None:
    unknown = Conclusion("environment-unknown", "…", LINK)
    assert concluded(searched(ANNOUNCED, replay(59, "all", 0.0)), unknown).names_cause


def test_environment_is_cleared_by_a_replay_that_is_exact() -> None:
    # No fingerprint is known: without the replay, nothing could be said on this link.
    found = attributed((0.05, 0.001, 0.001))
    exact, near = (searched(ANNOUNCED, replay(1, "lm_head", k3)) for k3 in (4e-14, 3e-7))
    said = {
        name: [each.kind for each in conclude_attribution(evidence) if each.link == LINK]
        for name, search in (("exact", exact), ("near", near))
        for evidence in [evidence_of(found, weights_search=search, environments={})]
    }
    assert said == {"exact": ["wrong-weights"], "near": ["environment-unknown", "wrong-weights"]}


def test_noise_floor_of_the_scorer_raises_the_bound() -> None:
    # A GPU: the same scorer in other batches has k3 2e-4, and the head of step 1 is as near as that.
    named = searched(ANNOUNCED, replay(1, "lm_head", 3e-4), floor_k3=2e-4)
    assert concluded(named).names_cause
    beyond = searched(replay(STEP, "all", 1.5e-3), replay(1, "lm_head", 3e-4), floor_k3=2e-4)
    assert not concluded(beyond).names_cause


def test_unconfirmed_reload_names_nothing() -> None:
    said = concluded(searched(ANNOUNCED, replay(1, "lm_head", 4e-14), confirmed_k3=2e-2))
    assert (said.kind, said.names_cause) == ("cannot-tell", False)
    assert "cannot be relied on" in said.sentence


def test_skipped_candidates_are_told_with_their_reasons() -> None:
    gone = WeightsReplay(59, "all", skipped="there are no weights of step 59")
    said = concluded(searched(ANNOUNCED, gone))
    assert (said.kind, said.names_cause) == ("cannot-tell", False)
    assert "the weights of step 59: there are no weights of step 59" in said.sentence


def test_search_survives_a_round_trip_through_json() -> None:
    search = searched(ANNOUNCED, WeightsReplay(1, "lm_head", skipped="gone"), tied=True, ended="all")
    assert WeightsSearch.from_dict(search.to_dict()) == search


@pytest.mark.parametrize(
    ("part", "tied", "words"),
    [
        ("embeddings", True, "the tied embeddings and head of step 3"),
        ("lm_head+embeddings", False, "the lm_head and the embeddings of step 3"),
        ("layers.0-17", False, "layers 0 to 17 of step 3"),
        ("layers.4", False, "layer 4 of step 3"),
    ],
)
def test_parts_in_words(part: str, tied: bool, words: str) -> None:
    search = searched(ANNOUNCED, tied=tied)
    assert search.describe(replay(3, part, 0.1)) == words
