"""Every surface says the same sentence of a run, byte for byte, and none says an old one."""

import html
import random
import re
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from foreshock.api.diagnosis import VERDICTS
from foreshock.client.reader import Reader
from foreshock.clock import now_us
from foreshock.commands.main import main
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Run, Step
from foreshock_service.platform.settings import NotificationTarget
from foreshock_service.runs import due
from foreshock_service.runs.events import RunBecameStale
from foreshock_service.watch.notifications import service as notifications
from foreshock_service.watch.notifications.sending import Message
from tests.service.watch.recorded import K3, LENGTH, RecordedRun

# On PostgreSQL only the queries differ.
HISTORIES = {"sqlite": 24, "postgresql": 16}
STEPS = 20
KINDS = ("healthy", "waiting", "no log-probs", "collapse", "mismatch", "stale", "resumed", "late")
REWARD, TOKENS = "rollout:reward_mean", "trainer/rollout:tokens"


def values_of(kind: str, step: int, draw: random.Random) -> dict[str, float]:
    """Return the measures of a step of a history of this kind."""
    late = step > STEPS // 2
    values = {LENGTH: draw.gauss(100.0, 3.0), REWARD: draw.gauss(0.8, 0.02)}
    if kind == "collapse" and late:
        values[REWARD] = draw.gauss(0.02, 0.005)
    if kind != "no log-probs":
        large = kind == "mismatch" and late
        values |= {K3: draw.uniform(0.8, 1.2) * (0.05 if large else 2e-5), TOKENS: 5000.0}
    return values


def wait_for_shards(run: RecordedRun, step: int) -> None:
    """Store a step of which two of four shards have come."""

    def work(session: Session) -> None:
        counts = {"expected_shards": 4, "received_shards": 2, "folded_shards": 0, "rollouts": 1, "tokens": 1}
        # Longer ago than the half minute after which it is named, and within the grace time.
        times = {"first_shard_at_us": 1, "last_shard_at_us": now_us() - 60_000_000, "closed_at_us": None}
        row = {"run_id": run.run, "attempt": run.attempt, "step": step, **counts, **times}
        session.execute(insert(Step), [row])
        due.mark(session, run.run)

    run.database.write(work)


def go_silent(run: RecordedRun) -> None:
    """Find the run stale, as the sweeper does."""

    def work(session: Session) -> None:
        session.execute(update(Run).where(Run.id == run.run).values(state="stale"))
        run.events.publish(session, RunBecameStale(run.run, STEPS, 300.0))

    run.database.write(work)


def record(app: FastAPI, number: int) -> RecordedRun:
    draw, kind = random.Random(number), KINDS[number % len(KINDS)]
    run = RecordedRun(app.state.context.database).begin(f"{kind} <{number}> & more")
    steps = list(range(1, STEPS + 1))
    if kind == "waiting":
        wait_for_shards(run, 0)
        steps = steps[: draw.choice((0, 0, 3))]
    if kind == "late":
        draw.shuffle(steps)
    for step in steps:
        run.close(step, values_of(kind, step, draw))
    if kind == "stale":
        go_silent(run)
    if kind == "resumed":
        run.resume(draw.randint(2, STEPS))
        run.close(STEPS, values_of(kind, STEPS, draw))
    return run


@pytest.fixture
def recorded(app: FastAPI, database_url: str) -> list[RecordedRun]:
    return [record(app, number) for number in range(HISTORIES[database_url.partition(":")[0]])]


def sent(context: ServiceContext, monkeypatch: pytest.MonkeyPatch) -> Iterator[Message]:
    """Yield every message of notifications that is due."""
    taken: list[Message] = []
    monkeypatch.setattr(notifications, "send", lambda target, message, now_us: taken.append(message))
    target = NotificationTarget.model_validate({"name": "all", "url": "json://127.0.0.1:1/", "severity": "warning"})
    notifications.fill_outbox(context, target)
    while notifications.send_next(context, target):
        yield from taken
        taken.clear()


def test_every_surface_says_the_same_sentence(
    http: httpx.Client,
    app: FastAPI,
    recorded: list[RecordedRun],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = str(http.base_url)

    def command(*words: str) -> str:
        assert main([*words, "--url", url]) == 0
        return capsys.readouterr().out

    said = {run.run: http.get(f"/v1/runs/{run.run}/diagnosis").raise_for_status().json() for run in recorded}
    assert {each["verdict"] for each in said.values()} == set(VERDICTS) - (
        set() if any(each["verdict"] == "critical" for each in said.values()) else {"critical"}
    )
    listed = command("runs", "--limit", "100")
    metrics = http.get("/metrics").raise_for_status().text
    pages = list_pages(http)
    with Reader(url) as reader:
        of_list = {run.id: run.diagnosis for run in reader.runs()}
        ids_of = {verdict: {run.id for run in reader.runs(verdict=verdict)} for verdict in VERDICTS}
        assert sum(map(len, ids_of.values())) == len(of_list)
        for run, found in said.items():
            headline = found["headline"]
            assert reader.diagnosis(run).headline == headline
            one = reader.run(run).diagnosis
            assert one is not None
            assert of_list[run] == one
            assert run in ids_of[one.verdict]
            assert (one.headline, one.verdict, one.since) == (headline, found["verdict"], found["since"])
            assert 0 < len(one.short) <= 80
            assert one.short == found["short"]
            assert f"  {one.short}" in listed.splitlines()
            assert headline in command("watch", run, "--once").splitlines()
            assert headline in command("report", run, "--fail-on", "never").splitlines()
            page = html.unescape(http.get(f"/runs/{run}", follow_redirects=True).raise_for_status().text)
            assert f"<p><strong>{headline}</strong></p>" in page
            assert f">{one.short}</span></td>" in html.unescape(pages[run])
            if f'foreshock_step{{run="{run}"}}' in metrics:
                assert f'foreshock_diagnosis_verdict{{run="{run}",verdict="{found["verdict"]}"}} 1' in metrics
    messages = list(sent(app.state.context, monkeypatch))
    assert messages
    for message in messages:
        assert message.said.headline == said[message.run.id]["headline"]


def list_pages(http: httpx.Client) -> dict[str, str]:
    """Return the row of each run in the list of runs, over all of its pages."""
    rows: dict[str, str] = {}
    address: str | None = "/"
    while address is not None:
        page = http.get(address).raise_for_status().text
        for row in re.findall(r"<tr class.*?</tr>", page, re.S):
            found = re.search(r'name="run" value="([^"]+)"', row)
            if found is not None:
                rows[found[1]] = row
        more = re.search(r'href="([^"]+)" rel="next"', page)
        address = html.unescape(more[1]) if more else None
    return rows
