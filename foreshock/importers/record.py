"""The record of imported dumps, so that an import that was stopped continues where it was."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreshock.errors import SpoolError

__all__ = ["ImportRecord", "signature_of"]

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

    A dump is added only after the service has confirmed it. A record that is lost costs time only: the service knows
    the bytes that it has.
    """

    def __init__(self, path: Path) -> None:
        """Read the record; a damaged one counts as empty."""
        self.path = path
        self._steps: dict[str, Signature] = {}
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
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
