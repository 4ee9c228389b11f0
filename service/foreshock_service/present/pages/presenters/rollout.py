"""The page of a rollout, and the figures of single tokens."""

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from foreshock import scorers
from foreshock.comparisons import TRAINER_ROLLOUT, split_comparison
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.problem import TokensGone, TokensPurged
from foreshock_service.present.pages import tokenizers
from foreshock_service.present.pages.figures import Figure, Missing, attribution, buckets
from foreshock_service.present.pages.presenters.viewing import NOTHING, Viewing, curves_of
from foreshock_service.present.pages.rendering import count, number
from foreshock_service.replay.results.vocabulary import vocabulary_of_run
from foreshock_service.runs import attempts, chosen_tokens, measurements, runs, tokens


def buckets_of_run(viewing: Viewing, run: Run) -> Figure | Missing:
    k3 = curves_of(viewing, run.id, ("k3_kl",), (TRAINER_ROLLOUT,)).get(TRAINER_ROLLOUT, {}).get("k3_kl", NOTHING)
    if not k3:
        return Missing(buckets.TITLE, buckets.MISSING)
    return buckets_of_step("probability", viewing, run, k3.points()[-1][0])


def buckets_of_step(by: str, viewing: Viewing, run: Run, step: int) -> Figure | Missing:
    statistics = statistics_of_step(viewing, run, step)
    if isinstance(statistics, str):
        return Missing(buckets.BY[by].title, statistics)
    return buckets.bucket_figure(TRAINER_ROLLOUT, step, buckets.BY[by], statistics.condition_table(by))


def token_ids_of_step(viewing: Viewing, run: Run, step: int) -> Figure | Missing:
    statistics = statistics_of_step(viewing, run, step)
    if isinstance(statistics, str):
        return Missing(buckets.TOKEN_ID_TITLE, statistics)
    return buckets.token_id_figure(TRAINER_ROLLOUT, step, statistics.token_id_table(buckets.MOST_TOKEN_IDS))


def tokens_of_step(viewing: Viewing, run: Run, step: int) -> Figure | Missing:
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


def statistics_of_step(viewing: Viewing, run: Run, step: int) -> ComparisonStatistics | str:
    """Return the statistics of trainer/rollout at a step, or the reason why there are none."""
    try:
        key = attempts.resolve_step(viewing.session, run.id, step, None)
        return measurements.read_statistics(viewing.session, key, TRAINER_ROLLOUT)
    except (measurements.MeasurementNotFound, measurements.StatisticsOutOfDate) as error:
        return f"{error.detail}."


def rollout_address(run_address: str, step: int, sample_id: str) -> str:
    return f"{run_address}/steps/{step}/rollouts/{quote(sample_id, safe='')}"


def rollout_page(viewing: Viewing, run_id: str, step: int, sample_id: str) -> dict[str, Any]:
    """Return the page of a rollout as shown without scripts. Raises RunNotFound, RolloutNotFound, TokensPurged.

    `scored`: each scorer's log-prob and probability of the token with the largest |d|.
    """
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    found = tokens.read_whole_rollout(viewing.context, viewing.principal, run_id, step, sample_id)
    comparison = shown_comparison(found)
    texts = _texts(viewing, found, run)
    worst, headline = None, "This rollout has log-probs of fewer than two scorers, so no token can be compared."
    if comparison is not None:
        headline = f"No token of this rollout has two finite log-probs of {comparison}."
        target, behaviour = (found.scores[name].astype(np.float64) for name in split_comparison(comparison))
        with np.errstate(invalid="ignore"):
            d = target - behaviour
        sizes = np.where(np.isfinite(d) & found.batch.generated, np.abs(d), -1.0)
        if sizes.size and sizes.max() >= 0.0:
            worst = int(sizes.argmax())
            token_id = int(found.batch.response_token_ids[worst])
            name = f"token id {token_id}"
            if texts is not None:
                name = f"“{texts[token_id].strip() or repr(texts[token_id])}” (id {token_id})"
            headline = f"The largest |d| of {comparison} is at position {worst}, {name}: d = {number(float(d[worst]))}."
    scores = {} if worst is None else {name: float(values[worst]) for name, values in found.scores.items()}
    return {
        "run": run,
        "step": step,
        "sample_id": sample_id,
        "facts": _facts(found),
        "headline": headline,
        "scored": [(name, each, math.exp(each) if math.isfinite(each) else None) for name, each in scores.items()],
        "note": _note(texts),
    }


def rollout_columns(viewing: Viewing, run_id: str, step: int, sample_id: str) -> dict[str, Any]:
    """Return the rollout as columns for the viewer, arrays of numpy; non-finite log-probs become null."""
    run = runs.get_run(viewing.session, viewing.principal, run_id)
    found = tokens.read_whole_rollout(viewing.context, viewing.principal, run_id, step, sample_id)
    batch = found.batch
    texts = _texts(viewing, found, run)
    comparisons = [name for name in scorers.main_comparisons() if _has(found, name)]
    return {
        "ids": batch.response_token_ids,
        "prompt": batch.prompt_token_ids,
        "texts": texts or {},
        "scores": found.scores,
        "comparisons": comparisons,
        "comparison": shown_comparison(found),
        "generated": None if batch.response_mask is None else batch.generated.astype(np.uint8),
        "turn": batch.turn,
        "entropy": batch.entropy,
        "weights_version": batch.weights_version,
    }


def shown_comparison(found: tokens.WholeRollout) -> str | None:
    """Return the comparison whose d colours the tokens: the whole, else the first that the rollout has."""
    return next((name for name in (TRAINER_ROLLOUT, *scorers.main_comparisons()) if _has(found, name)), None)


def _has(found: tokens.WholeRollout, comparison: str) -> bool:
    return all(name in found.scores for name in split_comparison(comparison))


def token_texts(viewing: Viewing, run: Run, attempt: int, token_ids: Sequence[int]) -> dict[int, str] | None:
    """Return the text of each token id by the tokenizer beside the run's weights, else by one that it announces.

    None if no worker has seen the weights and no tokenizer of these names is configured.
    """
    found = vocabulary_of_run(viewing.session, run)
    if found is None:
        fingerprints = attempts.fingerprints_of_attempts(viewing.session, run.id, [attempt]).values()
        root = viewing.context.settings.tokenizers_folder
        found = tokenizers.announced_vocabulary(root, fingerprints, run.model)
    return None if found is None else tokenizers.texts_of(found, token_ids)


def _note(texts: dict[int, str] | None) -> str:
    """Return why the page shows token ids, or what speaks against its texts; empty: nothing does."""
    if texts is None:
        return (
            "Token ids: no tokenizer is known yet. The first replay with the run's weights brings it, or name a folder "
            "with tokenizers: FORESHOCK_TOKENIZERS_FOLDER."
        )
    unknown = sum(text == f"‹{token_id}›" for token_id, text in texts.items())
    ids = "token id is" if unknown == 1 else "token ids are"
    return f"{unknown} {ids} beyond the tokenizer: it may be another model's." if unknown else ""


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
