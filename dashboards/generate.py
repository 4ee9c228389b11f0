"""Write the dashboards and the alert rules: `python -m dashboards.generate`; `--check` reports stale files only."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dashboards.fleet import fleet_dashboard
from dashboards.layout import Dashboard
from dashboards.probes import probes_dashboard
from dashboards.rules import rules_file
from dashboards.run import run_dashboard
from dashboards.service import service_dashboard

FOLDER = Path(__file__).parent / "grafana" / "json"
RULES = Path(__file__).parent / "prometheus" / "rules.yml"


def dashboards() -> tuple[Dashboard, ...]:
    """Return every dashboard."""
    return (fleet_dashboard(), run_dashboard(), probes_dashboard(), service_dashboard())


def files() -> dict[Path, str]:
    """Return the text of every generated file."""
    texts = {
        FOLDER / f"{dashboard.uid}.json": json.dumps(dashboard.render(), indent=2, ensure_ascii=False) + "\n"
        for dashboard in dashboards()
    }
    return {**texts, RULES: rules_file()}


def stale_files() -> list[Path]:
    """Return the files that are missing, not current, or not of any dashboard."""
    wanted = files()
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    return differing + [path for path in FOLDER.glob("*.json") if path not in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is not current")
    if parser.parse_args().check:
        for path in stale_files():
            print(f"not current: {path}; run python -m dashboards.generate", file=sys.stderr)
        return 1 if stale_files() else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in stale_files():
        path.unlink(missing_ok=True)
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
