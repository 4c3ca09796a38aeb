"""What a corpus is read from, so that a text that has not changed is not read again to know what it is.

A note in the home names the files of a corpus with size, inode and times, and the identity of the text. Where
any of these differ, the text is read and hashed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from minilm_cache.storage_schema.documents import StoredDocument
from minilm_cache.storage_schema.identity import CorpusIdentity, canonical_sha256
from minilm_cache.store.durable import storage_errors, write_file

SourceFile = tuple[str, int, int, int, int]
"""Path, size in bytes, inode, and the times of modification and of the last change, ns."""


class _Note(StoredDocument):
    corpus: CorpusIdentity
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The files of a corpus, as they are now."""

    asked: tuple[str, ...]
    """Name of the corpus, and the settings that it is read with."""
    paths: tuple[Path, ...]
    files: tuple[SourceFile, ...]

    @classmethod
    def now(cls, asked: Sequence[str], paths: Sequence[Path]) -> "Sources":
        """Look at files.

        Raises:
            OSError: a file has gone.
        """
        stats = ((_name_of(path.resolve()), path.stat()) for path in paths)
        files = tuple(
            (path, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats
        )
        return cls(asked=tuple(asked), paths=tuple(paths), files=files)

    def are_unchanged(self) -> bool:
        """Return whether the files are still as they were."""
        try:
            return Sources.now(self.asked, self.paths).files == self.files
        except OSError:
            return False

    def known_identity(self, home: Path) -> CorpusIdentity | None:
        """Return the identity of the text if these very files were read before. None means they were not."""
        try:
            note = _Note.model_validate_json(self._note(home).read_bytes())
        except (OSError, ValidationError):
            return None
        return note.corpus if note.files == self.files else None

    def remember(self, home: Path, corpus: CorpusIdentity) -> None:
        """Note the identity of the text of these files.

        Raises:
            StorageError: the home cannot be written to.
        """
        path = self._note(home)
        with storage_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, _Note(corpus=corpus, files=self.files).to_json(), durable=False)

    def _note(self, home: Path) -> Path:
        where = [_name_of(path.resolve().parent) for path in self.paths[:1]]
        return home / "tokens" / "texts" / f"{canonical_sha256([*self.asked, *where])[:32]}.json"


def _name_of(path: Path) -> str:
    """Return a path as text, also where its name is not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")
