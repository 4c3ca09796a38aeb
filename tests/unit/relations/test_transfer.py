"""Copies between the CPU and a device: which of them are waited for, on a pretend accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from minilm_cache.relations.transfer import Arrival, pin, send
from tests.accelerator import accelerator

CPU = torch.device("cpu")


def test_nothing_is_copied_on_a_cpu() -> None:
    values = torch.arange(4)

    assert send(values, CPU) is values
    assert pin(values, CPU) is values
    assert Arrival({"values": values}).wait()["values"] is values


def test_a_copy_to_a_device_is_not_waited_for() -> None:
    with accelerator() as (device, counts):
        pinned = pin(torch.arange(4), device)
        sent = send(pinned, device)
        again = send(torch.arange(4), device)

        assert not counts.waits
        assert counts.copies.total() == 2
        assert send(sent, device) is sent
        assert sent.tolist() == again.tolist() == [0, 1, 2, 3]


def test_a_copy_from_a_device_is_waited_for_once_when_it_is_needed() -> None:
    with accelerator() as (device, counts):
        parts = {"first": torch.ones(2, device=device), "second": torch.zeros(3, device=device)}
        arrival = Arrival(parts)
        assert not counts.waits
        arrived = arrival.wait()

        assert counts.waits.total() == 1
        assert {name: values.tolist() for name, values in arrived.items()} == {
            "first": [1, 1],
            "second": [0, 0, 0],
        }
        assert all(values.device == CPU for values in arrived.values())


def test_memory_is_pinned_by_the_gpu_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other GPU would give a context, and its memory, to every process."""
    current: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    pinned_by: list[torch.device] = []

    def pin_memory(values: torch.Tensor) -> torch.Tensor:
        pinned_by.extend(current)
        return values

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    pin(torch.arange(3), torch.device("cuda", 3))

    assert pinned_by == [torch.device("cuda", 3)]


def test_the_event_of_a_copy_is_of_the_gpu_that_is_copied_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event on the current GPU's stream would say at once that another GPU's rows are there."""
    steps: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            steps.append(stream)

        def synchronize(self) -> None:
            steps.append("waited")

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 3)

        def to(self, *place: object, **how: object) -> torch.Tensor:
            steps.append((*place, how))
            return torch.ones(2)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    copied = Arrival({"rows": torch.zeros(2).as_subclass(OnGpu)}).wait()

    assert copied["rows"].tolist() == [1, 1]
    assert steps == [("cpu", {"non_blocking": True}), "stream of cuda:3", "waited"]


def test_nothing_arrives_of_nothing() -> None:
    assert Arrival({}).wait() == {}
