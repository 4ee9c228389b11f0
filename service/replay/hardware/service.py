"""Hardware: the workers, and the jobs and scores of each accelerator."""

from __future__ import annotations

from collections import Counter, defaultdict

from sqlalchemy.orm import Session

from foreshock_service.platform.database.dialect import database_now_us
from foreshock_service.platform.security import Principal
from foreshock_service.replay.hardware import repository
from foreshock_service.replay.hardware.schemas import AcceleratorRead, HardwareRead, WorkerRead
from foreshock_service.replay.probes.job_transitions import JobState
from foreshock_service.replay.workers.service import count_live_workers, newest_workers

_MOST_WORKERS = 500
# Workers and probes name accelerators and devices freely.
_MOST_ACCELERATORS, _MOST_DEVICES = 500, 50


def read_hardware(session: Session, principal: Principal) -> HardwareRead:
    """Return the workers and accelerators that the principal may see."""
    workers = newest_workers(session, principal.project, _MOST_WORKERS)
    live = count_live_workers(session, principal.project, database_now_us(session))
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
    names = {*devices, *(accelerator for accelerator, _ in jobs)}

    def in_use(name: str) -> tuple[int, int, int]:
        return live.get(name, 0), jobs[name, JobState.QUEUED] + jobs[name, JobState.RUNNING], made[name]

    shown = sorted(sorted(names), key=in_use, reverse=True)[:_MOST_ACCELERATORS]
    return HardwareRead(
        workers=[WorkerRead.model_validate(each) for each in workers],
        accelerators=[
            AcceleratorRead(
                accelerator=name,
                workers=live.get(name, 0),
                devices=sorted(device for device in devices[name] if device)[:_MOST_DEVICES],
                queued_jobs=jobs[name, JobState.QUEUED],
                running_jobs=jobs[name, JobState.RUNNING],
                scores=made[name],
            )
            for name in sorted(shown)
        ],
        accelerators_left_out=len(names) - len(shown),
    )
