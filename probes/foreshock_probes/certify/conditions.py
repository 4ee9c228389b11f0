"""The conditions: the parts that engines do for them, and which two results a row compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from foreshock.scorers import (
    ENGINE_DECODE,
    ENGINE_REPLAY,
    NOISE_FLOOR_VARIANT,
    OF_THE_USER,
    REFERENCE,
    ROUNDED,
    TRAINER_REPLAY,
)
from foreshock_probes.certify.parts import Part, Sampling

PROMPTS, LONG_PROMPTS = "prompts", "long_prompts"
BASE, OWN, AGAIN, LONG = "base", "own", "again", "long"
"""Sets of rollouts. `base` is compared in most rows. It is the engine's own sample, or the tokens of another
certificate; the engine's own sample is then `own`. `again` repeats its seeds."""
LONG_TOKENS: Final = 32
_STOP_EVERY = 16
"""Every 16th id stops the responses of the set `stop`, so that most of them end before their last token."""
_MOST_STOPS = 1024
_ALONE = 8
"""Rollouts that are decoded alone, which takes as many times as long as all together."""
_DECODE, _PREFILL = ENGINE_DECODE, ENGINE_REPLAY
_REBATCHED = f"trainer {NOISE_FLOOR_VARIANT}"
EAGER: Final = f"{REFERENCE} eager"

REPLAYED_IN_FLOAT32: Final = (ROUNDED, REFERENCE, TRAINER_REPLAY)
"""Trainers whose computation without rounding is that of `REFERENCE`."""
UNEXPLAINED: Final = ("seed", "stop", "trainer_batches")
"""Rows that have no forward pass to explain: their sentence says what differs."""

PRECISIONS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    ROUNDED: (ROUNDED, {}),
    TRAINER_REPLAY: (TRAINER_REPLAY, {}),
    REFERENCE: (REFERENCE, {}),
    EAGER: (REFERENCE, {"attention_implementation": "eager"}),
}
"""Right computations of a set, with their scorers and options."""
HALF_FLOOR: Final = (ROUNDED, TRAINER_REPLAY, REFERENCE)
"""The computations that measure the floor of bfloat16 and float16."""
FLOORS: Final[Mapping[str, tuple[str, ...]]] = {"float32": (REFERENCE, EAGER)}

Tokens = Literal["all", "last", "common"]
"""The tokens that a row compares: all; the last of each rollout that stopped; those up to the first that differs."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A row: two results on a set, by the names of their parts; `logged:SET` are the log-probs of sampling.

    `float32`: the names of the same two in float32. `dtype`: that of the two, if it is not the engine's.
    """

    name: str
    title: str
    one: str
    other: str
    rollouts: str = BASE
    tokens: Tokens = "all"
    float32: tuple[str, str] | None = None
    dtype: str = ""


def conditions_of(
    trainer: str, engines: tuple[str, ...], vllm: tuple[str, ...], float32: bool, own: str, *, adapter: bool
) -> Iterator[Condition]:
    """Yield the rows in their order. `float32`: rows of the trainer are replayed in float32 too."""
    for scorer in engines:
        pair = (f"{REFERENCE} {BASE}", f"{scorer} float32") if float32 and scorer in vllm else None
        yield Condition(
            f"trainer/{scorer}", f"{trainer} against {scorer}", f"trainer {BASE}", scorer, float32=pair
        )  # fmt: skip
    both = (f"{_PREFILL} float32", f"{_DECODE} float32") if float32 and set(vllm) == {_PREFILL, _DECODE} else None
    yield Condition("prefill", "prefill against decode", _PREFILL, _DECODE, float32=both)
    yield Condition("sampling", "decode against the log-probs of sampling", f"{_DECODE} own", f"logged:{own}", own)
    yield Condition("batch_1", "decoded alone against all together", "batch_1", _DECODE)
    yield Condition("batch_8", "decoded 8 at a time against all together", "batch_8", _DECODE)
    yield Condition("mixed", "decoded in other batches, longest first", "mixed", _DECODE)
    yield Condition("prefix_cache", "decoded after its prompts were cached", "prefix_cache", _DECODE)
    yield Condition("chunked_prefill", "prefill in chunks of 32 tokens", "chunked_prefill", _PREFILL)
    yield Condition("restart", "decoded by a new process", "restart", _DECODE)
    yield Condition("threads", "decoded on one thread", "threads_1", _DECODE)
    yield Condition("seed", "sampled again with the same seeds", f"logged:{AGAIN}", f"logged:{own}", own, "common")
    for name, title in (
        ("temperature", "log-probs at temperature 0.7 against the sampling distribution"),
        ("top_p", "log-probs under top-p 0.9 against the sampling distribution"),
        ("top_k", "log-probs under top-k against the sampling distribution"),
    ):
        yield Condition(name, title, f"trainer {name}", f"logged:{name}", name)
    yield Condition("stop", "the stop ids that end responses", "trainer stop", "logged:stop", "stop", "last")
    yield Condition(
        "long", f"{trainer} against decode at the end of a long context", f"trainer {LONG}", f"logged:{LONG}", LONG
    )
    if adapter:
        yield Condition(
            "lora", "the adapter as the engine loads it against merged weights", f"{_PREFILL} float32",
            "merged float32", dtype="float32",
        )  # fmt: skip
    yield Condition("trainer_batches", f"{trainer} in other batches", _REBATCHED, f"trainer {BASE}")


def sampling_of(name: str, seed: int, tokens: int, vocabulary: int) -> Sampling:
    """Return how the set of a name is sampled."""
    settings: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.7},
        "top_p": {"top_p": 0.9},
        "top_k": {"top_k": max(2, min(20, vocabulary // 2))},
        "stop": {"stop": list(range(_STOP_EVERY - 1, vocabulary, _STOP_EVERY))[:_MOST_STOPS]},
    }
    return Sampling(tokens=LONG_TOKENS if name == LONG else tokens, seed=seed, **settings.get(name, {}))


def vllm_parts(
    options: Mapping[str, Any], sampled: Mapping[str, Sampling], own: str, merged: Path | None
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Return the parts of vLLM that any row may need, for two processes. Neighbours of equal options share an engine.

    `merged`: the folder of the model with its adapter merged.
    """

    def score(
        name: str, scorer: str, rollouts: str = BASE, *, part: Mapping[str, Any] | None = None, **more: Any
    ) -> Part:
        return Part(name=name, scorer=scorer, rollouts=rollouts, options={**options, **more}, **(part or {}))

    def sample(name: str) -> Part:
        prompts = LONG_PROMPTS if name == LONG else PROMPTS
        return Part(name=name, scorer=_DECODE, rollouts=prompts, options=dict(options), sampling=sampled[name])

    names = [name for name in sampled if name != AGAIN]
    first = [
        *(sample(name) for name in names if not sampled[name].is_tempered),
        score(_DECODE, _DECODE),
        score(f"{_DECODE} own", _DECODE, own),
        score(_PREFILL, _PREFILL),
        score("batch_1", _DECODE, part={"first": _ALONE}, batch_size=1),
        score("batch_8", _DECODE, batch_size=8),
        score("mixed", _DECODE, part={"variant": NOISE_FLOOR_VARIANT}),
        *(sample(name) for name in names if sampled[name].is_tempered),
        score("prefix_cache", _DECODE, part={"times": 2}, prefix_caching=True),
        score("chunked_prefill", _PREFILL, chunked_prefill=True, max_num_batched_tokens=32),
        score(f"{_PREFILL} float32", _PREFILL, dtype="float32"),
        score(f"{_DECODE} float32", _DECODE, dtype="float32"),
    ]
    if merged is not None:
        first.append(score("merged float32", _PREFILL, part={"weights": str(merged)}, dtype="float32"))
    second = [score("restart", _DECODE), *([sample(AGAIN)] if AGAIN in sampled else [])]
    return tuple(first), (*second, score("threads_1", _DECODE, part={"threads": 1}))


def torch_parts(trainer: str, options: Mapping[str, Any], sets: tuple[str, ...], dtype: str) -> tuple[Part, ...]:
    """Return the parts of torch: the trainer on each set, and the computations that measure the floors."""
    eager = sets if dtype == "float32" else (BASE,)
    parts = [
        Part(name=f"trainer {each}", scorer=trainer, rollouts=each, options={**options, **_followed(trainer, each)})
        for each in sets
    ]
    parts.append(
        Part(name=_REBATCHED, scorer=trainer, rollouts=BASE, options=dict(options), variant=NOISE_FLOOR_VARIANT)
    )
    for name, (scorer, own) in PRECISIONS.items():
        parts += [
            Part(name=f"{name} {each}", scorer=scorer, rollouts=each, options={**own, **_followed(scorer, each)})
            for each in (sets if name != EAGER else eager)
        ]
    return tuple(parts)


def _followed(scorer: str, rollouts: str) -> dict[str, Any]:
    """Return the option that follows a truncated sampling distribution."""
    return {"truncation": "apply"} if rollouts in ("top_p", "top_k") and scorer != OF_THE_USER else {}
