"""Every query of the dashboards returns data of real runs, and an alert of a run that goes bad reaches a webhook."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.dashboards.filling import filled, filled_expression
from tests.dashboards.monitored import (
    READER_PASSWORD,
    Monitored,
    firing,
    make_reader,
    monitored_service,
    queries,
    send_broken_run,
)
from tests.monitoring import ask
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    with monitored_service(tmp_path_factory.mktemp("monitored"), hurried=True) as found:
        yield found


@pytest.fixture(scope="module")
def broken(monitored: Monitored) -> str:
    """The id of a run that goes bad."""
    return send_broken_run(monitored.service)


@pytest.fixture(scope="module")
def reader(monitored: Monitored) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    make_reader(monitored.database)
    with psycopg.connect(
        monitored.database, user="foreshock_reader", password=READER_PASSWORD, autocommit=True
    ) as connection:
        yield connection


def test_every_promql_query_returns_data(monitored: Monitored, broken: str) -> None:
    expressions = [(where, filled_expression(expression, monitored.run)) for where, expression in queries("expr")]
    assert expressions

    def without_data() -> list[str]:
        return [
            f"{where}: {expression}" for where, expression in expressions if not ask(monitored.prometheus, expression)
        ]

    try:
        wait_until(lambda: not without_data(), seconds=60)
    except AssertionError:
        pytest.fail("no data for\n" + "\n".join(without_data()))


def test_every_sql_query_returns_data(monitored: Monitored, reader: psycopg.Connection[tuple[Any, ...]]) -> None:
    empty = [
        where for where, sql in queries("rawSql") if not reader.execute(filled(sql, monitored.run).encode()).fetchall()
    ]
    assert not empty


def test_address_of_the_pages_comes_from_the_service(monitored: Monitored) -> None:
    (found,) = ask(monitored.prometheus, "foreshock_build_info")
    assert found["metric"]["public_url"].startswith("http")


def test_alert_of_a_broken_run_reaches_the_webhook(monitored: Monitored, broken: str) -> None:
    alert = wait_until(lambda: firing(monitored, broken), seconds=60)[0]
    assert alert["status"] == "firing"
    assert alert["labels"]["run"] == broken
    assert alert["annotations"]["summary"] == "Run broken of default: log-probs are not finite"
    assert alert["annotations"]["url"].endswith("/runs/default/broken")
    monitored.service.patch(f"/v1/runs/{broken}", json={"state": "finished"}).raise_for_status()
    wait_until(lambda: [found for found in firing(monitored, broken) if found["status"] == "resolved"], seconds=400)
