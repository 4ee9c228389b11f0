"""`foreshock spool`: rejected items are listed, sent again once the cause is mended, and dropped."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.rejected import RejectedItems
from foreshock.client.spool import Item, Spool
from foreshock.commands.spool import command
from foreshock.errors import ConfigurationError, ServiceUnavailable, SpoolError
from tests.foreshock.client.faulty_service import FaultyService, faulty_service

Run = Callable[..., int]


@pytest.fixture
def service() -> Iterator[FaultyService]:
    with faulty_service() as running:
        yield running


@pytest.fixture
def spool(service: FaultyService, tmp_path: Path) -> Run:
    """Run the command for the spool of the test."""

    def run(*words: str) -> int:
        parser = argparse.ArgumentParser()
        command.configure(parser)
        action, *rest = words
        place = ["--directory", str(tmp_path), "--url", service.url, "--api-key", "fsk_test"]
        return command.run(parser.parse_args([action, *place, *rest]))

    return run


def scalars(step: int, key: str = "run") -> Delivery:
    return Delivery(
        "scalars",
        Registration({"project": "team", "key": key}, {"key": "a", "resume_step": 0}),
        method="PUT",
        path=f"/v1/runs/{{run}}/steps/{step}/scalars",
        query={"attempt": "{attempt}"},
        body=b'{"source": "trainer", "values": {"x": %d}}' % step,
    )


def reject(folder: Path, *deliveries: Delivery, max_bytes: int = 1000) -> list[str]:
    """Keep the deliveries as rejected; return their names."""
    items = RejectedItems(folder, max_bytes=max_bytes)
    problem = {"status": 422, "detail": "row 3: log_probs must be <= 0"}
    return [items.keep(each, problem).stem for each in deliveries]


def test_list_shows_reason_and_run_and_what_waits(
    spool: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spool("list") == 0
    assert "nothing was rejected" in capsys.readouterr().out
    (name,) = reject(tmp_path, scalars(7))
    waiting = Spool(tmp_path, project="team", api_key=None, max_bytes=1000, max_rejected_bytes=0)
    waiting.write(Item(8, ("team", "run"), 1), scalars(8))
    assert spool("list") == 0
    shown = capsys.readouterr().out
    for part in (name, "team/run", "PUT /v1/runs/{run}/steps/7/scalars", "422: row 3", "waiting: 1 items", "running"):
        assert part in shown
    waiting.close()
    assert spool("list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["item"] for each in listed["rejected"]] == [name]
    assert [each["items"] for each in listed["waiting"]] == [1]


def test_resent_items_arrive_with_the_same_bytes_and_are_deleted(
    spool: Run, service: FaultyService, tmp_path: Path
) -> None:
    reject(tmp_path, scalars(1), scalars(2, key="other"), scalars(3))
    assert spool("resend", "--run", "team/run") == 0
    assert service.bodies("/scalars") == [scalars(1).body, scalars(3).body]
    assert [item.run for item in RejectedItems(tmp_path, max_bytes=0).items()] == ["team/other"]
    assert {each.headers["Authorization"] for each in service.received} == {"Bearer fsk_test"}


def test_item_that_is_refused_again_is_kept_with_the_new_reason(
    spool: Run, service: FaultyService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = reject(tmp_path, scalars(1), scalars(2))
    service.always = lambda received: 409 if "/steps/1/" in received.path else None
    assert spool("resend", "--all") == 1
    (kept,) = RejectedItems(tmp_path, max_bytes=0).items()
    assert (kept.name, kept.problem["status"], kept.body_path.read_bytes()) == (first, 409, scalars(1).body)
    assert second not in capsys.readouterr().err


def test_nothing_is_lost_while_the_service_is_away(spool: Run, service: FaultyService, tmp_path: Path) -> None:
    reject(tmp_path, scalars(1), scalars(2))
    service.faults.extend([503])
    with pytest.raises(ServiceUnavailable):
        spool("resend", "--all")
    assert len(RejectedItems(tmp_path, max_bytes=0).items()) == 2
    assert spool("resend", "--all") == 0


def test_items_without_bytes_or_with_a_planted_request_are_not_sent(
    spool: Run, service: FaultyService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (without,) = reject(tmp_path, scalars(1), max_bytes=0)
    (planted,) = reject(tmp_path, scalars(2))
    path = tmp_path / "rejected" / f"{planted}.json"
    record = json.loads(path.read_text())
    record["request"]["path"] = "http://thief.example/v1/runs/{run}/steps/1/scalars"
    path.write_text(json.dumps(record))
    assert spool("resend", "--all") == 1
    error = capsys.readouterr().err
    assert f"{without}: cannot be sent: its bytes were not kept" in error
    assert f"{planted}: cannot be sent" in error
    assert service.requests == 0


def test_dropped_items_are_deleted_and_unknown_ones_refused(spool: Run, tmp_path: Path) -> None:
    first, _ = reject(tmp_path, scalars(1), scalars(2))
    with pytest.raises(ConfigurationError, match="name the items"):
        spool("drop")
    with pytest.raises(ConfigurationError, match="no rejected item 'x'"):
        spool("drop", "x")
    assert spool("drop", first) == 0
    assert len(list((tmp_path / "rejected").iterdir())) == 2
    assert spool("drop", "--all") == 0
    assert list((tmp_path / "rejected").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_folder_of_rejected_items_that_another_user_made_is_refused(spool: Run, tmp_path: Path) -> None:
    reject(tmp_path, scalars(1))
    os.chown(tmp_path / "rejected", 12345, 12345)
    with pytest.raises(SpoolError, match="is not a folder of this user"):
        spool("list")
    with pytest.raises(SpoolError, match="is not a folder of this user"):
        reject(tmp_path, scalars(2))
