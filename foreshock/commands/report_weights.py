"""The table of a weights search: which weights give the log-probs that the engine logged."""

from __future__ import annotations

import math

from foreshock.api.replays import WeightsReplayRecord, WeightsSearchRecord
from foreshock.commands.text import Paint, note, number, table
from foreshock.interval_names import RANGE

__all__ = ["weights_search_lines"]

MOST_ROWS = 8


def weights_search_lines(search: WeightsSearchRecord, paint: Paint) -> list[str]:
    """Return the replays, the nearest to the logged log-probs first, at most eight and the announced weights."""
    done = sorted((each for each in search.replays if not math.isnan(each.k3_kl)), key=lambda each: each.k3_kl)
    shown = [each for place, each in enumerate(done) if place < MOST_ROWS or each.announced]
    lines = [f"  Replays by {search.scorer} with other weights, against rollout:"]
    header = ["announced weights, with", "k3_kl", RANGE, "max |d|", ""]
    lines += table(header, [_row(each) for each in shown], left=(0, 4), indent="    ")
    skipped = [each for each in search.replays if each.skipped]
    notes = [f"{len(done) - len(shown)} more replays with larger k3"] if len(done) > len(shown) else []
    notes += [f"{len(skipped)} skipped, such as {skipped[0].weights}: {skipped[0].skipped}"] if skipped else []
    notes.append(f"the search ended: {search.ended}")
    return [*lines, *note("; ".join(notes), paint)]


def _row(replay: WeightsReplayRecord) -> list[str]:
    interval = ""
    if math.isfinite(replay.k3_low) and math.isfinite(replay.k3_high):
        interval = f"{number(replay.k3_low)} … {number(replay.k3_high)}"
    name = "(the announced weights alone)" if replay.announced else replay.weights
    return [
        name,
        number(replay.k3_kl),
        interval,
        number(replay.max_abs_d, 2),
        "at the noise floor" if replay.at_noise_floor else "",
    ]
