"""Fixtures of the service's tests: real SQLite and PostgreSQL databases, the application, and a real HTTP server.

`database_url` is parametrised over both databases, and with it everything that is made from it: `database`,
`settings`, `app`, `server`, `http`, `sender`.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from foreshock_service.app import create_app
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.opening import upgrade
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Base
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.replay.attribution.service import Attributing
from foreshock_service.runs.shard_decoding import PRELOAD
from foreshock_service.watch import advance
from foreshock_service.watch.advance import Advancing
from tests.service.advancing import advance_all
from tests.service.engines import spare_engines
from tests.service.postgres import PostgresCluster, start_postgres
from tests.service.sending import Sender, start_run
from tests.service.server import NO_CERTIFICATES, RunningServer
from tests.service.watch.recorded import RecordedRun

spare_engines()


@pytest.fixture(autouse=True)
def advance_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from a write is there when its answer is: the worker's part is done before the write returns."""
    monkeypatch.setattr(Advancing, "wake", advance_all)
    monkeypatch.setattr(Attributing, "wake", Attributing.run_round)
    monkeypatch.setattr(advance, "INTERVAL_SECONDS", 3600.0)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresCluster]:
    """A PostgreSQL cluster of this test session's own."""
    cluster = start_postgres()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def migrated_postgres(postgres: PostgresCluster) -> str:
    """The URL of a migrated PostgreSQL database that tests use one after the other."""
    url = postgres.new_database()
    upgrade(url)
    return url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file that tests copy."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a migrated database without a row."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "foreshock.db")
        yield f"sqlite:///{tmp_path / 'foreshock.db'}"
        return
    url: str = request.getfixturevalue("migrated_postgres")
    yield url
    cluster: PostgresCluster = request.getfixturevalue("postgres")
    cluster.empty(url, [table.name for table in reversed(Base.metadata.sorted_tables)])


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """The service's own access to the fresh database."""
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture(scope="session")
def decoders() -> Iterator[DecoderPool]:
    """One pool of decoder processes for the whole test session; with nothing to compile, which takes a minute."""
    pool = DecoderPool(Settings(decode_processes=2, max_body_bytes=1 << 20, token_pass="numpy"), PRELOAD)
    pool.warm_up()
    yield pool
    pool.close()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark of tests whose service has settings of their own."""
    config.addinivalue_line("markers", "settings(**changes): the service of this test has these settings")


@pytest.fixture
def settings(database_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Settings:
    """Settings with small caps, so that tests can go beyond them; the mark `settings` changes them."""
    usual = Settings(
        database_url=database_url, store_url=str(tmp_path / "tokens"), max_body_bytes=1 << 20, max_json_bytes=1 << 18,
        step_grace_seconds=3600, sweep_interval_seconds=3600,
    )  # fmt: skip
    marked = request.node.get_closest_marker("settings")
    return usual.model_copy(update=marked.kwargs) if marked else usual


@pytest.fixture
def app(settings: Settings, decoders: DecoderPool) -> Iterator[FastAPI]:
    """The application; `server` (or a TestClient) runs its lifespan."""
    application = create_app(settings, decoders)
    yield application
    # A test may use it without its lifespan, which would close the connections.
    application.state.context.database.close()


@pytest.fixture
def server(app: FastAPI) -> Iterator[RunningServer]:
    """The application behind uvicorn on a free loopback port."""
    with RunningServer(app) as running:
        yield running


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A client of the running server."""
    with httpx.Client(base_url=server.url, timeout=60, verify=NO_CERTIFICATES) as client:
        yield client


@pytest.fixture
def sender(http: httpx.Client) -> Sender:
    """The first attempt of a new run."""
    return start_run(http)


@pytest.fixture
def context(app: FastAPI) -> ServiceContext:
    """The parts of the application."""
    found: ServiceContext = app.state.context
    return found


@pytest.fixture
def recorded(database: Database) -> RecordedRun:
    """A new run whose steps the test closes itself."""
    return RecordedRun(database).begin()
