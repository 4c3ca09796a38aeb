"""Tokenise a corpus once, in parts: on all cores of a machine, or on those of a Ray cluster.

A part is written whole or not at all, so an interrupted run resumes with the parts that are missing.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import TimeoutError as PoolTimeoutError
from multiprocessing import active_children, current_process, get_context
from pathlib import Path
from typing import Any, Final

import datasets
import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from minilm_cache.corpus.load import Corpus, load_corpus, text_batches
from minilm_cache.corpus.pairs import BETWEEN
from minilm_cache.corpus.records import COPIES_OF, Roles
from minilm_cache.corpus.template import pair_template_of
from minilm_cache.corpus.tokens import (
    COPIES,
    ENDS,
    LOCK,
    MAX_PARTS,
    TEXTS,
    TOKENS_FILE,
    TokenPart,
    TokenRecord,
    Tokens,
    address_of,
    block_sums,
    fetched_or_first,
    part_name,
    send,
    send_if_missing,
    shared_tokens,
)
from minilm_cache.engines.ray_cluster import Engine, import_ray
from minilm_cache.errors import CacheCorruptError, CorpusError, InvalidConfigError, RankLostError, first_line
from minilm_cache.models.files import library_errors
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.prompts import chosen_prompt, read_prompts
from minilm_cache.models.tokenizer import load_tokenizer, num_ids, tokenizer_sha256
from minilm_cache.session import ALONE, Session, awaited
from minilm_cache.settings import CorpusSettings, TokenizeConfig
from minilm_cache.storage_schema.arrays import token_dtype
from minilm_cache.store.checked import digest_file
from minilm_cache.store.durable import (
    PARTIAL,
    locked,
    machine_cores,
    new_file,
    remove_abandoned,
    storage_errors,
    write_file,
)
from minilm_cache.store.remote import RemoteFolder

_PART_BYTES: Final = 2**25
"""Bytes of text of a part, about 8 million tokens; a text of 16 GB and more has parts that are larger."""
_POLL_S: Final = 0.5
"""Longest wait for a part, in seconds, before `should_stop` is called again."""
_ENDED: Final = (
    "a process that tokenises has ended; it may have said why above. If memory was short, first run "
    "`minilm-cache tokenize` with fewer --processes. Parts that are done are kept."
)
_KEYS: Final = {TEXTS: "text", COPIES: COPIES_OF}
"""Columns that documents are hashed by, and the files of the hashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartJob:
    """What it takes to tokenise one part, in any process."""

    folder: Path
    number: int
    documents: datasets.Dataset
    """The documents of this part."""
    tokenizer: PreTrainedTokenizerFast
    dtype: str
    prompt: str
    """Words before every document; mostly none."""
    between: tuple[int, ...] | None
    """Tokens between the two texts of each document. None means that each is one text."""

    @property
    def path(self) -> Path:
        """Path of the part's files, without their endings."""
        return self.folder / part_name(self.number)


def tokenise(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    *,
    session: Session = ALONE,
    num_processes: int | None = None,
    engine: Engine | None = None,
) -> Tokens:
    """Return the tokens of a corpus; what the home holds of them, or MINILM_CACHE_TOKENS, is reused.

    Args:
        corpus: text to tokenise.
        tokenizer: what tokenises it.
        num_processes: number of processes. None means one for each core.
        engine: `ray` to tokenise on the cluster that RAY_ADDRESS names, or on a local one. None means this
            machine.
        session: its home is the folder of caches, runs and tokens. Its progress shows documents done. Its
            `should_stop` is called about twice a second; True stops and keeps the parts that are done.

    Raises:
        InterruptedRunError: a stop was requested.
        StorageError: the home cannot be written to, or a store refused.
        CacheCorruptError: what a store holds is damaged.
        InvalidConfigError: Ray is not installed, or a script does not protect its calls from processes that
            import it.
        RankLostError: a process that tokenises was killed.
    """
    _refuse_imported_script()
    folder = session.home / "tokens" / address_of(corpus.identity, tokenizer)
    shared = shared_tokens(folder.name)
    interrupted = "interrupted while another process tokenises this text."
    with locked(folder / LOCK, should_stop=session.should_stop, interrupted=interrupted):
        tokens = _kept(folder, corpus, tokenizer, session=session)
        if tokens is not None:
            if shared is not None:
                send_if_missing(folder, shared, session=session)
            return tokens
        pool = partial(_pool, engine=engine, num_processes=num_processes)
        write = partial(_write, folder, corpus, tokenizer, pool=pool, session=session)
        if shared is None:
            write()
            return Tokens(folder, corpus.name, tokenizer)
        with fetched_or_first(shared, folder, num_ids(tokenizer), session=session) as is_fetched:
            if not is_fetched:
                write()
                send(folder, shared, session=session)
            else:
                _refuse_other_tokens(Tokens(folder, corpus.name, tokenizer), corpus, tokenizer, shared=shared)
        return Tokens(folder, corpus.name, tokenizer)


def _kept(
    folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, *, session: Session
) -> Tokens | None:
    """Return the tokens that a folder holds; None if there are none, or damaged ones, which are said."""
    if not (folder / TOKENS_FILE).is_file():
        return None
    try:
        return Tokens(folder, corpus.name, tokenizer)
    except (CacheCorruptError, OSError) as error:
        session.progress.note(f"{error} They are made again now.")
        (folder / TOKENS_FILE).unlink()
        return None


def tokens_of(
    settings: CorpusSettings, tokenizer: PreTrainedTokenizerFast, *, session: Session = ALONE
) -> Tokens:
    """Return the tokens of the corpus that settings name; see `load_corpus` and `tokenise`."""
    corpus = load_corpus(settings.corpus, settings.text_column, settings.documents, home=session.home)
    return tokenise(corpus, tokenizer, session=session)


def tokenise_for(config: TokenizeConfig, *, session: Session) -> Tokens:
    """Tokenise a text with a teacher's tokenizer; the teacher's weights are not read.

    Raises:
        MiniLMCacheError: the teacher or the text cannot be read, or what `tokenise` raises.
    """
    folder = locate_teacher(config.teacher, config.revision, without_weights=True).folder
    known, roles = read_prompts(folder), None
    if config.role_column is not None:
        roles = Roles(config.role_column, known.by_name)
    elif known.of_every_text and (config.prompt, config.prompt_name, config.pair_columns) == (None,) * 3:
        session.progress.note(
            f"the teacher's own prompt {known.default} stands before each text of a dump for embedding, and "
            f"makes another text of it: give --prompt-name {known.default} for such dumps"
        )
    corpus = load_corpus(
        config.corpus,
        config.text_column,
        config.documents,
        home=session.home,
        roles=roles,
        pair_columns=config.pair_columns,
    )
    prompt = chosen_prompt(folder, name=config.prompt_name, text=config.prompt, has_default=False)
    return tokenise(
        corpus.with_prompt(prompt),
        load_tokenizer(folder, has_ends=False),
        num_processes=config.processes,
        engine=config.engine,
        session=session,
    )


def _refuse_imported_script() -> None:
    """Raise InvalidConfigError in a process that tokenises, where it imports the script that began it."""
    if getattr(current_process(), "_inheriting", False):
        raise InvalidConfigError(
            "a script that tokenises a large text runs again in each process that tokenises it. Put the call "
            'below `if __name__ == "__main__":`.'
        )


def _write(
    folder: Path,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    *,
    pool: Callable[..., Any],
    session: Session,
) -> None:
    """Write the parts that are missing, then what describes all of them."""
    remove_abandoned(folder.glob(f".*{PARTIAL}"))
    documents = corpus.documents
    dtype = np.dtype(token_dtype(num_ids(tokenizer))).newbyteorder("<").str
    bounds = _bounds(documents)
    jobs = [
        _PartJob(
            folder=folder,
            number=number,
            documents=documents.select(range(first, last)),
            tokenizer=tokenizer,
            dtype=dtype,
            prompt=corpus.prompt or "",
            between=_between(corpus, tokenizer),
        )
        for number, (first, last) in enumerate(pairwise(bounds))
    ]
    todo = [job for job in jobs if _finished(job) is None]
    session.progress.start("tokenise", sum(len(job.documents) for job in todo), "documents")
    with storage_errors("write", folder):
        if len(todo) > 1:
            for num_documents in _in_processes(todo, pool, session):
                session.progress.advance(num_documents)
        for job in todo if len(todo) == 1 else ():
            _write_part(job, session)
        _seal(folder, corpus, tokenizer, jobs=jobs)


def _in_processes(jobs: list[_PartJob], pool: Callable[..., Any], session: Session) -> Iterator[int]:
    """Write parts in a pool of processes, and yield the number of documents of each that is done."""
    others = active_children()
    with pool(len(jobs)) as workers:
        own = [process for process in active_children() if process not in others]  # none of a Ray cluster
        results = workers.imap_unordered(_write_part, jobs)
        left = len(jobs)
        while left:
            try:
                yield results.next(_POLL_S)
                left -= 1
            except PoolTimeoutError:
                session.stop_if_asked(_INTERRUPTED)
                if any(process.exitcode is not None for process in own):  # the pool forgets what it worked on
                    raise RankLostError(_ENDED) from None


def _pool(num_jobs: int, *, engine: Engine | None, num_processes: int | None) -> Any:  # noqa: ANN401 - two types
    """Return a pool of processes of this machine, or of a Ray cluster, each of which uses one core."""
    if engine is None:
        size = min(num_processes or machine_cores(), num_jobs)
        return get_context("spawn").Pool(size, initializer=_use_one_core)
    import_ray()
    from ray.util.multiprocessing import Pool  # noqa: PLC0415 - an extra

    try:
        return Pool(num_processes, initializer=_use_one_core)
    except ValueError as error:  # the cluster has fewer cores
        raise InvalidConfigError(f"--processes {num_processes}: {first_line(error)}. Lower it.") from error


def _use_one_core() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _bounds(documents: datasets.Dataset) -> list[int]:
    """Return the numbers of the documents that parts begin with, and the number of all documents."""
    num_bytes = documents.data.nbytes * len(documents) / max(1, documents.data.num_rows)
    num_parts = min(max(1, round(num_bytes / _PART_BYTES)), MAX_PARTS, len(documents))
    return [round(len(documents) * part / num_parts) for part in range(num_parts + 1)]


def _write_part(job: _PartJob, session: Session = ALONE) -> int:
    """Write one part, its checksums and its documents' hashes and ends; return the number of documents."""
    keys: dict[str, list[npt.NDArray[np.uint64]]] = {file: [] for file in _columns(job) if file != ENDS}
    counts = []
    with new_file(job.path.with_suffix(".ids"), durable=False) as ids:
        for first, batch in text_batches(job.documents):
            session.stop_if_asked(_INTERRUPTED)
            prompted = [job.prompt + text for text in batch["text"].to_pylist()]
            # A pattern of the tokenizer may take for ever, and no signal handler runs meanwhile.
            tokenised = awaited(
                partial(_token_ids, prompted, job.tokenizer, job.between),
                should_stop=session.should_stop,
                interrupted=_INTERRUPTED,
            )
            counts.append(np.asarray([len(row) for row in tokenised], dtype="<i8"))
            ids.write(np.concatenate([np.asarray(row, dtype=job.dtype) for row in tokenised]).tobytes())
            for file, hashes in keys.items():
                values = batch[_KEYS[file]].to_pylist()
                hashes.append(_hashes(prompted if file == TEXTS else values, job.number, first))
            session.progress.advance(len(tokenised))
    columns = {ENDS: np.cumsum(np.concatenate(counts)), **{f: np.concatenate(h) for f, h in keys.items()}}
    content = np.fromfile(job.path.with_suffix(".ids"), dtype=np.uint8)
    for name, values in {**columns, "sums": block_sums(content)}.items():
        write_file(job.path.with_suffix(f".{name}"), values.tobytes(), durable=False)
    part = TokenPart(
        num_documents=len(job.documents),
        num_tokens=int(columns[ENDS][-1]),
        sums=digest_file(job.path.with_suffix(".sums")),
    )
    write_file(job.path.with_suffix(".json"), part.model_dump_json().encode(), durable=False)
    return len(job.documents)


def _finished(job: _PartJob) -> TokenPart | None:
    """Return what is written of a part. None means that it is not written, or not as it should be."""
    try:
        part = TokenPart.model_validate_json(job.path.with_suffix(".json").read_bytes())
        content = np.fromfile(job.path.with_suffix(".ids"), dtype=np.uint8)
        sums = np.fromfile(job.path.with_suffix(".sums"), dtype="<u8")
        sizes = {path.stat().st_size for path in (job.path.with_suffix(f".{name}") for name in _columns(job))}
    except (OSError, ValidationError):
        return None
    is_whole = (
        part.num_documents == len(job.documents)
        and sizes == {8 * part.num_documents}
        and np.array_equal(block_sums(content), sums)
    )
    return part if is_whole else None


def _columns(job: _PartJob) -> list[str]:
    """Return the files of a part that hold a number for each document."""
    return [ENDS, *(file for file, column in _KEYS.items() if column in job.documents.column_names)]


def _seal(folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, *, jobs: list[_PartJob]) -> None:
    """Join the parts' documents, and write what describes the folder."""
    parts = [TokenPart.model_validate_json(job.path.with_suffix(".json").read_bytes()) for job in jobs]
    names = _columns(jobs[0])
    for name in names:
        before = 0
        with new_file(folder / name, durable=False) as file:
            for job, part in zip(jobs, parts, strict=True):
                values = np.fromfile(job.path.with_suffix(f".{name}"), dtype="<i8")
                file.write((values + before if name == ENDS else values).tobytes())
                before += part.num_tokens
    record = TokenRecord(
        corpus=corpus.identity,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        dtype="<u2" if jobs[0].dtype == "<u2" else "<u4",
        parts=tuple(parts),
        files={name: digest_file(folder / name) for name in names},
    )
    write_file(folder / TOKENS_FILE, record.to_json(), durable=False)
    for job in jobs:
        for name in (*names, "json"):
            job.path.with_suffix(f".{name}").unlink()


def _between(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...] | None:
    """Return the tokens between the two texts of each document. None means that each is one text."""
    return pair_template_of(tokenizer).between if corpus.identity.pairs else None


def _token_ids(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, between: tuple[int, ...] | None
) -> list[list[int]]:
    """Return the tokens of texts, or those of both texts of pairs with what stands between them.

    Raises:
        CorpusError: the first text of a pair holds a token that stands between texts, so that its end could
            not be found again, or one of the two has no token.
    """
    if between is not None:
        halves = [text.split(BETWEEN) for text in texts]
        first, second = (_token_ids([half[n] for half in halves], tokenizer, None) for n in (0, 1))
        for own, other, half in zip(first, second, halves, strict=True):
            if between[0] in own:
                problem = "the first holds a token that the tokenizer puts between texts"
            elif not own or not other:
                problem = f"the {'second' if own else 'first'} has no token"
            else:
                continue
            raise CorpusError(
                f"of the pair of texts {half[0][:40]!r} and {half[1][:40]!r}, {problem}. Correct the record "
                "or remove it."
            )
        return [[*own, *between, *other] for own, other in zip(first, second, strict=True)]
    with library_errors(f"the tokenizer of {tokenizer.name_or_path} cannot read the text"):
        encoded: Mapping[str, Any] = tokenizer(
            texts,
            add_special_tokens=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(encoded["input_ids"])


def _hashes(values: list[str | None], part: int, first: int) -> npt.NDArray[np.uint64]:
    """Return a hash of each value, `(documents,)`; a missing value, which has no copies, has one of its own.

    Args:
        values: values of consecutive documents.
        part: number of their part.
        first: number of the first of them in the part.
    """
    unique = (f"{part} {number}" for number in range(first, first + len(values)))
    hashes = (
        xxhash.xxh3_64_intdigest((other if value is None else value).encode(), seed=value is None)
        for value, other in zip(values, unique, strict=True)
    )
    return np.fromiter(hashes, dtype="<u8", count=len(values))


def _refuse_other_tokens(
    tokens: Tokens, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, *, shared: RemoteFolder
) -> None:
    """Compare fetched tokens with those of some documents, which nobody can foresee.

    Raises:
        CacheCorruptError: they are not those of this text. They are not kept.
    """
    num_documents = len(corpus.documents)
    drawn = np.random.default_rng().choice(num_documents, min(num_documents, _SAMPLE), replace=False)
    chosen = np.sort(drawn)
    texts = [str(text) for text in corpus.documents.select(chosen)["text"]]
    prompted = [(corpus.prompt or "") + text for text in texts]
    expected = _token_ids(prompted, tokenizer, _between(corpus, tokenizer))
    hashes = [xxhash.xxh3_64_intdigest(text.encode()) for text in prompted]
    is_same = tokens.keys[0][chosen].tolist() == hashes and all(
        ids.tolist() == own for ids, own in zip(tokens.read(chosen), expected, strict=True)
    )
    if not is_same:
        (tokens.folder / TOKENS_FILE).unlink()
        raise CacheCorruptError(
            f"{shared.url} holds tokens of another text than {corpus.name}. Remove it there, and run the "
            "same command again: it tokenises the text anew."
        )


_SAMPLE: Final = 256
"""Documents that are compared: where a fiftieth of all is wrong, it is found in 99 of 100 cases."""
_INTERRUPTED: Final = (
    "interrupted while the text is tokenised: finished parts are kept. Run the same command again to go on."
)
