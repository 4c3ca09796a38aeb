"""The trainings of a study, by the names of their folders, and what it makes of assistants."""

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from minilm_cache.errors import MiniLMCacheError
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.storage_schema.upgrades import KEPT_IN_NAMES, TRAININGS_OF_STUDIES
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.record import load_record
from minilm_cache.workflows.config import naming_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Training of the students of one cache, one objective and one seed, which share every batch."""

    cache: str
    label: str
    """Name of the pass without what identifies its settings."""
    config: TrainConfig
    written: Mapping[str, object] = field(default_factory=dict)
    """Paths among the settings as the document has them, by setting, so that names of runs do not depend on
    where it lies."""
    kept: int = 0
    """What the name says of `keep_checkpoints`: one of `KEPT_IN_NAMES`."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        content = self.config.model_dump(mode="json", exclude={"device", "checkpoint_steps"})
        named = naming_settings({**content, **self.written}, TRAININGS_OF_STUDIES, self.kept)
        identity = canonical_sha256(named)[:8]
        return f"{self.label}-{identity}"

    def of(self, arch: Sequence[str]) -> "Pass":
        """Return the pass of some of its students alone."""
        return replace(self, config=self.config.with_changes(arch=tuple(arch)))

    def grown(self, runs: Path) -> Iterator["Pass"]:
        """Yield passes for its students: those that are in a folder of runs, then one for all that lack.

        A run is one of them if it has these settings, and is complete or has no other shapes.
        """
        found = []
        for folder in sorted(runs.glob(f"{glob.escape(self.label)}-*")):
            with suppress(MiniLMCacheError):  # damaged, or no run at all
                record = load_record(folder)
                arch = record.identity.arch
                named = [replace(self.of(arch), kept=kept) for kept in KEPT_IN_NAMES if arch]
                found += [(record.complete, arch, each) for each in named if each.name == folder.name]
        left, taken = self.config.arch, set[str]()
        for is_complete, arch, each in sorted(found, key=lambda run: (not run[0], -len({*run[1]} & {*left}))):
            if {*arch} <= {*left} or (is_complete and {*arch} & {*left} and not {*arch} & taken):
                yield each
                taken |= {*arch}
                left = tuple(shape for shape in left if shape not in arch)
        if left:
            yield self.of(left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """An assistant, and the cache of what it computes."""

    name: str
    """Name of its cache."""
    teacher: str
    """Name of the cache that it learns from."""
    training: Pass
