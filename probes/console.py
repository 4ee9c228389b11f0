"""What a worker tells whoever watches it: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from probes.scorers.request import Report

__all__ = ["WorkerConsole"]


class WorkerConsole:
    """Lines and progress on `stream`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """A line, with the time in front of it."""
        self._console.print(f"{time.strftime('%H:%M:%S')} {escape(text)}")

    @contextmanager
    def progress(self, what: str, tokens: int) -> Iterator[Report]:
        """A bar (on a terminal) over `tokens` while the block runs; the value is called with the tokens done."""
        if not self._console.is_terminal:
            yield _ignore
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(escape(what), total=tokens)
            yield lambda done: bar.update(task, completed=done)


def _ignore(_: int) -> None:
    return None
