"""What `make test` leaves to `make test-all`: a test is quick unless this file or the marker `full` says otherwise.

`pytest --quick` runs the quick tests. Files of `FULL` are not even imported, except those with a test of
`QUICK_AFTER_ALL`. Tests of the service run on SQLite, and on PostgreSQL where its dialect, locks or schema decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

FULL: Final = re.compile(
    "|".join(
        (
            # The benchmarks' and the examples' own tests, the wheel, the site, the containers' processes.
            r"tests/benchmarks/",
            r"tests/examples/",
            r"tests/packaging/",
            r"tests/scripts/documentation/",
            r"tests/scripts/test_screenshot",
            r"tests/containers/test_processes",
            r"tests/dashboards/test_live",
            # Every Python of the machine.
            r"tests/foreshock/client/test_pythons",
            # Frameworks, engines and trackers: one real step or score of each is quick.
            r"tests/foreshock/integrations/test_(mutations|slime|trl|verl)",
            r"tests/foreshock/exporters/test_trackers",
            r"tests/foreshock/measures/test_in_another_framework",
            r"tests/probes/(doctor|engines|exact_divergence|layer_divergence|routing)/",
            r"tests/probes/certify/test_real_engines",
            r"tests/probes/test_(\w+_worker|ray_workers|replay|worker)",
            r"tests/probes/scorers/test_(vllm_(http|scorers|tensor_parallel)|sglang_server|torch_forward)",
            r"tests/probes/scorers/test_(divided_models|trainer_forward|trainer_options|devices)",
            # Kills, several processes, backups, stores in S3, a real Alertmanager.
            r"tests/service/operation/",
            r"tests/service/runs/ingest/test_crash",
            r"tests/service/maintenance/test_backup",
            r"tests/service/platform/store/test_objects",
            r"tests/service/watch/notifications/test_alertmanager",
            # Every kind of run on every page.
            r"tests/service/present/pages/test_(accessibility|bad_runs|every_page)",
        )
    )
)
"""Paths of tests that only `make test-all` runs."""

BROWSER: Final = frozenset({"browser", "window", "visit"})
"""Fixtures that start Chromium: tests with one are not quick."""

QUICK_AFTER_ALL: Final = (
    "tests/examples/test_demo.py::test_second_start_of_the_demo_repeats_no_work",
    "tests/foreshock/integrations/test_slime.py::test_mismatch_of_data_parallel_ranks_and_of_split_contexts_equals_slimes",
    "tests/foreshock/integrations/test_trl.py::test_mismatch_equals_trls_own",
    "tests/foreshock/integrations/test_verl.py::test_mismatch_equals_verls_own",
    "tests/probes/exact_divergence/test_pairs.py::test_divergences_equal_the_definitions_and_log_probs_the_scorers",
    "tests/probes/scorers/test_vllm_scorers.py::test_log_probs_are_those_of_the_model_in_any_batches_and_at_any_temperature",
    "tests/service/present/pages/test_browser.py::test_every_plot_of_a_run_is_drawn",
    "tests/service/present/pages/test_browser.py::test_no_page_is_wider_than_the_screen",
)
"""Tests of those paths, or with a browser, that are quick all the same."""

POSTGRES: Final = re.compile(
    "|".join(
        (
            r"tests/service/platform/database/",
            r"tests/service/platform/test_(health|jobs|keys|parameters)",
            r"tests/service/replay/leases/",
            r"tests/service/runs/ingest/",
            r"tests/service/runs/test_(attempts|closing|reading_measurements|runs|scalars)",
            r"tests/service/present/exporter/",
            r"tests/service/watch/test_delivery",
        )
    )
)
"""Paths of tests that are quick on PostgreSQL too: its dialect, its locks or its schema decide."""


def is_quick_file(path: str) -> bool:
    """Return True if a file has a quick test."""
    return not FULL.match(path) or any(test.partition("::")[0] == path for test in QUICK_AFTER_ALL)


def is_quick(nodeid: str, fixtures: Collection[str], parameters: Mapping[str, object]) -> bool:
    """Return True if a test is quick, by the names of its fixtures and their parameters."""
    path = nodeid.partition("::")[0]
    if (FULL.match(path) or not BROWSER.isdisjoint(fixtures)) and nodeid.partition("[")[0] not in QUICK_AFTER_ALL:
        return False
    on_postgres = any(isinstance(value, str) and value == "postgresql" for value in parameters.values())
    return not on_postgres or POSTGRES.match(path) is not None
