"""`foreshock upgrade` on the database that the settings name."""

from __future__ import annotations

from foreshock.errors import ConfigurationError
from foreshock_service.platform.database.opening import is_missing, prepare_database, shown
from foreshock_service.platform.database.schema import known_revisions, newest_revision
from foreshock_service.platform.settings import load_settings


def upgrade(revision: str | None) -> None:
    """Migrate the database to a revision (None: the newest) and print which one. Raises ConfigurationError."""
    if revision is not None and revision not in known_revisions():
        raise ConfigurationError(f"there is no revision {revision}; revisions: {', '.join(sorted(known_revisions()))}")
    url = load_settings().database_url
    missing = is_missing(url)
    prepare_database(url, revision=revision or "head")
    print(f"the {'new ' if missing else ''}database {shown(url)} has revision {revision or newest_revision()}")
