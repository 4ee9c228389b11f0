"""The client that a trainer holds: every call returns at once, never raises, and is delivered in the background.

    with foreshock.Client(run_key="my-run") as client:
        client.start_run(model="Qwen3-4B", initial_learning_rate=1e-6)
        for step in range(...):
            client.log_rollouts(step, {...})
            client.log_scalars(step, {"grad_norm": 0.3})

A call copies its arrays (`capture.py`). A thread encodes them into a folder (`background.py`, `spool.py`), from which
another one sends them (`sender.py`).

Every rank that logs has a client. All clients of a launch log into one attempt, which they derive from what the
launcher gives to all ranks (`launch.py`).

Forking: in a forked child the client is disabled, and items logged there are counted as dropped. Create a client in
each process that logs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, cast

from foreshock.api.runs import MOST_SCALARS
from foreshock.changes import CHANGE_KINDS, ChangeKind
from foreshock.client import deliveries
from foreshock.client.background import Background, Make
from foreshock.client.capture import Rollouts, capture_rollouts, encode_shard, size_of
from foreshock.client.connection import TRAINER_ANSWER_BYTES, ServiceConnection
from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.launch import find_launch
from foreshock.client.reporting import Counters, DeliveryStatus, Failures, LogOnce, never_raises
from foreshock.client.settings import ClientSettings
from foreshock.clock import now_us
from foreshock.diagnosis.quantities import check_declared
from foreshock.digests import weights_digest
from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint, with_precision
from foreshock.json_values import given, json_bytes
from foreshock.learning_rate.levers import Value
from foreshock.learning_rate.modes import AdviceMode, BesideTheRate
from foreshock.model_kind import MODEL_KINDS, ModelKind, known_model_kind, model_kind_of_folder
from foreshock.notary.compare import Holding
from foreshock.notary.pieces import Tensors
from foreshock.page_addresses import DEFAULT_PROJECT
from foreshock.rollouts.attributes import BatchAttributes

if TYPE_CHECKING:
    from foreshock.client.reader import Reader
    from foreshock.exporters.exports import Export, Exports

__all__ = ["Client"]

# The limit for the feed and the exporters, which run in the trainer.
_MOST_ANSWER_BYTES = 64 * TRAINER_ANSWER_BYTES
_LONGEST_REFUSAL = 200


def page_in_wandb(run: Any = None) -> str | None:
    """Return the page of a W&B run, by default the process's active one; None if it has none, as an offline one."""
    run = run or getattr(sys.modules.get("wandb"), "run", None)
    with contextlib.suppress(Exception):
        return None if run is None or run.offline else str(run.url)
    return None


class Client:
    """Logs one run to the service. Methods are safe from any thread; only `flush` and `close` wait.

    Arguments not given come from `FORESHOCK_URL`, `FORESHOCK_API_KEY`, `FORESHOCK_SPOOL_DIRECTORY`,
    `FORESHOCK_RUN_KEY` and `FORESHOCK_ATTEMPT_KEY`. `run_key` is your own permanent name for the run: the same key
    after a restart, also in the same process, continues the run as a new attempt. `attempt_key` names one start of the
    job and must be equal on all its ranks; it is needed only if they share no launcher's variables
    (`foreshock.client.launch`). `strict=True` raises errors in arguments, for development. `block_when_full=True` makes
    calls wait for room in the queue instead of dropping, for importers. The other keyword arguments are the fields of
    `ClientSettings`; `mode="statistics"` (or `FORESHOCK_MODE`) measures every token here and sends the statistics, with
    some rollouts in full, for large runs.

    `export` writes what the service computes beside the reward: "wandb", "tensorboard", "mlflow", "trackio", an
    `Exporter`, or several of these. Only shard 0 exports. None: `FORESHOCK_EXPORT`; an empty string: nothing.

    In an event loop call the methods as they are, and `await asyncio.to_thread(client.flush)`. `counters` has the
    numbers of delivered, spooled, rejected and dropped items.
    """

    def __init__(
        self,
        url: str | None = None,
        project: str = DEFAULT_PROJECT,
        run_key: str | None = None,
        *,
        api_key: str | None = None,
        spool_directory: str | os.PathLike[str] | None = None,
        attempt_key: str | None = None,
        strict: bool = False,
        block_when_full: bool = False,
        export: Export | None = None,
        **settings: Any,
    ) -> None:
        """Start the background. Nothing is sent until a run is started. Raises ConfigurationError."""
        self.settings = ClientSettings.resolve(url, api_key, spool_directory, **settings)
        self.project = project
        self.run_key = run_key or os.environ.get("FORESHOCK_RUN_KEY") or f"run-{uuid.uuid4().hex[:12]}"
        self.launch = find_launch(attempt_key)
        self.counters = Counters()
        self._log = LogOnce("foreshock.client")
        self.failures = Failures(self.counters, self._log, strict=strict)
        self.newest_step = -1
        """The newest step that this start logged or acknowledged, or resumes at; −1 before it."""
        self._registration: Registration | None = None
        self._attributes = BatchAttributes()
        self._shard: int | None = None
        self._shards: int | None = None
        self._exports: Exports | None = None
        if os.environ.get("FORESHOCK_EXPORT") if export is None else export:
            # Imported only if something is exported.
            from foreshock.exporters.exports import Exports

            self._exports = Exports(export, self)
        self._background = Background(
            self.settings, self.project, self.counters, self._log, block_when_full=block_when_full
        )

    @property
    def run_id(self) -> str | None:
        """The run's id at the service, None until the run is registered."""
        return None if self._registration is None else self._background.sender.run_id(self._registration)

    @property
    def attempt(self) -> int | None:
        """The number of this attempt, None until the attempt is registered."""
        return None if self._registration is None else self._background.sender.attempt_number(self._registration)

    @property
    def attempt_key(self) -> str | None:
        """The key of this attempt, which each start of the run changes; None before the first one."""
        return None if self._registration is None else str(self._registration.attempt["key"])

    @property
    def asks_to_apply(self) -> bool:
        """Whether the trainer asks for the apply mode of the learning rate."""
        return self._registration is not None and self._registration.run.get("advice_mode") == "apply"

    @property
    def want_weights_at_step(self) -> int | None:
        """A step whose weights the service asks to save and announce with `log_checkpoint`, None if there is none."""
        return self._background.want_weights_at_step

    def set_checkpoint_request(self, step: int | None) -> None:
        """Set `want_weights_at_step` from an AdviceFeed's answer."""
        self._background.set_checkpoint_request(step)

    def tell_remarks_of(self, hook: LogOnce) -> None:
        """Let the run's page repeat what a framework's hook says in its log: what it refuses, and why."""
        self._background.sender.hook = hook

    def new_connection(self, *, timeout_seconds: float | None = None) -> ServiceConnection:
        """Return another connection with this client's address and key, for another thread."""
        seconds = self.settings.timeout_seconds if timeout_seconds is None else timeout_seconds
        return ServiceConnection(
            self.settings.url, self.settings.api_key, timeout_seconds=seconds, max_answer_bytes=_MOST_ANSWER_BYTES
        )

    def reader(self) -> Reader:
        """Return a reader of what the service has, with this client's address, key and project."""
        from foreshock.client.reader import Reader

        return Reader(self.settings.url, self.project, api_key=self.settings.api_key)

    def start_run(
        self,
        *,
        name: str | None = None,
        model: str | None = None,
        trainer: str | None = None,
        engine: str | None = None,
        hardware: str | None = None,
        initial_learning_rate: float | None = None,
        length_cap: int | None = None,
        model_kind: ModelKind | None = None,
        master_dtype: str | None = None,
        autocast: str | None = None,
        head_dtype: str | None = None,
        advice_mode: AdviceMode | None = None,
        correction_mode: AdviceMode | None = None,
        rollback_mode: AdviceMode | None = None,
        correction: str | None = None,
        scalar_names: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        note: str | None = None,
        baseline: str | None = None,
        tracker_url: str | None = None,
        resume_step: int = 0,
        shard: int | None = None,
        shards: int | None = None,
        fingerprint: Fingerprint | Mapping[str, Any] | None = None,
        attributes: BatchAttributes | None = None,
    ) -> Client:
        """Describe the run and start an attempt; returns the client, for `with client.start_run(...):`.

        Each call is a start. `resume_step` is the first step that this attempt computes. `shard` and `shards` are this
        rank's number and the number of ranks, if several log; they become the defaults of `log_rollouts`, and leaving
        the `with` block finishes the run on shard 0 only. Call this on every rank that logs, with the same other
        arguments. `shards=1` declares that no other rank logs rollouts: the attempt is then this call's alone.

        `attributes` (sampling defaults, logprobs mode, …) apply to every batch without its own. Without this call the
        first logged item starts the run. `model_kind` ("dense", "moe") decides which healthy ranges hold; None: that of
        a logged checkpoint. `scalar_names` maps watched scalars to your own names: `{"reward": "my/score"}`.
        `advice_mode` is the mode of a new run's learning rate, None: "shadow"; `correction_mode` and `rollback_mode`
        are those of the other levers, until somebody chooses one. A restart keeps the run's modes, which an operator
        may have switched, and logs a warning if it asks for another one. `correction` is the correction to advise if
        any, such as "sequence_mis:2", None: token TIS. `tags` and `note` are shown in the list of runs;
        `baseline` is the id of a run to compare with; `tracker_url` is the run's page in a tracker, None: that of the
        active W&B run of this process.

        `master_dtype`, `autocast` and `head_dtype` ("float32", "bfloat16", "float16", or torch's dtypes) are the
        precision with which probes replay the trainer: of the weights that its forward pass reads, of its autocast
        (None: none), of the language-model head if it has one of its own. They are kept in the attribute
        `trainer_fingerprint` (`foreshock.process_fingerprint.process_fingerprint`).

        Raises ConfigurationError, before training begins, if `shards` > 1 and nothing names the ranks' launch.
        """
        self.launch.require_shared(shards or 1)
        description = {
            "name": name, "model": model, "trainer": trainer, "engine": engine, "hardware": hardware,
            "initial_learning_rate": initial_learning_rate, "length_cap": length_cap, "model_kind": model_kind,
            "advice_mode": advice_mode, "correction_mode": correction_mode, "rollback_mode": rollback_mode,
            "correction": correction, "scalar_names": None if scalar_names is None else dict(scalar_names),
            "tags": list(tags) or None, "note": note, "baseline": baseline,
            "tracker_url": tracker_url or page_in_wandb(),
        }  # fmt: skip
        precision = {"master_dtype": master_dtype, "autocast": autocast, "head_dtype": head_dtype}
        with self.failures.noted("start_run"):
            attributes = deliveries.checked_attributes(attributes or BatchAttributes())
            if (shard is None) != (shards is None):
                raise ConfigurationError(f"give both shard and shards, or neither, got shard={shard}, shards={shards}")
            if shard is not None and shards is not None:
                deliveries.check_shard(0, shard, shards)
            registration = self._new_registration(description, resume_step, (shard, shards), fingerprint)
            self._shard, self._shards = shard, shards
            self._attributes = replace(
                attributes,
                trainer_fingerprint=with_precision(attributes.trainer_fingerprint, precision),
                length_cap=length_cap if attributes.length_cap is None else attributes.length_cap,
            )
            self._register(registration)
        return self

    @never_raises
    def log_rollouts(
        self,
        step: int,
        rollouts: Rollouts,
        *,
        shard: int | None = None,
        shards: int | None = None,
        attributes: BatchAttributes | None = None,
        copy: bool = True,
    ) -> None:
        """Log rollouts of a step: shard `shard` of `shards`, by default those of `start_run`, else 0 of 1.

        `rollouts` is a RolloutBatch, an Arrow table, or a mapping of columns (the names of the rollout schema, or of
        RolloutBatch's fields). Columns of tokens are flat arrays with `prompt_offsets` and `response_offsets` [N + 1]
        (or `…_lengths` [N]), padded [N, L] arrays with `prompt_padding_mask` and `response_padding_mask`, Arrow lists,
        or lists with one list per rollout. Arrays are numpy, torch on the CPU, or Arrow; `sample_ids` is optional.
        Arrays are copied before the call returns; `copy=False` skips the copy if the caller never changes them again.
        A rollout whose lists differ in length is left out and counted as `invalid`; the others of the shard are sent.
        """
        shard = (self._shard or 0) if shard is None else shard
        shards = (self._shards or 1) if shards is None else shards
        deliveries.check_shard(step, shard, shards)
        if self._shards != 1:
            self.launch.require_shared(shards)
        registration = self._started()
        what = f"shard {shard} of step {step}"

        def capture() -> Make:
            captured = capture_rollouts(
                rollouts,
                default_ids=f"{step}-{shard}",
                attributes=self._attributes if attributes is None else deliveries.checked_attributes(attributes),
                copy=copy,
                note=lambda count, sentence: self._background.note_left_out(count, f"{what}: {sentence}"),
            )
            rank = (shard, shards)
            return functools.partial(encode_shard, captured, registration, step, rank, self.settings, self._log)

        if not self._background.take(what, size_of(rollouts), capture):
            return
        self.newest_step = max(self.newest_step, int(step))
        if shard == 0 and self._exports is not None:
            self._exports.note_step(int(step))

    @never_raises
    def note_left_out(self, count: int, reason: str) -> None:
        """Count rollouts that the caller left out of a shard since they are wrong; the run's page shows the number."""
        self._started()
        self._background.note_left_out(count, reason)

    @never_raises
    def log_scalars(self, step: int, values: Mapping[str, Any], *, source: str = "trainer") -> None:
        """Log numbers of a step by name (`grad_norm`, `entropy`, …); None, NaN and ±inf count as missing.

        What is no number, or has a name that is not one line, is left out and counted as invalid; a strict client
        raises ConfigurationError after the others are logged.
        """
        self._started()
        numbers, wrong = deliveries.checked_scalars(values)
        deliveries.check_whole_number("step", step)
        for start in range(0, len(numbers), MOST_SCALARS):
            part = dict(islice(numbers.items(), start, start + MOST_SCALARS))
            self._deliver(f"scalars of step {step}", "scalars", {"source": source, "values": part}, step=int(step))
            self.newest_step = max(self.newest_step, int(step))
        if wrong:
            if self.failures.are_raised:
                raise ConfigurationError(wrong[0])
            self._background.note_invalid("scalars", f"scalars of step {step} are left out: {wrong[0]}", len(wrong))

    @never_raises
    def log_checkpoint(
        self,
        step: int,
        *,
        root: str,
        path: str,
        digest: str | None = None,
        local_folder: str | os.PathLike[str] | None = None,
        model_kind: ModelKind | None = None,
        weights_version: int | None = None,
        expires_at_us: int | None = None,
    ) -> None:
        """Announce saved weights: those that sampled and scored `step`, as a Hugging Face folder of safetensors.

        `root` is a name from the workers' configuration, `path` the folder below it. `digest` is
        `foreshock.digests.weights_digest(folder)`; without it, it is computed in the background from `local_folder`.
        `model_kind` ("dense", "moe") is read from `local_folder/config.json` unless it is given. The weights are kept
        until `expires_at_us`, in UTC microseconds.
        """
        registration = self._started()
        if digest is None and local_folder is None:
            raise ConfigurationError("log_checkpoint needs `digest` or `local_folder`, got neither")
        if digest is not None:
            deliveries.check_digest(digest)
        deliveries.check_whole_number("step", step)
        announced = given({
            "root": root, "path": path, "digest": digest, "model_kind": model_kind,
            "weights_version": weights_version, "expires_at_us": expires_at_us,
        })  # fmt: skip

        def make() -> Delivery:
            if local_folder is not None:
                announced.setdefault("model_kind", model_kind_of_folder(local_folder))
                if digest is None:
                    announced["digest"] = weights_digest(os.fspath(local_folder))
            body = json_bytes({"format": "hf_safetensors"} | given(announced))
            return Delivery("checkpoint", registration, {"step": int(step)}, body)

        # Reading gigabytes of weights must not delay the encoding of rollouts.
        what = f"the checkpoint of step {step}"
        self._background.take(what, 0, lambda: make, needed=True, is_slow=digest is None)

    @never_raises
    def log_change(
        self,
        step: int,
        kind: ChangeKind,
        *,
        note: str | None = None,
        before: float | str | None = None,
        after: float | str | None = None,
    ) -> None:
        """Announce that something changes at `step`: the "length_cap", the "curriculum", the "data_mixture", "other".

        Call it before the step's rollouts are logged, from one rank. Baselines then begin anew at `step`: lengths that
        double after the length cap was doubled raise no surge alert. Changes of engine, flags or hardware need no
        announcement if the batch attributes name them.
        """
        deliveries.check_whole_number("step", step)
        if kind not in CHANGE_KINDS:
            raise ConfigurationError(f"kind must be one of {', '.join(CHANGE_KINDS)}, got {kind!r}")
        body = given({"note": note, "before": before, "after": after})
        self._deliver(f"a change at step {step}", "change", body, step=int(step), change=kind)

    @never_raises
    def log_weights(
        self,
        step: int,
        *,
        trainer: Tensors | Holding | None = None,
        engines: Mapping[str, Tensors | Holding] | None = None,
        variants: Mapping[str, Tensors] | None = None,
        engines_in_all: int | None = None,
    ) -> None:
        """Report, after a weight sync, what the trainer delivered and what engines hold (`foreshock.notary`).

        `step` is the first step that these weights sample. Trainer and engines may report from different processes.
        `engines` have the ids of the column `engine_id`; `variants` are weights that no engine should hold, by
        description, such as "without the adapter". `engines_in_all`: the number of engines, unless all are in
        `engines`.
        """
        deliveries.check_whole_number("step", step)
        announced = None if trainer is None else _as_holding(trainer)
        held = {str(name): _as_holding(each) for name, each in (engines or {}).items()}
        make = functools.partial(
            deliveries.weights, self._started(), step, announced, held, dict(variants or {}), engines_in_all
        )
        self._background.take(f"the weights of step {step}", 0, lambda: make)

    @never_raises
    def acknowledge(
        self, revision: int, step: int, applied_learning_rate: float, applied_scale: float | None = None
    ) -> None:
        """Report the learning rate used at `step`, the scale in it, and the revision of the advice that it followed."""
        deliveries.check_whole_number("step", step)
        applied = {"applied_lr": applied_learning_rate, **given({"applied_scale": applied_scale})}
        numbers = {name: deliveries.finite(name, value) for name, value in applied.items()}
        self._deliver("an acknowledgement", "rate", {"revision": int(revision), "step": int(step), **numbers})
        self.newest_step = max(self.newest_step, int(step))

    @never_raises
    def report_lever(
        self, revision: int, step: int, lever: BesideTheRate, done: Value | None = None, refused: str | None = None
    ) -> None:
        """Report the value of a lever that is used at `step`, or why the advised one is refused."""
        used = None if done is None else asdict(done)
        # One line, as the service takes it: a reason may be the text of an exception.
        reason = None if refused is None else " ".join(refused.split())[:_LONGEST_REFUSAL] or "no reason given"
        body = {"revision": int(revision), "step": int(step), "lever": lever, "done": used}
        self._deliver("an acknowledgement", "lever", body | given({"refused": reason}))

    @never_raises
    def finish(self, *, failed: bool = False) -> None:
        """Mark the run as finished or failed."""
        self._deliver("the end of the run", "state", {"state": "failed" if failed else "finished"})

    def flush(self, timeout_seconds: float = 30.0) -> DeliveryStatus:
        """Wait until everything logged is delivered, rejected or dropped, or until the timeout.

        Returns what the service does not have: `if not client.flush(): …` holds if anything at all is missing.
        """
        return self._background.flush(timeout_seconds)

    def close(self, timeout_seconds: float | None = None) -> DeliveryStatus:
        """Deliver until the timeout, leave the rest on disk for the next client, and stop. Never raises.

        Returns what the service does not have, and prints it once if there is anything. Then waits, as long again at
        most, until exported steps are written.
        """
        status = self._background.close(timeout_seconds)
        if self._exports is not None:
            self._exports.close(self.settings.exit_seconds if timeout_seconds is None else timeout_seconds, status)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # One rank finishes the run; any may fail it.
        if self._registration is not None and (error is not None or not self._shard):
            self.finish(failed=error is not None)
        self.close()

    def _started(self) -> Registration:
        if self._registration is None:
            self._register(self._new_registration({}, 0, (None, None), None))
        return cast(Registration, self._registration)

    def _new_registration(
        self,
        description: Mapping[str, Any],
        resume_step: int,
        rank: tuple[int | None, int | None],
        fingerprint: Fingerprint | Mapping[str, Any] | None,
    ) -> Registration:
        deliveries.check_whole_number("resume_step", resume_step)
        model_kind = description.get("model_kind")
        if model_kind is not None and known_model_kind(model_kind) is None:
            raise ConfigurationError(f"model_kind must be one of {', '.join(MODEL_KINDS)} or None, got {model_kind!r}")
        if description.get("scalar_names") is not None:
            try:
                check_declared(description["scalar_names"])
            except ValueError as error:
                raise ConfigurationError(f"scalar_names: {error}") from error
        of_run, (shard, shards), begin = (self.settings.url, self.project, self.run_key), rank, int(resume_step)
        attempt = {
            "key": self.launch.attempt_key(begin, run=of_run, shard=shard, shards=shards),
            "resume_step": begin,
            "fingerprint": fingerprint.to_dict() if isinstance(fingerprint, Fingerprint) else dict(fingerprint or {}),
            "heartbeats": True,
            deliveries.BEGAN: now_us(),
        }
        run = {"project": self.project, "key": self.run_key} | given(description)
        json_bytes(run), json_bytes(attempt)
        return Registration(run=run, attempt=attempt)

    def _register(self, registration: Registration) -> None:
        self._registration = registration
        self.newest_step = registration.attempt["resume_step"]
        self._background.begin(registration, self._shard)
        delivery = Delivery("register", registration)
        self._background.take("the start of the run", 0, lambda: lambda: delivery, needed=True)

    def _deliver(self, what: str, kind: str, body: Mapping[str, Any], **place: int | str) -> None:
        delivery = Delivery(kind, self._started(), place, json_bytes(body))
        self._background.take(what, len(delivery.body), lambda: lambda: delivery, needed=delivery.needed)


def _as_holding(held: Tensors | Holding) -> Holding:
    return held if isinstance(held, Holding) else Holding(held)
