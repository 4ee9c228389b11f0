"""Long polls share queries, hear of other processes' changes, and miss none."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Collection

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from sqlalchemy import event

from foreshock_service.platform.changes.announcing import CHANNEL
from foreshock_service.platform.changes.listening import Listener
from foreshock_service.platform.database.session import Database
from foreshock_service.watch.long_polls.batches import BatchedReads
from foreshock_service.watch.long_polls.versions import RunVersion
from foreshock_service.watch.long_polls.waiters import READ_AGAIN_SECONDS, LongPolls
from tests.service.watch.recorded import K3, RecordedRun

WAITERS = 200


def test_those_who_ask_during_a_read_share_the_next_one() -> None:
    calls: list[list[str]] = []
    begun, go_on = threading.Event(), threading.Event()

    def read(keys: Collection[str]) -> dict[str, int]:
        calls.append(list(keys))
        begun.set()
        assert go_on.wait(60)
        return {key: len(calls) for key in keys if key != "absent"}

    async def ask() -> list[int | None]:
        reads = BatchedReads(read, most=10)
        first = asyncio.create_task(reads.get("a"))
        await asyncio.to_thread(begun.wait, 60)
        later = [asyncio.create_task(reads.get(key)) for key in ["a", "b", "absent"] * 30]
        given_up = asyncio.create_task(reads.get("b"))
        await asyncio.sleep(0.05)
        given_up.cancel()
        go_on.set()
        return [await first, *await asyncio.gather(*later)]

    answers = asyncio.run(ask())
    assert calls == [["a"], ["a", "b", "absent"]]
    assert answers == [1, *[2, 2, None] * 30]


def test_error_of_a_read_reaches_all_who_asked_and_the_next_read_works() -> None:
    fails = [True]

    def read(keys: Collection[str]) -> dict[str, str]:
        if fails.pop():
            raise OSError("no database")
        return {key: key for key in keys}

    async def ask() -> list[object]:
        reads = BatchedReads(read)
        first: list[object] = list(await asyncio.gather(*(reads.get("a") for _ in range(3)), return_exceptions=True))
        fails.append(False)
        return [*first, await reads.get("a")]

    *errors, answer = asyncio.run(ask())
    assert [type(error) for error in errors] == [OSError] * 3
    assert answer == "a"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_change_costs_one_query_however_many_wait(database: Database) -> None:
    run = RecordedRun(database).begin()
    statements: Counter[str] = Counter()
    event.listen(database._read_engine, "before_cursor_execute", lambda *each: statements.update([each[2]]))

    async def wait_and_change() -> float:
        polls = LongPolls(database, Listener(database.url))
        polls.start()
        waiting = [asyncio.create_task(wait(polls, run.run)) for _ in range(WAITERS)]
        while polls.count < WAITERS:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        statements.clear()
        begin = time.monotonic()
        await asyncio.to_thread(run.close_all, {K3: [0.2] * 12}, range(1, 13))
        await asyncio.gather(*waiting)
        seconds = time.monotonic() - begin
        await polls.stop()
        return seconds

    seconds = asyncio.run(wait_and_change())
    assert seconds < READ_AGAIN_SECONDS
    of_versions = sum(count for text, count in statements.items() if "trainer_progress.run_id IN" in text)
    # At most one for each of the twelve steps, whose changes are announced one by one.
    assert 1 <= of_versions <= 12


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_change_between_the_look_and_the_wait_is_not_missed(database: Database) -> None:
    run = RecordedRun(database).begin()

    async def change_early() -> float:
        polls = LongPolls(database, Listener(database.url))
        polls.start()
        with polls.waiter(run.run) as waiter:
            known = await polls.version(run.run)
            await asyncio.to_thread(run.close_all, {K3: [0.2] * 12}, range(1, 13))
            await asyncio.sleep(0.5)
            begin = time.monotonic()
            await waiter.until(lambda now: now != known, 30)
            seconds = time.monotonic() - begin
        await polls.stop()
        return seconds

    assert asyncio.run(change_early()) < 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_change_that_nobody_announces_is_found_by_the_fallback(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(database).begin()
    monkeypatch.setattr("foreshock_service.watch.long_polls.waiters.READ_AGAIN_SECONDS", 0.2)
    monkeypatch.setattr("foreshock_service.platform.changes.announcing.announce", lambda _: None)

    async def wait_and_change() -> None:
        polls = LongPolls(database, Listener(database.url))
        polls.start()
        waiting = asyncio.create_task(wait(polls, run.run))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(run.close_all, {K3: [0.2] * 12}, range(1, 13))
        await asyncio.wait_for(waiting, 20)
        await polls.stop()

    asyncio.run(wait_and_change())


async def wait(polls: LongPolls, run_id: str) -> RunVersion | None:
    with polls.waiter(run_id) as waiter:
        known = await polls.version(run_id)
        await waiter.until(lambda now: now != known, 60)
    return known


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_change_by_another_process_ends_a_poll(http: httpx.Client, app: FastAPI, database_url: str) -> None:
    run = RecordedRun(app.state.context.database).begin()
    run.close_all({K3: [0.2] * 12}, range(1, 13))
    address = f"/v1/runs/{run.run}/alerts"
    etag = http.get(address).headers["ETag"]

    def change() -> None:
        time.sleep(1)
        with psycopg.connect(database_url) as other:
            other.execute(
                "UPDATE alerts SET version = version + 1, state = 'acknowledged' WHERE run_id = %s", [run.run]
            )
            other.execute("SELECT pg_notify(%s, %s)", (CHANNEL, run.run))

    changing = threading.Thread(target=change)
    changing.start()
    begin = time.monotonic()
    answer = http.get(address, params={"wait": 30}, headers={"If-None-Match": etag})
    assert 1 <= time.monotonic() - begin < 1 + READ_AGAIN_SECONDS / 2
    assert answer.status_code == 200
    assert {alert["state"] for alert in answer.json()["items"]} == {"acknowledged"}
    changing.join()
