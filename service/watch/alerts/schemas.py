"""Schemas of alerts."""

from __future__ import annotations

from typing import NamedTuple

from foreshock.api.watch import AlertState
from foreshock.severity import Severity


class AlertFilter(NamedTuple):
    """Which alerts of all runs; empty: no restriction. A run's project must equal all of `projects`."""

    projects: tuple[str, ...] = ()
    states: tuple[AlertState, ...] = ()
    severities: tuple[Severity, ...] = ()
    rules: tuple[str, ...] = ()
