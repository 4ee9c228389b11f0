"""The parts of a service that commands need, on the data of a service that exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.opening import existing_database
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.opening import open_store
from foreshock_service.platform.uploads import UploadPlaces
from foreshock_service.runs.rollouts.shards import PRELOAD


@contextmanager
def maintenance_context(settings: Settings, shared: DecoderPool | None = None) -> Iterator[ServiceContext]:
    """Give the parts of a service; raises ConfigurationError if data is missing or of another release.

    It has no event handlers. `shared` are decoders to use; without it there is a pool of the command's own.
    """
    store = open_store(settings)
    with existing_database(settings.database_url) as database:
        store.check_exists()
        decoders = shared or DecoderPool(settings, PRELOAD)
        try:
            yield ServiceContext(settings, database, store, decoders, b"", UploadPlaces(1))
        finally:
            if shared is None:
                decoders.close()
            store.close()
