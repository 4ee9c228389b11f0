"""A step of a long run costs the database as much work as one of a short run: counted, not timed."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import event

from foreshock.rollouts import encode_rollouts
from foreshock_service.platform.database.session import Database
from tests.service.advancing import advance_all
from tests.service.runs.step_rows import copy_run
from tests.service.sending import Sender, make_batch, start_run

PERIOD = 25
LONG, SHORT = 175, 75  # both longer than the window of the diagnosis
MARGIN = 100
"""Instructions by which steps differ, such as those at which a snapshot is kept for good."""


class Instructions:
    """The instructions that SQLite executes for the service; set `count` to 0 to begin anew, `off` to count none.

    The listeners are added once: SQLAlchemy's are not to be changed while other threads begin transactions.
    """

    def __init__(self, database: Database) -> None:
        self.count = 0
        self.off = False
        for engine in (database._write_engine, database._read_engine):
            event.listen(engine, "begin", self._arm)

    def _arm(self, connection: Any) -> None:
        connection.connection.dbapi_connection.set_progress_handler(None if self.off else self._add, 1)

    def _add(self) -> int:
        self.count += 1
        return 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_step_of_a_long_run_takes_no_more_instructions(app: FastAPI, http: httpx.Client, database: Database) -> None:
    template = start_run(http, "template")
    for step in range(PERIOD):
        template.put_shard(step, encode_rollouts(make_batch(seed=step))).raise_for_status()
    most = {steps: most_instructions(app, http, database, template.run, steps) for steps in (SHORT, LONG)}
    assert most[SHORT] > MARGIN
    assert most[LONG] <= most[SHORT] + MARGIN


def most_instructions(app: FastAPI, http: httpx.Client, database: Database, template: str, steps: int) -> int:
    """Return the most instructions of one of the steps that follow so many."""
    run: Sender = start_run(http, f"run of {steps} steps")
    copy_run(database, template, PERIOD, run.run, steps)
    advance_all(app.state.advancing)
    counts = []
    executed = Instructions(app.state.context.database)
    for step in range(steps, steps + PERIOD):
        executed.count = 0
        run.put_shard(step, encode_rollouts(make_batch(seed=step % PERIOD))).raise_for_status()
        counts.append(executed.count)
    return max(counts)
