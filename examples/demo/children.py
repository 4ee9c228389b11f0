"""Child processes of the demo: each logs to a file, is watched, and ends with the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.demo.errors import DemoError

GRACE_SECONDS = 25.0
TAIL_LINES = 25


class Child:
    """One `foreshock` command in a process group of its own; leaving the context ends the whole group.

    Its own group means that Ctrl-C reaches only the demo, which then ends its children in order.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "foreshock.commands.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def require_running(self) -> None:
        """Raise DemoError with the end of the log if the process has ended."""
        if self.exit_code is not None:
            raise DemoError(f"the {self.name} ended with exit code {self.exit_code}.{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the log, to append to a message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError as error:
            return f" Its log {self.log} cannot be read: {error}"
        return "".join(f"\n    {line}" for line in [f"The end of {self.log}:", *lines])

    def stop(self) -> None:
        """End the process group with SIGTERM, then SIGKILL after `GRACE_SECONDS`."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        # Also if the process has ended: an engine that it started may still run.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
