"""The run of a verl trainer on its driver, from the beginning to the end of `fit`."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from pathlib import Path
from typing import Any

from foreshock.client.client import Client
from foreshock.client.reporting import LogOnce
from foreshock.integrations.hooks import guard, is_observed, mark_observed
from foreshock.integrations.verl_columns import attributes_of, precision_of
from foreshock.learning_rate.feed import AdviceFeed
from foreshock.model_kind import model_kind_of_folder

__all__ = ["ACTIVE", "KNOWN_VERSIONS", "SCALE_KEY", "VerlRun", "announce_checkpoint", "log", "missing", "observe_fit"]

# The releases of verl that were run with these modules.
KNOWN_VERSIONS = ("0.9",)
# The key of the scale in what travels with a batch.
SCALE_KEY = "foreshock_learning_rate_scale"

log = LogOnce("foreshock.integrations.verl")


class VerlRun:
    """The run of the trainer whose `fit` is active in this process."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.response_mask: Any = None
        self.entropy: Any = None
        configuration = trainer.config
        name = f"{configuration.trainer.project_name}/{configuration.trainer.experiment_name}"
        self.client = Client(run_key=os.environ.get("FORESHOCK_RUN_KEY") or name)
        self.feed: AdviceFeed | None = None
        self._started = False

    def start(self) -> None:
        """Describe the run before its first data; the trainer has loaded its checkpoint by then."""
        if self._started:
            return
        self._started = True
        configuration = self.trainer.config
        actor = configuration.actor_rollout_ref
        self.client.start_run(
            model=str(actor.model.path),
            trainer=f"verl {importlib.metadata.version('verl')} {actor.actor.get('strategy', '')}".strip(),
            engine=str(actor.rollout.name),
            initial_learning_rate=float(actor.actor.optim.lr),
            length_cap=actor.rollout.get("response_length", None),
            model_kind=model_kind_of_folder(str(actor.model.path)),
            **precision_of(actor.actor),
            advice_mode="apply" if os.environ.get("FORESHOCK_ADVICE_MODE") == "apply" else "shadow",
            resume_step=int(self.trainer.global_steps),
            attributes=attributes_of(configuration),
        )
        self.feed = AdviceFeed(self.client)

    def warn_of_missing_log_probs(self, columns: dict[str, Any]) -> None:
        """Say which option turns the engine's log-probs on, if they are missing."""
        if "rollout_log_probs" not in columns:
            log.warning(
                "no rollout log-probs",
                "verl's batch has no rollout_log_probs, so there is no training-inference mismatch to measure: set "
                "actor_rollout_ref.rollout.calculate_log_probs=True. Lengths, rewards and metrics are logged.",
            )

    def end(self, *, failed: bool) -> None:
        """Mark the run as finished or failed and deliver what is left."""
        if self.feed is not None:
            self.feed.close()
        if self._started:
            self.client.finish(failed=failed)
        self.client.close()


ACTIVE: list[VerlRun] = []


def observe_fit(trainer_class: Any) -> None:
    """Begin a run with each call of `fit` of this class, and end it with the call."""
    original = trainer_class.fit
    if is_observed(trainer_class, "fit"):
        return
    where = f"{trainer_class.__name__}.fit"

    @functools.wraps(original)
    def fit(self: Any, *arguments: Any, **keywords: Any) -> Any:
        guard(lambda: ACTIVE.append(VerlRun(self)), log, where)
        failed = True
        try:
            result = original(self, *arguments, **keywords)
            failed = False
            return result
        finally:
            runs = list(ACTIVE)
            ACTIVE.clear()
            for run in runs:
                guard(functools.partial(run.end, failed=failed), log, where)

    mark_observed(fit)
    trainer_class.fit = fit


def missing(trainer_class: Any, methods: tuple[str, ...]) -> bool:
    """Return True, with a warning, if a trainer class of this release lacks one of the observed methods."""
    absent = [name for name in methods if not callable(getattr(trainer_class, name, None))]
    if absent:
        name = getattr(trainer_class, "__name__", "the trainer")
        log.warning(
            f"methods of {name}",
            f"verl {importlib.metadata.version('verl')}: {name} has no {absent[0]}, so rollouts are not logged; "
            f"metrics are. Known versions: {', '.join(KNOWN_VERSIONS)}.",
        )
    return bool(absent)


def announce_checkpoint(_arguments: Any, _keywords: Any, _result: Any) -> None:
    """Announce the Hugging Face weights that verl saved after the update of a step; they sample the next one."""
    root = os.environ.get("FORESHOCK_WEIGHTS_ROOT")
    for run in ACTIVE:
        step = int(run.trainer.global_steps)
        path = f"global_step_{step}/actor/huggingface"
        folder = Path(str(run.trainer.config.trainer.default_local_dir)) / path
        if root and any(folder.glob("*.safetensors")):
            run.client.log_checkpoint(step + 1, root=root, path=path, local_folder=folder, weights_version=step)
