"""The notary names what an engine holds: which step, which tensors are others and how; the sentence says it."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from foreshock.diagnosis.weights import verdict_in_words
from foreshock.notary import Holding, Piece, Verdict, joined, judge, tensors_of
from tests.foreshock.notary.faults import Weights, announced, held, weights_of

STEPS = {step: weights_of(step) for step in (1, 39, 40, 41)}
ANNOUNCED = {step: announced(weights) for step, weights in STEPS.items()}


def judged(
    step: int, history: Mapping[int, Holding], report: Holding, before: Verdict | None = None, **options: Any
) -> Verdict:
    """Return the verdict on a report after the sync of a step; there must be one."""
    verdict = judge(step, history, report, before, **options)
    assert verdict is not None
    return verdict


def verdict_of(report: Holding) -> Verdict:
    """Return the verdict on a report after the sync of step 41."""
    return judged(41, ANNOUNCED, report)


def sentence_of(report: Holding) -> str:
    """Return what is said of engine 3 of 8."""
    return verdict_in_words("3", 8, verdict_of(report))


def mixed(**of_steps: int) -> Weights:
    """Return the weights of step 41 with those tensors of other steps whose name has a part of this name."""
    weights = dict(STEPS[41])
    for part, step in of_steps.items():
        weights |= {name: values for name, values in STEPS[step].items() if part in name}
    return weights


def test_engine_that_holds_what_was_announced_is_right() -> None:
    verdict = verdict_of(held(STEPS[41]))
    assert verdict.is_right
    assert (verdict.held, verdict.compared, verdict.tensors) == (41, len(STEPS[41]), len(STEPS[41]))
    assert verdict_in_words("3", 8, verdict) == "Engine 3 of 8 holds step 41."


def test_tensor_of_an_older_step_is_named_with_its_step() -> None:
    assert sentence_of(held(mixed(lm_head=1))) == "Engine 3 of 8 holds step 41, except lm_head, which is of step 1."
    two = sentence_of(held(mixed(lm_head=1, norm=40)))
    assert two == "Engine 3 of 8 holds step 41, except lm_head, which is of step 1; and norm, which is of step 40."


def test_one_part_of_a_fused_tensor_is_named_alone() -> None:
    weights = mixed(**{"layers.1.self_attn.k_proj": 39})
    expected = "except layers.1.self_attn.k_proj and layers.1.self_attn.k_proj.bias, which are of step 39."
    assert sentence_of(held(weights)).endswith(expected)


def test_engine_a_step_late_is_one_statement() -> None:
    assert sentence_of(held(STEPS[40])) == "Engine 3 of 8 holds step 40, while the trainer is at step 41."
    late = dict(STEPS[40]) | {"lm_head.weight": STEPS[1]["lm_head.weight"]}
    sentence = "Engine 3 of 8 holds step 40, except lm_head, which is of step 1; the trainer is at step 41."
    assert sentence_of(held(late)) == sentence


def test_tensors_that_do_not_change_are_those_of_every_step() -> None:
    frozen = {name: values for name, values in STEPS[1].items() if "embed" in name}
    history = {step: announced(weights | frozen) for step, weights in STEPS.items()}
    assert judged(41, history, held(STEPS[41] | frozen)).is_right


def test_copy_of_a_tied_head_is_compared_with_the_embeddings() -> None:
    tied = {step: weights_of(step, tied=True) for step in (1, 41)}
    history = {step: announced(weights) for step, weights in tied.items()}
    copy = {step: {"lm_head.weight": weights["model.embed_tokens.weight"]} for step, weights in tied.items()}
    right, stale = (judged(41, history, held(tied[41] | copy[step])) for step in (41, 1))
    assert right.is_right
    assert [(each.name, each.how, each.step) for each in stale.wrong] == [("lm_head.weight", "step", 1)]
    assert judged(41, history, held(tied[41])).is_right


def test_ranks_that_hold_each_others_part_are_named() -> None:
    pieces = held(STEPS[41]).tensors

    def swap(name: str, axis: str) -> Holding:
        first, second = pieces[name]
        places = (replace_place(first, second), replace_place(second, first))
        assert getattr(first, axis) != getattr(second, axis)
        return Holding({**pieces, name: list(places)})

    def replace_place(piece: Any, other: Any) -> Any:
        return piece._replace(row=other.row, column=other.column, rank=other.rank)

    for name, axis in (("model.layers.0.mlp.up_proj.weight", "row"), ("model.layers.0.mlp.down_proj.weight", "column")):
        sentence = sentence_of(swap(name, axis))
        short = name.removeprefix("model.").removesuffix(".weight")
        assert (
            sentence == f"Engine 3 of 8 holds step 41, except {short}, of which ranks 0 and 1 hold each other's part."
        )


def test_rank_that_missed_the_update_leaves_unknown_tensors_and_replicas_that_differ() -> None:
    ranks = [held(STEPS[step]).tensors for step in (41, 40)]
    pieces = {name: [ranks[0][name][0], ranks[1][name][1]] for name in ranks[0]}
    verdict = verdict_of(Holding(pieces))
    how = {each.name: each.how for each in verdict.wrong}
    assert how["model.norm.weight"] == "replicas"
    assert how["lm_head.weight"] == "unknown"


def test_rank_that_does_not_report_is_missing() -> None:
    pieces = held(STEPS[41]).tensors
    verdict = verdict_of(Holding({**pieces, "lm_head.weight": pieces["lm_head.weight"][:1]}))
    assert [(each.name, each.how) for each in verdict.wrong] == [("lm_head.weight", "missing")]


def test_other_dtype_is_named_and_is_no_other_weight() -> None:
    def to_half(model: torch.nn.Module, rank: int) -> None:
        model.get_submodule("lm_head").half()

    sentence = sentence_of(held(STEPS[41], change=to_half))
    assert sentence == "Engine 3 of 8 holds step 41, except lm_head, which is in float16 instead of bfloat16."


@pytest.mark.parametrize(("times", "said"), [(0, "without the adapter"), (2, "with the adapter applied twice")])
def test_adapter_that_is_missing_or_applied_twice_is_named(times: int, said: str) -> None:
    base, names = STEPS[1], [name for name in STEPS[1] if "q_proj.weight" in name]
    delta = {name: 0.1 * torch.randn(base[name].shape, generator=torch.Generator().manual_seed(7)) for name in names}

    def with_adapter(times: int) -> Weights:
        return base | {name: base[name] + times * delta[name] for name in names}

    # The base weights were announced at step 1: a missing adapter is not only "step 1".
    history = {1: announced(base), 41: announced(with_adapter(1))}
    variants = {
        "without the adapter": tensors_of({name: base[name] for name in names}, torch.bfloat16),
        "with the adapter applied twice": tensors_of({name: with_adapter(2)[name] for name in names}, torch.bfloat16),
    }
    assert judged(41, history, held(with_adapter(1)), variants=variants).is_right
    wrong = judged(41, history, held(with_adapter(times)), variants=variants)
    of_all = f"{len(names)} of {len(base)} tensors"
    assert verdict_in_words("0", 1, wrong) == f"Engine 0 holds step 41 {said}, as {of_all} show."


def test_weights_that_were_never_announced_are_said_to_be_so() -> None:
    other = {name: values + 1 for name, values in STEPS[41].items()}
    verdict = verdict_of(held(other))
    assert (verdict.held, verdict.is_right) == (None, False)
    assert "never announced" in verdict_in_words("3", 8, verdict)
    before = replace(verdict, wrong=tuple(replace(each, since=7) for each in verdict.wrong))
    again = judged(41, ANNOUNCED, held(other), before)
    assert {each.since for each in again.wrong} == {7}


def test_step_that_is_no_longer_kept_is_remembered() -> None:
    report = held(mixed(lm_head=1))
    before = verdict_of(report)
    forgotten = judged(41, {41: ANNOUNCED[41], 40: ANNOUNCED[40]}, report, before)
    assert [(each.name, each.how, each.step) for each in forgotten.wrong] == [("lm_head.weight", "step", 1)]


def test_names_that_only_one_side_has_are_not_compared() -> None:
    pieces = dict(held(STEPS[41]).tensors)
    pieces["model.layers.0.mlp.experts.w13"] = pieces.pop("model.norm.weight")
    verdict = verdict_of(Holding(pieces))
    assert (verdict.compared, verdict.tensors, verdict.is_right) == (len(STEPS[41]) - 1, len(STEPS[41]), True)
    assert judge(41, ANNOUNCED, Holding({})) is None
    assert joined([]) == {}


def test_canary_names_the_step_whose_answer_is_much_nearer() -> None:
    generator = torch.Generator().manual_seed(3)
    answers = {step: (-torch.rand(32, generator=generator)).tolist() for step in (39, 40, 41)}
    history = {step: Holding(canary=answer) for step, answer in answers.items()}

    def answered(step: int, noise: float) -> Verdict:
        noisy = torch.tensor(answers[step]) + noise * torch.randn(32, generator=generator)
        return judged(41, history, Holding(canary=noisy.tolist()))

    assert answered(41, 0.01).is_right
    stale = answered(40, 0.01)
    assert (stale.held, stale.is_right) == (40, False)
    said = verdict_in_words("3", 8, stale)
    assert said.startswith("Engine 3 of 8 answers a canary prompt as step 40 does, while the trainer is at step 41")
    assert answered(41, 5.0).is_right, "with such a noise no step can be told from another"
    assert judge(41, history, Holding(canary=answers[41][:9])) is None


def test_parts_that_changed_places_are_found_among_thousands() -> None:
    parts = [Piece("bfloat16", (7 * rank + 3) ** 9 % 2**64, 1, 64, row=rank, rank=rank) for rank in range(4096)]
    places = list(range(4096))
    places[17], places[4000] = places[4000], places[17]
    held = [part._replace(row=place) for part, place in zip(parts, places, strict=True)]
    begun = time.process_time()
    found = judge(3, {3: Holding({"w": parts})}, Holding({"w": held}))
    # A digest of the whole for each pair takes hours.
    assert time.process_time() - begun < 20
    assert found is not None
    assert [(each.how, each.detail) for each in found.wrong] == [("swapped", "ranks 17 and 4000")]
