"""The releases of frameworks that integrations and importers follow, with the functions and fields that they rely on.

`RELEASES` is checked against the releases' own sources: `scripts/release_sources.py` takes them from the package index.
slime, vime, prime-rl, ROLL and rLLM are not in the index; it has only a placeholder of NeMo-RL, and only the releases
`miles-rl` of miles. The other rows of these frameworks were read in their repositories. `scripts/frameworks_page.py`
makes `docs/your-framework.md` of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["INDEXED", "RELEASES", "Releases"]


@dataclass(frozen=True, slots=True)
class Releases:
    """Releases of a framework that are observed alike, oldest first.

    `places` are the observed functions by file, such as "GRPOTrainer._generate"; "name()" is one that the file calls by
    that name. Those of an importer are the functions that write its dumps, with the fields that it reads, such as
    "Class.field".
    """

    versions: tuple[str, ...]
    places: Mapping[str, tuple[str, ...]]


def _trl(versions: tuple[str, ...], ends: str) -> Releases:
    methods = (
        "_generate",
        "_generate_and_score_completions",
        "_calculate_rewards",
        "_get_per_token_logps_and_entropies",
    )
    places = {
        f"trl/trainer/{name.lower()}_trainer.py": (*(f"{name}Trainer.{method}" for method in methods), ends)
        for name in ("GRPO", "RLOO")
    }
    return Releases(versions, {**places, "trl/generation/vllm_generation.py": ("VLLMGeneration.generate",)})


_VERL = {
    "verl/trainer/ppo/ray_trainer.py": (
        "RayPPOTrainer.fit", "RayPPOTrainer._save_checkpoint", "compute_advantage", "compute_advantage()",
    ),
    "verl/utils/tracking.py": ("Tracking.log",),
}  # fmt: skip
_VERL_METHODS = {
    **_VERL,
    "verl/trainer/ppo/ray_trainer.py": (
        *_VERL["verl/trainer/ppo/ray_trainer.py"], "RayPPOTrainer._compute_old_log_prob", "RayPPOTrainer._update_actor",
    ),
    "verl/workers/engine_workers.py": ("TrainingWorker.train_mini_batch",),
}  # fmt: skip
_VERL_NOTARY = {
    **_VERL_METHODS,
    "verl/workers/engine_workers.py": (
        "TrainingWorker.train_mini_batch", "ActorRolloutRefWorker.init_model", "ActorRolloutRefWorker.update_weights",
    ),
    "verl/checkpoint_engine/base.py": ("CheckpointEngineManager.update_weights",),
    "verl/workers/rollout/vllm_rollout/utils.py": ("vLLMColocateWorkerExtension.update_weights_from_ipc",),
    "verl/workers/rollout/vllm_rollout/vllm_async_server.py": ("vLLMHttpServer.collective_rpc",),
}  # fmt: skip
_VERL_V1 = {
    **_VERL_NOTARY,
    "verl/trainer/ppo/v1/trainer_base.py": tuple(
        f"PPOTrainer.{name}"
        for name in ("fit", "_compute_old_log_prob", "_compute_advantage", "_update_actor", "_save_checkpoint")
    ),
}


def _slime(versions: tuple[str, ...], metrics: str, actor: tuple[str, ...], save: tuple[str, str]) -> Releases:
    folder = "slime/backends/megatron_utils"
    places = {
        f"{folder}/loss.py": ("get_log_probs_and_entropy", "get_log_probs_and_entropy()"),
        f"{metrics}/logging_utils.py": ("log",),
        f"{folder}/actor.py": actor,
    }
    return Releases(versions, places | {f"{folder}/{save[0]}": (*places.get(f"{folder}/{save[0]}", ()), save[1])})


_IN_ACTOR = ("log_rollout_data()", "log_perf_data()")
_SKYRL_DUMPS = {
    "skyrl/train/trainer.py": ("RayPPOTrainer.dump_data",),
    "skyrl/backends/skyrl_train/training_batch.py": (
        "TensorBatch.save",
        *(
            f"TrainingInput.{field}"
            for field in ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs",
                          "action_log_probs", "advantages")
        ),
    ),
}  # fmt: skip

RELEASES: Final[Mapping[str, tuple[Releases, ...]]] = {
    "trl": (
        _trl(("1.0.0", "1.1.0", "1.2.0"), "self.eos_token_id"),
        _trl(("1.3.0", "1.4.0", "1.5.1", "1.6.0", "1.7.1", "1.8.0", "1.9.2", "1.10.0", "1.11.0", "1.12.0", "1.13.0"),
             "self._tokenizer"),
        _trl(("1.14.2", "1.15.0", "1.16.0"), "self.eos_token_ids"),
    ),
    "verl": (
        # They lack `_compute_old_log_prob` and `_update_actor`: no entropies are logged, no advice is applied.
        Releases(("0.6.0", "0.6.1"), _VERL),
        # It sends weights in other ways, which the notary does not see.
        Releases(("0.7.0",), _VERL_METHODS),
        Releases(("0.7.1", "0.8.0"), _VERL_NOTARY),
        Releases(("0.9.0", "0.9.1"), _VERL_V1),
    ),
    "slime": (
        _slime(("0.2.4", "0.3.0"), "slime/utils", _IN_ACTOR, ("model.py", "save_hf_model")),
        _slime(("0.3.1",), "slime/utils", _IN_ACTOR, ("actor.py", "save_hf_model_to_path()")),
    ),
    "vime": (Releases(("0.2.0",), {}),),
    "miles": (
        Releases(
            ("0.0.1", "0.0.2"),
            {
                "miles/backends/megatron_utils/actor.py": (*_IN_ACTOR, "save_hf_model()"),
                "miles/backends/megatron_utils/model.py": ("save_hf_model",),
                "miles/backends/training_utils/loss.py": ("get_log_probs_and_entropy", "get_log_probs_and_entropy()"),
                "miles/utils/tracking_utils/__init__.py": ("log",),
            },
        ),
        Releases(("0.1.0",), {}),
    ),
    "skyrl": (
        # 0.1.0 pickles its tensors as calls of torch.load, which no import executes.
        Releases(("0.2.0", "0.3.0"), _SKYRL_DUMPS),
        Releases(
            ("0.4.0",),
            {
                **_SKYRL_DUMPS,
                "skyrl/train/trainer.py": ("RayPPOTrainer.dump_data", "RayPPOTrainer.train_critic_and_policy"),
                "skyrl/backends/skyrl_train/workers/worker_dispatch.py": tuple(
                    f"WorkerDispatch.{name}" for name in ("forward_backward_from_staged", "optim_step", "set_lr")
                ),
            },
        ),
    ),
    "prime-rl": (Releases(("0.8.0",), {}),),
    "nemo-rl": (Releases(("0.6.0",), {}),),
    "tinker-cookbook": (
        Releases(
            ("0.6.1",),
            {
                "tinker_cookbook/rl/train.py": (
                    "do_sync_training", "do_sync_training_with_stream_minibatch", "do_async_training",
                    "do_train_step_and_get_sampling_client()",
                    "do_train_step_streaming_and_get_sampling_client()",
                    "compute_full_batch_metrics_and_get_sampling_client",
                    "compute_full_batch_metrics_and_get_sampling_client()",
                ),
                "tinker_cookbook/utils/ml_log.py": ("MultiplexLogger.log_metrics",),
            },
        ),
    ),
    "areal": (
        Releases(
            ("1.0.4",),
            {
                "areal/trainer/ppo/actor.py": ("PPOActor.compute_advantages", "PPOActor.ppo_update"),
                "areal/utils/stats_logger.py": ("StatsLogger.commit",),
            },
        ),
    ),
    "openrlhf": (
        Releases(
            ("0.11.2",),
            {
                "openrlhf/trainer/ppo_trainer.py": (
                    "BasePPOTrainer.train_step", "BasePPOTrainer.save_logs_and_checkpoints",
                ),
            },
        ),
    ),
    "roll": (Releases(("0.3.0",), {}),),
    "agentlightning": (
        Releases(
            ("1.0.2",), {"agentlightning/verl/trainer.py": ("AgentLightningRayPPOTrainer.fit", "compute_advantage()")}
        ),
    ),
    "ms-swift": (
        Releases(("4.6.0",), {"swift/rlhf_trainers/grpo_trainer.py": ("GRPOTrainer._prepare_batch_inputs",)}),
    ),
    "unsloth": (Releases(("2026.10.9",), {}),),
    "open-instruct": (Releases(("0.2.2",), {}),),
    "rllm": (Releases(("0.3.0",), {}),),
}  # fmt: skip

INDEXED: Final = {
    "trl": "trl", "verl": "verl", "miles": "miles-rl", "skyrl": "skyrl", "tinker-cookbook": "tinker-cookbook",
    "areal": "areal", "openrlhf": "openrlhf", "agentlightning": "agentlightning", "ms-swift": "ms-swift",
}  # fmt: skip
"""Frameworks whose releases are in the package index, and their names there."""
