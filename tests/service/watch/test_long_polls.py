"""Long polls share queries, hear of other processes' changes, and miss none."""

import asyncio
import time
from collections import Counter

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import event

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import UNRESTRICTED, Scope
from foreshock_service.watch.long_polls import LOOK_SECONDS, LongPolls, RunVersion, read_versions
from tests.service.keys import make_key
from tests.service.watch.recorded import K3, RecordedRun

WAITERS = 200
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def version_of(database: Database, run_id: str) -> RunVersion:
    with database.read() as session:
        return read_versions(session, [run_id])[run_id]


async def wait_for_change(polls: LongPolls, run_id: str, known: RunVersion, seconds: float = 60) -> float:
    begin = time.monotonic()
    await polls.until_changed(UNRESTRICTED, run_id, lambda now: now.advice, f'"{known.advice}.0"', seconds)
    return time.monotonic() - begin


def test_a_look_is_one_query_however_many_wait(database: Database) -> None:
    runs = [RecordedRun(database).begin(f"run-{number}") for number in range(4)]
    known = {run.run: version_of(database, run.run) for run in runs}
    statements: Counter[str] = Counter()

    async def wait_and_change() -> tuple[list[float], float]:
        polls = LongPolls(database)
        polls.start()
        waiting = [
            asyncio.create_task(wait_for_change(polls, run, version, 60.0 if run == runs[0].run else 3.0))
            for run, version in known.items()
            for _ in range(WAITERS // len(known))
        ]
        while polls.count() < WAITERS:
            await asyncio.sleep(0.01)
        event.listen(database._read_engine, "before_cursor_execute", lambda *each: statements.update([each[2]]))
        begin = time.monotonic()
        await asyncio.to_thread(runs[0].close_all, {K3: [0.2] * 12}, range(1, 13))
        seconds = await asyncio.gather(*waiting)
        await polls.stop()
        assert polls.count() == 0
        return seconds, time.monotonic() - begin

    seconds, lasted = asyncio.run(wait_and_change())
    changed, others = seconds[: WAITERS // 4], seconds[WAITERS // 4 :]
    assert max(changed) < 50
    assert min(others) >= 2.9
    looks = [count for text, count in statements.items() if "FROM runs" in text and "max(alerts.version)" in text]
    assert 1 < sum(looks) <= lasted / LOOK_SECONDS + 2


def test_change_between_the_answer_and_the_next_poll_is_not_missed(database: Database) -> None:
    run = RecordedRun(database).begin()
    known = version_of(database, run.run)
    run.close_all({K3: [0.2] * 12}, range(1, 13))

    async def poll() -> float:
        polls = LongPolls(database)
        polls.start()
        seconds = await wait_for_change(polls, run.run, known)
        await polls.stop()
        return seconds

    assert asyncio.run(poll()) < 30


def test_wait_goes_on_after_a_look_that_fails(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(database).begin()
    known = version_of(database, run.run)
    run.close_all({K3: [0.2] * 12}, range(1, 13))
    failures = iter([True, True])

    def read(polls: LongPolls, run_ids: list[str]) -> dict[str, RunVersion]:
        if next(failures, False):
            raise OSError("no database")
        return {run_id: version_of(database, run_id) for run_id in run_ids}

    monkeypatch.setattr(LongPolls, "_read", read)

    async def wait() -> float:
        polls = LongPolls(database)
        polls.start()
        seconds = await wait_for_change(polls, run.run, known)
        await polls.stop()
        return seconds

    assert 2 * LOOK_SECONDS < asyncio.run(wait()) < 30


def test_release_ends_waits_now_and_later(database: Database) -> None:
    run = RecordedRun(database).begin()
    known = version_of(database, run.run)

    async def release() -> list[float]:
        polls = LongPolls(database)
        waiting = asyncio.create_task(wait_for_change(polls, run.run, known))
        await asyncio.sleep(0.1)
        polls.release()
        return [await waiting, await wait_for_change(polls, run.run, known)]

    assert max(asyncio.run(release())) < 30


@pytest.mark.parametrize("noun", ["lr-advice", "alerts"])
def test_polls_need_a_valid_key_that_sees_the_run(http: httpx.Client, app: FastAPI, noun: str) -> None:
    database: Database = app.state.context.database
    run = RecordedRun(database).begin()
    address = f"/v1/runs/{run.run}/{noun}"
    same = {"If-None-Match": http.get(address).headers["ETag"]}
    assert http.get(address, params={"wait": 0.1}, headers=same).status_code == 304
    assert http.get(f"/v1/runs/run_{'0' * 26}/{noun}").status_code == 404
    reader = make_key(database, Scope.READ)[1]
    worker, stranger = make_key(database, Scope.WORKER)[1], make_key(database, Scope.READ, project="another")[1]
    for headers, status in (({}, 401), ({"Authorization": "Bearer fsk_unknown"}, 401), (worker, 403), (stranger, 404)):
        assert http.get(address, params={"wait": 1}, headers={**same, **headers}).status_code == status
    assert http.get(address, headers=reader).status_code == 200


def test_poll_reads_nothing_by_itself_before_it_waits(database: Database) -> None:
    run = RecordedRun(database).begin()
    known = version_of(database, run.run)
    polls = LongPolls(database)  # which does not look
    statements: list[str] = []
    event.listen(database._read_engine, "before_cursor_execute", lambda *each: statements.append(each[2]))
    asyncio.run(wait_for_change(polls, run.run, known, 0.1))
    assert not statements
