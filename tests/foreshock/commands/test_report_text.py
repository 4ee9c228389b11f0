"""Tests of the report's text: mismatch, chain, alerts and advice, in lines that fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from foreshock.api.attribution import ExactOfLinkRecord
from foreshock.api.diagnosis import Diagnosis, DiagnosisEvent, MissingData
from foreshock.api.records import NAN
from foreshock.api.replays import MeanRecord
from foreshock.api.runs import RunRecord
from foreshock.api.watch import AdviceRecord
from foreshock.commands.queries import Curve
from foreshock.commands.report_data import MISMATCH_MEASURES, STEP_MEASURES, ReportData, evenly_spaced
from foreshock.commands.report_text import SCREEN_LINES, render, render_screen
from foreshock.commands.text import WIDTH, Paint
from foreshock.learning_rate import Advice
from foreshock.learning_rate.advice import Applied
from foreshock.measures.estimators.attribution import attribute
from foreshock.measures.registry import K3_BY_LAG, TOKENS_BY_LAG
from foreshock.model_kind import ModelKind
from foreshock.ranges import required_range
from tests.foreshock.commands.attributions import attribution_of
from tests.foreshock.learning_rate.test_advice import ANSWER

STEPS = tuple(range(1, 41))


def chain(**differences: float) -> Any:
    """Return the attribution of random scores; adjacent scores differ by noise of the given sizes."""
    generator = np.random.default_rng(0)
    offsets = np.arange(0, 321, 20)
    score = -generator.exponential(1.0, 320) - 2.0
    scores = {"rollout": score}
    for name, size in differences.items():
        score = score + generator.normal(0, size, 320) if size else score
        scores[name.replace("__", ".")] = score
    groups = [f"prompt-{row // 2}" for row in range(16)]
    return attribution_of(7, attribute(scores, offsets, None, groups))


def report(**changes: Any) -> ReportData:
    k3 = tuple(1e-5 * step for step in STEPS)
    values = dict.fromkeys(MISMATCH_MEASURES, k3) | {"token_mult_prob_error": (1.2,) * 40, "tokens": (1000.0,) * 40}
    values |= {each.column: (float("nan"),) * 40 for each in (*K3_BY_LAG, *TOKENS_BY_LAG)}
    mismatch = Curve("trainer/rollout", STEPS, values)
    rollouts = Curve("rollout", STEPS, {name: tuple(map(float, STEPS)) for name in STEP_MEASURES})
    run = RunRecord(
        id="run_1",
        key="key",
        project="default",
        state="running",
        model="M" * 60,
        trainer="T" * 30,
        engine="E" * 30,
        advice_mode="shadow",
        created_at_us=0,
        updated_at_us=0,
    )
    whole = ReportData(
        run=run, url="http://127.0.0.1:8765/runs/run_1", step=7, mismatch=mismatch,
        rollouts=rollouts, diagnosis=Diagnosis(verdict="unknown", headline="Unknown: no data."),
        attributions=(), probed_steps=(), unfinished_probes=(), buckets=(),
        alerts=(), advice=None,
    )  # fmt: skip
    return dataclasses.replace(whole, **changes)


def text_of(**changes: Any) -> str:
    made = report(**changes)
    lines = render(made, Paint())
    assert max(len(line) for line in lines if line != made.diagnosis.headline) <= WIDTH, max(lines, key=len)
    return "\n".join(lines)


def test_diagnosis_comes_first_with_its_headline_in_one_line() -> None:
    event = DiagnosisEvent(
        step=7, onset=5, rule="mismatch_rise", severity="critical", sentence="Step 7: k3 rose.", is_open=True
    )
    found = Diagnosis(
        verdict="critical",
        since=7,
        headline=f"Critical since step 7: {'k3 rose and ' * 12}rose.",
        events=(event, dataclasses.replace(event, sentence="Long ago.", is_open=False)),
        next_steps=("Probe a step.",),
        missing=(MissingData(sentence="no reward is logged"),),
    )
    text = text_of(diagnosis=found)
    assert f"\n{found.headline}\n" in text
    parts = [text.index(each) for each in (found.headline, "Step 7: k3 rose.", "Probe a step.", "No reward is logged.")]
    assert parts == sorted(parts)
    assert parts[-1] < text.index("Mismatch, trainer/rollout")
    assert "Long ago." not in text


def test_placeholders_at_masked_tokens_are_counted() -> None:
    ignored = "768 placeholders at masked tokens are ignored"
    assert f"step 40: {ignored}" in text_of(ignored=ignored)
    assert f"step 40: {ignored}" in "\n".join(render_screen(report(ignored=ignored), Paint()))


def test_screen_fits_its_width_and_counts_what_it_leaves_out() -> None:
    event = DiagnosisEvent(
        step=7, onset=5, rule="mismatch_rise", severity="critical", sentence="Step 7: k3 rose.", is_open=True
    )
    few = Diagnosis(verdict="critical", since=7, headline="Critical since step 7.", events=(event,) * 5)
    many = dataclasses.replace(few, next_steps=("What to do about it in many words. " * 40,) * 5)
    for found, shown in ((few, 3), (many, 1)):
        lines = render_screen(report(diagnosis=found), Paint())
        assert max(map(len, lines)) <= WIDTH
        assert len(lines) <= SCREEN_LINES
        assert [line.strip() for line in lines if "k3 rose" in line] == ["· Step 7: k3 rose."] * shown
        assert f"and {5 - shown} more" in "\n".join(lines)


def test_ranges_are_those_of_the_model_kind_and_an_unknown_kind_is_reported() -> None:
    kinds: tuple[ModelKind | None, ...] = (None, "dense", "moe")
    texts = {kind: text_of(run=dataclasses.replace(report().run, model_kind=kind)) for kind in kinds}
    rows = {kind: next(line for line in text.splitlines() if "k3 per token" in line) for kind, text in texts.items()}
    for kind, row in rows.items():
        assert row.endswith(required_range("k3_kl", kind).text)
    assert ["model kind is unknown" in " ".join(text.split()) for text in texts.values()] == [True, False, False]
    assert "mixture of experts" in texts["moe"]


def mixed_report(**changes: Any) -> ReportData:
    """Three quarters of the tokens are at lag 8: k3 is 5e-4 at lag 0 and 6.6e-2 over all tokens."""
    made = report()
    of_steps = {"tokens_lag_0": 250.0, "tokens_lag_5_8": 750.0, "k3_kl_lag_0": 5e-4, "k3_kl_lag_5_8": 0.088,
                "k3_kl": 0.0661, "tail_2": 0.2}  # fmt: skip
    values = {**made.mismatch.values, **{name: (value,) * 40 for name, value in of_steps.items()}}
    return dataclasses.replace(made, mismatch=dataclasses.replace(made.mismatch, values=values), **changes)


@pytest.mark.parametrize("as_text", [render, render_screen])
def test_range_of_k3_stands_beside_k3_at_lag_zero(as_text: Any) -> None:
    lines = as_text(mixed_report(), Paint())
    (fresh,) = [line for line in lines if "k3 per token, lag 0" in line]
    (whole,) = [line for line in lines if "k3 per token, all lags" in line]
    assert fresh.endswith(f"5.00e-4  {required_range('k3_kl').text}")
    assert whole.endswith("0.0661")
    assert max(map(len, lines)) <= WIDTH
    for line in lines:
        if line.startswith("  F(2)"):
            assert line.endswith("0.200")


def test_exact_divergence_stands_in_place_of_k3_of_its_link() -> None:
    found = chain(vllm__prefill=0.0, torch__trainer=0.05, trainer=0.001)
    assert "exact" not in text_of(attributions=(found,), probed_steps=(7,))
    mean = MeanRecord(mean=3.7e-6, low=NAN, high=NAN)
    names = ("kl", "reverse_kl", "tv", "top1_flip", "target_entropy", "behaviour_entropy", "k3_kl")
    means: dict[str, Any] = dict.fromkeys(names, mean)
    pair = "torch.trainer/vllm.prefill"
    exact = (ExactOfLinkRecord(
        **means, delta_max=0.1, tokens=320, rollouts=16, groups=8, effective_groups=8.0, non_finite=0, pair=pair,
        name=pair, target="torch.trainer", behaviour="vllm.prefill", from_sample=False, target_fingerprint={},
        behaviour_fingerprint={}, accelerator="cpu", device_name="", published_at_us=1, other_settings=(),
    ),)  # fmt: skip
    text = text_of(attributions=(dataclasses.replace(found, exact=exact),), probed_steps=(7,))
    (row,) = [line for line in text.splitlines() if line.startswith("    torch.trainer/vllm.prefill ")]
    assert row.split()[1] == "3.70e-6*"
    assert "*: exact KL(μ‖π) over the whole vocabulary in place of k3" in " ".join(text.split())


def test_stale_attribution_is_marked() -> None:
    found = chain(vllm__prefill=0.0, trainer=0.001)
    assert "a new attribution is being computed" not in text_of(attributions=(found,), probed_steps=(7,))
    stale = text_of(attributions=(dataclasses.replace(found, stale=True),), probed_steps=(7,))
    assert "a new attribution is being computed" in stale


def test_copied_log_probs_are_reported() -> None:
    zeros = dict.fromkeys(MISMATCH_MEASURES, (0.0,) * 40) | {"zero_fraction": (1.0,) * 40}
    text = text_of(mismatch=Curve("trainer/rollout", STEPS, zeros))
    assert "look like a copy of the engine's (bypass)" in " ".join(text.split())


def test_report_without_trainer_log_probs_names_the_column_to_log() -> None:
    missing = Curve("trainer/rollout", (), {})
    assert "log both to see the mismatch" in text_of(mismatch=missing)


def test_report_of_an_empty_run() -> None:
    nothing = Curve("rollout", (), {})
    text = text_of(mismatch=nothing, rollouts=nothing, step=None)
    assert "no step is complete yet" in text


@pytest.mark.parametrize("mode", ["shadow", "apply"])
def test_advice_shows_the_next_decay_steps(mode: str) -> None:
    advice = Advice.from_json({**ANSWER, "mode": mode})
    text = text_of(advice=AdviceRecord(advice, 0.5, 396))
    assert "falls at 396 (to 0.25), 594 (to 0.125), 792 (to 0.1)" in text
    assert "surge at step 110: × 0.5 every 198 steps, not below 0.1" in text
    assert ("the trainer gets 1.0" in text) == (mode == "shadow")


def test_advice_tells_what_the_trainer_acknowledged() -> None:
    advice = Advice.from_json({**ANSWER, "mode": "apply"})
    assert "not acknowledged" in text_of(advice=AdviceRecord(advice, 0.5, 396))
    applied = Applied(step=201, learning_rate=5e-7, revision=advice.revision, scale=0.5)
    text = text_of(advice=AdviceRecord(advice, 0.5, 396, applied))
    assert "applied 0.5 at step 201 (learning rate 5e-7)" in text
    assert "not acknowledged" not in text


def test_unfinished_probe_shows_its_reason() -> None:
    text = text_of(unfinished_probes=((7, "failed", "the weights do not match their digest"),))
    assert "  ! probe of step 7: failed: the weights do not match their digest" in text


def test_spread_keeps_both_ends() -> None:
    assert evenly_spaced((1, 2, 3), 4) == (1, 2, 3)
    assert evenly_spaced(range(1, 101), 4) == (1, 34, 67, 100)


def test_missing_buckets_show_their_reason() -> None:
    text = text_of(buckets_missing="Another release measured them: run `foreshock remeasure`.")
    assert "Which tokens: trainer/rollout by probability, step 7" in text
    assert "foreshock remeasure" in text


def test_known_shape_measures_are_shown() -> None:
    values = {"k3_kl": (1e-4,) * 40, "pareto_k": (0.8,) * 40, "max_d": (2.0,) * 40, "tail_asymmetry_ln2": (1e-3,) * 40}
    text = text_of(mismatch=Curve("trainer/rollout", STEPS, values))
    assert "tail asymmetry at ln 2" in text
    assert "means of ratios and ESS cannot be trusted" in text
    assert "cov(advantage, d)" not in text
    harmless = text_of(mismatch=Curve("trainer/rollout", STEPS, {**values, "max_d": (0.1,) * 40}))
    assert "cannot be trusted" not in harmless
    assert "k̂ matters to intervals only" in harmless
