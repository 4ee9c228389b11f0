"""Actions of `foreshock keys`, on the database that the settings name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from foreshock.errors import ConfigurationError
from service.platform.database.opening import existing_database, prepare_database
from service.platform.database.session import Database
from service.platform.keys.service import Scope, create_key, list_keys, new_secret, revoke_key
from service.platform.settings import load_settings


def create(name: str, project: str | None, scopes: Sequence[str]) -> None:
    """Make a key and print its secret, which is stored nowhere."""
    secret = new_secret()
    with _database() as database:
        key = database.write(
            lambda session: create_key(session, secret, name, project, {Scope(scope) for scope in scopes})
        )
    print(f"{key.id}: {', '.join(key.scopes)}; {_project(key.project)}. Shown this once:\n{secret}")


def show() -> None:
    """Print every key."""
    with _database() as database, database.read() as session:
        for key in list_keys(session):
            state = "active" if key.revoked_at_us is None else f"revoked {_time(key.revoked_at_us)}"
            print(
                "\t".join(
                    [key.id, key.name, _project(key.project), ",".join(key.scopes), _time(key.created_at_us), state]
                )
            )


def revoke(key_id: str) -> None:
    """Revoke a key; raises ConfigurationError if there is none with this id."""
    with _database() as database:
        if not database.write(lambda session: revoke_key(session, key_id)):
            raise ConfigurationError(f"there is no key {key_id}: see `foreshock keys list`")
    print(f"{key_id} is revoked")


@contextmanager
def _database() -> Iterator[Database]:
    # A key may be made before the service first starts; an older database is left to the service.
    url = load_settings().database_url
    prepare_database(url, upgrade_older=False)
    with existing_database(url) as database:
        yield database


def _project(project: str | None) -> str:
    return "every project" if project is None else f"project {project}"


def _time(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="seconds")
