"""Routes of vLLM's prefill: the experts that the routers of its layers chose.

vLLM's own option to return them (`enable_return_routed_experts`) must be set when the engine starts, and its answers
cannot be aligned with the chunks of prompt log-probs. vLLM's routers accept a callback, which is used here for one
rollout at a time: the tokens of a step are then those of one sequence, in order. Kernels that choose the experts
themselves, as some GPU kernels do, have no such router; they are refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.scorers import REFERENCE
from foreshock_probes.routing.recorded import RecordedRoutes, empty_routes
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel, parse_options
from foreshock_probes.scorers.tokens import compose, sequence, sequence_lengths
from foreshock_probes.scorers.vllm_engine import VllmEngine, VllmOptions, prepare_engine
from foreshock_probes.scorers.vllm_scorers import prompt_log_probs


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
    if options.tensor_parallel_size != 1:
        raise UnsupportedScoreError(f"routes need tensor_parallel_size=1, got {options.tensor_parallel_size}")
    prepared = prepare_engine(request, options, warm)
    log_probs = np.full(rollouts.num_tokens, np.nan, np.float32)
    lengths = sequence_lengths(rollouts)
    with _recorded(prepared.engine) as routes:
        experts: NDArray[np.int16] | None = None
        for row in range(rollouts.num_rollouts):
            start, stop = (int(offset) for offset in rollouts.response_offsets[row : row + 2])
            prompt = int(lengths[row]) - (stop - start)
            start += 1 if prompt == 0 else 0  # the first token of a rollout without a prompt has no state before it
            if stop > start:
                tokens = sequence(rollouts, row)
                prepared.engine.divide_logits_by(float(prepared.divisor[row]))
                routes.start()
                (output,) = prepared.engine.prefill([tokens])
                first = max(prompt, 1)
                log_probs[start:stop] = prompt_log_probs(output, first)
                found = routes.finish(tokens.size)
                if experts is None:
                    experts = empty_routes(rollouts.num_tokens, *found.shape[1:])
                experts[start:stop] = found[first - 1 : -1]
            report(int(rollouts.response_offsets[row + 1]))
        if experts is None:
            experts = empty_routes(rollouts.num_tokens, len(routes.layers), 1)
    composition = compose(lengths, 1, request.variant).name
    return RecordedRoutes(experts, routes.layers, log_probs, prepared.fingerprint(request, options, composition))


class VllmRoutes:
    """Records the experts of one sequence at a time, with callbacks on the routers of a model of vLLM."""

    def __init__(self) -> None:
        self.layers: tuple[int, ...] = ()
        self._positions: list[NDArray[np.int64]] = []
        self._experts: dict[int, list[NDArray[np.int16]]] = {}
        self._detach: list[Callable[[], None]] = []

    def attach(self, model: Any) -> None:
        """Record the routers of `model`. Raises UnsupportedScoreError if there are none, or one cannot be recorded."""
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
        for number, router in routers.items():
            router.set_capture_fn(partial(self._routed, number))
            self._detach.append(partial(router.set_capture_fn, None))
        self._detach.append(model.register_forward_pre_hook(self._called, with_kwargs=True).remove)
        self.layers = tuple(sorted(routers))

    def detach(self) -> None:
        """Remove the callbacks."""
        while self._detach:
            self._detach.pop()()

    def start(self) -> None:
        """Start a sequence."""
        self._positions, self._experts = [], {number: [] for number in self.layers}

    def finish(self, length: int) -> NDArray[np.int16]:
        """Return the experts [length, L, k] of the sequence.

        Raises UnsupportedScoreError unless each of its positions was routed once in each layer, in order.
        """
        positions = np.concatenate(self._positions) if self._positions else np.zeros(0, np.int64)
        parts = [np.concatenate(self._experts[number]) for number in self.layers if self._experts[number]]
        in_order = np.array_equal(positions, np.arange(length))
        if not in_order or len(parts) != len(self.layers) or any(each.shape[0] != length for each in parts):
            raise UnsupportedScoreError(
                f"experts of {positions.size} positions and {len(parts)} layers were recorded, expected each of "
                f"{length} positions once and in order in {len(self.layers)} layers: this release of vLLM computes "
                "prompts in another way"
            )
        return np.stack(parts, axis=1)

    def _called(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        positions = named.get("positions")
        if isinstance(positions, torch.Tensor) and positions.ndim == 1:
            self._positions.append(positions.cpu().numpy().astype(np.int64))

    def _routed(self, number: int, experts: torch.Tensor) -> None:
        if number in self._experts:
            self._experts[number].append(experts.to(torch.int16).cpu().numpy())


@contextmanager
def _recorded(engine: VllmEngine) -> Iterator[VllmRoutes]:
    """Record the routes of the engine within the block."""
    routes = VllmRoutes()
    try:
        engine.apply(routes.attach)
        yield routes
    finally:
        routes.detach()
