"""Generate texts from texts of a command line or of a file, with a model that was fine-tuned for it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minilm_cache.errors import InterruptedRunError, InvalidConfigError
from minilm_cache.evaluate.files import own_rows, read_own_text
from minilm_cache.models.device import choose_device, enough_memory
from minilm_cache.models.generation import TextGenerator
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.truncate import saving
from minilm_cache.session import ALONE, Session
from minilm_cache.store.durable import refuse_existing, write_file
from minilm_cache.wording import counted
from minilm_cache.workflows.config import GenerateConfig


@dataclass(frozen=True, slots=True)
class Generated:
    """A text that was generated, and what it was generated from."""

    source: tuple[str, ...]
    text: str


def generate(
    config: GenerateConfig,
    model: str,
    texts: Sequence[str] = (),
    *,
    out: Path | None = None,
    session: Session = ALONE,
) -> list[Generated]:
    """Return the text that a model generates from each source, in order.

    Args:
        config: where the sources are, and how texts are generated.
        model: folder of the model, or its name on the hub.
        texts: sources, where they are not in a file.
        out: file of JSON lines to write, too, which must not exist. None means that nothing is written.
        session: its progress shows the number of texts. Its `should_stop` is called after each batch; True
            stops, and nothing is kept.

    Raises:
        InvalidConfigError: there are no sources, or answers that are not one for each text.
        CorpusError: the file is missing or damaged, or lacks a column or a text.
        TeacherError: the model was not fine-tuned to generate texts.
        StorageError: the file cannot be written.
        InterruptedRunError: a stop was requested.
    """
    if out is not None:
        refuse_existing(out, "--out")
    sources = _sources(config, texts)
    device = choose_device(config.device)
    generator = TextGenerator.load(locate_teacher(model, config.revision).folder, device)
    _refuse_other_sources(model, sources, pairs=generator.pairs)
    decoding = generator.decoding.changed(config)
    if config.max_length is not None:
        decoding = decoding.with_changes(max_source=config.max_length)
    session.progress.start("generate", len(sources), "texts")

    def advance(count: int) -> None:
        session.progress.advance(count)
        if session.should_stop():
            raise InterruptedRunError("interrupted: nothing is kept. Run the same command again.")

    with enough_memory(device, "Take a lower --batch-size"):
        generated = generator.generate(
            sources, decoding=decoding, batch_size=config.batch_size, advance=advance
        )
    empty = sum(not text.strip() for text in generated)
    if empty:
        session.progress.note(
            f"{empty:,} of {counted(len(sources), 'text')} came out empty: the model ended at once. "
            "Fine-tune it for longer, or give --min-new-tokens"
        )
    pairs = [Generated(source, text) for source, text in zip(sources, generated, strict=True)]
    if out is not None:
        lines = [json.dumps(row_of(pair), ensure_ascii=False) for pair in pairs]
        with saving("write", out):
            write_file(out, "".join(f"{line}\n" for line in lines).encode())
    return pairs


def row_of(pair: Generated) -> dict[str, str]:
    """Return a generated text as a JSON object: `src`, `answer` where there is one, and `generated`."""
    return {**dict(zip(("src", "answer"), pair.source, strict=False)), "generated": pair.text}


def _refuse_other_sources(model: str, sources: Sequence[tuple[str, ...]], *, pairs: bool) -> None:
    """Raise InvalidConfigError if a model gets single texts and was tuned on pairs, or gets pairs."""
    if pairs and len(sources[0]) == 1:
        raise InvalidConfigError(
            f"{model} was tuned on passages with answers. Give --answer for each text, or of a file "
            "--text-columns src,answer."
        )
    if not pairs and len(sources[0]) > 1:
        raise InvalidConfigError(
            f"{model} was tuned on single texts. Leave out --answer, or give one column of the file."
        )


def _sources(config: GenerateConfig, texts: Sequence[str]) -> list[tuple[str, ...]]:
    if config.file is None and not texts:
        raise InvalidConfigError("give texts, or a file that has them: --file texts.jsonl")
    if config.file is not None and texts:
        raise InvalidConfigError(f"give texts or --file {config.file}, not both")
    if config.file is not None:
        return _read(config.file, [part.strip() for part in config.text_columns.split(",")])
    if config.answer and len(config.answer) != len(texts):
        raise InvalidConfigError(
            f"there are {len(config.answer)} --answer for {len(texts)} texts. Give one for each text."
        )
    return list(zip(texts, config.answer, strict=True)) if config.answer else [(text,) for text in texts]


def _read(file: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    rows = own_rows(file, columns, "--text-columns", named="--file ")
    return [tuple(read_own_text(row[name], where) for name in columns) for where, row in rows]
