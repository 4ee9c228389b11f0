"""The sentence of a notary's verdict on an engine's weights after a sync."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from foreshock.diagnosis.wording import number, plural
from foreshock.notary.compare import Verdict, Wrong

WEIGHTS_DIFFER: Final = "weights_differ"
"""The rule, and the finding, of an engine that holds other weights than the trainer's."""

ENGINES_OFF: Final = "notary/engines_off"
"""The scalar with the number of engines that hold other weights after a step's sync."""

TITLE: Final = "An engine holds other weights than the trainer's"
WHAT_TO_DO: Final = (
    "Send the named weights to the named engine again, and look for them in the code that syncs: a tensor that the "
    "mapping of names leaves out, a tied head, an adapter, a rank that missed the update."
)

_MOST_NAMES = 3


def verdict_in_words(engine: str, engines: int, verdict: Verdict) -> str:
    """Return what an engine holds, in one sentence or two."""
    named = f"Engine {engine} of {engines}" if engines > 1 else f"Engine {engine}"
    if verdict.canary is not None and not verdict.compared:
        text = f"{named} answers a canary prompt as step {verdict.held} does"
        if verdict.held != verdict.step:
            text += f", while the trainer is at step {verdict.step}"
        return f"{text}: the root mean square difference from the trainer's is {number(verdict.canary)} nats."
    rest = verdict.wrong
    (kind, *others) = _by_kind(rest) or [[]]
    if kind and kind[0].how == "variant" and not others:
        of_all = f"{len(kind)} of {plural(verdict.compared, 'tensor')}"
        return f"{named} holds step {verdict.step} {kind[0].detail}, as {of_all} show."
    if verdict.held is None:
        count = f"{sum(each.how == 'unknown' for each in rest)} of {plural(verdict.compared, 'tensor')}"
        if other := next((each for each in rest if each.how == "dtype"), None):
            of_dtype = sum(each.how == "dtype" for each in rest)
            of_all = f"{of_dtype} of {plural(verdict.compared, 'tensor')}"
            return f"{named} holds {of_all} in {other.detail}, so that they cannot be compared."
        if ranks := next((each for each in rest if each.how == "replicas"), None):
            return f"{named} holds weights of several steps: of {_names([ranks])} {ranks.detail}; {count} are mixed."
        return f"{named} holds weights that the trainer never announced: {count}."
    text = f"{named} holds step {verdict.held}"
    exceptions = [f"{_names(of_kind)}, {_clause(of_kind[0], len(of_kind))}" for of_kind in _by_kind(rest)]
    if exceptions:
        text += f", except {'; and '.join(exceptions)}"
    if verdict.held != verdict.step:
        text += f"{';' if exceptions else ', while'} the trainer is at step {verdict.step}"
    return f"{text}."


def _by_kind(wrong: Sequence[Wrong]) -> list[list[Wrong]]:
    def kind(each: Wrong) -> tuple[str, int, str]:
        return each.how, -1 if each.step is None else each.step, each.detail

    return [list(group) for _, group in groupby(sorted(wrong, key=kind), key=kind)]


def _names(wrong: Sequence[Wrong]) -> str:
    names = [each.name.removeprefix("model.").removesuffix(".weight") for each in wrong]
    if len(names) <= _MOST_NAMES:
        return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{len(names)} tensors ({', '.join(names[:_MOST_NAMES])}, …)"


def _clause(wrong: Wrong, count: int) -> str:
    verb = "is" if count == 1 else "are"
    return {
        "step": f"which {verb} of step {wrong.step}",
        "variant": f"which {verb} {wrong.detail}",
        "dtype": f"which {verb} in {wrong.detail}",
        "replicas": f"of which {wrong.detail}",
        "swapped": f"of which {wrong.detail} hold each other's part",
        "missing": "of which parts are missing",
        "unknown": f"which {verb} not what any kept step announced (held since step {wrong.since})",
    }[wrong.how]
