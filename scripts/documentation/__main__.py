"""Build the documentation site: `python -m scripts.documentation [--serve]`.

Writes build/site. Fails if a link or an anchor leads nowhere, and if a page loads something from another host.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from scripts.documentation.hosts import loaded_from_other_hosts
from scripts.documentation.sources import REPOSITORY, SOURCES, write_sources

CONFIGURATION = REPOSITORY / "zensical.toml"
SITE = REPOSITORY / "build" / "site"


def build(configuration: Path = CONFIGURATION) -> subprocess.CompletedProcess[str]:
    """Build the site of a configuration; return the finished process, whose status is not 0 for a broken link."""
    return _zensical("build", "--clean", "--strict", "--config-file", str(configuration))


def _zensical(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> int:
    """Write the sources, build the site and check it; return the exit status."""
    parser = argparse.ArgumentParser(description="Build the documentation site into build/site.")
    parser.add_argument("--serve", action="store_true", help="then serve it on http://localhost:8000 until Ctrl-C")
    arguments = parser.parse_args()
    write_sources(SOURCES)
    done = build()
    if done.returncode != 0:
        print(done.stdout.partition("Traceback")[0], file=sys.stderr)
        return 1
    if found := loaded_from_other_hosts(SITE):
        print("loaded from other hosts:\n" + "\n".join(found), file=sys.stderr)
        return 1
    print(f"{(SITE / 'index.html').relative_to(REPOSITORY)}: {len(list(SITE.rglob('*.html')))} pages")
    if arguments.serve:
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(SITE), "8000"]
        print("http://localhost:8000 (Ctrl-C ends it)", flush=True)
        return subprocess.run(command).returncode
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
