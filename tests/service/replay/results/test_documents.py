"""Results that are documents are kept when the database of an earlier schema is migrated or converted."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from alembic.util import load_python_file
from sqlalchemy import text

from foreshock_service.platform.database.engine import make_engine
from foreshock_service.platform.database.opening import MIGRATIONS, newest_revision, upgrade
from tests.service.replay.results.test_layers import ABLE, DEPARTING, PAIR, STEP, ask, found, put_layers
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import announce_checkpoint, take_lease

TABLES_OF_THEIR_OWN = "0041"


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run with a published comparison by layer."""
    run = start_run(http)
    run.put_shard(STEP, make_batch(12)).raise_for_status()
    announce_checkpoint(run, STEP)
    ask(run).raise_for_status()
    holder = take_lease(http, scorers=ABLE)
    put_layers(holder, found(*DEPARTING)).raise_for_status()
    holder.complete().raise_for_status()
    return run


def layers_of(run: Sender) -> Any:
    return run.get(f"steps/{STEP}/layers").raise_for_status().json()


def test_documents_of_tables_of_their_own_are_read_after_the_migration(run: Sender, database_url: str) -> None:
    before = layers_of(run)
    upgrade(database_url, TABLES_OF_THEIR_OWN)
    upgrade(database_url)
    assert layers_of(run) == before
    assert before["items"][0]["pair"] == "/".join(PAIR)


def test_documents_of_tables_of_their_own_are_read_after_the_conversion(run: Sender, database_url: str) -> None:
    before = layers_of(run)
    upgrade(database_url, TABLES_OF_THEIR_OWN)
    earlier: Any = load_python_file(str(MIGRATIONS), "earlier_schemas.py")
    earlier._convert_blobs = lambda connection: None  # these are compressed as the newest are
    engine = make_engine(database_url)
    with engine.begin() as connection:
        earlier.convert(connection, "0039")
        connection.execute(text("UPDATE alembic_version SET version_num = :newest"), {"newest": newest_revision()})
    engine.dispose()
    assert layers_of(run) == before
