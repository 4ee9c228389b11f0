"""API keys for tests."""

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import Scope, create_key, new_secret


def make_key(database: Database, *scopes: Scope, project: str | None = None) -> tuple[str, dict[str, str]]:
    """Return the id of a new key, and the headers of a request with it."""
    secret = new_secret()
    key = database.write(lambda session: create_key(session, secret, "test", project, scopes).id)
    return key, {"Authorization": f"Bearer {secret}"}
