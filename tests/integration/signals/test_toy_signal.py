"""A signal and an objective of one's own, in one file: dumped, added, checked, shared, learned, reported."""

import json

import torch
from torch import Tensor
from transformers import AutoModel

from minilm_cache.cache import open_cache
from minilm_cache.models.tap import Reading, Tap
from minilm_cache.objectives import base
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.spec import Needs, ObjectiveSpec, register_objective
from minilm_cache.relations.loss import Method
from minilm_cache.signals.base import OwnSignal, Taken
from minilm_cache.signals.table import SIGNALS, register_signal
from minilm_cache.storage_schema.identity import TeacherIdentity
from minilm_cache.storage_schema.states import SignalName
from minilm_cache.train.record import load_record
from tests.fixtures import Command
from tests.support import World, dump_arguments, pushed

NORMS = SignalName("norms")


class Norms(OwnSignal):
    name, axis = "norms", "token"

    def width(self, teacher: TeacherIdentity) -> int:
        return 1

    def tap(self, name: SignalName, num_layers: int) -> Tap:
        return Tap(hidden=(num_layers,))

    def values(self, name: SignalName, taken: Taken) -> Tensor:
        norms: Tensor = torch.linalg.norm(taken.outputs.hidden[taken.num_layers], dim=-1, keepdim=True)
        return norms


class NormObjective(base.StudentObjective):
    needs = base.StudentNeeds(hidden=(2,))

    def forward(self, reading: Reading, batch: StudentBatch, method: Method | None = None) -> base.Parts:
        difference = torch.linalg.norm(reading.hidden[2], dim=-1, keepdim=True) - batch.signals[NORMS]
        return {"norm": difference[batch.inputs.valid].square().mean()}


class ByNorms(base.ObjectiveKind):
    def wanted(self, request: base.ObjectiveRequest) -> WantedTargets:
        return WantedTargets(kinds=(), signals=(NORMS,))

    def build(
        self, request: base.ObjectiveRequest, wanted: WantedTargets, student: base.StudentFacts
    ) -> NormObjective:
        return NormObjective()


def test_a_signal_of_ones_own_goes_the_whole_way(world: World, command: Command, store: str) -> None:
    register_signal(Norms())
    kind, needs = f"{__name__}:ByNorms", Needs(signals=("norms",))
    register_objective(ObjectiveSpec(name="norms", kind=kind, needs=needs, learns_from="norms"))
    cache, run, plain = world.root / "cache", world.root / "run", world.root / "plain"
    learn = ("--objective", "norms", "--arch", "2x32", "--steps", 60, "--batch-size", 8, "--lr", "3e-3")
    assert command(*dump_arguments(world, "--out", plain))[0] == 0
    assert command(*dump_arguments(world, "--for", "norms", "--add", plain))[0] == 0
    assert "norms (1 numbers of each token)" in command("info", cache)[1]
    assert command("verify", "--full", cache, "--teacher", world.teacher)[0] == 0
    assert command("pull", pushed(world, store), "--out", world.root / "pulled")[0] == 0
    sequence = open_cache(world.root / "pulled")[0]
    last = AutoModel.from_pretrained(world.teacher)(sequence.input_ids[None]).last_hidden_state[0]
    torch.testing.assert_close(sequence.states()[NORMS][0, :, 0], last.norm(dim=-1), rtol=1e-3, atol=0)
    assert command("train", cache, *learn, "--out", run)[0] == 0
    (student,) = load_record(run).students
    assert json.loads(student.model_dump_json())["loss_after"] < (student.loss_before or 0)
    assert command("report", run, "--out", world.root / "page.html")[0] == 0
    del SIGNALS["norms"]
    code, _, err = command("verify", cache, "--teacher", world.teacher)
    assert (code, "signals that are not registered here are not compared: norms" in err) == (0, True)
