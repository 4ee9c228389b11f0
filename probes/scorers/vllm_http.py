"""`vllm.http`: the prompt log-probs of a running vLLM server, by `/v1/completions`.

`/v1/models` tells the folder that the server was started on, `/weight_info` the weights version, if the server has it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock_probes.scorers.http_server import HeldModel, Server, score_with_server, value_of
from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, UnsupportedScoreError, WarmModel

__all__ = ["score"]


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request. Raises UnsupportedScoreError if that cannot be done correctly."""
    with Server("vllm") as server:
        held = _held(server)

        def log_probs_of(sequences: list[list[int]], firsts: list[int]) -> list[NDArray[np.float64]]:
            body = {
                "model": held.name,
                "prompt": sequences,
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": 0,
                "add_special_tokens": False,
                "ignore_eos": True,
            }
            choices = value_of(server.ask("POST", "/v1/completions", body), "choices")
            by_index = {value_of(choice, "index"): choice for choice in choices}
            if sorted(by_index) != list(range(len(sequences))):
                raise UnsupportedScoreError(f"vLLM answered {len(sequences)} prompts with {len(by_index)} choices")
            return [
                _log_probs(tokens, value_of(by_index[index], "prompt_logprobs"), first)
                for index, (tokens, first) in enumerate(zip(sequences, firsts, strict=True))
            ]

        return score_with_server(request, server, held, log_probs_of, report)


def _held(server: Server) -> HeldModel:
    models = value_of(server.get("/v1/models"), "data")
    # The base model: adapters have a parent.
    served = [model for model in models if not model.get("parent")]
    if len(served) != 1:
        raise UnsupportedScoreError(f"the vLLM server serves {len(served)} models, and one is needed")
    version = server.find("/version")
    weights = server.find("/weight_info") or {}
    told = weights.get("weight_version")
    return HeldModel(
        name=str(value_of(served[0], "id")),
        path=served[0].get("root"),
        weights_version=None if told is None else str(told),
        longest=served[0].get("max_model_len"),
        server_version=str(version["version"]) if version else None,
    )


def _log_probs(tokens: list[int], told: list[dict[str, dict[str, float]] | None], first: int) -> NDArray[np.float64]:
    """Return the log-probs of `tokens[first:]`: each position has those of some ids, by id."""
    if not isinstance(told, list) or len(told) != len(tokens):
        raise UnsupportedScoreError("vLLM gave no log-probs of the prompt; its version must support prompt_logprobs")
    found = [(place or {}).get(str(token)) for token, place in zip(tokens[first:], told[first:], strict=True)]
    if any(each is None for each in found):
        raise UnsupportedScoreError("vLLM scored other tokens than the ones sent")
    return np.array([each["logprob"] for each in found if each is not None], dtype=np.float64)
