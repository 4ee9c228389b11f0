"""The token store that the settings name."""

from __future__ import annotations

from pathlib import Path

from foreshock.errors import ConfigurationError
from service.platform.settings import Settings
from service.platform.store.local import LocalTokenStore
from service.platform.store.tokens import TokenStore


def open_store(settings: Settings) -> TokenStore:
    """Return the store of FORESHOCK_STORE_URL; raises ConfigurationError if that is neither a folder nor `s3://…`."""
    return LocalTokenStore(local_folder(settings))


def local_folder(settings: Settings) -> Path:
    """Return the folder on this machine that belongs to the store; raises ConfigurationError if the URL names none."""
    url = settings.store_url
    if "://" in url and not url.startswith("file://"):
        raise ConfigurationError("FORESHOCK_STORE_URL must be a local folder, such as ./foreshock-data/tokens")
    return Path(url.removeprefix("file://")).absolute()
