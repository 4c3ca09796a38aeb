"""`minilm-cache plan`: what it says before is what a dump is after."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, BertConfig

from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.plan import TaskClock, _fixed_s, _load_sequences, plan
from minilm_cache.dump.shards import COMPILE
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.student import model_size
from minilm_cache.models.teacher import Teacher
from minilm_cache.session import Session, Silent
from minilm_cache.settings import validated
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.config import CostConfig
from minilm_cache.workflows.plan import estimate, operations
from tests.fixtures import Command
from tests.support import TINY, VOCABULARY, World, save_teacher, write_corpus


def plan_arguments(world: World, *more: object) -> list[object]:
    return [
        *("plan", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32, "--k", 4),
        *("--max-kl", 0.02, "--max-kl", 0.1, "--sample-tokens", 1024, *more),
    ]


def test_a_plan_is_what_the_dumps_then_are(world: World, command: Command) -> None:
    code, out, err = command(*plan_arguments(world, "--json"))
    assert code == 0, err
    found = json.loads(out)
    names = [setting["codec"]["name"] for setting in found["settings"]]
    assert names == ["topk", "vectors", "vectors", "dense"]
    assert all(setting["break_even_epochs"] >= 2 for setting in found["settings"])
    dumped = world.dump(codec="dense", shard_tokens=None, max_length=32)
    assert found["num_tokens"] == dumped.manifest.num_tokens
    total = sum(file.stat().st_size for file in dumped.path.rglob("*") if file.is_file())
    assert found["settings"][3]["total_bytes"] == pytest.approx(total, rel=0.25)
    kls = [
        setting["fidelity"][0]["relations"]["value"]["kl_teacher_to_stored"] for setting in found["settings"]
    ]
    assert kls[0] is None
    assert 0 <= kls[3] < kls[1] < kls[2]
    weights = load_file(world.teacher / "model.safetensors").values()
    assert found["teacher_bytes"] == 4 * sum(weight.numel() for weight in weights)
    assert found["free_bytes"] > found["teacher_bytes"]


def test_a_sample_that_is_the_whole_text_takes_what_the_dump_takes(world: World) -> None:
    config = world.config(codec="dense", max_length=32, shard_tokens=None)
    planned = plan([config], 10**6, session=Session(world.home))
    measured = world.dump(codec="dense", max_length=32, shard_tokens=None).manifest.measured
    assert measured is not None
    assert planned.settings[0].bytes_per_token == measured.bytes_per_token


def test_an_interrupted_plan_keeps_nothing_and_says_so(world: World) -> None:
    config = world.config(codec="vectors")
    with pytest.raises(InterruptedRunError, match="interrupted: a plan keeps nothing"):
        plan([config], 1024, session=Session(should_stop=lambda: True))


def test_compiling_takes_as_long_for_a_sample_as_for_the_corpus(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that takes a second adds a second to a dump, however long it is."""
    monkeypatch.setattr(Teacher, "compile_forward", lambda _: None)
    config = world.config(codec="dense")
    clock, manifest = TaskClock(Silent()), world.dump(codec="dense").manifest
    clock.seconds["measure fidelity"] = 3.0
    teacher = Teacher(locate_teacher(str(world.teacher)), torch.device("cpu"))
    sequences = _load_sequences(config, teacher, session=Session())
    before = _fixed_s(manifest, clock, sequences)
    clock.seconds[COMPILE] = 1.0

    assert _fixed_s(manifest, clock, sequences) == pytest.approx(before + 1)


def test_several_layers_are_planned(world: World, command: Command) -> None:
    code, out, err = command(*plan_arguments(world, "--no-dense", "--layers", "all", "--json"))
    assert code == 0, err
    settings = json.loads(out)["settings"]
    assert [[one["layer"] for one in setting["fidelity"]] for setting in settings] == [
        [2],
        [0, 1, 2],
        [0, 1, 2],
    ]


def test_one_layer_is_planned_for_every_codec(world: World, command: Command) -> None:
    code, out, err = command(*plan_arguments(world, "--layers", "0", "--json"))
    assert code == 0, err
    settings = json.loads(out)["settings"]
    assert [[one["layer"] for one in setting["fidelity"]] for setting in settings] == [[0]] * 4
    err = command.fails(*plan_arguments(world, "--layers", "9"), code=2, says="has layers 0 to 2")
    assert "sampling" not in err


def test_a_plan_chooses_the_best_setting_of_a_size(world: World, command: Command) -> None:
    _, out, _ = command(*plan_arguments(world, "--json"))
    sizes = {json.dumps(one["codec"]): one["total_bytes"] for one in json.loads(out)["settings"]}
    vectors = [name for name in sizes if '"vectors"' in name]
    code, out, _ = command(*plan_arguments(world, "--json", "--max-bytes", sizes[vectors[0]]))
    assert code == 0
    assert json.loads(out)["best"] == json.loads(vectors[0])
    code, out, _ = command(*plan_arguments(world, "--no-dense", "--max-bytes", 10**12))
    assert code == 0
    assert "one epoch of one student is never enough" in out
    assert re.search(r"best within --max-bytes +vectors max_kl=0.02", out)
    command.fails(
        *plan_arguments(world, "--max-bytes", 1000), code=2, says="every setting needs more; the smallest is"
    )


def test_a_plan_ends_with_the_dump_that_it_planned(world: World, command: Command) -> None:
    for limit in ((), ("--max-bytes", 10**9)):
        code, out, err = command(*plan_arguments(world, "--packing", "records", "--seed", 3, *limit))
        assert code == 0, err
        next_ = re.sub(r"\s+", " ", out.partition("next")[2]).strip()
        program, *arguments = shlex.split(next_)
        assert program == "minilm-cache"
        code, out, err = command(*arguments, "--json", "--out", world.root / f"cache-{len(limit)}")
        assert code == 0, err
    chosen = read_manifest(world.root / "cache-2").identity
    assert chosen.codec.name == "dense"  # the most faithful one within the limit
    assert (chosen.packing.mode, chosen.packing.max_length) == ("records", 32)


def test_what_objectives_need_is_planned(tmp_path: Path, command: Command) -> None:
    teacher = save_teacher(tmp_path / "teacher", head="tokens")
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    words = ("--no-dense", "--json", "--for")
    plain = json.loads(command(*plan_arguments(world, *words, "minilm"))[1])["settings"]
    labels = json.loads(command(*plan_arguments(world, *words, "mlm-kd"))[1])["settings"]
    states = json.loads(command(*plan_arguments(world, *words, "minilm, tinybert"))[1])["settings"]

    assert [one["codec"]["name"] for one in plain] == ["topk", "vectors", "vectors"]
    assert all(
        more["bytes_per_token"] > one["bytes_per_token"] for one, more in zip(plain, labels, strict=True)
    )
    assert [one["codec"]["name"] for one in states] == ["vectors", "vectors"]
    assert [len(one["fidelity"]) for one in states] == [3, 3]


def test_hours_of_trainings_are_operations_over_a_rate(world: World, command: Command) -> None:
    """A teacher's pass once per token of the corpus, a student's three times per token of its training."""
    length = 32
    config = CostConfig(arch=("1x16", "2x32"), epochs=5, tflops=0.001)
    dump = {"teacher": str(world.teacher), "corpus": str(world.corpus), "max_length": length}
    work = operations(config, validated(DumpConfig, dump))
    costs = estimate(config, work, num_tokens=1000, length=length, teacher_tokens_per_s=7.0)
    teacher = model_size(AutoConfig.from_pretrained(world.teacher), length).stopped_flops_per_token
    by_name = {one.what: one for one in costs.parts}
    assert by_name["dump"].flops == pytest.approx(teacher * 1000)
    student = BertConfig(
        **{**TINY["bert"], "hidden_size": 16, "num_hidden_layers": 1},
        vocab_size=len(VOCABULARY),
        max_position_embeddings=66,
    )
    step = 3 * model_size(student, length).stopped_flops_per_token
    assert by_name["train 1x16"].flops == pytest.approx(step * 5000)
    along = by_name["train 1x16 with the teacher along"]
    assert along.flops == pytest.approx((step + teacher) * 5000)
    assert along.hours == pytest.approx(along.flops / 1e9 / 3600)
    measured = estimate(
        config.model_copy(update={"tflops": None}),
        work,
        num_tokens=1000,
        length=length,
        teacher_tokens_per_s=7.0,
    )
    assert measured.flops_per_s == pytest.approx(7 * teacher)

    whole = operations(config, validated(DumpConfig, {**dump, "for": "embedding"}))  # needs last outputs
    assert whole.teacher > work.teacher
    assert whole.students["1x16"] == pytest.approx(3 * model_size(student, length).flops_per_token)
    both = operations(config, validated(DumpConfig, {**dump, "for": "minilmv2", "hidden": "last"}))
    assert both.teacher == whole.teacher
    size, masked = model_size(AutoConfig.from_pretrained(world.teacher), length), {"labels": True}
    for more, passes in (({}, 1), ({"maskings": 3}, 3)):  # each masked reading is a pass of its own
        found = operations(config, validated(DumpConfig, {**dump, **masked, **more}))
        assert found.teacher == pytest.approx(work.teacher + passes * size.flops_per_token)
    at_rate = config.model_copy(update={"tflops": None})
    dumped = estimate(at_rate, whole, num_tokens=1000, length=length, teacher_tokens_per_s=7.0).parts[0]
    assert dumped.hours * 3600 == pytest.approx(1000 / 7 * whole.teacher / work.teacher)
    assert both.students == work.students


def test_codecs_that_a_bias_does_not_let_be_are_left_out(world: World, command: Command) -> None:
    save_teacher(world.teacher, "mpnet")
    asked = ("plan", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    code, out, err = command(*asked, "--k", 4, "--no-dense", "--json")
    assert code == 0, err
    assert [setting["codec"]["name"] for setting in json.loads(out)["settings"]] == ["topk"]
    assert "adds a bias" in err
    command.fails(*asked, *("--for", "minilmv2"), code=1, says="adds a bias")


def test_codecs_that_a_short_corpus_does_not_serve_are_left_out(world: World, command: Command) -> None:
    world.corpus.write_text("ba be bi")
    asked = ("plan", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    code, out, err = command(*asked, "--k", 4, "--no-dense", "--json")
    assert code == 0, err
    assert [setting["codec"]["name"] for setting in json.loads(out)["settings"]] == ["topk"]
    assert "left out: vectors" in err
    command.fails(
        *asked, *("--for", "minilmv2"), code=1, says="1 training sequences, too few for codec vectors"
    )


def test_the_plan_tells_costs(world: World, command: Command) -> None:
    asked = ("plan", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32, "--k", 4)
    short = ("--sample-tokens", 1024, "--max-kl", 0.1, "--no-dense", "--device", "cpu")
    code, out, err = command(*asked, *short, "--arch", "1x16", "--preset", "minilm")
    assert code == 0, err
    assert f"a training is {400_000 * 256 * 32:,} tokens" in out
    assert "measured in the teacher's forward pass here" in out
    assert "train 1x16 with the teacher along" in out
    code, out, err = command(*asked, *short, "--arch", "1x16", "--epochs", 1)
    assert code == 0, err
    (cells,) = [line.split() for line in out.splitlines() if "train 1x16 " in line and "along" not in line]
    assert all(float(cell) > 0 for cell in cells if cell[0].isdigit() and "x" not in cell)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--arch", "1x16"), "--arch goes with --preset or --epochs"),
        (("--epochs", 3), "go with --arch"),
        (("--arch", "1x16", "--preset", "nosuch"), "--preset nosuch"),
        (("--arch", "1x16", "--preset", "minilm", "--epochs", 1), "--preset and --epochs both say"),
        (("--arch", "1x17", "--epochs", 1), "1x17"),
        (("--max-length", 600), "--max-length 600 is more than"),
        (("--max-length", 600, "--arch", "1x16", "--epochs", 1), "--max-length 600 is more than"),
    ],
)
def test_misuse_of_costs(world: World, command: Command, options: tuple[object, ...], says: str) -> None:
    command.fails("plan", "--teacher", world.teacher, "--corpus", world.corpus, *options, code=2, says=says)
