"""Students cut from another model than the cache's teacher: `--init slice --init-teacher DONOR`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from minilm_cache.cache import open_cache
from minilm_cache.errors import IdentityMismatchError, InterruptedRunError, InvalidConfigError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.student_tokens import OtherTokenizer
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.objectives.check import choose_objective
from minilm_cache.settings import validated
from minilm_cache.storage_schema.states import POOLED
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.initial import initial_weights
from minilm_cache.train.setup import student_shapes
from tests.fixtures import Command
from tests.support import SPECIAL, VOCABULARY, WORDS, World, save_teacher, tiny_model, tiny_tokenizer

LETTERS = [*SPECIAL, *"abcdefghiklmnoprstu"]


def save_donor(folder: Path, family: str = "electra", **changes: Any) -> Path:
    """Save a model of another family, whose tokenizer reads letters."""
    vocab = {letter: number for number, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tiny_model(family, vocab_size=len(LETTERS), seed=5, **changes).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in names.items()}
    ).save_pretrained(folder)
    return folder


def test_texts_are_cut_on_the_side_that_students_cut_in_use(tmp_path: Path) -> None:
    donor, words = save_donor(tmp_path / "donor"), WORDS[:12]
    config = json.loads((donor / "tokenizer_config.json").read_text())
    (donor / "tokenizer_config.json").write_text(json.dumps({**config, "truncation_side": "left"}))
    own, cached = load_tokenizer(donor, has_ends=False), tiny_tokenizer()
    assert own.truncation_side == "left"
    whole = torch.tensor([cached(" ".join(words))["input_ids"]])
    read = OtherTokenizer(cached, own).read(Inputs.full(whole), 12).ids[0]
    assert own.convert_ids_to_tokens(read.tolist()) == ["[CLS]", *"".join(words)[:10], "[SEP]"]


@pytest.mark.parametrize("init", ["slice", "teacher-layers"])
def test_a_donor_with_the_tokenizer_of_the_cache_serves_every_objective(
    world: World, tmp_path: Path, command: Command, init: str
) -> None:
    world.dump(codec="vectors")
    donor = save_teacher(tmp_path / "donor", "roberta", seed=3)
    arch = "1x32:ff64"
    result = world.train("run", init=init, init_teacher=str(donor), arch=(arch,))
    (student,) = result.record.students
    assert student.init == "another model"
    assert student.begun_with is not None
    assert "donor" in student.begun_with
    assert str(tmp_path) not in student.begun_with
    model = AutoModel.from_pretrained(result.student_path(arch))
    assert model.config.model_type == "roberta"
    assert result.record.identity.vocab is None
    code, _, err = command("report", result.path, "--out", tmp_path / "page.html", "--teacher", world.teacher)
    assert code == 0, err


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_students_read_texts_by_the_tokenizer_of_their_donor(
    world: World, tmp_path: Path, command: Command, family: str
) -> None:
    """Vectors are all that students learn, also of a decoder; the donor reads shorter texts."""
    save_teacher(world.teacher, family)
    pooling = "lasttoken" if family == "llama" else "mean"
    world.dump(**{"for": "embedding", "pooling": pooling, "codec": "none"})
    donor = save_donor(tmp_path / "donor")
    said = json.loads((donor / "tokenizer_config.json").read_text())
    (donor / "tokenizer_config.json").write_text(json.dumps({**said, "model_max_length": 12}))
    settings: dict[str, Any] = {"objective": "embedding", "init_teacher": str(donor)}
    result = world.train("run", **settings)
    folder = result.student_path("1x32")
    assert load_tokenizer(folder).get_vocab() == load_tokenizer(donor).get_vocab()
    encoder = SentenceTransformer(str(folder), device="cpu")
    vectors: Any = encoder.encode(["ba be"])
    assert vectors.shape == (1, 32)
    longest = open_cache(world.root / "cache").manifest.identity.packing.max_length
    assert encoder.max_seq_length == AutoTokenizer.from_pretrained(folder).model_max_length == longest
    assert result.record.identity.vocab is not None

    config = validated(TrainConfig, {"arch": ("1x32",), "init": "slice", "device": "cpu", **settings})
    cache = open_cache(world.root / "cache")
    objective = choose_objective(config, cache, arch=config.arch)
    shapes = student_shapes(config, objective)
    beginnings = initial_weights(config, cache, shapes=shapes, head=None, home=world.home)
    wanted = WantedTargets(kinds=(), signals=(POOLED,))
    reader = BatchReader(cache, wanted, pad_token=0, device=torch.device("cpu"), tokens=beginnings.tokens)
    (batch,) = reader.batches_of(range(4), 4)
    own, cached = load_tokenizer(donor), load_tokenizer(world.teacher, has_ends=False)
    for row, length, sequence in zip(batch.inputs.ids, batch.inputs.lengths, cache[:4], strict=True):
        text = str(cached.decode(sequence.input_ids, skip_special_tokens=True))
        longest = cache.manifest.identity.packing.max_length
        assert row[:length].tolist() == own(text, truncation=True, max_length=longest)["input_ids"]
    code, _, err = command("report", result.path, "--out", tmp_path / "page.html")
    assert code == 0, err
    assert "another vocabulary" in (tmp_path / "page.html").read_text()


def test_words_that_a_donor_cannot_learn_are_counted(world: World, tmp_path: Path, command: Command) -> None:
    """Each text has two words that the cache's tokenizer does not know, of six tokens."""
    donor = save_donor(tmp_path / "donor")
    said = {}
    for name, word in (("known", "be"), ("unknown", "\N{SNOWMAN}")):
        world.corpus.write_text("".join(f"ba {word} be {word}\n" for _ in range(60)))
        cache = world.dump(name, **{"for": "embedding", "pooling": "mean", "documents": "lines"}).path
        asked = ("--objective", "embedding", "--arch", "1x32", "--init", "slice", "--init-teacher", donor)
        code, _, said[name] = command("train", cache, *asked, "--steps", 2, "--out", tmp_path / f"run-{name}")
        assert code == 0, said[name]
    assert "33.33% of the tokens in this cache's last 60 sequences are words that its" in said["unknown"]
    assert "does not know" not in said["known"]


def test_a_stopped_run_ends_as_one_that_was_not(world: World, tmp_path: Path) -> None:
    world.dump(**{"for": "embedding", "pooling": "mean"})
    world.resumes_the_same("1x32", objective="embedding", init_teacher=str(save_donor(tmp_path / "donor")))


def test_a_run_of_a_donor_is_resumed_with_its_donor(world: World, tmp_path: Path) -> None:
    world.dump(codec="vectors")
    donor = save_teacher(tmp_path / "donor", seed=3)
    settings: dict[str, Any] = {"arch": ("1x32:ff64",), "checkpoint_steps": 2}
    with pytest.raises(InterruptedRunError):
        world.train("run", stop_at=2, init_teacher=str(donor), **settings)
    with pytest.raises(IdentityMismatchError, match=r"cut from another model\. Repeat --init"):
        world.train("run", init=None, **settings)
    assert world.train("run", init_teacher=str(donor), **settings).record.complete


def test_a_donor_unlike_the_teacher_is_refused_before_the_first_training(
    world: World, tmp_path: Path, command: Command
) -> None:
    """The second training goes on with students like the teacher of the cache."""
    world.dump(**{"for": "minilm,embedding", "pooling": "mean"})
    objectives = ("--objective", "embedding", "--first", "minilm", "--first-steps", 2, "--steps", 2)
    words = ("train", world.root / "cache", *objectives, "--init", "slice", "--arch", "1x32:ff64")
    for donor, says in (
        (save_teacher(tmp_path / "family", "roberta", seed=3), "model_type is another one"),
        (save_teacher(tmp_path / "relu", seed=3, hidden_act="relu"), "hidden_act is another one"),
        (save_donor(tmp_path / "letters", "bert"), ("--first", "is another one")),
    ):
        command.fails(*words, "--init-teacher", donor, "--out", tmp_path / "run", code=2, says=says)
        assert not [*tmp_path.glob("run*")], "something was trained"
    like = save_teacher(tmp_path / "like", seed=3)
    code, _, err = command(*words, "--init-teacher", like, "--out", tmp_path / "run")
    assert code == 0, err


def test_a_decoder_is_no_donor_of_what_all_tokens_say(world: World, tmp_path: Path, command: Command) -> None:
    world.dump("cls", **{"for": "embedding", "pooling": "cls", "codec": "none"})
    world.dump("rows", codec="vectors")
    donor = save_teacher(tmp_path / "donor", "llama", num_key_value_heads=4)
    words = ("--arch", "2x32:ff64", "--init", "teacher-layers", "--init-teacher", donor)
    for cache, objective, says in (
        ("cls", "embedding", "vectors of the first token"),
        ("rows", "minilm", "attention on all tokens"),
    ):
        train = ("train", world.root / cache, "--objective", objective)
        command.fails(*train, *words, code=2, says=("read only those before them", says))
    save_teacher(world.teacher, "llama", num_key_value_heads=2)
    world.dump("grouped", codec="vectors")
    own = ("--arch", "2x32:ff64", "--init", "teacher-layers")
    command.fails("train", world.root / "grouped", *own, code=2, says="share keys and values")


def test_students_pad_on_the_right_whatever_their_donor_does(world: World, tmp_path: Path) -> None:
    world.dump(**{"for": "embedding", "pooling": "mean", "codec": "none"})
    donor = save_donor(tmp_path / "donor", "bert")
    file = donor / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))
    result = world.train("run", objective="embedding", init_teacher=str(donor))
    model: Any = SentenceTransformer(str(result.student_path("1x32")), device="cpu")
    texts = ["ba be", "bo " * 9]
    torch.testing.assert_close(model.encode(texts)[0], model.encode(texts[:1])[0], atol=1e-5, rtol=0)


def test_a_student_of_a_donor_has_its_heads(world: World, tmp_path: Path, command: Command) -> None:
    """The teacher is an encoder of T5, whose configuration says nothing of a decoder once it was read."""
    config = AutoConfig.for_model(
        "t5", d_model=32, num_layers=2, num_heads=8, d_kv=4, d_ff=64, vocab_size=len(VOCABULARY)
    )
    AutoModelForTextEncoding.from_config(config).save_pretrained(world.teacher)
    world.dump(**{"for": "embedding", "pooling": "mean", "codec": "none"})
    donor = save_donor(tmp_path / "donor")
    result = world.train("run", objective="embedding", init_teacher=str(donor))
    assert AutoModel.from_pretrained(result.student_path("1x32")).config.num_attention_heads == 4
    code, _, err = command("report", result.path, "--out", tmp_path / "page.html")
    assert code == 0, err


def test_donors_that_cannot_serve_are_refused(world: World, tmp_path: Path) -> None:
    world.dump(**{"for": "minilm,embedding", "pooling": "mean"})
    donor, same = save_donor(tmp_path / "donor"), save_teacher(tmp_path / "same", seed=4)
    with pytest.raises(IdentityMismatchError, match="add --init slice"):
        world.train("x", init=None, init_teacher=str(same))
    with pytest.raises(IdentityMismatchError, match="is not the teacher of this cache"):
        world.train("x", init="embeddings", init_teacher=str(same))
    for objective in ("minilm", "minilm,embedding"):
        with pytest.raises(InvalidConfigError, match=r"objective minilm\S* learns of single tokens"):
            world.train("x", init_teacher=str(donor), objective=objective)
    with pytest.raises(InvalidConfigError, match="Trim the donor first"):
        world.train("x", init_teacher=str(donor), objective="embedding", vocab="cache")
    with pytest.raises(InvalidConfigError, match="layers"):
        world.train("x", init_teacher=str(donor), objective="embedding", arch=("9x32",))
    short = save_donor(tmp_path / "short", max_position_embeddings=8)
    with pytest.raises(InvalidConfigError, match="positions"):
        world.train("x", init_teacher=str(short), objective="embedding")
    assert not (world.root / "x").exists()
