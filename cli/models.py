"""`minilm-cache head`, `slice`, `truncate`, `trim`, `augment`, `tokenize`: make models, text and tokens."""

import shlex
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.filesize import decimal

from minilm_cache.cli.console import print_json, print_pairs
from minilm_cache.cli.early import (
    refuse_missing,
    refuse_no_extra,
    refuse_no_own_data,
    refuse_no_task_data,
    refuse_no_text,
    refuse_no_texts,
    refuse_several,
    refuse_too_long,
    refuse_uncut,
)
from minilm_cache.cli.environment import note_default_corpus, quiet_libraries
from minilm_cache.cli.interrupt import quiet_session, shown_session
from minilm_cache.cli.options import Given, JsonOption, options, out_option
from minilm_cache.deploy.config import ExportModelConfig
from minilm_cache.dump.config import AugmentConfig, HeadConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.settings import RetrievalData
from minilm_cache.settings import (
    PromptSettings,
    SliceConfig,
    TokenizeConfig,
    TrimConfig,
    TruncateConfig,
    asked_vocabulary,
    option_of,
    validated,
)

OutOption = Annotated[Path, out_option("Folder of the model, which must not exist yet.")]


@options(HeadConfig)
def head(given: Given, *, out: OutOption, json: JsonOption = False) -> None:
    """Fit a head for masked tokens to a teacher that has none.

    Example: minilm-cache head --teacher mini --out mini-with-head
    """
    config = validated(HeadConfig, given)
    refuse_missing(teacher=config.teacher, revision=config.revision, corpus=config.corpus, out=out)
    refuse_no_text(config.corpus, config.text_column)
    refuse_too_long(config.max_length, [config.teacher], config.revision, is_teacher=True)
    from minilm_cache.dump.mlm_head import fit_head  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        note_default_corpus(given, config.corpus, session)
        fitted = fit_head(config, out, session=session)
    if json:
        print_json(
            {
                "model": fitted.path,
                "steps": fitted.steps,
                "accuracy": fitted.accuracy,
                "cross_entropy": fitted.cross_entropy,
            }
        )
        return
    print_pairs(
        {
            "model": fitted.path,
            "steps": fitted.steps,
            "masked tokens": f"{fitted.accuracy:.1%} of held-out ones predicted correctly, cross-entropy "
            f"{fitted.cross_entropy:.3f} nats",
        }
    )


@options(AugmentConfig)
def augment(
    given: Given,
    *,
    out: Annotated[Path, out_option("JSON lines file, which must not exist yet.")],
    json: JsonOption = False,
) -> None:
    """Write a task's text and augmented copies of it, as TinyBERT needs.

    Example: minilm-cache augment --teacher bert-base --corpus train.jsonl --out augmented.jsonl
    """
    config = validated(AugmentConfig, given)
    refuse_missing(teacher=config.teacher, revision=config.revision, corpus=config.corpus, out=out)
    refuse_too_long(config.max_length, [config.teacher], config.revision, is_teacher=True)
    refuse_no_text(config.corpus, config.text_column, config.pair_columns)
    from minilm_cache.dump.augment import augment as run_augment  # noqa: PLC0415 - takes seconds

    with quiet_session() as session:
        written = run_augment(config, out, session=session)
    if json:
        print_json({"file": written.path, "documents": written.num_documents, "lines": written.num_lines})
        return
    print_pairs(
        {"file": written.path, "documents": written.num_documents, "with copies": f"{written.num_lines:,}"}
    )


@options(SliceConfig)
def cut(given: Given, *, out: OutOption, json: JsonOption = False) -> None:
    """Cut a teacher to a smaller shape and fit it to text, as train does.

    Example: minilm-cache slice --teacher mini --arch 3x192 --out mini-3x192
    """
    config = validated(SliceConfig, given)
    refuse_missing(
        teacher=config.teacher, revision=config.revision, corpus=config.corpus, arch=[config.arch], out=out
    )
    refuse_uncut(config)
    refuse_no_text(config.corpus, config.text_column)
    from minilm_cache.slicing.run import slice_teacher  # noqa: PLC0415 - importing it takes seconds

    quiet_libraries()
    with shown_session() as session:
        note_default_corpus(given, config.corpus, session)
        session.progress.note(f"cutting {config.teacher} to {config.arch}")
        result = slice_teacher(config, out)
    if json:
        print_json(result)
        return
    pairs: dict[str, object] = {
        "model": result.path,
        "layers": ", ".join(map(str, result.layers)),
        "parameters": f"{result.num_parameters:,} of {result.teacher_parameters:,}",
        "relative error of hidden states": ", ".join(f"{error:.2f}" for error in result.errors),
    }
    if result.left_out is not None:
        pairs["left out"] = result.left_out
    if result.kl is not None:
        kls = ", ".join(f"{kind} {kl:.4f}" for kind, kl in result.kl.items())
        pairs["KL(teacher, slice), nats"] = f"{kls}, on text that it was not fitted to"
    print_pairs(
        pairs | {"next": f"minilm-cache train CACHE --arch {config.arch} --init {quote(str(result.path))}"}
    )


@options(TruncateConfig)
def truncate(given: Given, *, out: OutOption, json: JsonOption = False) -> None:
    """Write a teacher with only some of its layers, as a baseline.

    Example: minilm-cache truncate --teacher mini --layers 0,1,2 --out bottom-3
    """
    config = validated(TruncateConfig, given)
    refuse_missing(teacher=config.teacher, revision=config.revision)
    refuse_uncut(config)
    refuse_missing(out=out)
    from minilm_cache.models.truncate import truncate as run_truncate  # noqa: PLC0415 - takes seconds

    quiet_libraries()
    kept = run_truncate(config, out)
    if json:
        print_json({"model": out, "layers": kept})
        return
    print_pairs({"model": out, "layers": ", ".join(map(str, kept))})


@options(TrimConfig, leave_out={TrimConfig: ("model",)})
def trim(
    given: Given,
    *,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="mini, a hub id, or a folder like RUN/students/3x384.")
    ],
    out: OutOption,
    json: JsonOption = False,
) -> None:
    """Write a model with a smaller vocabulary: the pieces that a text needs.

    Example: minilm-cache trim RUN/students/3x192 --corpus notes.txt --vocab 8k --out small
    """
    config = validated(TrimConfig, {**given, "model": model})
    refuse_missing(teacher=config.model, revision=config.revision, out=out)
    of_text = given.keys() & {"corpus", "text_column", "documents"}
    if asked_vocabulary(config.vocab).file is None:
        refuse_no_text(config.corpus, config.text_column)
    elif of_text:
        raise InvalidConfigError(
            f"{option_of(min(of_text))}: {config.vocab} lists the pieces, and no text is read. "
            "Leave it out, or give --vocab texts."
        )
    from minilm_cache.workflows.trim import trim as run_trim  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        if asked_vocabulary(config.vocab).file is None:
            note_default_corpus(given, config.corpus, session)
        trimmed = run_trim(config, out, session=session)
    if json:
        print_json(trimmed)
        return
    pairs: dict[str, object] = {
        "model": trimmed.path,
        "pieces": f"{trimmed.num_pieces:,} of {trimmed.pieces_before:,}",
        "parameters": f"{trimmed.num_parameters:,} of {trimmed.parameters_before:,}",
    }
    if trimmed.coverage is not None:
        pairs["text that was set aside"] = trimmed.coverage.in_words
    print_pairs(pairs)


@options(ExportModelConfig)
def export_model(
    given: Given,
    *,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder like RUN/students/3x384, mini, or a hub id.")
    ],
    out: OutOption,
    json: JsonOption = False,
) -> None:
    """Write a model for a CPU as ONNX or OpenVINO, also in 8 bit, and refuse it if it has lost too much.

    SentenceTransformer(FOLDER, backend="onnx") and CrossEncoder open the folder; `speed`, `embeddings`,
    `rerank` and `evaluate --as-is` measure it.

    Example: minilm-cache export-model RUN/students/3x384 --openvino --int8 --out small
    """
    config = validated(ExportModelConfig, given)
    refuse_missing(models=[model], revision=config.revision, data=config.retrieval, out=out)
    refuse_several(model)
    refuse_no_extra(config.runtime, for_what=f"--{config.runtime}")
    if config.retrieval is not None or config.data is not None:
        refuse_no_extra("sentence-transformers", "eval", for_what="a score of vectors")
        refuse_no_task_data(config.data, ["stsb"], reads_training=False)
    if config.retrieval is not None:
        refuse_no_own_data(RetrievalData(retrieval=config.retrieval))
    refuse_no_texts(config, model)
    from minilm_cache.workflows.export_model import export_model as run_export  # noqa: PLC0415 - takes seconds

    with quiet_session() as session:
        exported = run_export(config, model, out, session=session)
    if json:
        drops = [drop._asdict() for drop in exported.drops]
        print_json({**asdict(exported), "drops": drops})
        return
    least = "" if exported.least_cosine is None else f", the least {exported.least_cosine:.4f}"
    scores = {drop.name: f"{drop.before:.2f} before, {drop.after:.2f} after" for drop in exported.drops}
    print_pairs(
        {
            "folder": exported.path,
            "size": f"{decimal(exported.num_bytes)} (the model itself has {decimal(exported.bytes_before)})",
            "cosine": f"{exported.cosine:.4f} with the model itself{least}, on {exported.judged_by} texts",
            **scores,
            "next": f"minilm-cache speed {quote(str(exported.model))} {quote(str(out))}",
        }
    )


@options(TokenizeConfig)
def tokenize(given: Given, *, json: JsonOption = False) -> None:
    """Tokenise a text, so that later dumps of it begin at once.

    `dump` and `plan` do this themselves; here it can run on other machines, and before there is a GPU. Every
    teacher with the same tokenizer reads the same tokens.

    Example: minilm-cache tokenize --teacher mini --corpus notes.txt
    """
    config = validated(TokenizeConfig, given)
    refuse_missing(teacher=config.teacher, revision=config.revision, corpus=config.corpus)
    refuse_no_text(config.corpus, config.text_column, config.pair_columns)
    from minilm_cache.corpus.tokenise import tokenise_for  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        note_default_corpus(given, config.corpus, session)
        tokens = tokenise_for(config, session=session)
    corpus = tokens.record.corpus
    if json:
        print_json(
            {
                "folder": tokens.folder,
                "num_documents": corpus.num_documents,
                "num_tokens": tokens.num_tokens,
                "bytes": tokens.num_bytes,
                "corpus_sha256": corpus.sha256,
            }
        )
        return
    words = ["minilm-cache", "dump"]
    for name in (
        *("teacher", "revision", "corpus", "text_column", "documents"),
        *PromptSettings.model_fields,
    ):
        if (name in given or name == "corpus") and option_of(name) not in words:
            words += [option_of(name), getattr(config, name)]
    if given.keys() & {"prompt", "prompt_name", "role_column"}:
        words += ["--packing", "records"]
    print_pairs(
        {
            "tokens": f"{tokens.num_tokens:,} of {corpus.num_documents:,} documents, without special tokens",
            "size": decimal(tokens.num_bytes),
            "folder": tokens.folder,
            "next": shlex.join(words),
        }
    )
