"""Conclusions on the weights that the engine held, from replays with weights of other announced steps.

Other weights than the announced ones are named only if their replay is at the noise floor and every other replay is
clearly worse. A replay at the floor also shows that the environments give the same log-probs: it is named even where
the environment of the run is not known. Where no replay reaches the floor, none is named.
"""

import math
from collections.abc import Sequence

from foreshock.comparisons import comparison_name
from foreshock.diagnosis.conclusion import AttributionEvidence, Conclusion, marked_links
from foreshock.diagnosis.wording import number, plural
from foreshock.weights_search import WHOLE, WeightsReplay, WeightsSearch


def conclude_weights(evidence: AttributionEvidence, so_far: Sequence[Conclusion]) -> list[Conclusion]:
    """Return which weights the engine held, or what the search can tell; none if there was no search."""
    search = evidence.weights_search
    if search is None or search.announced is None:
        return []
    link = comparison_name(search.scorer, "rollout")
    announced = search.announced
    if search.is_at_floor(announced):
        return [Conclusion("weights-held", _held(search, announced), link)]
    if not search.others:
        return [Conclusion("cannot-tell", _nothing_tried(search), link)]
    best = search.others[0]
    if not search.is_clearly_better(best, announced):
        if search.reproduces(announced):
            return [Conclusion("cannot-tell", _near(search, announced), link)]
        return [Conclusion("cannot-tell", _not_reproduced(evidence, search, best, link, so_far), link)]
    if not search.reproduces(best):
        return [Conclusion("cannot-tell", _not_reproduced(evidence, search, best, link, so_far), link)]
    if not search.best_is_confirmed:
        return [Conclusion("cannot-tell", _not_confirmed(search, best), link)]
    return [Conclusion("wrong-weights", _wrong(search, announced, best), link, names_cause=True)]


def _held(search: WeightsSearch, announced: WeightsReplay) -> str:
    return (
        f"The engine at step {search.step} ran with the announced weights: their replay gives its log-probs "
        f"(k3 {_k3(announced)}, at the noise floor)."
    )


def _near(search: WeightsSearch, announced: WeightsReplay) -> str:
    others = "the other replay is not" if len(search.others) == 1 else f"none of {len(search.others)} other replays is"
    return (
        f"The announced weights give the log-probs of the engine at step {search.step} nearly (k3 {_k3(announced)}), "
        f"and {others} clearly nearer: these rollouts cannot tell whether it held others."
    )


def _wrong(search: WeightsSearch, announced: WeightsReplay, best: WeightsReplay) -> str:
    figures = f"k3 {_k3(best)}, at the noise floor, against {_k3(announced)} with the announced weights"
    equal = [each for each in search.as_good_as(best) if not search.is_announced(each)]
    if equal:
        known = " or ".join(search.describe(each) for each in (best, *equal[:3]))
        more = f" or {plural(len(equal) - 3, 'other')}" if len(equal) > 3 else ""
        return (
            f"The engine at step {search.step} did not run with the announced weights: {known}{more} give its "
            f"log-probs as well as each other ({figures}), so the search cannot tell which it held."
        )
    instead = "" if best.part == WHOLE else " and the announced weights otherwise"
    others = len(search.done) - 2
    worse = "; the other replay does not come near" if others == 1 else f"; none of {others} other replays comes near"
    return (
        f"The engine at step {search.step} ran with {search.describe(best)}{_behind(search, best)}{instead}: that "
        f"replay gives its log-probs ({figures}){worse if others > 0 else ''}."
    )


def _behind(search: WeightsSearch, best: WeightsReplay) -> str:
    steps = search.step - best.step
    if best.part != WHOLE or steps <= 0:
        return ""
    return " (one step behind)" if steps == 1 else f" ({steps} steps behind)"


def _nothing_tried(search: WeightsSearch) -> str:
    reasons = "; ".join(
        f"{search.describe(each)}: {each.skipped}" for each in search.replays if each.skipped and each.part == WHOLE
    )
    return (
        f"The search for the weights of step {search.step} replayed no other weights than the announced ones"
        f"{f' ({reasons})' if reasons else ''}."
    )


def _not_reproduced(
    evidence: AttributionEvidence,
    search: WeightsSearch,
    best: WeightsReplay,
    link: str,
    so_far: Sequence[Conclusion],
) -> str:
    assert search.announced is not None
    nearest = search.done[0]
    found = (
        f"No announced weights give the log-probs of the engine at step {search.step}: of "
        f"{plural(len(search.done), 'replay')} the nearest, with "
        f"{'the announced weights' if search.is_announced(nearest) else search.describe(nearest)}, has k3 "
        f"{_k3(nearest)}"
    )
    if not search.is_announced(nearest):
        found += f", against {_k3(search.announced)} with the announced weights"
    found += f"; the noise floor is below {number(search.bound)}"
    elsewhere = [point.k3_kl for point in evidence.drift.get(link, ()) if math.isfinite(point.k3_kl)]
    if elsewhere:
        found += f", and the least at the run's other probed steps is {number(min(elsewhere))}"
    if link in marked_links(so_far):
        return (
            f"{found}. The environments differ or are unknown, so no replay may reach the floor: the search ranks "
            "weights and names none."
        )
    return f"{found}. The cause is another one, or the engine held weights that were not announced."


def _not_confirmed(search: WeightsSearch, best: WeightsReplay) -> str:
    again = "unknown" if search.confirmed_k3 is None else number(search.confirmed_k3)
    return (
        f"The search for the weights of step {search.step} cannot be relied on: {search.describe(best)}, loaded into a "
        f"running engine, gave k3 {_k3(best)}, and an engine started with them k3 {again}."
    )


def _k3(replay: WeightsReplay) -> str:
    return number(math.nan if replay.k3_kl is None else replay.k3_kl)
