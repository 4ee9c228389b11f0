"""Tests of the launch: all ranks of one start of the job find the same key, two starts do not."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

import pytest

from foreshock.client.launch import Launch, find_launch
from foreshock.errors import ConfigurationError
from tests.paths import PYTHONPATH, REPOSITORY
from tests.ports import free_port

TORCHRUN = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2", "GROUP_WORLD_SIZE": "2"}
STATIC = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node-7", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8",
         "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}  # fmt: skip

SHARED: dict[str, dict[str, str]] = {
    "address-node-7:29500-of-8-0": STATIC,
    "address-node-7:29500-of-8-1": {**STATIC, "TORCHELASTIC_RESTART_COUNT": "1"},
    "mpi-prterun-host-9@1": {"PMIX_NAMESPACE": "prterun-host-9@1"},
    "slurm-77-0": {"SLURM_JOB_ID": "77"},
    "slurm-77-0-step-0": SLURM,
    "slurm-77-1-step-0": {**SLURM, "SLURM_RESTART_COUNT": "1"},
    "slurm-77-0-step-3": {**SLURM, "SLURM_STEP_ID": "3"},
    "torchrun-job-2": TORCHRUN,
}


@pytest.mark.parametrize(("key", "variables"), SHARED.items(), ids=str)
def test_key_comes_from_what_all_ranks_share(key: str, variables: dict[str, str]) -> None:
    for rank in range(3):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        launch = find_launch(environment=variables | own)
        assert (launch.identity, launch.shared) == (key, True)


def test_sources_override_each_other_in_order() -> None:
    everything = {**STATIC, **SLURM, "PMIX_NAMESPACE": "x"}
    assert find_launch(environment=everything).identity.startswith("slurm-")
    assert find_launch(environment={**everything, **TORCHRUN}).identity == "torchrun-job-2"
    assert find_launch(environment={**everything, "FORESHOCK_ATTEMPT_KEY": "mine"}).identity == "mine"
    assert find_launch("argument", {"FORESHOCK_ATTEMPT_KEY": "mine"}).identity == "argument"


def test_one_srun_for_each_node_is_still_one_launch() -> None:
    one_node = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "8"}
    keys = {find_launch(environment={**one_node, "SLURM_STEP_ID": str(step)}).identity for step in range(2)}
    assert keys == {"slurm-77-0"}


def test_single_processes_started_by_hand_in_one_allocation_are_several_launches() -> None:
    by_hand = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}
    assert find_launch(environment=by_hand).identity.startswith("process-")


def test_the_resume_step_completes_a_derived_key_and_not_a_given_one() -> None:
    run = ("completes",)
    assert find_launch(environment=STATIC).attempt_key(0, run=run) == "address-node-7:29500-of-8-0"
    assert find_launch(environment=STATIC).attempt_key(40, run=run) == "address-node-7:29500-of-8-0-from-40"
    assert find_launch("mine").attempt_key(40) == find_launch("mine").attempt_key(40) == "mine"
    assert len(find_launch("m" * 500).attempt_key(0)) == 200


def keys_of_ranks(*starts: int, run: str, shards: int | None = 8) -> list[set[str]]:
    """Return the keys that the ranks of one launch find at each of several starts."""
    launch = find_launch(environment=STATIC)
    return [{launch.attempt_key(step, run=(run,), shard=rank, shards=shards) for rank in range(8)} for step in starts]


def test_each_start_of_a_process_is_one_attempt_of_all_ranks() -> None:
    starts = keys_of_ranks(0, 0, 40, 40, 0, run="again")
    assert [len(keys) for keys in starts] == [1] * 5
    assert len(set.union(*starts)) == 5


def test_a_rank_that_is_replaced_within_the_launch_joins_the_attempt_of_the_others() -> None:
    """The others resume in their processes, it in a new one, which has counted no start."""
    survivors = keys_of_ranks(0, 40, run="replaced")
    replaced = keys_of_ranks(40, run="a process that knows no other start")
    assert survivors[1] == replaced[0]


def test_starts_of_other_runs_do_not_count() -> None:
    assert keys_of_ranks(0, run="one run") == keys_of_ranks(0, run="another run")


@pytest.mark.parametrize("variables", [{**STATIC, "WORLD_SIZE": "1"}, {**TORCHRUN, "WORLD_SIZE": "1"}], ids=str)
def test_the_only_rank_of_a_launch_needs_no_shared_key(variables: dict[str, str]) -> None:
    """An engine in the process sets MASTER_ADDR and MASTER_PORT, the same ones when the script starts again."""
    launch = find_launch(environment=variables)
    assert launch.attempt_key(0) != launch.attempt_key(0)
    assert launch.attempt_key(0, shard=0, shards=2) == launch.attempt_key(0, shard=1, shards=2)


def test_a_declared_single_shard_is_never_the_attempt_of_an_earlier_start() -> None:
    launch = find_launch(environment=STATIC)
    assert launch.attempt_key(0, shard=0, shards=1) != launch.attempt_key(0, shard=0, shards=1)


def keys_of(command: list[str], **variables: str) -> list[str]:
    # One write a line: with PYTHONUNBUFFERED, `print` makes several, and processes that share a pipe mix them.
    program = """
import sys
from foreshock.client.launch import find_launch
sys.stdout.write(f"key {find_launch().attempt_key(0)}\\n")
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "FORESHOCK"))}
    done = subprocess.run(
        [*command, "-c", program], env={**environment, **variables}, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("key ") for line in done.stdout.splitlines() if line.startswith("key ")]


def torchrun(*options: str) -> list[str]:
    # `-c` is an option of python, not of torchrun: without python it takes a program and its arguments.
    return [sys.executable, "-m", "torch.distributed.run", *options, "--no-python", sys.executable]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--standalone"], id="standalone"),
        pytest.param(
            ["--rdzv-id=100", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
            id="fixed rendezvous id",
            marks=pytest.mark.full,
        ),
        pytest.param(["static"], id="static", marks=pytest.mark.full),
    ],
)
def test_each_launch_by_torchrun_has_one_key_of_its_own(options: list[str]) -> None:
    if options == ["static"]:
        options = ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    first, again = (keys_of(torchrun("--nproc-per-node=2", *options)) for _ in range(2))
    assert len(first) == len(again) == 2
    assert len(set(first)) == len(set(again)) == 1
    assert first[0] != again[0]


def test_nothing_shared_is_no_shared_key() -> None:
    (first,), (second,) = keys_of([sys.executable]), keys_of([sys.executable])
    assert first != second
    assert not find_launch(environment={}).shared


def _put_launch(queue: Queue[Launch]) -> None:
    queue.put(find_launch(environment={}))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_of_one_parent_share_a_key(method: str) -> None:
    context: Any = get_context(method)
    queue: Queue[Launch] = context.Queue()
    processes = [context.Process(target=_put_launch, args=(queue,)) for _ in range(2)]
    for process in processes:
        process.start()
    first, second = queue.get(timeout=60), queue.get(timeout=60)
    for process in processes:
        process.join()
    assert first == second
    assert first.shared
    assert first.identity == find_launch(environment={}).identity


@pytest.mark.full
def test_ray_names_session_and_job() -> None:
    program = """
import os, ray
from foreshock.client.launch import find_launch
os.environ.pop("SLURM_JOB_ID", None)
ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
worker = ray.remote(lambda: find_launch().identity)
found = {find_launch().identity, *ray.get([worker.remote(), worker.remote()])}
assert len(found) == 1, found
print(found.pop())
ray.shutdown()
"""
    keys = set()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "PYTHONPATH": PYTHONPATH},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        keys.add(done.stdout.strip())
    assert len(keys) == 2
    assert all(key.startswith("ray-session_") for key in keys)


def test_client_refuses_to_guess(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MASTER_", "SLURM_", "TORCHELASTIC", "PMIX")):
            monkeypatch.delenv(name)
    client = make()  # type: ignore[operator]
    with pytest.raises(
        ConfigurationError, match=r"same `attempt_key` \(argument of Client, or FORESHOCK_ATTEMPT_KEY\)"
    ):
        client.start_run(shard=1, shards=2)
    client.start_run()
    client.log_rollouts(1, {"prompt_token_ids": [[1]], "response_token_ids": [[2]]}, shard=1, shards=2)
    status = client.flush(60)
    assert (status.complete, status.invalid) == (False, 1)
    make(attempt_key="given").start_run(shard=1, shards=2)  # type: ignore[operator]


def test_rank_of_the_start_is_the_default_and_shard_0_finishes(make: object, service: object) -> None:
    for rank in range(2):
        with make(attempt_key="given").start_run(shard=rank, shards=2) as client:  # type: ignore[operator]
            client.log_rollouts(1, {"prompt_token_ids": [[1]], "response_token_ids": [[2]]})
            client.flush(60)
        finished = [item for item in service.received if item.method == "PATCH"]  # type: ignore[attr-defined]
        assert len(finished) == 1
    puts = [item for item in service.received if "/rollouts/" in item.path]  # type: ignore[attr-defined]
    assert [(item.path.split("/")[-1], item.query["shards"]) for item in puts] == [("0", "2"), ("1", "2")]
    with pytest.raises(ZeroDivisionError), make(attempt_key="given").start_run(shard=1, shards=2):  # type: ignore[operator]
        raise ZeroDivisionError
    assert [item.json() for item in service.received if item.method == "PATCH"][-1] == {"state": "failed", "attempt": 1}  # type: ignore[attr-defined]
