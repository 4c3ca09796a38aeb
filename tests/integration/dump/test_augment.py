"""TinyBERT's augmentation, judged by plain transformers: candidates, their shares, and what is left alone."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.fixtures import Command
from tests.support import SPECIAL, WORDS, save_teacher

LONG = ("baka", "dedo", "fufi")
"""Words of two pieces."""
TEXT = "bu baka, de di do! dedo fa."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model with a head for masked tokens and a tokenizer of word pieces."""
    folder = tmp_path_factory.mktemp("model") / "model"
    pieces = [*SPECIAL, *WORDS, "##ka", "##do", "##fi", ",", ".", "!"]
    save_teacher(folder, head="tokens", vocab_size=len(pieces))
    tokenizer = Tokenizer(
        models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(names, SPECIAL, strict=True))
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of sentences."""
    file = tmp_path_factory.mktemp("corpus") / "task.jsonl"
    sentences = [TEXT, "ba be bi bo", " ".join(LONG), "bu bu fa"]
    file.write_text("".join(json.dumps({"sentence": one, "label": 1}) + "\n" for one in sentences))
    return file


def augmented(
    command: Command, model: Path, corpus: Path, out: Path, *more: object
) -> list[dict[str, object]]:
    """Return the lines that the command writes."""
    words = ("augment", "--teacher", model, "--corpus", corpus, "--text-column", "sentence", "--out", out)
    code, told, err = command(*words, "--max-length", 64, "--json", *more)
    assert code == 0, err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(told) == {"file": str(out), "documents": 4, "lines": len(lines)}
    return lines


def likeliest(model: Path, text: str, at: int, count: int) -> set[str]:
    """Return the words that a whole model finds likeliest in place of a text's token, whole words only."""
    whole = AutoModelForMaskedLM.from_pretrained(model).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    ids = tokenizer(text)["input_ids"]
    ids[at] = tokenizer.mask_token_id
    with torch.no_grad():
        logits = whole(input_ids=torch.tensor([ids])).logits[0, at]
    order = tokenizer.convert_ids_to_tokens(logits.argsort(descending=True).tolist())
    return set([token for token in order if token in WORDS][:count])


def likeliest_of_pair(model: Path, text: str, at: int, count: int) -> set[str]:
    """As `likeliest`, with the text itself as a second segment, as TinyBERT's authors read it."""
    whole = AutoModelForMaskedLM.from_pretrained(model).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    read = tokenizer(text, text, return_tensors="pt", return_token_type_ids=True)
    assert read["token_type_ids"].unique().tolist() == [0, 1]
    read["input_ids"][0, at] = tokenizer.mask_token_id
    with torch.no_grad():
        logits = whole(**read).logits[0, at]
    order = tokenizer.convert_ids_to_tokens(logits.argsort(descending=True).tolist())
    return set([token for token in order if token in WORDS][:count])


def test_the_authors_code_leaves_stop_words_and_reads_the_text_twice(
    command: Command, model: Path, corpus: Path, tmp_path: Path
) -> None:
    lines = augmented(
        *(command, model, corpus, tmp_path / "out.jsonl"),
        *("--copies", 300, "--candidates", 4, "--replace", 0.5, "--device", "cpu"),
    )
    own = [line["text"] for line in lines if line["document"] == 0]
    split = [str(one).replace(",", " ,").replace("!", " !").replace(".", " .").split() for one in own]
    columns = [{words[at] for words in split} for at in range(10)]
    assert columns[5] == {"do"}, "a stop word stays"
    for word, token in ((0, 1), (3, 5), (4, 6), (8, 11)):
        assert columns[word] - {split[0][word]} <= likeliest_of_pair(model, TEXT, token, 4)
        assert len(columns[word]) >= 4
    assert columns[1] - {"baka"} == nearest(model, "baka", 4)


def test_copies_take_the_models_words_and_the_nearest_ones(
    command: Command, model: Path, corpus: Path, tmp_path: Path
) -> None:
    lines = augmented(
        *(command, model, corpus, tmp_path / "out.jsonl"),
        *("--copies", 300, "--candidates", 4, "--replace", 0.5, "--device", "cpu", "--form", "paper"),
    )
    own = [line["text"] for line in lines if line["document"] == 0]
    assert own[0] == TEXT
    assert len(set(own)) == len(own) > 200
    split = [str(one).replace(",", " ,").replace("!", " !").replace(".", " .").split() for one in own]
    assert {len(words) for words in split} == {10}, "punctuation and spaces stay"
    columns = [{words[at] for words in split} for at in range(10)]
    # Tokens of the text: [CLS] bu ba ##ka , de di do ! de ##do fa . [SEP]
    for word, token in ((0, 1), (3, 5), (4, 6), (5, 7), (8, 11)):
        assert columns[word] - {split[0][word]} <= likeliest(model, TEXT, token, 4)
        assert len(columns[word]) >= 4
    assert columns[2] == {","}
    assert columns[6] == {"!"}
    assert columns[1] - {"baka"} == nearest(model, "baka", 4)


def nearest(model: Path, word: str, count: int) -> set[str]:
    """Return the words of the corpus whose mean of input embeddings is nearest, by plain torch."""
    table = AutoModelForMaskedLM.from_pretrained(model).get_input_embeddings().weight.detach()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    words = sorted({"bu", "baka", "de", "di", "do", "dedo", "fa", "ba", "be", "bi", "bo", "fufi"})

    def mean(one: str) -> torch.Tensor:
        found: torch.Tensor = table[torch.tensor(tokenizer(one, add_special_tokens=False)["input_ids"])].mean(
            0
        )
        return found

    similar = {one: float(F.cosine_similarity(mean(one), mean(word), dim=0)) for one in words if one != word}
    return set(sorted(similar, key=lambda one: -similar[one])[:count])


def test_words_are_replaced_as_often_as_asked(
    command: Command, model: Path, corpus: Path, tmp_path: Path
) -> None:
    plain, shares = ["ba", "be", "bi", "bo"], []
    for replace in (0.1, 0.6):
        out = tmp_path / f"{replace}.jsonl"
        lines = augmented(
            command, model, corpus, out, "--copies", 400, "--replace", replace, "--form", "paper"
        )
        copies = [str(line["text"]).split() for line in lines if line["document"] == 1][1:]
        shares.append(
            sum(one != word for copy in copies for one, word in zip(copy, plain, strict=True)) / len(copies)
        )
    assert shares[0] < shares[1]


def test_copies_are_a_function_of_the_seed(
    command: Command, model: Path, corpus: Path, tmp_path: Path
) -> None:
    first = augmented(command, model, corpus, tmp_path / "a", "--copies", 5)
    again = augmented(command, model, corpus, tmp_path / "b", "--copies", 5)
    other = augmented(command, model, corpus, tmp_path / "c", "--copies", 5, "--seed", 1)
    assert first == again != other


def test_what_cannot_be_augmented_is_refused(
    command: Command, model: Path, corpus: Path, tmp_path: Path
) -> None:
    plain = save_teacher(tmp_path / "plain")
    out = tmp_path / "out.jsonl"
    base = ("augment", "--corpus", corpus, "--text-column", "sentence", "--max-length", 64)
    command.fails(*base, "--teacher", plain, "--out", out, code=1, says="no head for masked tokens")
    command.fails(*base, "--teacher", model, "--out", out, "--replace", 0, code=2, says="--replace 0")
    wrong = ("augment", "--corpus", corpus, "--teacher", model, "--out", out, "--max-length", 64)
    command.fails(*wrong[:-2], code=2, says="has positions for")
    command.fails(*wrong, code=1, says="no column 'text'")
    out.write_text("")
    command.fails(*base, "--teacher", model, "--out", out, code=2, says="exists")
    assert out.read_text() == ""


def test_the_task_specific_stage_goes_the_whole_way(
    command: Command, model: Path, corpus: Path, tmp_path: Path
) -> None:
    """Augmented text, a fine-tuned teacher's cache, intermediate layers, then its answers."""
    text = tmp_path / "more.jsonl"
    augmented(command, model, corpus, text, "--copies", 40, "--replace", 0.5)
    teacher = save_teacher(tmp_path / "teacher", head="sequences", vocab_size=len(SPECIAL) + len(WORDS) + 6)
    for file in model.glob("tokenizer*"):
        (teacher / file.name).write_bytes(file.read_bytes())
    cache, first, second = tmp_path / "cache", tmp_path / "intermediate", tmp_path / "prediction"
    served = ("--for", "tinybert,tinybert-prediction", "--max-kl", 0.05, "--packing", "records")
    student = ("train", cache, "--arch", "2x16", "--objective")
    stages: list[tuple[object, ...]] = [
        (
            "dump",
            "--teacher",
            teacher,
            "--corpus",
            tmp_path / "more.jsonl",
            "--max-length",
            32,
            *served,
            "--out",
            cache,
        ),
        (*student, "tinybert", "--steps", 10, "--out", first),
        (*student, "tinybert-prediction", "--init", first, "--steps", 40, "--lr", 5e-3, "--out", second),
    ]
    for words in stages:
        code, _, err = command(*words, "--device", "cpu")
        assert code == 0, err
    record = json.loads((second / "run.json").read_text())["students"][0]
    assert record["held_out_after"]["prediction"] < record["held_out_before"]["prediction"]
    assert AutoModelForSequenceClassification.from_pretrained(second / "students/2x16").config.num_labels == 2


def test_both_texts_of_pairs_get_the_copies_that_they_get_alone(
    model: Path, tmp_path: Path, command: Command
) -> None:
    """The first text is replaced as it is without the second; groups are dumped as pairs of one document."""
    rows = [{"one": TEXT, "other": "bu baka"}, {"one": "ba be bi bo", "other": "dedo, fa"}]
    pairs, single = tmp_path / "pairs.jsonl", tmp_path / "single.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    single.write_text("".join(json.dumps({"text": row["one"]}) + "\n" for row in rows))
    words = ("augment", "--teacher", model, "--max-length", 64, "--copies", 3, "--corpus")
    for file, more in ((pairs, ("--pair-columns", "one,other")), (single, ())):
        code, _, err = command(*words, file, *more, "--out", file.with_suffix(".out.jsonl"))
        assert code == 0, err
    found, alone = (
        [json.loads(line) for line in file.with_suffix(".out.jsonl").read_text().splitlines()]
        for file in (pairs, single)
    )
    assert [row for row in found if (row["first"], row["second"]) == (TEXT, "bu baka")]
    for number in (0, 1):
        of_pairs = [row["first"] for row in found if row["document"] == number]
        assert {row["text"] for row in alone if row["document"] == number} <= set(of_pairs)
    assert len({row["second"] for row in found}) > 2
    lists = tmp_path / "lists.jsonl"
    lists.write_text(json.dumps({"one": "ba", "other": ["be", "bi"]}) + "\n")
    groups = (*words, lists, "--pair-columns", "one,other", "--out", tmp_path / "no")
    command.fails(*groups, code=2, says="queries with several documents")
    both = (*words, pairs, "--pair-columns", "one,other", "--text-column", "one")
    command.fails(*both, "--out", tmp_path / "no", code=2, says="--text-column and --pair-columns")


def test_records_without_a_mark_are_texts_of_their_own(command: Command, model: Path, tmp_path: Path) -> None:
    marks = ["a", "a", None, "", None]
    rows = [json.dumps({"text": f"ba be {n}", "document": mark}) for n, mark in enumerate(marks)]
    (tmp_path / "marked.jsonl").write_text("\n".join(rows))
    words = ("augment", "--teacher", model, "--max-length", 64, "--corpus", tmp_path / "marked.jsonl")
    assert command(*words, "--copies", 1, "--out", tmp_path / "out.jsonl")[0] == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    known = {line["text"]: line["document"] for line in lines}
    assert [known[f"ba be {n}"] for n in range(5)] == [0, 0, 2, 3, 4]


def test_copies_of_copies_stay_with_their_text(
    command: Command, model: Path, corpus: Path, tmp_path: Path
) -> None:
    first = augmented(command, model, corpus, tmp_path / "first.jsonl", "--copies", 2)
    words = ("augment", "--teacher", model, "--corpus", tmp_path / "first.jsonl", "--max-length", 64)
    assert command(*words, "--copies", 2, "--out", tmp_path / "second.jsonl")[0] == 0
    second = [json.loads(line) for line in (tmp_path / "second.jsonl").read_text().splitlines()]
    marks: dict[object, set[object]] = {}
    texts = {row["text"]: row["document"] for row in first}
    for row in second:
        if row["text"] in texts:
            marks.setdefault(texts[row["text"]], set()).add(row["document"])
    assert len(marks) == 4
    assert all(len(of_text) == 1 for of_text in marks.values())
