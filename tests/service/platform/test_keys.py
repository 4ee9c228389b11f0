"""Keys expire, are rotated, note their last use, and have limits; sessions end with them."""

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import event

from foreshock import Client
from foreshock.clock import now_us
from foreshock.errors import ConfigurationError
from foreshock_service.platform import keys, security
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import ApiKey, RetiredSecret
from foreshock_service.platform.security import SESSION_COOKIE, sign_session
from foreshock_service.platform.settings import Settings
from foreshock_service.serving import prepare_keys
from tests.foreshock.batches import random_batch
from tests.service.server import RunningServer

HOUR = 3600.0


def make_key(database: Database, *scopes: security.Scope, expires_at_us: int | None = None) -> tuple[str, str]:
    """Make a key of every project; return its id and its secret."""
    secret = security.new_secret()
    chosen = scopes or (security.Scope.ADMIN,)
    key = database.write(
        lambda session: security.create_key(session, secret, "test", None, chosen, expires_at_us=expires_at_us)
    )
    return key.id, secret


def status_of(http: httpx.Client, secret: str) -> int:
    return http.get("/v1/runs", headers={"Authorization": f"Bearer {secret}"}).status_code


def rotate(database: Database, key_id: str, overlap_seconds: float) -> str:
    secret = security.new_secret()
    database.write(lambda session: security.rotate_key(session, key_id, secret, overlap_seconds))
    return secret


def test_expired_key_is_refused(http: httpx.Client, database: Database) -> None:
    _, ended = make_key(database, expires_at_us=now_us() - 1)
    _, valid = make_key(database, expires_at_us=now_us() + 60_000_000)
    assert (status_of(http, ended), status_of(http, valid)) == (401, 200)
    # The service stays protected.
    assert http.get("/v1/runs").status_code == 401


def test_rotated_key_accepts_both_secrets_during_the_overlap(http: httpx.Client, database: Database) -> None:
    key_id, first = make_key(database)
    second = rotate(database, key_id, HOUR)
    assert (status_of(http, first), status_of(http, second)) == (200, 200)
    third = rotate(database, key_id, 0.0)
    assert [status_of(http, secret) for secret in (first, second, third)] == [401, 401, 200]
    database.write(lambda session: security.revoke_key(session, key_id))
    assert status_of(http, third) == 401
    with pytest.raises(ConfigurationError, match="revoked or expired"):
        rotate(database, key_id, 0.0)


def test_no_secret_is_stored_after_a_rotation(database: Database) -> None:
    key_id, first = make_key(database)
    second = rotate(database, key_id, HOUR)
    with database.read() as session:
        stored = repr([vars(row) for row in (*session.query(ApiKey), *session.query(RetiredSecret))])
        assert security.was_ever_a_secret(session, first)
    assert first not in stored
    assert second not in stored


def test_rotated_bootstrap_key_does_not_come_back_at_the_next_start(
    settings: Settings, http: httpx.Client, database: Database
) -> None:
    secret = "a bootstrap key of a container"
    start = Settings(**(settings.model_dump() | {"bootstrap_key": secret}))
    prepare_keys(start)
    with database.read() as session:
        key_id = session.query(ApiKey).one().id
    rotate(database, key_id, 0.0)
    rotate(database, key_id, 0.0)
    prepare_keys(start)
    assert status_of(http, secret) == 401


def test_rotation_ends_the_sessions_of_the_key(app: FastAPI, http: httpx.Client, database: Database) -> None:
    key_id, _ = make_key(database)
    secret = app.state.context.session_secret
    before = sign_session(secret, key_id)
    rotate(database, key_id, HOUR)
    after = sign_session(secret, key_id)
    answers = [
        http.get("/v1/runs", headers={"Cookie": f"{SESSION_COOKIE}={cookie}"}).status_code for cookie in (before, after)
    ]
    assert answers == [401, 200]


def test_sweeper_writes_last_use_at_most_once_a_minute(app: FastAPI, http: httpx.Client, database: Database) -> None:
    key_id, secret = make_key(database)
    uses = app.state.context.key_uses

    def last_used() -> int | None:
        with database.read() as session:
            return session.query(ApiKey).one().last_used_at_us

    before = now_us()
    assert status_of(http, secret) == 200
    assert last_used() is None, "no request waits for the write"
    uses.write(database)
    first = last_used()
    assert first is not None
    assert before <= first <= now_us()
    statements: list[str] = []
    event.listen(database._write_engine, "before_cursor_execute", lambda *call: statements.append(str(call[2])))
    assert status_of(http, secret) == 200
    uses.write(database)
    assert last_used() == first
    assert not [each for each in statements if "UPDATE" in each]
    database.write(lambda session: session.query(ApiKey).update({"last_used_at_us": first - 61_000_000}))
    uses._written.clear()
    uses.write(database)
    assert (last_used() or 0) > first - 61_000_000, key_id


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_beyond_the_rate_are_refused_until_the_bucket_fills_again() -> None:
    clock = Clock()
    limits = keys.KeyLimits(2.0, clock)
    for _ in range(10):
        limits.admit("key_1")
    with pytest.raises(keys.TooManyRequests) as refused:
        limits.admit("key_1")
    assert refused.value.headers == {"Retry-After": "1"}
    limits.admit("key_2")
    clock.now += 1.0
    limits.admit("key_1")
    limits.admit("key_1")
    with pytest.raises(keys.TooManyRequests):
        limits.admit("key_1")
    # A rate below one request in five seconds admits one.
    slow = keys.KeyLimits(0.01, clock)
    slow.admit("key_1")
    with pytest.raises(keys.TooManyRequests) as refused:
        slow.admit("key_1")
    assert refused.value.headers == {"Retry-After": "100"}


@pytest.mark.settings(key_requests_per_second=0.5)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_limited_client_loses_nothing(server: RunningServer, database: Database, tmp_path: Path) -> None:
    _, secret = make_key(database, security.Scope.INGEST, security.Scope.READ)
    client = Client(server.url, api_key=secret, run_key="run", spool_directory=tmp_path / "spool")
    for step in range(6):
        client.log_rollouts(step, random_batch(step))
    status = client.flush(60)
    counters = client.counters.snapshot()
    client.close()
    assert status.complete
    assert counters.failed_requests > 0, "the limit was reached"
    assert counters.rejected == counters.dropped == 0
    assert counters.delivered >= 6


@pytest.mark.settings(key_requests_per_second=0.2)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_refusal_by_a_limit_is_a_429_with_retry_after(http: httpx.Client, database: Database) -> None:
    _, secret = make_key(database)
    statuses = [status_of(http, secret) for _ in range(2)]
    answer = http.get("/v1/runs", headers={"Authorization": f"Bearer {secret}"})
    assert http.get("/livez").status_code == 200
    assert statuses == [200, 429]
    assert answer.json()["type"] == "urn:foreshock:problem:too-many-requests"
    assert int(answer.headers["retry-after"]) >= 1


def test_key_is_looked_up_by_its_hash_so_that_a_guess_tells_nothing_of_it(database: Database) -> None:
    # A guess that begins as the key takes no longer than another one: its hash has nothing in common with the key's.
    _, secret = make_key(database)
    asked: list[str] = []
    with database.read() as session:
        connection = session.connection()
        event.listen(connection, "before_cursor_execute", lambda *call: asked.append(f"{call[2]} {call[3]}"))
        for guess in (secret[:-1] + "-", secret[: len(secret) // 2], secret):
            assert (security.find_key_by_secret(session, guess) is not None) == (guess == secret)
    assert len(asked) >= 3
    parts = [secret[place : place + 8] for place in range(len(secret) - 7)]
    assert not [text for text in asked if any(part in text for part in parts)]
