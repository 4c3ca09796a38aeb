"""The base of every document of a cache."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_serializer

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_EMPTY_VALUES: tuple[object, ...] = (None, (), [], {})
"""Values that count as empty; 0 does not."""


class StoredModel(BaseModel):
    """Base of everything read from a cache: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sections: ClassVar[frozenset[str]] = frozenset()
    """Fields that are left out of the JSON when they are empty. A cache that does not use them keeps the
    document, and so the fingerprint, that it had before the format had these fields."""

    @model_serializer(mode="wrap")
    def _without_empty_sections(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        content = handler(self)
        return {
            name: value
            for name, value in content.items()
            if name not in self.sections or value not in _EMPTY_VALUES
        }
