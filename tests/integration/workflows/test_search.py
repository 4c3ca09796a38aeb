"""Searches: budgets hold by measures of torch's own, rounds are ordinary runs, and stops change nothing."""

import json
import math
import re
from collections.abc import Callable
from operator import le
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel

from minilm_cache.errors import DivergedError, IdentityMismatchError, InterruptedRunError, InvalidConfigError
from minilm_cache.report.front import Round, SearchRecord, read_search
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.record import load_record
from minilm_cache.train.run import TrainResult, train_students
from minilm_cache.workflows.config import SearchConfig
from minilm_cache.workflows.search import search
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import VOCABULARY, World, save_teacher, write_corpus, write_groups

SHAPES = ("--layers", "1,2,3", "--widths", "16,32", "--pass-length", 8)
TRAINED = ("--objective", "embedding", "--steps", 9, "--batch-size", 8, "--device", "cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors of a tiny encoder of three layers of width 32."""
    root = tmp_path_factory.mktemp("world")
    encoder = save_teacher(root / "encoder")
    save_encoder(encoder, "mean", max_length=32)
    world = World(root, encoder, write_corpus(root / "corpus.txt", 120))
    return world.dump(**{"for": "embedding"}).path


def found(command: Command, cache: Path, out: Path, *words: object) -> dict[str, Any]:
    code, printed, err = command("search", cache, "--out", out, *SHAPES, *TRAINED, *words, "--json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(printed)
    return result


def exported_bytes(command: Command, student: str, out: Path, *words: object) -> int:
    """Return the bytes of the ONNX file that `export-model` writes of a student."""
    ship = ("export-model", student, "--onnx", "--out", out, "--texts", 8, "--max-length", 32, "--json")
    code, printed, err = command(*ship, *words)
    assert code == 0, err
    return int(json.loads(printed)["num_bytes"])


def sizes(arch: str) -> tuple[int, int, int]:
    """Return layers, width and feed-forward size of a shape."""
    shape, _, ffn = arch.partition(":ff")
    layers, width = map(int, shape.split("x"))
    return layers, width, int(ffn or 4 * width)


def test_a_winner_that_training_made_worse_is_not_recommended(tmp_path: Path, command: Command) -> None:
    encoder = save_teacher(tmp_path / "encoder")
    save_encoder(encoder, "mean", max_length=32)
    world = World(tmp_path, encoder, write_corpus(tmp_path / "corpus.txt", 800))
    cache = world.dump(**{"for": "embedding"}).path
    words = ("search", cache, *SHAPES[:4], "--max-parameters", "1M", *TRAINED, "--lr", "0.3")
    code, out, err = command(*words, "--out", tmp_path / "out")
    assert code == 1, out + err
    assert "best" in out
    assert "export-model" not in out
    assert "ended worse than it began its last round. Search again" in err
    code, out, _ = command(*words, "--out", tmp_path / "out", "--json")
    assert (code, json.loads(out)["search"]) == (1, str(tmp_path / "out"))


def test_the_best_of_what_fits_is_trained_to_the_end(cache: Path, tmp_path: Path, command: Command) -> None:
    """Each round has the better ones of the one before, and only shapes that no other one covers."""
    budget = AutoModel.from_pretrained(cache.parent / "encoder").num_parameters() - 4500
    result = found(command, cache, tmp_path / "out", "--max-parameters", budget)
    fitting = {each["arch"] for each in result["candidates"] if each["fits"]}
    assert fitting == {each["arch"] for each in result["candidates"] if each["num_parameters"] <= budget}
    tried = {each["arch"] for each in result["candidates"] if each["is_tried"]}
    assert 3 <= len(tried) < len(fitting)
    for each in fitting:
        larger = [all(map(le, sizes(each), sizes(other))) for other in fitting - {each}]
        assert (each in tried) is not any(larger)
    rounds = result["rounds"]
    assert [(len(each["losses"]), each["steps"]) for each in rounds] == [(3, 3), (1, 9)]
    for number, each in enumerate(rounds):
        record = load_record(tmp_path / "out" / each["run"])
        assert record.identity.steps == each["steps"]
        losses = {student.arch: student.loss_after for student in record.students}
        assert each["losses"] == losses
        order = sorted(losses, key=lambda arch: losses[arch] or 0)
        assert list(each["losses"]) == order
        if number + 1 < len(rounds):
            assert set(rounds[number + 1]["losses"]) == set(order[: len(rounds[number + 1]["losses"])])
    assert result["winner"] == next(iter(rounds[-1]["losses"]))
    student = AutoModel.from_pretrained(result["student"])
    assert student.num_parameters() <= budget
    (winner,) = (each for each in result["candidates"] if each["arch"] == result["winner"])
    files = Path(result["student"]).rglob("*.safetensors")
    assert sum(file.stat().st_size for file in files) == pytest.approx(winner["num_bytes"], abs=256)
    again = found(command, cache, tmp_path / "out", "--max-parameters", budget, "--max-hours", 9)
    assert again["rounds"] == rounds
    begin = ("search", cache, "--out", tmp_path / "out", *SHAPES, *TRAINED, "--max-parameters")
    code, printed, err = command(*begin, budget)
    assert code == 0, err
    assert "export-model" in printed
    assert "report" in printed
    command.fails(
        *begin, budget + 1, code=1, says="holds another search, which differs in search.max_parameters"
    )


def test_vocabularies_are_tried_beside_each_other(cache: Path, tmp_path: Path, command: Command) -> None:
    """Weights are those of torch's models, rounds go on from their own vocabulary, and the winner opens."""
    out, words = tmp_path / "out", ("--max-parameters", "10M", "--every", "--vocabularies", "9,12,all")
    shapes = ("--layers", "1", "--widths", "16,32", "--feed-forward", "4", "--keep", "0.6")
    result = found(command, cache, out, *words, *shapes)
    candidates = {(each["arch"], each["vocab"]): each for each in result["candidates"]}
    assert set(candidates) == {(arch, vocab) for arch in ("1x16", "1x32") for vocab in ("9", "12", None)}
    whole, small = candidates["1x32", None], candidates["1x32", "9"]
    assert whole["num_parameters"] - small["num_parameters"] == (len(VOCABULARY) - 9) * 32
    fewer = (len(VOCABULARY) - 9) * 32 * 4
    assert whole["num_bytes"] - small["num_bytes"] == pytest.approx(fewer, abs=16)  # the file's header
    first, *_, last = result["rounds"]
    assert sorted([first["run"], *first["more_runs"]]) == ["round-1", "round-1-vocab-12", "round-1-vocab-9"]
    assert len(first["losses"]) == 6
    for number, part in enumerate(result["rounds"]):
        for run in (part["run"], *part["more_runs"]):
            record = load_record(out / run)
            pieces = None if record.vocabulary is None else record.vocabulary.asked
            for student in record.students:
                name = student.arch if pieces is None else f"{student.arch} --vocab {pieces}"
                assert part["losses"][name] == student.loss_after
                if (
                    number and student.arch == "1x32"
                ):  # as wide as the teacher: without a map that is fitted anew
                    before = result["rounds"][number - 1]["losses"][name]
                    assert student.loss_before == pytest.approx(before, abs=1e-6)
    assert result["winner"] == next(iter(last["losses"]))
    pieces = candidates[result["winner"].split()[0], (result["winner"].split() + [None] * 2)[2]]
    size = AutoModel.from_pretrained(result["student"]).config.vocab_size
    assert size == int(pieces["vocab"] or len(VOCABULARY))
    code, printed, err = command("search", cache, "--out", out, *SHAPES, *TRAINED, *words, *shapes)
    assert code == 0, err
    assert "1x16 --vocab 9" in printed


def test_numbers_of_pieces_that_mean_the_same_are_tried_once(
    cache: Path, tmp_path: Path, command: Command
) -> None:
    """The cache has all pieces, and these are fewer than both numbers."""
    words = ("--max-parameters", "10M", "--layers", "1", "--widths", "16,32", "--vocabularies")
    for value, names in (("5k,9k", ["5000"]), ("cache,9000,all", [None])):
        out = tmp_path / value
        code, printed, err = command(
            "search", cache, "--out", out, *SHAPES, *TRAINED, *words, value, "--json"
        )
        assert code == 0, err
        assert "the same pieces as another" in err
        result = json.loads(printed)
        vocabularies = {each["vocab"] for each in result["candidates"]}
        times = {(each["arch"], each["latency_ms"]) for each in result["candidates"]}
        assert len(times) == len({each["arch"] for each in result["candidates"]})
        assert vocabularies == set(names)
        assert any(each["is_tried"] for each in result["candidates"])


def test_a_vocabulary_whose_students_diverge_ends_no_search(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(config: TrainConfig, *words: Any, **more: Any) -> TrainResult:
        if config.vocab == "9":
            raise DivergedError("every student diverged")
        return train_students(config, *words, **more)

    monkeypatch.setattr("minilm_cache.workflows.search.train_students", trained)
    words = {"max_parameters": 10**7, "layers": "1", "widths": "16,32", "every": True, "pass_length": 8}
    config = validated(SearchConfig, {**words, "feed_forward": "4", "vocabularies": "9,all"})
    train = {"objective": "embedding", "steps": 9, "batch_size": 8, "device": "cpu"}
    result = search(config, train, cache, out=tmp_path / "out", session=Session(tmp_path))
    losses = result.record.rounds[0].losses
    assert [name for name, loss in losses.items() if loss is None] == ["1x16 --vocab 9", "1x32 --vocab 9"]
    assert result.winner.vocab is None


def test_a_round_whose_students_all_diverge_is_the_last_one(
    cache: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student that is left is named with the run that holds it."""
    words = ("--max-parameters", "10M", "--every", "--vocabularies", "9,all", "--layers", "1")
    begin = ("search", cache, *SHAPES, *TRAINED, *words, "--feed-forward", "4", "--out")
    says = ("round-1: every student", "diverged within 1 step. Lower --lr")
    line = command.fails(*begin, tmp_path / "out", "--lr", "1e30", code=1, says=says)
    assert "before" not in line

    def trained(config: TrainConfig, *given: Any, **more: Any) -> TrainResult:
        if config.init is not None or config.vocab is None:
            raise DivergedError("every student diverged")
        return train_students(config, *given, **more)

    monkeypatch.setattr("minilm_cache.workflows.search.train_students", trained)
    line = command.fails(*begin, tmp_path / "other", code=1, says="round-2: ")
    assert re.search(r"before is 1x\d\d --vocab 9, of 1 step, in round-1-vocab-9\. ", line)


def test_vocabularies_that_there_are_not(cache: Path, tmp_path: Path, command: Command) -> None:
    words = ("search", cache, "--out", tmp_path / "out", *SHAPES, *TRAINED, "--max-parameters", "10M")
    for value in ("5k,5000", "few", "9,", "-3"):
        says = "give different numbers of pieces"
        command.fails(*words, f"--vocabularies={value}", code=2, says=says)
    command.fails(*words, "--vocabularies", "3", code=2, says="--vocabularies 3")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "objective", "donor"),
    [
        ("bert", "tinybert-prediction", None),
        ("electra", "tinybert-prediction", None),
        ("distilbert", "embedding", None),
        ("bert", "mlm-kd", None),
        ("bert", "embedding", "modernbert"),
    ],
)
def test_weights_and_bytes_are_those_of_the_file(
    tmp_path: Path, command: Command, *, family: str, objective: str, donor: str | None
) -> None:
    """With the head that the objective needs, and of the family that students are cut from."""
    head = {"tinybert-prediction": "sequences", "mlm-kd": "tokens"}.get(objective)
    encoder = save_teacher(tmp_path / "encoder", family, head=head)
    if objective == "embedding":
        save_encoder(encoder, "mean", max_length=32)
    packing = "packed" if objective == "mlm-kd" else "records"
    world = World(tmp_path, encoder, write_corpus(tmp_path / "corpus.txt", 120))
    cache = world.dump(**{"for": objective, "packing": packing})
    tried: tuple[object, ...] = ("--layers", 1, "--widths", 16, "--feed-forward", 4, "--max-parameters", "1M")
    words = (*tried, *TRAINED[2:], "--objective", objective)
    if donor is not None:
        words += ("--init", "slice", "--init-teacher", save_teacher(tmp_path / "donor", donor))
    code, out, err = command("search", cache.path, *words, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    result = json.loads(out)
    (each,) = result["candidates"]
    student = Path(result["student"])
    files = list(student.rglob("model.safetensors"))
    assert each["num_bytes"] == sum(file.stat().st_size for file in files[:1]) + 4 * map_of(student)
    with safe_open(student / "model.safetensors", "pt") as opened:
        saved = sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    assert each["num_parameters"] == saved + map_of(student)


def map_of(student: Path) -> int:
    """Return the weights of a student's linear map."""
    total = 0
    for file in student.glob("*_Dense/model.safetensors"):
        with safe_open(file, "pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total


def test_a_teacher_of_one_layer_has_students_of_one(tmp_path: Path, command: Command) -> None:
    encoder = save_teacher(tmp_path / "encoder", num_hidden_layers=1)
    save_encoder(encoder, "mean", max_length=32)
    cache = World(tmp_path, encoder, write_corpus(tmp_path / "corpus.txt", 120)).dump(**{"for": "embedding"})
    words = ("search", cache.path, "--widths", 16, "--feed-forward", 4, "--max-parameters", "1M", *TRAINED)
    code, out, err = command(*words, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    assert [each["arch"] for each in json.loads(out)["candidates"]] == ["1x16"]


def test_every_shape_is_tried_where_that_is_asked(cache: Path, tmp_path: Path, command: Command) -> None:
    """The form's bytes count, and the better half goes on."""
    words = ("--every", "--keep", 0.5, "--max-bytes", "10M", "--runtime", "onnx", "--feed-forward", "2")
    result = found(command, cache, tmp_path / "out", *words, "--layers", "1,2", "--widths", "32")
    assert all(each["is_tried"] for each in result["candidates"])
    assert [(len(each["losses"]), each["steps"]) for each in result["rounds"]] == [(2, 4), (1, 9)]
    sizes = {each["arch"]: each["num_bytes"] for each in result["candidates"]}
    assert sizes["2x32:ff64"] - sizes["1x32:ff64"] + 4 * 32 * 8 * 32 > 4 * 2 * 32 * 6 * 32
    assert result["teacher_latency_ms"] > 0
    # What the search has measured is what is written in the end.
    assert exported_bytes(command, result["student"], tmp_path / "shipped") == sizes[result["winner"]]


def test_the_bytes_of_a_cross_encoder_are_those_of_its_export(tmp_path: Path, command: Command) -> None:
    """Its head is a fifth of them."""
    teacher = save_teacher(tmp_path / "teacher", "distilbert", head="sequences", num_labels=1)
    world = World(tmp_path, teacher, write_groups(tmp_path / "groups.jsonl"))
    cache = world.dump(**{"pair_columns": "query,right+wrong", "for": "score"}).path
    shapes = ("--layers", 1, "--widths", 32, "--feed-forward", 1, "--runtime", "onnx", "--max-bytes", "10M")
    recipe = ("--objective", "score", "--steps", 2, "--batch-size", 8, "--device", "cpu")
    code, out, err = command("search", cache, *shapes, *recipe, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    result = json.loads(out)
    (candidate,) = result["candidates"]
    written = exported_bytes(command, result["student"], tmp_path / "shipped", "--min-cosine", 0)
    assert written == candidate["num_bytes"]


def test_the_page_says_what_became_of_each_shape(cache: Path, tmp_path: Path, command: Command) -> None:
    result = found(command, cache, tmp_path / "out", "--max-latency-ms", 1000, "--every", "--layers", "1,2")
    page = Path(result["report"]).read_text()
    record = SearchRecord.model_validate_json((tmp_path / "out/search.json").read_text())
    outcomes = {each.name: record.outcome(each) for each in record.candidates}
    assert [name for name, outcome in outcomes.items() if outcome == "found"] == [result["winner"]]
    stopped = [outcome for outcome in outcomes.values() if "stopped after" in outcome]
    assert len(stopped) == len(outcomes) - 1
    places = [int(outcome.split("place ")[1].split(" ")[0]) for outcome in stopped]
    assert 1 not in places
    assert all(f'<td class="name">{outcome}</td>' in page for outcome in outcomes.values())
    specs = [json.loads(part.split("</script>")[0]) for part in page.split('class="spec">')[1:]]
    marks, budget = sorted(specs[0]["datasets"].values(), key=len, reverse=True)
    assert {(mark["shape"], mark["held-out loss"]) for mark in marks} == {
        (name, loss) for done in record.rounds for name, loss in done.losses.items()
    }
    assert budget == [{"milliseconds": 1000.0, "name": "budget"}]

    code, printed, err = command("report", tmp_path / "out", "--out", tmp_path / "page.html", "--json")
    assert code == 0, err
    assert "Quality against latency" in (tmp_path / "page.html").read_text()
    assert len(json.loads(printed)["students"]) == sum(len(done.losses) for done in record.rounds)
    says = "It is a search: `minilm-cache report` takes it"
    command.fails("info", tmp_path / "out", code=1, says=says)
    for run in (tmp_path / "out").glob("round-*/run.json"):
        run.unlink()
    command.fails("report", tmp_path / "out", code=2, says=f"{tmp_path / 'out'}")


def test_what_a_search_has_left_out_is_said(cache: Path, tmp_path: Path, command: Command) -> None:
    words = ("--max-parameters", 30_000, "--layers", "1,3", "--widths", "16,32")
    result = found(command, cache, tmp_path / "out", *words)
    record = SearchRecord.model_validate_json((tmp_path / "out/search.json").read_text())
    for each in record.candidates:
        if each.num_parameters > 30_000:
            assert record.outcome(each) == "over the budget"
        elif not each.is_tried:
            assert record.outcome(each) == "a larger one fits"
    assert {each.fits for each in record.candidates} == {True, False}
    assert record.max_latency_ms is None
    begun = record.model_copy(update={"rounds": ()})
    (winner,) = (each for each in record.candidates if each.name == result["winner"])
    assert begun.outcome(winner) == "not trained yet"
    lost = Round(run="round-1", steps=3, losses={winner.name: None})
    assert begun.model_copy(update={"rounds": (lost,)}).outcome(winner) == "diverged within 3 steps"


def test_narrow_embeddings_fit_where_whole_ones_do_not(cache: Path, tmp_path: Path, command: Command) -> None:
    shapes = ("--layers", 2, "--widths", 32, "--feed-forward", 2, "--embedding-widths", "8,32")
    both = found(command, cache, tmp_path / "both", *shapes, "--max-parameters", "1M", "--every")
    weights = {each["arch"]: each["num_parameters"] for each in both["candidates"]}
    assert set(weights) == {"2x32:ff64", "2x32:ff64:e8"}
    for arch, count in weights.items():
        folder = tmp_path / "both/round-1/students" / arch.replace(":", "-")
        assert AutoModel.from_pretrained(folder).num_parameters() == count

    result = found(
        command, cache, tmp_path / "one", *shapes, "--max-parameters", weights["2x32:ff64"] - 1, "--steps", 2
    )
    assert result["winner"] == "2x32:ff64:e8"
    covered = found(command, cache, tmp_path / "out", *shapes, "--max-parameters", "1M", "--steps", 2)
    assert [each["arch"] for each in covered["candidates"] if each["is_tried"]] == ["2x32:ff64"]


class Stops:
    """Stops a search at its n-th question."""

    def __init__(self, after: int) -> None:
        """Say yes once `after` questions are asked."""
        self.left = after

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def test_stopped_twice_it_ends_as_undisturbed(cache: Path, tmp_path: Path) -> None:
    shapes = {"layers": "2,3", "widths": "16,32", "every": True}
    config = validated(SearchConfig, {"max_parameters": 10**6, **shapes})
    train = {"objective": "embedding", "steps": 9, "batch_size": 8, "device": "cpu", "checkpoint_steps": 1}

    def run(out: str, should_stop: Callable[[], bool] | None = None) -> SearchRecord:
        session = Session(tmp_path / "home", should_stop=should_stop or (lambda: False))
        return search(config, train, cache, out=tmp_path / out, session=session).record

    for number in (3, 11, 6):
        with pytest.raises(InterruptedRunError):
            run("stopped", Stops(number))
    assert [each.losses for each in run("stopped").rounds] == [each.losses for each in run("whole").rounds]
    file = tmp_path / "whole" / "search.json"
    record = json.loads(file.read_text())
    for name in ("own_labels", "label_weight", "label_column"):  # an earlier release did not have them
        del record["settings"]["train"][name]
    file.write_text(json.dumps(record))
    assert run("whole").rounds == run("stopped").rounds
    record = json.loads(file.read_text())
    first, *others = record["candidates"]
    asked = record["settings"]["search"]
    changes: list[dict[str, Any]] = [
        {"settings": {}},
        {"settings": {"search": {}}},
        {"settings": {"search": [1]}},
        *({"settings": {"search": {**asked, "speedup": value}}} for value in (0, "x", math.inf)),
        {"settings": {"search": {**asked, "max_latency_ms": "x"}}},
        {"candidates": []},
        {"candidates": [first, first, *others]},
        {"candidates": [{**each, "is_tried": False} for each in record["candidates"]]},
        {"candidates": [{**first, "latency_ms": 0}, *others]},
        {"rounds": [{**record["rounds"][0], "losses": {"9x9": 1.0}}]},
        {"rounds": [{**record["rounds"][0], "losses": {first["arch"]: math.nan}}]},
    ]
    for change in changes:
        file.write_text(json.dumps({**record, **change}))
        with pytest.raises(IdentityMismatchError, match="is damaged"):
            read_search(file.parent)
    file.write_text(json.dumps({**record, "candidates": [first], "rounds": []}))
    with pytest.raises(IdentityMismatchError, match="was begun with other shapes than these settings"):
        run("whole")


def test_misuse_is_one_line(cache: Path, tmp_path: Path, command: Command) -> None:
    begin = ("search", cache, "--out", tmp_path / "out", *SHAPES, *TRAINED)
    command.fails(*begin, code=2, says="give a budget")
    both = ("--max-latency-ms", 4, "--speedup", 2)
    command.fails(*begin, *both, code=2, says="give one")
    line = command.fails(*begin, "--max-latency-ms", 1e-6, code=2, says="no shape is within the budget")
    assert "The nearest is" in line
    few = ("--max-parameters", "1M", "--every", "--keep", 0.1, "--steps", 2)
    command.fails(*begin, *few, code=2, says="--steps: 2 are too few for")
    command.fails(*begin, "--max-bytes", 10, code=2, says="no shape is within the budget")
    command.fails(*begin, "--speedup", 1, "--layers", "two", code=2, says="--layers two")
    command.fails(*begin, "--speedup", 1, "--widths", 33, code=2, says="--widths: shape 1x33")
    command.fails(*begin, "--speedup", 1, "--embedding-widths", "x", code=2, says="--embedding-widths x")
    command.fails(*begin, "--speedup", 1, "--embedding-widths", 32, code=2, says="none is below")
    command.fails(*begin, "--speedup", 1, "--init", cache, code=2, says="is one model, and a search")
    command.fails(*begin, "--speedup", 1, "--vocab", 40, code=2, says="--vocabularies 5k,all")
    other = save_teacher(tmp_path / "other", seed=3)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"ba"', '"baba"'))
    donor = ("--speedup", 1, "--init", "slice", "--init-teacher", other)
    command.fails(*begin, *donor, code=2, says="has another tokenizer than this cache")
    wrong = [word if word != "embedding" else "ranknet" for word in begin]
    command.fails(*wrong, "--speedup", 1, code=2, says="--objective ranknet needs scores of pairs")
    command.fails(*begin[:2], "--out", cache / "manifest.json", "--speedup", 1, code=2, says="is a file")
    command.fails(*begin, "--speedup", 1, "--runtime", "tflite", code=2, says="--runtime")
    command.fails(*begin, "--speedup", 1, "--pass-length", 500, code=2, says="--pass-length 500")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes").write_text("mine")
    command.fails(*begin, "--max-parameters", "1M", code=1, says=("is not empty", "holds no search"))
    (tmp_path / "out/search.json").write_text("{}")
    command.fails(*begin, "--max-parameters", "1M", code=1, says="is damaged")


def test_latency_is_that_of_a_pass_in_torch(cache: Path, tmp_path: Path, command: Command) -> None:
    """A budget of time keeps what is faster, and the winner is measured anew."""
    torch.manual_seed(0)
    result = found(command, cache, tmp_path / "out", "--max-latency-ms", 1000)
    assert all(each["fits"] for each in result["candidates"])
    assert [each["arch"] for each in result["candidates"] if each["is_tried"]] == ["3x32"]
    assert [len(each["losses"]) for each in result["rounds"]] == [1]
    assert 0 < result["latency_ms"] < 1000
    with pytest.raises(InvalidConfigError, match="give one"):
        validated(SearchConfig, {"max_latency_ms": 1, "speedup": 1})


def test_losses_of_other_depths_have_no_order(world: World, tmp_path: Path, command: Command) -> None:
    cache = world.dump(**{"for": "tinybert"}, codec="vectors").path
    words = ("search", cache, "--objective", "tinybert", "--max-parameters", "1M", "--out", tmp_path / "out")
    sizes = ("--widths", 32, "--steps", 9, "--batch-size", 4, "--device", "cpu")
    says = ("--objective tinybert compares other layers", "such as 1")
    command.fails(*words, *sizes, "--layers", "1,2", code=2, says=says)


def test_what_is_learned_first_is_learned_once(world: World, tmp_path: Path) -> None:
    save_encoder(world.teacher, "mean", max_length=32)
    cache = world.dump(**{"for": "minilm,embedding"}, codec="vectors").path
    config = validated(
        SearchConfig, {"max_parameters": 10**6, "layers": "1,2", "widths": "32", "every": True}
    )
    train = {"objective": "embedding", "first": "minilm", "first_steps": 2, "steps": 6, "batch_size": 4}
    session = Session(tmp_path / "home")
    search(config, {**train, "device": "cpu"}, cache, out=tmp_path / "out", session=session)
    first = sorted(path.name for path in (tmp_path / "out").glob("*-first"))
    assert first == ["round-1-first"]


def test_a_winner_that_is_not_what_was_asked_for_is_named(
    cache: Path, tmp_path: Path, command: Command
) -> None:
    found(
        command,
        cache,
        tmp_path / "out",
        "--max-latency-ms",
        1e4,
        "--layers",
        1,
        "--widths",
        "16,32",
        "--every",
    )
    record = SearchRecord.model_validate_json((tmp_path / "out/search.json").read_text())
    name = next(iter(record.rounds[-1].losses))
    assert record.doubts(name, 1.0) == []
    (slow,) = record.doubts(name, 2e4)
    assert "above the budget of 10000.00 ms" in slow
    worse = record.model_copy(
        update={"rounds": (*record.rounds, Round(run="round-9", steps=9, losses={name: 1e6}))}
    )
    assert "ended at a loss of 1000000.0000" in worse.doubts(name, 1.0)[0]
