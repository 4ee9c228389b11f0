"""The page of a rollout, and the figures of single tokens."""

import functools
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from foreshock import json_values, scorers
from foreshock.comparisons import TRAINER_ROLLOUT, split_comparison
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.statistics.conditions import BucketTable
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.problem import TokensGone, TokensPurged
from foreshock_service.present.pages.figures import Figure, Missing, attribution, buckets
from foreshock_service.present.pages.presenters.viewing import NOTHING, Viewing, curves_of
from foreshock_service.present.pages.rendering import count, number
from foreshock_service.present.pages.tokenizers import announced_names, texts_of
from foreshock_service.runs import attempts, chosen_tokens, curves, events, measurements, runs, tokens

MOST_STEPS = 48
"""Most columns of the heat map; each is read from the statistics of one step."""


def buckets_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return the probability buckets of the newest closed step."""
    k3 = curves_of(viewing, run.id, ("k3_kl",), (TRAINER_ROLLOUT,)).get(TRAINER_ROLLOUT, {}).get("k3_kl", NOTHING)
    if not k3:
        return Missing(buckets.TITLE, buckets.MISSING)
    return buckets_of_step("probability", viewing, run, k3.points()[-1][0])


def buckets_of_step(by: str, viewing: Viewing, run: Run, step: int) -> Figure | Missing:
    """Return trainer/rollout at a step, by one of the conditions."""
    statistics = _statistics(viewing, run, step)
    if isinstance(statistics, str):
        return Missing(buckets.BY[by].title, statistics)
    return buckets.bucket_figure(TRAINER_ROLLOUT, step, buckets.BY[by], statistics.condition_table(by))


def token_ids_of_step(viewing: Viewing, run: Run, step: int) -> Figure | Missing:
    """Return trainer/rollout at a step, by token id."""
    statistics = _statistics(viewing, run, step)
    if isinstance(statistics, str):
        return Missing(buckets.TOKEN_ID_TITLE, statistics)
    return buckets.token_id_figure(TRAINER_ROLLOUT, step, statistics.token_id_table(buckets.MOST_TOKEN_IDS))


def heat_map_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    """Return the mean |d| of trainer/rollout by probability over steps, of at most MOST_STEPS steps."""
    query = curves.CurveQuery(comparisons=(TRAINER_ROLLOUT,), measures=("k3_kl",))
    table = curves.read_curves(viewing.session, viewing.context, viewing.principal, run.id, query).table
    every = sorted(zip(table.array("step").tolist(), table.array("attempt").tolist(), strict=True))
    # Equally spaced steps and the newest one. Counted from the first, so that a new step does not move the others.
    shown = every[:: max(1, -(-(len(every) - 1) // (MOST_STEPS - 1)))]
    shown += every[-1:] if shown[-1:] != every[-1:] else []
    keys = [events.StepKey(run.id, attempt, step) for step, attempt in shown]
    stored = measurements.blobs_of_steps(viewing.session, keys, TRAINER_ROLLOUT, "statistics")
    found = [(key.step, _bucket_table(stored[key])) for key in keys if key in stored]
    return buckets.heat_map_figure(TRAINER_ROLLOUT, found, len(every))


@functools.lru_cache(maxsize=8 * MOST_STEPS)
def _bucket_table(statistics: bytes) -> BucketTable:
    """Return the buckets of stored statistics. Cached: the page of a live run reads the same steps at every refresh."""
    return ComparisonStatistics.from_bytes(statistics).buckets()


def tokens_of_step(viewing: Viewing, run: Run, step: int) -> Figure | Missing:
    """Return |d| against the probability of a sample of the step's tokens."""
    try:
        sample = chosen_tokens.sample_tokens(viewing.context, viewing.principal, run.id, step, None, TRAINER_ROLLOUT)
    except (measurements.MeasurementNotFound, TokensPurged, TokensGone) as error:
        return Missing(attribution.TOKENS_TITLE, f"{error.detail}.")
    drawn = _drawn_in_words(sample)
    return attribution.token_figure(TRAINER_ROLLOUT, step, sample.log_behaviour.tolist(), sample.d.tolist(), drawn)


def _drawn_in_words(sample: chosen_tokens.TokenSample) -> str:
    stored = "" if sample.coverage.rests_on == "all tokens" else f" Stored in full are only {sample.coverage.text}."
    if not sample.is_all_read:
        groups = f"{sample.groups_read} row groups of the token files, also chosen at random"
        return f"{sample.d.size:,} tokens drawn at random from the {sample.drawn_from:,} of {groups}.{stored}"
    if sample.d.size == sample.drawn_from:
        return f"All {sample.drawn_from:,} tokens.{stored}"
    return f"{sample.d.size:,} tokens drawn at random from {sample.drawn_from:,}.{stored}"


def _statistics(viewing: Viewing, run: Run, step: int) -> ComparisonStatistics | str:
    """Return the statistics of trainer/rollout at a step, or the reason why there are none."""
    try:
        return measurements.read_statistics(viewing.session, viewing.principal, run.id, step, None, TRAINER_ROLLOUT)
    except (measurements.MeasurementNotFound, measurements.StatisticsOutOfDate) as error:
        return f"{error.detail}."


def rollout_address(run_address: str, step: int, sample_id: str) -> str:
    """Return the path of a rollout's page."""
    return f"{run_address}/steps/{step}/rollouts/{quote(sample_id, safe='')}"


def rollout_page(viewing: Viewing, run_id: str, step: int, sample_id: str) -> dict[str, Any]:
    """Return the page of a rollout as shown without scripts. Raises RunNotFound, RolloutNotFound, TokensPurged.

    `scored`: each scorer's log-prob and probability of the token with the largest |d|.
    """
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    found = tokens.read_whole_rollout(viewing.context, viewing.principal, run_id, step, sample_id)
    comparison = shown_comparison(found)
    worst = None if comparison is None else _largest(difference(found, comparison), found.batch.generated)
    texts = _texts(viewing, found, run)
    no_texts = "Token ids: no tokenizer of this run is configured (FORESHOCK_TOKENIZERS_FOLDER)."
    return {
        "run": run,
        "step": step,
        "sample_id": sample_id,
        "facts": _facts(found),
        "headline": _headline(found, comparison, worst, texts),
        "scored": [] if worst is None else _scored(found, worst),
        "note": no_texts if texts is None else "",
    }


def rollout_columns(viewing: Viewing, run_id: str, step: int, sample_id: str) -> dict[str, Any]:
    """Return the rollout as columns for the viewer; non-finite log-probs are null."""
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    found = tokens.read_whole_rollout(viewing.context, viewing.principal, run_id, step, sample_id)
    batch = found.batch
    texts = _texts(viewing, found, run)
    comparisons = [name for name in scorers.main_comparisons() if _has(found, name)]
    columns = {
        "ids": batch.response_token_ids.tolist(),
        "prompt": batch.prompt_token_ids.tolist(),
        "texts": {str(token_id): text for token_id, text in (texts or {}).items()},
        "scores": {name: _rounded(values) for name, values in found.scores.items()},
        "comparisons": comparisons,
        "comparison": shown_comparison(found),
        "generated": None if batch.response_mask is None else batch.generated.astype(int).tolist(),
        "turn": None if batch.turn is None else batch.turn.tolist(),
        "entropy": None if batch.entropy is None else _rounded(batch.entropy),
        "weights_version": None if batch.weights_version is None else batch.weights_version.tolist(),
    }
    checked: dict[str, Any] = json_values.json_value(columns)
    return checked


def shown_comparison(found: tokens.WholeRollout) -> str | None:
    """Return the comparison whose d colours the tokens: the whole, else the first that the rollout has."""
    return next((name for name in (TRAINER_ROLLOUT, *scorers.main_comparisons()) if _has(found, name)), None)


def difference(found: tokens.WholeRollout, comparison: str) -> NDArray[np.float64]:
    """Return d of a comparison, [T]."""
    target, behaviour = (found.scores[name].astype(np.float64) for name in split_comparison(comparison))
    with np.errstate(invalid="ignore"):
        return np.asarray(target - behaviour)


def _has(found: tokens.WholeRollout, comparison: str) -> bool:
    return all(name in found.scores for name in split_comparison(comparison))


def _rounded(values: NDArray[np.float32]) -> list[float]:
    """Return float32 values with the fewest digits that reproduce them."""
    return [float(np.format_float_positional(value, unique=True)) for value in values]


def _largest(d: NDArray[np.float64], generated: NDArray[np.bool_]) -> int | None:
    sizes = np.where(np.isfinite(d) & generated, np.abs(d), -1.0)
    return int(sizes.argmax()) if sizes.size and sizes.max() >= 0.0 else None


def token_texts(viewing: Viewing, run: Run, attempt: int, token_ids: Sequence[int]) -> dict[int, str] | None:
    """Return the text of each token id from the tokenizer that the run announces; None if it is not configured."""
    fingerprints = attempts.fingerprints_of_attempts(viewing.session, run.id, [attempt]).values()
    return texts_of(viewing.context.settings.tokenizers_folder, announced_names(fingerprints, run.model), token_ids)


def _texts(viewing: Viewing, found: tokens.WholeRollout, run: Run) -> dict[int, str] | None:
    ids = [*found.batch.response_token_ids.tolist(), *found.batch.prompt_token_ids.tolist()]
    return token_texts(viewing, run, found.attempt, ids)


def _facts(found: tokens.WholeRollout) -> list[tuple[str, str]]:
    batch = found.batch
    facts = [
        ("Response", f"{count(batch.num_tokens)} tokens"),
        ("Prompt", f"{count(batch.prompt_token_ids.size)} tokens"),
    ]
    if batch.reward is not None:
        facts.append(("Reward", number(float(batch.reward[0]))))
    if batch.advantage is not None:
        facts.append(("Advantage", number(float(batch.advantage.mean()))))
    if batch.turn is not None:
        facts.append(("Turns", count(np.unique(batch.turn).size)))
    for name, values in (("Finish reason", batch.finish_reasons), ("Prompt group", batch.group_ids)):
        if values is not None and values[0] is not None:
            facts.append((name, str(values[0])))
    return facts


def _headline(
    found: tokens.WholeRollout, comparison: str | None, worst: int | None, texts: dict[int, str] | None
) -> str:
    if comparison is None:
        return "This rollout has log-probs of fewer than two scorers, so no token can be compared."
    if worst is None:
        return f"No token of this rollout has two finite log-probs of {comparison}."
    d = float(difference(found, comparison)[worst])
    token_id = int(found.batch.response_token_ids[worst])
    name = f"token id {token_id}"
    if texts is not None:
        name = f"“{texts[token_id].strip() or repr(texts[token_id])}” (id {token_id})"
    return f"The largest |d| of {comparison} is at position {worst}, {name}: d = {number(d)}."


def _scored(found: tokens.WholeRollout, position: int) -> list[tuple[str, float, float | None]]:
    values = {name: float(scores[position]) for name, scores in found.scores.items()}
    return [(name, value, math.exp(value) if math.isfinite(value) else None) for name, value in values.items()]
