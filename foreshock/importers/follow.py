"""Find the dumps that a running trainer has finished, each once; the record of those that the service has."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foreshock.errors import SpoolError
from foreshock.importers.dumps import Dump, DumpFormat
from foreshock.parsing import parse_json

Signature = list[list[Any]]


def signature_of(files: Sequence[Path]) -> Signature:
    """Return name, size and time of change of each file. Raises FileNotFoundError if one is gone."""
    found: Signature = []
    for file in files:
        status = file.stat()
        found.append([file.name, status.st_size, status.st_mtime_ns])
    return found


class ImportRecord:
    """A JSON file with the step and the signature of every dump that the service has.

    A dump is added only after the service has confirmed it. A lost record only costs time: the service knows the bytes
    that it has.
    """

    def __init__(self, path: Path) -> None:
        """Read the record; a damaged one counts as empty."""
        self.path = path
        self._steps: dict[str, Signature] = {}
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            steps = parse_json(path.read_text(encoding="utf-8"))["steps"]
            self._steps = {str(step): signature for step, signature in steps.items()}

    def __len__(self) -> int:
        return len(self._steps)

    def signature(self, step: int) -> Signature | None:
        """Return the signature of a step's files when they were imported, None if they were not."""
        return self._steps.get(str(step))

    def add(self, step: int, signature: Signature) -> None:
        """Add a step and write the record, complete or not at all. Raises SpoolError."""
        self._steps[str(step)] = signature
        new = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with new.open("w", encoding="utf-8") as file:
                json.dump({"steps": self._steps}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except OSError as error:
            raise SpoolError(f"the record of imports {self.path} cannot be written: {error}") from error


_OLD_SECONDS = 60.0
"""Age from which a file counts as unchanged without being watched."""


class Follower:
    """The finished dumps of a folder that are not in the record.

    A dump with a marker is finished when the marker is there. Without one it is finished when its files have not
    changed for `settle_seconds` and end as the framework's writer ends them; a file that stays half-written is
    never imported.
    """

    def __init__(
        self,
        kind: DumpFormat,
        folder: Path,
        record: ImportRecord,
        *,
        settle_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind = kind
        self._folder = folder
        self._record = record
        self._settle_seconds = settle_seconds
        self._clock = clock
        self._seen: dict[int, tuple[Signature, float]] = {}
        self._refused: dict[int, Signature] = {}
        self.waiting: dict[int, str] = {}
        """Steps that are there and not finished, with the reason."""
        self.changed: set[int] = set()
        """Steps whose files changed after they were imported."""

    def finished(self) -> list[tuple[Dump, Signature]]:
        """Return the finished dumps that are not imported yet, by step."""
        found = []
        self.waiting = {}
        for dump in self._kind.find(self._folder) if self._folder.exists() else ():
            try:
                signature = signature_of(dump.files)
            except OSError:
                # The trainer moved or removed it meanwhile.
                continue
            imported = self._record.signature(dump.step)
            if imported is not None:
                if imported != signature:
                    self.changed.add(dump.step)
                continue
            if self._refused.get(dump.step) == signature:
                continue
            reason = self._unfinished(dump, signature)
            if reason:
                self.waiting[dump.step] = reason
            else:
                found.append((dump, signature))
        return found

    def refuse(self, dump: Dump, signature: Signature) -> None:
        """Do not return this dump again unless its files change."""
        self._refused[dump.step] = signature

    def _unfinished(self, dump: Dump, signature: Signature) -> str | None:
        if dump.missing:
            return f"{dump.missing[0]} is missing"
        if dump.finished is not None:
            return None if dump.finished else "its marker is missing"
        before, since = self._seen.get(dump.step, (None, 0.0))
        if before != signature:
            since = self._clock()
            self._seen[dump.step] = (signature, since)
        newest = max(int(each[2]) for each in signature) / 1e9
        if self._clock() - since < self._settle_seconds and time.time() - newest < max(
            _OLD_SECONDS, self._settle_seconds
        ):
            return "its files are new"
        cut = next((file.name for file in dump.files if not self._kind.has_end(file)), None)
        return f"{cut} is half-written" if cut is not None else None
