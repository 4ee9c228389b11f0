"""slime, vime and miles: functions for two of their command-line hooks, in Megatron training.

    --rollout-data-postprocess-path foreshock.integrations.slime.log_rollouts
    --custom-megatron-before-train-step-hook-path foreshock.integrations.slime.apply_advice

Both run in every training process. The first call observes the framework's functions that log metrics, compute
log-probs in the loss, save Hugging Face weights, and end a step. Step N is `rollout_id` N.
"""

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

import numpy as np

from foreshock.client.launch import find_launch
from foreshock.client.reporting import LogOnce
from foreshock.integrations.hooks import After, guard, hold_numbers, is_number, observe
from foreshock.integrations.releases import warn_of_unknown_version
from foreshock.integrations.slime_columns import (
    attributes_of,
    columns_of,
    flat,
    gather_slices,
    model_kind_of,
    precision_of,
)
from foreshock.integrations.slime_framework import (
    ACTOR,
    FRAMEWORKS,
    Framework,
    Function,
    Place,
    find_framework,
    group_of,
    place_of,
    warn_of_options,
)
from foreshock.integrations.slime_weights import WeightSync
from foreshock.integrations.trainer_run import TrainerRun, modes_of_environment, of_the_leader
from foreshock.learning_rate.apply import apply_scale
from foreshock.learning_rate.levers import Correction
from foreshock.process_fingerprint import process_fingerprint

# How long the last step waits until everything is delivered: Ray then ends the process without notice.
_LAST_FLUSH_SECONDS = 60.0


class _Forward:
    """Log-probs and entropies of the loss's first forward pass over each sample of a step."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._samples = {id(tokens): number for number, tokens in enumerate(data["tokens"])}
        self.log_probs: list[Any] = [None] * len(self._samples)
        self.entropies: list[Any] = [None] * len(self._samples)

    def note(self, tokens: Any, scored: Mapping[str, Any]) -> None:
        """Keep the results of a micro-batch, whose token tensors are the objects of the step's samples."""
        for name, kept in (("log_probs", self.log_probs), ("entropy", self.entropies)):
            for sample, values in zip(tokens, scored.get(name) or (), strict=False):
                number = self._samples.get(id(sample))
                if number is not None and kept[number] is None:
                    kept[number] = values.detach()


class SlimeRun(TrainerRun):
    """One training process. Only the processes that log have a client."""

    def __init__(self, args: Any, framework: Framework, place: Place, log: LogOnce) -> None:
        super().__init__(framework.name, log, self._set_correction)
        self.args = args
        self.release = framework
        self.place = place
        self.planned = lambda: self._last_step
        self._step: int | None = None
        self._data: Mapping[str, Any] | None = None
        self._forward: _Forward | None = None
        self._metrics: dict[str, list[float]] = {}
        self._own_arguments = {name: getattr(args, name, None) for name in ("use_tis", "tis_clip", "tis_clip_low")}
        # The names of the columns of the step.
        self._given = set[str]()
        warn_of_options(args, place, log)

    def take_rollouts(self, step: int, data: Mapping[str, Any]) -> None:
        """Log the rollouts of a step, or keep them until the loss has computed the log-probs that they lack."""
        if step == self._step:
            return
        self._step = step
        self._data = self._forward = None
        self._given = {name for name, value in data.items() if value is not None}
        self._metrics = {}
        if not self.place.has_rollouts:
            return
        # A rank without a client still takes part in the collectives of its context-parallel group.
        guard(lambda: self._start(step), self.log, "the start of the run")
        if data.get("log_probs") is None:
            self._data, self._forward = data, _Forward(data)
        else:
            self._log_rollouts(data, data["log_probs"], data.get("entropy"), "recomputed_old")

    def note_forward(self, tokens: Any, scored: Mapping[str, Any]) -> None:
        """Keep the log-probs of a forward pass of the loss, if the framework did not compute them before."""
        if self._forward is not None:
            self._forward.note(tokens, scored)

    def note_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Keep metrics of the step that is being trained."""
        for name, value in metrics.items():
            if not name.endswith("/step") and is_number(value):
                self._metrics.setdefault(name, []).append(float(value))

    def end_step(self) -> None:
        """Log the data of a step that exists only after its training."""
        data, forward, step = self._data, self._forward, self._step
        self._data = self._forward = None
        if step is None:
            return
        if data is not None and forward is not None:
            one_update = len(data.get("num_microbatches") or (0,)) == 1
            policy = "recomputed_old" if one_update else "current"
            self._log_rollouts(data, forward.log_probs, forward.entropies, policy)
        if self.client is None:
            return
        if self.place.leads and self._metrics:
            # A step of several optimizer steps has a metric of each: their mean is logged.
            self.log_metrics(step, {name: fmean(values) for name, values in self._metrics.items()})
        if self._is_last(step) and self.place.leads:
            self.client.finish()
        self._flush_if_ending(step)

    def announce_checkpoint(self) -> None:
        """Announce the Hugging Face weights that were saved after the step, which sample the next one."""
        root, template = os.environ.get("FORESHOCK_WEIGHTS_ROOT"), getattr(self.args, "save_hf", None)
        if root is None or template is None or self.client is None or self._step is None or not self.place.leads:
            return
        if not self._is_synchronous():
            self.log.warning(
                "asynchronous",
                "checkpoints are not announced: without --colocate the rollouts may be sampled while training, by "
                "older weights. Set FORESHOCK_SYNCHRONOUS=1 if train.py is run, which samples after each update.",
            )
            return
        folder = Path(str(template).format(rollout_id=self._step))
        path = folder.relative_to(_fixed_folder(str(template)))
        self.client.log_checkpoint(self._step + 1, root=root, path=path.as_posix(), local_folder=folder)
        self._flush_if_ending(self._step)

    def log_weights(self, sent: Any, held: Any) -> None:
        """Log what was sent after the step, and what the engines hold; it samples the next one."""
        if self.client is not None and self._step is not None and not self._is_last(self._step):
            self.client.log_weights(self._step + 1, trainer=sent, engines=held)

    def apply_advice(self, step: int, optimizer_step: int, optimizer: Any) -> None:
        """Scale the learning rate of an optimizer step equally in all training processes."""
        if self.place.problem is None:
            own = None
            if self.place.leads:
                guard(lambda: self._start(step), self.log, "the start of the run")
                own = self.decisions(step)
            self._decided = of_the_leader(own, group_of(self.framework))
        scale, correction = self._decided
        if optimizer_step == 0:
            self.correct(correction, step)
            self.apply(optimizer, scale, step)
        else:
            apply_scale(optimizer, scale)

    def _set_correction(self, correction: Correction | None) -> str | None:
        """Set the TIS arguments, which the loss reads in each step, or those of the command line; or say why not."""
        args = self.args
        if correction is None:
            vars(args).update(self._own_arguments)
            return None
        upper = correction.bounds.upper
        options = f"--use-tis --tis-clip {upper:g} --tis-clip-low 0"
        if correction.kind != "token_tis":
            return f"{self.framework} truncates tokens; another correction needs --custom-tis-function-path"
        if getattr(args, "custom_tis_function_path", None):
            return "--custom-tis-function-path replaces its truncation of tokens"
        if getattr(args, "use_rollout_logprobs", False):
            return f"with --use-rollout-logprobs there is no ratio of the two: restart with {options} instead"
        if not getattr(args, "use_tis", False) and not self._given >= {"log_probs", "rollout_log_probs"}:
            return f"without {options} the step has no log-probs of both sides: restart with them"
        args.use_tis, args.tis_clip, args.tis_clip_low = True, upper, 0.0
        return None

    def _start(self, step: int) -> None:
        """Start the run before its first data."""
        if self.client is not None or not self.place.logs:
            return
        args = self.args
        start = getattr(args, "start_rollout_id", None)
        # Ray may replace this process within the launch; a declared single shard would then be another attempt.
        several = self.place.shards > 1
        self.connect(os.environ.get("FORESHOCK_RUN_KEY") or self._run_key())
        self.start(
            step if start is None else int(start),
            leads=self.place.leads,
            first_step=0,
            model=str(getattr(args, "hf_checkpoint", None) or getattr(args, "load", None) or "") or None,
            trainer=f"{self.framework} {self.release.version} Megatron",
            engine=self.release.engine,
            initial_learning_rate=getattr(args, "lr", None),
            length_cap=getattr(args, "rollout_max_response_len", None),
            model_kind=model_kind_of(args),
            **modes_of_environment(),
            shard=self.place.shard if several else None,
            shards=self.place.shards if several else None,
        )

    def _run_key(self) -> str:
        """Return a name that all training processes and all restarts share, as far as the arguments have one."""
        group, save = getattr(self.args, "wandb_group", None), getattr(self.args, "save", None)
        if group:
            return f"{getattr(self.args, 'wandb_project', None) or self.framework}/{group}"
        if save:
            return PurePath(str(save)).name
        return f"{self.framework}-{find_launch().identity}"[:200]

    def _log_rollouts(self, data: Mapping[str, Any], log_probs: Any, entropies: Any, policy: str) -> None:
        scores = self._scores(data, log_probs, entropies)
        if self.client is None or self._step is None:
            return
        if "rollout_log_probs" not in scores and self.place.problem is None:
            why = (
                "samples have no rollout_log_probs: the function of --custom-generate-function-path must set "
                "`Sample.rollout_log_probs`"
            )
            self.warn_of_missing_log_probs(scores, why, "step has no log-probs of the trainer")
        columns = columns_of(
            data, scores, step=self._step, samples_per_prompt=int(self.args.n_samples_per_prompt), log=self.log
        )
        attributes = attributes_of(
            self.args,
            trainer_policy=policy if "trainer_log_probs" in columns else None,
            trainer_fingerprint=process_fingerprint("torch", data["tokens"][0].device, **precision_of(self.args)),
        )
        scored_before = attributes.trainer_policy == "recomputed_old"
        if scored_before and self._is_synchronous() and not getattr(self.args, "partial_rollout", False):
            # The engines got the weights that score the rollouts before they sampled them.
            columns["weights_version"] = np.full(len(columns["response_token_ids"]), self._step, np.int32)
            attributes = replace(attributes, trainer_weights_version=self._step)
        self.log_columns(self._step, columns, attributes=attributes, copy=False)

    def _scores(self, data: Mapping[str, Any], log_probs: Any, entropies: Any) -> dict[str, Any]:
        """Return the columns of response tokens, whole in the process that logs them."""
        if log_probs is not None and any(each is None for each in log_probs):
            log_probs = None
            self.log.warning(
                "no trainer log-probs",
                f"{self.framework} did not compute the trainer's log-probs before the update, and the loss was "
                "not seen computing them: --get-mismatch-metrics computes them. The rest is logged.",
            )
        if entropies is not None and any(each is None for each in entropies):
            entropies = None
        top_p = getattr(self.args, "rollout_top_p", 1.0)
        columns = {
            "rollout_log_probs": data.get("rollout_log_probs"),
            "trainer_log_probs": log_probs,
            "advantage": data.get("advantages"),
            # With top-p the framework restricts the log-probs to the nucleus, but not the entropy.
            "entropy": entropies if top_p in (None, 1, 1.0) else None,
        }
        if self.place.context_size == 1:
            lengths = [int(length) for length in data["response_lengths"]]
            return {
                name: flat(values)
                for name, values in columns.items()
                if values is not None and hold_numbers(self.framework, name, values, lengths, self.log)
            }
        if self.place.problem is not None:
            return {}
        return self._gathered(data, columns)

    def _gathered(self, data: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        from megatron.core import mpu

        # All ranks must gather the same names: those that the framework gives to all of them, and the trainer's.
        given = {name: columns[name] for name in ("rollout_log_probs", "advantage") if columns[name] is not None}
        held = {**given, "trainer_log_probs": columns["trainer_log_probs"]}
        gathered = gather_slices(
            held,
            data["total_lengths"],
            data["response_lengths"],
            rank=self.place.context_rank,
            size=self.place.context_size,
            group=mpu.get_context_parallel_group(),
            device=data["tokens"][0].device,
        )
        return {name: values for name, values in gathered.items() if not values.size or (values == values).any()}

    def _is_synchronous(self) -> bool:
        return bool(getattr(self.args, "colocate", False)) or os.environ.get("FORESHOCK_SYNCHRONOUS") == "1"

    @property
    def _last_step(self) -> int | None:
        rollouts = getattr(self.args, "num_rollout", None)
        return None if rollouts is None else int(rollouts) - 1

    def _is_last(self, step: int) -> bool:
        return self._last_step is not None and step >= self._last_step

    def _flush_if_ending(self, step: int) -> None:
        """Deliver everything now if Ray ends this process after the step."""
        if self.client is not None and (self._is_last(step) or getattr(self.args, "release_train", False)):
            self.client.flush(_LAST_FLUSH_SECONDS)


def _fixed_folder(template: str) -> str:
    """Return the folder of a path template that is the same for all steps."""
    parts = PurePath(template).parts
    fixed = next((number for number, part in enumerate(parts) if "{" in part), len(parts) - 1)
    return str(PurePath(*parts[:fixed]))


_log = LogOnce("foreshock.integrations.slime")
_run: SlimeRun | None = None


def log_rollouts(args: Any, rollout_id: int | None = None, rollout_data: Any = None, *_: Any, **__: Any) -> None:
    """Log the rollouts of this rank; the function of `--rollout-data-postprocess-path`.

    miles passes only `args`: its rollouts are then taken from the next call of the framework's own logging.
    """

    def log() -> None:
        run = _connected(args)
        if run is not None and rollout_id is not None and rollout_data is not None:
            run.take_rollouts(int(rollout_id), rollout_data)

    guard(log, _log, "log_rollouts")


def apply_advice(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, *_: Any, **__: Any) -> None:
    """Scale the optimizer's learning rate; the function of `--custom-megatron-before-train-step-hook-path`.

    Every training process must call this: the leading one asks for the advice and passes the scale to the others.
    """
    if getattr(next(iter(model), None), "role", "actor") != "actor":
        # The advice is about the policy. The critic's processes have an optimizer of their own.
        return

    def apply() -> None:
        run = _connected(args)
        if run is not None:
            run.apply_advice(int(rollout_id), int(step_id), optimizer)

    guard(apply, _log, "apply_advice")


def _connected(args: Any) -> SlimeRun | None:
    """Return the run of this process; the first call makes it and observes the framework."""
    global _run
    if _run is None:
        framework = find_framework()
        if framework is None:
            known = ", ".join(f"{each.name} ({each.known_versions})" for each in FRAMEWORKS)
            _log.warning("framework", f"this is no training process of a known framework. Known: {known}.")
            return None
        warn_of_unknown_version(framework.name, _log)
        _run = SlimeRun(args, framework, place_of(framework), _log)
        # A rank that cannot observe still joins the others' collectives, and uses their scale.
        guard(functools.partial(_observe, _run), _log, framework.name)
        if os.environ.get("FORESHOCK_NOTARY") == "1":
            log_weights = _run.log_weights if _run.place.leads else None
            sync = WeightSync(log_weights, group_of(framework.name))
            guard(lambda: sync.observe(sys.modules[f"{framework.name}.{ACTOR}"], _log), _log, "the weight sync")
    return _run


def _observe(run: SlimeRun) -> None:
    framework = run.release

    def rollouts(arguments: tuple[Any, ...], keywords: Any, _result: Any) -> None:
        named = dict(zip(("rollout_id", "args", "rollout_data"), arguments, strict=False)) | dict(keywords)
        run.take_rollouts(int(named["rollout_id"]), named["rollout_data"])

    def metrics(arguments: tuple[Any, ...], keywords: Any, _result: Any) -> None:
        run.note_metrics(keywords["metrics"] if "metrics" in keywords else arguments[1])

    def forward(_arguments: Any, keywords: Any, result: Any) -> None:
        # slime returns a pair whose second part has the log-probs, miles that part alone.
        run.note_forward(keywords["unconcat_tokens"], result[1] if isinstance(result, tuple) else result)

    def save(_arguments: Any, keywords: Any, _result: Any) -> None:
        # miles also writes weights to a path of its own, to send them to the engines.
        if keywords.get("path") is None:
            run.announce_checkpoint()

    watched: dict[str, tuple[tuple[Function, ...], After]] = {
        "rollouts": (framework.rollout_data, rollouts),
        "metrics": (framework.metrics, metrics),
        "log-probs of the loss": (framework.forward, forward),
        "checkpoints": (framework.save, save),
        "the end of a step": (framework.end, lambda *_: run.end_step()),
    }
    for what, (places, note) in watched.items():
        found = framework.find(places)
        if found is None:
            _log.warning(
                what,
                f"{framework.name} {framework.version} has no {'.'.join(places[0])}, so {what} cannot be observed. "
                f"Known versions: {framework.known_versions}.",
            )
        else:
            observe(*found, _log, after=note)
