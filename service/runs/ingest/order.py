"""The order in which this process commits shards that it ingests at the same time: by step, within an attempt.

The detectors replay what follows a late step, so a step that overtakes an earlier one costs a second replay. Across
processes nothing keeps the order; the result is the same in any.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from foreshock_service.runs.step_key import StepKey

_LONGEST_WAIT_SECONDS = 10.0
"""A body that ends its decoder takes until the time limit of decoding: the steps behind it do not wait for it."""


class Place:
    """The place of one shard among those of its attempt that are under way."""

    def __init__(self, steps: Counter[int], step: int, changed: threading.Condition) -> None:
        self._steps = steps
        self._step = step
        self._changed = changed
        self._left = False
        steps[step] += 1

    def wait_for_earlier_steps(self) -> None:
        """Wait until no shard of an earlier step of the attempt is under way, or for ten seconds."""
        with self._changed:
            self._changed.wait_for(lambda: min(self._steps) >= self._step, _LONGEST_WAIT_SECONDS)

    def leave(self) -> None:
        """Let the shards of later steps go on. Repeated calls change nothing."""
        with self._changed:
            if not self._left:
                self._left = True
                self._steps[self._step] -= 1
                if not self._steps[self._step]:
                    del self._steps[self._step]
                self._changed.notify_all()


class IngestOrder:
    """The places of all attempts. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._attempts: defaultdict[tuple[str, int], Counter[int]] = defaultdict(Counter)

    @contextmanager
    def place(self, key: StepKey) -> Iterator[Place]:
        """Give the place of a shard whose body is received; it is left at the end."""
        attempt = (key.run_id, key.attempt)
        with self._changed:
            place = Place(self._attempts[attempt], key.step, self._changed)
        try:
            yield place
        finally:
            place.leave()
            with self._changed:
                if not self._attempts.get(attempt, True):
                    del self._attempts[attempt]
