"""The figures of tokens: by the tokens' properties at a step, over steps, and single ones."""

from __future__ import annotations

import functools

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.statistics.bucket_sums import BucketTable
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.store.reading import TokensGone, TokensPurged
from foreshock_service.present.pages.figures import Figure, Missing, buckets, heat_map, tokens
from foreshock_service.present.pages.presenters.curves import curves_of
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.runs.measurements.curve_reading import CurveQuery, read_curves
from foreshock_service.runs.measurements.service import (
    MeasurementNotFound,
    StatisticsOutOfDate,
    read_statistics,
    statistics_of_steps,
)
from foreshock_service.runs.rollouts.sampled_tokens import TokenSample, sample_tokens
from foreshock_service.runs.step_key import StepKey

MOST_STEPS = 48
"""Columns of the heat map. Each is read from the statistics of its step."""


def buckets_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return the probability buckets of the newest closed step."""
    newest = curves_of(viewing, run.id, ("k3_kl",), (TRAINER_ROLLOUT,)).get(TRAINER_ROLLOUT, {}).get("k3_kl")
    last = newest.last() if newest else None
    if last is None:
        return buckets.bucket_figure(None)
    return buckets_of_step("probability", viewing, run, last[0], None)


def buckets_of_step(by: str, viewing: Viewing, run: Run, step: int, attempt: int | None) -> Figure | Missing:
    """Return trainer/rollout at a step, by one of the conditions."""
    statistics = _statistics(viewing, run, step, attempt)
    if isinstance(statistics, str):
        return Missing(buckets.BY[by].title, statistics)
    table = statistics.condition_table(by)
    columns = buckets.BucketColumns(
        comparison=TRAINER_ROLLOUT,
        step=step,
        edges=table.edges.tolist(),
        tokens=table.tokens.tolist(),
        mean_abs_d=table.mean_abs_d.tolist(),
        max_abs_d=table.max_abs_d.tolist(),
        by=by,
    )
    return buckets.bucket_figure(columns)


def token_ids_of_step(viewing: Viewing, run: Run, step: int, attempt: int | None) -> Figure | Missing:
    """Return trainer/rollout at a step, by token id."""
    statistics = _statistics(viewing, run, step, attempt)
    if isinstance(statistics, str):
        return Missing(buckets.TOKEN_ID_TITLE, statistics)
    table = statistics.token_id_table(buckets.MOST_TOKEN_IDS)
    columns = buckets.TokenIdColumns(
        comparison=TRAINER_ROLLOUT,
        step=step,
        token_ids=table.token_ids.tolist(),
        tokens=table.tokens.tolist(),
        k3_sum=table.k3_sum.tolist(),
        k3_sum_missing=table.k3_sum_missing.tolist(),
    )
    return buckets.token_id_figure(columns)


def heat_map_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return the mean |d| of trainer/rollout by probability over steps, of at most MOST_STEPS steps."""
    query = CurveQuery(comparisons=(TRAINER_ROLLOUT,), measures=("k3_kl",))
    table = read_curves(viewing.session, viewing.context, viewing.principal, run.id, query).table
    every = sorted(zip(table.array("step").tolist(), table.array("attempt").tolist(), strict=True))
    # Equally far apart and the newest. Counted from the first, so that a new step leaves the others as they are.
    shown = every[:: max(1, -(-(len(every) - 1) // (MOST_STEPS - 1)))]
    shown += every[-1:] if shown[-1:] != every[-1:] else []
    keys = [StepKey(run.id, attempt, step) for step, attempt in shown]
    stored = statistics_of_steps(viewing.session, keys, TRAINER_ROLLOUT)
    found = [(key.step, _bucket_table(stored[key])) for key in keys if key in stored]
    if not found:
        return Missing(heat_map.TITLE, heat_map.MISSING)
    columns = heat_map.HeatMapColumns(
        comparison=TRAINER_ROLLOUT,
        steps=[step for step, _ in found],
        of_steps=len(every),
        edges=found[0][1].edges.tolist(),
        tokens=[of_step.tokens.tolist() for _, of_step in found],
        mean_abs_d=[of_step.mean_abs_d.tolist() for _, of_step in found],
    )
    return heat_map.heat_map_figure(columns)


@functools.lru_cache(maxsize=8 * MOST_STEPS)
def _bucket_table(statistics: bytes) -> BucketTable:
    """Return the buckets of stored statistics: a running run's page asks for the same steps at every refresh."""
    return ComparisonStatistics.from_bytes(statistics).buckets()


def tokens_of_step(viewing: Viewing, run: Run, step: int, attempt: int | None) -> Figure | Missing:
    """Return |d| against the probability of a sample of the step's tokens."""
    try:
        sample = sample_tokens(viewing.context, viewing.principal, run.id, step, attempt, TRAINER_ROLLOUT)
    except (MeasurementNotFound, TokensPurged, TokensGone) as error:
        return Missing(tokens.TITLE, f"{error.detail}.")
    points = tokens.TokenPoints(
        TRAINER_ROLLOUT, step, sample.log_behaviour.tolist(), sample.d.tolist(), _drawn_in_words(sample)
    )
    return tokens.token_figure(points)


def _drawn_in_words(sample: TokenSample) -> str:
    stored = "" if sample.coverage.rests_on == "all tokens" else f" Stored in full are only {sample.coverage.text}."
    if not sample.is_all_read:
        groups = f"{sample.groups_read} row groups of the token files, also chosen at random"
        return f"{sample.d.size:,} tokens drawn at random from the {sample.drawn_from:,} of {groups}.{stored}"
    if sample.d.size == sample.drawn_from:
        return f"All {sample.drawn_from:,} tokens.{stored}"
    return f"{sample.d.size:,} tokens drawn at random from {sample.drawn_from:,}.{stored}"


def _statistics(viewing: Viewing, run: Run, step: int, attempt: int | None) -> ComparisonStatistics | str:
    """Return the statistics of trainer/rollout at a step, or the reason why there are none."""
    try:
        return read_statistics(viewing.session, viewing.principal, run.id, step, attempt, TRAINER_ROLLOUT)
    except (MeasurementNotFound, StatisticsOutOfDate) as error:
        return f"{error.detail}."
