"""Items that the service rejected: kept in the spool's folder `rejected` until a person sends them again or drops them.

rejected/1764000000000000-<crc32>.body   the bytes of the request; missing beyond the size limit
rejected/1764000000000000-<crc32>.json   {"problem": the answer, "request": the rest of the request}
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
from foreshock.client.private_files import as_spool_error, is_private_folder, make_private, read_own, write_whole
from foreshock.clock import now_us
from foreshock.errors import SpoolError

REJECTED_FOLDER = "rejected"
DAMAGED = "damaged-"
ITEM = ".item"
"""The ending of an undelivered item, which a damaged one keeps."""


@dataclass(frozen=True, slots=True)
class RejectedItem:
    """One rejected item: its name, the answer of the service, and the rest of its request; both empty if unreadable."""

    path: Path
    problem: Mapping[str, Any]
    request: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> RejectedItem:
        """Read the item of a `.json` file."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(read_own(path))
            if isinstance(record["problem"], dict) and isinstance(record["request"], dict):
                return cls(path, record["problem"], record["request"])
        return cls(path, {}, {})

    @property
    def name(self) -> str:
        """The name that the commands use."""
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
    """The rejected items of a spool directory, kept until a person sends them again or drops them.

    Several processes may use it at once.
    """

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
            metadata = delivery.metadata()
            path = folder / f"{now_us()}-{metadata['crc32']:08x}.body"
            kept = sum(file.stat().st_size for file in folder.glob("*.body"))
            if kept + len(delivery.body) <= self._max_bytes:
                write_whole(path, delivery.body, durable=True)
            try:
                self._write_record(path.with_suffix(".json"), problem, metadata)
            except OSError:
                # Without its record the body is useless, and would take the room that the next try needs.
                path.unlink(missing_ok=True)
                raise
        return path

    def items(self) -> list[RejectedItem]:
        """Return the items, oldest first, damaged ones last. Raises SpoolError."""
        with as_spool_error(self.folder.parent):
            if not self.folder.is_dir():
                return []
            self._require_own()
            found = [*self.folder.glob("*.json"), *self.folder.glob(f"{DAMAGED}*{ITEM}")]
            return [RejectedItem.read(path) for path in sorted(found)]

    def drop(self, item: RejectedItem) -> None:
        """Delete an item. Raises SpoolError."""
        with as_spool_error(self.folder.parent):
            item.body_path.unlink(missing_ok=True)
            item.path.unlink(missing_ok=True)

    def note_problem(self, item: RejectedItem, problem: Mapping[str, Any]) -> None:
        """Replace the answer of the service after another try. Raises SpoolError."""
        with as_spool_error(self.folder.parent):
            self._write_record(item.path, problem, item.request)

    def _write_record(self, path: Path, problem: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        record = {"problem": dict(problem), "request": dict(request)}
        write_whole(path, json.dumps(record, indent=1, default=str).encode(), durable=True)

    def _require_own(self) -> None:
        if not is_private_folder(self.folder):
            raise SpoolError(
                f"{self.folder} is not a folder of this user that only this user may write; remove it, or set "
                "FORESHOCK_SPOOL_DIRECTORY to a folder of your own"
            )
