"""`minilm-cache tokenize`: tokenises a text once, for all dumps that read it."""

import shlex

from rich.filesize import decimal

from minilm_cache.cli.console import print_json, print_pairs
from minilm_cache.cli.environment import note_default_corpus, quiet_libraries
from minilm_cache.cli.interrupt import stoppable_session
from minilm_cache.cli.options import Given, JsonOption, options
from minilm_cache.corpus.config import TokenizeConfig
from minilm_cache.settings import validated


@options(TokenizeConfig)
def tokenize(given: Given, *, json: JsonOption = False) -> None:
    """Tokenise a text, so that later dumps of it begin at once.

    `dump` and `plan` do this themselves; here it can run on other machines, and before there is a GPU. Every
    teacher with the same tokenizer reads the same tokens.

    Example: minilm-cache tokenize --teacher mini --corpus notes.txt
    """
    from minilm_cache.corpus.tokenise import tokenise_for  # noqa: PLC0415 - importing it takes seconds

    config = validated(TokenizeConfig, given)
    quiet_libraries()
    with stoppable_session() as session:
        note_default_corpus(given, config.corpus, session)
        tokens = tokenise_for(config, session=session)
    corpus = tokens.record.corpus
    if json:
        print_json(
            {
                "folder": str(tokens.folder),
                "num_documents": corpus.num_documents,
                "num_tokens": tokens.num_tokens,
                "bytes": tokens.num_bytes,
                "corpus_sha256": corpus.sha256,
            }
        )
        return
    words = ["minilm-cache", "dump"]
    for name in ("teacher", "revision", "corpus", "text_column", "documents"):
        if name in given or name == "corpus":
            words += [f"--{name.replace('_', '-')}", getattr(config, name)]
    print_pairs(
        {
            "tokens": f"{tokens.num_tokens:,} of {corpus.num_documents:,} documents, without special tokens",
            "size": decimal(tokens.num_bytes),
            "folder": tokens.folder,
            "next": shlex.join(words),
        }
    )
