"""Run `verl_runs` with weights that are synced, to two engines of vLLM of which the second misses a tensor once.

    python -m tests.foreshock.integrations.verl_weights_runs decoupled STEPS

Real: verl's `CheckpointEngineManager`, `ActorRolloutRefWorker.update_weights`, `vLLMColocateWorkerExtension` and
`vLLMHttpServer`'s class, and vLLM on this CPU. Stand-ins: Ray, the trainer's weights (a checkpoint a version), the
transport of tensors to vLLM; both engines are one vLLM, which is loaded before it is asked.
"""

import asyncio
import importlib.metadata
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from tests.foreshock.integrations import verl_runs
from tests.probes.tiny import save_checkpoint

STALE, MISSED_AT = "lm_head.weight", 1
"""Engine 1 keeps this tensor when version 1 is synced, which samples step 2."""

own_version = importlib.metadata.version
# vLLM for CPUs is a distribution of another name, which verl does not look for.
setattr(importlib.metadata, "version", lambda name: "0.32.0" if name == "vllm" else own_version(name))  # noqa: B010


class TrainingEngine:
    """A training engine of verl whose weights are those of a checkpoint."""

    is_param_offload_enabled = False

    def __init__(self, folders: list[Path]) -> None:
        self.folders, self.version = folders, 0

    def get_per_tensor_param(self, **_: Any) -> Any:
        """Return the named tensors as verl sends them, and no adapter."""
        tensors = load_file(self.folders[self.version] / "model.safetensors")
        return ((name, values.bfloat16()) for name, values in tensors.items()), None


class Rollout:
    """The sending side of a rollout: keeps what it is sent for each of two engines."""

    def __init__(self) -> None:
        self.held: list[dict[str, torch.Tensor]] = [{}, {}]

    async def update_weights(self, weights: Any, global_steps: int, **_: Any) -> None:
        """Take the tensors; the second engine misses one of them once."""
        sent = dict(weights)
        self.held[0] |= sent
        self.held[1] |= {name: each for name, each in sent.items() if (name, global_steps) != (STALE, MISSED_AT)}


class WorkerGroup(verl_runs.WorkerGroup):
    """The driver's handle of one sending worker."""

    def __init__(self, sender: Any) -> None:
        super().__init__()
        self.sender = sender

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        """Run verl's method as Ray does, in an event loop of its own."""
        self.sender.actor.engine.version = global_steps
        with ThreadPoolExecutor(1) as pool:
            return [pool.submit(asyncio.run, self.sender.update_weights(global_steps, mode)).result()]

    def foreshock_sent(self) -> list[Any]:
        """Ask the worker."""
        return [self.sender.foreshock_sent()]


def new_sender(folders: list[Path]) -> Any:
    """Return verl's worker with a training engine and a rollout, after what observes `init_model`."""
    from omegaconf import OmegaConf
    from verl.workers import engine_workers

    from foreshock.integrations.verl_weights import digest_sent

    with patch.dict(os.environ, {"DISABLE_WORKER_INIT": "1"}):
        sender = engine_workers.ActorRolloutRefWorker.__new__(engine_workers.ActorRolloutRefWorker)
    # There is no memory of a GPU to log or to free.
    engine_workers.log_gpu_memory_usage = lambda *_, **__: None
    engine_workers.get_torch_device = lambda: SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None)
    sender.config = OmegaConf.create({"rollout": {"name": "vllm", "free_cache_engine": False}})
    sender.layered_summon, sender.peft_merge, sender.base_sync_done = False, False, True
    sender.actor, sender.rollout = SimpleNamespace(engine=TrainingEngine(folders)), Rollout()
    digest_sent(sender)
    return sender


def new_replicas(folder: Path, rollout: Rollout) -> list[Any]:
    """Return two replicas whose servers are verl's, on vLLM with verl's extension of its worker."""
    from vllm import LLM

    llm = LLM(
        str(folder), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64,
        worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
    )  # fmt: skip
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    def server(number: int) -> Any:
        found = vLLMHttpServer.__new__(vLLMHttpServer)

        async def collective_rpc(method: str) -> list[Any]:
            # What vLLM packed for a kernel of this CPU is replaced by a reload from a folder, and not in place.
            held = Path(shutil.copytree(folder, folder.parent / "held", dirs_exist_ok=True))
            save_file(rollout.held[number], held / "model.safetensors", metadata={"format": "pt"})
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(held)})
            answer: list[Any] = llm.collective_rpc(method)
            return answer

        found.engine = SimpleNamespace(collective_rpc=collective_rpc)

        def remote() -> Any:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(asyncio.run, found.foreshock_weights()).result()

        return SimpleNamespace(foreshock_weights=SimpleNamespace(remote=remote))

    return [SimpleNamespace(replica_rank=number, servers=[server(number)], sleep=_nothing) for number in range(2)]


async def _nothing() -> None:
    """Free the memory of an engine, which this one keeps."""


def main(own: Callable[..., Any] = verl_runs.new_trainer) -> None:
    """Train as `verl_runs` does, with a real manager of weights."""
    import ray

    setattr(ray, "get", lambda found: found)  # noqa: B010
    folder = Path(os.environ["FORESHOCK_SPOOL_DIRECTORY"])
    folders = [save_checkpoint(folder / f"version_{version}", seed=version) for version in range(4)]

    def new_trainer(scenario: str, steps: int, trainer_class: Any = None) -> Any:
        from verl.checkpoint_engine.base import CheckpointEngineManager

        chosen = () if trainer_class is None else (trainer_class,)
        trainer, sender = own(scenario, steps, *chosen), new_sender(folders)
        trainer.actor_rollout_wg = WorkerGroup(sender)
        configuration = SimpleNamespace(backend="naive", custom_backend_module=None)
        replicas = new_replicas(folders[0], sender.rollout)
        trainer.checkpoint_manager = CheckpointEngineManager(configuration, trainer.actor_rollout_wg, replicas)
        return trainer

    verl_runs.new_trainer = new_trainer
    verl_runs.main()


if __name__ == "__main__":
    main()
