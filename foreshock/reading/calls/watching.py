"""The calls that read what watches a run: alerts, the advice on the learning rate, the rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from foreshock.model_kind import ModelKind
from foreshock.reading.parsing import parse
from foreshock.reading.request import ITEMS_ON_A_PAGE, Listing, Query, Request, json_request, run_path, several
from foreshock.reading.rule_records import RulesRecord, RunRulesRecord
from foreshock.reading.watch_records import AdviceRecord, AlertRecord, DecisionRecord, advice_record

__all__ = ["advice", "alerts", "alerts_of_runs", "changed_alerts", "decisions", "default_rules", "rules"]


def alerts(run: str, *, states: Sequence[str] = ()) -> Listing[AlertRecord]:
    """Yield the alerts of a run, newest step first; no states: in any."""
    return Listing(run_path(run, "alerts"), several("state", states), partial(parse, AlertRecord))


def changed_alerts(
    run: str, *, states: Sequence[str] = (), wait_seconds: float = 20.0
) -> Request[tuple[AlertRecord, ...]]:
    """Return the newest 500 alerts of a run once one has changed since this reader's call before, or after the time.

    The first call does not wait. `wait_seconds` is at most 30.
    """
    query: Query = [*several("state", states), ("limit", ITEMS_ON_A_PAGE)]
    return json_request(
        run_path(run, "alerts"),
        query,
        lambda page: tuple(parse(AlertRecord, item) for item in page["items"]),
        wait_seconds=wait_seconds,
    )


def alerts_of_runs(
    *, states: Sequence[str] = (), severities: Sequence[str] = (), rules: Sequence[str] = ()
) -> Listing[AlertRecord]:
    """Yield the alerts of all runs that the key may see, the last changed first."""
    query = [*several("state", states), *several("severity", severities), *several("rule", rules)]
    return Listing("/v1/alerts", query, partial(parse, AlertRecord))


def advice(run: str, *, step: int | None = None, wait_seconds: float = 0.0) -> Request[AdviceRecord]:
    """Return the learning-rate advice for a step (None: the newest). Trainers use `AdviceFeed`, which never waits.

    With `wait_seconds`, at most 30, it is returned once a decision or an alert has changed it since this reader's call
    before with the same step, or after that time.
    """
    return json_request(run_path(run, "lr-advice"), [("step", step)], advice_record, wait_seconds=wait_seconds)


def decisions(run: str) -> Listing[DecisionRecord]:
    """Yield the log of decisions on the learning rate, oldest first."""
    return Listing(run_path(run, "lr-advice", "decisions"), [], partial(parse, DecisionRecord))


def rules(run: str, *, step: int | None = None) -> Request[RunRulesRecord]:
    """Return the rules that hold for a run at a step (None: the last one), and all versions of its changes."""
    return json_request(run_path(run, "rules"), [("step", step)], partial(parse, RunRulesRecord))


def default_rules(*, model_kind: ModelKind | None = None) -> Request[RulesRecord]:
    """Return the default rules of a kind of model (None: unknown), each with the source of its threshold."""
    return json_request("/v1/rules", [("model_kind", model_kind)], partial(parse, RulesRecord), in_project=False)
