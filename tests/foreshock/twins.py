"""Clients of an event loop, called like their synchronous twins, so that one test is for both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from foreshock.reading.described import Method

KINDS = ["synchronous", "async twin"]


class InLoop:
    """An async client whose methods are called like those of its twin: each answer is awaited in an event loop."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*arguments: Any, **named: Any) -> Any:
            answer = method(*arguments, **named)
            if isinstance(answer, AsyncIterator):
                return iter(self._loop.run_until_complete(_all(answer)))
            assert isinstance(answer, Coroutine)
            return self._loop.run_until_complete(answer)

        return call


async def _all(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


@contextmanager
def opener(kind: str, synchronous: Callable[..., Any], twin: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Give a function that opens a client of one kind; all are closed at the end."""
    with ExitStack() as opened:
        if kind == KINDS[0]:
            yield lambda *arguments, **named: opened.enter_context(synchronous(*arguments, **named))
            return
        runner = opened.enter_context(asyncio.Runner())

        def open_twin(*arguments: Any, **named: Any) -> InLoop:
            client = twin(*arguments, **named)
            opened.callback(lambda: runner.run(client.close()))
            return InLoop(client, runner.get_loop())

        yield open_twin


def described_methods(kind: type) -> dict[str, Any]:
    """Return the methods of a reader or operator that are described requests, by name."""
    return {name: getattr(kind, name) for name in _public(kind) if isinstance(getattr(kind, name), Method)}


def assert_twins(synchronous: type, twin: type) -> None:
    """Assert that both have the same public methods, each with a name and documentation."""
    described = described_methods(synchronous)
    assert described
    for name, method in described.items():
        assert getattr(twin, name) is method
        assert method.__name__ == name
        assert method.__doc__
        assert next(iter(inspect.signature(method).parameters)) == "self"
    assert _public(synchronous) == _public(twin)
    for name in ("__init__", *(_public(synchronous) - described.keys())):
        ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (synchronous, twin))
        assert ours == theirs, name


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}
