"""Calls in a process that is held to an environment, for what tests compute with torch themselves."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from foreshock.fingerprint import Fingerprint
from probes.engines.environment import EngineEnvironment, hold_this_process

# Where a CPU has less than the recorder's, its kernels round elsewhere, and a replay differs from what was logged by as
# much as a mismatch of numerics: for the shipped run k3 is up to 2.7e-5 between the instruction sets of one CPU. The
# least that another step's weights give is 1.6e-3.
K3_ELSEWHERE = 1e-4

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


class HeldProcess:
    """A process that computes in `environment`, for as long as `held` keeps it."""

    def __init__(self, environment: EngineEnvironment, executor: ProcessPoolExecutor) -> None:
        self.environment = environment
        self._executor = executor

    def stands_for(self, recorded: EngineEnvironment) -> bool:
        """Return whether it should compute what was logged in `recorded`, bit for bit."""
        return self.call(_environment).stands_for(recorded)

    def call(
        self, function: Callable[Parameters, Result], *arguments: Parameters.args, **named: Parameters.kwargs
    ) -> Result:
        """Return what `function`, which a module defines, returns there."""
        return self._executor.submit(function, *arguments, **named).result()


def _environment() -> EngineEnvironment:
    return EngineEnvironment.of_fingerprint(what_a_score_would_tell())


def what_a_score_would_tell() -> Fingerprint:
    """Return what this process computes with, as the fingerprint of a score on its CPU has it."""
    import torch

    from probes.fingerprints import kernel_flags

    return Fingerprint(engine="torch", cpu_isa=torch.backends.cpu.get_cpu_capability(), flags=kernel_flags())


@contextmanager
def held(environment: EngineEnvironment) -> Iterator[HeldProcess]:
    """Keep a process that is held to `environment`; it starts with the first call."""
    # Forked from a process that has imported torch and used none of it, so that each can still choose its kernels.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(1, context, initializer=hold_this_process, initargs=(environment,)) as executor:
        yield HeldProcess(environment, executor)
