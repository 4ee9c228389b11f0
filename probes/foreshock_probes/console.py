"""The console output of a worker: lines with the time, and a progress bar on a terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foreshock_probes.scorers.request import Report


class WorkerConsole:
    """Writes log lines and progress to `stream` (default: stderr)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, soft_wrap=True, highlight=False)

    def log(self, text: str) -> None:
        """Write `text` as a line that starts with the time."""
        self._console.print(f"{time.strftime('%H:%M:%S')} {escape(text)}")

    @contextmanager
    def progress(self, title: str, tokens: int) -> Iterator[Report]:
        """Show a bar over `tokens` on a terminal; yield a function to call with the number of tokens done."""
        if not self._console.is_terminal:
            yield lambda _: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(escape(title), total=tokens)
            yield lambda done: bar.update(task, completed=done)
