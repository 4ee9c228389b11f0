"""The processes of a model that is divided among several devices: one per device, each a rank of a torch process group.

The process that starts them is not a rank. It sends the same task to each rank and waits for the results. If a rank
dies, it notices at once and ends the other ranks, which would wait for the dead one in a collective operation.
"""

import argparse
import datetime
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from foreshock.errors import ForeshockError
from foreshock_probes.child_process import ChildEndedError, ChildProcess, connection_to_parent, messages_of_parent
from foreshock_probes.engines.environment import hold_this_process
from foreshock_probes.offers import imported
from foreshock_probes.scorers.request import Report, TooFewDevicesError, WarmModel


def device_count() -> int:
    """Return the number of GPUs that this process sees; without a GPU, the number of CPU cores that it may use."""
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
    """Return the CPU cores of each of `ranks` processes: the same number for each, at least one, no core twice."""
    cores = _cores()
    size = max(1, len(cores) // ranks)
    return [cores[rank * size : (rank + 1) * size] for rank in range(ranks)]


def _cores() -> list[int]:
    # Not every system reports the cores of a process.
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity is not None else list(range(os.cpu_count() or 1))


# Longest wait of a rank for the others in a collective operation: longer than the slowest batch and than reading a
# checkpoint, because ranks do not read at the same speed.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=15)
_SECONDS_TO_SEE_A_DEATH = 2.0


class RankError(RuntimeError):
    """A rank died or failed, and all of them were ended; another try may succeed."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank in its own process: its number, the number of ranks, its device, and the model that it keeps loaded."""

    number: int
    ranks: int
    device: torch.device
    warm: WarmModel


Handle = Callable[[Rank, Any, Report], Any]
"""A function that does a task in a rank and returns its result. Task and result are pickled; the rank imports it."""


class RankProcesses:
    """`ranks` processes that call `handle` for each task, on a GPU each if `on_gpus`, else on the CPU."""

    def __init__(self, ranks: int, handle: Handle, *, on_gpus: bool) -> None:
        folder = Path(tempfile.mkdtemp(prefix="foreshock-ranks-"))
        self._children: list[ChildProcess] = []
        self._end = weakref.finalize(self, _end, self._children, folder)
        named, kind = f"{handle.__module__}:{handle.__qualname__}", "cuda" if on_gpus else "cpu"
        for number, cores in enumerate(cores_of_ranks(ranks)):
            numbers = [str(each) for each in (number, ranks, max(1, len(cores)))]
            arguments = [named, kind, *numbers, str(folder / "store")]
            self._children.append(ChildProcess(__name__, arguments, os.environ, folder / f"rank-{number}.log"))

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of the processes, by rank."""
        return [child.pid for child in self._children]

    def run(self, task: object, report: Report) -> list[Any]:
        """Return each rank's result. `report` is called with the sum of the numbers that the ranks reported.

        Raises RankError, and the ForeshockError that a rank raised; all ranks are then ended and cannot be used again.
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
        message = pickle.dumps(task)
        for number, child in enumerate(self._children):
            try:
                child.send(message)
            except ChildEndedError as error:
                raise self._death(number, error) from error
        results: dict[int, Any] = {}
        reported = [0] * len(self._children)
        # Ranks that have already returned a result are watched too: the others would wait for one that died.
        connections = {child.connection: number for number, child in enumerate(self._children)}
        while len(results) < len(self._children):
            for number in [connections[each] for each in wait(list(connections)) if each in connections]:
                kind, value = self._reply(number)
                if kind == "progress":
                    reported[number] = value
                    report(sum(reported))
                elif kind == "done":
                    results[number] = value
                elif kind == "refused":
                    raise value
                else:
                    # A rank that lost its connection to a dead rank fails too, and its message may come first.
                    self._raise_first_death(number)
                    raise RankError(f"rank {number} failed with {value}")
        return [results[number] for number in sorted(results)]

    def _reply(self, number: int) -> tuple[str, Any]:
        """Return the reply that a rank has sent. Raises RankError if it died."""
        try:
            message = self._children[number].receive(_SECONDS_TO_SEE_A_DEATH)
        except ChildEndedError as error:
            raise self._death(number, error) from error
        assert message is not None  # the connection was ready
        kind, value = pickle.loads(message)
        return kind, value

    def _raise_first_death(self, failed: int) -> None:
        others = {child.connection: number for number, child in enumerate(self._children) if number != failed}
        deadline = time.monotonic() + _SECONDS_TO_SEE_A_DEATH
        while (left := deadline - time.monotonic()) > 0.0:
            for number in [others[each] for each in wait(list(others), left) if each in others]:
                self._reply(number)

    def _death(self, number: int, error: ChildEndedError) -> RankError:
        return RankError(f"rank {number} of {len(self._children)} {error}\nall ranks were ended")


def _end(children: list[ChildProcess], folder: Path) -> None:
    """Kill the ranks: they hold nothing to save, and a rank in a collective operation does not read messages."""
    for child in children:
        child.kill()
    shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Serve tasks in a rank's process until the connection is closed."""
    parser = argparse.ArgumentParser(prog="python -m foreshock_probes.scorers.rank_processes")
    parser.add_argument("handle", help="module:function")
    parser.add_argument("kind", choices=("cpu", "cuda"))
    for name in ("number", "ranks", "threads"):
        parser.add_argument(name, type=int)
    parser.add_argument("store", help="file by which the ranks find each other")
    parser.add_argument("--connection", type=int, required=True, help="file descriptor of the connection")
    arguments = parser.parse_args()
    connection = connection_to_parent(arguments.connection)
    tasks = messages_of_parent(connection, seconds_to_leave=0.0)
    hold_this_process()
    torch.set_num_threads(arguments.threads)
    on_gpu = arguments.kind == "cuda"
    device = torch.device("cuda", arguments.number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    elif sys.platform == "linux":
        # All ranks are on this machine; gloo would otherwise look up the machine's name in the network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{arguments.store}",
        rank=arguments.number,
        world_size=arguments.ranks,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    handle: Handle = imported(arguments.handle)
    rank = Rank(arguments.number, arguments.ranks, device, WarmModel())

    def send(kind: str, value: object) -> None:
        connection.send_bytes(pickle.dumps((kind, value)))

    for task in tasks:
        try:
            result = handle(rank, pickle.loads(task), lambda done: send("progress", done))
        except ForeshockError as error:
            send("refused", error)
        except Exception as error:
            traceback.print_exc()
            send("failed", f"{type(error).__name__}: {str(error).strip()[:1000]}")
        else:
            send("done", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
