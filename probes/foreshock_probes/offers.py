"""Offers: the scorers that workers implement, and the scorers, exact pairs and environments of this machine."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foreshock.environment import device_slug
from foreshock.errors import ConfigurationError
from foreshock.installing import install_command
from foreshock.probe_kinds import PROBE_KINDS
from foreshock.process_fingerprint import accelerator_name, device_name, gpu_name
from foreshock.scorers import ENGINES, EXACT_PAIRS, REFUSED_SCORERS, SCORERS, available_scorers
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment, offered_environments
from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, UnsupportedScoreError, WarmModel
from foreshock_probes.settings import load_settings

OWN_FORWARD = "foreshock_probes.scorers.trainer_forward:score"
ScoreFunction = Callable[[ScoreRequest, WarmModel, Report], Scored]


def engine_of(name: str) -> str:
    """Return the engine of a scorer. Raises UnsupportedScoreError if workers of this release have no such scorer."""
    scorer = SCORERS.get(name)
    if scorer is None or scorer.engine is None or scorer.implementation is None:
        raise UnsupportedScoreError(f"unknown scorer {name!r}; scorers: {', '.join(available_scorers())}")
    return scorer.engine


def load_scorer(name: str) -> ScoreFunction:
    """Return a scorer's function. Call this only in the engine's process, because it imports the engine."""
    found: ScoreFunction = imported(str(SCORERS[name].implementation))
    return found


def what_lacks(name: str) -> str | None:
    """Return what this machine lacks for a scorer, and what to do about it; None: a worker here can offer it."""
    engine = ENGINES[engine_of(name)]
    missing = [package for package in engine.packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    server = name.partition(".")[0]
    if engine.remote and server not in load_settings().engine_servers:
        return f"no server is configured; set FORESHOCK_ENGINE_SERVERS='{server}=http://host:port'"
    if SCORERS[name].implementation == OWN_FORWARD and not load_settings().trainer_forward:
        return "no function is configured; set FORESHOCK_TRAINER_FORWARD='module:function'"
    return None


def installed_scorers() -> tuple[str, ...]:
    """Return the names of the scorers that lack nothing on this machine."""
    return tuple(name for name in available_scorers() if what_lacks(name) is None)


def imported(name: str) -> Any:
    """Import the function `module:function`."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


@dataclass(frozen=True, slots=True)
class Offers:
    """A worker's offers. `environments`: the environments in which it can score, by name."""

    accelerator: str
    device_name: str
    scorers: tuple[str, ...]
    exact_pairs: tuple[str, ...]
    environments: Mapping[str, EngineEnvironment]

    @property
    def requirements(self) -> tuple[str, ...]:
        """Return the worker's scorers and its other kinds of jobs: what jobs may need besides exact pairs."""
        return (*self.scorers, *(kind.capability for kind in PROBE_KINDS.values() if kind.capability))

    def in_words(self) -> str:
        """Return the offers for a log line."""
        names = ", ".join([*self.scorers, *(EXACT_PAIRS[key].name for key in self.exact_pairs)])
        return f"{names} on {self.accelerator} ({self.device_name})"


def offers_of_machine(accelerator: str, scorers: tuple[str, ...] | None) -> Offers:
    """Return the offers of this machine. `accelerator`: its type, empty: detected. `scorers`: only these, None: all.

    Raises ConfigurationError if a scorer is unknown or its engine is not installed.
    """
    if REFUSED_SCORERS:
        raise ConfigurationError("; ".join(REFUSED_SCORERS))
    for each in scorers or ():
        try:
            lacks = what_lacks(each)
        except UnsupportedScoreError as error:
            raise ConfigurationError(str(error)) from error
        if lacks is not None:
            raise ConfigurationError(f"the scorer {each} cannot be offered: {lacks}")
    offered = installed_scorers() if scorers is None else scorers
    if not offered:
        raise ConfigurationError(f"no engine is installed; run {install_command('probes')} for torch, and install vLLM")
    name, gpu = accelerator_name(accelerator), gpu_name()
    pairs = tuple(key for key, pair in EXACT_PAIRS.items() if {pair.target, pair.behaviour} <= set(offered))
    # On a CPU, all environments that processes can be held to.
    environments = offered_environments() if name == "cpu" else {device_slug(gpu): AS_IT_IS} if gpu is not None else {}
    return Offers(name, device_name(name), offered, pairs, environments)
