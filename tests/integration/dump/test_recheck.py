"""`verify --teacher`: a cache against the teacher and the corpus it says it was made with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from minilm_cache.signals.codec import SignalsCodec
from minilm_cache.storage_schema.identity import CacheIdentity
from tests.fixtures import Command
from tests.integration.store.test_hostile import replace_in_shard
from tests.support import World, save_teacher, tiny_tokenizer, write_corpus, write_document, write_revisions


@pytest.mark.parametrize("codec", ["topk", "vectors", "dense"])
@pytest.mark.parametrize("packing", ["packed", "records"])
def test_the_right_teacher_and_corpus_are_recognised(
    world: World, command: Command, codec: str, packing: str
) -> None:
    path = world.dump(codec=codec, packing=packing).path
    arguments = ("verify", path, "--teacher", world.teacher, "--corpus", world.corpus)
    code, out, err = command(*arguments, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["shards_to_redo"] == found["teacher"]["identity"] == []
    assert {one["shard"] for one in found["teacher"]["differences"]} == set(range(6))
    for one in found["teacher"]["differences"]:
        assert one["kl"] == pytest.approx(one["measured"], rel=1, abs=0.01)
    assert "The teacher, run again on a sample" in command(*arguments)[1]


def test_every_layer_is_compared(world: World, command: Command) -> None:
    path = world.dump(codec="vectors", layers=(0, 2)).path
    code, out, err = command("verify", path, "--teacher", world.teacher, "--json")
    assert code == 0, err
    assert {one["layer"] for one in json.loads(out)["teacher"]["differences"]} == {0, 2}


def test_what_the_cache_records_of_teacher_and_text_is_repeated(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_revisions(world.root / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(world.root / "hub"))
    texts = world.root / "texts.jsonl"
    records = [{"text": "no text of it", "body": line} for line in world.corpus.read_text().split("\n\n")]
    texts.write_text("\n".join(map(json.dumps, records)))
    settings = {"teacher": "org/teacher", "revision": "v1", "corpus": str(texts), "text_column": "body"}
    path = world.dump(**settings).path
    words = ("verify", path, "--teacher", "org/teacher", "--corpus", texts)
    code, _, err = command(*words)
    assert code == 0, err
    command.fails(*words, "--revision", "main", code=3, says="differ in the teacher's weights_sha256")
    command.fails(*words, "--text-column", "text", code=3, says="differ in the corpus")
    command.fails("verify", path, "--revision", "v1", code=2, says="go with --teacher")
    (world.root / "hub/models--org--teacher/refs/main").unlink()
    assert command(*words)[0] == 0, "the default revision is not asked for"
    other = world.root / "other.jsonl"
    other.write_text(
        texts.read_text().replace('"body"', '"text2"').replace('"text"', '"no"').replace("text2", "text")
    )
    code, _, err = command("verify", path, "--teacher", "org/teacher", "--corpus", other)
    assert code == 0, err
    _, out, _ = command("info", path)
    assert "v1" in out
    assert "of column body" in out


def swapped_weights(world: World) -> None:
    save_teacher(world.teacher, seed=1)


def swapped_tokenizer(world: World) -> None:
    tokenizer = tiny_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["model"]["vocab"] = dict(
        zip(backend["model"]["vocab"], reversed(backend["model"]["vocab"].values()), strict=True)
    )
    file = world.teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {**backend["model"]["vocab"], "[PAD]": 0, "[CLS]": 2, "[SEP]": 3}
    file.write_text(json.dumps(content))


def swapped_corpus(world: World) -> None:
    world.corpus.write_text(world.corpus.read_text().replace("ba", "be", 1))


def other_shape(world: World) -> None:
    shutil.rmtree(world.teacher)
    save_teacher(world.teacher, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("swap", "says"),
    [
        (swapped_weights, "differ in the teacher's weights_sha256"),
        (swapped_tokenizer, "differ in the tokenizer"),
        (swapped_corpus, "differ in the corpus"),
        (other_shape, "the teacher's num_layers"),
    ],
)
def test_what_was_swapped_is_named(world: World, command: Command, swap: object, says: str) -> None:
    path = world.dump().path
    assert callable(swap)
    swap(world)
    command.fails(
        *("verify", path, "--teacher", world.teacher, "--corpus", world.corpus),
        code=3,
        says=("was not made from this teacher and text", says),
    )


def test_relations_of_another_teacher_are_found_where_hashes_lie(
    world: World, command: Command, tmp_path: Path
) -> None:
    """A shard of another teacher's cache, its record and its hashes made to fit."""
    path = world.dump(codec="vectors").path
    other = World(tmp_path, save_teacher(tmp_path / "other", seed=1), world.corpus)
    foreign = other.dump("foreign", codec="dense").path
    dense = world.dump("dense", codec="dense").path
    for kind in ("attention", "value"):
        name = f"relations/{kind}/probability/c/1/0/0"
        content = (foreign / name).read_bytes()
        replace_in_shard(dense, name, lambda _, content=content: content)  # type: ignore[misc]
    assert command("verify", "--full", dense)[0] == 0
    command.fails(
        *("verify", dense, "--teacher", world.teacher),
        code=3,
        says=("other relations or tokens", "in shard 1 of"),
    )
    manifest = json.loads((dense / "manifest.json").read_text())
    for fidelity in manifest["measured"]["fidelity"]:
        for relation in fidelity["relations"].values():
            relation["kl_stored_to_teacher"] = 9.0
    write_document(dense / "manifest.json", manifest)
    command.fails(*("verify", dense, "--teacher", world.teacher), code=3, says="in shard 1 of")
    assert command("verify", path, "--teacher", world.teacher)[0] == 0


def test_the_noise_floor_is_what_the_codec_makes_of_the_teacher(world: World, command: Command) -> None:
    """Nothing was changed since the dump, so what is stored is what encoding anew gives."""
    for codec in ("vectors", "topk"):
        path = world.dump(codec, codec=codec).path
        code, out, err = command("verify", path, "--teacher", world.teacher, "--json")
        assert code == 0, err
        for one in json.loads(out)["teacher"]["differences"]:
            assert one["kl"] == pytest.approx(one["floor"], rel=0.02)
            assert 0 < one["floor"] < 2 * one["measured"] + 0.01


def test_tokens_of_another_text_are_found(world: World, command: Command) -> None:
    """The manifest claims a corpus that the tokens are not of."""
    path = world.dump(codec="dense").path
    claimed = json.loads((path / "manifest.json").read_text())["identity"]["corpus"]["sha256"]
    mine = world.corpus.read_text()
    world.corpus.write_text(mine.replace("ba", "be"))
    other = world.dump("other", codec="dense").path
    content = (other / "manifest.json").read_text()
    foreign = json.loads(content)["identity"]["corpus"]["sha256"]

    manifest = json.loads(content.replace(foreign, claimed))
    manifest["fingerprint"] = CacheIdentity.model_validate_json(
        json.dumps(manifest["identity"])
    ).fingerprint()
    old = json.loads(content)["fingerprint"]
    write_document(other / "manifest.json", manifest)
    for record in (other / "commits").iterdir():
        write_document(record, json.loads(record.read_text().replace(old, manifest["fingerprint"])))
    world.corpus.write_text(mine)
    assert command("verify", "--full", other)[0] == 0
    command.fails(
        *("verify", other, "--teacher", world.teacher, "--corpus", world.corpus),
        code=3,
        says="other relations or tokens",
    )


def test_options_of_the_teacher_need_one(world: World, command: Command) -> None:
    world.dump()
    command.fails(
        *("verify", world.root / "cache", "--corpus", world.corpus),
        code=2,
        says="go with --teacher, and only",
    )
    command.fails(
        "verify",
        world.root / "cache",
        "--teacher",
        "no/such",
        code=1,
        says="there is no folder no/such, and the hub",
    )


def test_a_damaged_cache_names_the_shards_to_redo(world: World, command: Command) -> None:
    path = world.dump().path
    for shard in (1, 4):
        (path / f"relations/value/weight/c/{shard}/0/0").unlink()
    code, out, err = command("verify", path, "--json")
    assert code == 3
    assert json.loads(out)["shards_to_redo"] == [1, 4]
    assert "which writes shard 1, 4 again" in err
    assert world.dump().shards_written == 2
    assert command("verify", "--full", path)[0] == 0


def test_states_that_are_not_the_teachers_are_named(tmp_path: Path, command: Command) -> None:
    world = World(
        tmp_path, save_teacher(tmp_path / "teacher", head="tokens"), write_corpus(tmp_path / "text.txt")
    )
    world.dump(hidden=(1, 3), first_hidden="last", masked_hidden="last", labels=True)
    words = ("verify", tmp_path / "cache", "--teacher", world.teacher)
    code, out, err = command(*words)
    assert code == 0, err
    assert "states/hidden/3" in out
    encode = SignalsCodec.encode

    def hollow(self: SignalsCodec, *given: Any, **more: Any) -> dict[str, Any]:
        found = encode(self, *given, **more)
        return {path: rows * 0 if path.endswith("codes") else rows for path, rows in found.items()}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SignalsCodec, "encode", hollow)
        world.dump("hollow", hidden=(1, 3), first_hidden="last", masked_hidden="last", labels=True)
    command.fails(
        *("verify", "--full", tmp_path / "hollow", "--teacher", world.teacher),
        code=3,
        says="holds other states than this teacher gives: states/hidden/1, states/hidden/3, states/masked/3",
    )
