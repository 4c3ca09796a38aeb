"""The base of every document of a cache."""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_serializer

_NOTHING: tuple[object, ...] = (None, (), [], {})
"""Values that say nothing; 0 says something."""


class StoredModel(BaseModel):
    """Base of everything read from a cache: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sections: ClassVar[frozenset[str]] = frozenset()
    """Fields that are left out where they say nothing: a cache without them has the document, and so the
    fingerprint, that it had before the format knew them."""

    @model_serializer(mode="wrap")
    def _without_empty_sections(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        content = handler(self)
        return {
            name: value
            for name, value in content.items()
            if name not in self.sections or value not in _NOTHING
        }
