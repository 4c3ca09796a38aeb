"""Tokenizers: loading one with the special tokens that sequences are made with, and its hash.

Tokenizers whose rules make far more of a text than it was are refused: a stranger's must not fill memory.
What a rule may do is read from its description, without a text. A pattern that takes for ever cannot be seen
so; the text is therefore tokenised where a stop reaches it (`corpus.tokenise`). This module loads no models:
processes that cut text start in half the time without them.
"""

import json
from base64 import b64decode
from math import prod
from pathlib import Path
from typing import Any, Final, cast

from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minilm_cache.errors import TeacherError
from minilm_cache.models.files import library_errors, read_config_file
from minilm_cache.storage_schema.identity import canonical_sha256

_SPREADING: Final = {"NFKC": 18, "NFKD": 18, "NFC": 4, "NFD": 4, "ByteLevel": 2}
"""Characters that one becomes at most. The first rule of each kind is free: tokenizers have one."""
_MAX_GROWTH: Final = 32
"""Times that a text may grow by all rules together. Known tokenizers have 2 at most."""
_MAX_RULES: Final = 32
_MAX_TOKEN_CHARS: Final = 2**10
_MAX_WORD_CHARS: Final = 2**10
_MAX_PREFIX: Final = 64
_CHARSMAP_CHARS: Final = 64
"""Bytes of the longest text of a table of characters; that of NFKC has 33."""
_LISTS: Final = ("normalizers", "pretokenizers", "decoders")


_KNOWN: Final = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
"""Files of tokenizers, any of which is enough."""


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in _KNOWN)


def load_tokenizer(folder: Path, *, has_ends: bool = True) -> PreTrainedTokenizerFast:
    """Load a tokenizer that has the special tokens sequences are made with.

    One without a token for padding pads with the token that ends a text: padding is never read.

    Args:
        folder: folder of the tokenizer.
        has_ends: whether it must have `cls_token` and `sep_token`, which those of decoders lack.

    Raises:
        TeacherError: the folder has no tokenizer, or the tokenizer lacks special tokens.
    """
    # transformers returns an empty tokenizer where the files are missing.
    if not has_tokenizer(folder):
        read_config_file(folder)  # a folder that is no model at all is named as what it is
        raise TeacherError(
            f"teacher {folder} has no tokenizer: none of {', '.join(_KNOWN)} is there. "
            "Save it in the same folder: AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained(FOLDER)."
        )
    with library_errors(f"cannot load a tokenizer from {folder}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise TeacherError(f"the tokenizer in {folder} is not a fast one. Save it as tokenizer.json.")
        _refuse_bombs(tokenizer.backend_tokenizer, folder)
    if tokenizer.pad_token_id is None and not has_ends:
        tokenizer.pad_token = tokenizer.eos_token
    ends = {"cls_token": tokenizer.cls_token_id, "sep_token": tokenizer.sep_token_id} if has_ends else {}
    special = {**ends, "pad_token": tokenizer.pad_token_id}
    missing = [name for name, identifier in special.items() if identifier is None]
    if missing:
        raise TeacherError(
            f"the tokenizer in {folder} has no {', '.join(missing)}. Set it and save it again."
        )
    return tokenizer


def num_ids(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the greatest token id plus 1: the number of tokens, unless ids are left out."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def refuse_more_words(tokenizer: PreTrainedTokenizerFast, model: nn.Module, folder: Path) -> None:
    """Raise TeacherError if a tokenizer has more words, or higher ids, than its model has embeddings.

    Args:
        tokenizer: the tokenizer.
        model: a model of transformers, or one that was exported, whose configuration says its size.
        folder: their folder, for the message.
    """
    find: Any = getattr(model, "get_input_embeddings", None)
    table = None if find is None else find()
    rows = table.num_embeddings if isinstance(table, nn.Embedding) else cast("Any", model).config.vocab_size
    refuse_ids_beyond(tokenizer, rows, folder)


def refuse_ids_beyond(tokenizer: PreTrainedTokenizerFast, rows: int, folder: Path) -> None:
    """Raise TeacherError if a tokenizer has token ids for which a table of embeddings has no row.

    Args:
        tokenizer: the tokenizer.
        rows: rows of the table.
        folder: folder of both, for the message.
    """
    needed = num_ids(tokenizer)
    if needed > rows:
        raise TeacherError(
            f"the tokenizer in {folder} has ids up to {needed - 1}, {len(tokenizer)} tokens, and the model "
            f"has {rows} embeddings. Save the tokenizer that it was trained with there."
        )


def some_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of a token that models are tried with: one that begins texts, or else pads them."""
    tokens = (tokenizer.cls_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    return int(next(token for token in tokens if token is not None))


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the SHA-256 (hex) of a tokenizer and of the special tokens that sequences are made with."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["truncation"] = backend["padding"] = None
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    return canonical_sha256([backend, special])


def mask_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of the token that replaces masked tokens.

    Raises:
        TeacherError: the tokenizer has no such token.
    """
    token = tokenizer.mask_token_id
    if not isinstance(token, int):
        raise TeacherError(
            f"the tokenizer of {tokenizer.name_or_path} has no mask_token, which stands for tokens that are "
            "predicted. Set it and save the tokenizer again, or leave out --labels where that asks for it."
        )
    return token


def _refuse_bombs(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise TeacherError for a tokenizer that lengthens texts far more than any known one does."""
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        component = getattr(tokenizer, name)
        if component is None:
            continue
        rules = _flat(json.loads(component.__getstate__()))
        growth = prod(_growth(rule, rules[:number]) for number, rule in enumerate(rules))
        if len(rules) > _MAX_RULES or growth > _MAX_GROWTH:
            raise _refused(
                folder, f"its {name} may make a text {growth:,.0f} times as long by {len(rules)} rules"
            )
        if name == "decoder" and any("Regex" in _pattern(rule) for rule in rules):
            raise _refused(folder, "its decoder replaces by patterns, which may take for ever")
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > _MAX_TOKEN_CHARS:
        raise _refused(folder, f"a word of its vocabulary has {longest:,} characters")
    if getattr(tokenizer.model, "max_input_chars_per_word", 0) > _MAX_WORD_CHARS:
        raise _refused(folder, "it looks for words of more characters than any text has")
    if getattr(tokenizer.model, "dropout", None):
        raise _refused(
            folder, "it drops merges at random (dropout), so that a text has other tokens each time"
        )


def _flat(rule: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rules of a sequence of rules, however nested."""
    inner = next((rule[name] for name in _LISTS if name in rule), None)
    return [rule] if inner is None else [each for part in inner for each in _flat(part)]


def _pattern(rule: dict[str, Any]) -> dict[str, str]:
    pattern = rule.get("pattern")
    return pattern if rule.get("type") == "Replace" and isinstance(pattern, dict) else {}


def _growth(rule: dict[str, Any], before: list[dict[str, Any]]) -> float:
    """Return how many times as long a rule may make a text, given the rules before it."""
    kind, is_first = rule.get("type"), all(rule.get("type") != other.get("type") for other in before)
    if kind == "Replace":
        least = len(_pattern(rule).get("String", ""))  # a Regex may match between any two characters
        content = len(rule.get("content", ""))
        return max(1.0, content / least if least else content + 1.0)
    if kind == "Precompiled":
        table = b64decode(rule.get("precompiled_charsmap") or "")
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        longest = max(map(len, texts))
        return float(longest) if longest > _CHARSMAP_CHARS or not is_first else 1.0
    if kind in ("Prepend", "Metaspace"):
        prefix = len(rule.get("prepend") or rule.get("replacement") or "")
        return float(_MAX_GROWTH + 1) if prefix > _MAX_PREFIX else 1.0
    return 1.0 if is_first else float(_SPREADING.get(str(kind), 1))


def _refused(folder: Path, what: str) -> TeacherError:
    return TeacherError(f"the tokenizer in {folder} cannot be used: {what}. Do not use this model.")
