"""A signal and an objective of one's own, in one file: dumped, added, shown, checked, shared, learned, reported."""

import json

import torch
from torch import Tensor
from transformers import AutoModel

from minilm_cache.cache import open_cache
from minilm_cache.models.tap import Reading, Tap
from minilm_cache.objectives.base import (
    ObjectiveKind,
    ObjectiveRequest,
    Parts,
    StudentFacts,
    StudentNeeds,
    StudentObjective,
    valid_tokens,
)
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.spec import Needs, ObjectiveSpec, register_objective
from minilm_cache.relations.loss import Method
from minilm_cache.session import ALONE
from minilm_cache.signals.base import OwnSignal, Taken
from minilm_cache.signals.table import register_signal
from minilm_cache.storage_schema.identity import TeacherIdentity
from minilm_cache.storage_schema.states import SignalName
from minilm_cache.store.pull import pull
from minilm_cache.train.record import load_record
from tests.conftest import Command
from tests.support import World, dump_arguments

NORMS = SignalName("norms")


class Norms(OwnSignal):
    name, axis = "norms", "token"

    def width(self, teacher: TeacherIdentity) -> int:
        return 1

    def tap(self, name: SignalName, num_layers: int) -> Tap:
        return Tap(hidden=(num_layers,))

    def values(self, name: SignalName, taken: Taken) -> Tensor:
        return taken.outputs.hidden[taken.num_layers].norm(dim=-1, keepdim=True)


class NormObjective(StudentObjective):
    needs = StudentNeeds(hidden=(2,))

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> Parts:
        difference = reading.hidden[2].norm(dim=-1, keepdim=True) - batch.signals[NORMS]
        return {"norm": difference[valid_tokens(batch)].square().mean()}


class ByNorms(ObjectiveKind):
    def wanted(self, request: ObjectiveRequest) -> WantedTargets:
        return WantedTargets(kinds=(), signals=(NORMS,))

    def build(self, request: ObjectiveRequest, wanted: WantedTargets, student: StudentFacts) -> NormObjective:
        return NormObjective()


def test_a_signal_of_ones_own_goes_the_whole_way(world: World, command: Command, store: str) -> None:
    register_signal(Norms())
    needs = Needs(signals=("norms",), relations=False)
    register_objective(
        ObjectiveSpec(name="norms", kind=f"{__name__}:ByNorms", needs=needs, learns_from="norms")
    )
    cache, page, run = world.root / "cache", world.root / "page.html", world.root / "run"
    learn = ("--objective", "norms", "--arch", "2x32", "--steps", 60, "--batch-size", 8, "--lr", "3e-3")
    commands: list[list[object]] = [
        dump_arguments(world, "--out", world.root / "plain"),
        dump_arguments(world, "--for", "minilm,norms", "--add", world.root / "plain"),
        ["verify", "--full", cache, "--teacher", world.teacher],
        ["train", cache, *learn, "--out", run],
        ["report", run, "--out", page],
        ["push", cache, store],
    ]
    for words in commands:
        code, _, err = command(*words)
        assert code == 0, err
    pull(
        json.loads(command("ls", store, "--json")[1])["caches"][0]["url"],
        world.root / "pulled",
        session=ALONE,
    )
    assert "norms (1 numbers of each token)" in command("info", cache)[1]
    sequence = open_cache(world.root / "pulled")[0]
    last = AutoModel.from_pretrained(world.teacher)(sequence.input_ids[None]).last_hidden_state[0]
    torch.testing.assert_close(sequence.states()[NORMS][0, :, 0], last.norm(dim=-1), rtol=1e-3, atol=0)
    (student,) = load_record(run).students
    assert student.loss_after < student.loss_before
