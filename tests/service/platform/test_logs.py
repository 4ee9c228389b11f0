"""Lines of the log: no raw control character, no secret, a request id where there is a request."""

import json
import logging
import sys
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from foreshock_service.platform.logs import _known_secrets, line_formatter

ATTACK = "a\x1b[2J\x1b]0;title\x07\r\n2026-01-01 INFO forged\x00\x9b31m\u2028\u202eevil"


@pytest.fixture
def formatters(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, logging.Formatter]]:
    """Both formatters, of a process whose settings have secrets."""
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", "postgresql://user:the-db-password@host/name")
    monkeypatch.setenv("FORESHOCK_SESSION_SECRET", "the secret that signs sessions")
    monkeypatch.setenv("FORESHOCK_BOOTSTRAP_KEY", "the key of the first administrator")
    monkeypatch.setenv("FORESHOCK_STORE_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("FORESHOCK_STORE_SECRET_ACCESS_KEY", "the secret of the store")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the/s3+secret")
    _known_secrets.cache_clear()
    yield {"text": line_formatter("text"), "json": line_formatter("json")}
    _known_secrets.cache_clear()


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("foreshock.test", logging.ERROR, __file__, 1, message, arguments, None)
    made.__dict__.update(extra)
    return made


@pytest.mark.parametrize("kind", ["text", "json"])
def test_control_characters_are_escaped(formatters: dict[str, logging.Formatter], kind: str) -> None:
    line = formatters[kind].format(record("path %s", ATTACK, user_agent=ATTACK))
    assert line.isprintable()
    assert "forged" in line


@pytest.mark.parametrize("kind", ["text", "json"])
def test_traceback_cannot_forge_a_line(formatters: dict[str, logging.Formatter], kind: str) -> None:
    try:
        raise ValueError(ATTACK)
    except ValueError:
        line = formatters[kind].format(record("failed", exc_info=sys.exc_info()))
    first, *rest = line.split("\n")
    assert all(each.isprintable() for each in [first, *rest])
    assert all(each.startswith("    ") for each in rest)
    if kind == "json":
        assert "ValueError" in json.loads(line)["exception"]


def test_postgresql_that_does_not_answer_is_a_message_without_a_traceback(
    formatters: dict[str, logging.Formatter],
) -> None:
    try:
        raise OperationalError("SELECT 1", {}, psycopg.OperationalError("connection refused"))
    except OperationalError:
        line = formatters["text"].format(record("the jobs failed", exc_info=sys.exc_info()))
    assert line.split("\n")[1:] == ["    connection refused"]


@pytest.mark.parametrize("kind", ["text", "json"])
@pytest.mark.parametrize(
    "secret",
    [
        "the-db-password", "the secret that signs sessions", "the key of the first administrator", "the/s3+secret",
        "the secret of the store",
        "fsk_abcdefghijklmnop", "Bearer something-secret", "foreshock_session=abc.def", "s3://id:pass@bucket/x",
    ],
)  # fmt: skip
def test_secrets_are_masked(formatters: dict[str, logging.Formatter], kind: str, secret: str) -> None:
    line = formatters[kind].format(record("got %s there", secret, user_agent=secret))
    assert secret not in line
    assert "********" in line


def test_json_line_has_its_fields(formatters: dict[str, logging.Formatter]) -> None:
    line = json.loads(formatters["json"].format(record("served", status=200, path="/livez")))
    assert (line["level"], line["logger"], line["message"]) == ("error", "foreshock.test", "served")
    assert (line["status"], line["path"]) == (200, "/livez")
    assert line["time"].endswith("Z")
    assert "request_id" not in line
