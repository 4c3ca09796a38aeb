"""Teachers that are no plain encoders: decoders, attention with a bias or of its own, regressions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoTokenizer,
    DebertaV2Config,
    FNetConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from minilm_cache.cache import open_cache
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import read_config
from minilm_cache.models.locate import TeacherSource
from minilm_cache.models.student import build_student, model_size, shape_config
from minilm_cache.models.tap import Tap, TappedModel
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.report.compare import live_held_out_kl
from minilm_cache.session import Session
from minilm_cache.storage_schema.states import LOGITS, POOLED
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.support import VOCABULARY, World, save_teacher, tiny_model, tiny_tokenizer, write_corpus

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}


def decoders_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts nothing around a text and has no token for padding."""
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[SEP]")


def save_other(folder: Path, family: str) -> Path:
    """Write a teacher of a family that cannot be tapped."""
    if family == "llama":
        tiny_model("llama", attention="sdpa").save_pretrained(folder)
        decoders_tokenizer().save_pretrained(folder)
        return folder
    sizes = SIZES | {"vocab_size": len(VOCABULARY), "pad_token_id": 0} | OF_FAMILY.get(family, {})
    sizes = OF_FAMILY[family] | {"vocab_size": len(VOCABULARY)} if family.endswith("t5") else sizes
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(SAME_MODEL.get(family, family), **sizes))
    model.save_pretrained(folder)
    (decoders_tokenizer() if family in DECODERS else tiny_tokenizer()).save_pretrained(folder)
    return folder


def widened(teacher: Path) -> Path:
    """Multiply the matrices of a teacher, so that its attention is far from flat."""
    weights = load_file(teacher / "model.safetensors")
    wide = {name: 5 * weight if weight.ndim > 1 else weight for name, weight in weights.items()}
    save_file(wide, teacher / "model.safetensors", metadata={"format": "pt"})
    return teacher


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
}
T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "mpnet": {"pad_token_id": 1},
    "t5": T5,
    "mt5": T5,
    "umt5": T5,
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
    },
    "embedding-gemma": {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 8,
        "use_bidirectional_attention": True,
    },
    "mistral": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
}
"""Sizes of families that differ from those of others."""
LEARNS: dict[str, Any] = {"init": "random", "steps": 30, "batch_size": 8, "lr": 5e-3}
SAME_MODEL = {"embedding-gemma": "gemma3_text"}
"""Models that have the family of others, and settings of their own."""
DECODERS = ("llama", "qwen3", "gemma3_text", "mistral")


@pytest.mark.parametrize(
    ("family", "pooling"),
    [
        *((family, "lasttoken") for family in DECODERS),
        *((family, "mean") for family in ("mpnet", "deberta", "deberta-v2", "t5", "mt5", "umt5", "eurobert")),
        *((family, "mean") for family in ("nomic_bert", "gte", "jina_embeddings_v3", "embedding-gemma")),
    ],
)
def test_pooled_vectors_are_those_of_plain_transformers(tmp_path: Path, family: str, pooling: str) -> None:
    teacher = save_other(tmp_path / "teacher", family)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    path = world.dump(codec="none", pooled=True, packing="records", pooling=pooling, min_cosine=0.9999).path
    cache, tokenizer = open_cache(path), AutoTokenizer.from_pretrained(teacher)
    kind = AutoModelForTextEncoding if family.endswith("t5") else AutoModel
    model = kind.from_pretrained(teacher).eval()
    for number in range(6):
        sequence = cache[number]
        text = tokenizer.decode(sequence.input_ids, skip_special_tokens=True)
        read = tokenizer(text, return_tensors="pt")
        assert read["input_ids"][0].tolist() == sequence.input_ids.tolist()
        with torch.no_grad():
            hidden = model(read["input_ids"]).last_hidden_state[0]
        vector = hidden[-1] if pooling == "lasttoken" else hidden.mean(0)
        assert float(F.cosine_similarity(sequence.states()[POOLED][0], vector, dim=0)) >= 0.9995


def test_whole_weights_out_of_a_gguf_file_are_a_teacher(tmp_path: Path, command: Command) -> None:
    teacher = save_other(tmp_path / "teacher", "llama")
    settings = json.loads((teacher / "config.json").read_text())
    left = {"quant_method": "gguf", "gguf_file": "model.Q4_1.gguf", "dequantize": False}
    dump = (
        "dump",
        "--teacher",
        teacher,
        "--corpus",
        write_corpus(tmp_path / "corpus.txt"),
        "--max-length",
        16,
    )
    of_vectors = ("--codec", "none", "--pooled", "--pooling", "lasttoken", "--packing", "records", "--json")
    prints = []
    for content in (settings, {**settings, "quantization_config": left}):
        (teacher / "config.json").write_text(json.dumps(content))
        code, out, err = command(*dump, *of_vectors)
        assert code == 0, err
        prints.append(json.loads(out)["fingerprint"])
    assert prints[0] == prints[1]


def test_a_student_of_a_decoder_is_one_and_learns_its_vectors(tmp_path: Path) -> None:
    world = World(tmp_path, save_other(tmp_path / "teacher", "llama"), write_corpus(tmp_path / "corpus.txt"))
    world.dump(codec="none", pooled=True, packing="records", pooling="lasttoken")
    config = TrainConfig(arch=("1x16",), objective="embedding", steps=30, batch_size=8, lr=5e-3, device="cpu")
    run = train_students(config, world.root / "cache", out=world.root / "run", session=Session(world.home))
    (student,) = run.record.students
    saved = json.loads((run.student_path("1x16") / "config.json").read_text())

    assert (saved["model_type"], saved["num_key_value_heads"]) == ("llama", saved["num_attention_heads"])
    assert student.loss_after is not None
    assert student.loss_before is not None
    assert student.loss_after < student.loss_before


def test_relations_that_cannot_be_tapped_are_refused_before_anything_is_written(
    tmp_path: Path, command: Command
) -> None:
    teacher = save_other(tmp_path / "teacher", "convbert")
    corpus = write_corpus(tmp_path / "corpus.txt")
    words = ("dump", "--teacher", teacher, "--corpus", corpus, "--out", tmp_path / "cache")
    says = ("does not use transformers'", "--codec none with --pooled or --logits")
    command.fails(*words, "--max-length", 32, code=1, says=says)
    assert not (tmp_path / "cache").exists()


def test_attention_that_is_not_what_it_is_called_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are stored as seeing their past must be those of the model."""
    world = World(tmp_path, save_other(tmp_path / "teacher", "llama"), write_corpus(tmp_path / "corpus.txt"))
    monkeypatch.setattr(Teacher, "_is_causal", lambda _teacher: False)
    with pytest.raises(TeacherError, match="call their attention causal, and its hidden states show"):
        world.dump()
    assert not (tmp_path / "cache").exists()


def test_a_student_that_is_its_causal_teacher_has_no_loss_beside_it(tmp_path: Path) -> None:
    """Reports and studies compare with the teacher that runs again, whose rows see their past, too."""
    teacher = widened(save_other(tmp_path / "teacher", "llama"))
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    cache = open_cache(world.dump().path)
    run = Teacher(TeacherSource(name="llama", folder=teacher), torch.device("cpu"))
    objective = choose_objective(ObjectiveConfig(), cache, arch=["2x32"])
    (kls,) = live_held_out_kl(cache, run, objective=objective, students=[teacher])
    assert kls is not None
    assert set(kls) == {"attention", "value"}
    assert max(kls.values()) < 1e-4


@pytest.mark.parametrize("codec", ["topk", "dense", "vectors"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_relations_of_a_decoder_are_cached_checked_and_learned(
    tmp_path: Path, command: Command, family: str, codec: str
) -> None:
    """Rows see their past; Mistral's attention a window of it, and its value relations all of it."""
    teacher = widened(save_other(tmp_path / "teacher", family))
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    path = world.dump(codec=codec).path
    cache = open_cache(path)
    model = AutoModel.from_pretrained(world.teacher, attn_implementation="eager").eval()
    sequence = cache[0]
    with torch.no_grad():
        attentions = model(sequence.input_ids[None], output_attentions=True).attentions
    stored = sequence.relation("attention")
    past = torch.ones_like(stored).tril()
    assert not (stored * (1 - past)).any()
    away = (stored - attentions[-1][0]).abs().mean()
    assert float(away) < {"topk": 0.05, "dense": 1e-4, "vectors": 0.01}[codec]
    assert not (sequence.relation("value") * (1 - past)).any()
    code, _, err = command("verify", path, "--full", "--teacher", world.teacher)
    assert code == 0, err
    _, out, _ = command("info", path)
    assert "rows see their past" in out
    objective = "minilmv2" if codec == "vectors" else "minilm"
    (student,) = world.train("run", objective=objective, **{**LEARNS, "lr": 1e-3}).record.students
    assert student.loss_before is not None
    assert student.loss_after is not None
    assert student.loss_after < student.loss_before


def test_values_of_another_size_are_stored_as_rows_alone(tmp_path: Path, command: Command) -> None:
    teacher = save_other(tmp_path / "teacher", "deepseek_v2")
    corpus = write_corpus(tmp_path / "corpus.txt")
    words = ("dump", "--teacher", teacher, "--corpus", corpus, "--max-length", 32, "--out", tmp_path / "x")
    command.fails(*words, code=1, says=("values and queries", "differ in size", "topk or dense"))
    assert World(tmp_path, teacher, corpus).dump(codec="topk").manifest.identity.is_causal


def test_a_decoder_that_reads_both_ways_has_relations_that_do(tmp_path: Path, command: Command) -> None:
    """EmbeddingGemma: windows to both sides in most layers, groups of heads, no causal mask."""
    teacher = widened(save_other(tmp_path / "teacher", "embedding-gemma"))
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    cache = open_cache(world.dump(codec="dense", packing="records").path)
    assert not cache.manifest.identity.is_causal
    model = AutoModel.from_pretrained(teacher, attn_implementation="eager").eval()
    sequence = max((cache[number] for number in range(8)), key=lambda each: len(each.input_ids))
    with torch.no_grad():
        expected = model(sequence.input_ids[None], output_attentions=True).attentions[-1][0]
    assert expected.triu(1).any()
    torch.testing.assert_close(sequence.relation("attention"), expected, rtol=0, atol=1e-3)
    code, _, err = command("verify", cache.reader.root, "--full", "--teacher", teacher)
    assert code == 0, err


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_gives_the_same_cache(tmp_path: Path, side: str) -> None:
    """Models without positions of their own (rotary ones) read the same behind padding as before it."""
    teacher = save_other(tmp_path / "teacher", "llama")
    settings = json.loads((teacher / "tokenizer_config.json").read_text())
    (teacher / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": side}))
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    words: dict[str, Any] = {
        "pooled": True,
        "packing": "records",
        "pooling": "lasttoken",
        "min_cosine": 0.9999,
    }
    cache = open_cache(world.dump(codec="dense", **words).path)
    model = AutoModel.from_pretrained(teacher, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.padding_side == side
    rows = [cache[number].input_ids.tolist() for number in range(3)]
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        output = model(**padded, output_attentions=True)
    for number, ids in enumerate(rows):
        taken = slice(-len(ids), None) if side == "left" else slice(len(ids))
        vector = output.last_hidden_state[number][taken][-1]
        assert float(F.cosine_similarity(cache[number].states()[POOLED][0], vector, dim=0)) >= 0.9995
        attention = output.attentions[-1][number][:, taken, taken]
        torch.testing.assert_close(cache[number].relation("attention"), attention, rtol=0, atol=1e-3)


def test_padding_on_the_left_may_have_an_embedding_of_zeros(tmp_path: Path) -> None:
    """As transformers makes it; a tokenizer may have no other special token."""
    teacher = save_other(tmp_path / "teacher", "qwen3")
    settings = json.loads((teacher / "tokenizer_config.json").read_text())
    kept = {name: value for name, value in settings.items() if name not in {"bos_token", "cls_token"}}
    (teacher / "tokenizer_config.json").write_text(json.dumps(kept | {"padding_side": "left"}))
    weights = load_file(teacher / "model.safetensors")
    padding = AutoTokenizer.from_pretrained(teacher).eos_token_id
    weights["embed_tokens.weight"][padding] = 0
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))

    assert world.dump(codec="none", pooled=True, packing="records", pooling="lasttoken").manifest.complete


@pytest.mark.parametrize("family", ["deberta", "deberta-v2"])
def test_relations_with_a_bias_that_reads_the_text_are_cached_and_learned(
    tmp_path: Path, command: Command, family: str
) -> None:
    world = World(
        tmp_path, widened(save_other(tmp_path / "teacher", family)), write_corpus(tmp_path / "corpus.txt")
    )
    cache = open_cache(world.dump(codec="dense").path)
    model = AutoModel.from_pretrained(world.teacher, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(cache[1].input_ids[None], output_attentions=True).attentions[-1][0]
    torch.testing.assert_close(cache[1].relation("attention"), expected, rtol=0, atol=1e-3)
    (student,) = world.train("run", dropout="teacher", **LEARNS).record.students
    assert student.loss_before is not None
    assert student.loss_after is not None
    assert student.loss_after < student.loss_before
    words = ("dump", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    command.fails(
        *words, "--out", tmp_path / "x", code=1, says=("--codec vectors", "adds a bias", "topk or dense")
    )


@pytest.mark.parametrize("codec", ["topk", "dense"])
@pytest.mark.parametrize("family", ["mpnet", "t5"])
def test_relations_with_a_position_bias_are_cached_as_rows(
    tmp_path: Path, command: Command, family: str, codec: str
) -> None:
    teacher = widened(save_other(tmp_path / "teacher", family))
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    path = world.dump(codec=codec).path
    code, _, err = command("verify", path, "--full", "--teacher", teacher)
    assert code == 0, err
    text = ("--corpus", world.corpus, "--max-length", 32)
    words = ("dump", "--teacher", teacher, *text, "--out", tmp_path / "x")
    command.fails(*words, code=1, says=("--codec vectors", "adds a bias", "topk or dense"))
    assert not (tmp_path / "x").exists()
    if family == "t5":
        says = ("students of the family 't5'", "--init-teacher ENCODER")
        command.fails("train", path, "--arch", "1x32", "--init", "random", code=2, says=says)
        return
    config = TrainConfig(arch=("1x32",), init="random", steps=30, batch_size=8, lr=5e-3, device="cpu")
    run = train_students(config, path, out=world.root / "run", session=Session(world.home))
    (student,) = run.record.students
    assert student.loss_before is not None
    assert student.loss_after is not None
    assert student.loss_after < student.loss_before
    weights = load_file(run.student_path("1x32") / "model.safetensors")
    drawn = AutoModel.from_pretrained(run.student_path("1x32")).encoder.relative_attention_bias.weight
    assert torch.equal(weights["encoder.relative_attention_bias.weight"], drawn)
    assert (
        "relative_attention_bias" not in (run.student_path("1x32") / "README.md").read_text()
    )  # it is trained
    command.fails("train", path, "--arch", "1x32", "--compile", code=2, says="taken by hooks")


def test_answers_of_a_decoder_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Folders of decoders often name no token for padding, or another than their tokenizer pads with."""
    for name, config_pad in (("none", None), ("other", 3)):
        teacher = tmp_path / name
        config = AutoConfig.for_model(
            "llama", **LLAMA, vocab_size=len(VOCABULARY), pad_token_id=config_pad, num_labels=3
        )
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(config).eval()
        model.save_pretrained(teacher)
        decoders_tokenizer().save_pretrained(teacher)
        world = World(tmp_path / f"of-{name}", teacher, write_corpus(tmp_path / "corpus.txt"))
        cache = open_cache(world.dump(codec="none", logits=True, packing="records").path)
        model.config.pad_token_id = decoders_tokenizer().eos_token_id
        for number in range(6):
            with torch.no_grad():
                answer = model(cache[number].input_ids[None]).logits[0]
            torch.testing.assert_close(cache[number].states()[LOGITS][0], answer, rtol=1e-4, atol=1e-5)


def test_a_decoder_whose_texts_end_with_padding_is_refused(tmp_path: Path) -> None:
    """Without a token for padding of its own, what ends a text would be taken for padding."""
    teacher = save_teacher(tmp_path / "teacher", "llama", head="sequences", num_labels=1, pad_token_id=None)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    settings: dict[str, Any] = {"codec": "none", "logits": True, "packing": "records"}
    whole = tiny_tokenizer()
    ends = TemplateProcessing(single="$A [SEP]", pair=None, special_tokens=[("[SEP]", whole.sep_token_id)])
    whole.backend_tokenizer.post_processor = ends
    bare = PreTrainedTokenizerFast(tokenizer_object=whole.backend_tokenizer, eos_token="[SEP]")
    bare.save_pretrained(teacher)
    with pytest.raises(TeacherError, match=r"ends texts with \[SEP\], which it also pads with"):
        world.dump(**settings)
    bare.pad_token = "[PAD]"
    bare.save_pretrained(teacher)
    cache = open_cache(world.dump(**settings).path)
    model: Any = AutoModelForSequenceClassification.from_pretrained(teacher).eval()
    for sequence in (cache[number] for number in range(3)):
        expected = model(input_ids=sequence.input_ids[None].long()).logits
        torch.testing.assert_close(sequence.states()[LOGITS], expected, rtol=1e-3, atol=1e-3)


def test_what_reads_no_text_or_only_its_first_token_is_refused(tmp_path: Path, command: Command) -> None:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64}
    seq2seq = tmp_path / "bart"
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    config = AutoConfig.for_model("bart", vocab_size=len(VOCABULARY), **sizes, **heads)
    AutoModel.from_config(config).save_pretrained(seq2seq)
    tiny_tokenizer().save_pretrained(seq2seq)
    llama = save_other(tmp_path / "llama", "llama")
    text = ("--corpus", write_corpus(tmp_path / "corpus.txt"), "--max-length", 16)
    words = (*text, "--codec", "none", "--packing", "records")
    for teacher, wanted, says in (
        (seq2seq, ("--pooled", "--pooling", "mean"), "it is an encoder with a decoder"),
        (llama, ("--pooled", "--pooling", "cls"), "the first token reads nothing but itself"),
        (llama, ("--first-hidden", "last"), "the first token reads nothing but itself"),
    ):
        command.fails("dump", "--teacher", teacher, *words, *wanted, code=1, says=(says,))


def test_a_teacher_that_gives_one_number_is_learned_by_its_square(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher", head="sequences", num_labels=1)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    path = world.dump(codec="none", logits=True, packing="records").path
    cache = open_cache(path)
    model = AutoModelForSequenceClassification.from_pretrained(teacher).eval()
    with torch.no_grad():
        number = model(cache[0].input_ids[None]).logits[0]
    stored = cache[0].states()[LOGITS]
    torch.testing.assert_close(stored[0], number, rtol=1e-4, atol=1e-5)
    warm = TrainConfig(arch=("2x32",), objective="tinybert-prediction", temperature=2.0, device="cpu")
    with pytest.raises(InvalidConfigError, match="--temperature 2: the teacher answers with one number"):
        train_students(warm, path, out=world.root / "warm", session=Session(world.home))
    config = TrainConfig(
        arch=("2x32",), objective="tinybert-prediction", init="random", steps=60, batch_size=8, device="cpu"
    )
    run = train_students(config, path, out=world.root / "run", session=Session(world.home))
    (student,) = run.record.students
    assert student.loss_after is not None
    assert student.loss_before is not None
    assert 0 < student.loss_after < student.loss_before


def test_a_pair_goes_from_a_list_to_a_gradient_as_in_plain_transformers() -> None:
    """Ids and segments by the tokenizer's own template, one sequence longer than the other."""
    tokenizer = tiny_tokenizer()
    pairs = [("ba be bi", "bo bu"), ("da", "de di do du fa fe")]
    read = tokenizer(pairs, return_token_type_ids=True)
    rows, segments = (list(map(torch.tensor, read[name])) for name in ("input_ids", "token_type_ids"))
    inputs = Inputs.of(rows, tokenizer.pad_token_id, segments)
    assert inputs.segments is not None
    assert inputs.segments.unique().tolist() == [0, 1]
    content = tiny_model("bert").config.to_dict()
    shape = parse_arch("2x32", 4, compares_heads=False)
    student = build_student(shape_config(shape, content, "bert"), seed=0).eval()
    (vectors,) = TappedModel(student)(inputs, Tap((1,))).vectors
    (vectors.query * inputs.valid[:, None, :, None]).square().sum().backward()
    gradients = {name: weight.grad for name, weight in student.named_parameters() if weight.grad is not None}

    student.zero_grad()
    queries: list[torch.Tensor] = []
    projection = student.get_submodule("encoder.layer.1.attention.self.query")
    projection.register_forward_hook(lambda _module, _inputs, output: queries.append(output))
    padded = tokenizer(pairs, padding=True, return_tensors="pt", return_token_type_ids=True)
    student(**padded)
    (queries[0] * padded["attention_mask"][..., None]).square().sum().backward()
    assert "embeddings.token_type_embeddings.weight" in gradients
    for name, weight in student.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], weight.grad)


def test_a_family_without_heads_is_named(tmp_path: Path) -> None:
    FNetConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path / "fnet")
    with pytest.raises(TeacherError, match="models of the family fnet have no attention heads"):
        read_config(tmp_path / "fnet")


def test_a_head_that_a_family_lacks_is_named(tmp_path: Path, command: Command) -> None:
    teacher, text = save_other(tmp_path / "llama", "llama"), write_corpus(tmp_path / "corpus.txt")
    tiny_tokenizer().save_pretrained(teacher)
    words = ("head", "--teacher", teacher, "--corpus", text, "--out", tmp_path / "out", "--max-length", 32)
    command.fails(*words, code=1, says="no model of the family llama with a head for tokens")


def test_the_teacher_of_a_t5_cache_is_its_teacher(tmp_path: Path, command: Command) -> None:
    """Its encoder says that it has no decoder, and the folder that it has one."""
    world = World(tmp_path, save_other(tmp_path / "t5", "t5"), write_corpus(tmp_path / "corpus.txt"))
    world.dump()
    words = ("train", tmp_path / "cache", "--arch", "1x16", "--init", "slice", "--out", tmp_path / "run")
    for donor in ((), ("--init-teacher", world.teacher)):
        command.fails(*words, *donor, code=2, says="a model of family 't5' cannot be cut")


def test_models_have_sizes_whatever_they_look_at() -> None:
    """Sizes are counted without values: DeBERTa looks at those of ids, decoders at those of positions."""
    sizes: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 66,
    }
    relative: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    for config in (
        DebertaV2Config(**sizes),
        DebertaV2Config(**sizes, **relative),
        LlamaConfig(**sizes, use_cache=False),
    ):
        size = model_size(config, 16)
        assert size.num_parameters == AutoModel.from_config(config).num_parameters()
        with pytest.raises(InvalidConfigError, match="--max-length 90 is more than"):
            model_size(config, 90)
