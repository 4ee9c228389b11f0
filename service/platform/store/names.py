"""Names of files in the token store: made of the server's ids, integers and the body's digest.

    <run>/<attempt>/<step>/<shard>-<digest>-<upload>.parquet           rollouts of a shard
    <run>/<attempt>/<step>/scores/<job>-<digest>-<upload>.parquet      scores of a job
    <run>/<attempt>/<step>/exact/<job>-<digest>-<upload>.parquet       exact divergences of a job

`<upload>` is random, so that no two uploads share a file: the loser of a race removes only its own, and a file that no
row names stays one until it is removed.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_DIGEST_DIGITS = 16
_NAME = re.compile(
    r"(?P<run>[\w-]+)/(?P<attempt>\d{4,})/(?P<step>\d{9,})/"
    r"(?:(?P<shard>\d{5,})|(?P<kind>scores|exact)/(?P<job>[\w]+))-(?P<digest>[0-9a-f]+)(?:-(?P<upload>[0-9a-f]+))?"
    r"\.parquet",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class FileName:
    """The parts of a name: a file of the shard `shard`, or of the job `job`."""

    run_id: str
    attempt: int
    step: int
    shard: int | None
    job_id: str | None
    kind: str
    """`rollouts`, `scores` or `exact`."""
    digest: str


def shard_file_name(run_id: str, attempt: int, step: int, shard: int, digest: str) -> str:
    """Return a new name for a shard's tokens."""
    return f"{_folder(run_id, attempt, step)}/{shard:05d}-{_suffix(digest)}"


def score_file_name(run_id: str, attempt: int, step: int, job_id: str, digest: str) -> str:
    """Return a new name for a shard of a job's scores."""
    return f"{_folder(run_id, attempt, step)}/scores/{job_id}-{_suffix(digest)}"


def exact_file_name(run_id: str, attempt: int, step: int, job_id: str, digest: str) -> str:
    """Return a new name for a shard of a job's exact divergences."""
    return f"{_folder(run_id, attempt, step)}/exact/{job_id}-{_suffix(digest)}"


def parse_name(name: str) -> FileName | None:
    """Return the parts of a name; None if the service did not make it."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    shard = found["shard"]
    return FileName(
        run_id=found["run"],
        attempt=int(found["attempt"]),
        step=int(found["step"]),
        shard=None if shard is None else int(shard),
        job_id=found["job"],
        kind=found["kind"] or "rollouts",
        digest=found["digest"][:_DIGEST_DIGITS],
    )


def _folder(run_id: str, attempt: int, step: int) -> str:
    return f"{run_id}/{attempt:04d}/{step:09d}"


def _suffix(digest: str) -> str:
    return f"{digest.removeprefix('sha256:')[:_DIGEST_DIGITS]}-{secrets.token_hex(8)}.parquet"
