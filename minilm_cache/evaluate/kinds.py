"""The kinds of tasks, by the class of the task."""

from typing import Any

from minilm_cache.evaluate.kind import Kind
from minilm_cache.evaluate.tasks import SpanTask, Task, TextTask


def kind_of(task: Task) -> Kind[Any, Any]:
    """Return what a task's kind owns. Only that kind's libraries load: all of them take a second."""
    if isinstance(task, TextTask):
        from minilm_cache.evaluate.texts import TextKind  # noqa: PLC0415 - see above

        return TextKind(task)
    if isinstance(task, SpanTask):
        from minilm_cache.evaluate.spans import SpanKind  # noqa: PLC0415

        return SpanKind(task)
    from minilm_cache.evaluate.generation import GenerationKind  # noqa: PLC0415

    return GenerationKind(task)
