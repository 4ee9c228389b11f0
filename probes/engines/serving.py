"""Serve commands in this process: read them from a pipe, score, reply.

When the pipe of the commands is closed, the process exits. If it is busy, it kills itself and the processes that it
started after 10 s, because the worker no longer waits for the scores.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
import time
import traceback
from pathlib import Path

from foreshock.errors import ForeshockError
from foreshock.rollouts import ScoreBatch, decode_rollouts, encode_exact, encode_scores
from foreshock_probes.engines.protocol import Failed, Message, Progress, ScoreCommand, Scored
from foreshock_probes.scorers.request import (
    ReloadError,
    Report,
    ScoreRequest,
    TooFewDevicesError,
    UnsupportedScoreError,
    WarmModel,
)
from foreshock_probes.scorers.table import scorer_named

__all__ = ["EXIT_SECONDS", "send", "serve"]

EXIT_SECONDS = 10.0


def serve(engine: str, requests: int, replies: int) -> None:
    """Serve commands from the file descriptor `requests` until it is closed; write replies to `replies`."""
    commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, commands), daemon=True).start()
    warm = WarmModel()
    while (line := commands.get()) is not None:
        _serve(ScoreCommand.model_validate_json(line), engine, warm, replies)


def _read(descriptor: int, commands: queue.SimpleQueue[bytes | None]) -> None:
    with os.fdopen(descriptor, "rb") as pipe:
        for line in pipe:
            commands.put(line)
    commands.put(None)
    time.sleep(EXIT_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _serve(command: ScoreCommand, engine: str, warm: WarmModel, replies: int) -> None:
    """Run one command and reply with its scores or its error."""
    start = time.monotonic()
    print(f"--- {command.scorer} {command.variant} of {command.weights_folder}", flush=True)
    try:
        _score(command, engine, warm, lambda tokens: send(replies, Progress(number=command.number, tokens=tokens)))
    except ReloadError as error:
        send(replies, Failed(number=command.number, reason=str(error), failure="reload"))
    except TooFewDevicesError as error:
        send(replies, Failed(number=command.number, reason=f"{command.scorer}: {error}", failure="retry"))
    except UnsupportedScoreError as error:
        send(replies, Failed(number=command.number, reason=str(error), failure="final"))
    except ForeshockError as error:
        reason = f"{command.scorer}: {type(error).__name__}: {error}"
        send(replies, Failed(number=command.number, reason=reason, failure="final"))
    except Exception as error:
        traceback.print_exc()
        reason = f"{command.scorer} failed with {type(error).__name__}: {str(error).strip()[:2000]}"
        send(replies, Failed(number=command.number, reason=reason, failure="retry"))
    else:
        send(replies, Scored(number=command.number, seconds=time.monotonic() - start, pid=os.getpid()))
    gc.collect()


def _score(command: ScoreCommand, engine: str, warm: WarmModel, report: Report) -> None:
    """Read the rollouts, score them, and write the result."""
    scorer = scorer_named(command.scorer)
    if scorer.engine != engine:
        raise UnsupportedScoreError(
            f"{scorer.name} needs an engine process of {scorer.engine}, this is one of {engine}"
        )
    with Path(command.rollouts).open("rb") as file:
        rollouts = decode_rollouts(file)
    request = ScoreRequest(
        scorer=scorer.name,
        variant=command.variant,
        rollouts=rollouts,
        weights_folder=Path(command.weights_folder),
        weights_digest=command.weights_digest,
        weights_version=command.weights_version,
        options=command.options,
        accelerator=command.accelerator,
    )
    if command.pair is not None and command.states is not None:
        _compare(command.pair, request, Path(command.states), Path(command.scores), warm, report)
        return
    if command.layers is not None and command.states is not None:
        first, states = command.layers == "first", Path(command.states)
        _compare_layers(request, states, Path(command.scores), first, warm, report)
        return
    if command.routes is not None:
        from foreshock_probes.routing.comparison import record_routes

        record_routes(request, Path(command.routes), warm, report)
        return
    function, loading, start = scorer.load(), warm.loading_seconds, time.monotonic()
    scored = function(request, warm, report)
    seconds = time.monotonic() - start - (warm.loading_seconds - loading)
    if scored.log_probs.shape != (rollouts.num_tokens,):
        raise AssertionError(
            f"{scorer.name} must give log-probs of shape ({rollouts.num_tokens},), got {scored.log_probs.shape}"
        )
    scores = ScoreBatch(
        sample_ids=rollouts.sample_ids,
        log_probs=scored.log_probs,
        offsets=rollouts.response_offsets,
        fingerprint=scored.fingerprint,
        seconds=max(seconds, 0.0),
    )
    _write(encode_scores(scores), Path(command.scores))


def _compare(pair: str, request: ScoreRequest, states: Path, result: Path, warm: WarmModel, report: Report) -> None:
    """Do the request's part of an exact pair: write the target's states, or compare with them."""
    from foreshock_probes.exact_divergence.pairs import part_of_pair

    divergences = part_of_pair(pair, request, states, warm, report)
    if divergences is not None:
        _write(encode_exact(divergences), result)


def _compare_layers(
    request: ScoreRequest, states: Path, result: Path, first: bool, warm: WarmModel, report: Report
) -> None:
    """Do one scorer's part of a comparison by layer."""
    from foreshock_probes.layer_divergence.part import part_of_comparison

    _write(part_of_comparison(request, states, first=first, warm=warm, report=report).encode(), result)


def _write(data: bytes, result: Path) -> None:
    """Write the result under a temporary name first, so that a partial file never has its name."""
    temporary = result.with_name(result.name + ".part")
    temporary.write_bytes(data)
    temporary.replace(result)


def send(descriptor: int, message: Message) -> None:
    """Write `message` completely."""
    data = message.line()
    while data:
        data = data[os.write(descriptor, data) :]
