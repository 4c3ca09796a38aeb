"""Which GPU a process takes. No test here needs one: torch is asked only how many there are."""

import pytest
import torch

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.device import choose_device


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch count four GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("variable", "number", "expected"),
    [
        (None, "", "cuda"),
        ("LOCAL_RANK", "3", "cuda:3"),
        ("SLURM_LOCALID", "1", "cuda:1"),
        ("LOCAL_RANK", "6", "cuda:2"),  # more processes than GPUs
    ],
)
def test_each_process_of_a_machine_takes_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, number: str, expected: str
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, number)

    assert choose_device(None) == torch.device(expected)


def test_without_a_gpu_processes_take_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "3")

    assert choose_device(None) == choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["meta", "mps", "vulkan", "cuda:7", "gpu"])
def test_a_device_that_computes_nothing_is_refused(name: str) -> None:
    with pytest.raises(
        InvalidConfigError, match=rf"^--device {name}: .{{1,60}}\. Use cpu, or leave it out\.$"
    ):
        choose_device(name)
