"""The notary in verl with vLLM as the engine (`FORESHOCK_NOTARY=1`): what was sent and what each engine then holds.

- `ActorRolloutRefWorker`: each rank digests a share of the tensors while all are sent (its engine's
  `get_per_tensor_param`);
- vLLM's workers: `vLLMColocateWorkerExtension` gets a method that digests what they hold, `vLLMHttpServer` one for it;
- `CheckpointEngineManager.update_weights`: after it, the driver asks both sides and logs the step that they sample.
"""

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from foreshock.integrations.hooks import guard, is_observed, mark_observed, observe
from foreshock.integrations.verl import VerlRun, current_run, log
from foreshock.notary.digests import tensors_of
from foreshock.notary.engines import held_by_worker, of_ranks
from foreshock.notary.pieces import Piece, joined

Digests = dict[str, list[Piece]]


def observe_sender(module: ModuleType) -> None:
    """Let the workers of `verl.workers.engine_workers` digest what they send, and answer what that was."""
    from verl.single_controller.base.decorator import Dispatch, register

    observe(module.ActorRolloutRefWorker, "init_model", log, after=lambda arguments, *_: digest_sent(arguments[0]))
    module.ActorRolloutRefWorker.foreshock_sent = register(dispatch_mode=Dispatch.ONE_TO_ALL)(foreshock_sent)


def digest_sent(worker: Any) -> None:
    """Digest this rank's share of the tensors that the actor sends, each time that it sends."""
    actor = getattr(worker, "actor", None)
    if actor is None:
        return
    own = actor.engine.get_per_tensor_param

    def get_per_tensor_param(*arguments: Any, **keywords: Any) -> Any:
        named, adapter = own(*arguments, **keywords)
        worker.foreshock_digests = {}
        return _digested(named, worker.foreshock_digests), adapter

    actor.engine.get_per_tensor_param = get_per_tensor_param


def _digested(named: Any, digests: Digests) -> Iterator[tuple[str, Any]]:
    from torch import distributed

    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for number, (name, values) in enumerate(named):
        # All ranks gather all tensors, in the same order.
        if number % ranks == rank:
            guard(functools.partial(_digest, digests, name, values), log, "the sent weights")
        yield name, values


def _digest(digests: Digests, name: str, values: Any) -> None:
    digests |= tensors_of([(name, values)])


def foreshock_sent(worker: Any) -> Digests | None:
    """Return the digests of this worker's share of what was sent last; None if it sends nothing."""
    return getattr(worker, "foreshock_digests", None)


def observe_vllm_worker(module: ModuleType) -> None:
    """Give vLLM's workers a method for `collective_rpc`; module `verl.workers.rollout.vllm_rollout.utils`."""
    module.vLLMColocateWorkerExtension.foreshock_weights = held_by_worker


def observe_vllm_server(module: ModuleType) -> None:
    """Give verl's servers of vLLM a method that returns what their workers hold: their own call drops the answer."""
    module.vLLMHttpServer.foreshock_weights = foreshock_weights


async def foreshock_weights(server: Any) -> Digests:
    """Return what the workers of one of verl's servers of vLLM hold."""
    return of_ranks(await server.engine.collective_rpc("foreshock_weights"))


def observe_sync(module: ModuleType) -> None:
    """Compare after each `CheckpointEngineManager.update_weights` of `verl.checkpoint_engine.base`."""
    manager_class = module.CheckpointEngineManager
    if is_observed(manager_class, "update_weights"):
        return
    # verl's decorator looks at its caller's frame to know if it is awaited, so the observer is inside of it.
    own = manager_class.update_weights.__wrapped__

    @functools.wraps(own)
    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        result = await own(self, global_steps)
        guard(functools.partial(_log_weights, self, global_steps), log, "CheckpointEngineManager.update_weights")
        return result

    observed = module.auto_await(update_weights)
    mark_observed(observed)
    manager_class.update_weights = observed


def _log_weights(manager: Any, version: int | None) -> None:
    run = current_run()
    # A v1 trainer may have a second manager; a sync without a version only wakes engines up.
    if run is not None and manager is run.trainer.checkpoint_manager and version is not None:
        _compare(run, manager, int(version) + 1)


def _compare(run: VerlRun, manager: Any, step: int) -> None:
    """Log what was sent and what each engine holds; the weights that are synced after step N sample step N + 1."""
    import ray

    name = run.trainer.config.actor_rollout_ref.rollout.name
    if name != "vllm":
        log.warning("notary", f"FORESHOCK_NOTARY compares the weights of vLLM only; this run samples with {name}")
        return
    run.begin(step)
    sent = joined(each for each in run.trainer.actor_rollout_wg.foreshock_sent() if each)
    # The first server of a replica speaks for all its nodes.
    asked = {str(each.replica_rank): each.servers[0].foreshock_weights.remote() for each in manager.replicas}
    held = dict(zip(asked, ray.get(list(asked.values())), strict=True))
    if run.client is not None:
        run.client.log_weights(step, trainer=sent, engines=held)
