"""Token files that are gone or damaged: said, never served, and restored by the same bytes."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from foreshock.rollouts import encode_rollouts
from foreshock_service.platform.settings import Settings
from tests.service.sending import make_batch, problem_of, start_run
from tests.service.stored import count_rows, list_files

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "status", "kind"),
    [(Path.unlink, 410, "tokens-gone"), (flip_a_bit, 500, "tokens-damaged"), (cut, 500, "tokens-damaged")],
)
def test_a_lost_file_is_said_and_the_same_bytes_restore_it(
    http: httpx.Client, settings: Settings, spoil: Callable[[Path], None], status: int, kind: str
) -> None:
    sender, body = start_run(http), encode_rollouts(make_batch(200))
    sender.put_shard(4, body).raise_for_status()
    tokens = f"/v1/runs/{sender.run}/steps/4/tokens"
    before, rows = http.get(tokens).raise_for_status().json(), count_rows(settings)
    (name,) = list_files(settings)
    path = Path(settings.store_url) / name
    spoil(path)

    answer = http.get(tokens)
    assert problem_of(answer) == (status, kind)
    assert "shard 0 of step 4" in answer.json()["detail"]

    one = http.get(tokens, params={"sample_id": before["items"][0]["sample_id"]})
    # A flipped bit is found by those who read its row group.
    assert one.status_code == status or spoil is flip_a_bit

    again = sender.put_shard(4, body)
    assert (again.status_code, again.json()["status"]) == (200, "duplicate")
    assert http.get(tokens).raise_for_status().json() == before
    assert count_rows(settings) == rows
    assert list_files(settings) == [name]


def test_an_intact_file_is_left_alone(http: httpx.Client, settings: Settings) -> None:
    sender, body = start_run(http), encode_rollouts(make_batch())
    sender.put_shard(4, body).raise_for_status()
    (name,) = list_files(settings)
    path = Path(settings.store_url) / name
    written = path.stat()
    assert sender.put_shard(4, body).status_code == 200
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
