"""A tokenizer with fewer pieces cuts a text as the whole one does, where all pieces of the text are kept."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.student_tokens import OtherTokenizer, Vocabulary
from minilm_cache.models.vocabulary import Pieces, trim_model
from minilm_cache.settings import asked_vocabulary
from minilm_cache.storage_schema.identity import PairTemplate

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
NAMES = {
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
WORDS = [
    a + b + c for a in ("un", "re", "", "in") for b in ("look", "tok", "form", "ü") for c in ("er", "s", "")
]


def texts(number: int) -> list[str]:
    """Return lines of words that share their parts."""
    draw = random.Random(3)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(number)]


def wordpiece() -> Tokenizer:
    """Return a tokenizer as BERT's, with a post-processor of the older kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts(400), trainer)
    tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def bpe() -> Tokenizer:
    """Return a tokenizer of bytes as RoBERTa's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts(400), trainer)
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(), processors.RobertaProcessing(("</s>", 2), ("<s>", 0))]
    )
    return tokenizer


def bpe_with_ends() -> Tokenizer:
    """Return a tokenizer that marks the ends of words, as GPT's first one does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=90, special_tokens=SPECIAL, show_progress=False, end_of_word_suffix="</w>"
    )
    tokenizer.train_from_iterator(texts(400), trainer)
    tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def words() -> Tokenizer:
    """Return a tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=60, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts(400), trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """Return a tokenizer as XLM-R's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts(400), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "WordPiece": wordpiece,
    "BPE": bpe,
    "BPE with ends": bpe_with_ends,
    "Unigram": unigram,
    "WordLevel": words,
}


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the names of its special tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMES)


PIECES = {kind: Pieces(fast(build())) for kind, build in KINDS.items()}


def counts(pieces: Pieces, lines: Sequence[str]) -> np.ndarray:
    """Return how often lines have each piece."""
    return pieces.counts(np.asarray(pieces.tokenizer(line)["input_ids"]) for line in lines)


@pytest.mark.parametrize("ending", ["", " </s>", " </s> </s>"])
def test_spelled_texts_are_cut_as_in_use(ending: str) -> None:
    """Whatever number of tokens ends each text, and also where it is none, as with decoders."""
    built = wordpiece()
    built.post_processor = processors.TemplateProcessing(
        single=f"<s> $A{ending}", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    pieces, lines = Pieces(fast(built)), texts(60)
    counted = counts(pieces, lines)
    vocabulary = Vocabulary(
        pieces, counted, pieces.chosen(counted, len(pieces.always) + 10), num_after=ending.count("</s>")
    )
    rows = [torch.tensor(pieces.tokenizer(line)["input_ids"]) for line in lines]
    wholes = [vocabulary.row(row, 512) for row in rows]
    assert any(len(whole) > 12 for whole in wholes)
    for line, row, whole in zip(lines, rows, wholes, strict=True):
        assert whole.tolist() == vocabulary.tokenizer(line)["input_ids"]
        used = vocabulary.tokenizer(line, truncation=True, max_length=12)["input_ids"]
        assert vocabulary.row(row, 12).tolist() == used


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(
    chosen=st.lists(st.sampled_from(texts(60)), min_size=1, max_size=8), most=st.none() | st.integers(0, 40)
)
def test_texts_whose_pieces_are_kept_are_cut_as_before(
    kind: str, chosen: list[str], most: int | None
) -> None:
    pieces = PIECES[kind]
    limit = None if most is None else len(pieces.always) + most
    kept = pieces.chosen(counts(pieces, chosen), limit)
    smaller = pieces.trimmed(kept)
    place = {number: new for new, number in enumerate(kept)}

    assert kept == sorted(set(kept))
    assert limit is None or len(kept) <= limit
    assert len(smaller) == len(kept)
    num_same = 0
    for line in [*texts(60), *chosen, "never seen: ÿ 漢"]:
        ids = pieces.tokenizer(line)["input_ids"]
        if all(number in place for number in ids):
            num_same += 1
            assert smaller(line)["input_ids"] == [place[number] for number in ids]
            assert smaller.decode(smaller(line)["input_ids"]) == pieces.tokenizer.decode(ids)
    assert most is not None or num_same >= len(chosen)
    assert {name: getattr(smaller, name) for name in NAMES} == NAMES


@pytest.mark.parametrize("kind", KINDS)
def test_coverage_is_what_counting_gives(kind: str) -> None:
    pieces = PIECES[kind]
    lines = texts(60)
    kept = pieces.chosen(counts(pieces, lines[:5]), len(pieces.always) + 6)
    rows = [np.asarray(pieces.tokenizer(line, add_special_tokens=False)["input_ids"]) for line in lines]
    coverage = pieces.coverage(kept, rows)
    assert coverage is not None

    found = [[number in kept for number in row.tolist()] for row in rows]
    assert coverage.texts == pytest.approx(np.mean([all(row) for row in found]))
    assert coverage.tokens == pytest.approx(np.mean([each for row in found for each in row]))
    assert coverage.unknown == 0 or kind in {"Unigram", "WordLevel"}  # others can spell every text
    assert pieces.coverage(kept, []) is None


@pytest.mark.parametrize("kind", ["WordPiece", "BPE", "BPE with ends", "Unigram"])
def test_lost_pieces_are_spelled_by_kept_ones(kind: str) -> None:
    pieces = PIECES[kind]
    kept = pieces.chosen(counts(pieces, texts(8)), len(pieces.always) + 12)
    lost = sorted(set(pieces.tokenizer.get_vocab().values()) - set(kept))
    smaller = pieces.trimmed(kept)
    spelled = pieces.spelled(kept, lost)

    assert spelled.keys() == set(lost)
    for number, ids in spelled.items():
        assert all(0 <= new < len(kept) for new in ids)
        if smaller.unk_token_id not in ids:
            assert smaller.decode(ids) == pieces.tokenizer.decode([number])
    assert sum(smaller.unk_token_id in ids for ids in spelled.values()) < len(spelled)


def test_ends_of_words_are_spelled_as_the_smaller_tokenizer_cuts_them() -> None:
    pieces, lines = PIECES["BPE with ends"], texts(60)
    counted = counts(pieces, lines)
    vocabulary = Vocabulary(pieces, counted, pieces.chosen(counted, len(pieces.always) + 20), num_after=1)
    for line in lines:
        ids = pieces.tokenizer(line)["input_ids"]
        own = vocabulary.row(torch.tensor(ids), 512).tolist()
        assert vocabulary.tokenizer.unk_token_id not in own
        assert vocabulary.tokenizer.decode(own) == pieces.tokenizer.decode(ids)
        # Each word ends with one piece that marks an end, and no other piece of it does.
        tokens = vocabulary.tokenizer.convert_ids_to_tokens(own)
        assert sum(token.endswith("</w>") for token in tokens) == len(line.split())


@pytest.mark.parametrize("kind", ["WordPiece", "BPE", "BPE with ends", "Unigram"])
def test_sequences_are_read_with_fewer_pieces(kind: str) -> None:
    pieces = PIECES[kind]
    lines = texts(20)
    counted = counts(pieces, lines)
    vocabulary = Vocabulary(pieces, counted, pieces.chosen(counted, len(pieces.always) + 30), num_after=1)
    rows = [torch.tensor(pieces.tokenizer(line)["input_ids"]) for line in lines]
    inputs = Inputs.of(rows, pieces.tokenizer.pad_token_id)
    longest = int(inputs.lengths.max())
    as_long, spelled = vocabulary.read(inputs, None), vocabulary.read(inputs, longest)

    assert as_long.ids.shape == inputs.ids.shape
    for place, row in enumerate(rows):
        own = spelled.ids[place, : spelled.lengths[place]]
        assert len(own) <= longest
        assert own[[0, -1]].tolist() == [0, 2]  # as the template has them
        used = vocabulary.tokenizer(lines[place], truncation=True, max_length=longest)["input_ids"]
        assert own.tolist() == used  # also where a longer piece stands across the end of a lost one
        if torch.isin(row, torch.tensor(vocabulary.kept)).all():
            assert as_long.ids[place, : len(row)].tolist() == own.tolist()
    assert (spelled.ids[~spelled.valid] == vocabulary.tokenizer.pad_token_id).all()


def test_a_head_whose_last_axis_is_the_vocabulary_is_trimmed_there() -> None:
    """MobileBERT's for masked tokens, with embeddings that are narrower than its states."""
    config = AutoConfig.for_model(
        "mobilebert",
        vocab_size=40,
        hidden_size=32,
        embedding_size=16,
        num_hidden_layers=1,
        intra_bottleneck_size=16,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = AutoModelForMaskedLM.from_config(config).eval()
    kept = [*range(6), *range(10, 30)]
    smaller = trim_model(model, kept)
    places = torch.arange(len(kept))[None]
    with torch.no_grad():
        found = smaller(input_ids=places).logits
        expected = model(input_ids=torch.tensor(kept)[places]).logits[..., kept]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("has_unknown", [True, False])
def test_lost_pieces_that_keep_their_places_need_an_unknown_token(has_unknown: bool) -> None:
    """Without one they would be read as the first piece, whatever that is."""
    names = {name: token for name, token in NAMES.items() if has_unknown or name != "unk_token"}
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=bpe(), **names))
    counted = counts(pieces, texts(20))
    everything = Vocabulary(pieces, counted, pieces.chosen(counted, None), num_after=1)
    some = Vocabulary(pieces, counted, pieces.chosen(counted, len(pieces.always) + 5), num_after=1)

    everything.check_places(reads_texts=True)
    with pytest.raises(InvalidConfigError, match="cut into other pieces where whole texts are"):
        some.check_places(reads_texts=True)
    if has_unknown:
        some.check_places(reads_texts=False)
        return
    with pytest.raises(InvalidConfigError, match="this tokenizer has no unknown token"):
        some.check_places(reads_texts=False)


@pytest.mark.parametrize("is_pair", [False, True])
def test_a_longer_piece_across_the_end_of_a_lost_one_is_found_as_in_use(is_pair: bool) -> None:
    """`ab ##c` without `ab` is `a ##bc`; spelled alone, `ab` would be `a ##b`."""
    pieces = ["a", "##a", "b", "##b", "c", "##c", "##bc", "ab"]
    names = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.WordPiece(names, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 0))
    whole = Pieces(fast(tokenizer))
    texts = ("abc b", "c abc") if is_pair else ("abc c",)
    pair = PairTemplate(before=(0,), between=(2,), after=(2,), has_segments=True) if is_pair else None
    row = whole.tokenizer(*texts)["input_ids"]
    kept = [number for piece, number in names.items() if piece != "ab"]
    vocabulary = Vocabulary(whole, whole.counts([np.array(row)]), kept, num_after=1, pair=pair)

    own = vocabulary.row(torch.tensor(row), 20).tolist()
    assert own == vocabulary.tokenizer(*texts)["input_ids"]
    assert names["##bc"] in own
    unknown = (*texts[:-1], "abc x ab")
    read = vocabulary.row(torch.tensor(whole.tokenizer(*unknown)["input_ids"]), 20).tolist()
    assert read == vocabulary.tokenizer(*unknown)["input_ids"]
    assert {names["##bc"], names["<unk>"]} <= set(read)
    special = (*texts[:-1], "abc <mask>")  # it is written like one around the text, and left out
    read = vocabulary.row(torch.tensor(whole.tokenizer(*special)["input_ids"]), 20).tolist()
    assert read[-3:] == [names["##c"], names["<mask>"], 2]


def test_texts_that_are_written_from_word_pieces_have_their_signs_where_people_put_them() -> None:
    own = PreTrainedTokenizerFast(tokenizer_object=bpe(), **NAMES)
    tokenizer = Tokenizer(models.WordPiece({"<unk>": 0, "it": 1, "'": 2, "s": 3, "is": 4, "n": 5, "t": 6}))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    cached = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    read = OtherTokenizer(cached, own).read(Inputs.full(torch.tensor([[1, 2, 3]])), 20)

    assert str(own.decode(read.ids[0], skip_special_tokens=True)).strip() == "it's"


def test_a_file_lists_pieces(tmp_path: Path) -> None:
    pieces = PIECES["WordPiece"]
    file = tmp_path / "pieces.txt"
    piece = next(piece for piece in pieces.tokenizer.get_vocab() if len(piece.removeprefix("##")) > 2)
    file.write_text(f"{piece}\n\n")
    assert asked_vocabulary(str(file)) == (None, file)
    kept = pieces.listed(file)
    assert set(kept) == pieces.always | {pieces.tokenizer.get_vocab()[piece]}

    file.write_text(f"{piece}\nnowhere\n")
    with pytest.raises(InvalidConfigError, match=r"line 2: 'nowhere' is not a piece"):
        pieces.listed(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfigError, match="UTF-8"):
        pieces.listed(file)


@pytest.mark.parametrize(("value", "most"), [("8k", 8000), ("31", 31), ("texts", None), ("cache", None)])
def test_what_is_asked_for(value: str, most: int | None) -> None:
    assert asked_vocabulary(value) == (most, None)


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(InvalidConfigError, match="there is no such file"):
        asked_vocabulary("nowhere.txt")
    pieces = PIECES["WordPiece"]
    with pytest.raises(InvalidConfigError, match="stay in any case"):
        pieces.chosen(counts(pieces, []), 3)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "electra", "distilbert", "modernbert"])
def test_models_compute_the_same_of_kept_pieces(family: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
    config = AutoConfig.for_model(family, vocab_size=90, max_position_embeddings=40, **sizes, **ids)
    model = AutoModelForMaskedLM.from_config(config).eval()
    kept = [0, 1, 2, 3, *range(10, 60, 3)]
    smaller = trim_model(model, kept)

    places = torch.arange(len(kept))[None]
    before, after = model(input_ids=torch.tensor(kept)[None]).logits, smaller(input_ids=places).logits
    torch.testing.assert_close(after, before[..., kept], rtol=1e-5, atol=1e-5)
    assert smaller.config.vocab_size == len(kept)
    assert smaller.config.pad_token_id == 1


def test_a_padding_token_that_counts_positions_must_keep_its_number() -> None:
    config = AutoConfig.for_model(
        "roberta",
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=80,
        pad_token_id=40,
    )
    model = AutoModelForMaskedLM.from_config(config).eval()
    with pytest.raises(TeacherError, match="the number of its padding token matters"):
        trim_model(model, list(range(20, 60)))
