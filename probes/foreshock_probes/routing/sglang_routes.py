"""Routes of a running SGLang server's prefill. The server returns them with `--enable-return-routed-experts`.

The experts of a token in the server's prefix cache are from the pass that computed it, possibly an earlier one.
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock_probes.routing.recorded import RecordedRoutes, empty_routes
from foreshock_probes.scorers.http_servers import Server, ServerOptions, value_of
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel, parse_options
from foreshock_probes.scorers.sglang_http import held_model, score_prompts
from foreshock_probes.scorers.tokens import compose, model_configuration, sequence_lengths


def record(request: ScoreRequest, warm: WarmModel, report: Report) -> RecordedRoutes:
    """Return the routes and log-probs of SGLang's prefill.

    Raises UnsupportedScoreError if the server returns no experts, and in the cases of the scorer.
    """
    rollouts, answers = request.rollouts, list[Any]()
    with Server("sglang") as server:
        held, told = held_model(server, request)
        if not told.get("enable_return_routed_experts"):
            raise UnsupportedScoreError(
                "the SGLang server returns no experts; serve a mixture of experts with --enable-return-routed-experts"
            )
        scored = score_prompts(request, server, held, report, answers.append, return_routed_experts=True)
    lengths, prompts = sequence_lengths(rollouts), np.maximum(np.diff(rollouts.prompt_offsets), 1)
    plan = compose(lengths, parse_options(ServerOptions, request).batch_size, request.variant)
    rows = [row for row in np.concatenate(plan.batches).tolist() if lengths[row] > prompts[row]]
    layers = model_configuration(request.weights_folder)["num_hidden_layers"]
    routes = [_experts(answer, int(lengths[row]), layers) for row, answer in zip(rows, answers, strict=True)]
    # A layer without experts has only zeros, which cannot be a choice of several experts.
    with_experts = np.flatnonzero(np.any([each.any(axis=(0, 2)) for each in routes] or np.zeros((1, 0)), axis=0))
    experts = empty_routes(rollouts.num_tokens, with_experts.size, routes[0].shape[2] if routes else 1)
    for row, found in zip(rows, routes, strict=True):
        stop = rollouts.response_offsets[row + 1]
        chosen = found[prompts[row] - 1 : -1, with_experts]
        experts[stop - len(chosen) : stop] = chosen
    return RecordedRoutes(experts, tuple(with_experts.tolist()), scored.log_probs, scored.fingerprint)


def _experts(answer: Any, length: int, layers: int) -> NDArray[np.int16]:
    """Return the experts [length, layers, k] of a sequence: of all tokens except the one that the server sampled."""
    data = base64.b64decode(value_of(answer, "meta_info", "routed_experts"))
    return np.frombuffer(data, np.int32).reshape(length, layers, -1).astype(np.int16)
