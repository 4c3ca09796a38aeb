"""minilm-cache: run a teacher once, train many students offline from its cached relations."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minilm_cache.cache import Cache, CachedSequence, open_cache

__all__ = ["Cache", "CachedSequence", "__version__", "open_cache"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is asked for
    """Import the library on first use: `import minilm_cache` costs nothing."""
    if name in __all__:
        from minilm_cache import cache  # noqa: PLC0415 - deferred on purpose

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
