"""`minilm-cache head`, `truncate`, `augment`: models made of a teacher, and text made by one."""

from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import (
    CorpusOption,
    DeviceOption,
    JsonOption,
    MaxLengthOption,
    MaxTokensOption,
    RevisionOption,
    TeacherOption,
    TextColumnOption,
    quiet_libraries,
)
from minilm_cache.config import make_config
from minilm_cache.dump.settings import AugmentConfig, HeadConfig


def head(  # noqa: PLR0913 - one parameter for each option
    teacher: TeacherOption,
    out: Annotated[Path, typer.Option(help="Folder of the model, which must not exist")],
    corpus: CorpusOption = None,
    text_column: TextColumnOption = None,
    max_length: MaxLengthOption = 128,
    max_tokens: MaxTokensOption = None,
    epochs: Annotated[int, typer.Option(help="Passes over the text, each masked anew")] = 3,
    batch_size: Annotated[int, typer.Option(help="Sequences per step")] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate at the beginning")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of weights, order and masks")] = 0,
    revision: RevisionOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Fit a head for masked tokens to a teacher that has none, so that soft labels can be dumped.

    Example: minilm-cache head --teacher mini --out mini-with-head
    """
    from minilm_cache.dump.head import fit_head  # noqa: PLC0415 - importing it takes seconds

    config = make_config(
        HeadConfig,
        teacher=teacher,
        corpus=corpus or HeadConfig.model_fields["corpus"].default,
        text_column=text_column,
        max_length=max_length,
        max_tokens=max_tokens,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        revision=revision,
        device=device,
    )
    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        if corpus is None:
            progress.note(f"no --corpus given: taking {config.corpus}")
        found = fit_head(config, out, progress=progress, should_stop=should_stop)
    if json:
        print_json(
            {
                "model": str(found.path),
                "steps": found.steps,
                "accuracy": found.accuracy,
                "cross_entropy": found.cross_entropy,
            }
        )
        return
    print_pairs(
        {
            "model": found.path,
            "steps": found.steps,
            "masked tokens told": f"{found.accuracy:.1%} of held-out ones, cross-entropy "
            f"{found.cross_entropy:.3f} nats",
        }
    )


def augment(  # noqa: PLR0913 - one parameter for each option
    teacher: Annotated[
        str, typer.Option(help="Model with a head for masked tokens: bert-base, a folder, or a hub id")
    ],
    corpus: Annotated[str, typer.Option(help="File, folder or hf:ID; each record is a document")],
    out: Annotated[Path, typer.Option(help="JSON lines file, which must not exist")],
    text_column: TextColumnOption = None,
    copies: Annotated[int, typer.Option(help="Copies of each document")] = 20,
    candidates: Annotated[int, typer.Option(help="Words that may stand for one")] = 15,
    replace: Annotated[float, typer.Option(help="Probability that a word is replaced")] = 0.4,
    form: Annotated[
        str, typer.Option(help="As TinyBERT's published code (authors) or as printed in the paper (paper)")
    ] = "authors",
    max_length: Annotated[int, typer.Option(help="Tokens that the model reads of a document")] = 128,
    seed: Annotated[int, typer.Option(help="Of what is drawn")] = 0,
    revision: RevisionOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Write a task's text and augmented copies of it, for TinyBERT's task-specific stage.

    Example: minilm-cache augment --teacher bert-base --corpus train.jsonl --out augmented.jsonl
    """
    from minilm_cache.dump.augment import augment as run_augment  # noqa: PLC0415 - takes seconds

    config = make_config(
        AugmentConfig,
        teacher=teacher,
        corpus=corpus,
        text_column=text_column,
        copies=copies,
        candidates=candidates,
        replace=replace,
        form=form,
        max_length=max_length,
        seed=seed,
        revision=revision,
        device=device,
    )
    quiet_libraries()
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        found = run_augment(config, out, progress=progress, should_stop=should_stop)
    if json:
        print_json({"file": str(found.path), "documents": found.num_documents, "lines": found.num_lines})
        return
    print_pairs({"file": found.path, "documents": found.num_documents, "with copies": f"{found.num_lines:,}"})


def truncate(
    teacher: TeacherOption,
    layers: Annotated[str, typer.Option(help="Layers to keep, counted from 0, like 0,1,2")],
    out: Annotated[Path, typer.Option(help="Folder of the model, which must not exist")],
    revision: RevisionOption = None,
    json: JsonOption = False,
) -> None:
    """Write a teacher with some of its layers alone: the baseline that learns nothing.

    Example: minilm-cache truncate --teacher mini --layers 0,1,2 --out bottom-3
    """
    from minilm_cache.dump.truncate import truncate as run_truncate  # noqa: PLC0415 - takes seconds

    quiet_libraries()
    kept = run_truncate(teacher, revision, layers, out)
    if json:
        print_json({"model": str(out), "layers": kept})
        return
    print_pairs({"model": out, "layers": ", ".join(map(str, kept))})
