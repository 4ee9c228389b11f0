"""`foreshock certify` on real engines: planted changes, pairs that are the same, repetitions, and its time.

    make bench-certify
    python -m benchmarks.certify planted|same|against|time|registry|bisect …

`planted`: one change a certificate, in a patched engine or trainer. The right answer is the doctor's cause, or, for
changes of which it has no variant, the first layer that departs. `against`: 20 pairs of seven certificates of one
model and release, which have other seeds of sampling. Their engines run in this process, which imports vLLM once.
`time` and `same`: certificates by the command, with all conditions and nothing changed; all rows are pairs that are the
same, and so are those of `against`. Certificates are kept in build/certify, and a second run reads them.

`registry`: each certificate of registry/ against the range of those near to it, without those of the same model.
`bisect`: five real releases, three times with another change in the third one and in later ones.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.bars import Line, report_parts
from benchmarks.certify.faults import PLANTED
from benchmarks.certify.faults import planted as planting
from benchmarks.certify.models import model_of
from benchmarks.certify.releases import CHANGED, CHANGES, PACKAGE, RELEASES
from foreshock.certify.certificate import Certificate, read_certificate
from foreshock.certify.compare import compare
from foreshock.certify.registry import engine_of, entries, near
from foreshock.doctor.evidence import RESOLUTION
from foreshock.model_kind import known_model_kind
from foreshock.scorers import ENGINE_DECODE, ENGINE_REPLAY, ROUNDED
from foreshock_probes.certify import explaining, parts
from foreshock_probes.certify.certification import Asked, Certification
from foreshock_probes.engines.process import Done, EngineError, process_variables
from foreshock_probes.scorers.request import ScoreTask

BUILD = Path(__file__).parents[2] / "build" / "certify"
REPETITIONS = 20
SEED = 3
ROLLOUTS, TOKENS, LONGEST = 16, 32, 256


def by_command(name: str, kind: str) -> Certificate:
    """Return the certificate `name`, made by the command unless it is there."""
    out = BUILD / f"{name}.json"
    if not out.exists():
        model, temporary = model_of(kind, BUILD / "models", SEED), out.with_suffix(".part")
        command = [sys.executable, "-m", "foreshock_probes.certify.command", str(model), "--out", str(temporary)]
        done = subprocess.run([*command, "--longest", str(LONGEST), "--budget", "1h"], capture_output=True, text=True)
        if done.returncode not in (0, 1) or not temporary.exists():
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        temporary.rename(out)
    return read_certificate(out)


def in_this_process(name: str, kind: str, rows: Sequence[str], seed: int = 0, fault: str = "") -> Certificate:
    """Return the certificate `name` of some rows, made by engines in this process unless it is there."""
    out = BUILD / f"{name.replace(' ', '-').replace(':', '')}.json"
    if not out.exists():
        os.environ |= process_variables()
        temporary, scorers = out.with_suffix(".part"), (ENGINE_DECODE, ENGINE_REPLAY)
        asked = Asked(
            model=model_of(kind, BUILD / "models", SEED),
            engines={each: {} for each in scorers}, trainer=ROUNDED, trainer_options={},
            rollouts=ROLLOUTS, tokens=TOKENS, longest=LONGEST, seed=seed, budget=3600.0, rows=tuple(rows),
        )  # fmt: skip
        with (
            tempfile.TemporaryDirectory() as files,
            patch.object(parts, "run_tasks", _run_tasks),
            patch.object(explaining, "run_tasks", _run_tasks),
            planting(PLANTED[fault]) if fault else nullcontext(),
        ):
            Certification(asked, Path(files), temporary, lambda line: None).run()
        temporary.rename(out)
    return read_certificate(out)


def _run_tasks(tasks: Sequence[ScoreTask], read: Callable[[ScoreTask], Any], folder: Path, **_: Any) -> Done[Any]:
    """Do what `engines.process.run_tasks` does, without another process."""
    from foreshock_probes.score import run

    outcome = run(tasks, folder)
    gc.collect()
    if outcome.failure is not None:
        raise EngineError(outcome.reason, outcome.failure)
    return Done([read(task) for task in tasks], outcome.seconds, 0.0)


EXPERTS = "experts"


def experts() -> None:
    """Certify the mixture of experts with one planted change at a time."""
    for name, fault in PLANTED.items():
        if fault.model == "moe":
            in_this_process(f"planted {name}", fault.model, fault.rows, fault=name)


def planted() -> Sequence[Line]:
    """Certify with one planted change at a time."""
    # vLLM makes the process groups of experts with the first engine of a process, if its model has experts.
    subprocess.run([sys.executable, "-m", "benchmarks.certify", EXPERTS], check=True)
    found = named = 0
    for name, fault in PLANTED.items():
        certificate = in_this_process(f"planted {name}", fault.model, fault.rows, fault=name)
        different = [row for row in certificate.rows if row.verdict == "different"]
        causes = sorted({row.cause or "none" for row in different})
        where = any(fault.place and fault.place in text for row in different for text in (row.sentence, *row.why))
        is_right = bool(set(causes) & set(fault.causes)) or where
        found, named = found + bool(different), named + is_right
        print(
            f"{name:34} {'different' if different else 'MISSED':10} {'right' if is_right else 'other':7}"
            f"{', '.join(causes)}{f', {fault.place!r}' if where else ''} [{', '.join(row.name for row in different)}]",
            flush=True,
        )
        for row in certificate.rows:
            if row.verdict == "not tried" or not different:
                print(f"    {row.name}: {row.verdict}: {row.sentence}", flush=True)
    return [
        Line("planted", "planted changes", len(PLANTED), 20, at_least=True),
        Line("different", "of them different", found, 19, at_least=True),
        Line("right_cause", "of them with the right cause or place", named, 15, at_least=True),
    ]


def same() -> Sequence[Line]:
    """Certify without any change."""
    made = {"qwen3": by_command("same", "qwen3"), "ten_million": whole()}
    made |= {f"seed {1000 * number}": each for number, each in enumerate(of_seeds())}
    rows = [(name, row) for name, each in made.items() for row in each.rows if row.verdict != "not tried"]
    wrong = [(name, row) for name, row in rows if row.verdict == "different"]
    for name, row in wrong:
        print(f"{name}: {row.name}: {row.sentence} {' '.join(row.why)}")
    return [
        Line("pairs", "pairs that are the same", len(rows), 40, at_least=True),
        Line("false", "of them different", len(wrong), 0),
    ]


def of_seeds() -> list[Certificate]:
    """Return seven certificates of one model, made with other seeds of sampling."""
    rows = (f"trainer/{ENGINE_REPLAY}", "prefill", "sampling", "mixed", "temperature", "top_p")
    return [in_this_process(f"seed {number}", "qwen3", rows, seed=1000 * number) for number in range(7)]


def against() -> Sequence[Line]:
    """Compare certificates of one model and one release in pairs."""
    pairs = list(itertools.combinations(of_seeds(), 2))[:REPETITIONS]
    moved = [each for new, old in pairs for each in compare(new, old)]
    for each in moved:
        print(f"{each.change}: {each.row}: {each.sentence}")
    return [
        Line("repetitions", "repetitions", len(pairs), REPETITIONS, at_least=True),
        Line("moved", "rows that became worse or better", len(moved), 0),
    ]


def whole() -> Certificate:
    """Return the certificate of ten million parameters under all conditions."""
    return by_command("time", "ten_million")


def seconds() -> Sequence[Line]:
    """Certify a model of ten million parameters under all conditions."""
    certificate = whole()
    print(f"{certificate.parameters:,} parameters, {len(certificate.rows)} conditions: {certificate.ended}")
    return [Line("seconds", "seconds of a model of 10 M parameters, all conditions", certificate.seconds, 600)]


FACTOR = 2.0
"""A row agrees with a range if it is at most so many times beyond its ends."""


def registry() -> Sequence[Line]:
    """Compare k3 of each row with the range of the near certificates of other models."""
    counts: dict[tuple[str, str], list[bool]] = {}
    for each in entries():
        others = [other for other in entries() if other.model_digest != each.model_digest]
        engine, kind = engine_of(each), known_model_kind(each.model_kind)
        found = near(engine, kind, others) if engine is not None else ()
        for row in each.rows:
            known = [size.k3 for other in found if (same := other.row(row.name)) is not None for size in same.sizes[:1]]
            if not known or not row.sizes:
                continue
            low, high = (max(end(known), RESOLUTION) for end in (min, max))
            is_within = low / FACTOR <= max(row.sizes[0].k3, RESOLUTION) <= high * FACTOR
            counts.setdefault((row.sizes[0].dtype, row.name), []).append(is_within)
            if not is_within:
                where = f"{each.model}, {row.sizes[0].dtype}, {row.name}"
                print(f"{where}: {row.sizes[0].k3:.1e}, not {low:.1e} to {high:.1e}")
    for (dtype, name), found_within in sorted(counts.items()):
        print(f"{dtype:9} {name:21} {sum(found_within):4} of {len(found_within)} within × {FACTOR:g}")
    within = [each for of_row in counts.values() for each in of_row]
    return [
        Line("certificates", "certificates in the registry", len(entries()), 60, at_least=True),
        Line("left_out", "rows with a near certificate of another model", len(within)),
        Line("within", "share of them within × 2 of the range", sum(within) / max(len(within), 1), 0.9, at_least=True),
    ]


def bisected() -> Sequence[Line]:
    """Find the release from which on a change is planted, for each of three changes."""
    found = 0
    for name, change in CHANGES.items():
        setup, work = f"{sys.executable} -m benchmarks.certify.releases {name}", BUILD / "bisect" / name
        work.mkdir(parents=True, exist_ok=True)
        model = model_of(change.model, BUILD / "models", SEED)
        asked = ["bisect", str(model), "--package", PACKAGE, "--from", RELEASES[0], "--to", RELEASES[-1]]
        options = ["--rows", f"trainer/{ENGINE_REPLAY}", "--setup", setup, "--work", str(work)]
        command = [sys.executable, "-m", "foreshock_probes.certify.command", *asked, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(f"{name}, {change.model}\n{done.stdout}", flush=True)
        found += f"{PACKAGE} {CHANGED} is the first release that changed a row" in done.stdout
    return [Line("bisected", "bisections over five releases that find the planted one", found, 3, at_least=True)]


if __name__ == "__main__":
    BUILD.mkdir(parents=True, exist_ok=True)
    if sys.argv[1:] == [EXPERTS]:
        experts()
        sys.exit(0)
    found = {"time": seconds, "planted": planted, "against": against, "same": same}
    sys.exit(report_parts({**found, "registry": registry, "bisect": bisected}, sys.argv[1:]))
