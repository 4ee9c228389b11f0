"""Messages between worker and engine process: one JSON object per line, over two pipes.

Standard output is not used, because engines and their libraries write to it. Rollouts and scores are exchanged as
Parquet files in a private folder of the worker.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

__all__ = [
    "Failed",
    "FailureKind",
    "Message",
    "Progress",
    "Ready",
    "Reply",
    "ScoreCommand",
    "Scored",
    "parse_reply",
]

FailureKind = Literal["retry", "final", "reload"]


class Message(BaseModel):
    """Base of the messages. A message is one line of JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def line(self) -> bytes:
        """Return the message as a line of JSON."""
        return self.model_dump_json().encode() + b"\n"


class ScoreCommand(Message):
    """Command to the engine: score the rollouts in the file `rollouts` and write the scores to the file `scores`.

    With `states`, `scorer` is one of the two of the exact pair `pair`: its target writes the states of its model to the
    file `states`, its behaviour compares them with its own distributions and writes the divergences to `scores`.
    With `layers`, `states` is the file of a comparison by layer: the first scorer writes its hidden states there, the
    second one compares them with its own, and both write distances to `scores`.
    With `routes`, the experts of the tokens and their log-probs are written to the file `routes`, and no scores.
    `fresh`: score in an engine that was started with these weights and never held other ones.
    """

    number: int
    scorer: str
    variant: str
    weights_folder: str
    weights_digest: str
    weights_version: int | None
    options: dict[str, Any]
    accelerator: str
    rollouts: str
    scores: str
    pair: str | None = None
    layers: Literal["first", "second"] | None = None
    states: str | None = None
    routes: str | None = None
    fresh: bool = False


class Ready(Message):
    """First message of an engine's process: it accepts commands."""

    kind: Literal["ready"] = "ready"
    pid: int


class Progress(Message):
    """Reply: the number of response tokens that are scored so far."""

    kind: Literal["progress"] = "progress"
    number: int
    tokens: int


class Scored(Message):
    """Reply: the scores are written. `seconds` is the time in the engine, `pid` the process that holds the model."""

    kind: Literal["scored"] = "scored"
    number: int
    seconds: float
    pid: int


class Failed(Message):
    """Reply: there are no scores. `failure` is "final" if the same command would fail again, else "retry".

    It is "reload" if the engine could not load the weights in place: the same command with `fresh` may succeed.
    """

    kind: Literal["failed"] = "failed"
    number: int
    reason: str
    failure: FailureKind


Reply = Ready | Progress | Scored | Failed
_REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


def parse_reply(line: bytes) -> Reply:
    """Parse a line; raises ValueError if it is not a reply."""
    return _REPLY.validate_json(line)
