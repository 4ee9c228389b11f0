"""Statements that are compiled once per database: for what runs whenever a step closes.

`Session.execute` makes a cache key of the whole statement at each call, which for an upsert over the columns of
`measurements` takes longer than SQLite does. A prepared statement is sent as text, with its parameters and results
converted by their column types; ORM objects of the session that are not flushed yet are not flushed by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.selectable import SelectBase
from sqlalchemy.types import TypeEngine

_Converter = Callable[[Any], Any]
_CONNECTIONS: WeakKeyDictionary[SessionTransaction, tuple[Connection, bool]] = WeakKeyDictionary()


@dataclass(slots=True)
class _Compiled:
    """The text of a statement for one database, its parameters in order (None: by name), and the conversions."""

    dialect: Dialect
    text: str
    order: tuple[str, ...] | None
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    converters: Mapping[str, _Converter]
    result_types: tuple[TypeEngine[Any], ...]
    result_converters: list[tuple[int, _Converter]] | None = None

    def parameters(self, given: Mapping[str, Any]) -> Any:
        """Return the parameters in the form of the driver. Raises KeyError for a missing one."""
        values = {**self.defaults, **given} if self.defaults else given
        if self.converters:
            values = {**values, **{name: convert(values[name]) for name, convert in self.converters.items()}}
        if self.order is not None:
            return tuple([values[name] for name in self.order])
        return {name: values[name] for name in self.names}

    def converted(self, cursor: Any) -> list[tuple[Any, ...]]:
        """Return the rows with the Python values of their column types."""
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        if self.result_converters is None:
            # What PostgreSQL's driver returns depends on the type that the server names.
            codes = [column[1] for column in cursor.description]
            each = [
                result_type.result_processor(self.dialect, code)
                for result_type, code in zip(self.result_types, codes, strict=True)
            ]
            self.result_converters = [(place, convert) for place, convert in enumerate(each) if convert is not None]
        if not self.result_converters:
            return rows
        found = []
        for row in rows:
            values = list(row)
            for place, convert in self.result_converters:
                values[place] = convert(values[place])
            found.append(tuple(values))
        return found


class Prepared:
    """A statement with bind parameters, without lists of variable length (`expanding`)."""

    def __init__(self, statement: ClauseElement, columns: Sequence[str] | None = None) -> None:
        self._statement = statement
        # Of an INSERT: the columns that every row gives.
        self._columns = None if columns is None else list(columns)
        self._compiled: dict[str, _Compiled] = {}

    def rows(self, session: Session, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT."""
        connection, is_listened_to = _connection_of(session)
        compiled = self._of(connection.dialect)
        given = compiled.parameters(parameters)
        if is_listened_to:
            return compiled.converted(connection.exec_driver_sql(compiled.text, given).cursor)
        return _send(connection, compiled.text, given, read=compiled.converted)

    def first(self, session: Session, parameters: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return the first row of a SELECT, None if there is none."""
        found = self.rows(session, parameters)
        return found[0] if found else None

    def run(self, session: Session, *rows: Mapping[str, Any]) -> None:
        """Execute an INSERT, UPDATE or DELETE with each of these parameters."""
        connection, is_listened_to = _connection_of(session)
        compiled = self._of(connection.dialect)
        parameters = [compiled.parameters(row) for row in rows]
        given = parameters[0] if len(parameters) == 1 else parameters
        if is_listened_to:
            connection.exec_driver_sql(compiled.text, given)
        else:
            _send(connection, compiled.text, given, many=len(parameters) != 1)

    def _of(self, dialect: Dialect) -> _Compiled:
        found = self._compiled.get(dialect.name)
        if found is None:
            # Two threads may both compile it; the results are equal.
            found = self._compiled[dialect.name] = _compile(self._statement, dialect, self._columns)
        return found


def execute_text(connection: Connection, text: str) -> None:
    """Execute a text without parameters, such as the BEGIN of every transaction."""
    if _is_listened_to(connection):
        connection.exec_driver_sql(text)
    else:
        _send(connection, text)


def _is_listened_to(connection: Connection) -> bool:
    """Return whether something listens to statements, such as a test or a tracer; the driver tells it nothing."""
    return bool(connection.dispatch.before_cursor_execute or connection.dispatch.after_cursor_execute)


def _connection_of(session: Session) -> tuple[Connection, bool]:
    """Return the connection of the session's transaction, and whether something listens to its statements.

    Remembered: closing a step asks for it some 25 times, and the session looks it up anew each time.
    """
    transaction = session.get_transaction()
    found = None if transaction is None else _CONNECTIONS.get(transaction)
    if found is None:
        connection = session.connection()
        found = connection, _is_listened_to(connection)
        if (begun := session.get_transaction()) is not None:
            _CONNECTIONS[begun] = found
    return found


def _send(
    connection: Connection,
    text: str,
    parameters: Any = None,
    *,
    many: bool = False,
    read: Callable[[Any], list[tuple[Any, ...]]] = lambda _: [],
) -> list[tuple[Any, ...]]:
    """Execute a text by a cursor of the driver in the connection's transaction, and return what `read` reads of it.

    `many`: once for each of the parameters. Raises the driver's errors as SQLAlchemy does, whose own
    `Connection.exec_driver_sql` makes a context and a result of each statement, which takes 0.05 to 0.1 ms.
    """
    driver, dialect = connection.connection, connection.dialect
    cursor = driver.cursor()
    try:
        if many:
            cursor.executemany(text, parameters)
        elif parameters is None:
            cursor.execute(text)
        else:
            cursor.execute(text, parameters)
        return read(cursor)
    except dialect.loaded_dbapi.Error as error:
        is_lost = dialect.is_disconnect(error, driver, cursor)
        if is_lost:
            connection.invalidate(error)
        raise DBAPIError.instance(
            text, parameters, error, dialect.loaded_dbapi.Error, connection_invalidated=is_lost, dialect=dialect
        ) from error
    finally:
        if not connection.invalidated:
            cursor.close()


def _compile(statement: ClauseElement, dialect: Dialect, columns: list[str] | None) -> _Compiled:
    compiled = statement.compile(dialect=dialect, column_keys=columns)
    assert isinstance(compiled, SQLCompiler)
    names = tuple(compiled.bind_names.values())
    converters = {
        compiled.bind_names[bind]: convert
        for bind in compiled.bind_names
        if (convert := bind.type.dialect_impl(dialect).bind_processor(dialect)) is not None
    }
    result_types: tuple[TypeEngine[Any], ...] = ()
    if isinstance(statement, SelectBase):
        result_types = tuple(column.type.dialect_impl(dialect) for column in statement.selected_columns)
    defaults = {name: value for name, value in compiled.params.items() if value is not None}
    if isinstance(statement, UpdateBase) and columns is not None:
        defaults = {name: value for name, value in defaults.items() if name not in columns}
    order = tuple(compiled.positiontup) if compiled.positional and compiled.positiontup is not None else None
    return _Compiled(dialect, compiled.string, order, names, defaults, converters, result_types)
