"""The SQL statements that engines execute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import Engine, event


class Executed(NamedTuple):
    """A statement, with its number of rows of parameters."""

    text: str
    rows: int


@contextmanager
def executed(is_counted: Callable[[], bool] = lambda: True) -> Iterator[list[Executed]]:
    """Collect the statements of all engines that are executed while `is_counted`, as called in their thread."""
    seen: list[Executed] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if is_counted():
            seen.append(Executed(statement, len(parameters) if many else 1))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)
