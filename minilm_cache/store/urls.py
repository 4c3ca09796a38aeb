"""URLs of stores, and what of them must not be shown. Imports nothing that takes time."""

import re
from pathlib import Path
from typing import Final

_SECRET_AUTHORITY: Final = re.compile(
    r"(?P<scheme>(?<![\w./])(?:[A-Za-z][A-Za-z0-9+.-]*:[/\\]*|[/\\]{2}))(?P<secret>[^\s:@]*:(?:[^\s@]+@)+)"
)
_QUERY: Final = re.compile(r"(?P<place>\b[A-Za-z][A-Za-z0-9+.-]*:[/\\]+[^\s?#]*)[?#]\S*")


def is_url(place: str) -> bool:
    """Return whether a place is a URL, not a path."""
    return "://" in place


def place_of(place: str) -> str:
    """Return a URL as it is, and a folder as an absolute path."""
    return place if is_url(place) else str(Path(place).resolve())


def without_secrets(url: str) -> str:
    """Return a URL for messages: without user name, password or signature. A path is returned unchanged."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    # A secret key may hold a slash, so a user with a password ends at the last @, whatever is before it.
    slashes = place[: len(place) - len(place.lstrip("/"))]
    place = place.lstrip("/")
    before, at, after = place.rpartition("@")
    if at and (":" in before or "/" not in before):
        return f"{scheme}://{slashes}{after}"
    return f"{scheme}://{slashes}{place}"


def hide_secrets(message: str) -> str:
    """Return a message without passwords and signatures of URLs, however the URLs are written."""
    return _QUERY.sub(r"\g<place>", _SECRET_AUTHORITY.sub(r"\g<scheme>", message))
