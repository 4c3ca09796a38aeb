"""Every objective learns as it did when its curve was stored."""

import json
from pathlib import Path

import pytest

from tests.golden.curves import FILE, KINDS, TRAINED, Kind, curve, make_world, served

BAND = 0.5
"""Greatest distance from a stored curve, as a share of what was learned: processors round otherwise."""
LEAST = 1e-3
"""The same as a share of the loss, for objectives that these random texts teach hardly anything."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_objective_learns_along_its_stored_curve(tmp_path: Path, kind: Kind) -> None:
    world = make_world(tmp_path, kind)
    stored = json.loads(FILE.read_text())
    assert sorted(stored) == sorted(TRAINED)
    for objective in served(kind):
        found, expected = curve(world, objective), stored[objective]
        band = BAND * abs(expected[0] - expected[-1]) + LEAST * expected[0]
        assert found == pytest.approx(expected, abs=band), objective
