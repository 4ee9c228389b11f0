"""The weights search of a step as its page shows it."""

from __future__ import annotations

from foreshock_service.present.pages.formatting import number
from foreshock_service.present.pages.step_models import WeightsPanel, WeightsRow
from foreshock_service.replay.weights.schemas import ReplayRead, WeightsSearchRead

MOST_ROWS = 12


def weights_panel(search: WeightsSearchRead | None) -> WeightsPanel | None:
    """Return the replays of a search, the nearest to the logged log-probs first; None if there was no search."""
    if search is None:
        return None
    done = sorted((each for each in search.replays if each.k3_kl is not None), key=lambda each: each.k3_kl or 0.0)
    shown = [each for place, each in enumerate(done) if place < MOST_ROWS or each.announced]
    skipped = [each for each in search.replays if each.skipped]
    notes = [f"{len(done) - len(shown)} more replays have larger k3."] if len(done) > len(shown) else []
    notes += [f"Skipped: {each.weights} ({each.skipped})." for each in skipped[:3]]
    notes += [f"{len(skipped) - 3} more were skipped."] if len(skipped) > 3 else []
    return WeightsPanel(search.scorer, [_row(each) for each in shown], [*notes, f"The search ended: {search.ended}."])


def _row(replay: ReplayRead) -> WeightsRow:
    interval = f"{number(replay.k3_low)} to {number(replay.k3_high)}" if replay.k3_low is not None else "–"
    return WeightsRow(
        weights="the announced weights alone" if replay.announced else replay.weights,
        k3=number(replay.k3_kl),
        interval=interval,
        largest=number(replay.max_abs_d),
        remark="at the noise floor" if replay.at_noise_floor else "",
    )
