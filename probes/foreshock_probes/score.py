"""The engine's side of a job: `python -m foreshock_probes.score job.json`.

Runs the tasks of the file one after another, keeping the model of one for the next, and writes each result to the file
that the task names. It stops at the first task that fails. `outcome.json` beside the file has the seconds or the
reason, `progress` the number of response tokens done. If its worker dies, the process kills itself and the processes
that it started.

It is not a `__main__.py`, because Python does not import a module of that name in processes that multiprocessing
spawns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from foreshock.errors import ForeshockError
from foreshock.rollouts import ScoreBatch, decode_rollouts, encode_scores
from foreshock_probes.engines.environment import hold_this_process
from foreshock_probes.engines.process import OUTCOME, PROGRESS, TASKS, ErrorKind, Outcome
from foreshock_probes.offers import imported, load_scorer
from foreshock_probes.scorers.request import (
    Report,
    ScoreRequest,
    ScoreTask,
    TooFewDevicesError,
    UnsupportedScoreError,
    WarmModel,
    write_result,
)


def run(tasks: Sequence[ScoreTask], folder: Path) -> Outcome:
    """Run the tasks; write their results, and the progress to a file in `folder`."""
    warm = WarmModel()
    seconds: list[float] = []
    done = 0
    for task in tasks:
        print(f"--- {task.scorer} {task.variant} of {task.weights_folder}", flush=True)

        def report(tokens: int, before: int = done) -> None:
            _write(str(before + tokens).encode(), folder / PROGRESS)

        report(0)
        try:
            with task.rollouts.open("rb") as file:
                rollouts = decode_rollouts(file)
            request = ScoreRequest(**(vars(task) | {"rollouts": rollouts}))
            start, loading = time.monotonic(), warm.loading_seconds
            if task.function is not None:
                imported(task.function)(request, warm, report)
            else:
                _write(encode_scores(scores_of(request, warm, report)), task.result)
        except Exception as error:
            failure, reason = _failure(task, error)
            return Outcome(seconds=seconds, failure=failure, reason=reason)
        seconds.append(max(time.monotonic() - start - (warm.loading_seconds - loading), 0.0))
        done += rollouts.num_tokens
    return Outcome(seconds=seconds)


def scores_of(request: ScoreRequest, warm: WarmModel, report: Report) -> ScoreBatch:
    """Return the scores of a request by its scorer."""
    rollouts = request.rollouts
    scored = load_scorer(request.scorer)(request, warm, report)
    if scored.log_probs.shape != (rollouts.num_tokens,):
        raise AssertionError(
            f"{request.scorer} must give log-probs of shape ({rollouts.num_tokens},), got {scored.log_probs.shape}"
        )
    return ScoreBatch(
        sample_ids=rollouts.sample_ids,
        log_probs=scored.log_probs,
        offsets=rollouts.response_offsets,
        fingerprint=dataclasses.replace(
            scored.fingerprint, flags={**scored.fingerprint.flags, **request.adapter_flags()}
        ),
    )


def _write(data: bytes, path: Path) -> None:
    """Write a file; of the processes that divide a model (torchrun), only the first one writes."""
    if os.environ.get("RANK", "0") == "0":
        write_result(data, path)


def _failure(task: ScoreTask, error: Exception) -> tuple[ErrorKind, str]:
    """Return the kind and the reason of a task's failure."""
    if isinstance(error, TooFewDevicesError):
        return "retry", f"{task.scorer}: {error}"
    if isinstance(error, UnsupportedScoreError):
        return "final", str(error)
    if isinstance(error, ForeshockError):
        return "final", f"{task.scorer}: {type(error).__name__}: {error}"
    traceback.print_exception(error)
    return "retry", f"{task.scorer} failed with {type(error).__name__}: {str(error).strip()[:2000]}"


def _divide(first: ScoreTask, ranks: int) -> Outcome:
    """Replace this process by torchrun, which starts this command `ranks` times; return only with a failure."""
    from foreshock_probes.scorers.devices import check_devices

    try:
        check_devices("tp_size", ranks)
    except TooFewDevicesError as error:
        failure, reason = _failure(first, error)
        return Outcome(seconds=[], failure=failure, reason=reason)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return os.execv(sys.executable, [sys.executable, "-m", *launcher, "foreshock_probes.score", *sys.argv[1:]])


def _end_with_worker() -> None:
    """Kill this process and its group when the worker closes standard input, which it does by dying."""
    with contextlib.suppress(OSError):
        os.read(0, 1)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


# At import and not in main(), because processes that an engine spawns import this module too and must be held as well.
hold_this_process()


def main() -> int:
    """Run the tasks of the file that the command names."""
    if len(sys.argv) != 2:
        print("usage: python -m foreshock_probes.score job.json", file=sys.stderr)
        return 2
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_end_with_worker, daemon=True).start()
    job = Path(sys.argv[1])
    tasks = TASKS.validate_json(job.read_bytes())
    ranks = max((task.ranks for task in tasks), default=1)
    divides = ranks > 1 and "RANK" not in os.environ
    outcome = _divide(tasks[0], ranks) if divides else run(tasks, job.parent)
    _write(outcome.model_dump_json().encode(), job.with_name(OUTCOME))
    return 0


if __name__ == "__main__":
    sys.exit(main())
