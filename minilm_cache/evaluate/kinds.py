"""The kinds of tasks, by the class of the task."""

from typing import Any, Final

from minilm_cache.evaluate.generation import GenerationKind
from minilm_cache.evaluate.kind import Kind
from minilm_cache.evaluate.spans import SpanKind
from minilm_cache.evaluate.tasks import GenerationTask, SpanTask, Task, TextTask
from minilm_cache.evaluate.texts import TextKind

_KINDS: Final[dict[type, type[Kind[Any, Any]]]] = {
    TextTask: TextKind,
    SpanTask: SpanKind,
    GenerationTask: GenerationKind,
}


def kind_of(task: Task) -> Kind[Any, Any]:
    """Return what a task's kind owns."""
    return _KINDS[type(task)](task)
