"""A certificate as text, as one HTML file, and as JUnit XML for CI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from xml.sax.saxutils import quoteattr

from foreshock.certify.certificate import CLIP, ESS_TOKENS, VERDICTS, Certificate, Row, Size, Verdict
from foreshock.commands.text import Paint, Style, table, wrap
from foreshock.diagnosis.wording import number, plural
from foreshock.interval_names import RANGE, between_ends

_STYLES: dict[Verdict, Style | None] = {
    "identical": "good",
    "rounding": "good",
    "different": "critical",
    "not tried": "dim",
}


def sentence_of(verdict: Verdict, sizes: Sequence[Size]) -> str:
    """Return what a verdict rests on."""
    if verdict == "identical":
        return f"All {plural(sizes[0].tokens, 'log-prob')} are equal bit for bit."
    return " ".join(_of_size(size) for size in sizes)


def _of_size(size: Size) -> str:
    if size.equal == 1.0:
        return f"In {size.dtype} all log-probs are equal bit for bit."
    if size.half_square_low > size.floor:
        judged = "beyond the floor"
    elif size.dtype != "float32" and size.steady > size.steady_floor:
        judged = (
            f"beyond the floor {number(size.steady_floor)} at the tokens at which precisions agree "
            f"({number(size.steady)}); the floor of all tokens is"
        )
    elif size.dtype != "float32" and abs(size.repeated) > size.repeated_floor:
        judged = (
            f"at tokens that occurred before, d is at least {number(abs(size.repeated))} from that at new ones (floor "
            f"{number(size.repeated_floor)}), as by a repetition, presence or frequency penalty; all tokens are within "
            "the floor"
        )
    else:
        # A token that is removed on one side alone lifts the mean; the interval without its prompt does not.
        few = "" if size.half_square <= size.floor else f"at least {number(size.half_square_low)} without few prompts, "
        judged = f"{few}within the floor"
    ends = between_ends(number(size.k3_low), number(size.k3_high))
    return (
        f"In {size.dtype} k3 is {number(size.k3)} ({RANGE} {ends}); E[d²]/2 {number(size.half_square)}, {judged} "
        f"{number(size.floor)}."
    )


def headline(certificate: Certificate) -> str:
    """Return what the certificate says in one line."""
    counts = {verdict: sum(row.verdict == verdict for row in certificate.rows) for verdict in VERDICTS}
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    return f"{plural(len(certificate.rows), 'condition')}: {', '.join(parts) or 'none judged'}"


def about(certificate: Certificate) -> list[str]:
    """Return the lines that say what was certified, where and with what."""
    found = (each for name, each in certificate.fingerprints.items() if not name.startswith(("trainer", "torch")))
    engine: Mapping[str, Any] = next(found, {})
    release = f"{engine.get('engine', '')} {engine.get('engine_version', '')}".strip()
    made = ", ".join(filter(None, [release, str(engine.get("device_name", "")), certificate.made_at]))
    weights = f"{certificate.parameters:,} parameters, weights {certificate.model_digest[7:19]}"
    return [
        f"{certificate.model}: {certificate.architecture}, {weights}",
        f"{' and '.join(certificate.engines)} against {certificate.trainer}; {made}",
        f"{certificate.ended}, {certificate.seconds:.0f} s; {'; '.join(certificate.notes)}",
    ]


def cells(row: Row) -> list[str]:
    """Return the verdict and the sizes of a row in the engine's precision."""
    if not row.sizes:
        return [row.name, row.verdict, "", "", "", "", ""]
    size = row.sizes[0]
    return [
        row.name,
        row.verdict,
        number(size.k3),
        number(size.floor),
        f"{100 * size.beyond_clip:.2g} %",
        f"{size.ess:.2f}",
        number(row.sizes[1].half_square) if len(row.sizes) > 1 else "",
    ]


HEADER = ("condition", "verdict", "k3", "floor", f"beyond 1 ± {CLIP}", f"ESS at {ESS_TOKENS:,}", "float32")


def certificate_lines(certificate: Certificate, paint: Paint) -> list[str]:
    """Return the certificate as one screen: a table of the rows, then why rows are different or not tried."""
    lines = [*about(certificate), "", paint(headline(certificate), "bold"), ""]
    head, *body = table(HEADER, [cells(row) for row in certificate.rows], left=(0, 1))
    lines += [head, *(body[: -len(certificate.rows)] if len(body) > len(certificate.rows) else [])]
    for row, line in zip(certificate.rows, body[-len(certificate.rows) :], strict=False):
        lines.append(paint(line, _STYLES[row.verdict]))
    for row in (each for each in certificate.rows if each.verdict in ("different", "not tried")):
        lines += ["", paint(f"{row.name}: {row.verdict}", _STYLES[row.verdict])]
        for sentence in (row.sentence, *row.why):
            lines += wrap(sentence, "  ", "  ")
    return lines


def certificate_html(certificate: Certificate) -> str:
    """Return the certificate as one HTML file without other files."""
    rows = "".join(
        f'<tr class="{row.verdict.replace(" ", "-")}"><td title={quoteattr(row.title)}>{escape(row.name)}</td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)[1:])
        + f"<td>{escape(row.title)}. {escape(' '.join((row.sentence, *row.why)))}</td></tr>\n"
        for row in certificate.rows
    )
    header = "".join(f"<th>{escape(each)}</th>" for each in (*HEADER, "what was compared, and why"))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(certificate.model)}</title>\n'
        "<style>body{font:15px system-ui;margin:2em;max-width:75em}table{border-collapse:collapse}"
        "td,th{padding:.3em .7em;text-align:left;border-bottom:1px solid #ccc;vertical-align:top}"
        ".different td:nth-child(2){color:#b00020;font-weight:600}.not-tried td{color:#666}</style>\n"
        f"<h1>{escape(headline(certificate))}</h1>\n"
        + "".join(f"<p>{escape(line)}</p>\n" for line in about(certificate))
        + f"<table><thead><tr>{header}</tr></thead><tbody>\n{rows}</tbody></table></html>"
    )


def junit_xml(certificate: Certificate, worse: Sequence[str] = ()) -> str:
    """Return a test case for each row: a failure if it is different or became worse, skipped if it was not tried."""
    failed = {row.name for row in certificate.rows if row.verdict == "different"} | set(worse)
    skipped = [row for row in certificate.rows if row.verdict == "not tried"]
    cases = []
    for row in certificate.rows:
        text = " ".join((row.sentence, *row.why))
        inner = ""
        if row.name in failed:
            inner = f"<failure message={quoteattr(text)}/>"
        elif row.verdict == "not tried":
            inner = f"<skipped message={quoteattr(text)}/>"
        cases.append(
            f"  <testcase classname={quoteattr(certificate.model)} name={quoteattr(row.name)}>{inner}</testcase>"
        )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<testsuite name="foreshock certify" tests="{len(cases)}" failures="{len(failed)}" '
        f'skipped="{len(skipped)}" time="{certificate.seconds:.1f}">\n' + "\n".join(cases) + "\n</testsuite>"
    )
