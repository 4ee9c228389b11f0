"""`sglang.http`: the prompt log-probs of a running SGLang server, by `/generate` with `return_logprob`.

`/get_model_info` tells the folder that the server was started on and the version of its weights. Written from SGLang's
documentation of its native API; it has not been run against a real server.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock_probes.scorers.http_server import HeldModel, Server, score_with_server, value_of
from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, UnsupportedScoreError, WarmModel

__all__ = ["score"]

# What a server tells whose weights never got a version.
_NO_VERSION = ("default", "")


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request. Raises UnsupportedScoreError if that cannot be done correctly."""
    with Server("sglang") as server:

        def log_probs_of(sequences: list[list[int]], firsts: list[int]) -> list[NDArray[np.float64]]:
            body = {
                "input_ids": sequences,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": [first - 1 for first in firsts],
            }
            answers = server.ask("POST", "/generate", body)
            if not isinstance(answers, list) or len(answers) != len(sequences):
                raise UnsupportedScoreError(f"SGLang did not answer {len(sequences)} prompts with as many results")
            return [
                _log_probs(tokens, value_of(answer, "meta_info", "input_token_logprobs"), first)
                for tokens, answer, first in zip(sequences, answers, firsts, strict=True)
            ]

        return score_with_server(request, server, _held(server), log_probs_of, report)


def _held(server: Server) -> HeldModel:
    model = server.get("/get_model_info")
    told = model.get("weight_version") if isinstance(model, dict) else None
    arguments: Any = server.find("/get_server_info") or server.find("/server_info") or {}
    longest, path = arguments.get("context_length"), str(value_of(model, "model_path"))
    return HeldModel(
        name=path,
        path=path,
        weights_version=None if told is None or str(told) in _NO_VERSION else str(told),
        longest=longest if isinstance(longest, int) else None,
        server_version=arguments.get("version"),
        flags={
            name: str(arguments[name])
            for name in ("dtype", "attention_backend", "kv_cache_dtype", "tp_size")
            if arguments.get(name) is not None
        },
    )


def _log_probs(tokens: list[int], told: Any, first: int) -> NDArray[np.float64]:
    """Return the log-probs of `tokens[first:]`: the last entries (log-prob, id, text) of `input_token_logprobs`."""
    wanted = tokens[first:]
    entries = told[-len(wanted) :] if isinstance(told, list) else []
    if [entry[1] for entry in entries] != wanted or any(entry[0] is None for entry in entries):
        raise UnsupportedScoreError("SGLang scored other tokens than the ones sent, or gave no log-probs of some")
    return np.array([entry[0] for entry in entries], dtype=np.float64)
