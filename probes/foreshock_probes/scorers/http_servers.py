"""Scorers that ask a running server over HTTP: their common part, and `vllm.http`.

The server's address is a setting of the worker; neither a job nor a rollout can name one, and redirects are not
followed. The server must be shown to hold the job's weights: it was started on the folder of the checkpoint, or it
reports the checkpoint's weights version. The fingerprint has what the server reports; servers do not report their
hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from foreshock.fingerprint import Fingerprint
from foreshock.parsing import parse_json
from foreshock_probes.adapters import modules_of
from foreshock_probes.scorers.request import (
    Options,
    Report,
    Scored,
    ScoreRequest,
    UnsupportedScoreError,
    WarmModel,
    parse_options,
)
from foreshock_probes.scorers.sampling import logged_distribution, sampled_temperature
from foreshock_probes.scorers.tokens import LogProbsOf, check_tokens, compose, score_by_temperature, sequence_lengths
from foreshock_probes.settings import load_settings

READ_SECONDS = 600.0


class ServerOptions(Options):
    """`batch_size` sequences are sent in one request; the server's scheduler batches them as it likes."""

    batch_size: int = Field(default=32, ge=1)


@dataclass(frozen=True, slots=True)
class HeldModel:
    """The model that a server reports: its name, the path it was loaded from, the weights version.

    A sequence must have fewer than `longest` tokens; None if the server does not report it. `seen_by`: how the server
    was shown to hold the weights, if that is already known.
    """

    name: str
    path: str | None
    weights_version: str | None
    longest: int | None
    server_version: str | None
    dtype: str | None = None
    seen_by: str | None = None
    flags: dict[str, str] = field(default_factory=dict)


class Server:
    """A server of the worker's configuration, `name` being `vllm` or `sglang`.

    Raises UnsupportedScoreError if none is configured.
    """

    def __init__(self, name: str) -> None:
        settings = load_settings()
        if name not in settings.engine_servers:
            raise UnsupportedScoreError(
                f"this worker has no {name} server; set FORESHOCK_ENGINE_SERVERS='{name}=http://host:port'"
            )
        self.name, self._address = name, settings.engine_servers[name]
        self.may_reload = name in settings.engine_servers_reload
        key = settings.engine_server_keys.get(name)
        headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        self._http = httpx.Client(
            base_url=self._address, headers=headers, timeout=httpx.Timeout(READ_SECONDS, connect=10.0), trust_env=False
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def find(self, path: str) -> Any:
        """Return the JSON of `path`, None if the server has no such path."""
        return self.ask("GET", path, optional=True)

    def ask(self, method: str, path: str, body: Any = None, *, optional: bool = False) -> Any:
        """Return the JSON of the answer.

        Raises ConnectionError, after which a retry may succeed, if the server cannot be reached or fails (5xx), and
        UnsupportedScoreError if it refuses the request. `optional`: None if there is no such path.
        """
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ConnectionError(
                f"the {self.name} server at {self._address} gives no answer ({type(error).__name__}: {error}); start "
                "it, or correct FORESHOCK_ENGINE_SERVERS"
            ) from error
        if optional and answer.status_code in (404, 405):
            return None
        told = f"the {self.name} server at {self._address} answered {path} with {answer.status_code}"
        if answer.status_code in (401, 403):
            raise UnsupportedScoreError(f"{told}; set FORESHOCK_ENGINE_SERVER_KEYS='{self.name}=its key'")
        if answer.status_code >= 500 or answer.status_code == 429:
            raise ConnectionError(f"{told}: {answer.text[:500]}")
        if answer.status_code != 200:
            raise UnsupportedScoreError(f"{told}: {answer.text[:500]}")
        try:
            return parse_json(answer.content)
        except ValueError as error:
            raise UnsupportedScoreError(f"{told} and no JSON; is it a {self.name} server?") from error


def value_of(answer: Any, *path: str | int) -> Any:
    """Return the value at `path` of a server's answer. Raises UnsupportedScoreError if there is none."""
    found = answer
    for key in path:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError) as error:
            where = ".".join(map(str, path))
            raise UnsupportedScoreError(
                f"the server's answer has no {where!r}; is it a server of that kind?"
            ) from error
    return found


def check_weights(held: HeldModel, request: ScoreRequest) -> str:
    """Return how the server was shown to hold the request's weights: "folder" or "version".

    Raises UnsupportedScoreError if it reports another weights version, or neither the folder nor a version.
    """
    wanted, told = request.weights_version, held.weights_version
    if held.seen_by is not None:
        return held.seen_by
    if request.adapter is not None:
        raise UnsupportedScoreError(
            f"the server serves no LoRA adapter of the folder {str(request.adapter)!r}; start it with --enable-lora "
            f"--lora-modules adapter={request.adapter} --lora-target-modules {' '.join(modules_of(request.adapter))}, "
            "or choose a scorer that loads the weights itself"
        )
    if told is not None and wanted is not None and told != str(wanted):
        raise UnsupportedScoreError(
            f"the server holds the weights version {told}, the checkpoint has {wanted}; update the server's weights"
        )
    if told is not None and wanted is not None:
        return "version"
    if _is_folder(held.path, request.weights_folder):
        return "folder"
    raise UnsupportedScoreError(
        f"the server holds {held.path or held.name!r} and tells no weights version, so it cannot be seen to hold the "
        "checkpoint; start it on the checkpoint's folder, or have it tell the version of its weights"
    )


def _is_folder(path: str | None, folder: Path) -> bool:
    return path is not None and Path(path).is_absolute() and Path(path).resolve() == folder.resolve()


def score_with_server(
    request: ScoreRequest,
    server: Server,
    held: HeldModel,
    log_probs_of: LogProbsOf,
    report: Report,
    *,
    any_temperature: bool = False,
) -> Scored:
    """Score the request's rollouts with the server, which holds `held`.

    Raises UnsupportedScoreError if the run's log-probs are of a truncated distribution or, without `any_temperature`,
    of a processed one: servers return raw log-probs for prompts.
    """
    try:
        options = parse_options(ServerOptions, request)
    except UnsupportedScoreError as error:
        raise UnsupportedScoreError(f"{error}; what a server computes with is set when it is started") from error
    rollouts = request.rollouts
    check_tokens(rollouts, request.weights_folder)
    distribution = logged_distribution(rollouts, truncation="apply")
    if distribution.truncated.any() or (not any_temperature and (distribution.temperature != 1).any()):
        raise UnsupportedScoreError(
            "the run logged processed log-probs, and a server gives raw ones for prompts; use a scorer that loads the "
            "weights itself, or log raw log-probs"
            + (". sglang.decode follows a temperature" if server.name == "sglang" and not any_temperature else "")
        )
    verified = check_weights(held, request)
    lengths = sequence_lengths(rollouts)
    if held.longest is not None and int(lengths.max(initial=0)) >= held.longest:
        raise UnsupportedScoreError(
            f"a rollout has {int(lengths.max())} tokens, and the server takes less than {held.longest}; raise its "
            "maximum model length"
        )
    plan = compose(lengths, options.batch_size, request.variant)
    # The first token of a response without a prompt has no log-prob.
    scored = lengths > np.maximum(np.diff(rollouts.prompt_offsets), 1)
    log_probs = score_by_temperature(rollouts, plan.batches, distribution.temperature, scored, log_probs_of, report)
    fingerprint = Fingerprint(
        engine=server.name,
        engine_version=held.server_version,
        dtype=held.dtype,
        logprobs_mode="raw_logprobs" if (distribution.temperature == 1).all() else "processed_logprobs",
        temperature=sampled_temperature(distribution.temperature),
        batch_composition=f"{plan.name}, batched by the server",
        weights_version=request.weights_version,
        weights_digest=request.weights_digest,
        flags={"served_by": "http", "model": held.name, "weights_seen_by": verified, **held.flags},
    )
    return Scored(log_probs=log_probs, fingerprint=fingerprint)


def score_with_vllm(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score as `vllm.http`, by `/v1/completions`. Raises UnsupportedScoreError if that cannot be done correctly."""
    with Server("vllm") as server:
        held = _model_of_vllm(server, request)

        def log_probs_of(_: float, sequences: list[NDArray[np.int32]], firsts: list[int]) -> list[NDArray[np.float64]]:
            body = {
                "model": held.name,
                "prompt": [each.tolist() for each in sequences],
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
                _log_probs_of_vllm(tokens.tolist(), value_of(by_index[index], "prompt_logprobs"), first)
                for index, (tokens, first) in enumerate(zip(sequences, firsts, strict=True))
            ]

        return score_with_server(request, server, held, log_probs_of, report)


def _model_of_vllm(server: Server, request: ScoreRequest) -> HeldModel:
    """Read `/v1/models`, and `/weight_info` if the server has it; of a request with a LoRA adapter, its model."""
    models = value_of(server.ask("GET", "/v1/models"), "data")
    # Adapters have a parent, the base model.
    adapters = [
        model
        for model in models
        if model.get("parent") and request.adapter is not None and _is_folder(model.get("root"), request.adapter)
    ]
    served = adapters[:1] or [model for model in models if not model.get("parent")]
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
        seen_by="folder" if adapters else None,
    )


def _log_probs_of_vllm(
    tokens: list[int], told: list[dict[str, dict[str, float]] | None], first: int
) -> NDArray[np.float64]:
    """Return the log-probs of `tokens[first:]`; each position of the answer has log-probs of some ids, by id."""
    if not isinstance(told, list) or len(told) != len(tokens):
        raise UnsupportedScoreError("vLLM gave no log-probs of the prompt; its version must support prompt_logprobs")
    found = [(place or {}).get(str(token)) for token, place in zip(tokens[first:], told[first:], strict=True)]
    if any(each is None for each in found):
        raise UnsupportedScoreError("vLLM scored other tokens than the ones sent")
    return np.array([each["logprob"] for each in found if each is not None], dtype=np.float64)
