"""Names of measures and comparisons in queries: an unknown one is an error with a suggestion."""

from __future__ import annotations

from collections.abc import Sequence

from foreshock.comparisons import comparison_name
from foreshock.measures.registry import MEASURES, measure_named
from foreshock.scorers import SCORERS, VARIANTS, score_name
from foreshock.suggestions import did_you_mean
from foreshock_service.platform.problem import ProblemError


class UnknownMeasure(ProblemError):
    """Unknown measure: the name is not registered."""

    status = 422
    problem_type = "unknown-measure"


class UnknownComparison(ProblemError):
    """Unknown comparison: not `target/behaviour` of two scorers."""

    status = 422
    problem_type = "unknown-comparison"


def columns_of(names: Sequence[str]) -> Sequence[str]:
    """Return the columns of these measures, of all for no name. Raises UnknownMeasure naming each unknown one."""
    known = {measure.column: None for measure in MEASURES}
    if not names:
        return list(known)
    columns: dict[str, None] = {}
    unknown = []
    for name in names:
        try:
            columns[measure_named(name).column] = None
        except KeyError:
            unknown.append(name)
    if unknown:
        known |= {measure.name: None for measure in MEASURES}
        each = "; ".join(f"unknown measure {name!r}{did_you_mean(name, known)}" for name in unknown)
        raise UnknownMeasure(f"query.measure: {each} (names: GET /v1/measures)")
    return list(columns)


def check_comparison(name: str) -> None:
    """Raise UnknownComparison unless the name is `target/behaviour` of two different scores."""
    scores = [score_name(scorer, variant) for scorer in SCORERS for variant in VARIANTS]
    target, _, behaviour = name.partition("/")
    if target not in scores or behaviour not in scores or target == behaviour:
        known = [comparison_name(first, second) for first in scores for second in scores if first != second]
        scorers = ", ".join(SCORERS)
        raise UnknownComparison(
            f"query.comparison: unknown comparison {name!r}{did_you_mean(name, known)} (target/behaviour of {scorers})"
        )
