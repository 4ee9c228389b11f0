"""The presenter of corrections and theory: a part of the step's page that is fetched after it.

The evaluations read the summaries of every rollout, which takes longer than the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.corrections import Evaluation, Threshold
from foreshock.interval_names import RANGE
from foreshock.theory import GradientNoise, StepNoise
from foreshock_service.present.pages.formatting import DASH, number
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.step_models import CorrectionRow, CorrectionsPart, TheoryRow
from foreshock_service.runs.corrections.service import CorrectionQuery, evaluate_corrections
from foreshock_service.runs.measurements.service import MeasurementNotFound, StatisticsOutOfDate
from foreshock_service.runs.theory.service import FoundTheory, TheoryQuery, theory_of_pair


def corrections_part(viewing: Viewing, run_id: str, step: int) -> CorrectionsPart:
    """Return the corrections of trainer/rollout at the thresholds in use, and the theory of the same step."""
    try:
        query = CorrectionQuery(run_id, step, None, TRAINER_ROLLOUT)
        evaluated = evaluate_corrections(viewing.session, viewing.principal, query)
    except (MeasurementNotFound, StatisticsOutOfDate) as error:
        return CorrectionsPart(TRAINER_ROLLOUT, (), False, False, (), (), (), f"{error.detail}.")
    theory_query = TheoryQuery(run_id, step, None, TRAINER_ROLLOUT)
    theory = theory_of_pair(viewing.session, viewing.principal, theory_query, evaluated.pair)
    # The first threshold in use of each correction; the API has every other one.
    evaluations = list({found.correction.name: found for found in reversed(evaluated.evaluations)}.values())[::-1]
    notes = dict.fromkeys(note for found in evaluations for note in found.notes)
    reasons = dict.fromkeys(found.not_estimable for found in evaluations if found.not_estimable)
    missing = [f"{_titles(evaluations, reason)}: {reason}." for reason in reasons]
    return CorrectionsPart(
        TRAINER_ROLLOUT,
        [_row(found) for found in evaluations if not found.not_estimable],
        any(math.isfinite(found.advantage_distortion) for found in evaluations),
        any(math.isfinite(found.affected.untouched.turns) for found in evaluations),
        missing,
        [_sentence(note) for note in notes],
        list(_theory_rows(theory)),
        "",
    )


def _titles(evaluations: Sequence[Evaluation], reason: str) -> str:
    return " and ".join(found.correction.title for found in evaluations if found.not_estimable == reason)


def _row(found: Evaluation) -> CorrectionRow:
    hit, rest = found.affected.touched, found.affected.untouched
    return CorrectionRow(
        title=found.correction.title,
        threshold="" if found.used == Threshold() else _threshold(found.used),
        formula=found.correction.formula,
        level=found.correction.level,
        kept_tokens=_percent(found.kept_tokens),
        kept_sequences=_percent(found.kept_sequences),
        effective=_percent(found.weights.effective_fraction),
        spread=_number(found.weights.standard_deviation),
        distortion=_number(found.distortion),
        advantage_distortion=_number(found.advantage_distortion),
        beyond=f"{hit.sequences}",
        reward=_against(hit.reward, rest.reward),
        length=_against(hit.length, rest.length),
        turns=_against(hit.turns, rest.turns),
    )


def _theory_rows(found: FoundTheory) -> Iterator[TheoryRow]:
    theory, bias = found.theory, found.theory.bias
    reach = (
        f"{RANGE} {number(bias.low)} to {number(bias.high)}"
        if math.isfinite(bias.high)
        else ("no interval: too few prompts")
    )
    yield TheoryRow(
        "Bound of the gradient's bias, estimated",
        f"{_number(bias.per_unit)} · B",
        f"B·E|ρ_seq − 1|·T·|R|, estimated from these rollouts ({reach}): the bias itself may be larger than this "
        "estimate. B bounds the gradient of one token's log-prob. "
        f"The trivial bound 2·B·T·max|R|, at the mean length: {_number(bias.trivial)} · B."
        + "".join(f" {_sentence(note)}" for note in bias.notes),
    )
    # The page knows no exact Δmax; the API takes one.
    if theory.horizon.not_estimable is not None:
        yield TheoryRow("The same, as 2·B·Δmax·T²", DASH, _sentence(theory.horizon.not_estimable))
    yield TheoryRow(
        "Total variation of a token, at most",
        _number(theory.pinsker),
        f"½√χ² of the token mean of χ². The estimate of the total variation itself is {_number(theory.tv_token)}."
        + "".join(f" {_sentence(note)}" for note in theory.pinsker_notes),
    )
    if theory.sequence_chi2 is not None:
        of_sequence = theory.sequence_chi2
        value = number(of_sequence.value) if of_sequence.log10 < 5 else _power_of_ten(of_sequence.log10)
        yield TheoryRow(
            "E ρ_seq², extrapolated",
            value,
            f"(1 + χ²)^T with the mean χ² and the mean length, {of_sequence.length:.4g} tokens: true if tokens were "
            "independent and all alike. An extrapolation, no bound.",
        )
    yield from _gradient_rows(found, theory.gradient, theory.step_noise)


def _gradient_rows(found: FoundTheory, noise: GradientNoise | None, step: StepNoise | None) -> Iterator[TheoryRow]:
    name = "Variance of a prompt's gradient, V̂"
    if noise is None:
        yield TheoryRow(name, DASH, f"Not estimable: {found.gradient_missing}.")
        return
    notes = "".join(f" {_sentence(note)}" for note in noise.notes)
    yield TheoryRow(
        name,
        _number(noise.variance),
        f"(‖g_b‖² − ‖g_B‖²)/(1/b − 1/B); of the whole batch {_number(noise.of_batch)}.{notes}",
    )
    if step is None:
        yield TheoryRow(
            "Noise of a step",
            DASH,
            "Not estimable: neither the step nor the run has a learning rate; log the scalar `lr`.",
        )
        return
    yield TheoryRow(
        "Noise of a step at η, and at η/2",
        f"{_number(step.at_learning_rate)} · L, {_number(step.at_half)} · L",
        f"(Lη²/2)·Var with η = {_number(step.learning_rate)} ({found.learning_rate_source}); L bounds the curvature of "
        "the objective. The bias adds to it, and norms cannot show it.",
    )


def _power_of_ten(exponent: float) -> str:
    return "too large" if math.isinf(exponent) else f"10^{exponent:.3g}" if exponent < 100 else f"10^{exponent:.0f}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _threshold(threshold: Threshold) -> str:
    bounds = [bound for bound in (threshold.lower, threshold.upper) if bound is not None]
    return " to ".join(f"{bound:.4g}" if bound >= 1e-3 else number(bound) for bound in bounds)


def _against(hit: float, rest: float) -> str:
    return f"{number(hit)} / {number(rest)}"


def _number(value: float) -> str:
    """Return a number; a dash if it is not estimable, "too large" for ±inf."""
    return "too large" if math.isinf(value) else number(value)


def _percent(share: float) -> str:
    """Return a share with enough digits: only exactly 0 and 1 are shown as 0 % and 100 %."""
    if math.isnan(share):
        return DASH
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    digits = next((digits for digits in range(1, 6) if 0.0 < round(100 * share, digits) < 100.0), 6)
    return f"{100 * share:.{digits}f} %"
