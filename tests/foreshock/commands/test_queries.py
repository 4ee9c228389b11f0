"""What the commands read of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foreshock.api.probes import JobStateName, ProbeRecord
from foreshock.client.reader import Reader
from foreshock.commands.queries import RunQueries


def probe(name: str, step: int, kind: str, state: JobStateName = "done") -> ProbeRecord:
    return ProbeRecord(id=name, run="run", attempt=1, step=step, kind=kind, state=state, created_at_us=0)


def test_probes_that_publish_no_score_make_no_probed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {1: "layers", 2: "update", 3: "routing", 4: "exact", 5: "weights", 6: "layers", 7: "exact"}
    probes = [probe(f"probe_{step}", step, kind) for step, kind in kinds.items()]
    probes += [
        probe("probe_8", 6, "exact"),
        probe("probe_9", 9, "exact", "queued"),
    ]

    def listed(reader: Reader, run: str) -> Iterator[ProbeRecord]:
        return iter(probes)

    monkeypatch.setattr(Reader, "probes", listed)
    with Reader("http://127.0.0.1:1") as reader:
        assert RunQueries(reader, "run").probed_steps() == (4, 5, 6, 7)
