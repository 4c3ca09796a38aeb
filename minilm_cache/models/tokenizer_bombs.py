"""Refuse tokenizers whose rules make far more of a text than it was; a stranger's must not fill memory.

What a rule may do is read from its description, without a text. A pattern that takes for ever cannot be seen
so;
the text is therefore tokenised where a stop reaches it (`corpus.tokenise`).
"""

import json
from base64 import b64decode
from math import prod
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from minilm_cache.errors import TeacherError

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


def refuse_bombs(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise TeacherError for a tokenizer that lengthens texts far more than any known one does.

    Args:
        tokenizer: the tokenizer.
        folder: where it was read from, for the message.
    """
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
