"""Dump `mini` over `python-docs` and train two students, on one machine without a network.

Afterwards the same students take a few steps with the teacher running again for every batch and a few steps
from the cache, in turns. This measures how much time the cache saves on this machine.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from minilm_cache.cache import Cache, open_cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import DumpResult, dump_cache
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.device import choose_device
from minilm_cache.models.load import MINI, locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.check import choose_objective
from minilm_cache.progress import Progress, ShouldStop, Silent, never_stop
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.live import with_live_targets
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.run import TrainResult, train_students
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import build_trainers

ARCH = ("3x192", "3x384")
"""Shapes of the two students."""
STEPS = 300
"""Training steps of the students."""
DUMP_TOKENS = 300_000
"""Most tokens that the demo dumps."""
TIMED_STEPS = 8
"""Timed steps from the cache and with the teacher, each; they follow one step of each that is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed of training one student, in tokens per second: medians over steps taken in turns."""

    arch: str
    offline_tokens_per_s: float
    """Speed from the cache."""
    online_tokens_per_s: float
    """Speed with the teacher's forward pass for every batch, which stops at the vectors of its last layer."""

    @property
    def ratio(self) -> float:
        """Offline speed divided by online speed."""
        return self.offline_tokens_per_s / self.online_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The cache, the run and the measured speeds of a demo."""

    dump: DumpResult
    train: TrainResult
    speeds: tuple[Speed, ...]


def run_demo(
    *, home: Path | None = None, progress: Progress | None = None, should_stop: ShouldStop = never_stop
) -> DemoResult:
    """Dump, train and compare speeds; dump and training resume or reuse those of an earlier demo.

    Args:
        home: folder of caches and runs. None means `~/.cache/minilm-cache`.
        progress: shows each task. None means that nothing is shown.
        should_stop: called between steps; True stops.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`.
    """
    progress = progress or Silent()
    dumped = dump_cache(
        DumpConfig(teacher=MINI, max_tokens=DUMP_TOKENS),
        out=None,
        home=home,
        progress=progress,
        should_stop=should_stop,
    )
    config = TrainConfig(arch=ARCH, steps=STEPS)
    trained = train_students(
        config, dumped.path, out=None, home=home, progress=progress, should_stop=should_stop
    )
    speeds = compare_speed(dumped.path, config, progress=progress, should_stop=should_stop)
    return DemoResult(dump=dumped, train=trained, speeds=speeds)


def compare_speed(
    path: Path, config: TrainConfig, *, progress: Progress, should_stop: ShouldStop
) -> tuple[Speed, ...]:
    """Measure each student's training from the cache and with the teacher, in turns on the same batches."""
    cache = open_cache(path)
    teacher = Teacher(locate_teacher(MINI), choose_device(config.device))
    progress.start("compare", len(config.arch) * (TIMED_STEPS + 1) * 2, "steps")
    return tuple(
        _speed(arch, cache, teacher=teacher, config=config, progress=progress, should_stop=should_stop)
        for arch in config.arch
    )


def _speed(
    arch: str,
    cache: Cache,
    *,
    teacher: Teacher,
    config: TrainConfig,
    progress: Progress,
    should_stop: ShouldStop,
) -> Speed:
    """Measure the speed of training one student."""
    manifest = cache.manifest
    objective = choose_objective(config, cache, arch=config.arch)
    shape = parse_arch(arch, manifest.identity.relation_heads)
    (trainer,) = build_trainers(
        config,
        cache,
        shapes=[shape],
        objective=objective,
        steps=TIMED_STEPS,
        ranks=Ranks.alone(teacher.device),
    )
    plan = plan_steps(config, manifest)
    pad_token = teacher.tokenizer.pad_token_id

    def batches(*, with_targets: bool) -> Generator[StudentBatch]:
        wanted = objective.wanted if with_targets else WantedTargets(kinds=())
        return BatchReader(cache, wanted, pad_token=pad_token, device=teacher.device).train_batches(plan, 0)

    rates: dict[str, list[float]] = {"offline": [], "online": []}
    with ExitStack() as stack:
        tokens_only = stack.enter_context(closing(batches(with_targets=False)))
        streams: dict[str, Iterator[StudentBatch]] = {
            "offline": stack.enter_context(closing(batches(with_targets=True))),
            "online": with_live_targets(tokens_only, teacher, objective.wanted),
        }
        for step in range(TIMED_STEPS + 1):
            for kind, stream in streams.items():
                if should_stop():
                    raise InterruptedRunError(
                        "interrupted: dump and training are kept. Run the same command again to go on."
                    )
                started = time.perf_counter()
                batch = next(stream)
                trainer.step(batch, min(step, TIMED_STEPS - 1))
                rates[kind].append(batch.num_tokens / (time.perf_counter() - started))
                progress.advance(1)
    return Speed(
        arch=arch,
        offline_tokens_per_s=median(rates["offline"][1:]),
        online_tokens_per_s=median(rates["online"][1:]),
    )
