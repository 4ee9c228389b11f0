"""The engine's side: `python -m foreshock_probes.engines.serving <engine> --connection <fd>`.

This process scores commands one after another and replies to each. It is not a `__main__.py`, because Python does not
import a module of that name in processes that multiprocessing spawns.

When the connection is closed, the process exits. If it is still busy after 10 s, it kills itself and the processes that
it started, because the worker no longer waits for the scores.
"""

import argparse
import gc
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from foreshock.errors import ForeshockError
from foreshock.rollouts import ScoreBatch, decode_rollouts, encode_scores
from foreshock.scorers import ENGINES
from foreshock_probes.child_process import connection_to_parent, messages_of_parent
from foreshock_probes.engines.environment import hold_this_process
from foreshock_probes.engines.protocol import Failed, Message, Progress, Ready, ScoreCommand, Scored
from foreshock_probes.offers import engine_of, imported, load_scorer
from foreshock_probes.scorers.request import (
    ReloadError,
    Report,
    ScoreRequest,
    TooFewDevicesError,
    UnsupportedScoreError,
    WarmModel,
    write_result,
)

EXIT_SECONDS = 10.0


def serve(engine: str, requests: Connection, replies: Connection) -> None:
    """Serve commands from `requests` until it is closed; send replies to `replies`, which may be the same."""
    warm = WarmModel()
    for message in messages_of_parent(requests, EXIT_SECONDS):
        _serve(ScoreCommand.model_validate_json(message), engine, warm, replies)


def _serve(command: ScoreCommand, engine: str, warm: WarmModel, replies: Connection) -> None:
    """Run one command and reply with its scores or its error."""
    start = time.monotonic()
    print(f"--- {command.scorer} {command.variant} of {command.weights_folder}", flush=True)
    try:
        _score(command, engine, warm, lambda tokens: send(replies, Progress(tokens=tokens)))
    except ReloadError as error:
        send(replies, Failed(reason=str(error), failure="reload"))
    except TooFewDevicesError as error:
        send(replies, Failed(reason=f"{command.scorer}: {error}", failure="retry"))
    except UnsupportedScoreError as error:
        send(replies, Failed(reason=str(error), failure="final"))
    except ForeshockError as error:
        reason = f"{command.scorer}: {type(error).__name__}: {error}"
        send(replies, Failed(reason=reason, failure="final"))
    except Exception as error:
        traceback.print_exc()
        reason = f"{command.scorer} failed with {type(error).__name__}: {str(error).strip()[:2000]}"
        send(replies, Failed(reason=reason, failure="retry"))
    else:
        send(replies, Scored(seconds=time.monotonic() - start, pid=os.getpid()))
    gc.collect()


def _score(command: ScoreCommand, engine: str, warm: WarmModel, report: Report) -> None:
    """Read the rollouts, score them, and write the result."""
    needed = engine_of(command.scorer)
    if needed != engine:
        raise UnsupportedScoreError(f"{command.scorer} needs an engine process of {needed}, this is one of {engine}")
    with Path(command.rollouts).open("rb") as file:
        rollouts = decode_rollouts(file)
    request = ScoreRequest(
        scorer=command.scorer,
        variant=command.variant,
        rollouts=rollouts,
        weights_folder=Path(command.weights_folder),
        weights_digest=command.weights_digest,
        weights_version=command.weights_version,
        options=command.options,
        accelerator=command.accelerator,
    )
    if command.task is not None:
        imported(command.task)(request, command.arguments, Path(command.scores), warm, report)
        return
    function, loading, start = load_scorer(command.scorer), warm.loading_seconds, time.monotonic()
    scored = function(request, warm, report)
    seconds = time.monotonic() - start - (warm.loading_seconds - loading)
    if scored.log_probs.shape != (rollouts.num_tokens,):
        raise AssertionError(
            f"{command.scorer} must give log-probs of shape ({rollouts.num_tokens},), got {scored.log_probs.shape}"
        )
    scores = ScoreBatch(
        sample_ids=rollouts.sample_ids,
        log_probs=scored.log_probs,
        offsets=rollouts.response_offsets,
        fingerprint=scored.fingerprint,
        seconds=max(seconds, 0.0),
    )
    write_result(encode_scores(scores), Path(command.scores))


def send(replies: Connection, message: Message) -> None:
    """Send `message`."""
    replies.send_bytes(message.encoded())


# At import and not in main(), because processes that an engine spawns import this module too and must be held as well.
hold_this_process()


def main() -> int:
    """Serve commands until the connection is closed."""
    parser = argparse.ArgumentParser(prog="python -m foreshock_probes.engines.serving")
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--connection", type=int, required=True, help="file descriptor of the connection to the worker")
    arguments = parser.parse_args()
    connection = connection_to_parent(arguments.connection)
    send(connection, Ready(pid=os.getpid()))
    if ENGINES[arguments.engine].forks:
        from foreshock_probes.engines.forking import serve_with_children  # here, because it imports this module

        return serve_with_children(arguments.engine, connection)
    serve(arguments.engine, connection, connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
