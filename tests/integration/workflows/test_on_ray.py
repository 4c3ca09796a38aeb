"""Dumps, studies, chains and tokens on a real local Ray cluster: the same results as without it."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from filelock import FileLock

from minilm_cache.corpus import tokenise as tokenising
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.dump.into_store import dump_on_ray
from minilm_cache.dump.run import DumpResult
from minilm_cache.engines.ray_cluster import RayCluster
from minilm_cache.errors import CorpusError, InterruptedRunError, InvalidConfigError
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.session import Session
from minilm_cache.workflows.chain import run_chain
from minilm_cache.workflows.study import run_study
from minilm_cache.workflows.study_spec import read_study
from tests.fixtures import Command
from tests.integration.dump.test_dump import arrays_of
from tests.integration.workflows.test_chain import chain_config, content
from tests.integration.workflows.test_study import document, timeless
from tests.support import World, dump_arguments
from tests.unit.store.support import Recorder


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Return a cluster of two workers on this machine."""
    ray.shutdown()  # a test before may have begun a cluster in this process
    with pytest.MonkeyPatch.context() as patched:
        # Ray's workers have the least priority, with which they starve beside the other tests.
        patched.setenv("RAY_worker_niceness", "0")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield RayCluster()
    ray.shutdown()


def test_a_study_on_ray_that_was_stopped_ends_as_the_study_without_it(
    world: World, cluster: RayCluster
) -> None:
    study, folder = read_study(document(world, seed=" [0]")), world.root / "together"
    with pytest.raises(InterruptedRunError, match=r"of 5 jobs to do: what is complete"):
        run_study(
            study, folder, cluster=cluster, session=Session(world.home, should_stop=(folder / "runs").exists)
        )
    together = run_study(study, folder, cluster=cluster, session=Session(world.home))
    alone = run_study(study, world.root / "alone", session=Session(world.home))

    rows = [timeless(study.students.to_pylist()) for study in (together, alone)]
    for row in (*rows[0], *rows[1]):
        del row["bytes_read"]  # a task that is killed does not say what it has read since its checkpoint
    assert rows[0] == rows[1]
    for file in (world.root / "alone").rglob("model.safetensors"):
        other = folder / file.relative_to(world.root / "alone")
        assert other.read_bytes() == file.read_bytes()
    assert together.report.stat().st_size > 10_000


def test_what_is_cancelled_holds_no_lock_afterwards(tmp_path: Path, cluster: RayCluster) -> None:
    lock, held = tmp_path / "lock", tmp_path / "held"

    def hold() -> None:
        with FileLock(lock):
            held.touch()
            time.sleep(600)

    with pytest.raises(InterruptedRunError, match="1 of 1"):
        cluster.results(
            [cluster.submit(hold)], Session(should_stop=held.exists), interrupted="{} of 1 call to do"
        )
    with FileLock(lock, timeout=0):
        assert held.exists()


def test_a_chain_on_ray_is_the_chain_without_it(world: World, cluster: RayCluster, soak: int) -> None:
    if soak == 1:
        pytest.skip("a study runs its jobs on Ray in the same way; both with --soak")
    config = chain_config(world)
    alone = run_chain(config, world.root / "alone", session=Session(world.home))
    together = run_chain(config, world.root / "together", cluster=cluster, session=Session(world.home))

    assert together.record == alone.record
    assert content(together.path) == content(alone.path)


def test_text_is_tokenised_on_ray(world: World, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    del cluster  # Ray's pool takes the cluster that this process has joined
    monkeypatch.setattr(tokenising, "_PART_BYTES", 1000)
    corpus, tokenizer = load_corpus(str(world.corpus)), load_tokenizer(world.teacher)
    alone = tokenise(corpus, tokenizer, session=Session(world.root / "alone"))
    together = tokenise(corpus, tokenizer, engine="ray", session=Session(world.root / "together"))

    assert len(together.record.parts) > 2
    assert together.record == alone.record


def test_an_error_on_ray_is_the_error_itself(world: World, cluster: RayCluster) -> None:
    document(world)
    world.corpus.unlink()
    with pytest.raises(CorpusError, match="does not exist"):
        run_study(
            read_study(world.root / "shapes.yaml"),
            world.root / "study",
            cluster=cluster,
            session=Session(world.home),
        )


def wait_for_a_commit(cache: Path, dump: Future[DumpResult]) -> None:
    deadline = time.monotonic() + 200
    while not list(cache.glob("commits/*.json")):
        assert not dump.done(), dump.result()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_a_worker() -> None:
    """SIGKILL to whichever rank is at work."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["cmdline"]):
            if "ray::_dump_rank" in " ".join(process.info["cmdline"] or ()):
                process.kill()
                return
        time.sleep(0.01)
    raise AssertionError("no rank is at work")


def test_ray_starts_a_killed_rank_again(world: World, cluster: RayCluster) -> None:
    del cluster  # `dump_on_ray` takes the cluster that this process has joined
    world.corpus.write_text(world.corpus.read_text() * 4)
    expected = arrays_of(world.dump("whole", batch_size=1).path)
    cache, config = world.root / "cache", world.config(batch_size=1, world_size=2)
    progress = Recorder()
    with ThreadPoolExecutor(1) as thread:
        dump = thread.submit(dump_on_ray, config, out=cache, session=Session(world.home, progress=progress))
        wait_for_a_commit(cache, dump)
        kill_a_worker()
        before = {record: record.read_bytes() for record in cache.glob("commits/*.json")}
        result = dump.result(200)

    assert "2 ranks as tasks of Ray, each with a core" in progress.notes
    assert result.manifest.complete
    assert arrays_of(cache) == expected
    assert all(record.read_bytes() == content for record, content in before.items())


def test_a_dump_on_ray_can_be_interrupted(world: World, cluster: RayCluster) -> None:
    del cluster
    world.corpus.write_text(world.corpus.read_text() * 4)
    cache, config = world.root / "cache", world.config(batch_size=1, world_size=2)
    session = Session(world.home, should_stop=lambda: bool(list(cache.glob("commits/*.json"))))
    with pytest.raises(InterruptedRunError, match="of 2 ranks to do: committed shards are kept"):
        dump_on_ray(config, out=cache, session=session)
    world.dump(batch_size=1)

    assert arrays_of(cache) == arrays_of(world.dump("whole", batch_size=1).path)


def test_a_dump_on_ray_is_a_command_whose_errors_are_one_line(
    world: World, command: Command, cluster: RayCluster
) -> None:
    del cluster
    arguments = [*dump_arguments(world), "--engine", "ray", "--world-size", 2]
    code, out, err = command(*arguments)
    assert code == 0, err
    assert "complete" in out
    assert arrays_of(world.root / "cache") == arrays_of(world.dump("whole").path)
    command.fails(*arguments, "--corpus", world.root / "none", code=1, says="does not exist")


def test_tasks_take_what_the_cluster_has(cluster: RayCluster) -> None:
    del cluster
    with pytest.raises(InvalidConfigError, match="no machine of the cluster has more than 0"):
        RayCluster(gpus_per_task=0.5)


def test_an_address_without_a_cluster_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself asks it for minutes."""
    for address in ("127.0.0.1:9", "ray://127.0.0.1:9", "127.0.0.1:99999"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(InvalidConfigError, match=f"RAY_ADDRESS {address}"):
            RayCluster()


def test_engines_that_are_not_known_are_refused(world: World, command: Command) -> None:
    study = document(world)
    command.fails("study", study, "--engine", "spark", code=2, says="unknown engine. Use ray")
    command.fails("study", study, "--gpus-per-task", 0.5, code=2, says="Add --engine ray")
