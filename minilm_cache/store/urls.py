"""URLs of stores, and what of them must not be shown. Imports nothing that takes time."""

import re
from pathlib import Path
from typing import Final

from minilm_cache.errors import InvalidConfigError

_SECRET_AUTHORITY: Final = re.compile(
    r"(?P<scheme>(?<![\w./])(?:[A-Za-z][A-Za-z0-9+.-]*:[/\\]*|[/\\]{2}))(?P<secret>[^\s:@]*:(?:[^\s@]+@)+)"
)
_QUERY: Final = re.compile(r"(?P<place>\b[A-Za-z][A-Za-z0-9+.-]*:[/\\]+[^\s?#]*)[?#]\S*")
OBJECT_STORES: Final = ("s3", "gs", "az")
"""URL schemes that are opened through obstore."""
_FILE_SYSTEMS: Final = ("hf", "file")
"""URL schemes that are opened through fsspec; its other schemes fetch, chain or interpret parts of a URL."""
STORE_REMEDY: Final = (
    "Give a path, or a URL that begins with one of "
    f"{', '.join(f'{name}://' for name in (*OBJECT_STORES, *_FILE_SYSTEMS))}"
)
_CREDENTIALS: Final = (
    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, "
    "AZURE_STORAGE_ACCOUNT_KEY, HF_TOKEN; files such as ~/.aws are not read)"
)
DENIED_REMEDY: Final = f"Check the credentials that the environment holds {_CREDENTIALS}"
NO_KEY_REMEDY: Final = f"Set those of the store {_CREDENTIALS}"


def is_url(place: str) -> bool:
    """Return whether a place is a URL, not a path."""
    return "://" in place


def place_of(place: str) -> str:
    """Return a URL as it is, and a folder as an absolute path.

    Raises:
        InvalidConfigError: the path is not UTF-8, so that no record can name it.
    """
    found = place if is_url(place) else str(Path(place).resolve())
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise InvalidConfigError(
            f"{found!a}: this path is not UTF-8. Rename the folder or the file."
        ) from error
    return found


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


def parts_of_url(url: str) -> tuple[str, str, str]:
    """Return the scheme, the bucket and the path of a URL of a store; a path has the scheme `file`.

    Raises:
        InvalidConfigError: the kind of store is not known, or the URL names no bucket, or it holds a password
            or a signature; or a `file://` URL is not that of an absolute path.
    """
    scheme, _, rest = url.partition("://") if is_url(url) else ("file", "", url)
    place, (bucket, _, path) = url.rstrip("/"), rest.rstrip("/").partition("/")
    shown = without_secrets(place)
    if scheme not in (*OBJECT_STORES, *_FILE_SYSTEMS) or "::" in place:
        raise InvalidConfigError(f"cannot open {shown}: no store of this kind is known. {STORE_REMEDY}.")
    if is_url(place) and scheme == "file" and (bucket or shown != place):
        raise InvalidConfigError(
            f"cannot open {shown}: file:// stands before a whole path, which begins with a slash and has no "
            "? or #. Give the path alone, without file://."
        )
    if is_url(place) and shown != place:
        raise InvalidConfigError(
            f"cannot open {shown}: the URL holds a password or a signature, which would end up in run.json "
            f"and in logs. Leave it out. {DENIED_REMEDY}."
        )
    if not (path or bucket if scheme == "file" else bucket):
        raise InvalidConfigError(f"cannot open {url}: it names no bucket and no folder. {STORE_REMEDY}.")
    return scheme, bucket, path


def refuse_no_folder(url: str, option: str) -> None:
    """Raise InvalidConfigError for a store that is no known one, or a folder that does not exist.

    Args:
        url: URL or path of the store; buckets are not asked.
        option: what names it.
    """
    if parts_of_url(url)[0] == "file" and not Path(url.removeprefix("file://")).is_dir():
        raise InvalidConfigError(f"{option} {url}: there is no such folder. Check the path, or leave it out.")
