"""Render pages from templates: formats of numbers, static files."""

import gzip
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from importlib.resources import files

import orjson
from fastapi import Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from foreshock import healthy_ranges, page_addresses
from foreshock.api import runs
from foreshock.corrections import Threshold
from foreshock.diagnosis.wording import as_sentence
from foreshock.doctor.findings import explained, fix_of
from foreshock.lint import CHECKS
from foreshock.model_kind import MODEL_KIND_NAMES, ModelKind
from foreshock_service.platform import compression
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.figures import attribution, drawing

DASH = "–"


@dataclass(frozen=True, slots=True)
class Visitor:
    """The scopes of the person who reads the page; they determine which forms the page has."""

    signed_in: bool = False
    may_answer_alerts: bool = False
    may_operate: bool = False
    csrf_token: str = ""


@dataclass(frozen=True, slots=True)
class Value:
    """A number in a table, the tone of its range, and its interval if it has one."""

    text: str
    tone: str = ""
    interval: str | None = None


OUT_OF_DATE = (
    "Some steps were measured by another release, whose statistics this one cannot read. The curves are complete; "
    "buckets, corrections and theory need `foreshock remeasure`."
)

STATE_TONES = {"running": "good", "stale": "warning", "failed": "critical", "done": "good", "skipped": "warning"}
PHASES: dict[str, str] = {
    "warming": "warming: no baseline yet",
    "watching": "watching: nothing lowers the rate",
    "decaying": "lowered",
    "floor": "on the floor",
    "held": "held until it is released",
}


def number(value: float | None) -> str:
    """Return a measure with three digits; a dash if it is missing or not estimable, "too large" for ±inf."""
    if value is None or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "too large" if value > 0 else "−too large"
    text = drawing.scientific(value)
    return f"−{text[1:]}" if text.startswith("-") else text


def precise_percent(share: float) -> str:
    """Return a share with enough digits: only exactly 0 and 1 are shown as 0 % and 100 %."""
    if math.isnan(share):
        return DASH
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    digits = next((digits for digits in range(1, 6) if 0.0 < round(100 * share, digits) < 100.0), 6)
    return f"{100 * share:.{digits}f} %"


def threshold_in_words(threshold: Threshold) -> str:
    bounds = [bound for bound in (threshold.lower, threshold.upper) if bound is not None]
    return " to ".join(f"{bound:.4g}" if bound >= 1e-3 else number(bound) for bound in bounds)


def count(value: int | None) -> str:
    """Return an integer with its digits in groups of three."""
    return DASH if value is None else f"{value:,}".replace(",", "\u2009")


def moment(at_us: int) -> Markup:
    """Return UTC microseconds as an element that machines and people can read."""
    at = datetime.fromtimestamp(at_us // 1_000_000, tz=UTC)
    return Markup(f'<time datetime="{at:%Y-%m-%dT%H:%M:%SZ}">{at:%Y-%m-%d %H:%M} UTC</time>')


def judged_value(measure: str, value: float | None, model_kind: ModelKind | None) -> Value:
    """Return a measure's value with the tone of its place in its healthy range; without a range it has no tone."""
    if value is None or math.isnan(value):
        return Value(DASH)
    verdict = healthy_ranges.verdict_of(measure, value, model_kind)
    return Value(number(value), verdict if verdict in ("warning", "critical") else "")


LONG_CACHE = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"
PLOTLY = "plotly-basic.min.js"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@cache
def assets() -> dict[str, bytes]:
    """Return every file that /static serves, by name."""
    folder = files("foreshock_service.present.pages") / "static"
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}


@cache
def compressed(name: str) -> bytes:
    return gzip.compress(assets()[name], 9, mtime=0)


@cache
def digest_of(name: str) -> str:
    """Return a digest of a static file's content, the version in its address."""
    return hashlib.sha256(assets()[name]).hexdigest()[:12]


def address_of(name: str) -> str:
    """Return the address of a static file, which changes when its content does."""
    return f"/static/{name}?v={digest_of(name)}"


# Plotly sets style attributes on its elements and adds an empty <style> to the page, filled later by script: the first
# hash is that of the empty text. The second is the style of its map library, which plotly.js 4 adds when it loads, even
# without maps. If another version has another hash, the browser refuses that style; these pages do not need it.
PLOTLY_STYLES = (
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=' 'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"
)

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        f"style-src-elem 'self' {PLOTLY_STYLES}",
        "style-src-attr 'unsafe-inline'",
        # Saving a plot as PNG draws its SVG, from a blob or in Safari from its address.
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@cache
def templates() -> Environment:
    """Return the template environment. Every value is escaped unless a template marks it as safe."""
    environment = Environment(
        loader=PackageLoader("foreshock_service.present.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "code": with_code,
        "moment": moment,
        "capital": capital,
        "number": number,
        "count": count,
        "address": run_address,
        "percent": precise_percent,
        "share": attribution.share_in_words,
        "threshold": threshold_in_words,
        "sentence": as_sentence,
        "explained": explained,
        "fix": fix_of,
    }
    environment.globals.update(static=address_of, plotly=address_of(PLOTLY), version=version("foreshock"))
    environment.globals.update(state_tones=STATE_TONES, run_page_path=page_addresses.run_page_path, lint_checks=CHECKS)
    return environment


def model_kind_in_words(run: Run) -> str:
    """Return the kind of the run's model and the source of that information."""
    if run.model_kind is None:
        return "unknown, judged as a dense model"
    source = "declared" if run.model_kind_source == "declared" else "from a checkpoint"
    return f"{MODEL_KIND_NAMES[run.model_kind]} ({source})"


def capital(text: str) -> str:
    """Capitalize a sentence, unless it begins with a symbol or a name such as k3, μ or trainer/rollout."""
    first = re.match(r"[a-z][a-z-]*(?=[ ,:;.]|$)", text)
    return text[:1].upper() + text[1:] if first else text


def run_address(run: Run | runs.RunRecord) -> str:
    return page_addresses.run_page_path(run.project, run.key)


def with_code(text: str) -> Markup:
    """Return the escaped text, with text between backticks as code; an unpaired backtick stays."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def page_response(
    request: Request, template: str, page: object, visitor: Visitor | None, *, status: int = 200
) -> Response:
    """Return the page as HTML; 304 if the browser already has it."""
    text = templates().get_template(template).render(page=page, visitor=visitor)
    return html_response(request, text, status=status)


def html_response(request: Request, text: str, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    response = _tagged(request, text.encode(), "text/html; charset=utf-8", status)
    response.headers.update(headers or {})
    return response


def json_response(request: Request, value: object) -> Response:
    """Return a value, which may have numpy arrays, as JSON; 304 if the browser already has it.

    NaN and ±inf become null.
    """
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return _tagged(request, body, "application/json", 200)


def _tagged(request: Request, body: bytes, media_type: str, status: int) -> Response:
    headers = {**PAGE_HEADERS, "Cache-Control": f"private, {REVALIDATE}", "Vary": "Accept-Encoding"}
    headers["ETag"] = tag = compression.content_etag(body)
    if status == 200 and compression.matches(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    body, encoding = compression.compressed(body, request.headers.get("accept-encoding"))
    return Response(body, status_code=status, media_type=media_type, headers=headers | encoding)
