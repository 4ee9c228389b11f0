"""One run with stored state that cannot be read: every loop over runs does the others, and its page says why."""

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import TextClause, text

from foreshock_service.maintenance.remeasure import remeasure_step
from foreshock_service.maintenance.retention import purge_all
from foreshock_service.platform.context import ServiceContext
from foreshock_service.replay.attribution.service import compute_stale_attributions
from foreshock_service.replay.leases import sweep
from foreshock_service.replay.probes.policies import make_automatic_probes
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.failing_runs import RunIsolated, alert_of_unreadable_runs
from foreshock_service.watch.advance import Advancing, mark_waiting_runs
from tests.service.advancing import advance_all
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe, work_off

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

OF_JOBS = "WHERE probe_id IN (SELECT id FROM probes WHERE run_id {runs})"


class Loop(NamedTuple):
    """A loop over runs: what makes it due, what damages the bad run, the loop, and a query that is 0 for a run that it
    has done. `{runs}` stands for a condition on runs."""

    due: str
    damage: str
    run: Callable[[ServiceContext, httpx.Client], object]
    left: str


def ask_for_two(_: ServiceContext, http: httpx.Client) -> None:
    assert ask_for_lease(http).status_code == 200
    assert ask_for_lease(http).status_code == 204


def purge_all_but_one(context: ServiceContext, _: httpx.Client) -> None:
    purge_all(replace(context, settings=context.settings.model_copy(update={"retention_last_steps": 1})))


def measure_again(context: ServiceContext, _: httpx.Client) -> None:
    with context.database.read() as session:
        keys = [
            StepKey(*row) for row in session.execute(text("SELECT run_id, attempt, step FROM steps ORDER BY run_id"))
        ]
    for key in keys:
        remeasure_step(context, key)


def scrape(_: ServiceContext, http: httpx.Client) -> None:
    metrics = http.get("/metrics")
    assert metrics.status_code == 200
    of_k3 = [line for line in metrics.text.splitlines() if line.startswith("foreshock_k3_kl_nats{")]
    assert len({line.partition('run="')[2].partition('"')[0] for line in of_k3}) == 1
    assert metrics.text.count("foreshock_run_info{") == 2


LOOPS = {
    "detection": Loop(
        "INSERT INTO due_marks SELECT 'mark of ' || id, id, 0, NULL, -1 FROM runs",
        "UPDATE runs SET scalar_names = '[1]' WHERE id {runs}",
        lambda context, _: advance_all(Advancing(context)),
        "SELECT count(*) FROM due_marks WHERE run_id {runs}",
    ),
    "findings": Loop(
        "INSERT INTO due_marks SELECT 'mark of ' || id, id, NULL, 'attribution', -1 FROM runs",
        "UPDATE attributions SET document = x'00' WHERE run_id {runs}",
        lambda context, _: advance_all(Advancing(context)),
        "SELECT count(*) FROM due_marks WHERE run_id {runs}",
    ),
    "attribution": Loop(
        "UPDATE attributions SET stale = true, changed_at_us = 1",
        "UPDATE attempts SET fingerprint = '[1]' WHERE run_id {runs}",
        lambda context, _: compute_stale_attributions(context),
        "SELECT count(*) FROM attributions WHERE stale AND run_id {runs}",
    ),
    "policies": Loop(
        """INSERT INTO probe_policies SELECT id, '{{"every_steps": 1}}', 1 FROM runs""",
        """UPDATE probe_policies SET policy = '{{"every_steps": "x"}}' WHERE run_id {runs}""",
        lambda context, _: make_automatic_probes(context),
        "SELECT count(*) = 0 FROM policy_probes WHERE run_id {runs}",
    ),
    "sweep of leases": Loop(
        "UPDATE probe_jobs SET lease_expires_at_us = 1 WHERE state = 'running'",
        f"UPDATE probe_jobs SET reasons = '{{{{' {OF_JOBS}",
        lambda context, _: sweep(context),
        f"SELECT count(*) FROM probe_jobs {OF_JOBS} AND lease_expires_at_us = 1",
    ),
    "leases": Loop(
        "UPDATE runs SET updated_at_us = updated_at_us",
        "UPDATE probes SET checkpoint = '[1]' WHERE run_id {runs}",
        ask_for_two,
        f"SELECT count(*) FROM probe_jobs {OF_JOBS} AND state = 'queued'",
    ),
    "closing of steps": Loop(
        "UPDATE steps SET last_shard_at_us = 1 WHERE step = 9",
        "UPDATE shard_statistics SET statistics = x'00' WHERE run_id {runs}",
        lambda context, _: mark_waiting_runs(context),
        "SELECT count(*) FROM steps WHERE closed_at_us IS NULL AND run_id {runs}",
    ),
    "remeasure": Loop(
        "UPDATE measurements SET computed_at_us = 1",
        "UPDATE attempts SET fingerprint = '[1]' WHERE run_id {runs}",
        measure_again,
        "SELECT count(*) FROM measurements WHERE computed_at_us = 1 AND comparison = 'step' AND run_id {runs}",
    ),
    "retention": Loop(
        "UPDATE runs SET updated_at_us = updated_at_us",
        "UPDATE shards SET file_bytes = 'x' WHERE run_id {runs}",
        purge_all_but_one,
        "SELECT count(*) FROM steps WHERE step = 1 AND tokens_purged_at_us IS NULL AND run_id {runs}",
    ),
    "exporter": Loop(
        "UPDATE runs SET updated_at_us = updated_at_us",
        "UPDATE newest_measurements SET buckets = x'00' WHERE run_id {runs}",
        scrape,
        "SELECT 0 FROM runs WHERE id {runs}",
    ),
}


def logged_run(http: httpx.Client, key: str) -> Sender:
    """Return a run with three closed steps, of which the first one is to be probed, and an open step."""
    sender = start_run(http, key)
    for step in (1, 2, 3):
        sender.put_shard(step, make_batch(seed=step)).raise_for_status()
        announce_checkpoint(sender, step)
    sender.put_shard(9, make_batch(seed=9), shards=2).raise_for_status()
    ask_for_probe(sender, 1, ("vllm.prefill", "torch.trainer")).raise_for_status()
    return sender


@pytest.mark.parametrize("name", LOOPS)
def test_bad_run_stops_no_other(app: FastAPI, http: httpx.Client, name: str) -> None:
    context, loop = app.state.context, LOOPS[name]
    bad, good = logged_run(http, "bad"), logged_run(http, "good")
    assert work_off(http) > 0
    for sender in (bad, good):
        ask_for_probe(sender, 2).raise_for_status()
    # The bad run comes first, by number or by age.
    ids = {"bad": min(bad.run, good.run), "good": max(bad.run, good.run)}

    def said(statement: str, of: str) -> TextClause:
        return text(statement.format(runs=f"= '{ids[of]}'"))

    def change(statement: TextClause) -> None:
        context.database.write(lambda session: session.execute(statement))

    if "lease_expires_at_us" in loop.due:
        assert ask_for_lease(http).status_code == ask_for_lease(http).status_code == 200
    change(said(loop.due, "bad"))
    change(said(loop.damage, "bad"))
    loop.run(context, http)
    alert_of_unreadable_runs(context)
    with context.database.read() as session:
        assert session.scalar(said(loop.left, "good")) == 0
    found = {
        of: [
            each["why"]
            for each in http.get(f"/v1/runs/{run}/alerts").json()["items"]
            if each["rule"] == "judging_failed"
        ]
        for of, run in ids.items()
    }
    assert found["good"] == []
    (why,) = found["bad"]
    assert why.startswith("The service could not ")


@pytest.mark.parametrize(("code", "alerts"), [(errno.EIO, 0), (errno.ENOSPC, 0), (errno.ENOENT, 1)])
def test_store_that_is_away_is_no_fault_of_a_run(app: FastAPI, http: httpx.Client, code: int, alerts: int) -> None:
    context, run = app.state.context, logged_run(http, "run").run
    with RunIsolated(context.database, context.events, run, "attribute a mismatch"):
        raise OSError(code, "the token store does not answer")
    found = [each["rule"] for each in http.get(f"/v1/runs/{run}/alerts").json()["items"]]
    assert found.count("judging_failed") == alerts
