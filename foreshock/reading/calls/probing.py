"""The calls that read probes, their policy, and the hardware that they run on."""

from __future__ import annotations

from functools import partial

from foreshock.reading.parsing import parse
from foreshock.reading.probe_records import HardwareRecord, ProbePolicyRecord
from foreshock.reading.request import Listing, Request, json_request, probe_path, run_path
from foreshock.reading.watch_records import ProbeRecord

__all__ = ["hardware", "probe", "probe_policy", "probes", "probes_of_runs"]


def probes(run: str, *, step: int | None = None) -> Listing[ProbeRecord]:
    """Yield the probes of a run, newest first."""
    return Listing(run_path(run, "probes"), [("step", step)], partial(parse, ProbeRecord))


def probes_of_runs(*, kind: str | None = None) -> Listing[ProbeRecord]:
    """Yield the probes of all runs that the key may see, newest first; `kind` is "exact" or "weights"."""
    return Listing("/v1/probes", [("kind", kind)], partial(parse, ProbeRecord))


def probe(probe: str) -> Request[ProbeRecord]:
    """Return a probe by its id."""
    return json_request(probe_path(probe), [], partial(parse, ProbeRecord), in_project=False)


def probe_policy(run: str) -> Request[ProbePolicyRecord]:
    """Return which steps of a run are probed automatically, and what its probes have cost."""
    return json_request(run_path(run, "probe-policy"), [], partial(parse, ProbePolicyRecord))


def hardware() -> Request[HardwareRecord]:
    """Return the workers, the one seen last first, and the accelerators with their jobs."""
    return json_request("/v1/hardware", [], partial(parse, HardwareRecord), in_project=False)
