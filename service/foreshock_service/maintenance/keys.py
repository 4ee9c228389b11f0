"""Actions of `foreshock keys`, on the database that the settings name."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import httpx
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock import clock, errors
from foreshock.client.connection import configured
from foreshock_service.platform import audit, security, settings
from foreshock_service.platform.database.opening import existing_database, is_missing, prepare_database, shown
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import ApiKey

_DAY_US = 86_400_000_000


def create(name: str, project: str | None, scopes: Sequence[str], expires_days: float | None) -> None:
    """Make a key and print its secret, which is stored nowhere."""
    secret = security.new_secret()
    expires = None if expires_days is None else clock.now_us() + int(expires_days * _DAY_US)

    def make(session: Session) -> ApiKey:
        chosen = {security.Scope(scope) for scope in scopes}
        key = security.create_key(session, secret, name, project, chosen, expires_at_us=expires)
        after = security.describe(key)
        audit.record(session, security.operator(), "key.create", key.id, project=key.project, after=after)
        return key

    with _database(make_missing=True) as database:
        key = database.write(make)
    print(f"{key.id}: {', '.join(key.scopes)}; {_project(key.project)}{_ends(key)}. Shown this once:\n{secret}")


def show() -> None:
    with _database() as database, database.read() as session:
        for key in session.scalars(select(ApiKey).order_by(ApiKey.created_at_us, ApiKey.id)):
            used = "never used" if key.last_used_at_us is None else f"used {_time(key.last_used_at_us)}"
            shown = [key.id, key.name, _project(key.project), ",".join(key.scopes), _time(key.created_at_us)]
            print("\t".join([*shown, _state(key), used]))


def rotate(key_id: str, overlap_hours: float) -> None:
    """Give a key another secret and print it; raises ConfigurationError if there is no valid key with this id."""
    secret = security.new_secret()

    def change(session: Session) -> None:
        key = security.rotate_key(session, key_id, secret, overlap_hours * 3600)
        after = {"overlap_hours": overlap_hours}
        audit.record(session, security.operator(), "key.rotate", key.id, project=key.project, after=after)

    with _database() as database:
        database.write(change)
    print(f"{key_id} has another secret; the one before is valid for {overlap_hours:g} h. Shown this once:\n{secret}")


def revoke(key_id: str) -> None:
    """Revoke a key; raises ConfigurationError if there is none with this id."""

    def change(session: Session) -> None:
        key = security.revoke_key(session, key_id)
        before = security.describe(key)
        audit.record(session, security.operator(), "key.revoke", key.id, project=key.project, before=before)

    with _database() as database:
        database.write(change)
    print(f"{key_id} is revoked")


@contextmanager
def _database(*, make_missing: bool = False) -> Iterator[Database]:
    """Open the database of the settings. `make_missing`: create it, so that keys can precede the first start."""
    loaded = settings.load_settings()
    url = loaded.database_url
    if make_missing:
        made = is_missing(url)
        if made:
            _refuse_beside_a_service(url)
        prepare_database(url, upgrade_older=False)
        if made:
            print(f"made the database {shown(url)}: the service must use it (FORESHOCK_DATABASE_URL)", file=sys.stderr)
    with audit.on_stderr(loaded.log_format), existing_database(url) as database:
        yield database


def _refuse_beside_a_service(url: str) -> None:
    """Raise ConfigurationError if a service answers here: it uses another database and would not know the new key."""
    address, _ = configured(None, None)
    try:
        answers = httpx.get(f"{address}/livez", timeout=2.0).json() == {"status": "alive"}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return
    if answers:
        raise errors.ConfigurationError(
            f"{shown(url)} does not exist, and the service at {address} uses another database; set "
            "FORESHOCK_DATABASE_URL to that of the service, and run this where it runs"
        )


def _project(project: str | None) -> str:
    return "every project" if project is None else f"project {project}"


def _time(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="seconds")


def _ends(key: ApiKey) -> str:
    return "" if key.expires_at_us is None else f"; expires {_time(key.expires_at_us)}"


def _state(key: ApiKey) -> str:
    if key.revoked_at_us is not None:
        return f"revoked {_time(key.revoked_at_us)}"
    return ("active" if security.is_valid(key) else "expired") + _ends(key)
