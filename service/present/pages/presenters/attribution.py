"""The presenter of the attribution: its figure and its table."""

from __future__ import annotations

from foreshock.interval_names import RANGE, RANGE_NOTE
from foreshock.measures.estimators.attribution import OLD_METHOD
from foreshock_service.present.pages.figures.attribution import Chain, LinkShare
from foreshock_service.present.pages.formatting import number, share_in_words
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.step_models import LinkRow
from foreshock_service.replay.attribution.schemas import AttributionRead
from foreshock_service.replay.attribution.service import (
    AttributionNotFound,
    AttributionNotPossible,
    AttributionPending,
    attribution_of_step,
    newest_replayed_steps,
)

# A step whose probe is not complete has replayed scores and no attribution: look a little further back.
STEPS_TRIED = 5


def newest_chain(viewing: Viewing, run_id: str) -> Chain | str | None:
    """Return the chain of the newest step that has one; else why the newest replayed step has none."""
    why = None
    for step in newest_replayed_steps(viewing.session, viewing.principal, run_id, STEPS_TRIED):
        chain = chain_of_step(viewing, run_id, step, None)
        if isinstance(chain, Chain):
            return chain
        why = why or chain
    return why


def origin_of(viewing: Viewing, run_id: str) -> tuple[str, str]:
    """Return where the mismatch comes from, in a few words, and what that is about; "cannot be told" without a cause.

    By the newest step that has an attribution, and only a link that its conclusions name a cause.
    """
    for step in newest_replayed_steps(viewing.session, viewing.principal, run_id, STEPS_TRIED):
        read = attribution_of(viewing, run_id, step, None)
        if read is None:
            continue
        blamed = next((each.link for each in read.conclusions if each.names_cause and each.link is not None), None)
        link = next((each for each in read.links if each.name == blamed), None)
        if link is None:
            return "cannot be told", f"by the replay of step {step}"
        return link.cause.partition(":")[0], f"{share_in_words(link.share, None, None)} of step {step}"
    return "not replayed", "a probe finds the cause"


def chain_of_step(viewing: Viewing, run_id: str, step: int, attempt: int | None) -> Chain | str | None:
    """Return the chain of a step; a text if its scores give none (yet), None if nothing was replayed."""
    try:
        read = attribution_of_step(viewing.session, viewing.principal, run_id, step, attempt)
    except AttributionNotFound:
        return None
    except (AttributionNotPossible, AttributionPending) as error:
        return f"{error.detail[0].upper()}{error.detail[1:]}."
    links = [LinkShare(link.name, link.cause, link.share, link.share_low, link.share_high) for link in read.links]
    return Chain(step, links, [*sentences_of(read), *notes_of(read)])


def attribution_of(viewing: Viewing, run_id: str, step: int, attempt: int | None) -> AttributionRead | None:
    """Return the attribution of a step; None if there is none (yet)."""
    try:
        return attribution_of_step(viewing.session, viewing.principal, run_id, step, attempt)
    except (AttributionNotFound, AttributionNotPossible, AttributionPending):
        return None


def link_rows(read: AttributionRead | None) -> list[LinkRow]:
    """Return the links, then the whole, as rows of a table."""
    if read is None:
        return []
    exact = {each.pair: each.kl.mean for each in read.exact if not each.other_settings}
    return [
        LinkRow(
            link.name,
            link.cause,
            f"{number(exact[link.name])} (exact)" if link.name in exact else number(link.k3_kl),
            number(link.excess_k3_kl),
            number(link.mean_d),
            number(link.max_abs_d),
            share_in_words(link.share, link.share_low, link.share_high),
        )
        for link in (*read.links, read.whole)
    ]


def sentences_of(read: AttributionRead | None) -> list[str]:
    """Return the conclusions from an attribution, verbatim, the headline first."""
    return [] if read is None else [conclusion.sentence for conclusion in read.conclusions]


def notes_of(read: AttributionRead | None) -> list[str]:
    """Return the notes on what the numbers of an attribution are of."""
    if read is None:
        return []
    notes: list[str] = []
    if read.stale:
        notes.append("Scores or rollouts have arrived since; a new attribution is being computed.")
    if read.missing:
        notes.append(f"Not scored; the adjacent links are merged: {', '.join(read.missing)}.")
    if any(not each.other_settings for each in read.exact):
        notes.append("(exact): KL(μ‖π) over the whole vocabulary in place of k3, which is its sampled estimate.")
    notes.append(f"Intervals of shares: {read.interval}s by {read.method or OLD_METHOD}.")
    if read.interval == RANGE:
        notes.append(RANGE_NOTE)
    if read.from_sample:
        notes.append(f"Over {read.rollouts} of {read.of_rollouts} rollouts.")
    return notes
