"""Chooses the objective of a run by its name, and checks that the cache can serve it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minilm_cache.cache import Cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.classifier import refuse_several_labels
from minilm_cache.models.tap import Head, TappedModel
from minilm_cache.objectives.base import (
    ObjectiveKind,
    ObjectiveRequest,
    StudentFacts,
    StudentObjective,
    check_shape,
)
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.objectives.config import (
    ObjectiveConfig,
    check_codec,
    check_layers,
    check_pooled,
    held_signals,
)
from minilm_cache.objectives.labelled import OwnLabels, own_labels
from minilm_cache.objectives.several import OtherTeachers, other_teachers
from minilm_cache.settings import DEFAULT_LOCAL_BYTES
from minilm_cache.signals.table import SIGNALS, signal_of
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, CacheManifest
from minilm_cache.storage_schema.states import LABELS, LOGITS, SignalName, StatesIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective of a run, and what its cache serves for it."""

    request: ObjectiveRequest
    wanted: WantedTargets
    """What is read from the cache."""

    @property
    def num_classes(self) -> int | None:
        """Classes of the teacher's answers. None means that the cache holds no answers."""
        return self.request.cache.manifest.identity.num_classes

    @property
    def head(self) -> Head | None:
        """The head that students need. None means no head, as for bi-encoders, which give vectors."""
        wanted = () if self.wanted.apart else self.wanted.signals
        return "tokens" if LABELS in wanted else "sequences" if LOGITS in wanted else None

    def of(self, model: TappedModel) -> StudentObjective:
        """Return the objective of one student.

        Raises:
            InvalidConfigError: the student is not of a shape that can learn it.
        """
        student = StudentFacts.of(model.model.config, model.num_layers)
        check_shape(self.request.config, student, self.request.teacher)
        return ObjectiveKind.of(self.request.config).build(self.request, self.wanted, student)


def choose_objective(
    config: ObjectiveConfig,
    cache: Cache,
    *,
    arch: Sequence[str],
    home: Path | None = None,
    local_bytes: int = DEFAULT_LOCAL_BYTES,
) -> Objective:
    """Return the objective of a run, if the cache can serve it.

    Args:
        config: settings of the objective.
        cache: cache that students learn from.
        arch: shapes of the students.
        home: folder for local copies of other teachers' caches at URLs. None means MINILM_CACHE_HOME.
        local_bytes: greatest total size of what is kept of each of them, bytes.

    Raises:
        InvalidConfigError: the cache does not hold the layers, the relations or the states, or heads do not
            fit.
    """
    manifest = cache.manifest
    for each in config.each:
        check_codec(each, manifest.identity.codec.name)
    others = other_teachers(cache, config.also, home=home, local_bytes=local_bytes)
    labels = own_labels(cache, config, home=home)
    objective = live_objective(config, cache, arch=arch, others=others, labels=labels)
    wanted = objective.wanted
    identity = manifest.identity
    check_layers(
        config, wanted.layers, held=cache.layers, codec=identity.codec.name, place=str(cache.reader.root)
    )
    _check_signals(config, manifest.identity.states, wanted)
    lacking = [kind for kind in wanted.kinds if kind not in (identity.relations or wanted.kinds)]
    if lacking:
        raise InvalidConfigError(
            f"--objective {config.objective} needs relation {lacking[0]}, and this cache stores "
            f"{' and '.join(identity.relations)} alone. Dump the teacher again."
        )
    if LOGITS in wanted.signals:
        document = json.loads(cache.reader.attachment(TEACHER_CONFIG))
        who = f"--objective {config.objective}: the teacher"
        refuse_several_labels(document.get("problem_type"), identity.num_classes, who)
    if wanted.relation_heads is not None:
        _check_relation_heads(wanted.relation_heads, manifest, wanted.layers[-1])
    return objective


def live_objective(
    config: ObjectiveConfig,
    cache: Cache,
    *,
    arch: Sequence[str],
    others: OtherTeachers | None = None,
    labels: OwnLabels | None = None,
) -> Objective:
    """Return an objective whose targets a teacher computes anew; arguments as for `choose_objective`.

    The cache gives the text, and need not hold the targets. `others` are further teachers, of other caches,
    and `labels` those of one's own.

    Raises:
        InvalidConfigError: the objective does not go with the teacher or the students.
    """
    request = ObjectiveRequest(config=config, arch=tuple(arch), cache=cache, others=others, labels=labels)
    return Objective(request=request, wanted=ObjectiveKind.of(config).wanted(request))


def _check_signals(config: ObjectiveConfig, stored: StatesIdentity | None, wanted: WantedTargets) -> None:
    """Raise InvalidConfigError for signals that the cache lacks, naming what would add them."""
    missing = [name for name in wanted.signals if name not in held_signals(stored)]
    if not missing:
        return
    for each in config.each:
        check_pooled(each, stored)
    kinds = dict.fromkeys(name.signal for name in missing)
    options = [
        signal_of(SignalName(kind)).option_for([name for name in missing if name.signal == kind])
        if kind in SIGNALS
        else f"signal {kind} (`DumpConfig.signal`, in Python)"
        for kind in kinds
    ]
    raise InvalidConfigError(
        f"--objective {config.objective} needs states that this cache does not hold. Add them: "
        f"`minilm-cache dump` with the settings of this cache, --add THIS-CACHE and {' '.join(options)} "
        f"(or --for {config.objective})."
    )


def _check_relation_heads(heads: int, manifest: CacheManifest, layer: int) -> None:
    assert manifest.calibration is not None
    width = manifest.identity.relation_heads * manifest.calibration.of_layer(layer).head_size
    if width % heads:
        raise InvalidConfigError(
            f"--relation-heads {heads}: the teacher's width {width} is not divisible by it. Take a divisor."
        )
