"""Addresses of a run's pages, `/runs/{project}/{key}`, and the project of a run that names none."""

from urllib.parse import quote

DEFAULT_PROJECT = "default"


def run_page_path(project: str, key: str) -> str:
    """Return the path of a run's page; a step's is the same with `/steps/{step}`."""
    return f"/runs/{quote(project, safe='')}/{quote(key, safe='')}"
