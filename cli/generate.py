"""`minilm-cache generate`: texts from texts, by a model that was fine-tuned for it."""

from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.cli.console import print_json, print_pairs, print_text
from minilm_cache.cli.early import refuse_missing, refuse_no_sources
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import Given, JsonOption, options, out_option
from minilm_cache.settings import validated
from minilm_cache.workflows.config import GenerateConfig


@options(GenerateConfig)
def generate(
    given: Given,
    *,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder that `evaluate --task squad-qg --keep-models` wrote."),
    ],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT...", help="Texts to generate from.")
    ] = None,
    out: Annotated[
        Path | None, out_option("JSON lines file to write, which must not exist yet. [default: stdout]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Generate texts from texts: questions, summaries, or what the model was fine-tuned for.

    Example: minilm-cache generate TRIAL/model "Paris is the capital of France." --answer Paris

    Example: minilm-cache generate TRIAL/model --file passages.jsonl --out questions.jsonl
    """
    config = validated(GenerateConfig, given)
    refuse_missing(out=out)
    refuse_no_sources(config, model, texts or ())
    from minilm_cache.workflows.generate import generate as run_generate  # noqa: PLC0415 - takes seconds
    from minilm_cache.workflows.generate import row_of  # noqa: PLC0415 - takes seconds

    with quiet_session() as session:
        generated = run_generate(config, model, texts or (), out=out, session=session)
    if json:
        print_json({"file": out, "texts": list(map(row_of, generated))})
    elif out is not None:
        print_pairs({"file": out, "texts": len(generated)})
    else:
        for pair in generated:
            print_text(pair.text)
