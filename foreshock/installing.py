"""The command that installs an extra from the place this Foreshock was installed from, which need not be an index."""

import importlib.metadata
import json
import shlex
from urllib.parse import unquote, urlsplit

_NAME = "foreshock"


def install_command(extra: str) -> str:
    """Return the shell command that installs the extra, such as `pip install -e '/home/me/foreshock[probes]'`."""
    try:
        origin = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    return f"pip install {requirement(extra, origin)}"


def requirement(extra: str, origin: str | None) -> str:
    """Return the requirement for pip, quoted for a shell.

    `origin` is the text of `direct_url.json` (PEP 610), which pip writes if it installs from a folder, a file or a
    repository; None if it installed from an index.
    """
    found = json.loads(origin) if origin else {}
    url = found.get("url", "")
    if "dir_info" in found:
        folder = shlex.quote(f"{unquote(urlsplit(url).path)}[{extra}]")
        return f"-e {folder}" if found["dir_info"].get("editable") else folder
    if "vcs_info" in found:
        version = found["vcs_info"]
        return shlex.quote(f"{_NAME}[{extra}] @ {version['vcs']}+{url}@{version['commit_id']}")
    return shlex.quote(f"{_NAME}[{extra}] @ {url}" if url else f"{_NAME}[{extra}]")
