"""Runs of modules in processes forked from one that has imported large libraries: a run does not import them again.

    python -m tests.foreshock.integrations.preloaded MODULE…

reads one JSON line a request from stdin, and answers each with the exit statuses of its processes. A fork is safe
because the parent starts no thread and computes nothing.
"""

import atexit
import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Preloaded:
    """A process that has imported modules and forks one for each run."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self, folder: Path, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> tuple[list[Any], str]:
        """Run `python -m module arguments` once per environment, all at the same time; their output goes to `folder`.

        Each environment is added to that of this process. Returns the JSON that each printed after LOG, and what all
        wrote to stderr. Each must end with status 0.
        """
        outputs = [
            (str(folder / f"{number}.out"), str(folder / f"{number}.err")) for number in range(len(environments))
        ]
        request = {"module": module, "arguments": list(arguments), "outputs": outputs,
                   "environments": [{**os.environ, **each} for each in environments]}  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        statuses = json.loads(self._process.stdout.readline())
        written = [Path(errors).read_text() for _, errors in outputs]
        for status, errors in zip(statuses, written, strict=True):
            assert status == 0, errors[-4000:]
        lines = [line for out, _ in outputs for line in Path(out).read_text().splitlines() if line.startswith("LOG ")]
        assert len(lines) == len(outputs)
        return [json.loads(line[4:]) for line in lines], "".join(written)


@contextmanager
def preloaded(*modules: str) -> Iterator[Preloaded]:
    """Yield a process that imports `modules`, except with a GPU, whose driver does not survive a fork."""
    chosen = modules if shutil.which("nvidia-smi") is None else ()
    command = [sys.executable, "-m", __name__, *chosen]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Preloaded(process)


def _serve() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    assert threading.active_count() == 1, "a fork would lose the other threads"
    for line in sys.stdin:
        request = json.loads(line)
        started = []
        for environment, outputs in zip(request["environments"], request["outputs"], strict=True):
            child = os.fork()
            if child == 0:
                _run(request["module"], request["arguments"], environment, outputs)
            started.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]
        print(json.dumps(statuses), flush=True)


def _run(module: str, arguments: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    """Run a module as the main one, and end this process."""
    status = 1
    try:
        for number, output in enumerate(outputs, start=1):
            os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(environment)
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # As at the end of the interpreter, without the slow end of its modules.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
