"""A token store in a real S3 server: whole objects, ranges, refusals that heal, and nothing acknowledged lost."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from pydantic import SecretStr

from foreshock.errors import ConfigurationError
from foreshock.rollouts import encode_rollouts
from foreshock_service.app import create_app
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings, load_settings
from foreshock_service.platform.store.objects import ObjectTokenStore
from foreshock_service.platform.store.removal import remove_orphans
from foreshock_service.platform.store.tokens import open_store, shard_file_name
from tests.service.object_store import ACCESS_KEY, SECRET_KEY, ObjectStoreServer, refusing_server
from tests.service.sending import Sender, make_batch, start_run
from tests.service.server import RunningServer
from tests.waiting import wait_until

_DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def settings(s3: ObjectStoreServer, sqlite_template: Path, tmp_path: Path) -> Settings:
    """Settings of a service whose tokens are in a prefix of the test's own."""
    shutil.copy(sqlite_template, tmp_path / "foreshock.db")
    return settings_of(s3.url, tmp_path)


def settings_of(endpoint: str, folder: Path, secret: str = SECRET_KEY) -> Settings:
    """Return settings of a store at an endpoint."""
    return Settings(
        database_url=f"sqlite:///{folder / 'foreshock.db'}", store_url=f"s3://tokens/{folder.name}",
        store_endpoint=endpoint, store_access_key_id=SecretStr(ACCESS_KEY), store_secret_access_key=SecretStr(secret),
        store_timeout_seconds=3, store_temporary_folder=str(folder / "temporary"), max_body_bytes=1 << 26,
        step_grace_seconds=3600, sweep_interval_seconds=3600,
    )  # fmt: skip


@pytest.fixture
def store(settings: Settings) -> ObjectTokenStore:
    found = open_store(settings)
    assert isinstance(found, ObjectTokenStore)
    found.check_writable()
    return found


def put(store: ObjectTokenStore, name: str, data: bytes) -> None:
    temporary = store.temporary_file()
    temporary.write_bytes(data)
    store.publish(temporary, name)
    assert not temporary.exists()


def test_a_large_file_is_uploaded_in_parts_and_read_in_parts(store: ObjectTokenStore) -> None:
    data = np.random.default_rng(1).bytes(20_000_000)
    put(store, "run_1/0001/large", data)
    file = store.file("run_1/0001/large")
    assert file.exists()
    assert file.read_bytes() == data
    with file.open() as opened:
        opened.seek(11_000_000)
        assert opened.read(1000) == data[11_000_000:11_001_000]
        opened.seek(-10, 2)
        assert opened.read() == data[-10:]
    store.remove(file.name)
    assert not file.exists()
    store.remove(file.name)
    with pytest.raises(FileNotFoundError):
        file.read_bytes()


def test_files_are_listed_with_size_and_age(store: ObjectTokenStore) -> None:
    names = [shard_file_name("run_1", 1, step, 0, _DIGEST) for step in range(3)]
    for size, name in enumerate(names, 1):
        put(store, name, b"x" * size)
    put(store, shard_file_name("run_2", 1, 0, 0, _DIGEST), b"other")
    found = {file.name: file for file in store.list_files()}
    assert [found[name].size for name in names] == [1, 2, 3]
    assert len(found) == 4
    assert all(-5 < file.age_seconds < 60 for file in found.values())


@pytest.mark.parametrize("name", ["../outside", "a/../b", "/etc/passwd", "a//b", ""])
def test_a_name_outside_the_prefix_is_refused(store: ObjectTokenStore, name: str) -> None:
    with pytest.raises(ValueError, match="not inside"):
        store.file(name)


def test_a_service_stores_reads_and_sweeps(sender: Sender, server: RunningServer, store: ObjectTokenStore) -> None:
    for step in range(3):
        assert sender.put_shard(step, encode_rollouts(make_batch(20, seed=step))).status_code == 201
    assert sender.get("steps/1/tokens").status_code == 200
    assert len(list(store.list_files())) == 3
    put(store, shard_file_name(sender.run, 1, 1, 0, _DIGEST), b"orphan")
    database = server.app.state.context.database
    assert remove_orphans(store, database, 3600) == 0
    assert remove_orphans(store, database, -60) == 1
    assert len(list(store.list_files())) == 3
    # A missing object is 410, and the same bytes sent again restore it.
    (lost,) = [file.name for file in store.list_files() if "/000000002/" in file.name]
    store.remove(lost)
    assert sender.get("steps/2/tokens").status_code == 410
    assert sender.put_shard(2, encode_rollouts(make_batch(20, seed=2))).status_code == 200
    assert sender.get("steps/2/tokens").status_code == 200


def test_a_store_that_goes_away_loses_nothing_acknowledged_and_heals_by_itself(
    sender: Sender, http: httpx.Client, s3: ObjectStoreServer
) -> None:
    acknowledged: list[int] = []
    answers: list[httpx.Response] = []
    stop = threading.Event()

    def upload() -> None:
        step = 0
        while not stop.is_set():
            answer = sender.put_shard(step, encode_rollouts(make_batch(8, seed=step)))
            answers.append(answer)
            if answer.status_code in (200, 201):
                acknowledged.append(step)
                step += 1

    thread = threading.Thread(target=upload)
    thread.start()
    try:
        wait_until(lambda: len(acknowledged) >= 3)
        s3.kill()
        refused = len(answers)
        wait_until(lambda: any(answer.status_code == 503 for answer in answers[refused:]))
        assert http.get("/readyz").json()["checks"]["token_store"] == "failed: OSError"
        s3.start()
        before = len(acknowledged)
        wait_until(lambda: len(acknowledged) >= before + 3)
    finally:
        stop.set()
        thread.join()
    refusals = [answer for answer in answers if answer.status_code not in (200, 201)]
    assert refusals
    for answer in refusals:
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["type"].endswith("storage-unavailable")
        # Neither credentials nor addresses of the store.
        assert s3.url not in answer.text
        assert ACCESS_KEY not in answer.text
    for step in acknowledged:
        assert sender.get(f"steps/{step}/tokens").status_code == 200


@pytest.mark.parametrize(
    ("status", "code", "answered"),
    [(503, "SlowDown", 503), (403, "AccessDenied", 503), (500, "InternalError", 503), (507, "XMinioStorageFull", 507)],
)
def test_refusals_are_answered_with_a_time_to_try_again(
    settings: Settings, tmp_path: Path, decoders: DecoderPool, status: int, code: str, answered: int
) -> None:
    with (
        refusing_server(status, code) as refusing,
        RunningServer(create_app(settings_of(refusing, tmp_path), decoders)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        sender = start_run(http)
        answer = sender.put_shard(0, encode_rollouts(make_batch(2)))
        assert (answer.status_code, "retry-after" in answer.headers) == (answered, True)
    # Nothing was stored: the same bytes are new to a service whose store answers.
    with RunningServer(create_app(settings, decoders)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        again = Sender(http, sender.run).put_shard(0, encode_rollouts(make_batch(2)))
        assert again.status_code == 201


def test_a_wrong_key_is_refused_by_the_store(settings: Settings, tmp_path: Path) -> None:
    wrong = open_store(settings_of(settings.store_endpoint, tmp_path, secret="not-the-secret-of-the-tests"))
    with pytest.raises(OSError, match="refused or did not answer"):
        wrong.check_writable()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        wrong.check_exists()


@pytest.mark.parametrize("url", ["s3://", "s3://key:secret@bucket/prefix", "s3://bucket/prefix?endpoint=x"])
def test_a_url_that_names_no_bucket_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="without credentials") as caught:
        open_store(Settings(store_url=url))
    assert "key:secret" not in str(caught.value)


def test_credentials_are_masked(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = settings.printable()
    assert shown["FORESHOCK_STORE_URL"].startswith("s3://tokens/")
    assert SECRET_KEY not in str(shown)
    assert ACCESS_KEY not in str(shown)
    assert SECRET_KEY not in repr(open_store(settings).file("a"))
    monkeypatch.setenv("FORESHOCK_STORE_ACCESS_KEY_ID", "only-this")
    with pytest.raises(ConfigurationError, match="or neither"):
        load_settings()
