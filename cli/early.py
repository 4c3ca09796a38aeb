"""Checks of what a command names, before libraries are imported that take seconds.

They raise what the libraries' callers raise later, so that a mistake shows at once.
"""

from collections.abc import Iterable
from pathlib import Path

from minilm_cache.corpus.formats import HUB_PREFIX, PYTHON_DOCS, corpus_files
from minilm_cache.evaluate.settings import refuse_no_data
from minilm_cache.models.arch import num_layers_of
from minilm_cache.models.locate import locate_teacher, refuse_no_config
from minilm_cache.store.durable import refuse_existing
from minilm_cache.store.layout import refuse_no_cache
from minilm_cache.store.urls import is_url
from minilm_cache.workflows.study_source import Source


def refuse_missing(
    *,
    teacher: str | None = None,
    models: Iterable[str | None] = (),
    revision: str | None = None,
    corpus: str | None = None,
    cache: str | Path | None = None,
    arch: Iterable[str] = (),
    data: Path | None = None,
    document: Path | None = None,
    out: Path | None = None,
) -> None:
    """Raise the error of the first thing that is not there, or of a shape that is none.

    Args:
        teacher: name of a model that must have a configuration. None means that there is no teacher.
        models: names of models, or folders of runs.
        revision: revision of models from the hub. None means the default revision.
        corpus: name of a text. None means that none is read.
        cache: folder of a cache; URLs are not asked. None means that none is read.
        arch: shapes of students.
        data: retrieval data of the user's own. None means that there are none.
        document: document of YAML. None means that there is none.
        out: file or folder that must not exist yet. None means that nothing is asked of it.
    """
    if document is not None:
        Source(document)
    for shape in arch:
        num_layers_of(shape)
    if out is not None:
        refuse_existing(out)
    if cache is not None and not is_url(str(cache)):
        refuse_no_cache(Path(cache))
    if data is not None:
        refuse_no_data(data)
    if corpus is not None and corpus != PYTHON_DOCS and not corpus.startswith(HUB_PREFIX):
        corpus_files(Path(corpus))
    for name in models:
        if name is not None and not Path(name).is_dir():
            locate_teacher(name, revision, without_weights=True)
    if teacher is not None:
        refuse_no_config(locate_teacher(teacher, revision, without_weights=True).folder)
