"""One training process of slime, on a machine without a GPU. Prints as JSON what slime would log and what it applied.

    RANK=0 WORLD_SIZE=2 … python -m tests.foreshock.integrations.slime_runs SCENARIO STEPS

Real: Megatron's process groups (`megatron.core.mpu`), its chain of optimizers and its learning-rate scheduler, and the
hooks, found by their import path. Written for this test after the documented schema of slime 0.3, because slime is not
a package that can be installed without SGLang and GPUs: the modules below (their names and signatures), the order of
calls of a training step, the keys of `rollout_data`, and slime's formulas of k3 and of the differences of log-probs.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from megatron.core import mpu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from foreshock.integrations import slime
from foreshock.notary.engines import _packed
from tests.foreshock.integrations.operators import halve_learning_rate
from tests.foreshock.notary.faults import held, weights_of

PROMPTS, SAMPLES_PER_PROMPT = 3, 4
RATE = 1e-3
HALVED_AT = 2
HANGS_AFTER_SECONDS = float(os.environ.get("SLIME_RUNS_HANG_AFTER_SECONDS", "300"))
TOP = {"miles": "miles"}

scenario, steps = sys.argv[1], int(sys.argv[2])
NAME = TOP.get(scenario, "slime")


def sliced(values: torch.Tensor, total: int, response: int) -> torch.Tensor:
    """Return the part of a response's values that this context-parallel rank holds, token by token."""
    rank, size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    if size == 1:
        return values
    chunk = -(-total // (2 * size))
    positions = torch.arange(response) + total - response - 1
    return torch.cat([values[positions // chunk == number] for number in (rank, 2 * size - 1 - rank)])


class Generation:
    """The samples of a rollout, the same in every process."""

    def __init__(self, rollout_id: int) -> None:
        random = torch.Generator().manual_seed(100 + rollout_id)
        self.size = PROMPTS * SAMPLES_PER_PROMPT
        self.prompts = torch.randint(2, 6, (self.size,), generator=random).tolist()
        self.lengths = torch.randint(1, 20, (self.size,), generator=random).tolist()
        self.tokens = [
            torch.randint(1, 50, (prompt + length,), generator=random)
            for prompt, length in zip(self.prompts, self.lengths, strict=True)
        ]
        self.rewards = torch.randint(0, 2, (self.size,), generator=random).float().tolist()
        self.rollout = [-torch.rand(length, generator=random) * 3 for length in self.lengths]
        noise = [0.05 * torch.randn(length, generator=random) for length in self.lengths]
        self.trainer = [(mu + part).clamp(max=0) for mu, part in zip(self.rollout, noise, strict=True)]
        self.masks = [torch.ones(length, dtype=torch.int) for length in self.lengths]
        if scenario == "tools":
            for mask, mu in zip(self.masks, self.rollout, strict=True):
                mask[3:6] = 0
                mu[3:6] = 0.0
        if scenario == "removed":
            self.masks[1].zero_()

    def data(self) -> dict[str, Any]:
        """Return the `rollout_data` of this data-parallel rank, before log-probs and advantages."""
        shard, shards = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        own = list(range(self.size))[shard::shards]
        data = {
            "partition": own,
            "tokens": [self.tokens[each] for each in own],
            "total_lengths": [self.prompts[each] + self.lengths[each] for each in own],
            "response_lengths": [self.lengths[each] for each in own],
            "loss_masks": [self.masks[each] for each in own],
            "truncated": [int(self.lengths[each] == max(self.lengths)) for each in own],
            "sample_indices": own,
            "source_names": ["unknown"] * len(own),
            "raw_reward": self.rewards,
            "local_raw_reward": [self.rewards[each] for each in own],
            "num_microbatches": [2],
            "micro_batch_indices": [list(range(len(own)))[::2], list(range(len(own)))[1::2]],
        }
        if scenario == "miles":
            data["weight_versions"] = [["7"]] * len(own)
        if scenario != "unlogged":
            data["rollout_log_probs"] = self.slices(self.rollout, own)
        return data

    def slices(self, values: list[torch.Tensor], own: list[int]) -> list[torch.Tensor]:
        """Return the context-parallel slices of columns of response tokens."""
        return [sliced(values[each], self.prompts[each] + self.lengths[each], self.lengths[each]) for each in own]

    def figures(self) -> dict[str, float]:
        """Return slime's figures of all samples: means over the tokens (…) and over samples' means (…_seq_mean)."""
        counted = [number for number in range(self.size) if int(self.masks[number].sum())]
        difference = {each: (self.trainer[each] - self.rollout[each]).double() for each in counted}
        terms = {
            "k3_kl": {each: torch.exp(d) - d - 1 for each, d in difference.items()},
            "mean_abs_d": {each: d.abs() for each, d in difference.items()},
        }
        tokens = sum(int(self.masks[each].sum()) for each in counted)
        found = {}
        for name, values in terms.items():
            sums = {each: float((value * self.masks[each]).sum()) for each, value in values.items()}
            found[name] = sum(sums.values()) / tokens
            means = [value / int(self.masks[each].sum()) for each, value in sums.items()]
            found[f"{name}_seq_mean"] = sum(means) / len(means)
        lengths = [int(self.masks[each].sum()) for each in range(self.size)]
        return {
            **found,
            "tokens": float(tokens),
            "response_length_mean": sum(lengths) / self.size,
            "reward_mean": sum(self.rewards) / self.size,
        }


def install_modules() -> dict[str, types.ModuleType]:
    """Put modules with the names and signatures of slime into this process.

    Scenario "released": those of 0.2.4 and 0.3.0; "miles": of miles 0.1; others: of slime's main branch after 0.3.1.
    """
    module = {}
    for path in ("", "backends", "backends.megatron_utils", "backends.training_utils", "backends.megatron_utils.actor",
                 "backends.megatron_utils.loss", "backends.megatron_utils.hf_export", "observability",
                 "observability.train_metric_utils", "observability.logging_utils", "utils", "utils.distributed_utils",
                 "utils.tracking_utils", "utils.tracking_utils.tracking", "backends.training_utils.loss_hub",
                 "backends.training_utils.loss_hub.losses", "backends.training_utils.parallel",
                 "backends.megatron_utils.model", "utils.logging_utils"):  # fmt: skip
        if scenario == "released" and path.startswith("observability"):
            continue
        full = f"{NAME}.{path}".rstrip(".")
        module[path] = sys.modules[full] = types.ModuleType(full)
    actor = module["backends.megatron_utils.actor"]
    if scenario in ("miles", "released"):
        metrics = actor
        log = module["utils.tracking_utils.tracking" if scenario == "miles" else "utils.logging_utils"]
    else:
        metrics, log = module["observability.train_metric_utils"], module["observability.logging_utils"]
    loss = module["backends.training_utils.loss_hub.losses" if scenario == "miles" else "backends.megatron_utils.loss"]
    metrics.log_rollout_data = lambda rollout_id, args, rollout_data: None  # type: ignore[attr-defined]
    metrics.log_perf_data = lambda rollout_id, args, extra_metrics=None: None  # type: ignore[attr-defined]
    log.log = lambda args, metrics, step_key: None  # type: ignore[attr-defined]
    released = {"miles": "backends.megatron_utils.hf_export", "released": "backends.megatron_utils.model"}
    saves = module[released[scenario]] if scenario in released else actor
    setattr(saves, "save_hf_model" if scenario in released else "save_hf_model_to_path", save)
    if scenario != "old":
        loss.get_log_probs_and_entropy = get_log_probs_and_entropy  # type: ignore[attr-defined]
    actor.UpdateWeightFromTensor = UpdateWeightFromTensor  # type: ignore[attr-defined]
    group = torch.distributed.group.WORLD
    module["utils.distributed_utils"].get_gloo_group = lambda: group  # type: ignore[attr-defined]
    one = SimpleNamespace(size=1, rank=0)
    module["backends.training_utils.parallel"].get_parallel_state = (  # type: ignore[attr-defined]
        lambda: SimpleNamespace(indep_dp=one)
    )
    return {"metrics": metrics, "log": log, "loss": loss, "saves": saves}


class SglangEngine:
    """slime's handle of an SGLang server; engine 1 misses the head of the weights that sample step 2."""

    def __init__(self, number: int) -> None:
        self.number, self.held = number, dict[str, torch.Tensor]()
        self.check_weights = SimpleNamespace(remote=self._check)

    def update(self, tensors: list[tuple[str, torch.Tensor]], version: int) -> None:
        """Take tensors."""
        self.held |= {name: each for name, each in tensors if (self.number, version, name) != (1, 2, "lm_head.weight")}

    def _check(self, action: str) -> Any:
        """Return what the server's `/weights_checker` answers to Foreshock's action."""
        assert action == "foreshock"
        return {"ranks": [{"checksums": _packed(held(self.held).tensors)}]}


class UpdateWeightFromTensor:
    """slime's updater for engines on the trainer's GPUs: its names, its order of calls."""

    def __init__(self, engines: list[SglangEngine]) -> None:
        self.rollout_engines, self.version = engines, 0

    def update_weights(self) -> None:
        """Send the weights of the next version in two chunks."""
        self.version += 1
        tensors = [(name, values.bfloat16()) for name, values in weights_of(self.version).items()]
        for chunk in (tensors[:5], tensors[5:]):
            self._send_hf_params(chunk)

    def _send_hf_params(self, hf_named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        for engine in self.rollout_engines:
            engine.update(hf_named_tensors, self.version)


def get_log_probs_and_entropy(logits: Any, *, args: Any, unconcat_tokens: list[Any], **_: Any) -> Any:
    """Return what the forward pass of the loss gives: here the log-probs of `logits`, as slime's has it."""
    scored = {"log_probs": logits, "entropy": [torch.full_like(each, 1.5) for each in logits]}
    return scored if scenario == "miles" else (torch.empty(0), scored)


def save(args: Any, path: Any, model: Any = None, **_: Any) -> None:
    """Write weights as a Hugging Face folder: one file of this test's, written by the first rank."""
    folder = Path(args.save_hf.format(rollout_id=path)) if isinstance(path, int) else Path(path)
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")


def new_optimizer() -> tuple[Any, Any, list[torch.nn.Parameter]]:
    """Return Megatron's chain of two optimizers, as of a mixture of experts, its scheduler and the parameters."""
    configuration = OptimizerConfig(optimizer="adam", lr=RATE, clip_grad=0.0)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    chained = []
    for parameter in parameters:
        group = {"params": [parameter], "wd_mult": 1.0, "lr_mult": 1.0, "max_lr": RATE, "min_lr": RATE}
        optimizer = FP32Optimizer.__new__(FP32Optimizer)
        # The constructor puts a loss scale on a GPU.
        MegatronOptimizer.__init__(optimizer, torch.optim.SGD([group], lr=RATE), configuration, lambda *_: None)
        optimizer.is_stub_optimizer = False
        chained.append(optimizer)
    optimizer = ChainedOptimizer(chained)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=RATE, min_lr=RATE, lr_warmup_steps=0, lr_decay_steps=1000,
        lr_decay_style="constant", start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
    )  # fmt: skip
    return optimizer, scheduler, parameters


def fail(run: Any) -> None:
    """Take the place of what observes the framework."""
    raise RuntimeError("this rank cannot observe the framework")


def load_function(path: str) -> Any:
    """Return the function of an import path, as slime does."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def train(folder: Path) -> dict[str, Any]:
    """Train, in the order of slime's `train_actor` and `train_one_step`."""
    modules = install_modules()
    args = SimpleNamespace(
        hf_checkpoint="tiny", lr=RATE, n_samples_per_prompt=SAMPLES_PER_PROMPT, rollout_max_response_len=20,
        rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1, num_rollout=steps, start_rollout_id=None,
        num_experts=8, bf16=True, colocate=True, save_hf=f"{folder}/hf/step_{{rollout_id}}/model",
        partial_rollout=False, dynamic_sampling_filter_path="filters.keep" if scenario == "tools" else None,
        eps_clip=0.2, eps_clip_high=0.28, advantage_estimator="grpo", calculate_per_token_loss=True,
    )  # fmt: skip
    postprocess = load_function("foreshock.integrations.slime.log_rollouts")
    if scenario == "unobserved" and torch.distributed.get_rank() == 1:
        slime._observe = fail
    optimizer, scheduler, parameters = new_optimizer()
    updater = UpdateWeightFromTensor([SglangEngine(0), SglangEngine(1)])
    critic_rates, rates, figures = [], [], []
    for rollout_id in range(steps):
        generation = Generation(rollout_id)
        figures.append(generation.figures())
        data = generation.data()
        own = data["partition"]
        trainer = generation.slices(generation.trainer, own)
        if scenario in ("tools", "context", "unlogged"):
            data["log_probs"] = trainer
        data["advantages"] = [torch.full_like(values, data["local_raw_reward"][row] - 0.5)
                              for row, values in enumerate(trainer)]  # fmt: skip
        if scenario == "miles":
            postprocess(args)
        elif scenario != "unobserved":
            postprocess(args, rollout_id, data)
        modules["metrics"].log_rollout_data(rollout_id, args, data)
        for micro_batch in data["micro_batch_indices"]:
            with contextlib.suppress(AttributeError):
                modules["loss"].get_log_probs_and_entropy(
                    [trainer[row] for row in micro_batch], args=args,
                    unconcat_tokens=[data["tokens"][row] for row in micro_batch],
                )  # fmt: skip
        operated = torch.distributed.get_rank() == 0 and os.environ.get("FORESHOCK_ADVICE_MODE") == "apply"
        if operated and rollout_id == HALVED_AT:
            halve_learning_rate("a test of slime")
        before = load_function("foreshock.integrations.slime.apply_advice")
        critic = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        before(args, rollout_id, 0, [SimpleNamespace(role="critic")], critic, None)
        critic_rates.append(critic.param_groups[0]["lr"])
        before(args, rollout_id, 0, [SimpleNamespace(role="actor")], optimizer, scheduler)
        starts = [float(parameter) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.prepare_grads()
        optimizer.step_with_ready_grads()
        scheduler.step(increment=1)
        rates.append([start - float(parameter) for start, parameter in zip(starts, parameters, strict=True)])
        if torch.distributed.get_rank() == 0:
            log = {"train/grad_norm": torch.tensor(2.0 + rollout_id), "train/step": rollout_id}
            modules["log"].log(args, log, step_key="train/step")
        modules["metrics"].log_perf_data(rollout_id, args)
        if scenario in ("miles", "released"):
            modules["saves"].save_hf_model(args, rollout_id, None)
        else:
            modules["saves"].save_hf_model_to_path(args, Path(args.save_hf.format(rollout_id=rollout_id)), None)
        updater.update_weights()
        torch.distributed.barrier()
    return {"figures": figures, "rates": rates, "critic_rates": critic_rates}


def main() -> None:
    """Train as one of WORLD_SIZE ranks, split over data or, in the scenario "context", over contexts."""
    # Ranks that wait for each other end with their stacks.
    faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
    # Ray's answers are those of this process.
    sys.modules["ray"] = types.ModuleType("ray")
    sys.modules["ray"].get = lambda found: found  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo")
    world = torch.distributed.get_world_size()
    mpu.initialize_model_parallel(context_parallel_size=world if scenario == "context" else 1)
    result = train(Path(os.environ["FORESHOCK_SPOOL_DIRECTORY"]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print("LOG " + json.dumps(result))


if __name__ == "__main__":
    main()
