"""The clock of the project: UTC in whole microseconds since 1970, the unit of every stored time."""

import time


def now_us() -> int:
    """Return the current time in microseconds since 1970-01-01T00:00:00Z."""
    return time.time_ns() // 1_000
