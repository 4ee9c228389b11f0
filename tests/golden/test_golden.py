"""What the service says of recorded runs is what it said before, and PostgreSQL gives the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.running_service import forked_service
from tests.golden.histories import histories
from tests.golden.store import RECORDED, SETTINGS, differences, read, results_of
from tests.service.postgres import start_postgres

NAMES = sorted(path.name.removesuffix(".json.gz") for path in RECORDED.glob("*.json.gz"))
# The other histories are scalars of runs like the last one, and no statement is theirs alone.
ON_POSTGRESQL = ("recorded", "faulty", "lag8-lr0.0003-seed2")
CASES = [("sqlite", name) for name in NAMES] + [("postgresql", name) for name in ON_POSTGRESQL]


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("golden")
    if request.param == "sqlite":
        with forked_service(folder, **SETTINGS) as url:
            yield url
        return
    cluster = start_postgres()
    try:
        database = cluster.new_database()
        with forked_service(folder, FORESHOCK_DATABASE_URL=database, **SETTINGS) as url:
            yield url
    finally:
        cluster.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("service", "name"), CASES, indirect=["service"])
def test_results_equal_the_golden_results(name: str, service: str, tmp_path: Path) -> None:
    history = histories().get(name)
    if history is None:
        pytest.skip(f"the recorded run {name} is not beside this checkout")
    expected = read(name)
    found = list(differences(expected, results_of(service, history, tmp_path, expected)))
    assert not found, "\n".join(found[:40])
