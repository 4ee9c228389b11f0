"""What is wrong with a body that cannot be read as JSON: the reason, the place, and what to do."""

from __future__ import annotations

import re
import sys

# The service's documents have a few levels; the parser ends at several hundred.
_LEVELS = 100
# A string, or the rest of the body without its end, so that the search takes time in proportion to the body.
_STRING = rb'"(?:[^"\\]|\\.)*+"?'
_BRACKETS = re.compile(_STRING + rb"|[\[{]|[\]}]", re.DOTALL)


def fault_of(cause: BaseException | None, body: bytes) -> str | None:
    """Return what is wrong with `body`, whose parsing ended with `cause`; None if the cause is no fault of a JSON."""
    if isinstance(cause, UnicodeDecodeError):
        byte = f"0x{body[cause.start]:02x}" if cause.start < len(body) else "its end"
        encoding = "UTF-8" if cause.encoding.startswith("utf-8") else cause.encoding.upper()
        return f"the body is not {encoding}: {byte} at {_place(body, cause.start)}; send JSON in UTF-8"
    if isinstance(cause, RecursionError):
        start = _too_deep(body)
        place = f", from {_place(body, start)} on" if start is not None else ""
        return (
            f"the arrays and objects of the body are nested more than {_LEVELS} deep{place}; check what encodes the "
            "body: no call takes so many levels"
        )
    found = _long_integer(body) if isinstance(cause, ValueError) else None
    if found is not None:
        most = sys.get_int_max_str_digits()
        return (
            f"the integer at {_place(body, found.start())} has {len(found.group('digits')):,} digits, more than the "
            f"{most:,} that can be read; send a number that fits its field"
        )
    return None


def syntax_fault(document: str, position: int, reason: str) -> str:
    """Return what is wrong with a JSON text that is broken at a position, in characters."""
    line = document.count("\n", 0, position) + 1
    column = position - document.rfind("\n", 0, position)
    end = ", the end of the body" if position >= len(document) else ""
    return f"not valid JSON at line {line}, column {column}{end}: {reason}"


def _place(body: bytes, position: int) -> str:
    line = body.count(b"\n", 0, position) + 1
    return f"byte {position:,} (line {line:,})"


def _too_deep(body: bytes) -> int | None:
    """Return the position of the first bracket below the most levels."""
    depth = 0
    for found in _BRACKETS.finditer(body):
        bracket = found.group()
        if bracket in (b"[", b"{"):
            depth += 1
            if depth > _LEVELS:
                return found.start()
        elif bracket in (b"]", b"}"):
            depth -= 1
    return None


def _long_integer(body: bytes) -> re.Match[bytes] | None:
    most = sys.get_int_max_str_digits()
    pattern = re.compile(_STRING + rb"|-?(?P<digits>[0-9]{%d,})(?![0-9.eE])" % (most + 1), re.DOTALL)
    return next((found for found in pattern.finditer(body) if found.group("digits")), None)
