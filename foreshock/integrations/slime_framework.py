"""The modules of slime, vime and miles that are observed, and this process's place among the training processes."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from foreshock.client.reporting import LogOnce
from foreshock.integrations.releases import KNOWN_VERSIONS, installed

Function = tuple[str, str]
ACTOR = "backends.megatron_utils.actor"


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework of the slime family, with the places of its functions in its releases, newest first.

    A place is a module below the package and the function that is looked up there. `rollout_data` gets (rollout_id,
    args, rollout_data) before training, `end` is called at the end of training, `metrics` gets (args, metrics),
    `forward` is the forward pass of the loss, `save` writes Hugging Face weights.
    """

    name: str
    engine: str
    rollout_data: tuple[Function, ...]
    end: tuple[Function, ...]
    metrics: tuple[Function, ...]
    forward: tuple[Function, ...]
    save: tuple[Function, ...]

    @property
    def known_versions(self) -> str:
        """The releases that this package follows."""
        return KNOWN_VERSIONS[self.name]

    @property
    def version(self) -> str:
        """The installed release, "unknown" if it is run from a folder."""
        return installed(self.name) or "unknown"

    def find(self, places: tuple[Function, ...]) -> tuple[ModuleType, str] | None:
        """Return the module and the name of the first function of `places` that this release has; None: it has none."""
        for module_name, function in places:
            try:
                module = importlib.import_module(f"{self.name}.{module_name}")
            except ImportError:
                continue
            if callable(getattr(module, function, None)):
                return module, function
        return None


def _slime(name: str, engine: str) -> Framework:
    return Framework(
        name,
        engine,
        # The releases up to 0.3.1 log from the actor; observability came after it.
        rollout_data=(("observability.train_metric_utils", "log_rollout_data"), (ACTOR, "log_rollout_data")),
        end=(("observability.train_metric_utils", "log_perf_data"), (ACTOR, "log_perf_data")),
        metrics=(("observability.logging_utils", "log"), ("utils.logging_utils", "log")),
        forward=(("backends.megatron_utils.loss", "get_log_probs_and_entropy"),),
        save=((ACTOR, "save_hf_model_to_path"), ("backends.megatron_utils.model", "save_hf_model")),
    )


FRAMEWORKS = (
    _slime("slime", "sglang"),
    _slime("vime", "vllm"),
    Framework(
        "miles",
        "sglang",
        rollout_data=((ACTOR, "log_rollout_data"),),
        end=((ACTOR, "log_perf_data"),),
        # The second places are those of miles-rl 0.0.1 and 0.0.2.
        metrics=(("utils.tracking_utils.tracking", "log"), ("utils.tracking_utils", "log")),
        forward=tuple(
            (f"backends.training_utils.{module}", "get_log_probs_and_entropy") for module in ("loss_hub.losses", "loss")
        ),
        save=(
            ("backends.megatron_utils.hf_export", "save_hf_model"),
            ("backends.megatron_utils.model", "save_hf_model"),
        ),
    ),
)


def find_framework() -> Framework | None:
    """Return the framework whose training process this is, None if it is none of them."""
    for framework in FRAMEWORKS:
        if f"{framework.name}.backends.megatron_utils" in sys.modules:
            return framework
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the training processes.

    `has_rollouts`: it holds log-probs, alone or with the other ranks of its context-parallel group. `problem` tells why
    the ranks' parts cannot be put together, None if they can.
    """

    shard: int
    shards: int
    has_rollouts: bool
    context_rank: int
    context_size: int
    problem: str | None = None

    @property
    def logs(self) -> bool:
        """True for the processes that log rollouts: one per data-parallel rank."""
        return self.has_rollouts and self.context_rank == 0

    @property
    def leads(self) -> bool:
        """True for the one process that logs metrics and asks for the advice."""
        return self.logs and self.shard == 0


def place_of(framework: Framework) -> Place:
    """Return this process's place. Raises ImportError without Megatron."""
    from megatron.core import mpu

    shard, shards = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    rank, size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    last = mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1
    problem = None
    if framework.name == "miles" and size > 1:
        problem = "log-probs are not logged: the ways in which miles splits sequences over ranks are not known here"
    if _independent_replicas(framework) > 1:
        problem = "rollouts and advice need one process group of all replicas, which fault-tolerant miles has not"
    return Place(
        shard=int(shard),
        shards=int(shards),
        has_rollouts=bool(last and mpu.get_tensor_model_parallel_rank() == 0),
        context_rank=int(rank),
        context_size=int(size),
        problem=problem,
    )


def warn_of_options(args: Any, place: Place, log: LogOnce) -> None:
    """Warn of data that is not logged because of the framework's options or the process's place."""
    if place.problem is not None:
        log.warning("place", place.problem)
    if not place.leads:
        return
    if getattr(args, "dynamic_sampling_filter_path", None):
        log.warning(
            "dynamic sampling",
            "--dynamic-sampling-filter-path: groups that the filter drops do not reach the trainer and are not "
            "logged, so rewards and lengths are of the groups that it kept",
        )
    if getattr(args, "partial_rollout", False):
        masked = getattr(args, "mask_offpolicy_in_partial_rollout", False)
        log.warning(
            "partial rollouts",
            "--partial-rollout: the trainer is not told which weights sampled which tokens. "
            + (
                "Tokens of older weights are masked, and do not count in mismatch and lengths."
                if masked
                else "The mismatch contains staleness; --mask-offpolicy-in-partial-rollout leaves such tokens out."
            ),
        )


def _independent_replicas(framework: Framework) -> int:
    """Return the number of replicas that fault-tolerant miles trains in process groups of their own."""
    if framework.name != "miles":
        return 1
    state: Any = importlib.import_module("miles.backends.training_utils.parallel").get_parallel_state()
    return int(state.indep_dp.size) if hasattr(state, "indep_dp") else 1  # miles-rl 0.0 has none


def group_of(framework: str) -> Callable[[], Any]:
    """Return the function that gives the framework's group of all training processes on the CPU."""
    function: Callable[[], Any] = importlib.import_module(f"{framework}.utils.distributed_utils").get_gloo_group
    return function
