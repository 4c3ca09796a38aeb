"""Prompts of sentence encoders, which are words before every text, and what compares their vectors."""

import json
from pathlib import Path
from typing import Final, Literal, NamedTuple

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.locate import read_json
from minilm_cache.storage_schema.manifest import PROMPTS_FILE

GIVEN: Final = "prompt"
"""Name that a student has for a prompt that was given as `--prompt TEXT`."""
NO_PROMPT: Final = "none"
"""Value of `--prompt-name` that leaves a teacher's default prompt out."""
_MAX_PROMPTS: Final = 256
_MAX_CHARACTERS: Final = 4096


class Prompts(NamedTuple):
    """The prompts of a sentence encoder, and what compares its vectors."""

    by_name: dict[str, str]
    """Prompts by their names, such as `query` and `document`."""
    default: str | None = None
    """Name of the prompt that every text gets. None means that texts get none."""
    similarity: Literal["dot"] | None = None
    """What compares two vectors. None means the cosine."""

    @property
    def of_every_text(self) -> str:
        """The prompt that every text gets, or an empty text."""
        return "" if self.default is None else self.by_name[self.default]

    def to_json(self) -> bytes:
        """Return the prompts as the content of a file of sentence-transformers."""
        content: dict[str, object] = {"prompts": self.by_name, "default_prompt_name": self.default}
        content |= {} if self.similarity is None else {"similarity_fn_name": self.similarity}
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def read_prompts(folder: Path) -> Prompts:
    """Return the prompts that a folder declares; a folder without the file has none.

    Raises:
        TeacherError: the file is damaged; see `prompts_of`.
    """
    file = folder / PROMPTS_FILE
    content = read_json(file) if file.exists() else {}
    return prompts_of(content, str(file))


def prompts_of(content: object, where: str) -> Prompts:
    """Return the prompts in the content of a file, which may be a stranger's.

    Args:
        content: what the file holds.
        where: the file, for messages.

    Raises:
        TeacherError: the content does not describe prompts, its default is none of them, or vectors are
            compared by a function that is neither `cosine` nor `dot`.
    """
    document = content if isinstance(content, dict) else {}
    listed, default = document.get("prompts", {}) or {}, document.get("default_prompt_name")
    texts = [*listed, *listed.values()] if isinstance(listed, dict) else [None]
    are_texts = all(isinstance(text, str) and len(text) <= _MAX_CHARACTERS for text in texts)
    if not isinstance(content, dict) or not are_texts or len(texts) > 2 * _MAX_PROMPTS:
        raise TeacherError(
            f"{where}: its prompts are not a mapping of names to texts. Save the model again, or remove the "
            "file from a copy of its folder."
        )
    if default is not None and (not isinstance(default, str) or default not in listed):
        raise TeacherError(
            f"{where}: its default_prompt_name {str(default)[:40]!r} is not among its prompts "
            f"({', '.join(listed) or 'none'}). Correct it."
        )
    found = document.get("similarity_fn_name")
    if found not in (None, "cosine", "dot"):
        raise TeacherError(
            f"{where} compares vectors by {str(found)[:40]!r}, which is not done here. Set "
            "similarity_fn_name to cosine or dot, or leave it out."
        )
    return Prompts(dict(listed), default, "dot" if found == "dot" else None)


def says(content: bytes | None, where: str) -> tuple[object, ...]:
    """Return what a file says of prompts and similarity, so that two files can be compared.

    Args:
        content: content of the file. None means that there is none.
        where: the file, for messages.

    Raises:
        TeacherError: the content does not describe prompts.
    """
    try:
        document: object = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TeacherError(f"{where} is not JSON. Save the model again.") from error
    prompts = prompts_of(document, where)
    worded = {name: text for name, text in prompts.by_name.items() if text}
    return worded, prompts.of_every_text, prompts.similarity


def chosen_prompt(folder: Path, *, name: str | None, text: str | None, has_default: bool) -> str | None:
    """Return the prompt that a teacher's texts get. None means none.

    Args:
        folder: folder of the teacher.
        name: name of one of its prompts, or `none`. None means its default.
        text: the prompt itself. None means that it is one of the teacher's own.
        has_default: whether texts get the teacher's default prompt, which parts of joined documents do not.

    Raises:
        InvalidConfigError: the teacher has no prompt of this name.
        TeacherError: what it declares is damaged.
    """
    if text is not None:
        return text
    if name is None and not has_default:
        return None
    prompts = read_prompts(folder)
    if name == NO_PROMPT and name not in prompts.by_name:
        return None
    if name is not None and name not in prompts.by_name:
        listed = ", ".join(prompts.by_name) or "none at all"
        raise InvalidConfigError(
            f"--prompt-name {name}: teacher {folder} has no such prompt ({listed}). Give one of them, or its "
            "words with --prompt."
        )
    return (prompts.of_every_text if name is None else prompts.by_name[name]) or None
