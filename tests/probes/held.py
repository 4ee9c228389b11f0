"""A process held to an environment, for tests that compute with torch."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from foreshock.environment import MklKernels
from foreshock.fingerprint import Fingerprint
from foreshock_probes.engines.environment import EngineEnvironment, hold_this_process

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


class HeldProcess:
    """A process in `environment`; it lives as long as the context of `held`."""

    def __init__(self, environment: EngineEnvironment, executor: ProcessPoolExecutor) -> None:
        self.environment = environment
        self._executor = executor

    def stands_for(self, recorded: EngineEnvironment) -> bool:
        """Return True if it should compute the same bits as were logged in `recorded`."""
        return stands_for(self.call(_environment), recorded)

    def call(
        self, function: Callable[Parameters, Result], *arguments: Parameters.args, **named: Parameters.kwargs
    ) -> Result:
        """Call `function`, which must be at module level, in the process; return its result."""
        return self._executor.submit(function, *arguments, **named).result()


def stands_for(environment: EngineEnvironment, recorded: EngineEnvironment) -> bool:
    """Return True if scores of an environment should equal those of `recorded` bit for bit.

    Both must have the same instruction set and MKL kernels; SSE4.2 kernels stand for AMD's (see `MklKernels`).
    """
    kernels, sets = (environment.mkl, recorded.mkl), (environment.instruction_set, recorded.instruction_set)
    same_kernels = kernels[0] is kernels[1] or kernels == (MklKernels.SSE4_2, MklKernels.AMD)
    return sets[0] is not None and sets[0] is sets[1] and same_kernels


def _environment() -> EngineEnvironment:
    return EngineEnvironment.of_fingerprint(fingerprint_of_this_process())


def fingerprint_of_this_process() -> Fingerprint:
    """Return the fingerprint of a score that this process would compute."""
    import torch

    from foreshock.process_fingerprint import kernel_flags

    held_by = EngineEnvironment.of_variables().variables()
    return Fingerprint(engine="torch", cpu_isa=torch.backends.cpu.get_cpu_capability(), flags=kernel_flags(held_by))


@contextmanager
def held(environment: EngineEnvironment) -> Iterator[HeldProcess]:
    """Yield a process that is held to `environment`; it starts with the first call."""
    # Forked from a process that has imported torch but not used it, so that each child can still select its kernels.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(1, context, initializer=hold_this_process, initargs=(environment,)) as executor:
        yield HeldProcess(environment, executor)
