"""`foreshock remeasure` turns another release's database into what this release stores, and changes nothing else."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select, update

from foreshock.errors import ConfigurationError
from foreshock_service.maintenance.remeasure import Request, remeasure, remeasure_step
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.opening import upgrade
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Shard, measurements
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.shard_decoding import measure_stored
from tests.service.advancing import close_overdue
from tests.service.maintenance.remeasure.old_release import make_old, put_steps, stored_bytes
from tests.service.sending import Sender, make_batch, start_run
from tests.service.stored import list_files
from tests.service.working import announce_checkpoint, ask_for_probe, work_off


class Done(NamedTuple):
    """What a call of `foreshock remeasure` returned and printed."""

    status: int
    out: str
    err: str


Command = Callable[[Request], Done]


@pytest.fixture
def command(
    settings: Settings, decoders: DecoderPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """`foreshock remeasure` on the service's own data."""
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", settings.database_url)
    monkeypatch.setenv("FORESHOCK_STORE_URL", settings.store_url)
    return lambda request: Done(remeasure(request, decoders), *capsys.readouterr())


def values(sender: Sender) -> Any:
    return sender.get("measurements").raise_for_status().json()["columns"]


def file_of(database: Database, settings: Settings, step: int, shard: int = 0) -> Path:
    with database.read() as session:
        name = session.scalars(select(Shard.file).where(Shard.step == step, Shard.shard == shard)).one()
    return Path(settings.store_url) / name


class Meanwhile:
    """Decoders that run a callback once while they measure."""

    def __init__(self, context: ServiceContext, event: Callable[[], object]) -> None:
        self._decoders = context.decoders
        self._event: Callable[[], object] | None = event

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = self._decoders.run(function, *arguments)
        if function is measure_stored and self._event is not None:
            event, self._event = self._event, None
            event()
        return result


def test_old_statistics_become_what_this_release_stores(sender: Sender, database: Database, command: Command) -> None:
    put_steps(sender, 3, 4)
    measured, stored, lint = values(sender), stored_bytes(database), sender.get("steps/3/lint").json()
    make_old(database, sender, 3)
    assert values(sender) != measured
    assert sender.get("steps/3/lint").status_code == 404
    old = stored_bytes(database)
    assert old.keys() == stored.keys()
    assert sum(old[key] != stored[key] for key in stored) == 6

    done = command(Request(dry_run=True))
    assert (done.status, "1 of 1 steps would be measured again" in done.out) == (0, True)
    assert values(sender) != measured

    done = command(Request())
    assert (done.status, "1 of 1 steps were measured again" in done.out) == (0, True)
    assert values(sender) == measured
    assert stored_bytes(database) == stored
    assert sender.get("steps/3/lint").json() == lint
    done = command(Request())
    assert (done.status, "nothing to do" in done.out) == (0, True)
    # The same token files give the same statistics, however often.
    done = command(Request(everything=True))
    assert (done.status, "2 of 2 steps" in done.out) == (0, True)
    assert stored_bytes(database) == stored


def test_steps_measured_before_the_newest_columns_are_measured_again(
    sender: Sender, database: Database, command: Command
) -> None:
    put_steps(sender, 3, 4)
    names = ("low_probability_abs_d", "low_probability_tokens")
    columns = [measurements.c[name] for name in ("step", "comparison", *names)]

    def rows() -> list[dict[str, Any]]:
        with database.read() as session:
            query = select(*columns).order_by(*measurements.primary_key.columns)
            return [dict(row) for row in session.execute(query).mappings()]

    measured = rows()
    assert all(row["low_probability_tokens"] > 0 for row in measured if row["comparison"] == "trainer/rollout")
    # As a migrated database has them: statistics of this version, and NULL in the new columns.
    emptied = update(measurements).where(measurements.c.step == 3).values(dict.fromkeys(names))
    database.write(lambda session: session.execute(emptied))
    assert rows() != measured
    done = command(Request())
    assert (done.status, "1 of 1 steps were measured again" in done.out) == (0, True)
    assert rows() == measured
    done = command(Request())
    assert (done.status, "nothing to do" in done.out) == (0, True)


def test_scored_comparisons_are_measured_again(
    sender: Sender, http: httpx.Client, app: FastAPI, database: Database
) -> None:
    put_steps(sender, 3)
    announce_checkpoint(sender, 3)
    ask_for_probe(sender, 3, ("vllm.prefill", "torch.trainer")).raise_for_status()
    assert work_off(http) > 0
    measured, stored = values(sender), stored_bytes(database)
    attribution = sender.get("steps/3/attribution").json()
    make_old(database, sender, 3)
    assert remeasure_step(app.state.context, StepKey(sender.run, 1, 3)) is None
    assert values(sender) == measured
    assert stored_bytes(database) == stored
    again = sender.get("steps/3/attribution").json()
    assert again.pop("computed_at_us") > attribution.pop("computed_at_us")
    assert again == attribution


def test_missing_files_are_reported_and_their_data_left_unchanged(
    sender: Sender, http: httpx.Client, database: Database, settings: Settings, command: Command
) -> None:
    put_steps(sender, 3, 4, 5)
    announce_checkpoint(sender, 5)
    ask_for_probe(sender, 5).raise_for_status()
    work_off(http)
    stored = stored_bytes(database)
    make_old(database, sender, 3, 4, 5)
    old = stored_bytes(database)
    file_of(database, settings, 4, shard=1).unlink()
    for name in list_files(settings):
        if "/scores/" in name:
            (Path(settings.store_url) / name).unlink()

    printed = command(Request(dry_run=True))
    assert printed.status == 1
    assert "1 of 3 steps would be measured again" in printed.out
    printed = command(Request(run="a-run"))
    assert printed.status == 1
    assert "1 of 3 steps were measured again" in printed.out
    assert f"left: run {sender.run}, attempt 1, step 4: 1 of its 2 token files are missing" in printed.err
    assert "step 5: " in printed.err
    assert "replayed scores are missing" in printed.err
    now = stored_bytes(database)
    assert {key: blob for key, blob in now.items() if key[2] == 4} == {
        key: blob for key, blob in old.items() if key[2] == 4
    }
    # What needs no score of step 5 is measured again; what was replayed stays.
    assert {key: blob for key, blob in now.items() if key[2] != 4} == {
        key: blob for key, blob in stored.items() if key[2] != 4
    }


def test_file_with_other_content_is_named_and_left_unchanged(
    sender: Sender, database: Database, settings: Settings, command: Command
) -> None:
    for step in (3, 4, 5, 6):
        put_steps(sender, step)
        make_old(database, sender, step)
    old = stored_bytes(database)
    another, damaged, empty = (file_of(database, settings, step, shard=1) for step in (3, 4, 5))
    # A backup restored to the wrong place, a truncated file, and an empty one.
    another.write_bytes(file_of(database, settings, 3, shard=0).read_bytes())
    damaged.write_bytes(damaged.read_bytes()[:-100])
    empty.write_bytes(b"")
    printed = command(Request())
    assert printed.status == 1
    assert "1 of 4 steps were measured again" in printed.out
    for step, file, why in ((3, another, "holds other"), (4, damaged, "is damaged"), (5, empty, "is damaged")):
        (line,) = [line for line in printed.err.splitlines() if f"step {step}:" in line]
        assert str(file.relative_to(settings.store_url)) in line
        assert why in line
    now = stored_bytes(database)
    assert {key for key in old if old[key] != now[key]} <= {key for key in old if key[2] == 6}


def test_shard_that_arrives_during_the_command_is_kept(http: httpx.Client, app: FastAPI, database: Database) -> None:
    sender, twin = start_run(http), start_run(http, "twin")
    put_steps(sender, 3, shards=[0])
    make_old(database, sender, 3, shards=[0])
    context: ServiceContext = app.state.context
    meanwhile: Any = Meanwhile(context, lambda: put_steps(sender, 3, shards=[1]))
    slow = replace(context, decoders=meanwhile)
    assert remeasure_step(slow, StepKey(sender.run, 1, 3)) is None
    put_steps(twin, 3)
    assert values(sender) == values(twin)


def test_run_deleted_during_the_command_is_left_unchanged(http: httpx.Client, app: FastAPI, database: Database) -> None:
    sender = start_run(http)
    put_steps(sender, 3)
    make_old(database, sender, 3)
    old = stored_bytes(database)
    context: ServiceContext = app.state.context
    meanwhile: Any = Meanwhile(context, lambda: http.delete(f"/v1/runs/{sender.run}"))
    slow = replace(context, decoders=meanwhile)
    remeasure_step(slow, StepKey(sender.run, 1, 3))
    assert stored_bytes(database) == old


def test_uploads_go_on_while_steps_are_measured_again(sender: Sender, database: Database, command: Command) -> None:
    put_steps(sender, *range(6))
    stored, measured = stored_bytes(database), values(sender)
    make_old(database, sender, *range(6))
    with ThreadPoolExecutor(1) as threads:
        remeasured = threads.submit(command, Request())
        sent = 0
        while not remeasured.done() or sent == 0:
            sender.put_shard(100 + sent, make_batch(seed=sent)).raise_for_status()
            sent += 1
    assert remeasured.result().status == 0
    assert {key: blob for key, blob in stored_bytes(database).items() if key[2] < 100} == stored
    columns = values(sender)
    assert [step for step in columns["step"] if step >= 100] == 2 * list(range(100, 100 + sent))
    assert sender.get("measurements", to_step=5).json()["columns"] == measured


def test_interrupted_command_resumes_with_the_remaining_steps(
    sender: Sender, app: FastAPI, database: Database, command: Command,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    put_steps(sender, *range(4))
    stored = stored_bytes(database)
    make_old(database, sender, *range(4))

    def interrupted(context: ServiceContext, key: StepKey) -> str | None:
        if key.step == 2:
            raise KeyboardInterrupt
        return remeasure_step(context, key)

    with monkeypatch.context() as patch:
        patch.setattr("foreshock_service.maintenance.remeasure.remeasure_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            command(Request())
    assert "of 4 steps: run it again to continue" in capsys.readouterr().err
    done = command(Request())
    assert (done.status, "4 of 4" not in done.out) == (0, True)
    assert stored_bytes(database) == stored


def test_only_selected_steps_are_measured_again(http: httpx.Client, database: Database, command: Command) -> None:
    first, second = start_run(http, "first"), start_run(http, "second", name="The second")
    for sender in (first, second):
        for step in (3, 4):
            put_steps(sender, step)
            make_old(database, sender, step)
    for request, steps in ((Request("The second", step=3), 1), (Request(first.run), 2), (Request(attempt=1), 1)):
        assert f"{steps} of {steps} steps were" in command(request).out
    with pytest.raises(ConfigurationError, match="there is no run third"):
        command(Request("third"))
    with pytest.raises(ConfigurationError, match="there is no step 5"):
        command(Request(step=5))


def test_missing_database_or_store_is_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", f"sqlite:///{tmp_path}/no.db")
    monkeypatch.setenv("FORESHOCK_STORE_URL", f"{tmp_path}/no-tokens")
    with pytest.raises(ConfigurationError, match="there is no database"):
        remeasure(Request())
    upgrade(f"sqlite:///{tmp_path}/no.db")
    with pytest.raises(ConfigurationError, match="there is no token store"):
        remeasure(Request())
    (tmp_path / "no-tokens").mkdir()
    (tmp_path / "no.db").unlink()
    (tmp_path / "no.db").touch()
    with pytest.raises(ConfigurationError, match="has no tables"):
        remeasure(Request())


def test_a_step_that_is_open_stays_open_and_closes_later(http: httpx.Client, app: FastAPI, database: Database) -> None:
    sender, twin = start_run(http), start_run(http, "twin")
    for each in (sender, twin):
        put_steps(each, 3, shards=[0])
    make_old(database, sender, 3, shards=[0])
    assert remeasure_step(app.state.context, StepKey(sender.run, 1, 3)) is None
    assert values(sender)["step"] == []
    assert close_overdue(app.state.context) == 2
    assert values(sender) == values(twin)
