"""The token store that the settings name."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from foreshock.errors import ConfigurationError
from foreshock_service.platform.settings import Settings
from foreshock_service.platform.store.local import LocalTokenStore
from foreshock_service.platform.store.tokens import TokenStore

_S3 = "s3://"


def open_store(settings: Settings) -> TokenStore:
    """Return the store of FORESHOCK_STORE_URL; raises ConfigurationError if that is neither a folder nor `s3://…`."""
    if is_folder(settings):
        return LocalTokenStore(local_folder(settings))
    # Its client takes a tenth of a second to import.
    from foreshock_service.platform.store.objects import ObjectLocation, ObjectTokenStore

    bucket, prefix = ObjectLocation.of_url(settings.store_url)
    location = ObjectLocation(
        bucket=bucket,
        prefix=prefix,
        endpoint=settings.store_endpoint,
        region=settings.store_region,
        access_key_id=_secret(settings.store_access_key_id),
        secret_access_key=_secret(settings.store_secret_access_key),
        session_token=_secret(settings.store_session_token),
        timeout_seconds=settings.store_timeout_seconds,
    )
    return ObjectTokenStore(location, local_folder(settings))


def is_folder(settings: Settings) -> bool:
    """Return whether the tokens are in a folder, not in an S3-compatible store."""
    return not settings.store_url.startswith(_S3)


def local_folder(settings: Settings) -> Path:
    """Return the folder on this machine that the store uses; raises ConfigurationError for an unknown kind of URL."""
    url = settings.store_url
    if not is_folder(settings):
        return Path(settings.store_temporary_folder).absolute()
    if "://" in url and not url.startswith("file://"):
        raise ConfigurationError(
            f"FORESHOCK_STORE_URL must be a folder, such as ./foreshock-data/tokens, or s3://bucket/prefix, got {url}"
        )
    return Path(url.removeprefix("file://")).absolute()


def _secret(value: SecretStr | None) -> str:
    return "" if value is None else value.get_secret_value()
