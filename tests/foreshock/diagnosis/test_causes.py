"""Causes: a link is named where its interval is above one half, and is not named where it is not."""

from __future__ import annotations

import dataclasses

import pytest

from foreshock.diagnosis.attribution import conclude_attribution, conclude_links, prompts_needed
from foreshock.diagnosis.conclusion import Conclusion
from tests.foreshock.diagnosis.evidence import attributed, evidence_of, kinds_of


@pytest.mark.parametrize("link", [0, 1, 2])
def test_the_link_that_is_most_of_it_is_named(link: int) -> None:
    sizes = [0.001, 0.001, 0.001]
    sizes[link] = 0.05
    found = attributed((sizes[0], sizes[1], sizes[2]))
    headline = conclude_attribution(evidence_of(found))[0]
    assert (headline.kind, headline.link, headline.names_cause) == ("cause", found.links[link].name, True)
    assert headline.sentence.startswith("Most of the mismatch, 100 % (resampling range 100 % to 100 %), is in ")


@pytest.mark.parametrize(("prompts", "name"), [(63, "resampling range"), (64, "95 % interval")])
def test_interval_of_a_share_is_called_95_percent_from_64_prompts_on(prompts: int, name: str) -> None:
    (said,) = conclude_attribution(evidence_of(attributed((0.001, 0.05, 0.001), prompts=prompts)))
    assert said.sentence.startswith(f"Most of the mismatch, 100 % ({name} 100 % to 100 %), is in ")


def test_uneven_prompts_with_two_equal_links_name_no_cause() -> None:
    # Both links are as large in truth: each sample has a largest one, and none may be named.
    named = [
        conclusion.sentence
        for seed in range(40)
        for conclusion in conclude_attribution(
            evidence_of(attributed((0.02, 0.02, 0.0), prompts=8, seed=seed, spread=0.6))
        )
        if conclusion.names_cause
    ]
    # The interval is a 95 % one: 1 of 40 is its error.
    assert len(named) <= 3, named


def test_few_prompts_say_how_many_more_would_do() -> None:
    found = attributed((0.02, 0.025, 0.0), prompts=8, per_prompt=16, spread=0.6)
    (said,) = conclude_attribution(evidence_of(found))
    assert (said.kind, said.names_cause) == ("cannot-tell", False)
    assert "with 128 rollouts of 8 prompts: the largest share is " in said.sentence
    assert "more prompts would do (an estimate, if the share stays as it is)." in said.sentence


@pytest.mark.parametrize("seed", [0, 2, 3, 7])
def test_estimated_number_of_prompts_suffices(seed: int) -> None:
    few = evidence_of(attributed((0.02, 0.03, 0.0), prompts=8, spread=0.5, seed=seed))
    link = max(few.links, key=lambda each: each.share)
    needed = prompts_needed(link, few.prompt_groups)
    assert needed is not None
    assert needed > few.prompt_groups
    many = evidence_of(attributed((0.02, 0.03, 0.0), prompts=needed, spread=0.5, seed=seed + 100))
    assert conclude_attribution(many)[0].names_cause


def test_too_few_prompts_for_an_interval_name_no_cause() -> None:
    (said,) = conclude_attribution(evidence_of(attributed((0.001, 0.05, 0.001), prompts=4)))
    assert said.kind == "cannot-tell"
    assert "no interval; more prompts are needed" in said.sentence


def test_equal_links_with_many_prompts_are_no_majority() -> None:
    found = attributed((0.02, 0.018, 0.018), prompts=400, per_prompt=1)
    (said,) = conclude_attribution(evidence_of(found))
    assert (said.kind, said.names_cause) == ("no-majority", False)


def test_equal_ends_do_not_differ() -> None:
    (said,) = conclude_attribution(evidence_of(attributed((0.0, 0.0, 0.0))))
    assert (said.kind, said.sentence) == ("no-difference", "rollout and trainer do not differ at any token.")


def test_marked_link_is_not_named() -> None:
    evidence = evidence_of(attributed((0.05, 0.001, 0.001)))
    marked = Conclusion("environment-differs", "It was replayed elsewhere.", evidence.links[0].name)
    assert kinds_of(tuple(conclude_links(evidence, []))) == ["cause"]
    assert conclude_links(evidence, [marked]) == []
    other = dataclasses.replace(marked, link=evidence.links[1].name)
    assert kinds_of(tuple(conclude_links(evidence, [other]))) == ["cause"]


def test_cancelling_links_are_reported() -> None:
    evidence = evidence_of(attributed((0.02, 0.02, 0.0)))
    assert "cancellation" not in kinds_of(conclude_attribution(evidence))
    cancelling = dataclasses.replace(evidence, cancellation=3.2)
    assert "is 3.2 times that of the whole" in conclude_attribution(cancelling)[-1].sentence
