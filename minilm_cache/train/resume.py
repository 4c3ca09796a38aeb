"""What a run goes on with: the folder, the identity and the initial weights that its record has."""

from pathlib import Path

from minilm_cache.train.checkpoint import load_state
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.folder import RunFolder, is_run
from minilm_cache.train.initial import RANDOM, Beginnings
from minilm_cache.train.record import RunIdentity, load_record


def recorded(
    config: TrainConfig, out: Path | None, *, identity: RunIdentity, beginnings: Beginnings, home: Path
) -> tuple[Path, RunIdentity, Beginnings]:
    """Return the folder of a run, its identity and its initial weights, as its record has them.

    Without `--init`, a run goes on with what it began with: with random weights, as those of the first
    releases, or as a slice of a teacher that is not at hand any more.
    """
    path = out or home / "runs" / identity.name()
    if config.init is not None:
        return path, identity, beginnings
    older = identity.model_copy(update={"init": RANDOM})
    older_path = home / "runs" / older.name()
    if out is None and is_run(older_path) and not load_record(older_path).complete:
        path = older_path
    if not is_run(path):
        return path, identity, beginnings
    record, folder = load_record(path), RunFolder(path=path)
    has_weights = record.complete or load_state(folder.checkpoints).step > 0
    if record.identity.init != RANDOM and not has_weights:
        return path, identity, beginnings
    begun = beginnings.recorded(record.identity.init)
    return path, identity.model_copy(update={"init": begun.name}), begun
