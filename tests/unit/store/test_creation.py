"""Who may create a cache, and what makes two manifests one cache's."""

from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, InterruptedRunError, StorageError
from minilm_cache.session import Session
from minilm_cache.store.creation import creating, differing_fields, prepare_root
from minilm_cache.store.layout import CREATE_LOCK
from minilm_cache.store.reader import read_manifest
from minilm_cache.wording import differing_values
from tests.unit.store.support import GOLDEN, Recorder


@pytest.mark.parametrize("names", [[], [".manifest.json.12.partial"], ["locks/create.lock"]])
def test_what_interrupted_processes_leave_is_no_hindrance(tmp_path: Path, names: list[str]) -> None:
    root = tmp_path / "above/cache"
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    prepare_root(root)

    assert root.is_dir()


@pytest.mark.parametrize("name", ["notes.txt", "commits/00000.json", ".hidden"])
def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(IdentityMismatchError):
        prepare_root(tmp_path)
    with pytest.raises(IdentityMismatchError), creating(tmp_path, Session()):
        pass

    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_has_become_a_cache_meanwhile_is_accepted(tmp_path: Path) -> None:
    for name in ("manifest.json", "zarr.json"):
        (tmp_path / name).touch()
    prepare_root(tmp_path)


def test_locks_in_a_linked_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/locks").symlink_to(tmp_path / "outside")
    with pytest.raises(CacheCorruptError), creating(tmp_path / "cache", Session()):
        pass

    assert list((tmp_path / "outside").iterdir()) == []


def test_a_file_in_place_of_the_folder_is_the_file_systems_refusal(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError), creating(tmp_path / "file/cache", Session()):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_the_right_to_create_is_held_by_one_and_given_back(tmp_path: Path, fails: bool) -> None:
    other, progress = FileLock(tmp_path / CREATE_LOCK), Recorder()

    def hold() -> None:
        with creating(tmp_path, Session(progress=progress)):
            with pytest.raises(Timeout):
                other.acquire(timeout=0)
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            hold()
    else:
        hold()
    other.acquire(timeout=0)
    other.release()

    assert progress.notes == []


def test_who_waits_for_the_right_to_create_is_told_and_can_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, progress = tmp_path / "cache", Recorder()
    (root / "locks").mkdir(parents=True)
    with FileLock(root / CREATE_LOCK):
        acquire = FileLock.acquire
        monkeypatch.setattr(FileLock, "acquire", lambda self, timeout: acquire(self, timeout=0))
        with (
            pytest.raises(InterruptedRunError),
            creating(root, Session(progress=progress, should_stop=lambda: True)),
        ):
            pytest.fail("entered while another process creates the cache")

    assert len(progress.notes) == 1
    assert [path.name for path in root.rglob("*")] == ["locks", "create.lock"]


DOCUMENT = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(0, 2), inner), max_size=3),
)


def leaves(document: object, other: object, prefix: str = "") -> set[str]:
    """Return the dotted names at which two documents of numbers differ."""
    if not (isinstance(document, dict) and isinstance(other, dict)):
        return set() if document == other else {prefix}
    names = document.keys() | other.keys()
    parts = (leaves(document.get(n), other.get(n), f"{prefix}.{n}".lstrip(".")) for n in names)
    return set().union(*parts)


@settings(max_examples=50, deadline=None)
@given(DOCUMENT, DOCUMENT)
def test_every_differing_value_is_named_once(left: dict[str, object], right: dict[str, object]) -> None:
    names = [text.split()[0] for text in differing_values(left, right)]

    assert sorted(names) == sorted(leaves(left, right))


def test_manifests_differ_in_what_determines_the_content_and_in_nothing_else() -> None:
    manifest = read_manifest(GOLDEN / "v1")
    identity = manifest.identity
    labels = manifest.labels.model_copy(update={"teacher": "another name"})
    codec = identity.codec.model_copy(update={"k": 7})
    packing = identity.packing.model_copy(update={"seed": 12345})
    other = manifest.model_copy(
        update={
            "identity": identity.model_copy(update={"codec": codec, "packing": packing}),
            "shard_tokens": 2 * manifest.shard_tokens,
        }
    )

    assert differing_fields(manifest, manifest.model_copy(update={"labels": labels, "complete": False})) == []
    assert [text.split()[0] for text in differing_fields(other, manifest)] == [
        "codec.k",
        "packing.seed",
        "shard_tokens",
    ]


def test_a_group_is_named_and_a_long_value_is_shortened() -> None:
    there = {"states": {"pooled": {"mode": "mean"}}, "sha256": "0" * 64, "codec": {"name": "none"}}
    asked = {"sha256": "1" * 64, "codec": {"name": "vectors"}}

    assert list(differing_values(there, asked)) == [
        "codec.name (none there, vectors asked)",
        "sha256 (0000000000000... there, 1111111111111... asked)",
        "states (some there, nothing asked)",
    ]
