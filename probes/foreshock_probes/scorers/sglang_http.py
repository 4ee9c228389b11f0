"""`sglang.http` and `sglang.decode`: the log-probs of a running SGLang server, by `/generate`.

`sglang.http` passes prompt and response as one prompt. SGLang's prompt log-probs are raw: they ignore the temperature.
`sglang.decode` forces the logged tokens one by one with a custom logit processor (`sglang_forced_tokens.py`), for which
the server needs `--enable-custom-logit-processor`. Like SGLang's own output log-probs, its log-probs are taken after
the temperature and before top-p, top-k and min-p.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock_probes.scorers.http_servers import HeldModel, Server, score_with_server, value_of
from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, UnsupportedScoreError, WarmModel
from foreshock_probes.scorers.tokens import model_configuration, vocabulary_size

# What SGLang reports if its weights were never given a version.
_NO_VERSION = ("default", "")
_LOWEST = -1e30


def score_prefill(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `sglang.http`. Raises UnsupportedScoreError if that cannot be done correctly."""
    with Server("sglang") as server:
        held, _ = held_model(server, request)
        return score_prompts(request, server, held, report, lambda answer: None)


def score_prompts(
    request: ScoreRequest,
    server: Server,
    held: HeldModel,
    report: Report,
    keep: Callable[[Any], None],
    **asked: Any,
) -> Scored:
    """Score by prefill; call `keep` with the answer to each sequence. `asked`: further parameters of `/generate`."""
    size = vocabulary_size(request.weights_folder)

    def log_probs_of(_: float, sequences: list[NDArray[np.int32]], firsts: list[int]) -> Iterator[NDArray[np.float64]]:
        body = {
            "input_ids": [each.tolist() for each in sequences],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": [first - 1 for first in firsts],
            **asked,
        }
        for tokens, answer, first in zip(sequences, _generate(server, body), firsts, strict=True):
            keep(answer)
            yield _prompt_log_probs(tokens.tolist(), value_of(answer, "meta_info", "input_token_logprobs"), first, size)

    return score_with_server(request, server, held, log_probs_of, report)


def score_decode(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `sglang.decode`. Raises UnsupportedScoreError if that cannot be done correctly."""
    with Server("sglang") as server:
        held, told = held_model(server, request)
        if not told.get("enable_custom_logit_processor"):
            raise UnsupportedScoreError(
                "the SGLang server forces no tokens; start it with --enable-custom-logit-processor, or use sglang.http"
            )
        log_softmax = bool(told.get("enable_deterministic_inference") or told.get("rl_on_policy_target"))

        def log_probs_of(
            temperature: float, sequences: list[NDArray[np.int32]], firsts: list[int]
        ) -> list[NDArray[np.float64]]:
            forced = [each[first:].tolist() for each, first in zip(sequences, firsts, strict=True)]
            common = {"temperature": temperature, "log_softmax": log_softmax}
            body = {
                "input_ids": [each[:first].tolist() for each, first in zip(sequences, firsts, strict=True)],
                "sampling_params": [
                    {"max_new_tokens": len(tokens), "temperature": 0.0, "ignore_eos": True,
                     "custom_params": {"tokens": tokens, **common}}
                    for tokens in forced
                ],
                "custom_logit_processor": [_processor()] * len(forced),
            }  # fmt: skip
            answers = _generate(server, body)
            return [_forced_log_probs(tokens, answer) for tokens, answer in zip(forced, answers, strict=True)]

        return score_with_server(request, server, held, log_probs_of, report, any_temperature=True)


def _generate(server: Server, body: dict[str, Any]) -> list[Any]:
    answers = server.ask("POST", "/generate", body)
    if not isinstance(answers, list) or len(answers) != len(body["input_ids"]):
        raise UnsupportedScoreError(f"SGLang did not answer {len(body['input_ids'])} prompts with as many results")
    return answers


def _prompt_log_probs(tokens: list[int], told: Any, first: int, size: int | None) -> NDArray[np.float64]:
    """Return the log-probs of `tokens[first:]`: the last entries (log-prob, id, text) of `input_token_logprobs`.

    SGLang reports the last id of the vocabulary as 0; the log-prob is still that of the token itself.
    """
    wanted = tokens[first:]
    entries = told[-len(wanted) :] if isinstance(told, list) else []
    same = len(entries) == len(wanted) and all(
        entry[1] == token or (entry[1] == 0 and size is not None and token == size - 1)
        for entry, token in zip(entries, wanted, strict=True)
    )
    if not same:
        raise UnsupportedScoreError("SGLang scored other tokens than the ones sent")
    return _numbers([entry[0] for entry in entries])


def _forced_log_probs(tokens: list[int], answer: Any) -> NDArray[np.float64]:
    found = value_of(answer, "meta_info").get("foreshock_log_probs")
    if value_of(answer, "output_ids") != tokens or not isinstance(found, list) or len(found) != len(tokens):
        raise UnsupportedScoreError(
            "SGLang generated other tokens than the logged ones, although these were forced; a prompt that it prefills "
            "in several chunks does this: raise --chunked-prefill-size"
        )
    return _numbers(found)


def _numbers(values: list[Any]) -> NDArray[np.float64]:
    """Return log-probs as an array; values below −1e30 become −∞. A null, JSON's NaN, is refused."""
    if any(value is None for value in values):
        raise UnsupportedScoreError(
            f"SGLang gave no number for {values.count(None)} of {len(values)} log-probs of a rollout (NaN); check its "
            "weights and its dtype"
        )
    numbers = np.array(values, dtype=np.float64)
    return np.where(numbers <= _LOWEST, -np.inf, numbers)


class _Forced:
    """An object that is pickled as a call that executes the text of `sglang_forced_tokens.py`.

    The server need not have this package.
    """

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        text = Path(__file__).with_name("sglang_forced_tokens.py").read_text("utf-8")
        return eval, (
            f"(lambda names: (exec({text!r}, names), names['ForcedTokens'])[1])({{'__name__': 'foreshock'}})",
        )


@cache
def _processor() -> str:
    """Return the logit processor as SGLang's `CustomLogitProcessor.to_str` writes one."""
    return json.dumps({"callable": pickle.dumps(_Forced()).hex()})


def held_model(server: Server, request: ScoreRequest) -> tuple[HeldModel, dict[str, Any]]:
    """Return the server's model and everything that it reports; load the request's weights if that is allowed."""
    folder = request.weights_folder.resolve()
    before = _model_of(server, request)
    if not server.may_reload:
        return before
    if before[0].weights_version == request.weights_digest:
        return replace(before[0], seen_by="digest"), before[1]
    checksum = _checksum(server)
    body = {"model_path": str(folder), "weight_version": request.weights_digest}
    answer = server.ask("POST", "/update_weights_from_disk", body)
    after = _model_of(server, request)
    if not value_of(answer, "success") or after[0].weights_version != request.weights_digest:
        raise UnsupportedScoreError(f"the SGLang server did not load the checkpoint: {answer.get('message')}")
    loaded = _checksum(server)
    if checksum == loaded and str(before[0].weights_version).startswith("sha256:"):
        raise UnsupportedScoreError(
            f"the SGLang server holds the tensors of {before[0].weights_version} after it was told to load "
            f"{request.weights_digest}; start it on the checkpoint's folder"
        )
    flags = {**after[0].flags, "tensors_checksum": loaded} if loaded else after[0].flags
    return replace(after[0], seen_by="load", flags=flags), after[1]


def _checksum(server: Server) -> str | None:
    answer = server.ask("POST", "/weights_checker", {"action": "checksum"}, optional=True)
    found = None if answer is None else answer.get("per_engine_checksum")
    return None if found is None else str(found)


def _model_of(server: Server, request: ScoreRequest) -> tuple[HeldModel, dict[str, Any]]:
    # Releases before 0.5.6 have only the second path of each line.
    model = server.find("/model_info") or server.ask("GET", "/get_model_info")
    told: dict[str, Any] = server.find("/server_info") or server.find("/get_server_info") or {}
    version = model.get("weight_version") if isinstance(model, dict) else None
    path, most = str(value_of(model, "model_path")), told.get("max_req_input_len")
    held = HeldModel(
        name=path,
        path=path,
        weights_version=None if version is None or str(version) in _NO_VERSION else str(version),
        longest=most + 1 if isinstance(most, int) else told.get("context_length"),
        server_version=told.get("version"),
        dtype=_dtype(told.get("dtype"), request.weights_folder),
        flags={
            name: str(told[name])
            for name in ("attention_backend", "kv_cache_dtype", "tp_size", "quantization", "rl_on_policy_target",
                         "enable_deterministic_inference", "enable_fp32_lm_head", "device")
            if told.get(name) not in (None, False)
        },
    )  # fmt: skip
    return held, told


def _dtype(told: Any, weights_folder: Path) -> str | None:
    """Return the server's dtype of computation. "auto" is the checkpoint's, except that float32 becomes float16."""
    if told != "auto":
        return {"half": "float16", "float": "float32"}.get(str(told), str(told)) if told else None
    configuration = model_configuration(weights_folder)
    own = str(configuration.get("dtype") or configuration.get("torch_dtype") or "float32")
    smaller = "bfloat16" if str(configuration.get("model_type", "")).startswith("gemma") else "float16"
    return smaller if own == "float32" else own
