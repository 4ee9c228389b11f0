"""Offers: the scorers, exact pairs and environments of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foreshock.environment import device_slug
from foreshock.errors import ConfigurationError
from foreshock.hardware import accelerator_name, device_name, gpu_name
from foreshock.installing import install_command
from foreshock.probe_kinds import PROBE_KINDS
from foreshock.scorers import EXACT_PAIRS, REFUSED_SCORERS
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment, offered_environments
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.table import installed_scorers, offered_pairs, scorer_named


@dataclass(frozen=True, slots=True)
class Offers:
    """What a worker offers. `environments` are those that it can score in, by name."""

    accelerator: str
    device_name: str
    scorers: tuple[str, ...]
    exact_pairs: tuple[str, ...]
    environments: Mapping[str, EngineEnvironment]

    @property
    def requirements(self) -> tuple[str, ...]:
        """Return what a job may need of the worker besides exact pairs: its scorers, and the other kinds of jobs."""
        return (*self.scorers, *(kind.capability for kind in PROBE_KINDS.values() if kind.capability))

    def in_words(self) -> str:
        """Return the offers for a log line."""
        names = ", ".join([*self.scorers, *(EXACT_PAIRS[key].name for key in self.exact_pairs)])
        return f"{names} on {self.accelerator} ({self.device_name})"


def offers_of_machine(accelerator: str, scorers: tuple[str, ...] | None) -> Offers:
    """Return the offers of this machine. `accelerator`: its type, empty: detected. `scorers`: only these, None: all.

    Raises ConfigurationError if a scorer is unknown or its engine is not installed.
    """
    offered = _offered(scorers)
    name = accelerator_name(accelerator)
    return Offers(name, device_name(name), offered, offered_pairs(offered), _environments(name))


def _environments(accelerator: str) -> dict[str, EngineEnvironment]:
    """Return the environments that this worker offers, by name: on a CPU, all that processes can be held to."""
    if accelerator == "cpu":
        return offered_environments()
    gpu = gpu_name()
    return {device_slug(gpu): AS_IT_IS} if gpu is not None else {}


def _offered(requested: tuple[str, ...] | None) -> tuple[str, ...]:
    if REFUSED_SCORERS:
        raise ConfigurationError("; ".join(REFUSED_SCORERS))
    available = installed_scorers()
    if requested is None:
        if not available:
            raise ConfigurationError(
                f"no engine is installed; run {install_command('probes')} for torch, and install vLLM"
            )
        return available
    for name in requested:
        try:
            lacks = scorer_named(name).lacks()
        except UnsupportedScoreError as error:
            raise ConfigurationError(str(error)) from error
        if lacks is not None:
            raise ConfigurationError(f"the scorer {name} cannot be offered: {lacks}")
    return requested
