"""Where the weights of a cache's teacher come from: its folder, or the cache itself."""

import json
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from transformers import PreTrainedConfig, PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, TeacherError
from minilm_cache.models.files import VOLATILE, first_setting_that_differs, weights_sha256
from minilm_cache.models.known import find_teacher, holds_teacher
from minilm_cache.models.load import load_weights, read_config
from minilm_cache.models.locate import CONFIG, locate_teacher
from minilm_cache.models.student import num_weights, teacher_config
from minilm_cache.models.tap import ATTENTION, Head
from minilm_cache.models.truncate import saving
from minilm_cache.storage_schema.base import REMEDY
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, TEACHER_WEIGHTS
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.durable import new_folder
from minilm_cache.wording import printable


def source_config(init_teacher: str | None, teacher: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the model that students are cut from.

    Args:
        init_teacher: name or folder of a donor. None means the teacher of the cache.
        teacher: configuration of that teacher.

    Raises:
        TeacherError: the donor does not exist.
    """
    return teacher if init_teacher is None else donor_config(init_teacher)


def donor_config(donor: str) -> PreTrainedConfig:
    """Return the configuration of a model that students are cut from, which need not have its weights here.

    Raises:
        TeacherError: it does not exist.
    """
    return read_config(locate_teacher(donor, without_weights=True).folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherWeights:
    """A folder with the weights of a cache's teacher."""

    folder: Path
    sha256: str
    """Hash of these weights, hexadecimal: those kept in a cache are rounded to float16."""
    in_words: str
    """Where they come from, for people."""
    is_donor: bool = False
    """Whether this is another model than the teacher of the cache."""

    @property
    def config(self) -> PreTrainedConfig:
        """Configuration of the teacher."""
        return read_config(self.folder)

    @property
    def config_sha256(self) -> str:
        """Hash of the configuration, without what a release of transformers adds to it."""
        content = self.config.to_dict()
        return canonical_sha256({name: value for name, value in content.items() if name not in VOLATILE})

    def load(self, head: Head | None) -> tuple[PreTrainedModel, frozenset[str]]:
        """Return the teacher in evaluation mode, and the names of weights that the folder lacks.

        Args:
            head: head that it gets, random if the folder lacks it. None means no head.

        Raises:
            TeacherError: the folder holds no model.
        """
        model, lacking = load_weights(self.folder, head)
        return model.eval(), lacking


def teacher_weights(
    cache: Cache, home: Path, given: str | None, *, may_be_donor: bool = False
) -> TeacherWeights | None:
    """Return the weights of a cache's teacher. None means that they are not at hand.

    Args:
        cache: the cache.
        home: folder of caches and runs.
        given: the teacher as the user named it. None means that it is looked for on this machine, and then in
            the cache.
        may_be_donor: whether the given model may be another one, which students are cut from instead.

    Raises:
        TeacherError: there is no teacher of the given name.
        IdentityMismatchError: the given teacher is not the one of the cache.
        CacheCorruptError: the weights in the cache are damaged, or are not those of its teacher.
    """
    manifest = cache.manifest
    expected, label = manifest.identity.teacher.weights_sha256, manifest.labels.teacher
    config = teacher_config(cache.reader.attachment(TEACHER_CONFIG), manifest)
    if given is not None:
        folder = locate_teacher(given).folder
        sha256 = weights_sha256(folder)
        if sha256 != expected and may_be_donor:
            # Cards say it, and paths reveal details of a machine.
            name = printable(folder.resolve().name) if Path(given).is_dir() else given
            return TeacherWeights(folder=folder, sha256=sha256, in_words=f"donor {name}", is_donor=True)
        if sha256 != expected:
            raise IdentityMismatchError(
                f"--init-teacher {given} (weights {sha256[:12]}) is not the teacher of this cache "
                f"({label}, weights {expected[:12]}). Give that teacher, or add --init slice to cut students "
                "from another model nevertheless."
            )
        setting = first_setting_that_differs(read_config(folder), config)
        if setting is not None:
            raise IdentityMismatchError(
                f"--init-teacher {given} is not the teacher of this cache: {setting} in its config.json is "
                "not what it was when the cache was made. Give that teacher."
            )
        return TeacherWeights(folder=folder, sha256=sha256, in_words=f"teacher {label}")
    known = find_teacher(home, expected, label, config=config)
    if known is not None:
        return TeacherWeights(folder=known, sha256=expected, in_words=f"teacher {label}")
    if TEACHER_WEIGHTS not in manifest.files:
        return None
    digest = manifest.files[TEACHER_WEIGHTS]
    key = canonical_sha256([digest.sha256, manifest.files[TEACHER_CONFIG].sha256])
    folder, sha256 = home / "teachers" / key, digest.sha256
    config = teacher_config(cache.reader.attachment(TEACHER_CONFIG), manifest)
    if not holds_teacher(folder, sha256, config):
        with saving("write the teacher", folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock")):
                if not holds_teacher(folder, sha256, config):
                    _unpack(cache, folder, config)
    return TeacherWeights(
        folder=folder, sha256=sha256, in_words=f"teacher {label}, whose weights the cache keeps in float16"
    )


def _unpack(cache: Cache, folder: Path, config: PreTrainedConfig) -> None:
    """Write the teacher that a cache holds as a folder of a model.

    Raises:
        CacheCorruptError: the weights are not those of the teacher in the manifest.
    """
    reader = cache.reader
    content = reader.attachment(TEACHER_WEIGHTS)
    if digest_bytes(content) != reader.manifest.files[TEACHER_WEIGHTS]:  # SHA-256 included: it names slices
        raise _unusable("are not those that the manifest names")
    if num_weights(config, ATTENTION) > len(content):  # a float16 has two bytes, and a head may be there, too
        raise _unusable("are fewer than its configuration describes")
    with new_folder(folder) as new:
        (new / "model.safetensors").write_bytes(content)
        (new / CONFIG).write_text(json.dumps(config.to_dict()), encoding="utf-8")
        try:
            load_weights(new)
        except TeacherError as error:
            raise _unusable(f"cannot be loaded ({error})") from error


def _unusable(reason: str) -> CacheCorruptError:
    return CacheCorruptError(f"{TEACHER_WEIGHTS} of the cache: the weights {reason}. {REMEDY}")
