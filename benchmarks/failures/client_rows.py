"""Failures of what runs in the trainer: the client, its spool, its integrations, and what they send."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

from benchmarks.failures.disks import fill, small_disk
from benchmarks.failures.rows import Outcome, Row
from benchmarks.failures.trainers import run_trainer
from benchmarks.running_service import running_service
from tests.ports import free_port

# With a service fewer, as it takes each of them.
_ITEMS, _SERVED_ITEMS = 2_000, 300


def _full_disk(*, is_served: bool) -> Outcome:
    """Log to a spool on a disk that is full before the client starts."""
    program = """
        import json, os, sys
        from foreshock import Client
        client = Client(sys.argv[1], run_key="full", spool_directory=sys.argv[2], max_queue_items=5000)
        before = len(os.listdir("/proc/self/fd"))
        for step in range(int(sys.argv[3])):
            client.log_scalars(step, {"reward": 1.0})
        client.flush(200 if sys.argv[4] == "True" else 5)
        with open(os.devnull):
            print(json.dumps([len(os.listdir("/proc/self/fd")) - before - 1, client.counters.delivered]))
    """
    items = _SERVED_ITEMS if is_served else _ITEMS
    with tempfile.TemporaryDirectory() as folder, small_disk(64 << 10) as disk:
        fill(disk)
        away = nullcontext(f"http://127.0.0.1:{free_port()}")
        with running_service(Path(folder)) if is_served else away as url:
            more, delivered = run_trainer(program, url, disk, str(items), str(is_served))
        left = len(list(disk.iterdir())) - 1
    # The start of the run is an item too. A connection has one or two descriptors.
    is_ok = more <= 4 and left == 0 and delivered == (items + 1 if is_served else 0)
    return Outcome(f"{more:+} descriptors, {left} folders left, {delivered:,} items delivered", is_ok)


ROWS = [
    Row(
        "full disk at the start",
        f"at most 4 descriptors more, no folder left, {_SERVED_ITEMS + 1} items delivered",
        lambda: _full_disk(is_served=True),
    ),
    Row(
        "full disk at the start, service away",
        f"{_ITEMS:,} items: at most 4 descriptors more, no folder left, open() works",
        lambda: _full_disk(is_served=False),
    ),
]
