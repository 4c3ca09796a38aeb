"""Generated texts: who sees whom, decoding against a full pass, and beams against all texts there are."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel

from minilm_cache.errors import InvalidConfigError, MiniLMCacheError, TeacherError
from minilm_cache.models.decoding import GENERATION_FILE, Decoding
from minilm_cache.models.generation import (
    MaskedTargets,
    TextGenerator,
    check_generates,
    encode_sources,
    lengthened,
    logits_of,
    positions_of,
)
from minilm_cache.models.inputs import Inputs, Part
from tests.support import WORDS, save_teacher, tiny_model, tiny_tokenizer

FAMILIES = ("bert", "roberta", "xlm-roberta", "electra")
TOKENIZER = tiny_tokenizer()
SOURCES: list[str | tuple[str, ...]] = [" ".join(WORDS[:5]), (" ".join(WORDS[3:12]), WORDS[4]), WORDS[7]]
DECODING = Decoding(max_source=20, max_new_tokens=6)


def _model(family: str) -> PreTrainedModel:
    return tiny_model(family, head="tokens", attention="sdpa", seed=3)


def _inputs(source: Sequence[int], target: Sequence[int], copies: Sequence[int]) -> Inputs:
    """Return a source, a target, and a masked copy of each of these tokens of the target."""
    ids = torch.tensor([[*source, *target, *(TOKENIZER.mask_token_id for _ in copies)]])
    rows = zip(Part, (source, target, copies), strict=True)
    parts = torch.tensor([[part for part, row in rows for _ in row]])
    known = len(source) + len(target)
    positions = torch.tensor([[*range(known), *(len(source) + place for place in copies)]])
    return Inputs(ids, torch.tensor([ids.shape[1]]), parts=parts, positions=positions)


@torch.no_grad()
def _next(model: PreTrainedModel, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Return log-probabilities of the next token, of a whole pass over all tokens so far."""
    inputs = _inputs(source, target, [len(target)])
    logits = logits_of(model, inputs, torch.tensor([inputs.ids.shape[1] - 1]))[0]
    logits[[token for token in TOKENIZER.all_special_ids if token != TOKENIZER.sep_token_id]] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_target_changes_nothing_and_the_source_does(family: str) -> None:
    model, target = _model(family), [7, 8, 9, 10]
    copies = range(len(target))

    def predicted(source: list[int], target: list[int]) -> Tensor:
        inputs = _inputs(source, target, copies)
        with torch.no_grad():
            return logits_of(model, inputs, torch.arange(inputs.ids.shape[1]))

    source = [2, 5, 6, 3]
    before = predicted(source, target)
    after = predicted(source, [*target[:2], 11, 12])
    kept = [*range(6), *range(8, 11)]  # the source, two targets, and the copies up to the first changed one
    torch.testing.assert_close(after[kept], before[kept], rtol=0, atol=0)
    assert (after[11] - before[11]).abs().max() > 1e-3  # the last copy sees the changed token before it
    other = predicted([2, 5, 9, 3], target)
    assert ((other - before).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_in_one_pass_are_what_decoding_predicts(family: str) -> None:
    """What is trained is what is decoded, whatever token stands where the target's is not masked."""
    model, source, target = _model(family), [2, 5, 6, 7, 3], [8, 9, 10, 3]
    inputs = _inputs(source, target, range(len(target)))
    with torch.no_grad():
        together = logits_of(model, inputs, torch.arange(9, 13))
    for place in range(len(target)):
        alone = _inputs(source, target[:place], [place])
        with torch.no_grad():
            logits = logits_of(model, alone, torch.tensor([alone.ids.shape[1] - 1]))[0]
        torch.testing.assert_close(together[place], logits, rtol=1e-5, atol=1e-5)


def _text(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True)).strip()


def _greedy(model: PreTrainedModel, source: Sequence[int], most: int) -> list[int]:
    target: list[int] = []
    while len(target) < most and TOKENIZER.sep_token_id not in target:
        target.append(int(_next(model, source, target).argmax()))
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_one_beam_is_greedy_decoding_by_whole_passes(family: str) -> None:
    """Kept keys and values, padding on the left and a batch change nothing."""
    model = _model(family)
    generator = TextGenerator(model, TOKENIZER, DECODING)
    found = generator.generate(SOURCES)
    sources, _ = encode_sources(TOKENIZER, SOURCES, DECODING.max_source)
    expected = [_text(_greedy(model, source, 6)) for source in sources]
    assert found == expected
    assert len(set(found)) > 1


def test_a_configuration_may_not_turn_keys_off() -> None:
    """Trainings turn `use_cache` off, and what they save says so."""
    model = tiny_model("bert", head="tokens", attention="sdpa", seed=3, use_cache=False)
    expected = TextGenerator(_model("bert"), TOKENIZER, DECODING).generate(SOURCES)
    assert TextGenerator(model, TOKENIZER, DECODING).generate(SOURCES) == expected


def test_other_attentions_and_sources_of_other_kinds_are_not_read_wrongly() -> None:
    """Eager attention would add a mask of true and false to its scores."""
    expected = TextGenerator(_model("bert"), TOKENIZER, DECODING).generate(SOURCES)
    eager = tiny_model("bert", head="tokens", attention="eager", seed=3)
    generator = TextGenerator(eager, TOKENIZER, DECODING)
    assert generator.generate(SOURCES) == expected
    for wrong in ("ba be", [("ba", "be", "bi")]):
        with pytest.raises(InvalidConfigError, match="give a list of texts, or of pairs"):
            generator.generate(wrong)
    with pytest.raises(InvalidConfigError, match="at least one text"):
        generator.generate(SOURCES, batch_size=0)


def test_each_step_with_kept_keys_equals_a_whole_pass() -> None:
    model = _model("bert")
    generator = TextGenerator(model, TOKENIZER, DECODING)
    source = encode_sources(TOKENIZER, SOURCES[:1], 20)[0][0]
    whole_model: Any = generator.model  # transformers types the method for models with a class of its own
    output = whole_model.generate(
        torch.tensor([source]),
        attention_mask=torch.ones(1, len(source), dtype=torch.int64),
        max_new_tokens=5,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = output.sequences[0, len(source) :].tolist()
    for place, logits in enumerate(output.logits):
        inputs = _inputs(source, target[:place], [place])
        with torch.no_grad():
            whole = logits_of(model, inputs, torch.tensor([inputs.ids.shape[1] - 1]))
        torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_find_the_best_of_all_texts(penalty: float) -> None:
    """The vocabulary has six tokens: five words, and the end of a text."""
    end, words = TOKENIZER.sep_token_id, [7, 8, 9, 10, 11]
    model = _model("bert")
    allowed = torch.full((model.config.vocab_size,), -torch.inf)
    allowed[[end, *words]] = 0
    bias = model.get_output_embeddings().bias
    with torch.no_grad():
        bias += torch.where(allowed == 0, 0, -1e4)
    source = encode_sources(TOKENIZER, SOURCES[:1], 20)[0][0]
    most = 3

    def score(target: Sequence[int]) -> float:
        total: float = sum(
            float(_next(model, source, target[:place])[token]) for place, token in enumerate(target)
        )
        divisor: float = len(target) ** penalty
        return total / divisor

    ended = [(*begin, end) for length in range(most) for begin in itertools.product(words, repeat=length)]
    best = max([*ended, *itertools.product(words, repeat=most)], key=score)
    decoding = Decoding(max_source=20, max_new_tokens=most, num_beams=216, length_penalty=penalty)
    found = TextGenerator(model, TOKENIZER, decoding).generate(SOURCES[:1])
    assert found == [_text(best)]


def test_ngrams_of_the_source_may_come_and_those_of_the_text_once() -> None:
    """A model that says one word for ever says it once, although the source has it."""
    model = _model("bert")
    word = TOKENIZER.convert_tokens_to_ids(WORDS[0])
    with torch.no_grad():
        model.get_output_embeddings().bias[word] += 1e4
    generator = TextGenerator(model, TOKENIZER, DECODING)
    assert generator.generate([f"{WORDS[0]} {WORDS[1]}"]) == [" ".join([WORDS[0]] * 6)]
    decoding = DECODING.with_changes(no_repeat_ngram_size=1)
    (found,) = generator.generate([f"{WORDS[0]} {WORDS[1]}"], decoding=decoding)
    assert found.split().count(WORDS[0]) == 1


def test_a_text_has_at_least_its_fewest_tokens() -> None:
    model = _model("bert")
    with torch.no_grad():
        model.get_output_embeddings().bias[TOKENIZER.sep_token_id] += 1e4
    generator = TextGenerator(model, TOKENIZER, DECODING)
    assert generator.generate(SOURCES[:1]) == [""]
    (found,) = generator.generate(SOURCES[:1], decoding=DECODING.with_changes(min_new_tokens=3))
    assert len(found.split()) == 3


def test_the_loss_is_the_mean_over_copies() -> None:
    model, source, target = _model("bert"), [2, 5, 6, 3], [8, 9, 3]
    inputs = _inputs(source, target, range(3))
    labels = torch.tensor([[-100] * 7 + target])
    assert inputs.parts is not None
    assert inputs.positions is not None
    loss = MaskedTargets(model, 0.0)(
        inputs.ids, inputs.lengths, parts=inputs.parts, positions=inputs.positions, labels=labels
    ).loss
    alone = [
        torch.nn.functional.cross_entropy(
            logits_of(model, _inputs(source, target[:place], [place]), torch.tensor([4 + place])),
            torch.tensor([token]),
        )
        for place, token in enumerate(target)
    ]
    torch.testing.assert_close(loss, torch.stack(alone).mean())


def test_a_saved_generator_loads_and_is_a_masked_language_model(tmp_path: Path) -> None:
    generator = TextGenerator(_model("roberta"), TOKENIZER, DECODING.with_changes(num_beams=2))
    generator.save(tmp_path / "g")
    again = TextGenerator.load(tmp_path / "g")
    with pytest.raises(InvalidConfigError, match="--device nothing"):
        TextGenerator.load(tmp_path / "g", "nothing")
    assert again.decoding == generator.decoding
    assert again.generate(SOURCES) == generator.generate(SOURCES)
    AutoModelForMaskedLM.from_pretrained(tmp_path / "g")


def test_a_folder_that_generates_nothing_is_refused(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "teacher")
    with pytest.raises(TeacherError, match=f"was not fine-tuned to generate texts.*{GENERATION_FILE}"):
        TextGenerator.load(folder)
    (folder / GENERATION_FILE).write_text('{"max_source": 20, "max_new_tokens": 6}')
    with pytest.raises(TeacherError, match="lacks weights of its head"):
        TextGenerator.load(folder)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "cannot read"),
        ("[]", "not a JSON object"),
        ('{"max_new_tokens": 6}', "max_source"),
        ('{"max_source": 20, "max_new_tokens": 6, "num_beams": 100000}', "num_beams"),
        ('{"max_source": 20, "max_new_tokens": 6, "min_new_tokens": 6}', "min-new-tokens"),
        ('{"max_source": 20, "max_new_tokens": 6, "length_penalty": NaN}', "length_penalty"),
        ('{"max_source": 64, "max_new_tokens": 6}', "need 70 positions"),
    ],
)
def test_a_damaged_or_hostile_file_is_refused(content: str, named: str, tmp_path: Path) -> None:
    folder = tmp_path / "g"
    TextGenerator(_model("bert"), TOKENIZER, DECODING).save(folder)
    (folder / GENERATION_FILE).write_text(content)
    with pytest.raises(MiniLMCacheError, match=named):
        TextGenerator.load(folder)


@pytest.mark.parametrize("family", ["distilbert", "modernbert", "mpnet"])
def test_families_without_kept_keys_are_refused(family: str) -> None:
    model = tiny_model(family, head="tokens")
    with pytest.raises(TeacherError, match=r"keeps no keys and values.*BERT"):
        check_generates(model, DECODING, family)


def test_roberta_has_fewer_positions_than_rows() -> None:
    """Its table has rows for padding and for what is before it."""
    fits = Decoding(max_source=50, max_new_tokens=16)
    check_generates(_model("bert"), fits, "bert")
    with pytest.raises(InvalidConfigError, match="need 66 positions together"):
        check_generates(_model("roberta"), fits, "roberta")


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_new_positions_are_copies_of_the_first_ones(family: str) -> None:
    """A token at a new position is read as at the old one that was copied, and nothing else changes."""
    model = _model(family)
    own = positions_of(model, family)
    assert lengthened(model, own) is model
    longer = lengthened(model, own * 2 + 3)
    assert positions_of(longer, family) == own * 2 + 3
    ids, length = torch.tensor([[5, 7, 9]]), torch.tensor([3])

    def read(model: PreTrainedModel, first: int) -> torch.Tensor:
        places = torch.arange(first, first + 3)[None]
        parts = torch.zeros_like(ids)
        with torch.no_grad():
            return logits_of(model, Inputs(ids, length, parts=parts, positions=places), torch.arange(3))

    expected = read(model, 0)
    for first in (0, own, own * 2):
        torch.testing.assert_close(read(longer, first), expected, rtol=0, atol=0)
    assert not torch.equal(read(longer, 1), expected)
