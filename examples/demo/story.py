"""What the demo prints of a run: its headline, the link and the setting that replays found, what to do, the advice."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from foreshock.api.runs import RunRecord
from foreshock.client.reader import Reader
from foreshock.errors import Rejected

WIDTH = 84
MOST_SENTENCES = 2


def story(reader: Reader, run: RunRecord, replayed: int) -> Iterator[str]:
    """Yield the lines on a run whose step `replayed` was replayed and examined by the doctor."""
    diagnosis = reader.diagnosis(run.id)
    yield run.title
    yield from _part("", [diagnosis.headline])
    if diagnosis.verdict == "healthy":
        return
    yield from _part("link", _found(lambda: _links(reader, run.id, replayed)))
    yield from _part("setting", _found(lambda: _settings(reader, run.id, replayed)))
    yield from _part("to do", diagnosis.next_steps)
    yield from _part("advice", [lowered_in_words(reader, run)])


def _links(reader: Reader, run: str, step: int) -> list[str]:
    return [each.sentence for each in reader.attribution(run, step).conclusions][:1]


def _settings(reader: Reader, run: str, step: int) -> list[str]:
    return [each.sentence for each in reader.doctor(run, step).report.findings if each.kind == "cause"]


def _found(read: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Return what a replay found; if it failed, the demo ends with the reason."""
    try:
        return read()
    except Rejected:
        return ["not found"]


def lowered_in_words(reader: Reader, run: RunRecord) -> str:
    """Return at which steps the advice would have lowered the learning rate."""
    advice = reader.advice(run.id).advice
    steps = range(1, max(advice.observed_step, 1) + 1)
    lowered = [(step, scale) for step in steps if (scale := advice.advised_scale(step)) < 1.0]
    if not lowered:
        return "the learning rate stays as it is"
    (first, scale), (_, last) = lowered[0], lowered[-1]
    return f"in shadow mode: the rate × {scale:.2g} from step {first} on" + (
        f", × {last:.2g} at the end" if last != scale else ""
    )


def _part(title: str, sentences: Sequence[str]) -> Iterator[str]:
    for number, sentence in enumerate(sentences[:MOST_SENTENCES]):
        for row, line in enumerate(textwrap.wrap(sentence, WIDTH, break_long_words=False)):
            yield f"  {'' if number or row else title:<8} {line}"
