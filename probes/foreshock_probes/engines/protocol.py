"""Messages between worker and engine process: JSON objects over a connection.

Rollouts and scores are exchanged as Parquet files in a private folder of the worker.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from foreshock.digests import canonical_json

FailureKind = Literal["retry", "final", "reload"]


class Message(BaseModel):
    """Base of the messages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def encoded(self) -> bytes:
        """Return the message as JSON."""
        return self.model_dump_json().encode()


class ScoreCommand(Message):
    """Command to the engine: score the rollouts in the file `rollouts` and write the scores to the file `scores`.

    `task`: another task than scoring, as `module:function` of (request, arguments, result file, warm model, report);
    `arguments` are its own.
    `fresh`: score in an engine that was started with these weights and never held other ones.
    """

    scorer: str
    variant: str
    weights_folder: str
    weights_digest: str
    weights_version: int | None
    options: dict[str, Any]
    accelerator: str
    rollouts: str
    scores: str
    task: str | None = None
    arguments: dict[str, str] = {}
    fresh: bool = False


class Ready(Message):
    """First message of an engine's process: it accepts commands."""

    kind: Literal["ready"] = "ready"
    pid: int


class Progress(Message):
    """Reply: the number of response tokens that are scored so far."""

    kind: Literal["progress"] = "progress"
    tokens: int


class Scored(Message):
    """Reply: the scores are written. `seconds` is the time in the engine, `pid` the process that holds the model."""

    kind: Literal["scored"] = "scored"
    seconds: float
    pid: int


class Failed(Message):
    """Reply: there are no scores. `failure` is "final" if the same command would fail again, else "retry".

    It is "reload" if the engine could not load the weights in place: the same command with `fresh` may succeed.
    """

    kind: Literal["failed"] = "failed"
    reason: str
    failure: FailureKind


Reply = Ready | Progress | Scored | Failed
_REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


def parse_reply(message: bytes) -> Reply:
    """Parse a message; raises ValueError if it is not a reply."""
    return _REPLY.validate_json(message)


# Entries of a config.json that describe who wrote it and not the model.
_IGNORED = ("_name_or_path", "transformers_version")


def model_key(command: ScoreCommand) -> str:
    """Return a key that is equal for commands that differ only in weights, rollouts, scorer and variant."""
    try:
        configuration = json.loads((Path(command.weights_folder) / "config.json").read_text("utf-8"))
        described = {name: value for name, value in configuration.items() if name not in _IGNORED}
    except (OSError, ValueError, AttributeError):
        described = {"digest": command.weights_digest}  # the scorer will report the invalid file
    return canonical_json([described, command.options, command.accelerator])
