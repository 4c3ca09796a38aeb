"""Format versions: the version that is written, and the versions that can be read."""

from typing import Final

FORMAT_VERSION: Final = 1
"""The version that this release writes."""

READABLE_VERSIONS: Final = frozenset({1})
"""Every released version stays readable; `tests/golden` holds a cache of each."""
