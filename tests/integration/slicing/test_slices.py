"""Students that are cut from a teacher, of every family, judged by transformers' own outputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

from minilm_cache import SliceConfig, slice_teacher
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.load import load_weights
from minilm_cache.models.student import build_student, shape_config
from minilm_cache.slicing.cut import Recipe, cut
from minilm_cache.slicing.forward import Calibration, num_tokens, of_corpus
from minilm_cache.slicing.parts import check_cut
from minilm_cache.slicing.slices import cut_weights
from minilm_cache.storage_schema.identity import RelationKind
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import BIASED, TINY, VOCABULARY, World, save_teacher, tiny_model

FAMILIES = sorted([*TINY, *BIASED])


def _text(num_sequences: int = 24, seed: int = 0) -> Calibration:
    """Return sequences of different lengths, so that batches have padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 30, (num_sequences,), generator=generator).tolist()
    return Calibration.of(
        [torch.randint(5, len(VOCABULARY), (length,), generator=generator) for length in lengths], 0
    )


def _pair(family: str, arch: str, **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel, tuple[int, ...]]:
    """Return a tiny teacher, a student with random weights, and the layers that it is cut from."""
    teacher = tiny_model(family, attention="eager" if family in BIASED else "minilm_cache", **changes)
    shape = parse_arch(arch, teacher.config.num_attention_heads, compares_heads=False)
    layers = check_cut(shape, teacher.config)
    config = shape_config(shape, teacher.config.to_dict(), family)
    if getattr(teacher.config, "layer_types", None):
        config.layer_types = [teacher.config.layer_types[layer] for layer in layers]
    return teacher, build_student(config, 0).eval(), layers


@torch.no_grad()
def _states(model: PreTrainedModel, text: Calibration) -> list[torch.Tensor]:
    return [
        model(input_ids=ids, attention_mask=valid.long()).last_hidden_state[valid]
        for ids, valid in zip(text.ids, text.valid, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_full_width_and_all_layers_are_the_teacher(family: str) -> None:
    sizes = {**TINY, **BIASED}[family]
    depth, units = sizes.get("num_hidden_layers", 3), sizes.get("intermediate_size", 64)
    embedding = f":e{sizes['embedding_size']}" if "embedding_size" in sizes else ""
    teacher, student, layers = _pair(family, f"{depth}x32:ff{units}{embedding}")
    errors = cut(teacher, student, layers=layers, calibration=_text())
    unseen = _text(seed=1)
    for own, theirs in zip(_states(student, unseen), _states(teacher, unseen), strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-4)
    assert max(errors) < 1e-4


ARCHS = ("2x16", "3x24:ff40", "1x32", "2x16:h2", "2x16:h8", "2x16:ff100")


@pytest.mark.parametrize(
    ("family", "arch"),
    # The heads of a bias are not cut.
    [(family, arch) for family in FAMILIES for arch in ARCHS if family not in BIASED or ":h2" not in arch],
)
def test_every_shape_of_every_family_is_closer_than_random(family: str, arch: str) -> None:
    teacher, student, layers = _pair(family, arch)
    width = student.config.hidden_size
    basis = torch.linalg.svd(torch.cat(_states(teacher, _text())), full_matrices=False).Vh[:width].T
    drawn = _error(teacher, student, basis)
    cut(teacher, student, layers=layers, calibration=_text())
    assert all(bool(weight.isfinite().all()) for weight in student.parameters())
    assert _error(teacher, student, basis) < drawn


def _error(teacher: PreTrainedModel, student: PreTrainedModel, basis: torch.Tensor) -> float:
    """Return how badly the student's states explain the teacher's strongest directions, by least squares."""
    text = _text(40, seed=1)
    own, theirs = (torch.cat(_states(model, text)) for model in (student, teacher))
    own = torch.cat([own, own.new_ones(len(own), 1)], 1)
    wanted = theirs @ basis
    fitted = own @ torch.linalg.lstsq(own, wanted).solution
    return float((fitted - wanted).norm() / wanted.norm())


def test_a_bias_goes_with_its_heads() -> None:
    teacher, student, layers = _pair("mpnet", "2x16")
    cut(teacher, student, layers=layers, calibration=_text())
    name = "encoder.relative_attention_bias.weight"
    assert torch.equal(student.state_dict()[name], teacher.state_dict()[name])
    with pytest.raises(InvalidConfigError, match=r"4 heads, so 2 heads cannot be cut.*with :h4"):
        _pair("mpnet", "2x16:h2")


def test_layers_are_evenly_spaced_and_the_last_is_among_them() -> None:
    config = tiny_model("bert", num_hidden_layers=12).config
    expected = {6: (1, 3, 5, 7, 9, 11), 4: (2, 5, 8, 11), 3: (3, 7, 11), 2: (5, 11), 1: (11,)}
    for depth, layers in expected.items():
        assert check_cut(parse_arch(f"{depth}x32", 4), config) == layers
    assert check_cut(parse_arch("2x32", 4), config, "0, 7") == (0, 7)


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_an_embedding_is_factorised(family: str) -> None:
    teacher, student, layers = _pair(family, "2x16:e8")
    assert student.get_input_embeddings().embedding_dim == 8
    errors = cut(teacher, student, layers=layers, calibration=_text())
    assert errors[0] < 0.95


def test_a_teacher_that_projects_gives_students_that_do_not() -> None:
    teacher, student, layers = _pair("electra", "2x16", embedding_size=24)
    assert not hasattr(student, "embeddings_project")
    assert cut(teacher, student, layers=layers, calibration=_text())[0] < 1


@pytest.mark.parametrize("change", ["follows_student", "absorbs_layers", "keeps_values"])
def test_every_choice_of_the_recipe_changes_the_fit(change: str) -> None:
    fits = []
    for recipe in (Recipe(), Recipe(), Recipe(**{change: False})):
        teacher, student, layers = _pair("bert", "2x16")
        cut(teacher, student, layers=layers, calibration=_text(), recipe=recipe)
        fits.append(torch.cat([weight.flatten() for weight in student.state_dict().values()]))
    assert torch.equal(fits[0], fits[1])
    assert not torch.equal(fits[0], fits[2])


def test_embeddings_alone_leave_the_layers_as_drawn() -> None:
    teacher, student, layers = _pair("bert", "2x16")
    drawn = {name: weight.clone() for name, weight in student.state_dict().items()}
    cut(teacher, student, layers=layers, calibration=_text(), recipe=Recipe(cuts_layers=False))
    changed = {name for name, weight in student.state_dict().items() if not torch.equal(weight, drawn[name])}
    assert {name.split(".")[0] for name in changed} == {"embeddings"}


def test_the_attention_mask_is_the_models_own() -> None:
    """Padding must not enter the fit: more of it gives the same slice."""
    teacher, student, layers = _pair("bert", "2x16")
    text = _text()
    wider = Calibration(
        ids=[torch.nn.functional.pad(ids, (0, 7)) for ids in text.ids],
        valid=[torch.nn.functional.pad(valid, (0, 7)) for valid in text.valid],
    )
    first = cut(teacher, student, layers=layers, calibration=text)
    second = cut(teacher, student, layers=layers, calibration=wider)
    assert second == pytest.approx(first, rel=1e-3)


def _slice(world: World, out: str, **changes: Any) -> Any:
    config = {"teacher": str(world.teacher), "corpus": str(world.corpus), "max_length": 32, "arch": "2x16"}
    return slice_teacher(SliceConfig(**{**config, **changes}), world.root / out)


def test_a_slice_is_a_huggingface_folder(world: World) -> None:
    result = _slice(world, "slice")
    model, loading = AutoModel.from_pretrained(result.path, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(result.path)("ba be").input_ids[0] == 2
    assert model.config.hidden_size == 16
    assert result.layers == (0, 2)
    assert result.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert result.kl is None  # the text is too short to check the slice on more of it
    assert "cut to 2x16" in (result.path / "README.md").read_text()


@pytest.mark.parametrize("arch", ["2x16", "2x32"])
def test_a_slice_of_a_sentence_encoder_pools_as_its_teacher(world: World, arch: str) -> None:
    save_encoder(world.teacher, "cls", dense=nn.Tanh())
    result = _slice(world, "slice", arch=arch)
    model, whole = SentenceTransformer(str(result.path)), SentenceTransformer(str(world.teacher))
    assert model.max_seq_length == whole.max_seq_length
    assert [type(module).__name__ for module in model][1:] == [
        "Pooling",
        *["Dense"] * (arch == "2x32"),
        "Normalize",
    ]
    assert model[1].pooling_mode == "cls"
    assert model.encode("ba be bi").shape == (24 if arch == "2x32" else 16,)
    card = (result.path / "README.md").read_text()
    assert ("linear maps (Dense) take 32 dimensions, and not 16" in card) == (arch == "2x16")
    assert (result.left_out is None) == (arch == "2x32")


def test_a_pooling_that_is_not_computed_here_is_left_out_aloud(world: World) -> None:
    save_encoder(world.teacher, "weightedmean")
    result = _slice(world, "slice")
    assert "weightedmean" in str(result.left_out)
    assert "weightedmean" in (result.path / "README.md").read_text()
    assert not (result.path / "modules.json").exists()


def test_the_same_text_gives_the_same_bytes(world: World) -> None:
    first, second = (_slice(world, name).path / "model.safetensors" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_the_kl_of_a_slice_is_that_of_eager_attention(world: World) -> None:
    """Further text is there: the KL is computed again from transformers' own attention probabilities."""
    world.corpus.write_text(world.corpus.read_text() * 40)
    result = _slice(world, "slice", arch="2x16")
    assert result.kl is not None
    config = SliceConfig(teacher=str(world.teacher), corpus=str(world.corpus), max_length=32, arch="2x16")
    _, checked = of_corpus(config, world.teacher, num_tokens(32))
    models = [
        AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        for folder in (world.teacher, result.path)
    ]
    total, tokens = 0.0, 0
    for ids in checked:
        with torch.no_grad():
            theirs, own = (
                model(input_ids=ids[None], output_attentions=True).attentions[-1][0] for model in models
            )
        total += float((theirs * (theirs.log() - own.log())).nan_to_num(0).sum(-1).mean(0).sum())
        tokens += len(ids)
    assert result.kl[RelationKind.ATTENTION] == pytest.approx(total / tokens, rel=1e-3)


def test_the_command_prints_what_was_cut(world: World, command: Command, tmp_path: Path) -> None:
    words = ("slice", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    code, out, _ = command(*words, "--arch", "2x16", "--out", tmp_path / "a")
    assert code == 0
    assert "layers" in out
    assert "next" in out
    code, out, _ = command(*words, "--arch", "2x16", "--layers", "1,2", "--out", tmp_path / "b", "--json")
    document = json.loads(out)
    assert document["layers"] == [1, 2]
    assert document["path"] == str(tmp_path / "b")


def test_misuse_is_one_line(world: World, command: Command, tmp_path: Path) -> None:
    words = ("slice", "--teacher", world.teacher, "--corpus", world.corpus, "--out", tmp_path / "x")
    short = (*words, "--max-length", 32, "--arch")
    command.fails(*short, "4x16", code=2, says="more layers than the teacher's 3")
    command.fails(*short, "2x64", code=2, says="hidden size 64 is above the teacher's 32")
    command.fails(*short, "2x32:b16", code=2, says="bottlenecks")
    command.fails(*short, "2x16", "--layers", "0,3", code=2, says="--layers 0,3: give different numbers")
    command.fails(*short, "2x16", "--layers", "2,0", code=2, says="ascending")
    command.fails(*short, "2x16", "--layers", "2", code=2, says="names 1 layer,")
    command.fails(*short, "2x16:s3", code=2, says="Leave out :s3")
    command.fails(*words, "--max-length", 90, "--arch", "2x16", code=2, says="--max-length")
    (tmp_path / "x").mkdir()
    command.fails(*short, "2x16", code=2, says="exists")
    (tmp_path / "x").rmdir()
    world.corpus.write_text("ba be bi\n")
    command.fails(*short, "2x16", code=2, says="the text has 5")


def test_another_family_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="family 'albert' cannot be cut"):
        check_cut(parse_arch("2x16", 4), AutoConfig.for_model("albert"))


def test_a_head_for_masked_tokens_is_loaded_with_the_encoder(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "teacher")
    _, lacking = load_weights(folder, "tokens")
    assert any(name.startswith("cls.") for name in lacking)


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert"])
def test_a_head_for_masked_tokens_is_cut(family: str) -> None:
    """Soft labels of the cut student are closer to the teacher's than those of a drawn head."""
    teacher = tiny_model(family, attention="minilm_cache", head="tokens")
    shape = parse_arch("3x24", 4)
    config = shape_config(shape, teacher.config.to_dict(), family)
    text, unseen = _text(60), _text(30, seed=1)
    distances = {}
    for head in (None, "tokens"):
        student = build_student(config, 0, "tokens").eval()
        layers = check_cut(shape, teacher.config)
        cut_weights(teacher, student, lacking=frozenset(), layers=layers, text=text, head=head)
        distances[head] = _distance(teacher, student, unseen)
    assert distances["tokens"] < distances[None]


@torch.no_grad()
def _distance(teacher: PreTrainedModel, student: PreTrainedModel, text: Calibration) -> float:
    """Return KL(teacher || student) over the vocabulary, nats per token."""
    total = 0.0
    for ids, valid in zip(text.ids, text.valid, strict=True):
        theirs, own = (
            model(input_ids=ids, attention_mask=valid.long()).logits[valid].log_softmax(-1)
            for model in (teacher, student)
        )
        total += float((theirs.exp() * (theirs - own)).sum())
    return total / text.num_tokens


@pytest.mark.parametrize("arch", ["2x16", "2x32"])
def test_a_teacher_of_nan_is_refused(arch: str) -> None:
    teacher, student, layers = _pair("bert", arch)
    with torch.no_grad():
        next(teacher.parameters()).fill_(float("nan"))
    with pytest.raises(TeacherError, match="cannot be fitted"):
        cut(teacher, student, layers=layers, calibration=_text())
