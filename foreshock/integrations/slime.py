"""slime, vime and miles: functions for two of their command-line hooks, in Megatron training.

    --rollout-data-postprocess-path foreshock.integrations.slime.log_rollouts
    --custom-megatron-before-train-step-hook-path foreshock.integrations.slime.apply_advice

Both run in every training process. The first call observes the framework's functions that log metrics, compute
log-probs in the loss, save Hugging Face weights, and end a step. Step N is `rollout_id` N.
"""

from __future__ import annotations

from typing import Any

from foreshock.client.reporting import LogOnce
from foreshock.integrations.hooks import guard, observe
from foreshock.integrations.slime_framework import FRAMEWORKS, Framework, find_framework, place_of
from foreshock.integrations.slime_run import SlimeRun

__all__ = ["apply_advice", "log_rollouts"]

_log = LogOnce("foreshock.integrations.slime")
_run: SlimeRun | None = None


def log_rollouts(args: Any, rollout_id: int | None = None, rollout_data: Any = None, *_: Any, **__: Any) -> None:
    """Log the rollouts of this rank; the function of `--rollout-data-postprocess-path`.

    miles passes `args` alone: its rollouts are then taken from the next call of the framework's own logging.
    """
    guard(lambda: _log_rollouts(args, rollout_id, rollout_data), _log, "log_rollouts")


def apply_advice(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    """Scale the optimizer's learning rate; the function of `--custom-megatron-before-train-step-hook-path`.

    Every training process must call this: the leading one asks for the advice and hands the scale to the others.
    """
    if getattr(next(iter(model), None), "role", "actor") != "actor":
        # The advice is about the policy. The critic's processes have an optimizer of their own.
        return
    guard(lambda: _apply_advice(args, int(rollout_id), int(step_id), optimizer), _log, "apply_advice")


def _log_rollouts(args: Any, rollout_id: int | None, rollout_data: Any) -> None:
    run = _connected(args)
    if run is not None and rollout_id is not None and rollout_data is not None:
        run.take_rollouts(int(rollout_id), rollout_data)


def _apply_advice(args: Any, rollout_id: int, step_id: int, optimizer: Any) -> None:
    run = _connected(args)
    if run is not None:
        run.apply_advice(rollout_id, step_id, optimizer)


def _connected(args: Any) -> SlimeRun | None:
    """Return the run of this process; the first call makes it and observes the framework."""
    global _run
    if _run is None:
        framework = find_framework()
        if framework is None:
            known = ", ".join(f"{each.name} {each.known_version}" for each in FRAMEWORKS)
            _log.warning("framework", f"this is no training process of a known framework. Known: {known}.")
            return None
        _run = SlimeRun(args, framework, place_of(framework), _log)
        _observe(framework)
    return _run


def _observe(framework: Framework) -> None:
    watched = {
        "rollouts": (framework.rollout_data, _note_rollouts),
        "metrics": (framework.metrics, _note_metrics),
        "log-probs of the loss": (framework.forward, _note_forward),
        "checkpoints": (framework.save, _note_save),
        "the end of a step": (framework.end, _note_end),
    }
    for what, (place, note) in watched.items():
        module = framework.module(place)
        if module is None or not observe(module, place[1], _log, after=note):
            _log.warning(
                what,
                f"{framework.name} {framework.version} has no {'.'.join(place)}, so {what} cannot be observed. "
                f"Known version: {framework.known_version}.",
            )


def _note_rollouts(arguments: tuple[Any, ...], keywords: Any, _result: Any) -> None:
    named = dict(zip(("rollout_id", "args", "rollout_data"), arguments, strict=False)) | dict(keywords)
    if _run is not None:
        _run.take_rollouts(int(named["rollout_id"]), named["rollout_data"])


def _note_metrics(arguments: tuple[Any, ...], keywords: Any, _result: Any) -> None:
    if _run is not None:
        _run.note_metrics(keywords["metrics"] if "metrics" in keywords else arguments[1])


def _note_forward(_arguments: Any, keywords: Any, result: Any) -> None:
    if _run is not None:
        # slime returns a pair whose second part has the log-probs, miles that part alone.
        _run.note_forward(keywords["unconcat_tokens"], result[1] if isinstance(result, tuple) else result)


def _note_save(_arguments: Any, keywords: Any, _result: Any) -> None:
    # miles also writes weights to a path of its own, to send them to the engines.
    if _run is not None and keywords.get("path") is None:
        _run.announce_checkpoint()


def _note_end(_arguments: Any, _keywords: Any, _result: Any) -> None:
    if _run is not None:
        _run.end_step()
