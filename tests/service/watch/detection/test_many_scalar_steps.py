"""A run of 50,000 steps without rollouts costs the database as much as one of 500: counted, not timed."""

import math
import time
from functools import partial

import httpx
import pytest
from fastapi import FastAPI

from foreshock.diagnosis.detectors import WarningState
from foreshock_service.platform.database.engine import insert_rows
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Run, Scalar
from foreshock_service.watch.detection import states
from foreshock_service.watch.detection.history import watched_as
from foreshock_service.watch.detection.states import STEPS_OF_A_BLOCK, stored_state
from tests.service.advancing import advance_all, paused
from tests.service.runs.test_long_runs import MARGIN, Instructions
from tests.service.sending import Sender, start_run

SHORT, LONG = 500, 50_000
READ = ("/runs/{run}", "/metrics", "/v1/runs/{run}/lr-advice", "/v1/runs/{run}/diagnosis", "/v1/runs/{run}/alerts")


def run_of(app: FastAPI, http: httpx.Client, database: Database, steps: int) -> Sender:
    """Return a run with a scalar at each step and a state in each block; most are put into the database.

    One more step is reported to the service, which then judges all of them; the caller counts what follows.
    """
    run = start_run(http, f"run of {steps} steps")
    for step in (1, 2):
        run.put_scalars(step, {"reward": 0.5}).raise_for_status()
    of_run = {"run_id": run.run, "attempt": 1, "source": "trainer", "name": "reward", "received_at_us": 1}
    rows = [{**of_run, "step": step, "value": 0.5 + 0.1 * (step % 3)} for step in range(3, steps)]
    database.write(partial(insert_rows, target=Scalar, rows=rows))
    with database.read() as session:
        digest = watched_as(session, session.get_one(Run, run.run)).digest
    blocks = [
        stored_state(1, WarningState(step=step), digest, milestone=True)
        for step in range(STEPS_OF_A_BLOCK, steps, STEPS_OF_A_BLOCK)
    ]
    database.write(partial(states.store, run_id=run.run, states=blocks))
    with paused(app.state.context.database):
        run.put_scalars(steps, {"reward": 0.5}).raise_for_status()
    advance_all(app.state.advancing)
    return run


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_many_scalar_steps_take_no_more_instructions(app: FastAPI, http: httpx.Client, database: Database) -> None:
    executed = Instructions(app.state.context.database)
    run = run_of(app, http, database, SHORT)
    short = {address: least_instructions(executed, run, address) for address in (None, *READ)}
    assert min(short.values()) > 0
    executed.off = True
    run = run_of(app, http, database, LONG)
    executed.off = False
    for address, count in short.items():
        # Of two runs /metrics reads twice as much.
        enough = 2 * count + MARGIN
        found = least_instructions(executed, run, address, enough)
        assert found <= enough, address


def least_instructions(executed: Instructions, run: Sender, address: str | None, enough: float = math.inf) -> int:
    """Return the least instructions of four reads, or of four further steps.

    The background of the service is counted too. While there are more than `enough`, it may be at work: wait for it.
    """
    found, deadline = list[int](), time.monotonic() + 120
    while len(found) < 4 or (min(found) > enough and time.monotonic() < deadline):
        executed.count = 0
        answer = (
            run.put_scalars(LONG + 1 + len(found), {"reward": 0.5})
            if address is None
            else run.http.get(address.format(run=run.run))
        )
        answer.raise_for_status()
        found.append(executed.count)
    return min(found)
