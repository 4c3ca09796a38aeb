"""The special tokens that a tokenizer itself puts around a text, as the teacher sees them in use."""

from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from minilm_cache.corpus.pairs import refuse_uneven_cut
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.storage_schema.identity import (
    MAX_SPECIAL,
    Packing,
    PackingMode,
    PairTemplate,
    Split,
    Template,
    Truncation,
)

_LOOKED_AT: Final = 2**10
_NUM_WORDS: Final = 8
_PROBES: Final = ("a", "b c", "The cat sat on the mat, and it was 7.", "x")


def template_of(tokenizer: PreTrainedTokenizerFast) -> Template:
    """Return the tokens that a tokenizer puts before and after a text, and between two texts.

    Between texts, which only packed sequences have, stands the token that ends a text, or else the
    tokenizer's separator.

    Raises:
        TeacherError: what it puts there depends on the text, or is in another segment than the first.
    """
    forms: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for probe in (*_PROBES, *_own_words(tokenizer)):
        whole: Any = tokenizer(probe, return_special_tokens_mask=True)
        ids, is_special = list(whole["input_ids"]), list(whole["special_tokens_mask"])
        if any(whole.get("token_type_ids", ())):
            raise _unusable(tokenizer, "puts texts in another segment than the first")
        body: Any = tokenizer(probe, add_special_tokens=False)
        if not body["input_ids"]:  # what stands before and after nothing cannot be told apart
            continue
        start = next((place for place, special in enumerate(is_special) if not special), len(ids))
        stop = start + len(body["input_ids"])
        if ids[start:stop] != list(body["input_ids"]) or not all(is_special[stop:]):
            raise _unusable(tokenizer, "changes the tokens of a text that it puts others around")
        forms.add((tuple(ids[:start]), tuple(ids[stop:])))
    if not forms:
        raise _unusable(tokenizer, "gives no token for any of its own words")
    if len(forms) > 1:
        raise _unusable(tokenizer, "puts other tokens around each text")
    ((before, after),) = forms
    if len(before) + len(after) > MAX_SPECIAL:
        raise _unusable(tokenizer, f"puts {len(before) + len(after)} tokens around each text")
    ends = [*after[-1:], tokenizer.sep_token_id, tokenizer.eos_token_id, *before[:1]]
    separator = next((token for token in ends if token is not None), None)
    if separator is None:
        raise _unusable(tokenizer, "has no token that separates texts")
    return Template(before=before, after=after, separator=separator)


def _own_words(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return some words of a tokenizer's vocabulary, since others may be no tokens at all."""
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(min(len(tokenizer), _LOOKED_AT)) if token not in special]
    return [str(tokenizer.decode([token])) for token in ordinary[-_NUM_WORDS:]]


def pair_template_of(tokenizer: PreTrainedTokenizerFast) -> PairTemplate:
    """Return the tokens that a tokenizer puts around and between two texts, and the segments that it names.

    Raises:
        TeacherError: what it puts there depends on the texts, or its segments are not those of BERT.
    """
    forms: set[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = set()
    words = [word for word in (*_PROBES, *_own_words(tokenizer)) if _body(tokenizer, word)]
    for first, second in zip(words, reversed(words), strict=True):
        whole: Any = tokenizer(first, second)
        ids, bodies = list(whole["input_ids"]), (_body(tokenizer, first), _body(tokenizer, second))
        places = whole.sequence_ids(0)
        if any([ids[at] for at, text in enumerate(places) if text == n] != bodies[n] for n in (0, 1)):
            raise _unusable(tokenizer, "changes the tokens of a pair of texts that it puts others around")
        starts, stops = ([at for at, text in enumerate(places) if text == n] for n in (0, 1))
        before, between = ids[: starts[0]], ids[starts[-1] + 1 : stops[0]]
        if stops[-1] + 1 - starts[0] != len(bodies[0]) + len(between) + len(bodies[1]):
            raise _unusable(tokenizer, "puts tokens within a text of a pair")
        segments = list(whole.get("token_type_ids", ()))
        in_second = [at >= stops[0] for at in range(len(ids))]
        if any(segments) and list(map(bool, segments)) != in_second:
            raise _unusable(tokenizer, "has segments of a pair that are not those of its two texts")
        forms.add((tuple(before), tuple(between), tuple(ids[stops[-1] + 1 :]), any(segments)))
    if len(forms) != 1:
        raise _unusable(tokenizer, "puts other tokens around each pair of texts")
    ((before_both, between_both, after_both, has_segments),) = forms
    if not between_both or max(map(len, (before_both, between_both, after_both))) > MAX_SPECIAL:
        raise _unusable(tokenizer, "puts nothing, or too much, between two texts")
    return PairTemplate(before=before_both, between=between_both, after=after_both, has_segments=has_segments)


def _body(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the tokens of a text alone."""
    encoded: Any = tokenizer(text, add_special_tokens=False)
    return list(encoded["input_ids"])


def named_template(tokenizer: PreTrainedTokenizerFast) -> Template | None:
    """Return `[CLS] text [SEP]` by the tokenizer's own names, as in caches whose packing says nothing.

    None means that the tokenizer, like those of decoders, has no such names.
    """
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    if cls is None or sep is None:
        return None
    return Template(before=(cls,), after=(sep,), separator=sep)


def template_to_store(tokenizer: PreTrainedTokenizerFast) -> Template | None:
    """Return a tokenizer's template. None means that it is `[CLS] text [SEP]`, as in every older cache.

    Raises:
        TeacherError: same as for `template_of`.
    """
    template = template_of(tokenizer)
    return None if template == named_template(tokenizer) else template


def packing_of(
    tokenizer: PreTrainedTokenizerFast,
    *,
    mode: PackingMode,
    max_length: int,
    max_tokens: int | None,
    seed: int,
    split: Split | None = "tokens",
    prompt: str | None = None,
    has_groups: bool = False,
    truncation: Truncation | None = None,
) -> Packing:
    """Return how text becomes the sequences that a tokenizer's own template makes of it; see `Packing`.

    With `has_groups`, queries have several documents, and documents alone are cut. A `truncation` of None
    means what is usual.

    Raises:
        TeacherError: same as for `template_of`.
        InvalidConfigError: sequences have no room beside special tokens, the tokenizer cuts long texts at
            their beginning, which records do not, or queries would be cut differently for each document.
    """
    if mode != "packed" and tokenizer.truncation_side == "left":
        raise InvalidConfigError(
            f"the tokenizer of {tokenizer.name_or_path} cuts long texts at their beginning (truncation_side "
            "is left), and sequences here are cut at their end. Set truncation_side to right in its "
            "tokenizer_config.json, and give texts that fit."
        )
    pair = pair_template_of(tokenizer) if mode == "pairs" else None
    if has_groups:
        refuse_uneven_cut(truncation)
    if pair is not None and (has_groups or truncation == "only_second"):
        pair = pair.model_copy(update={"cut": "second"})
    template = template_of(tokenizer)
    num_special = len(template.before) + len(template.after)
    if pair is not None:
        num_special = len(pair.before) + len(pair.between) + len(pair.after)
    if max_length < num_special + (1 if pair is None else 2):
        raise InvalidConfigError(
            f"--max-length {max_length} leaves no room for text after {num_special} special tokens. Choose "
            "a larger one."
        )
    if prompt is not None:
        refuse_long_prompt(tokenizer, prompt, max_length=max_length)
    return Packing(
        mode=mode,
        max_length=max_length,
        max_tokens=max_tokens,
        seed=seed,
        split=split,
        template=template_to_store(tokenizer) if pair is None else None,
        prompt=prompt,
        pair=pair,
    )


def refuse_long_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str, *, max_length: int) -> None:
    """Raise InvalidConfigError for a prompt that leaves no room for a text beside it."""
    template = template_of(tokenizer)
    room = max_length - len(template.before) - len(template.after)
    num_tokens = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    if num_tokens >= room:
        raise InvalidConfigError(
            f"the prompt {prompt[:40]!r} takes {num_tokens} tokens, and --max-length leaves room for "
            f"{room}. Give a greater --max-length, or a shorter one (--prompt, --prompt-name, --role-column)."
        )


def _unusable(tokenizer: PreTrainedTokenizerFast, what: str) -> TeacherError:
    return TeacherError(
        f"the tokenizer of {tokenizer.name_or_path} {what}, so the sequences that the teacher sees in use "
        "cannot be made here. Give it a post-processor of a fixed form, such as `[CLS] $A [SEP]`, and save "
        "it again."
    )
