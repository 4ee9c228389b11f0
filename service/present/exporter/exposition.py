"""The samples of one scrape, in the text formats of Prometheus and OpenMetrics.

Written here because prometheus_client takes 0.58 s of CPU for the 77,000 samples of 1,000 runs, and this 0.22 s.
"""

from __future__ import annotations

import math

from service.present.exporter.families import FAMILIES, Family

TEXT = "text/plain; version=0.0.4; charset=utf-8"
END = b"# EOF\n"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def choose_media_type(accept: str) -> str:
    """Return OpenMetrics if the scraper accepts it, else Prometheus's own text format."""
    offered = (part.partition(";")[0].strip() for part in accept.split(","))
    return OPENMETRICS if "application/openmetrics-text" in offered else TEXT


class Scrape:
    """The samples of one scrape, by family."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def add(self, family: Family, labels: tuple[str, ...], value: float | None) -> None:
        """Add a sample; None and values that are not finite are left out."""
        if value is None or not math.isfinite(value):
            return
        # A sample of a counter is named with `_total` in both formats.
        name = family.name + "_total" if family.kind == "counter" else family.name
        if labels:
            pairs = ",".join([f'{key}="{_escaped(text)}"' for key, text in zip(family.labels, labels, strict=True)])
            line = f"{name}{{{pairs}}} {float(value)!r}\n"
        else:
            line = f"{name} {float(value)!r}\n"
        lines = self._lines.get(family.name)
        if lines is None:
            self._lines[family.name] = [line]
        else:
            lines.append(line)

    def render(self, media_type: str) -> bytes:
        """Return the families that have samples, in the order of `families.FAMILIES`."""
        parts: list[str] = []
        for family in FAMILIES:
            lines = self._lines.get(family.name)
            if lines is None:
                continue
            name, text = family.name, _escaped_help(family.help)
            if media_type == TEXT:
                if family.kind == "counter":
                    name += "_total"
                parts.append(f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n")
            else:
                parts.append(f"# HELP {name} {text.replace(QUOTE, ESCAPED_QUOTE)}\n# TYPE {name} {family.kind}\n")
            parts += lines
        if media_type == OPENMETRICS:
            parts.append(END.decode())
        return "".join(parts).encode()


QUOTE, ESCAPED_QUOTE = '"', '\\"'


def _escaped(text: str) -> str:
    if QUOTE not in text and "\\" not in text and "\n" not in text:
        return text
    return _escaped_help(text).replace(QUOTE, ESCAPED_QUOTE)


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
