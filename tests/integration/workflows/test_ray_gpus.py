"""How tasks of a Ray cluster share GPUs. The cluster here claims two GPUs, which nothing computes on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from minilm_cache.engines.ray_cluster import RayCluster
from minilm_cache.errors import InvalidConfigError, StorageError
from minilm_cache.session import Session


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Begin a cluster of one machine with two GPUs."""
    ray.shutdown()  # a test before may have begun a cluster in this process
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES")  # with which tests hide the GPUs that a machine has
        ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def process_and_gpus() -> tuple[int, str]:
    """Return what tells a worker from others, and the GPUs that it sees."""
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


def results(cluster: RayCluster, tasks: list[object]) -> list[tuple[int, str]]:
    return cluster.results(tasks, Session(), interrupted="{}")


def test_a_task_has_a_gpu_and_a_worker_of_its_own() -> None:
    cluster = RayCluster()
    assert cluster.gpus_per_task == 1
    tasks = results(cluster, [cluster.submit(process_and_gpus) for _ in range(3)])

    assert len({process for process, _ in tasks}) == 3  # one that has been used would keep its GPU's memory
    assert {gpus for _, gpus in tasks} <= {"0", "1"}


@pytest.mark.parametrize(
    ("gpus", "says"),
    [(3, "no machine of the cluster has more than 2 GPUs"), (1.5, "Take 1, or a number below 1")],
)
def test_what_no_machine_can_give_is_refused(gpus: float, says: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"--gpus-per-task {gpus:g}: .*{says}"):
        RayCluster(gpus)


def test_a_machine_without_the_common_folder_is_named(tmp_path: Path) -> None:
    cluster = RayCluster(0.5)
    with cluster.common(tmp_path / "study"):
        (file,) = (tmp_path / "study").iterdir()
        seen = cluster.submit(process_and_gpus)
        assert len(results(cluster, [seen])) == 1
        file.unlink()
        with pytest.raises(StorageError, match=r"does not see what another machine writes in .*study"):
            results(cluster, [cluster.submit(process_and_gpus)])
    assert not list((tmp_path / "study").iterdir())
