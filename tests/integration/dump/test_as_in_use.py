"""A cache holds what its teacher gives in use: sentence-transformers and transformers are the oracle."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import processors
from transformers import AutoModel, PreTrainedTokenizerFast

from minilm_cache.cache import Cache, open_cache
from minilm_cache.corpus.template import template_of
from minilm_cache.errors import InvalidConfigError, MiniLMCacheError
from minilm_cache.evaluate.embeddings import sentence_encoder
from minilm_cache.evaluate.models import Evaluated
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.states import POOLED
from minilm_cache.train.card import student_prompts
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import SPECIAL, VOCABULARY, World, dump_arguments, save_teacher, write_corpus

POOLED_ONLY: dict[str, Any] = {"codec": "none", "pooled": True, "packing": "records", "min_cosine": 0.9999}
TEMPLATES = {
    "usual": "[CLS] $A [SEP]",
    "no end": "[CLS] $A",
    "no beginning": "$A [SEP]",
    "nothing": "$A",
    "other names": "[MASK] $A [UNK]",
    "two of each": "[CLS] [CLS] $A [SEP] [SEP]",
    "swapped": "[SEP] $A [CLS]",
}
POOLINGS = ("mean", "cls", "max", "lasttoken")


def use_template(folder: Path, single: str, **settings: object) -> None:
    """Give a teacher's tokenizer another form of sequences, and settings of its own."""
    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1",
        special_tokens=[(token, number) for number, token in enumerate(SPECIAL)],
    )
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def texts_of(cache: Cache, world: World) -> list[str]:
    """Return the document of each sequence, which the cut words at its end may have left."""
    documents = world.corpus.read_text().strip().split("\n\n")
    tokenizer = load_tokenizer(world.teacher)
    texts = []
    for sequence in cache:
        words = str(tokenizer.decode(sequence.input_ids, skip_special_tokens=True))
        texts.append(next(document for document in documents if document.startswith(words)))
    return texts


def least_cosine(world: World, cache: Cache) -> float:
    """Return the least cosine of stored vectors with those of the teacher's own `encode`."""
    teacher = SentenceTransformer(str(world.teacher), device="cpu")
    expected = torch.from_numpy(teacher.encode(texts_of(cache, world)))
    stored = torch.stack([sequence.states()[POOLED][0] for sequence in cache])
    return float(torch.cosine_similarity(stored, expected, dim=-1).min())


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_vectors_are_those_of_encode_whatever_the_template(world: World, template: str, pooling: str) -> None:
    save_encoder(world.teacher, pooling)
    use_template(world.teacher, TEMPLATES[template], model_max_length=32)
    settings = world.teacher / "sentence_bert_config.json"
    settings.write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    result = world.dump(**POOLED_ONLY)
    assert least_cosine(world, open_cache(result.path)) >= 0.9995
    assert (result.manifest.identity.packing.template is None) == (template == "usual")


@pytest.mark.parametrize("packing", ["packed", "records"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_relations_are_those_of_the_tokenizers_own_sequences(
    world: World, template: str, packing: str
) -> None:
    use_template(world.teacher, TEMPLATES[template])
    cache = open_cache(world.dump(codec="dense", packing=packing).path)
    tokenizer = load_tokenizer(world.teacher)
    own = tokenizer("ba", add_special_tokens=True)["input_ids"]
    place = own.index(tokenizer.convert_tokens_to_ids("ba"))
    model = AutoModel.from_pretrained(world.teacher, attn_implementation="eager").eval()
    for sequence in list(cache)[:8]:
        ids = sequence.input_ids
        assert ids[:place].tolist() == own[:place]
        assert ids[len(ids) - len(own) + place + 1 :].tolist() == own[place + 1 :]
        if packing == "records":
            text = tokenizer.decode(ids[place : len(ids) - len(own) + place + 1])
            assert tokenizer(text)["input_ids"] == ids.tolist()
        with torch.no_grad():
            expected = model(ids[None], output_attentions=True).attentions[-1][0]
        torch.testing.assert_close(sequence.relation("attention"), expected, atol=5e-4, rtol=0)  # float16


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_padding_on_the_left_is_as_in_use_or_refused(tmp_path: Path, family: str) -> None:
    """Where padding shifts a model's positions, `encode` depends on what else is in the batch."""
    world = World(
        tmp_path, save_teacher(tmp_path / "teacher", family, pad_token_id=0), tmp_path / "corpus.txt"
    )
    world.corpus.write_text("\n\n".join("ba be bi " * size for size in range(1, 10)) + "\n")
    save_encoder(world.teacher, "lasttoken", max_length=32)
    use_template(world.teacher, TEMPLATES["usual"], padding_side="left", model_max_length=32)
    if family == "bert":
        with pytest.raises(MiniLMCacheError, match="pads on the left"):
            world.dump(**POOLED_ONLY)
    else:
        assert least_cosine(world, open_cache(world.dump(**POOLED_ONLY).path)) >= 0.9995


PROMPTS = {"prompts": {"query": "ba be ", "document": "", "plain": "bo "}}


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "config_sentence_transformers.json",
            PROMPTS | {"default_prompt_name": "missing"},
            "not among its prompts",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "own"}, "not among its prompts"),
        ("sentence_bert_config.json", {"max_seq_length": 16}, "--max-length 16 at most"),
        ("sentence_roberta_config.json", {"max_seq_length": 16}, "--max-length 16 at most"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"padding": True}}},
            "processing_kwargs",
        ),
        ("sentence_bert_config.json", {"config_kwargs": {"num_hidden_layers": 1}}, "config_kwargs"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task"),
        ("tokenizer_config.json", {"truncation_side": "left"}, "truncation_side"),
        ("tokenizer_config.json", {"model_max_length": 20}, "--max-length 20 at most"),
    ],
)
def test_what_a_folder_declares_is_refused_where_it_is_not_done(
    world: World, file: str, content: dict[str, object], says: str
) -> None:
    save_encoder(world.teacher, "mean", max_length=32)
    if file != "sentence_bert_config.json":
        (world.teacher / "sentence_bert_config.json").unlink()
    path = world.teacher / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | content))
    with pytest.raises(MiniLMCacheError, match=says):
        world.dump(**POOLED_ONLY)


@pytest.mark.parametrize("default", [None, "document"])
def test_prompts_that_no_text_gets_are_accepted(world: World, default: str | None) -> None:
    save_encoder(world.teacher, "mean", max_length=32)
    content = json.dumps(PROMPTS | {"default_prompt_name": default, "similarity_fn_name": "cosine"})
    (world.teacher / "config_sentence_transformers.json").write_text(content)
    assert least_cosine(world, open_cache(world.dump(**POOLED_ONLY).path)) >= 0.9995


def test_scores_refuse_a_prompt_too(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean")
    content = json.dumps(PROMPTS | {"default_prompt_name": "query"})
    (world.teacher / "config_sentence_transformers.json").write_text(content)
    code, _, err = command("embeddings", world.teacher, "--data", world.root)
    assert code in (1, 2)
    assert "Traceback" not in err


def test_a_template_that_depends_on_the_text_is_refused(world: World) -> None:
    names = ["input_ids", "token_type_ids", "attention_mask"]
    use_template(world.teacher, "[CLS]:1 $A:1 [SEP]:1", model_input_names=names)
    with pytest.raises(MiniLMCacheError, match="another segment"):
        world.dump()
    use_template(world.teacher, "[CLS] " * 12 + "$A [SEP]")
    with pytest.raises(InvalidConfigError, match="no room"):
        world.dump(max_length=12, k=4)
    use_template(world.teacher, "[CLS] " * 17 + "$A [SEP]")
    with pytest.raises(MiniLMCacheError, match="18 tokens around"):
        world.dump()


def test_the_usual_template_leaves_documents_as_they_were(world: World) -> None:
    """Caches of the first releases keep their fingerprints: the packing says nothing of it."""
    packing = json.loads((world.dump().path / "manifest.json").read_text())["identity"]["packing"]
    assert set(packing) == {"mode", "max_length", "max_tokens", "seed", "split"}
    tokenizer = load_tokenizer(world.teacher)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert template_of(tokenizer).before == (2,)


ROLES: dict[str, Any] = {"prompts": {"query": "ba be ", "document": ""}, "default_prompt_name": None}


@pytest.mark.parametrize(
    ("settings", "default", "prompt"),
    [
        ({"prompt_name": "query"}, None, "ba be "),
        ({"prompt": "du "}, None, "du "),
        ({"prompt_name": "document"}, "query", ""),
        ({}, "query", "ba be "),
    ],
)
def test_prompts_stand_before_texts_and_students_have_them(
    world: World, settings: dict[str, str], default: str | None, prompt: str
) -> None:
    save_encoder(world.teacher, "mean", max_length=32)
    own = ROLES | {"default_prompt_name": default}
    (world.teacher / "config_sentence_transformers.json").write_text(json.dumps(own))
    path = world.dump(**POOLED_ONLY, **settings).path
    cache, teacher = open_cache(path), SentenceTransformer(str(world.teacher), device="cpu")
    documents = sorted(world.corpus.read_text().strip().split("\n\n"))
    expected: Any = teacher.encode(documents, prompt=prompt)
    ids = [
        teacher.tokenizer(prompt + text, truncation=True, max_length=32)["input_ids"] for text in documents
    ]
    for sequence in cache:
        place = ids.index(sequence.input_ids.tolist())
        stored = sequence.states()[POOLED][0]
        assert float(torch.cosine_similarity(stored, torch.from_numpy(expected[place]), 0)) >= 0.9995
    assert cache.manifest.identity.packing.prompt == (prompt or None)

    config = validated(
        TrainConfig, {"objective": "embedding", "arch": ("1x16",), "steps": 2, "device": "cpu"}
    )
    student = train_students(config, path, session=Session(world.home)).student_path("1x16")
    opened = SentenceTransformer(str(student), device="cpu")
    given = {"prompt": prompt} if "prompt" in settings else {}
    assert opened.prompts == ROLES["prompts"] | given
    told = prompt != "" and opened.default_prompt_name is None
    assert ("prompt_name=" in (student / "README.md").read_text()) == told
    # A default that the student has not read is none of its own.
    assert opened.default_prompt_name == (default if prompt == ROLES["prompts"].get(default) else None)
    ours = sentence_encoder(Evaluated(name="student", folder=student), 32, "cpu")
    torch.testing.assert_close(ours.encode(documents[:4]), opened.encode(documents[:4]))


def test_words_that_were_given_replace_no_prompt_of_the_teacher(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean")
    own = {"prompts": {"prompt": "ba be "}, "default_prompt_name": None}
    (world.teacher / "config_sentence_transformers.json").write_text(json.dumps(own))
    words = dump_arguments(world, "--for", "embedding", "--prompt", "bo bu ", k=None)
    assert command(*words)[0] == 0
    given = student_prompts(open_cache(world.root / "cache").reader)
    assert given.by_name == {"prompt": "ba be ", "prompt-2": "bo bu "}


@pytest.mark.parametrize(("loss", "similarity"), [("mse", "dot"), ("cosine", "cosine")])
def test_students_that_learn_lengths_are_compared_as_their_teacher(
    world: World, loss: str, similarity: str
) -> None:
    save_encoder(world.teacher, "mean", max_length=32, normalize=False)
    (world.teacher / "config_sentence_transformers.json").write_text(
        json.dumps({"similarity_fn_name": "dot"})
    )
    path = world.dump(**POOLED_ONLY).path
    settings = {"objective": "embedding", "arch": ("1x16",), "steps": 2, "device": "cpu", "loss": loss}
    run = train_students(validated(TrainConfig, settings), path, session=Session(world.home))

    opened = SentenceTransformer(str(run.student_path("1x16")), device="cpu")
    assert opened.similarity_fn_name == similarity


BY_ROLE = {"query": "du du ", "document": "fa "}


def write_roles(file: Path) -> list[str]:
    """Write records of three roles, and of no text; return the texts with the prompts of their roles."""
    texts = [("query", "ba be bi"), ("document", "da de di do"), ("", "bo bu"), ("query", " ")]
    rows = [
        {"text": f"{text} {word}" if text.strip() else text, "role": role, "other": number}
        for number, word in enumerate(VOCABULARY[5:29])
        for role, text in texts
    ]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:  # a record may leave out what it has nothing to say of, the first one, too
        first = {"text": "fa fe", "other": -1}
        file.write_text("".join(json.dumps(row) + "\n" for row in [first, *rows]))
        rows = [{**first, "role": ""}, *rows]
    return [BY_ROLE.get(str(row["role"]), "") + str(row["text"]) for row in rows if str(row["text"]).strip()]


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_column_names_the_prompt_of_each_text(world: World, command: Command, ending: str) -> None:
    save_encoder(world.teacher, "mean", max_length=32)
    own = {"prompts": BY_ROLE, "default_prompt_name": None}
    (world.teacher / "config_sentence_transformers.json").write_text(json.dumps(own))
    world = replace(world, corpus=world.root / f"texts{ending}")
    expected = write_roles(world.corpus)
    plain = world.dump("plain", **POOLED_ONLY)
    path = world.dump(**POOLED_ONLY, role_column="role").path
    cache, teacher = open_cache(path), SentenceTransformer(str(world.teacher), device="cpu")
    found = [teacher.tokenizer.decode(sequence.input_ids[1:-1].tolist()) for sequence in cache]
    assert sorted(found) == sorted(expected)
    for sequence, vector in zip(cache, teacher.encode(found), strict=True):
        stored = sequence.states()[POOLED][0]
        assert float(torch.cosine_similarity(stored, torch.from_numpy(vector), 0)) >= 0.999
    assert cache.manifest.identity.corpus.sha256 != plain.manifest.identity.corpus.sha256
    assert cache.manifest.texts_sha256 == plain.manifest.texts_sha256
    code, _, err = command("verify", path, "--teacher", world.teacher, "--corpus", world.corpus)
    assert code == 0, err
    assert "named by column 'role'" in command("info", path)[1]
    code, _, err = command("export", path, world.root / "vectors.parquet")
    assert code == 0, err
    assert "texts are written with the prompts that they begin with" in err

    words = ("dump", "--teacher", world.teacher, "--for", "embedding", "--max-length", 32)
    text = write_corpus(world.root / "t.txt")
    for corpus, settings, code, says in (
        (world.corpus, ("--role-column", "part"), 1, ("no column 'part'", "role", "--role-column")),
        (world.corpus, ("--role-column", "other"), 2, ("has the role '", "query, document")),
        (world.corpus, ("--role-column", "role", "--prompt", "a"), 2, ("leave out --prompt",)),
        (world.corpus, ("--role-column", "document"), 1, ("mark copies of one text", "Rename it")),
        (text, ("--role-column", "role"), 1, ("no columns",)),
    ):
        command.fails(*words, "--corpus", corpus, *settings, "--out", world.root / "x", code=code, says=says)
    assert not (world.root / "x").exists()


def test_prompts_that_are_not_there_are_refused(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean", max_length=32)
    words = (*dump_arguments(world), "--for", "embedding")
    file = world.teacher / "config_sentence_transformers.json"
    file.unlink()
    command.fails(*words, "--prompt-name", "query", code=2, says=("no such prompt", "none at all"))
    file.write_text(json.dumps(ROLES))
    command.fails(*words, "--prompt-name", "passage", code=2, says=("no such prompt", "query, document"))
    command.fails(*words, "--prompt", "a", "--prompt-name", "query", code=2, says="give one of them")
    command.fails(*dump_arguments(world), "--prompt", "a ", code=2, says="--packing records")
    damaged: list[object] = [[], {"prompts": ["a"]}, {"prompts": {"a": 3}}, {"prompts": {"a": "b" * 9999}}]
    for content in damaged:
        file.write_text(json.dumps(content))
        command.fails(*words, code=1, says="config_sentence_transformers.json")
    file.write_text(json.dumps(ROLES))
    pooling = next(world.teacher.glob("1_Pooling/config.json"))
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    command.fails(*words, "--prompt-name", "query", code=1, says="include_prompt")
    code, _, err = command(*words)
    assert code == 0, err
    assert "leaves its prompts out of its pooling" in err
    # A student would pool the tokens of these prompts, and so give other vectors than the teacher.
    assert student_prompts(open_cache(str(world.root / "cache")).reader).by_name == {}


def test_a_cache_gets_the_prompts_that_its_teacher_has_now(world: World, command: Command) -> None:
    """A dump of an earlier release names no such file; prompts that no text got may change, too."""
    save_encoder(world.teacher, "mean", max_length=32)
    file = world.teacher / "config_sentence_transformers.json"
    file.unlink()
    path = world.dump(**POOLED_ONLY).path
    pooled = ("--codec", "none", "--pooled", "--packing", "records", "--min-cosine", 0.9999)
    plain, check = dump_arguments(world, *pooled, k=None), ("verify", path, "--teacher", world.teacher)
    for prompts in ({"query": "ba "}, {"query": "du "}, {}):
        file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
        code, _, err = command(*plain)
        assert code == 0, err
        assert "prompts or its similarity are others than in this cache" in err
        assert student_prompts(open_cache(str(path)).reader).by_name == prompts
        assert "others than in this cache" not in command(*plain)[2]
        assert command(*check)[0] == 0
    same = {"default_prompt_name": None, "prompts": {"document": ""}, "similarity_fn_name": "cosine"}
    file.write_text(json.dumps(same))
    assert command(*check)[0] == 0, "it says the same in other words"
    assert "others than in this cache" not in command(*plain)[2]
    file.write_text(json.dumps({"prompts": {"query": "bo "}, "default_prompt_name": None}))
    command.fails(*check, code=3, says="the teacher's prompts or its similarity")

    file.write_text(json.dumps(ROLES | {"default_prompt_name": "query"}))
    assert world.dump("packed").manifest.identity.packing.prompt is None
    off = world.dump("off", **POOLED_ONLY, prompt_name="none").manifest
    assert off.identity.packing.prompt is None
    words = ("dump", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    assert command(*words, "--for", "embedding", "--out", world.root / "on")[0] == 0
    settings = {"objective": "embedding", "arch": ("1x16",), "steps": 2, "device": "cpu"}
    config = validated(TrainConfig, settings)
    result = train_students(config, world.root / "on", out=world.root / "run", session=Session(world.home))
    code, _, err = command("report", result.path, "--out", world.root / "page.html")
    assert code == 0, err
    assert "--prompt &#39;ba be &#39;" in (world.root / "page.html").read_text()


def test_a_cache_with_prompts_is_verified_with_its_text(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean", max_length=32)
    path = world.dump(**POOLED_ONLY, prompt="ba ").path
    words = ("verify", path, "--teacher", world.teacher, "--corpus", world.corpus)
    code, _, err = command(*words)
    assert code == 0, err
    code, printed, _ = command("info", path)
    assert code == 0
    assert "'ba ' before every text" in printed
