"""A short part of `make bench-faults`: kills of the service and of a trainer's client, verified as there."""

from __future__ import annotations

import pytest

from benchmarks.faults.client_kills import run_client_kills
from benchmarks.faults.kill_points import KILL_POINTS, found
from benchmarks.faults.kills import Campaign
from benchmarks.faults.outages import NEEDS, kill_what_is_needed
from benchmarks.faults.removals import kill_removals
from benchmarks.faults.verify import Totals


@pytest.mark.slow
def test_killed_service_keeps_what_it_acknowledged_and_measures_it_as_one_that_was_not_killed() -> None:
    totals = Totals()
    Campaign("sqlite", "", totals, most=4, seed=3, kills_a_run=4, phases=1).run()
    counts = totals.findings.counts
    assert totals.findings.problems == []
    assert (totals.done, counts["missing_files"]) == (4, 0)
    assert counts["acknowledged_shards"] > 5
    assert counts["detector_states"] > 0
    assert counts["compared_rows_of_measurements"] > 0
    assert counts["files_checked"] >= counts["acknowledged_shards"]


@pytest.mark.slow
def test_killed_trainer_delivers_what_was_in_its_spool_once() -> None:
    totals = Totals()
    run_client_kills(totals, most=3, seed=2)
    assert totals.findings.problems == []
    assert totals.findings.counts["spooled_items"] > 0


@pytest.mark.slow
def test_removals_that_are_killed_are_done_and_remove_nothing_else() -> None:
    totals = Totals()
    kill_removals(totals, database_url="", most=3, seed=4)
    assert totals.findings.problems == []
    assert (totals.done, totals.findings.counts["acknowledged_removals"]) == (3, 1)
    assert totals.findings.counts["measurements_compared"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_what_the_service_needs_is_killed_and_nothing_is_lost(name: str) -> None:
    totals = Totals()
    kill_what_is_needed(name, totals, most=2, seed=5, phases=1)
    assert totals.findings.problems == []
    assert totals.done == 2
    assert totals.findings.counts["acknowledged_shards"] > 0


@pytest.mark.parametrize("name", KILL_POINTS)
def test_function_of_each_point_exists(name: str) -> None:
    owner, attribute = found(KILL_POINTS[name])
    assert callable(getattr(owner, attribute))
