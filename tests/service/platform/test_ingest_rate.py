"""The rate of ingest: over the last minute, and since the start while that is shorter."""

from __future__ import annotations

from foreshock_service.platform.uploads import IngestRate


def test_rate_is_over_the_last_minute() -> None:
    now = 100.0
    rate = IngestRate(clock=lambda: now)
    assert rate.per_second() == (0.0, 0.0)
    rate.note(1000)
    rate.note(3000)
    now += 10
    assert rate.per_second() == (0.2, 400.0)
    for _ in range(200):
        now += 1
        rate.note(60)
    assert rate.per_second() == (1.0, 60.0)
    now += 120
    assert rate.per_second() == (0.0, 0.0)
