"""Routes of a forward pass in torch: the experts with which the layers of transformers are called.

The layers of experts in transformers get each token's chosen experts as an argument. The recorded experts are therefore
those that computed the token, whatever the model's router does. Batches and numerics are those of the scorer.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock_probes.routing.recorded import RecordedRoutes, empty_routes
from foreshock_probes.scorers.forward_pass import TokenBatch
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel
from foreshock_probes.scorers.torch_forward import forward_options, prepare_forward_pass, run_forward_pass

# Names of the argument with the chosen experts [tokens, k].
_ARGUMENTS = ("top_k_index", "selected_experts")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def record(request: ScoreRequest, warm: WarmModel, report: Report) -> RecordedRoutes:
    """Return the routes and log-probs of the scorer's forward passes.

    Raises UnsupportedScoreError if the model has no layer whose experts can be recorded.
    """
    options = forward_options(request)
    forward = prepare_forward_pass(request, options, warm)
    routes = TorchRoutes(request.rollouts.num_tokens)
    with routes.recorded(forward.model):
        scored = run_forward_pass(forward, request.rollouts, options, report, routes.take)
    return RecordedRoutes(routes.experts, routes.layers, scored.log_probs, scored.fingerprint)


class TorchRoutes:
    """Records the experts of the response tokens of a model's forward passes, `tokens` in all."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._newest: dict[int, torch.Tensor] = {}
        self._experts: NDArray[np.int16] | None = None
        self.layers: tuple[int, ...] = ()

    @property
    def experts(self) -> NDArray[np.int16]:
        """The experts [T, L, k] recorded so far."""
        return empty_routes(self._tokens, len(self.layers), 1) if self._experts is None else self._experts

    @contextmanager
    def recorded(self, model: Any) -> Iterator[None]:
        """Record the forward passes of `model` within the block."""
        found = _layers_of_experts(model)
        if not found:
            raise UnsupportedScoreError(_why_none(model))
        self.layers = tuple(sorted(found))
        handles = [
            module.register_forward_pre_hook(partial(self._called, number, argument), with_kwargs=True)
            for number, (module, argument) in found.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, batch: TokenBatch) -> None:
        """Keep the experts of the newest forward pass, which computed `batch`."""
        newest, self._newest = self._newest, {}
        rows, width = batch.ids.shape
        if width < 2:
            return
        if set(newest) != set(self.layers) or any(each.shape[0] != rows * width for each in newest.values()):
            raise UnsupportedScoreError(
                f"experts of {len(newest)} of {len(self.layers)} layers were recorded for {rows * width} tokens: this "
                "model does not call the experts of each layer once, with all tokens"
            )
        if self._experts is None:
            top_k = int(newest[self.layers[0]].shape[1])
            self._experts = empty_routes(self._tokens, len(self.layers), top_k)
        for index, number in enumerate(self.layers):
            experts = newest[number].reshape(rows, width, -1)[:, :-1]
            batch.write(experts.to(torch.int16).cpu().numpy(), self._experts[:, index])

    def _called(
        self, number: int, argument: str, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        # The experts are the argument after the hidden states. The last call counts: a first pass may only check the
        # model.
        self._newest[number] = named[argument] if argument in named else arguments[1]


def _layers_of_experts(model: Any) -> dict[int, tuple[Any, str]]:
    """Return, by number of the layer, the module that is called with each token's experts, and that argument's name."""
    found: dict[int, tuple[Any, str]] = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(f"{name}.")
        if layer is None or not name.endswith("experts"):
            continue
        parameters = inspect.signature(type(module).forward).parameters
        argument = next((each for each in _ARGUMENTS if each in parameters), None)
        if argument is not None:
            found[int(layer[1])] = (module, argument)
    return found


def _why_none(model: Any) -> str:
    configuration = model.config.get_text_config()
    counts = (getattr(configuration, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if any(isinstance(count, int) and count > 0 for count in counts):
        return (
            f"the experts of {type(model).__name__} cannot be recorded: its layers are not called with the experts of "
            "each token in this version of transformers"
        )
    return f"{type(model).__name__} has no routed experts: a routing probe needs a mixture of experts"
