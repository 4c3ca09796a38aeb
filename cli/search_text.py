"""`minilm-cache search-text`: the texts of a corpus that are nearest to questions."""

from typing import Annotated

import typer

from minilm_cache.cli.console import print_json, print_table
from minilm_cache.cli.early import refuse_missing, refuse_no_text
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import Given, JsonOption, options
from minilm_cache.settings import validated
from minilm_cache.workflows.config import SearchTextConfig

_LONGEST = 100
"""Most characters of a text that are shown."""


@options(SearchTextConfig)
def search_text(
    given: Given,
    *,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder of a run or of a sentence encoder; `mini`; a hub id."),
    ],
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION...", help="What to look for.")],
    json: JsonOption = False,
) -> None:
    """Find the texts of a corpus that are nearest to questions.

    Example: minilm-cache search-text RUN "read a file line by line" --corpus notes.txt
    """
    config = validated(SearchTextConfig, given)
    refuse_missing(models=[model], revision=config.revision, corpus=config.corpus)
    refuse_no_text(config.corpus, config.text_column)
    from minilm_cache.workflows.search_text import search_texts  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        found = search_texts(config, model, questions, session=session)
    if json:
        rows = zip(questions, found, strict=True)
        print_json({"questions": [{"question": asked, "found": row} for asked, row in rows]})
        return
    for question, row in zip(questions, found, strict=True):
        shown = [[f"{each.score:.3f}", _short(each.text)] for each in row]
        print_table(f"Question: {question}", ["score", "text"], shown, num_names=2)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
