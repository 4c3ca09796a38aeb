"""The release, the format version that it writes, and the format versions that it reads."""

from typing import Final

RELEASE = "0.1.0"
"""Version of the package."""
FORMAT_VERSION: Final = 2
"""The version that this release writes."""

READABLE_VERSIONS: Final = frozenset({1, 2})
"""Every released version stays readable; `tests/golden` holds a cache of each."""
