"""Routes of vLLM's prefill: the experts that the routers of its layers chose.

vLLM's own option to return them (`enable_return_routed_experts`) must be set when the engine starts, and its answers
cannot be aligned with the chunks of prompt log-probs. vLLM's routers accept a callback, which is used here for one
rollout at a time: the tokens of a step are then those of one sequence, in order. Kernels that choose the experts
themselves, as some GPU kernels do, have no such router; they are refused.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.scorers import REFERENCE
from foreshock_probes.routing.recorded import RecordedRoutes, empty_routes
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel, parse_options
from foreshock_probes.scorers.tokens import compose, sequence_lengths
from foreshock_probes.scorers.vllm_engine import VllmOptions, prepare_engine
from foreshock_probes.scorers.vllm_scorers import one_by_one, prompt_log_probs


def record(request: ScoreRequest, warm: WarmModel, report: Report) -> RecordedRoutes:
    """Return the routes and log-probs of vLLM's prefill; its option `batch_size` has no effect.

    Raises UnsupportedScoreError if the model has no router that can be recorded, and for the variant of the noise
    floor, because rollouts that run one at a time have no other batch composition.
    """
    options, rollouts = parse_options(VllmOptions, request), request.rollouts
    if request.variant:
        raise UnsupportedScoreError(
            f"{request.scorer} records routes one rollout at a time, so it has no variant {request.variant!r}; compare "
            f"{REFERENCE} with its variant for a noise floor"
        )
    prepared = prepare_engine(request, options, warm, in_process="routes")
    log_probs = np.full(rollouts.num_tokens, np.nan, np.float32)
    experts: NDArray[np.int16] | None = None
    layers = prepared.engine.apply(lambda model: tuple(sorted(routers_of(model))))
    for _, place, tokens in one_by_one(rollouts, prepared, report):
        first = tokens.size - (place.stop - place.start)
        positions, routed, detach = prepared.engine.apply(observe_routes)
        try:
            (output,) = prepared.engine.prefill([tokens])
        finally:
            detach()
        log_probs[place] = prompt_log_probs(output, first)
        found = _in_order(positions, [routed[layer] for layer in layers], tokens.size)
        if experts is None:
            experts = empty_routes(rollouts.num_tokens, *found.shape[1:])
        experts[place] = found[first - 1 : -1]
    if experts is None:
        experts = empty_routes(rollouts.num_tokens, len(layers), 1)
    composition = compose(sequence_lengths(rollouts), 1, request.variant).name
    return RecordedRoutes(experts, layers, log_probs, prepared.fingerprint(request, options, composition))


def routers_of(model: Any) -> dict[int, Any]:
    """Return the routers of a model by layer. Raises UnsupportedScoreError if there is none that can be recorded."""
    routers: dict[int, Any] = {}
    for module in model.modules():
        if not (hasattr(module, "routed_experts") and hasattr(module, "layer_id")):
            continue
        router = getattr(module, "router", None)
        if getattr(module, "is_monolithic", False) or not hasattr(router, "set_capture_fn"):
            raise UnsupportedScoreError(
                f"vLLM's layer {module.layer_id} chooses its experts inside a kernel "
                f"({type(getattr(module, '_quant_method', module)).__name__}): they cannot be recorded with this "
                "release of vLLM on this hardware"
            )
        routers[int(module.layer_id)] = router
    if not routers:
        raise UnsupportedScoreError(
            f"vLLM's {type(model).__name__} has no routed experts: a routing probe needs a mixture of experts"
        )
    return routers


def observe_routes(model: Any) -> tuple[list[NDArray[Any]], dict[int, list[NDArray[Any]]], Callable[[], None]]:
    """Record the positions [n] of each step and, by layer, its experts [n, k]; return both, and what ends it."""
    positions: list[NDArray[Any]] = []
    experts: dict[int, list[NDArray[Any]]] = {}
    routers = routers_of(model)

    def called(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = named.get("positions")
        if isinstance(given, torch.Tensor) and given.ndim == 1:
            positions.append(given.cpu().numpy().astype(np.int64))  # a copy: vLLM uses its buffer again

    def end() -> None:
        handle.remove()
        for router in routers.values():
            router.set_capture_fn(None)

    for layer, router in routers.items():
        of_layer = experts.setdefault(layer, [])
        router.set_capture_fn(lambda chosen, into=of_layer: into.append(chosen.to(torch.int16).cpu().numpy()))
    handle = model.register_forward_pre_hook(called, with_kwargs=True)
    return positions, experts, end


def _in_order(positions: list[NDArray[Any]], experts: list[list[NDArray[Any]]], length: int) -> NDArray[np.int16]:
    """Return the experts [length, L, k] of a sequence, recorded step by step.

    Raises UnsupportedScoreError unless each of its positions was routed once in each layer, in order.
    """
    order = np.concatenate([np.zeros(0), *positions])
    parts = [np.concatenate(of_layer) for of_layer in experts if of_layer]
    complete = len(parts) == len(experts) and all(len(each) == length for each in parts)
    if not complete or not np.array_equal(order, np.arange(length)):
        raise UnsupportedScoreError(
            f"experts of {order.size} positions and {len(parts)} layers were recorded, expected each of {length} "
            f"positions once and in order in {len(experts)} layers: this release of vLLM computes prompts in another "
            "way"
        )
    return np.stack(parts, axis=1)
