"""What migrations share: rows that are converted in pages, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

__all__ = ["convert_rows"]

_AT_ONCE = 500


def convert_rows(
    connection: sa.Connection,
    table_name: str,
    key: Sequence[str],
    source: tuple[str, Any],
    target: tuple[str, Any],
    convert: Callable[[Any], Any],
) -> None:
    """Set the column `target` of each row to the converted `source`, each (name, type); NULL stays NULL.

    A row whose value is the same object afterwards is not written.
    """
    table = sa.table(table_name, *map(sa.column, key), sa.column(*source))
    changed = sa.table(table_name, *map(sa.column, key), sa.column(*target))
    columns = [table.c[name] for name in key]
    of_row = (changed.c[name] == sa.bindparam(f"key_{name}") for name in key)
    statement = sa.update(changed).where(*of_row).values({target[0]: sa.bindparam("converted", type_=target[1])})
    query = sa.select(*columns, table.c[source[0]]).where(table.c[source[0]].is_not(None)).order_by(*columns)
    after = None
    while True:
        page = query if after is None else query.where(sa.tuple_(*columns) > sa.tuple_(*map(sa.literal, after)))
        rows = connection.execute(page.limit(_AT_ONCE)).all()
        if not rows:
            return
        after = tuple(rows[-1][:-1])
        converted = [(row, convert(row[-1])) for row in rows]
        parameters = [
            {**{f"key_{name}": value for name, value in zip(key, row, strict=False)}, "converted": value}
            for row, value in converted
            if value is not row[-1]
        ]
        if parameters:
            connection.execute(statement, parameters)
