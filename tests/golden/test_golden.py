"""What the service says of recorded runs is what it said before, and PostgreSQL gives the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from benchmarks.running_service import forked_service
from tests.golden.histories import histories
from tests.golden.store import RECORDED, SETTINGS, differences, read, results_of
from tests.service.postgres import start_postgres

NAMES = sorted(path.name.removesuffix(".json.gz") for path in RECORDED.glob("*.json.gz"))
# The other histories are scalars of runs like the last one, and no statement is theirs alone.
ON_POSTGRESQL = ("recorded", "faulty", "lag8-lr0.0003-seed2")
# One run of each kind: with probes, with faults of its data, collapsed with rollouts, and two that are scalars only.
QUICK = ("recorded", "faulty", "collapsed", "lag8-lr0.0003-seed2", "partial-lr0.0002-seed0")
CASES = [
    *(pytest.param("sqlite", name, marks=() if name in QUICK else pytest.mark.full) for name in NAMES),
    *(pytest.param("postgresql", name, marks=pytest.mark.full) for name in ON_POSTGRESQL),
]


@pytest.fixture(scope="module")
def address_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return the address of the one service with a database of this kind."""
    with ExitStack() as services:

        @cache
        def start(database: str) -> str:
            settings = dict(SETTINGS)
            if database == "postgresql":
                cluster = start_postgres()
                services.callback(cluster.stop)
                settings["FORESHOCK_DATABASE_URL"] = cluster.new_database()
            return services.enter_context(forked_service(tmp_path_factory.mktemp("golden"), **settings))

        yield start


@pytest.mark.slow
@pytest.mark.parametrize(("database", "name"), CASES)
def test_results_equal_the_golden_results(
    name: str, database: str, address_of: Callable[[str], str], tmp_path: Path
) -> None:
    history = histories().get(name)
    if history is None:
        pytest.skip(f"the recorded run {name} is not beside this checkout")
    expected = read(name)
    found = list(differences(expected, results_of(address_of(database), history, tmp_path, expected)))
    assert not found, "\n".join(found[:40])
