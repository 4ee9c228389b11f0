"""The launch that this process belongs to, derived from what its launcher gives to all ranks.

All ranks of a launch must log into one attempt, and each launch needs an attempt of its own. The first source that is
present is used:

    attempt_key, FORESHOCK_ATTEMPT_KEY    given
    TORCHELASTIC_RUN_ID, unless "none"    torchrun with a rendezvous; with the restart count
    Ray                                   session and job of the connected cluster
    SLURM_JOB_ID                          with the restart count, and the step if one srun started all ranks
    PMIX_NAMESPACE                        mpirun
    MASTER_ADDR and MASTER_PORT           with the world size and the restart count
    multiprocessing                       the key that all descendants of one process share

An address, and a rendezvous id chosen by hand, may be those of an earlier launch. They are completed by what only this
launch has: on one node the folder that torchrun makes for the errors of its workers, or the key of `multiprocessing`;
and everywhere by the step that the attempt resumes at.

A start is an attempt of its own without any of this if it declares `shards=1`, or if the launcher says that it started
one rank: no other process has to find its key. A process that starts a run again, as a notebook does, counts its
starts: the second start from a step is a new attempt.
"""

import hashlib
import multiprocessing
import os
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from foreshock.errors import ConfigurationError

_LONGEST_KEY = 200
"""The longest attempt key that the service accepts."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_starts: Counter[tuple[object, ...]] = Counter()
"""Starts of this process by process id, run, shard and derived key. Every rank counts its own starts and gets the same
numbers."""
_starts_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Launch:
    """A start of the training job."""

    identity: str
    shared: bool
    """True if every rank of the launch derives the same identity."""
    given: bool = False
    """True if the caller chose the identity."""
    ranks: int | None = None
    """The number of ranks that the launcher started; None if it does not say."""

    def attempt_key(
        self, resume_step: int, *, run: tuple[str, ...] = (), shard: int | None = None, shards: int | None = None
    ) -> str:
        """Return the key of the attempt that a start of `run` begins at `resume_step`; each call is a start."""
        if self.given:
            return _shortened(self.identity)
        if shards == 1 or (shards is None and self.ranks == 1):
            return f"process-{uuid.uuid4().hex}"
        key = f"{self.identity}-from-{resume_step}" if resume_step else self.identity
        with _starts_lock:
            # A forked child counts from the beginning, as ranks that were not forked do.
            counted = (os.getpid(), *run, shard or 0, key)
            _starts[counted] += 1
            start = _starts[counted]
        return _shortened(key if start == 1 else f"{key}-start-{start}")

    def require_shared(self, shards: int) -> None:
        """Raise ConfigurationError if several ranks log and each would be an attempt of its own."""
        if shards > 1 and not self.shared:
            raise ConfigurationError(
                f"shards={shards}, but nothing tells which ranks are of one launch: there is no torchrun, Slurm, Ray "
                "or mpirun, nor MASTER_ADDR and MASTER_PORT. Give all ranks of this launch the same `attempt_key` "
                "(argument of Client, or FORESHOCK_ATTEMPT_KEY), another one at each start, such as the start time"
            )


def find_launch(attempt_key: str | None = None, environment: Mapping[str, str] | None = None) -> Launch:
    """Return the launch of this process; `attempt_key` overrides what the launcher gives."""
    variables = os.environ if environment is None else environment
    size = variables.get("WORLD_SIZE", "")
    ranks = int(size) if size.isdecimal() else None
    given = attempt_key or variables.get("FORESHOCK_ATTEMPT_KEY")
    if given:
        return Launch(given, shared=True, given=True)
    if (job := variables.get("TORCHELASTIC_RUN_ID", "none")) != "none":
        return Launch(f"torchrun-{job}{_node_token(variables)}-{_restarts(variables)}", shared=True, ranks=ranks)
    identity = (_ray() if environment is None else None) or _slurm(variables)
    if identity is None and "PMIX_NAMESPACE" in variables:
        identity = f"mpi-{variables['PMIX_NAMESPACE']}"
    if identity is not None:
        # WORLD_SIZE may be that of an engine in this process.
        return Launch(identity, shared=True)
    if (identity := _address(variables)) is not None:
        return Launch(identity, shared=True, ranks=ranks)
    return Launch(f"process-{_process_tree()}", shared=multiprocessing.parent_process() is not None)


def _ray() -> str | None:
    """Return the session and job if this process uses Ray. Job numbers repeat between clusters, sessions do not."""
    ray = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return None
        context = ray.get_runtime_context()
        node = getattr(getattr(ray, "_private", None), "worker", None)
        session = getattr(getattr(node, "_global_node", None), "session_name", None) or context.gcs_address
        return f"ray-{session}-{context.get_job_id()}"
    except Exception:
        # Another release of Ray: the other sources may still work.
        return None


def _slurm(variables: Mapping[str, str]) -> str | None:
    job = variables.get("SLURM_JOB_ID")
    nodes = variables.get("SLURM_JOB_NUM_NODES")
    tasks = variables.get("SLURM_STEP_NUM_TASKS")
    if job is None:
        return None
    if nodes == "1" and variables.get("SLURM_NTASKS") == "1" and variables.get("WORLD_SIZE", "1") == "1":
        # One process, maybe started by hand several times in an allocation.
        return None
    identity = f"slurm-{job}-{variables.get('SLURM_RESTART_COUNT', '0')}"
    # One srun may start all ranks, or those of one node only: then the step is not shared.
    launched = variables.get("GROUP_WORLD_SIZE") or variables.get("WORLD_SIZE") or tasks
    if "SLURM_STEP_ID" in variables and variables.get("SLURM_STEP_NUM_NODES") == nodes and tasks == launched:
        identity += f"-step-{variables['SLURM_STEP_ID']}"
    if "TORCHELASTIC_RESTART_COUNT" in variables:
        identity += f"-{_restarts(variables)}"
    return identity


def _address(variables: Mapping[str, str]) -> str | None:
    address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if not address or not port:
        return None
    token = _node_token(variables)
    if not token and address in _LOOPBACK and multiprocessing.parent_process() is not None:
        token = f"-{_process_tree()}"
    return f"address-{address}:{port}-of-{variables.get('WORLD_SIZE', '1')}{token}-{_restarts(variables)}"


def _restarts(variables: Mapping[str, str]) -> str:
    return variables.get("TORCHELASTIC_RESTART_COUNT", "0")


def _node_token(variables: Mapping[str, str]) -> str:
    """Return what torchrun chose at random for this launch on its only node; empty with several nodes.

    The file is <random folder>/<run id>_<random>/attempt_<n>/<local rank>/error.json.
    """
    path = PurePath(variables.get("TORCHELASTIC_ERROR_FILE", ""))
    if variables.get("GROUP_WORLD_SIZE") != "1" or len(path.parts) < 5:
        return ""
    return f"-{_digest(str(path.parents[2]))}"


def _process_tree() -> str:
    """Return a digest of the random key that a process and everything it starts by multiprocessing share."""
    return _digest(bytes(multiprocessing.current_process().authkey).hex())


def _shortened(key: str) -> str:
    return key if len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 13]}-{_digest(key)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
