"""The processes of a model that is divided among several devices: one for each, a rank of a torch process group.

The process that starts them is not a rank. It sends each the same task, waits for the results, and notices at once if
one of them dies; it then ends the others, which would wait in a collective operation for the dead one.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from foreshock.errors import ForeshockError
from foreshock_probes.child_process import how_it_ended
from foreshock_probes.engines.environment import hold_this_process
from foreshock_probes.scorers.request import Report, TooFewDevicesError, WarmModel


def device_count() -> int:
    """Return the number of GPUs that this process sees, else that of the CPU cores that it may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else len(_cores())


def check_devices(option: str, needed: int) -> None:
    """Raise TooFewDevicesError if the option needs more devices than this machine has, one for each process."""
    available = device_count()
    if needed > available:
        kind = "GPU" if torch.cuda.is_available() else "CPU core"
        raise TooFewDevicesError(
            f"{option}={needed} needs {needed} {kind}s, one for each process; this worker has {available}: start a "
            f"worker with {needed} or lower the option"
        )


def cores_of_ranks(ranks: int) -> list[list[int]]:
    """Return the CPU cores of each of `ranks` processes: as many for each, at least one, no core twice."""
    cores = _cores()
    size = max(1, len(cores) // ranks)
    return [cores[rank * size : (rank + 1) * size] for rank in range(ranks)]


def _cores() -> list[int]:
    # Not every system tells the cores of a process.
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity is not None else list(range(os.cpu_count() or 1))


# A rank waits this long for the others in a collective operation: longer than the slowest batch and than reading a
# checkpoint, because ranks do not read at the same speed.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=15)
_SECONDS_TO_SEE_A_DEATH = 2.0


class RankError(RuntimeError):
    """A rank died or failed, and all of them were ended; another try may succeed."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank in its own process: its number, that of all ranks, its device, and the model that it keeps loaded."""

    number: int
    ranks: int
    device: torch.device
    warm: WarmModel


Handle = Callable[[Rank, Any, Report], Any]
"""Does a task in a rank and returns its result. Task and result are pickled, and so is the function, by its name."""


class RankProcesses:
    """`ranks` processes that call `handle` for each task, on a GPU each if `on_gpus`, else on the CPU."""

    def __init__(self, ranks: int, handle: Handle, *, on_gpus: bool) -> None:
        folder = Path(tempfile.mkdtemp(prefix="foreshock-ranks-"))
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._end = weakref.finalize(self, _end, self._processes, self._connections, folder)
        for number, cores in enumerate(cores_of_ranks(ranks)):
            mine, its = context.Pipe()
            threads = max(1, len(cores))
            arguments = (number, ranks, on_gpus, threads, str(folder / "store"), handle, its)
            process = context.Process(target=_run, args=arguments, name=f"rank {number}", daemon=True)
            process.start()
            its.close()  # the end of the pipe is seen when the rank dies
            self._processes.append(process)
            self._connections.append(mine)

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of the processes, by rank."""
        return [process.pid or 0 for process in self._processes]

    def run(self, task: object, report: Report) -> list[Any]:
        """Return each rank's result. `report` is called with the sum of the numbers that the ranks reported.

        Raises RankError, and the ForeshockError that a rank raised; all ranks are then ended, for good.
        """
        try:
            return self._run(task, report)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all ranks."""
        self._end()

    def _run(self, task: object, report: Report) -> list[Any]:
        for number, connection in enumerate(self._connections):
            try:
                connection.send(task)
            except OSError as error:
                raise self._death(number) from error
        results: dict[int, Any] = {}
        reported = [0] * len(self._connections)
        while len(results) < len(self._connections):
            for number in self._ready(results):
                try:
                    kind, value = self._connections[number].recv()
                except (EOFError, OSError) as error:
                    raise self._death(number) from error
                if kind == "progress":
                    reported[number] = value
                    report(sum(reported))
                elif kind == "done":
                    results[number] = value
                elif kind == "refused":
                    raise value
                else:
                    # A rank that lost its connection to a dead one fails too, and may be heard of first.
                    raise self._first_death() or RankError(f"{self._processes[number].name} failed with {value}")
        return [results[number] for number in sorted(results)]

    def _ready(self, results: dict[int, Any]) -> Sequence[int]:
        """Wait for a message, and return the ranks that sent one. Raises RankError if a rank died instead."""
        waiting = {self._connections[each]: each for each in range(len(self._connections)) if each not in results}
        sentinels = {process.sentinel: number for number, process in enumerate(self._processes)}
        ready = wait([*waiting, *sentinels])
        numbers = [waiting[each] for each in ready if isinstance(each, Connection)]
        if not numbers:
            raise self._death(next(sentinels[each] for each in ready if isinstance(each, int)))
        return numbers

    def _first_death(self) -> RankError | None:
        sentinels = {process.sentinel: number for number, process in enumerate(self._processes)}
        dead = [sentinels[each] for each in wait([*sentinels], _SECONDS_TO_SEE_A_DEATH) if isinstance(each, int)]
        return self._death(dead[0]) if dead else None

    def _death(self, number: int) -> RankError:
        """Return the error for a rank that ended by itself."""
        process = self._processes[number]
        process.join(_SECONDS_TO_SEE_A_DEATH)
        how = how_it_ended(process.exitcode)
        return RankError(f"{process.name} of {len(self._processes)} {how}; all ranks were ended")


def _end(processes: list[BaseProcess], connections: list[Connection], folder: Path) -> None:
    """Kill the ranks: they hold nothing that must be saved, and one in a collective operation does not listen."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for connection in connections:
        connection.close()
    shutil.rmtree(folder, ignore_errors=True)


def _run(
    number: int, ranks: int, on_gpus: bool, threads: int, store: str, handle: Handle, connection: Connection
) -> None:
    """Serve tasks in a rank's process until the pipe is closed."""
    hold_this_process()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    device = torch.device("cuda", number) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    elif sys.platform == "linux":
        # All ranks are on this machine; gloo would look for its name in the network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{store}",
        rank=number,
        world_size=ranks,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if on_gpus else None,
    )
    rank = Rank(number, ranks, device, WarmModel())
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            result = handle(rank, task, lambda done: connection.send(("progress", done)))
        except ForeshockError as error:
            connection.send(("refused", error))
        except Exception as error:
            traceback.print_exc()
            connection.send(("failed", f"{type(error).__name__}: {str(error).strip()[:1000]}"))
        else:
            connection.send(("done", result))


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
