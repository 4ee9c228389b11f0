"""The reading calls about one step: its tokens, lint, corrections and theory, and what replays of it found."""

from collections.abc import Sequence
from typing import Any, Literal

from foreshock.api.attribution import AttributionRecord
from foreshock.api.doctor import DoctorStepRecord
from foreshock.api.replays import ExactStepRecord, ExactTokensRecord, MatrixRecord
from foreshock.api.steps import CorrectionsRecord, LintRecord, TheoryRecord
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.update_noise import UpdateToNoise
from foreshock.layer_divergence import LayerComparison
from foreshock.reading import columns
from foreshock.reading.columns import Buckets, TokenIds, Tokens
from foreshock.reading.request import Query, Request, get, several, step_path
from foreshock.routing import RoutingComparison

__all__ = [
    "attribution",
    "buckets",
    "corrections",
    "doctor",
    "exact",
    "exact_tokens",
    "export_rollouts",
    "layers",
    "lint",
    "matrix",
    "rollout_tokens",
    "routing",
    "theory",
    "token_ids",
    "update",
    "worst_tokens",
]

Condition = Literal["probability", "position", "turn", "length", "entropy", "lag"]


def buckets(
    run: str,
    step: int,
    *,
    by: Condition = "probability",
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[Buckets]:
    """Return the mismatch of a step in buckets of a condition of its tokens."""
    query: Query = [("by", by), ("comparison", comparison), ("attempt", attempt)]
    return get(columns.buckets, step_path(run, step, "buckets"), query)


def token_ids(
    run: str,
    step: int,
    *,
    limit: int | None = None,
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[TokenIds]:
    """Return the mismatch of a step by token id; `limit` is the largest number of ids."""
    query: Query = [("by", "token_id"), ("limit", limit), ("comparison", comparison), ("attempt", attempt)]
    return get(columns.token_ids, step_path(run, step, "buckets"), query)


def worst_tokens(
    run: str, step: int, *, count: int = 20, comparison: str = TRAINER_ROLLOUT, attempt: int | None = None
) -> Request[Tokens]:
    """Return the tokens of a step with the largest |d|, at most 1,000."""
    query: Query = [("worst", count), ("comparison", comparison), ("attempt", attempt)]
    return get(columns.tokens, step_path(run, step, "tokens"), query)


def rollout_tokens(
    run: str,
    step: int,
    sample_id: str,
    *,
    from_position: int = 0,
    to_position: int | None = None,
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[Tokens]:
    """Return one rollout token by token, from one position of the response to another (included)."""
    part = [("from_position", from_position), ("to_position", to_position)]
    query: Query = [("sample_id", sample_id), *part, ("comparison", comparison), ("attempt", attempt)]
    return get(columns.tokens, step_path(run, step, "tokens"), query)


def export_rollouts(run: str, step: int, *, attempt: int | None = None) -> Request[bytes]:
    """Return the bytes of a Parquet file with every stored rollout of a step, a row each, in the rollout table."""
    return Request(step_path(run, step, "rollouts"), [("attempt", attempt)], bytes, accept="*/*")


def exact_tokens(
    run: str,
    step: int,
    *,
    pair: str | None = None,
    count: int = 20,
    sample_id: str | None = None,
    from_position: int = 0,
    to_position: int | None = None,
    attempt: int | None = None,
) -> Request[ExactTokensRecord]:
    """Return the tokens with the largest KL(μ‖π), at most 1,000, or those of the rollout `sample_id`.

    Of a rollout, from one position of the response to another (included). `pair` is one that `exact` returned; None:
    the service's default.
    """
    part = [("from_position", from_position), ("to_position", to_position)]
    query: Query = [("pair", pair), ("worst", count), ("sample_id", sample_id), *part, ("attempt", attempt)]
    return get(ExactTokensRecord, step_path(run, step, "exact", "tokens"), query)


def lint(run: str, step: int, *, attempt: int | None = None) -> Request[LintRecord]:
    """Return the lint of a step's log-probs: named warnings with evidence, and the checks that were made."""
    return get(LintRecord, step_path(run, step, "lint"), [("attempt", attempt)])


def corrections(
    run: str,
    step: int,
    *,
    names: Sequence[str] = (),
    thresholds: Sequence[str] = (),
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[CorrectionsRecord]:
    """Return the effect of corrections on a step: kept tokens, variance, distortion. No names: all of them.

    `thresholds`, such as "2" or "0.5_5", are of the one correction that is named; none: the usual ones.
    """
    chosen = [*several("correction", names), *several("threshold", thresholds)]
    query: Query = [*chosen, ("comparison", comparison), ("attempt", attempt)]
    return get(CorrectionsRecord, step_path(run, step, "corrections"), query)


def theory(
    run: str,
    step: int,
    *,
    delta_max: float | None = None,
    gradient_bound: float | None = None,
    comparison: str = TRAINER_ROLLOUT,
    attempt: int | None = None,
) -> Request[TheoryRecord]:
    """Return bounds on the bias of a step's gradient, and the cost of its noise at η and η/2.

    `delta_max` is the largest exact total variation, `gradient_bound` an upper bound of ‖∇log π‖ of one token.
    """
    bounds: Query = [("delta_max", delta_max), ("gradient_bound", gradient_bound)]
    return get(
        TheoryRecord, step_path(run, step, "theory"), [*bounds, ("comparison", comparison), ("attempt", attempt)]
    )


def attribution(run: str, step: int, *, attempt: int | None = None) -> Request[AttributionRecord]:
    """Return the causes of a step's mismatch. Raises Rejected (404) if no scores of the step are published."""
    return get(AttributionRecord, step_path(run, step, "attribution"), [("attempt", attempt)])


def exact(run: str, step: int, *, attempt: int | None = None) -> Request[ExactStepRecord]:
    """Return the exact divergences of a step's pairs. Raises Rejected (404) if none are published."""
    return get(ExactStepRecord, step_path(run, step, "exact"), [("attempt", attempt)])


def routing(run: str, step: int, *, attempt: int | None = None) -> Request[tuple[RoutingComparison, ...]]:
    """Return the newest comparisons of routed experts of a step. Raises Rejected (404) if none are published."""
    path = step_path(run, step, "routing")
    return get(lambda value: tuple(map(RoutingComparison.from_dict, value["items"])), path, [("attempt", attempt)])


def layers(
    run: str, step: int, *, attempt: int | None = None, pair: str | None = None
) -> Request[tuple[LayerComparison, ...]]:
    """Return the newest comparison by layer of each pair of scorers of a step, or of one `compared/reference`.

    Raises Rejected (404) if none are published.
    """

    def read(value: Any) -> tuple[LayerComparison, ...]:
        return tuple(LayerComparison.from_dict({**item, "step": value["step"]}) for item in value["items"])

    return get(read, step_path(run, step, "layers"), [("attempt", attempt), ("pair", pair)])


def update(run: str, step: int, *, attempt: int | None = None) -> Request[UpdateToNoise]:
    """Return the newest measurement of a step's update. Raises Rejected (404) if none is done."""
    return get(UpdateToNoise, step_path(run, step, "update"), [("attempt", attempt)])


def doctor(run: str, step: int, *, attempt: int | None = None) -> Request[DoctorStepRecord]:
    """Return the newest report of the doctor on a step. Raises Rejected (404) if it was not examined."""
    return get(DoctorStepRecord, step_path(run, step, "doctor"), [("attempt", attempt)])


def matrix(run: str, step: int, *, attempt: int | None = None) -> Request[MatrixRecord]:
    """Return hardware × configuration of a step, and what is recommended. Raises Rejected (404) if none is asked for.

    Its cells are probes of the kind "matrix".
    """
    return get(MatrixRecord, step_path(run, step, "matrix"), [("attempt", attempt)])
