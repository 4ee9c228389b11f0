"""Paths in the repository and beside it that tests read."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# For processes that take the packages from this checkout.
PYTHONPATH = os.pathsep.join(str(REPOSITORY / part) for part in ("", "service", "probes"))
DOCS = REPOSITORY / "docs"
PROMETHEUS = REPOSITORY / "dashboards" / "prometheus"
# Of nobody: what trusts it alone trusts no server.
CERTIFICATE = REPOSITORY / "tests" / "certificate.pem"
# The recorded run that ships with the repository.
RECORDED = REPOSITORY / "examples" / "tiny_rl" / "recorded"
# Recorded runs beside the repository; tests that need them are skipped if they are absent.
SHARED_RUNS = REPOSITORY.parent / "shared" / "data" / "tiny_rl"
