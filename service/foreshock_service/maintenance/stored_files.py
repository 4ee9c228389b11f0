"""Shared parts of the maintenance commands: opening the service's data, and finding runs and steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from foreshock import errors
from foreshock_service.platform import context, uploads
from foreshock_service.platform.database import opening
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.decoding import pool
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.tokens import open_store
from foreshock_service.runs import events, shard_decoding
from foreshock_service.watch import delivery


@contextmanager
def maintenance_context(settings: Settings, shared: pool.DecoderPool | None = None) -> Iterator[context.ServiceContext]:
    """Open the parts of a service for a command; raises ConfigurationError if data is missing or of another release.

    A run that fails gets its alert; there are no other event handlers. `shared` is a pool of decoders to use; without
    it the command has its own pool.
    """
    store = open_store(settings)
    with opening.existing_database(settings.database_url) as database:
        store.check_exists()
        decoders = shared or pool.DecoderPool(settings, shard_decoding.PRELOAD)
        try:
            bus = context.EventBus()
            bus.subscribe(events.RunFailed, delivery.alert_of_failure)
            yield context.ServiceContext(settings, database, store, decoders, b"", uploads.UploadPlaces(1), events=bus)
        finally:
            if shared is None:
                decoders.close()


def run_called(session: Session, name: str) -> Run:
    """Return the only run with this id, key or name that was not deleted; raises ConfigurationError."""
    called = or_(Run.id == name, Run.key == name, Run.name == name)
    runs = session.scalars(select(Run).where(called, Run.deleted_at_us.is_(None)).order_by(Run.created_at_us)).all()
    if not runs:
        raise errors.ConfigurationError(f"there is no run {name}")
    if len(runs) > 1:
        raise errors.ConfigurationError(f"more than one run is called {name}: {', '.join(run.id for run in runs)}")
    return runs[0]
