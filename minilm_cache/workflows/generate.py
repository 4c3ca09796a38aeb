"""Generate texts from texts of a command line or of a file, with a model that was fine-tuned for it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minilm_cache.evaluate.files import own_rows, read_own_text
from minilm_cache.models.decoding import refuse_other_sources
from minilm_cache.models.device import choose_device, enough_memory
from minilm_cache.models.generation import TextGenerator, encode_sources
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.truncate import saving
from minilm_cache.session import ALONE, Session
from minilm_cache.store.durable import new_file, prepare_new
from minilm_cache.wording import counted, cut_in_words
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
        prepare_new(out)
    sources = _sources(config, texts)
    device = choose_device(config.device)
    generator = TextGenerator.load(locate_teacher(model, config.revision).folder, str(device))
    refuse_other_sources(model, num_texts=len(sources[0]), pairs=generator.pairs)
    decoding = generator.decoding.changed(config, config.max_length)
    _, are_cut = encode_sources(generator.tokenizer, sources, decoding.max_source)
    if any(are_cut):
        session.progress.note(
            cut_in_words(sum(are_cut), len(sources), "text", most=f"{decoding.max_source} tokens")
        )
    session.progress.start("generate", len(sources), "texts")

    def advance(count: int) -> None:
        session.progress.advance(count)
        session.stop_if_asked()

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
        with saving("write", out), new_file(out, replaces=False) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
    return pairs


def row_of(pair: Generated) -> dict[str, str]:
    """Return a generated text as a JSON object: `src`, `answer` where there is one, and `generated`."""
    return {**dict(zip(("src", "answer"), pair.source, strict=False)), "generated": pair.text}


def _sources(config: GenerateConfig, texts: Sequence[str]) -> list[tuple[str, ...]]:
    config.refuse_texts(texts)
    if config.file is not None:
        rows = own_rows(config.file, config.columns, "--text-columns", named="--file ")
        return [tuple(read_own_text(row[name], where) for name in config.columns) for where, row in rows]
    return list(zip(texts, config.answer, strict=True)) if config.answer else [(text,) for text in texts]
