"""What commands need on the data of a service that exists: its parts, and runs as an operator names them."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from foreshock.errors import ConfigurationError
from foreshock_service.platform import context, uploads
from foreshock_service.platform.database.opening import existing_database
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import open_store
from foreshock_service.runs.shard_decoding import PRELOAD


@contextmanager
def maintenance_context(settings: Settings, shared: DecoderPool | None = None) -> Iterator[context.ServiceContext]:
    """Give the parts of a service; raises ConfigurationError if data is missing or of another release.

    It has no event handlers. `shared` are decoders to use; without it there is a pool of the command's own.
    """
    store = open_store(settings)
    with existing_database(settings.database_url) as database:
        store.check_exists()
        decoders = shared or DecoderPool(settings, PRELOAD)
        try:
            yield context.ServiceContext(settings, database, store, decoders, b"", uploads.UploadPlaces(1))
        finally:
            if shared is None:
                decoders.close()


def run_called(session: Session, name: str) -> Run:
    """Return the only run with this id, key or name that was not deleted; raises ConfigurationError."""
    called = or_(Run.id == name, Run.key == name, Run.name == name)
    runs = session.scalars(select(Run).where(called, Run.deleted_at_us.is_(None)).order_by(Run.created_at_us)).all()
    if not runs:
        raise ConfigurationError(f"there is no run {name}")
    if len(runs) > 1:
        raise ConfigurationError(f"more than one run is called {name}: {', '.join(run.id for run in runs)}")
    return runs[0]
