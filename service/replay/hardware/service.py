"""Hardware: which workers there are, and what waits for which accelerator."""

from __future__ import annotations

from collections import Counter, defaultdict

from sqlalchemy.orm import Session

from service.platform.database.dialect import database_now_us
from service.platform.security import Principal
from service.replay.hardware import repository
from service.replay.hardware.schemas import AcceleratorRead, HardwareRead, WorkerRead
from service.replay.leases.transitions import JobState

_SEEN_US = 300_000_000
_MOST_WORKERS = 500


def read_hardware(session: Session, principal: Principal) -> HardwareRead:
    """The workers and accelerators that the principal may see."""
    now = database_now_us(session)
    workers = repository.newest_workers(session, principal.project, _MOST_WORKERS)
    alive = Counter(each.accelerator for each in workers if each.last_seen_at_us >= now - _SEEN_US)
    devices: dict[str, set[str]] = defaultdict(set)
    for each in workers:
        devices[each.accelerator].add(each.device_name)
    made: Counter[str] = Counter()
    for (accelerator, device), count in repository.published_scores(session, principal.project).items():
        devices[accelerator].add(device)
        made[accelerator] += count
    jobs: Counter[tuple[str, str]] = Counter()
    for accelerator, state, count in repository.waiting_and_running(session, principal.project):
        jobs[accelerator, state] += count
    names = sorted({*devices, *(accelerator for accelerator, _ in jobs)})
    return HardwareRead(
        workers=[WorkerRead.model_validate(each) for each in workers],
        accelerators=[
            AcceleratorRead(
                accelerator=name,
                workers=alive[name],
                devices=sorted(device for device in devices[name] if device),
                queued_jobs=jobs[name, JobState.QUEUED],
                running_jobs=jobs[name, JobState.RUNNING],
                scores=made[name],
            )
            for name in names
        ],
    )
