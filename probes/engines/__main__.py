"""The engine's side: `python -m probes.engines <engine> --requests <fd> --replies <fd>`.

Reads commands until the worker closes its end, then leaves; should it be busy at that time, it ends itself and whatever
it started, because nobody waits for the scores any more.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from foreshock.errors import ForeshockError
from foreshock.rollouts import ScoreBatch, decode_rollouts, encode_scores
from foreshock.scorers import ENGINES
from probes.engines.environment import hold_this_process
from probes.engines.protocol import Failed, Message, Progress, Ready, ScoreCommand, Scored
from probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel
from probes.scorers.table import scorer_named

SECONDS_TO_LEAVE = 10.0

# Here and not in main(): processes that an engine spawns import this module too, and are to be held as well.
hold_this_process()


def main() -> int:
    """Serve commands until the requests' pipe ends."""
    parser = argparse.ArgumentParser(prog="python -m probes.engines")
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--requests", type=int, required=True, help="file descriptor to read commands from")
    parser.add_argument("--replies", type=int, required=True, help="file descriptor to write replies to")
    arguments = parser.parse_args()
    for descriptor in (arguments.requests, arguments.replies):
        os.set_inheritable(descriptor, False)  # an engine's own children must not keep the pipes open
    commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(arguments.requests, commands), daemon=True).start()
    _send(arguments.replies, Ready(pid=os.getpid()))
    warm = WarmModel()
    while (line := commands.get()) is not None:
        _serve(ScoreCommand.model_validate_json(line), arguments.engine, warm, arguments.replies)
    return 0


def _read(descriptor: int, commands: queue.SimpleQueue[bytes | None]) -> None:
    with os.fdopen(descriptor, "rb") as pipe:
        for line in pipe:
            commands.put(line)
    commands.put(None)
    time.sleep(SECONDS_TO_LEAVE)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _serve(command: ScoreCommand, engine: str, warm: WarmModel, replies: int) -> None:
    """Do one command and reply, whatever happens."""
    start = time.monotonic()
    print(f"--- {command.scorer} {command.variant} of {command.weights_folder}", flush=True)
    try:
        _score(command, engine, warm, lambda tokens: _send(replies, Progress(number=command.number, tokens=tokens)))
    except UnsupportedScoreError as error:
        _send(replies, Failed(number=command.number, reason=str(error), failure="final"))
    except ForeshockError as error:
        reason = f"{command.scorer}: {type(error).__name__}: {error}"
        _send(replies, Failed(number=command.number, reason=reason, failure="final"))
    except Exception as error:
        traceback.print_exc()
        reason = f"{command.scorer} failed with {type(error).__name__}: {str(error).strip()[:2000]}"
        _send(replies, Failed(number=command.number, reason=reason, failure="retry"))
    else:
        _send(replies, Scored(number=command.number, seconds=time.monotonic() - start))
    gc.collect()


def _score(command: ScoreCommand, engine: str, warm: WarmModel, report: Report) -> None:
    """Read the rollouts, score them, write the scores (under a temporary name first, so that half a file is none)."""
    scorer = scorer_named(command.scorer)
    if scorer.engine != engine:
        raise UnsupportedScoreError(f"{scorer.name} runs in {scorer.engine}, and this is the process of {engine}")
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
    scored = scorer.load()(request, warm, report)
    if scored.log_probs.shape != (rollouts.num_tokens,):
        raise AssertionError(f"{scorer.name} gave {scored.log_probs.shape} log-probs for {rollouts.num_tokens} tokens")
    scores = ScoreBatch(
        sample_ids=rollouts.sample_ids,
        log_probs=scored.log_probs,
        offsets=rollouts.response_offsets,
        fingerprint=scored.fingerprint,
    )
    temporary = Path(command.scores + ".part")
    temporary.write_bytes(encode_scores(scores))
    temporary.replace(command.scores)


def _send(descriptor: int, message: Message) -> None:
    data = message.line()
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main())
