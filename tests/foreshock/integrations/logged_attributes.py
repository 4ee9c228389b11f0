"""What an integration logged beside the tokens, read from the service's store."""

import json
from dataclasses import replace
from typing import Any

from foreshock.rollouts import BatchAttributes, decode_rollouts
from tests.foreshock.running_service import RunningService

__all__ = ["declared", "logged_attributes"]


def logged_attributes(service: RunningService, run: str) -> BatchAttributes:
    """Return the attributes of the run's rollouts without versions, which must be the same in all shards."""
    files = [path for path in (service.folder / "data" / "tokens").rglob("*.parquet") if run in str(path)]
    logged = (decode_rollouts(path.read_bytes()).attributes for path in files)
    found = {replace(each, trainer_weights_version=None).to_json() for each in logged}
    assert len(found) == 1, (run, len(files), found)
    return BatchAttributes.from_json(found.pop())


def declared(service: RunningService, run: str) -> dict[str, Any]:
    """Return the known attributes of the run's rollouts but for versions and fingerprints."""
    known = replace(logged_attributes(service, run), engine_fingerprint=None, trainer_fingerprint=None)
    return dict(json.loads(known.to_json()))
