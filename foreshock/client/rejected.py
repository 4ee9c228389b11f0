"""Items that the service rejected: kept in the spool's folder `rejected` until a person sends them again or drops them.

rejected/1764000000000000-<digest>.body   the bytes of the request; missing beyond the size limit
rejected/1764000000000000-<digest>.json   {"problem": the answer, "request": the rest of the request}
rejected/damaged-…                        items that could not be read, as they were found
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshock.client.deliveries import Delivery
from foreshock.client.private_files import as_spool_error, is_private_folder, make_private, read_own, write_durably
from foreshock.clock import now_us
from foreshock.digests import digest_of_bytes
from foreshock.errors import SpoolError

__all__ = ["DAMAGED", "REJECTED_FOLDER", "RejectedItem", "RejectedItems"]

REJECTED_FOLDER = "rejected"
DAMAGED = "damaged-"


@dataclass(frozen=True, slots=True)
class RejectedItem:
    """One rejected item: its name, the answer of the service, and the rest of its request; both empty if unreadable."""

    path: Path
    problem: Mapping[str, Any]
    request: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the commands call it."""
        return self.path.stem

    @property
    def body_path(self) -> Path:
        """The file with its bytes."""
        return self.path.with_suffix(".body")

    @property
    def run(self) -> str:
        """Project and key of its run, `project/key`."""
        run = self.request.get("run")
        return f"{run.get('project')}/{run.get('key')}" if isinstance(run, Mapping) else ""

    def delivery(self) -> Delivery:
        """Return the request with its bytes. Raises ValueError if they are missing, damaged, or no client's request."""
        if not self.body_path.exists():
            raise ValueError("its bytes were not kept: max_rejected_bytes was reached")
        return Delivery.from_metadata(json.dumps(dict(self.request)), read_own(self.body_path))


class RejectedItems:
    """The rejected items of a spool directory. Several processes may use it at once."""

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        """Set the limit of the bodies in bytes. The folder is made by the first item."""
        self.folder = directory / REJECTED_FOLDER
        self._max_bytes = max_bytes

    def make_folder(self) -> Path:
        """Return the folder, made if it is missing. Raises SpoolError if it is not this user's alone."""
        make_private(self.folder.parent)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._require_own()
        return self.folder

    def keep(self, delivery: Delivery, problem: Mapping[str, Any]) -> Path:
        """Keep a rejected delivery and its problem; the body only within the size limit. Raises SpoolError."""
        with as_spool_error(self.folder.parent):
            folder = self.make_folder()
            digest = digest_of_bytes(delivery.body).removeprefix("sha256:")[:16]
            path = folder / f"{now_us()}-{digest}.body"
            kept = sum(file.stat().st_size for file in folder.glob("*.body"))
            if kept + len(delivery.body) <= self._max_bytes:
                write_durably(path, delivery.body)
            record = {"problem": dict(problem), "request": json.loads(delivery.metadata_json())}
            write_durably(path.with_suffix(".json"), json.dumps(record, indent=1, default=str).encode())
        return path

    def items(self) -> list[RejectedItem]:
        """Return the items, oldest first, damaged ones last. Raises SpoolError."""
        with as_spool_error(self.folder.parent):
            if not self.folder.is_dir():
                return []
            self._require_own()
            return [_read(path) for path in sorted(self.folder.glob("*.json"))]

    def drop(self, item: RejectedItem) -> None:
        """Delete an item. Raises SpoolError."""
        with as_spool_error(self.folder.parent):
            item.body_path.unlink(missing_ok=True)
            item.path.unlink(missing_ok=True)

    def note_problem(self, item: RejectedItem, problem: Mapping[str, Any]) -> None:
        """Replace the answer of the service after another try. Raises SpoolError."""
        with as_spool_error(self.folder.parent):
            record = {"problem": dict(problem), "request": dict(item.request)}
            write_durably(item.path, json.dumps(record, indent=1, default=str).encode())

    def _require_own(self) -> None:
        if not is_private_folder(self.folder):
            raise SpoolError(
                f"{self.folder} is not a folder of this user that only this user may write; remove it, or set "
                "FORESHOCK_SPOOL_DIRECTORY to a folder of your own"
            )


def _read(path: Path) -> RejectedItem:
    problem: object = None
    request: object = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(read_own(path))
        problem, request = record["problem"], record["request"]
    if not isinstance(problem, dict) or not isinstance(request, dict):
        return RejectedItem(path, {}, {})
    return RejectedItem(path, problem, request)
