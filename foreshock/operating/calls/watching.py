"""The calls that answer warnings: alerts, decisions on the learning rate, rules."""

from __future__ import annotations

from functools import partial
from typing import Literal

from foreshock.operating.request import json_change
from foreshock.reading.parsing import parse
from foreshock.reading.request import Request, run_path
from foreshock.reading.rule_records import RulesVersionRecord
from foreshock.reading.watch_records import AdviceRecord, AlertRecord, advice_record

__all__ = ["DecisionKind", "acknowledge_alert", "decide", "resolve_alert", "set_rules"]

DecisionKind = Literal["hold", "release", "raise", "halve"]


def acknowledge_alert(run: str, alert: str) -> Request[AlertRecord]:
    """Mark an alert as seen by a person. Raises Rejected (409) if it is resolved or retracted."""
    return json_change("POST", run_path(run, "alerts", alert, "acknowledge"), partial(parse, AlertRecord))


def resolve_alert(run: str, alert: str) -> Request[AlertRecord]:
    """Resolve an alert; its rule may fire again later, as a new alert. Raises Rejected (409) if it was retracted."""
    return json_change("POST", run_path(run, "alerts", alert, "resolve"), partial(parse, AlertRecord))


def decide(run: str, kind: DecisionKind, reason: str) -> Request[AdviceRecord]:
    """Hold, release, raise or halve the learning rate as an operator, and return the advice that follows.

    `reason` is kept in the log of decisions. Raises Rejected (409) if the decision changes nothing, or the run has
    ended. It is sent again only if the service has not received it: two halvings are a quarter. The key needs `admin`.
    """
    path, body = run_path(run, "lr-advice", "decisions"), {"kind": kind, "reason": reason}
    return json_change("POST", path, advice_record, body, is_repeatable=False)


def set_rules(run: str, toml: str) -> Request[RulesVersionRecord]:
    """Change a run's rules from the step that the file names; its alerts are derived again. The key needs `admin`.

    `toml` is the text of a file of rules; one without rules brings the defaults back. Raises Rejected (422) if it is
    invalid. Each call is a version: it is sent again only if the service has not received it.
    """
    read = partial(parse, RulesVersionRecord)
    return json_change("PUT", run_path(run, "rules"), read, {"toml": toml}, is_repeatable=False)
