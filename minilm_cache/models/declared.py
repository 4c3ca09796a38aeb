"""What a folder of sentence-transformers says of how texts are read: refused where it is not done here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.files import read_json

_PROMPTS: Final = "config_sentence_transformers.json"
_READING: Final = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files of a Transformer module's settings; sentence-transformers takes the first that exists."""
_AS_HERE: Final[Mapping[str, object]] = {
    "do_lower_case": False,
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
}
"""Settings of a Transformer module, and the only value of each that is computed here."""
_ANY_VALUE: Final = frozenset({"max_seq_length", "unpad_inputs"})
"""Settings that have no effect on a text's vector, or that are read elsewhere."""


def refuse_other_reading(folder: Path, *, lower_cases: bool) -> None:
    """Raise TeacherError if a folder says that texts are read as they cannot be read here.

    Args:
        folder: folder of the model, in the format of sentence-transformers.
        lower_cases: whether its tokenizer makes lower case of texts anyway.

    Raises:
        TeacherError: it names a prompt that every text gets, or settings of its Transformer module that
        would give
            other vectors.
    """
    prompts = _settings(folder / _PROMPTS)
    name = prompts.get("default_prompt_name")
    listed = prompts.get("prompts")
    prompt = listed.get(name) if isinstance(listed, dict) and isinstance(name, str) else None
    if name is not None and prompt != "":
        raise TeacherError(
            f"{folder / _PROMPTS} puts a prompt before every text ({str(name)[:40]}: {str(prompt)[:60]!r}), "
            "which is not done here. Put the prompt into your texts, and give a copy of the folder without "
            "default_prompt_name."
        )
    if prompts.get("truncate_dim") is not None:
        raise TeacherError(
            f"{folder / _PROMPTS} cuts vectors to {prompts['truncate_dim']} dimensions, which is not done "
            "here. Remove truncate_dim in a copy of the folder; students learn shorter vectors by "
            "--matryoshka."
        )
    file = _reading_file(folder)
    for key, value in _settings(file).items():
        if key in _ANY_VALUE or value in (None, {}, []) or _AS_HERE.get(key, object()) == value:
            continue
        if key == "do_lower_case" and lower_cases:
            continue
        lower = " Give texts in lower case, and set it to false." if key == "do_lower_case" else ""
        raise TeacherError(
            f"{file} sets {key} to {str(value)[:60]}, and texts are not read so here.{lower} Take another "
            "teacher, or remove the setting from a copy of its folder."
        )


def refuse_longer_texts(
    folder: Path, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig, *, max_length: int
) -> None:
    """Raise InvalidConfigError if sequences are longer than what a sentence encoder reads of a text.

    Args:
        folder: folder of the model.
        tokenizer: its tokenizer.
        config: its configuration.
        max_length: most tokens of a sequence, special tokens included.
    """
    if not (folder / "modules.json").is_file():
        return
    own = _settings(_reading_file(folder)).get("max_seq_length")
    limit = own or min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", max_length))
    if isinstance(limit, int) and max_length > limit:
        raise InvalidConfigError(
            f"--max-length {max_length}: {folder} reads {limit} tokens of a text (max_seq_length), so its "
            f"own vectors are of no more. Use --max-length {limit} at most."
        )


def _reading_file(folder: Path) -> Path:
    return next((folder / name for name in _READING if (folder / name).is_file()), folder / _READING[0])


def _settings(file: Path) -> dict[str, Any]:
    """Return the settings in a file. A file that does not exist has none."""
    return dict(read_json(file)) if file.exists() else {}
