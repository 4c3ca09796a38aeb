"""Environment variables that object stores are opened with, checked before obstore sees them.

obstore ends in a panic of Rust for some values, and names the variable for hardly any.
"""

import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from minilm_cache.errors import InvalidConfigError

_PREFIXES: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_SERVERS: Final = {
    "s3": (
        *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_METADATA_ENDPOINT"),
        *("AWS_ENDPOINT_URL_STS", "AWS_STS_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    ),
    "gs": ("GOOGLE_BASE_URL",),
    "az": (
        *("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL", "AZURE_MSI_ENDPOINT"),
        *("AZURE_IDENTITY_ENDPOINT", "AZURE_STORAGE_AUTHORITY_HOST", "AZURE_AUTHORITY_HOST"),
    ),
}
"""Variables that hold the URL of a server."""
_NEED_LEAVE: Final = frozenset(
    {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"}
)
"""Those of them where obstore wants to be allowed http by a variable of its own."""
_OF_LOGIN: Final = ("AZURE_STORAGE_AUTHORITY_HOST", "AZURE_AUTHORITY_HOST")
"""Servers that are asked for a token where no key is given."""
_SHOWN_CHARS: Final = 32
_YES: Final = ("1", "true", "on", "yes", "y")
_NAMED_BY: Final[Mapping[str, str]] = {
    "Account must be specified": "AZURE_STORAGE_ACCOUNT_NAME",
    "Invalid Access Key": "AZURE_STORAGE_ACCOUNT_KEY",
    "SAS query": "AZURE_STORAGE_SAS_TOKEN",
    "Missing AccessKeyId": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "Missing SecretAccessKey": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "service account": "GOOGLE_APPLICATION_CREDENTIALS",
    "pem": "GOOGLE_APPLICATION_CREDENTIALS",
}
"""What obstore says where it names no value, and the variable that it means."""


def refuse_bad_variables(scheme: str) -> None:
    """Raise InvalidConfigError for variables of a store that obstore would not survive, or would not name.

    Args:
        scheme: scheme of the store's URL: `s3`, `gs` or `az`.
    """
    prefix = _PREFIXES[scheme]
    for name, value in sorted(os.environ.items()):
        is_document = value.lstrip().startswith("{") or name.endswith("CREDENTIALS")  # JSON of several lines
        is_odd = value != value.strip() or not value.isprintable()
        if name.startswith((prefix, "AZURITE_")) and is_odd and not is_document:
            raise InvalidConfigError(
                f"{name} begins or ends with a blank or holds a line break, as a value read from a file can. "
                "Remove them."
            )
    given = [name for name in _SERVERS[scheme] if name in os.environ]
    endpoints = [name for name in given if name in _NEED_LEAVE]
    for name in given:
        is_replaced = name in endpoints[1:]
        is_unused = name in _OF_LOGIN and "AZURE_STORAGE_ACCOUNT_KEY" in os.environ
        if not (is_replaced or is_unused):
            _check_server(name, os.environ[name], f"{prefix}ALLOW_HTTP")


def _check_server(name: str, value: str, leave: str) -> None:
    try:
        parts = urlsplit(value)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_server = False
    if not is_server:
        shown = value if "@" not in value and len(value) < _SHOWN_CHARS else "..."  # it may be a key
        raise InvalidConfigError(
            f"{name} is {shown!r}, which is not the URL of a server. Write http://HOST:PORT or "
            "https://HOST:PORT, or unset it."
        )
    if parts.username or parts.password:
        raise InvalidConfigError(
            f"{name} holds a user name or a password, which would end up in messages and logs. Leave it out."
        )
    is_emulated = os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in _YES
    allowed = os.environ.get(leave, "false").lower() in (*_YES, "", "maybe")
    if parts.scheme == "http" and name in _NEED_LEAVE and not (allowed or is_emulated):
        raise InvalidConfigError(
            f"{name} is {value}: http sends keys and data unencrypted, which is off by default. Set "
            f"{leave}=true to allow it, or give an https:// URL."
        )


def variables_in(scheme: str, text: str) -> str:
    """Return the names of the variables that an error of obstore is about; never their values."""
    prefix = _PREFIXES[scheme]
    quoted = [
        name
        for name, value in os.environ.items()
        if name.startswith(prefix) and (f'"{value}"' in text or (value and f" {value}" in text))
    ]
    fixed = [name for words, name in _NAMED_BY.items() if words in text]
    if "client error" in text and f"{prefix}PROXY_URL" in os.environ:
        fixed.append(f"{prefix}PROXY_URL")
    unit = " (a duration has a unit, like 30s)" if "Duration" in text else ""
    return (", ".join(quoted or fixed) or f"the variables that begin with {prefix}") + unit
