"""The interface of an exporter, and the values that it writes."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from foreshock.errors import ConfigurationError
from foreshock.installing import install_command

PREFIX = "foreshock/"

DEFAULT_MEASURES = (
    "k3_kl",
    "k3_kl_low",
    "k3_kl_high",
    "kl",
    "chi2_token",
    "tv_token",
    "ess_token",
    "ess_seq",
    "mean_ratio",
    "log_ppl_abs_diff",
    "mean_abs_d",
    "p99_abs_d",
    "max_abs_d",
    "tail_2",
    "rollout_probs_diff_mean",
    "rollout_probs_diff_max",
    "rollout_actor_probs_pearson_corr",
    "token_mult_prob_error",
    "pareto_k",
    "surprisal_z",
    "response_length_mean",
    "response_length_p99",
    "truncated_fraction",
    "reward_mean",
)
"""Columns of the registered measures that are exported unless `measures` names others."""


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """The run whose steps are written; `page` is the address of its page at the service."""

    project: str
    key: str
    run_id: str
    attempt: int
    page: str


@dataclass(frozen=True, slots=True)
class StepValues:
    """The values of one closed step by name, without the prefix `foreshock/`; never NaN or infinite."""

    step: int
    values: Mapping[str, float]


class Exporter(ABC):
    """Writes steps to one tracker. Only `attach` is called in the trainer's thread; all else in one other thread.

    `measures` are columns of `GET /v1/measures`; None: DEFAULT_MEASURES.
    """

    name: ClassVar[str]
    """The value of `export` that selects the exporter; also the extra that installs its package."""
    module: ClassVar[str]
    """The module that must be installed."""

    def __init__(self, *, measures: Sequence[str] | None = None) -> None:
        """Raise ConfigurationError if the tracker's package is not installed."""
        if not _is_installed(self.module):
            raise ConfigurationError(
                f"export={self.name!r} needs the package {self.module}, which is not installed; "
                f"run: {install_command(self.name)}"
            )
        self.measures = tuple(DEFAULT_MEASURES if measures is None else measures)

    def attach(self) -> None:  # noqa: B027  most trackers need nothing
        """Find the tracker's active run, if only the thread that started it can. Must be quick."""

    @property
    def ready(self) -> bool:
        """True if steps can be written."""
        return True

    @property
    def missing(self) -> str:
        """The reason why the exporter is not ready, and what to do."""
        return ""

    @abstractmethod
    def start(self, run: ExportedRun) -> None:
        """Prepare for the steps of `run`; called once, before the first step, again after an error."""

    @abstractmethod
    def write(self, step: StepValues, *, closing: bool) -> bool:
        """Write a step and return True, or return False to be called again later. `closing`: there is no later call."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is buffered. The tracker's run stays open if the trainer opened it."""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
