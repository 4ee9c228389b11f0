"""The async twin of `Reader`: the same methods, whose answers are awaited and whose lists are async iterators.

async with foreshock.AsyncReader() as reader:
    async for run in reader.runs(states=["running"]):
        measured = await reader.measurements(run.id, measures=["k3_kl"])
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from foreshock.client.async_connection import AsyncServiceConnection
from foreshock.reading import api
from foreshock.reading.remembered import RememberedAnswers
from foreshock.reading.request import Listing, Request
from foreshock.reading.shared import ReaderSettings, describe_method, is_retryable, read_answer
from foreshock.retry import retry_async

__all__ = ["AsyncReader"]

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Item = TypeVar("Item")


def _one(
    request: Callable[Arguments, Request[Answer]],
) -> Callable[Concatenate[AsyncReader, Arguments], Coroutine[Any, Any, Answer]]:
    async def method(reader: AsyncReader, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        return await reader.get(request(*arguments, **named))

    describe_method(method, request)
    return method


def _list(
    request: Callable[Arguments, Listing[Item]],
) -> Callable[Concatenate[AsyncReader, Arguments], AsyncIterator[Item]]:
    def method(reader: AsyncReader, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> AsyncIterator[Item]:
        return reader.items(request(*arguments, **named))

    describe_method(method, request)
    return method


class AsyncReader:
    """Reads runs, steps, curves, tokens, alerts, probes and advice; for many tasks of one event loop.

    Arguments not given come from `FORESHOCK_URL` and `FORESHOCK_API_KEY`. `project=None`: runs of all projects that the
    key may see. A request that fails because the service is away or busy is repeated for `retry_seconds`, each attempt
    has `timeout_seconds`.

    Lists are async iterators that ask for the next page when they need it. Every failure is a ServiceError.
    The newest answers are kept, at most 16 MiB of them: one that has not changed is not sent again.
    """

    def __init__(
        self,
        url: str | None = None,
        project: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 10.0,
    ) -> None:
        """Prepare the reader; nothing is sent yet. Raises ConfigurationError if `url` is not an http(s) address."""
        self.settings = ReaderSettings(url, project, api_key, timeout_seconds, retry_seconds)
        self._remembered = RememberedAnswers()
        self._connection = AsyncServiceConnection(
            self.settings.url, self.settings.api_key, timeout_seconds=timeout_seconds
        )

    runs = _list(api.runs)
    run = _one(api.run)
    attempts = _list(api.attempts)
    steps = _list(api.steps)
    changes = _list(api.changes)
    checkpoints = _list(api.checkpoints)
    measures = _list(api.measures)
    measurements = _one(api.measurements)
    export_measurements = _one(api.export_measurements)
    scalars = _one(api.scalars)
    export_scalars = _one(api.export_scalars)
    buckets = _one(api.buckets)
    token_ids = _one(api.token_ids)
    worst_tokens = _one(api.worst_tokens)
    rollout_tokens = _one(api.rollout_tokens)
    health = _one(api.health)
    risk = _one(api.risk)
    attribution = _one(api.attribution)
    lint = _one(api.lint)
    lint_of_run = _one(api.lint_of_run)
    corrections = _one(api.corrections)
    theory = _one(api.theory)
    exact = _one(api.exact)
    exact_tokens = _one(api.exact_tokens)
    routing = _one(api.routing)
    layers = _one(api.layers)
    alerts = _list(api.alerts)
    changed_alerts = _one(api.changed_alerts)
    alerts_of_runs = _list(api.alerts_of_runs)
    advice = _one(api.advice)
    decisions = _list(api.decisions)
    probes = _list(api.probes)
    probes_of_runs = _list(api.probes_of_runs)
    probe = _one(api.probe)

    async def get(self, request: Request[Answer]) -> Answer:
        """Return the answer to a request. Raises ServiceError."""
        response = await retry_async(
            lambda: self._connection.get(
                request.path,
                query=request.parameters(self.settings.project),
                headers={**request.headers, **self._remembered.headers(request.asked)},
                timeout_seconds=self.settings.timeout_seconds + request.wait_seconds,
            ),
            self.settings.backoff(),
            is_retryable=is_retryable,
            deadline_seconds=self.settings.retry_seconds,
        )
        return read_answer(self._connection.url, request, response, self._remembered)

    async def items(self, listing: Listing[Item]) -> AsyncIterator[Item]:
        """Yield the items of all pages. Raises ServiceError."""
        page = await self.get(listing.page(None))
        for item in page.items:
            yield item
        while page.next_cursor is not None:
            page = await self.get(listing.page(page.next_cursor))
            for item in page.items:
                yield item

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
