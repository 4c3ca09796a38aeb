"""minilm-cache: run a teacher once, train many students offline from its cached relations.

from minilm_cache import DumpConfig, TrainConfig, dump_cache, open_cache, train_students

dumped = dump_cache(DumpConfig(teacher="mini", max_tokens=300_000))
trained = train_students(TrainConfig(arch=("3x384",), steps=300), dumped.path)
open_cache(dumped.path)[0].relation("attention")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minilm_cache.storage_schema.versions import RELEASE

if TYPE_CHECKING:
    from minilm_cache.cache import Cache, CachedSequence, open_cache
    from minilm_cache.dump.config import DumpConfig
    from minilm_cache.dump.run import DumpResult, dump_cache
    from minilm_cache.errors import MiniLMCacheError
    from minilm_cache.evaluate.run import Evaluation, evaluate_models
    from minilm_cache.evaluate.settings import EvaluateConfig
    from minilm_cache.models.decoding import Decoding
    from minilm_cache.models.generation import TextGenerator
    from minilm_cache.report.maps import attention_figure
    from minilm_cache.report.plots import Picture
    from minilm_cache.report.runs import Student, TrainedRun
    from minilm_cache.report.tables import results, students_table
    from minilm_cache.session import Session
    from minilm_cache.settings import SliceConfig
    from minilm_cache.slicing.run import SliceResult, slice_teacher
    from minilm_cache.train.config import TrainConfig
    from minilm_cache.train.run import TrainResult, train_students
    from minilm_cache.workflows.config import SearchTextConfig
    from minilm_cache.workflows.search_text import search_texts

_HOMES = {
    "Cache": "cache",
    "CachedSequence": "cache",
    "Decoding": "models.decoding",
    "DumpConfig": "dump.config",
    "DumpResult": "dump.run",
    "EvaluateConfig": "evaluate.settings",
    "Evaluation": "evaluate.run",
    "MiniLMCacheError": "errors",
    "Picture": "report.plots",
    "SearchTextConfig": "workflows.config",
    "Session": "session",
    "SliceConfig": "settings",
    "SliceResult": "slicing.run",
    "Student": "report.runs",
    "TextGenerator": "models.generation",
    "TrainConfig": "train.config",
    "TrainResult": "train.run",
    "TrainedRun": "report.runs",
    "attention_figure": "report.maps",
    "dump_cache": "dump.run",
    "evaluate_models": "evaluate.run",
    "open_cache": "cache",
    "results": "report.tables",
    "search_texts": "workflows.search_text",
    "slice_teacher": "slicing.run",
    "students_table": "report.tables",
    "train_students": "train.run",
}
"""Modules of the public names, imported when one is used: `import minilm_cache` itself costs nothing."""
__all__ = [
    "Cache",
    "CachedSequence",
    "Decoding",
    "DumpConfig",
    "DumpResult",
    "EvaluateConfig",
    "Evaluation",
    "MiniLMCacheError",
    "Picture",
    "SearchTextConfig",
    "Session",
    "SliceConfig",
    "SliceResult",
    "Student",
    "TextGenerator",
    "TrainConfig",
    "TrainResult",
    "TrainedRun",
    "__version__",
    "attention_figure",
    "dump_cache",
    "evaluate_models",
    "open_cache",
    "results",
    "search_texts",
    "slice_teacher",
    "students_table",
    "train_students",
]
__version__ = RELEASE


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the public names
    if name in _HOMES:
        return getattr(import_module(f"minilm_cache.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
