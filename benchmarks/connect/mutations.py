"""Part `mutations` of `make bench-connect`: what a hook observes is changed, and nothing of it is silent or wrong.

    python -m benchmarks.connect mutations

Real: TRL's trainers with a tiny model on the CPU, which generate, score and reward, and verl's `RayPPOTrainer`,
`DataProto` and `compute_advantage`. Each row changes what the trainer's method gives to its hook. The columns that are
logged are compared with what was sampled and scored: `logged` (all of them are right), `refused` (one sentence in the
trainer's log names what is left out, and the rest is right), `silent` (something is left out without a sentence) or
`wrong`.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.bars import Line
from foreshock.client.reporting import LogOnce

TRL_COLUMNS = ("response_token_ids", "response_mask", "rollout_log_probs", "trainer_log_probs", "advantage", "reward")
VERL_COLUMNS = (*TRL_COLUMNS, "entropy")
ROLLOUTS = 4


@dataclass
class Seen:
    """The rows of each column that were true, those that were logged, and the warnings."""

    true: dict[str, list[Any]] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    failed: bool = False

    def outcome(self) -> str:
        """Return logged, refused, silent or wrong, which an error of the hook itself is too."""
        if self.failed:
            return "wrong"
        for name, rows in self.logged.items():
            if not all(np.allclose(np.ravel(a), np.ravel(b), atol=1e-5, equal_nan=True)
                       for a, b in zip(rows, self.true[name], strict=True)):  # fmt: skip
                return "wrong"
        if self.logged.keys() == self.true.keys():
            return "logged"
        return "refused" if self.sentences else "silent"


class _Notes(logging.Handler):
    """Collects what is logged."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.seen.sentences.append(record.getMessage())
        self.seen.failed |= record.exc_info is not None


# --- TRL -------------------------------------------------------------------------------------------------------------


def _sampled(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return prompts, responses and log-probs as an engine would: TRL takes them from its `rollout_func`."""
    random = np.random.default_rng(3)
    lengths = [3, 6, 4, 5]
    return {
        "prompt_ids": [[2 + len(prompt) % 5, 3] for prompt in prompts],
        "completion_ids": [random.integers(2, 12, length).tolist() for length in lengths],
        "logprobs": [(-random.random(length) - 0.01).tolist() for length in lengths],
    }


def _trl_trainer(folder: Path, trainer_class: Any) -> Any:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig

    from examples.trl.train import PROMPTS, reward_of_ones, save_model

    model = folder / "model"
    if not model.exists():
        save_model(model)
    settings = GRPOConfig(
        output_dir=str(folder / "checkpoints"), use_cpu=True, bf16=False, report_to=[], max_steps=1,
        per_device_train_batch_size=ROLLOUTS, num_generations=2, steps_per_generation=2, max_completion_length=8,
    )  # fmt: skip
    trainer = trainer_class(
        model=str(model), reward_funcs=reward_of_ones, args=settings, rollout_func=_sampled,
        train_dataset=Dataset.from_dict({"prompt": [*PROMPTS] * 8}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
    )  # fmt: skip
    trainer.model.train()
    return trainer


def trl_seen(
    folder: Path,
    trainer_class: Any,
    changes: Mapping[str, Callable[[Any], Any]],
    client: Callable[[LogOnce], Any] = lambda _: None,
) -> Seen:
    """Let a trainer generate once. `changes`: method → what its hook gets in place of the result.

    `client` makes a client from the hook's log, which logs the rollouts as the callback does; None: none.
    """
    from foreshock.integrations.trl_generations import Generations
    from foreshock.integrations.trl_update import Update

    seen, results = Seen(), dict[str, Any]()
    trainer = _trl_trainer(folder, trainer_class)
    name = "foreshock.benchmarks.mutations"
    handler = _Notes(seen)
    logging.getLogger(name).addHandler(handler)
    methods = ("_generate", "_generate_and_score_completions", "_calculate_rewards",
               "_get_per_token_logps_and_entropies")  # fmt: skip
    for method in methods:
        _change(trainer, method, results, changes.get(method))
    log = LogOnce(name)
    generations = Generations(trainer, log, Update(trainer, log, 0))
    generations.observe()
    seen.sentences.clear()
    for method in methods:
        _restore(trainer, method, results)
    trainer._generate_and_score_completions([{"prompt": "1+1="}] * ROLLOUTS)
    logging.getLogger(name).removeHandler(handler)
    generated, scored = results["_generate"], results["_generate_and_score_completions"]
    responses = generated[1]
    mask = next((each for each in generated[2:3] if each is not None), None)
    seen.true = {
        "response_token_ids": responses, "rollout_log_probs": generated[4], "reward": [
            sum(token == 3 for token in row) / 10 for row in responses],
        "trainer_log_probs": [row[: len(ids)].tolist() for row, ids in zip(scored["old_per_token_logps"], responses,
                                                                           strict=True)],
        "advantage": scored["advantages"].tolist(),
    } | ({} if mask is None else {"response_mask": mask})  # fmt: skip
    taken = generations.take()
    if taken:
        columns = taken[0].columns(1, 0)
        if (logs := client(log)) is not None:
            logs.log_rollouts(1, columns, copy=False)
        seen.logged = {each: columns[each] for each in TRL_COLUMNS if each in columns}
    return seen


def _change(trainer: Any, method: str, results: dict[str, Any], change: Callable[[Any], Any] | None) -> None:
    own = getattr(trainer, method)

    def changed(*arguments: Any, **keywords: Any) -> Any:
        results[method] = own(*arguments, **keywords)
        return results[method] if change is None else change(results[method])

    setattr(trainer, method, changed)


def _restore(trainer: Any, method: str, results: dict[str, Any]) -> None:
    """Let the trainer itself have the method's own result."""
    observed = getattr(trainer, method)

    def restored(*arguments: Any, **keywords: Any) -> Any:
        observed(*arguments, **keywords)
        return results[method]

    setattr(trainer, method, restored)


def _replaced(place: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda result: (*result[:place], change(result[place]), *result[place + 1 :])


def _scored(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda result: {**result, name: change(result[name])}


def _wider(values: torch.Tensor) -> torch.Tensor:
    """Put two columns of left padding before the values, as a matrix of log-probs of whole sequences has them."""
    return torch.cat([torch.full((len(values), 2), -9.0), values], dim=1)


def trl_rows() -> dict[str, Callable[[Path], Seen]]:
    """Return the mutations of TRL's trainers."""
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    class OwnName(GRPOTrainer):  # type: ignore[misc]
        """A derived trainer whose name does not begin with GRPO."""

    class WithTools(GRPOTrainer):  # type: ignore[misc]
        """A derived trainer, some of whose tokens are a tool's."""

        def _generate(self, prompts: list[Any]) -> Any:
            result = super()._generate(prompts)
            mask = [[int(place != 1) for place in range(len(row))] for row in result[1]]
            return (*result[:2], mask, *result[3:])

    def of(trainer_class: Any = GRPOTrainer, **changes: Callable[[Any], Any]) -> Callable[[Path], Seen]:
        return lambda folder: trl_seen(folder, trainer_class, changes)

    scored, policy = "_generate_and_score_completions", "old_per_token_logps"
    return {
        "GRPOTrainer": of(),
        "TRL's GMPOTrainer": of(GMPOTrainer),
        "class of another name": of(OwnName),
        "derived class with a tool mask": of(WithTools),
        "_generate returns a list": of(WithTools, _generate=list),
        "TRL 0.24: (ids, ids, total, log-probs, fields)": of(_generate=lambda result: (*result[:2], 18, result[4], {})),
        "TRL 1.0: log-probs at place 5": of(
            WithTools, _generate=lambda result: (*result[:4], 18, result[4], result[5])
        ),
        "log-probs as tensors": of(_generate=_replaced(4, lambda rows: [torch.tensor(row) for row in rows])),
        "log-probs as arrays": of(_generate=_replaced(4, lambda rows: [np.array(row, np.float32) for row in rows])),
        "two columns of log-probs": of(_generate=lambda result: (*result, result[4])),
        "log-probs one token short": of(_generate=_replaced(4, lambda rows: [row[:-1] for row in rows])),
        "log-probs are probabilities": of(_generate=_replaced(4, lambda rows: [[0.5] * len(row) for row in rows])),
        "tool mask one token short": of(WithTools, _generate=_replaced(2, lambda rows: [row[:-1] for row in rows])),
        "Unsloth: left padding in the trainer's log-probs": of(**{scored: _scored(policy, _wider)}),
        "trainer's log-probs one token short": of(**{scored: _scored(policy, lambda each: each[:, :-1])}),
        "advantages of each token": of(
            **{scored: _scored("advantages", lambda each: each[:, None].expand(-1, 6).contiguous())}
        ),
        "advantages of another width": of(
            **{scored: _scored("advantages", lambda each: each[:, None].expand(-1, 9).contiguous())}
        ),
        "ms-swift: a list of batches": of(**{scored: lambda result: [result]}),
        "no advantages": of(**{scored: lambda result: {name: result[name] for name in result if name != "advantages"}}),
        "scores other responses than it generated last": of(
            **{scored: _scored("completion_ids", lambda each: each.flip(0))}
        ),
        "rewards of half the rollouts": of(_calculate_rewards=lambda result: result[: ROLLOUTS // 2]),
    }


# --- verl ------------------------------------------------------------------------------------------------------------


class _Recorder:
    """A client that keeps what is logged."""

    newest: Any = None

    def __init__(self, **_: Any) -> None:
        self.columns: dict[str, Any] = {}
        _Recorder.newest = self

    def start_run(self, **_: Any) -> None:
        """Do nothing."""

    close = finish = log_scalars = start_run

    def tell_remarks_of(self, _: LogOnce) -> None:
        """Do nothing."""

    def log_rollouts(self, _step: int, columns: dict[str, Any], **_: Any) -> None:
        """Keep the rows of the batch that the client would send."""
        from foreshock.client.capture import capture_rollouts

        batch = capture_rollouts(columns, default_ids="row", attributes=None)()
        ends = batch.response_offsets[1:-1]
        for name in VERL_COLUMNS:
            values = getattr(batch, name)
            if name in columns and values is not None:
                per_token = values.shape == batch.response_token_ids.shape
                self.columns[name] = np.split(values, ends) if per_token else list(values)


def _verl_batch() -> tuple[Any, dict[str, list[Any]], torch.Tensor]:
    """Return a batch before verl's `compute_advantage`, its true rows and the entropies."""
    from verl import DataProto

    random = torch.Generator().manual_seed(5)
    lengths = torch.tensor([3, 6, 4, 5])
    mask = (torch.arange(6) < lengths[:, None]).long()
    behaviour = -torch.rand(ROLLOUTS, 6, generator=random) * mask
    policy, entropy = (behaviour - 0.02) * mask, torch.rand(ROLLOUTS, 6, generator=random)
    scores = torch.zeros(ROLLOUTS, 6)
    scores[torch.arange(ROLLOUTS), lengths - 1] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    tensors = {
        "prompts": torch.ones(ROLLOUTS, 2, dtype=torch.long), "responses": torch.arange(24).reshape(ROLLOUTS, 6) * mask,
        "attention_mask": torch.cat([torch.ones(ROLLOUTS, 2, dtype=torch.long), mask], dim=1), "response_mask": mask,
        "rollout_log_probs": behaviour, "old_log_probs": policy, "token_level_scores": scores,
        "token_level_rewards": scores,
    }  # fmt: skip
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["a", "a", "b", "b"], dtype=object)})
    rows = {"response_token_ids": tensors["responses"], "response_mask": mask, "rollout_log_probs": behaviour,
            "trainer_log_probs": policy, "entropy": entropy}  # fmt: skip
    true: dict[str, list[Any]] = {
        name: [row[:length].tolist() for row, length in zip(values, lengths.tolist(), strict=True)]
        for name, values in rows.items()
    }
    return data, true | {"reward": [1, 0, 0, 1]}, entropy


def verl_seen(change: Callable[[Any], Any], *, loop: str = "fit", scored: str = "as it is", client: Any = None) -> Seen:
    """Let a derived trainer compute the advantages of one batch, which is changed before the hook gets it.

    `loop`: fit, async_fit or own. `scored`: what its forward pass saw: the batch as it is, or reversed. `client`: the
    class of its client, None: one that keeps what is logged.
    """
    from omegaconf import OmegaConf
    from verl.trainer.ppo import ray_trainer

    from foreshock.integrations import trainer_run
    from foreshock.integrations import verl as hook

    seen, state = Seen(), dict[str, Any]()
    log_name = f"foreshock.benchmarks.mutations.verl.{id(seen)}"
    hook.log, handler = type(hook.log)(log_name), _Notes(seen)
    logging.getLogger(log_name).addHandler(handler)
    trainer_run.__dict__.update(Client=client or _Recorder, AdviceFeed=lambda _: SimpleNamespace(close=lambda: None))
    data, seen.true, entropy = _verl_batch()
    own_pass, own_advantage = ray_trainer.RayPPOTrainer._compute_old_log_prob, ray_trainer.compute_advantage
    given = data.select(batch_keys=["response_mask"])

    def forward(*_: Any) -> Any:
        from verl import DataProto

        rows = slice(None) if scored == "as it is" else torch.arange(ROLLOUTS - 1, -1, -1)
        given.batch["response_mask"] = data.batch["response_mask"][rows]
        return DataProto.from_dict({"entropys": entropy[rows]}), 0.0

    def advantages(batch: Any) -> Any:
        state["true"] = own_advantage(batch, adv_estimator="grpo", config=OmegaConf.create({}))
        return change(state["true"])

    ray_trainer.RayPPOTrainer._compute_old_log_prob = forward
    ray_trainer.compute_advantage = advantages

    def step(trainer: Any) -> None:
        trainer.global_steps = 1
        trainer._compute_old_log_prob(given)
        ray_trainer.compute_advantage(data)

    async def async_step(trainer: Any) -> None:
        await asyncio.sleep(0)
        step(trainer)

    hook.observe_trainer(ray_trainer)
    body = {"fit_agent" if loop == "own" else "fit": async_step if loop == "async_fit" else step}
    trainer_class: Any = type("DerivedTrainer", (ray_trainer.RayPPOTrainer,), body)
    trainer = trainer_class.__new__(trainer_class)
    trainer.config = _verl_configuration()
    result = trainer.fit_agent() if loop == "own" else trainer.fit()
    if loop == "async_fit":
        asyncio.run(result)
    hook._end_run(failed=False)
    ray_trainer.RayPPOTrainer._compute_old_log_prob, ray_trainer.compute_advantage = own_pass, own_advantage
    logging.getLogger(log_name).removeHandler(handler)
    true = state["true"].batch["advantages"]
    seen.true["advantage"] = [
        row[: len(ids)].tolist() for row, ids in zip(true, seen.true["response_token_ids"], strict=True)
    ]
    seen.logged = _Recorder.newest.columns if _Recorder.newest is not None else {}
    _Recorder.newest = None
    return seen


def _verl_configuration() -> Any:
    import verl
    from omegaconf import OmegaConf

    configuration = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    OmegaConf.set_struct(configuration, False)
    configuration.actor_rollout_ref.model.path = "none"
    configuration.actor_rollout_ref.rollout.name = "vllm"
    return configuration


def verl_rows() -> dict[str, Callable[[Path], Seen]]:
    """Return the mutations of verl's trainers."""

    def with_tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def changed(data: Any) -> Any:
            from verl import DataProto

            tensors = {each: data.batch[each] for each in data.batch.keys()}  # noqa: SIM118
            tensors[name] = change(tensors[name])
            kept = {each: value for each, value in tensors.items() if value is not None}
            return DataProto.from_dict(tensors=kept, non_tensors=dict(data.non_tensor_batch))

        return changed

    def of(change: Callable[[Any], Any] = lambda data: data, **keywords: str) -> Callable[[Path], Seen]:
        return lambda _: verl_seen(change, **keywords)

    return {
        "derived class with a fit of its own": of(),
        "a fit that is a coroutine": of(loop="async_fit"),
        "a loop that is not called fit": of(loop="own"),
        "rows reordered after the forward pass": of(scored="reversed"),
        "left padding in old_log_probs": of(with_tensor("old_log_probs", _wider)),
        "rollout_log_probs one token short": of(with_tensor("rollout_log_probs", lambda each: each[:, :-1])),
        "response_mask of the whole sequence": of(with_tensor("response_mask", _wider)),
        "advantages of another width": of(with_tensor("advantages", _wider)),
        "one advantage for each rollout": of(with_tensor("advantages", lambda each: each[:, 0])),
        "log-probs in float64": of(with_tensor("old_log_probs", lambda each: each.double())),
        "no prompts": of(with_tensor("prompts", lambda _: None)),
        "no rollout_log_probs": of(with_tensor("rollout_log_probs", lambda _: None)),
        "attention mask of the responses alone": of(with_tensor("attention_mask", lambda each: each[:, 2:])),
    }


def run() -> list[Line]:
    """Print the outcome of each mutation, and return their counts."""
    counts = dict.fromkeys(("logged", "refused", "silent", "wrong"), 0)
    with tempfile.TemporaryDirectory() as folder:
        for framework, rows in (("TRL", trl_rows()), ("verl", verl_rows())):
            for name, mutate in rows.items():
                seen = mutate(Path(folder))
                outcome = seen.outcome()
                counts[outcome] += 1
                sentence = f": {seen.sentences[0]}" if outcome != "logged" and seen.sentences else ""
                print(f"{framework:5} {outcome:8} {name}{sentence}", flush=True)
    return [
        Line("mutations", "mutations of what a hook observes", sum(counts.values()), 20, at_least=True),
        Line("mutations_logged", "… logged rightly", counts["logged"]),
        Line("mutations_refused", "… refused with a sentence", counts["refused"]),
        Line("mutations_silent", "… silent", counts["silent"], 0),
        Line("mutations_wrong", "… wrong", counts["wrong"], 0),
    ]
