"""Conclusions on environments: made if they differ or are unknown, unless the link is cleared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foreshock.api.attribution import AttributionDocument, EnvironmentLinkRecord, EnvironmentRecord
from foreshock.api.records import NAN
from foreshock.diagnosis.attribution import conclude_attribution
from foreshock.diagnosis.conclusion import Conclusion
from foreshock.diagnosis.environments import conclude_environments
from foreshock.environment import Environment
from tests.foreshock.diagnosis.evidence import attributed, evidence_of, recorded

VLLM = {"device": "CPU", "mkl_kernels": "intel", "engine": "vllm", "engine_version": "0.32.0"}
ENGINE_LINK, MIDDLE, TRAINER_LINK = "vllm.prefill/rollout", "torch.trainer/vllm.prefill", "trainer/torch.trainer"


def engine(instruction_set: str | None = "avx2", **changes: str) -> EnvironmentRecord:
    return recorded(Environment(**{**VLLM, "instruction_set": instruction_set, **changes}))  # type: ignore[arg-type]


def trainer(instruction_set: str | None = "avx2", **changes: str) -> EnvironmentRecord:
    return engine(instruction_set, **{"engine": "torch", "engine_version": "2.13.0", **changes})


def evidence(
    sizes: tuple[float, float, float] = (0.1, 0.02, 0.02), **environments: EnvironmentRecord | None
) -> AttributionDocument:
    """A chain whose first link is most of the mismatch, all in one environment but for `environments`."""
    known: dict[str, EnvironmentRecord | None] = {
        "rollout": engine(),
        "vllm_prefill": engine(),
        "torch_trainer": trainer(),
        "trainer": trainer(),
    }
    made = {name.replace("_", "."): value for name, value in (known | environments).items()}
    return evidence_of(attributed(sizes), environments=made)


def kinds(found: AttributionDocument, *others: AttributionDocument) -> dict[str | None, str]:
    return {each.link: each.kind for each in conclude_environments(found, others)}


def named_causes(found: AttributionDocument, *others: AttributionDocument) -> list[Conclusion]:
    return [each for each in conclude_attribution(found, others) if each.names_cause]


def at_step_1(found: AttributionDocument, k3: float, **changes: Any) -> AttributionDocument:
    """Return the same attribution at step 1, with this k3 of the engine's link."""
    links = tuple(replace(link, k3_kl=k3) if link.name == ENGINE_LINK else link for link in found.links)
    return replace(found, step=1, links=links, **changes)


def test_equal_environments_are_not_mentioned_and_the_cause_is_named() -> None:
    found = evidence()
    assert conclude_environments(found, ()) == []
    assert [each.link for each in named_causes(found)] == [ENGINE_LINK]


def test_different_instruction_sets_come_first_in_words_and_no_cause_is_named() -> None:
    found = evidence(vllm_prefill=engine("amx"), torch_trainer=trainer("amx"))
    first, second, *_ = conclude_attribution(found)
    assert (first.kind, first.link, first.names_cause) == ("environment-differs", ENGINE_LINK, False)
    assert "the CPU's instruction set: AVX2 at sampling, AVX-512 with AMX in the replay" in first.sentence
    assert "the CPU's instruction set: AVX-512 with AMX in the replay, AVX2 in the trainer" in second.sentence
    assert named_causes(found) == []


def test_unknown_environment_names_no_cause_and_says_what_to_log() -> None:
    found = evidence(rollout=None)
    assert kinds(found) == {ENGINE_LINK: "environment-unknown"}
    assert "`engine_fingerprint`" in conclude_environments(found, ())[0].sentence
    assert named_causes(found) == []
    assert kinds(evidence(trainer=None)) == {TRAINER_LINK: "environment-unknown"}
    assert "`trainer_fingerprint`" in conclude_environments(evidence(trainer=None), ())[0].sentence


def test_environment_whose_instruction_set_is_not_told_is_unknown() -> None:
    found = evidence(rollout=engine(None))
    assert kinds(found) == {ENGINE_LINK: "environment-unknown"}
    assert "the CPU's instruction set" in conclude_environments(found, ())[0].sentence


def test_link_that_is_equal_bit_for_bit_is_cleared() -> None:
    found = evidence((0.0, 0.1, 0.0), vllm_prefill=engine("amx"), torch_trainer=trainer("amx"), trainer=None)
    assert conclude_environments(found, ()) == []
    assert [each.link for each in named_causes(found)] == [MIDDLE]


def test_version_of_the_engine_counts_between_scores_of_one_engine_only() -> None:
    assert kinds(evidence(vllm_prefill=engine(engine_version="0.31.0"))) == {ENGINE_LINK: "environment-differs"}
    assert kinds(evidence(torch_trainer=trainer(engine_version="2.12.0"))) == {TRAINER_LINK: "environment-differs"}


def test_engine_and_precision_of_the_trainer_are_no_environment() -> None:
    """They are what its link is about, and what the conclusions on precision are about."""
    assert kinds(evidence(trainer=trainer(engine="megatron"))) == {}
    assert kinds(evidence(trainer=trainer(dtype="float32"), torch_trainer=trainer(dtype="bfloat16"))) == {}
    sampled = evidence(rollout=engine(dtype="float16"), vllm_prefill=engine(dtype="bfloat16"))
    assert kinds(sampled) == {ENGINE_LINK: "environment-differs"}


def test_engine_against_trainer_in_one_environment_can_be_the_cause_elsewhere_too() -> None:
    found = evidence((0.01, 0.1, 0.01), vllm_prefill=engine("amx"), torch_trainer=trainer("amx"))
    assert kinds(found) == dict.fromkeys((ENGINE_LINK, TRAINER_LINK), "environment-differs")
    assert [each.link for each in named_causes(found)] == [MIDDLE]


def test_run_whose_own_sides_differ_is_no_difference_of_the_replay() -> None:
    own: dict[str, Any] = {"trainer": trainer("amx"), "torch_trainer": trainer("amx")}
    assert kinds(evidence(**own)) == {}
    assert kinds(evidence(torch_trainer=trainer("amx"))) == dict.fromkeys((MIDDLE, TRAINER_LINK), "environment-differs")


def test_chain_without_replays_has_no_environment_to_compare() -> None:
    found = evidence()
    whole = replace(found.whole, name="trainer/rollout")
    alone = replace(found, chain=("rollout", "trainer"), links=(whole,), environments={})
    assert conclude_environments(alone, ()) == []


def test_drift_in_one_environment_clears_the_link_and_the_cause_is_named() -> None:
    for unknown in (evidence(rollout=None), evidence(rollout=engine("amx"))):
        found = replace(unknown, step=60)
        other = at_step_1(found, 4e-14)
        (drift,) = conclude_environments(found, (other,))
        assert drift.kind == "drift"
        assert "4.0e-14 at step 1, " in drift.sentence
        assert " at step 60, in the same environment" in drift.sentence
        assert [each.link for each in named_causes(found, other)] == [ENGINE_LINK]


@pytest.mark.parametrize(
    ("k3", "changes"),
    [
        (4e-14, {"environments": {"rollout": None, "vllm.prefill": engine("amx")}}),
        (4e-14, {"attempt": 2}),
        (1e-6, {}),
        # The least that two instruction sets gave in bfloat16, at a checkpoint of the shipped run.
        (2.8e-12, {}),
        (NAN, {}),
    ],
    ids=[
        "another environment",
        "another attempt",
        "not zero",
        "two environments that hardly differ at that step",
        "not estimable",
    ],
)
def test_a_step_in_another_environment_or_with_a_difference_clears_nothing(k3: float, changes: dict[str, Any]) -> None:
    found = replace(evidence(rollout=None), step=60)
    other = at_step_1(found, k3, **changes)
    assert kinds(found, other) == {ENGINE_LINK: "environment-unknown"}
    assert named_causes(found, other) == []


def test_link_that_is_small_at_both_steps_has_not_grown() -> None:
    found = evidence((1e-4, 0.02, 0.02), rollout=None)
    assert kinds(found, at_step_1(found, 4e-14)) == {ENGINE_LINK: "environment-unknown"}


def two_environments(**fields: Any) -> EnvironmentLinkRecord:
    """Return a replay of the engine in two environments; numbers that are not given are unknown."""
    numbers = ("rms_d", "max_abs_d", "share", "share_low", "share_high", "excess", "excess_low", "excess_high")
    known = {"logged": None, "scorer": "vllm.prefill", "first": engine(), "second": engine("amx"), "k3_kl": 6.6e-4}
    return EnvironmentLinkRecord(**{**dict.fromkeys(numbers, NAN), **known, **fields})


def test_two_environments_of_one_scorer_are_compared_in_words() -> None:
    link = two_environments(share=0.6, share_low=0.5, share_high=0.7)
    found = conclude_environments(replace(evidence(), environment_links=(link,)), ())
    assert [(each.kind, each.names_cause) for each in found] == [("environment-measured", False)]
    assert found[0].sentence == (
        "vllm.prefill on a CPU with AVX-512 with AMX against the same on a CPU with AVX2: k3 6.6e-4, 60 % of the "
        "mismatch (range over the prompts 50 % to 70 %). This is what the environment alone changes."
    )


def test_excess_over_two_environments_names_its_assumption() -> None:
    link = two_environments(logged="rollout", excess=1e-4, excess_low=5e-5, excess_high=2e-4)
    _, excess = conclude_environments(replace(evidence(), environment_links=(link,)), ())
    assert "1.0e-4 nats per token (range over the prompts 5.0e-5 to 2.0e-4)" in excess.sentence
    assert "(an assumption)" in excess.sentence
    assert not excess.names_cause


def test_link_without_a_share_is_marked_all_the_same() -> None:
    found = evidence(rollout=None)
    links = tuple(replace(each, share=NAN, share_low=NAN, share_high=NAN) for each in found.links)
    assert kinds(replace(found, links=links)) == {ENGINE_LINK: "environment-unknown"}
