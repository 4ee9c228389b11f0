"""Routes of a forward pass in torch: the experts with which the layers of transformers are called.

The layers of experts in transformers get each token's chosen experts as an argument. The recorded experts are therefore
those that computed the token, whatever the model's router does. Batches and numerics are those of the scorer.
"""

import inspect
import re
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
    found = _layers_of_experts(forward.model)
    layers, tokens = tuple(sorted(found)), request.rollouts.num_tokens
    newest: dict[int, torch.Tensor] = {}
    recorded: list[NDArray[np.int16]] = []

    def called(number: int, name: str, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        # The experts are the argument after the hidden states. The last call counts: a first pass may only check the
        # model.
        newest[number] = named[name] if name in named else arguments[1]

    def take(batch: TokenBatch) -> None:
        rows, width = batch.ids.shape
        if width >= 2:
            if set(newest) != set(layers) or any(each.shape[0] != rows * width for each in newest.values()):
                raise UnsupportedScoreError(
                    f"experts of {len(newest)} of {len(layers)} layers were recorded for {rows * width} tokens: this "
                    "model does not call the experts of each layer once, with all tokens"
                )
            if not recorded:
                recorded.append(empty_routes(tokens, len(layers), int(newest[layers[0]].shape[1])))
            for index, number in enumerate(layers):
                experts = newest[number].reshape(rows, width, -1)[:, :-1]
                batch.write(experts.to(torch.int16).cpu().numpy(), recorded[0][:, index])
        newest.clear()

    handles = [
        module.register_forward_pre_hook(partial(called, number, name), with_kwargs=True)
        for number, (module, name) in found.items()
    ]
    try:
        scored = run_forward_pass(forward, request.rollouts, options, report, take)
    finally:
        for handle in handles:
            handle.remove()
    experts = recorded[0] if recorded else empty_routes(tokens, len(layers), 1)
    return RecordedRoutes(experts, layers, scored.log_probs, scored.fingerprint)


def _layers_of_experts(model: Any) -> dict[int, tuple[Any, str]]:
    """Return, by number of the layer, the module that is called with each token's experts, and that argument's name.

    Raises UnsupportedScoreError if there is none.
    """
    found: dict[int, tuple[Any, str]] = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(f"{name}.")
        if layer is None or not name.endswith("experts"):
            continue
        parameters = inspect.signature(type(module).forward).parameters
        argument = next((each for each in _ARGUMENTS if each in parameters), None)
        if argument is not None:
            found[int(layer[1])] = (module, argument)
    if found:
        return found
    configuration = model.config.get_text_config()
    counts = (getattr(configuration, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if any(isinstance(count, int) and count > 0 for count in counts):
        raise UnsupportedScoreError(
            f"the experts of {type(model).__name__} cannot be recorded: its layers are not called with the experts of "
            "each token in this version of transformers"
        )
    raise UnsupportedScoreError(
        f"{type(model).__name__} has no routed experts: a routing probe needs a mixture of experts"
    )
