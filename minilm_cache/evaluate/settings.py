"""Settings of evaluations and comparisons, and the stored identity and record of each trial."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from minilm_cache.errors import CorpusError
from minilm_cache.evaluate.tasks import TASKS, Generation, GenerationTask, Metric, SpanTask, Task
from minilm_cache.models.decoding import DecodingOptions
from minilm_cache.settings import ColumnSettings, FrozenSettings, ModelSettings
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.wording import did_you_mean

Lr = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TRIAL_FILE = "trial.json"
"""Name of the file of a trial's record in its folder."""


RECORDS: Final = (".csv", ".tsv", ".jsonl", ".parquet")
"""Endings of files of records."""


def is_own_task(name: str) -> bool:
    """Return whether `--task` names a file of one's own, and not a published task."""
    return name not in TASKS and Path(name).suffix in RECORDS


class GenerationOptions(DecodingOptions):
    """Options of fine-tuning that are about generated texts."""

    group = "Generation"
    target_column: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Column of the texts to generate, in a task of your own. None means `tgt` where the file has the columns
    src and tgt, and otherwise that the task has labels."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of a label's probability that is spread over all tokens. None means 0.1."""
    target_mask_prob: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a target's tokens that are predicted in a step. None means 1, all of them."""
    positions: Literal["copied"] | None = None
    """Where the positions of a model that is too short for the texts come from: `copied` repeats its first
    ones. None means as the task has it: copied for cnndm, and otherwise such a model is refused."""

    @property
    def generation_given(self) -> str | None:
        """The first option that was given, as it is typed. None means that none was."""
        fields = GenerationOptions.model_fields
        name = next((name for name in fields if getattr(self, name) is not None), None)
        return None if name is None else f"--{name.replace('_', '-')}"


class EvaluateConfig(GenerationOptions, ModelSettings):
    """Settings of an evaluation on downstream tasks."""

    group = "Evaluation"
    task: Annotated[tuple[str, ...], Field(min_length=1)]
    """Task: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli, squad, squad2, xnli, xnli-translate-train or
    mlqa; squad-qg, xsum, cnndm or gigaword, whose texts are generated; or a .csv, .tsv, .jsonl or .parquet
    file of your own texts with labels, or with texts to generate; may be repeated."""
    data: str | None = None
    """Folder of the task's published files, or a folder of such folders by the tasks' names. `hf` downloads
    them from the Hugging Face hub, `hf:ID` from another repository there. None means that each task is a
    file."""
    text_columns: Annotated[str, Field(min_length=1, max_length=512)] = "text"
    """Column of the texts of a task of your own, or of both texts of pairs, like question,answer."""
    label_column: Annotated[str, Field(min_length=1, max_length=256)] = "label"
    """Column of the labels of a task of your own: names or numbers of classes, or values on a scale."""
    metric: Metric | None = None
    """Metric of a task of your own. None means accuracy, or pearson and spearman where labels are numbers
    that are not all whole."""
    dev: Path | None = None
    """File with the same columns that a task of your own is scored on. None means a tenth of its texts."""
    grid: Literal["none", "paper"] = "none"
    """Settings to try: one (`none`), or the learning rates and epochs that MiniLM searched over (`paper`)."""
    lr: tuple[Lr, ...] = ()
    """Peak learning rate; may be repeated. None means 3e-5, 6e-5 for SQuAD, and 7e-5 or 1e-4 for generated
    texts."""
    epochs: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Passes over the training set; may be repeated. None means 3, 2 for MLQA, and 10 or more for published
    tasks of generated texts."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Examples per step. None means 32, and 64 for summaries, as in the papers."""
    seeds: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of trials of each setting, with seeds 0, 1, ..."""
    max_length: Annotated[int, Field(ge=16, le=2**16)] | None = None
    """Maximum tokens of an example, or of what a text is generated from. None means 128, 384 for questions
    with contexts, and the paper's for generated texts."""
    max_train: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of training examples; the same ones serve all models. None means all of them."""
    max_dev: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of examples of each dev set. None means all of them."""
    as_is: bool = False
    """Score classifiers with the heads that they have, without fine-tuning, such as students of answers or of
    scores, and models that generate texts already. A task of your own is then scored as a whole."""
    untrained: bool = False
    """Evaluate each model's shape with random weights, too."""
    predict: bool = False
    """Predict test sets without labels, too, for a benchmark's server, and test sets of generated texts,
    which take hours. A trial with these sets is another one, so give this from the start."""
    keep_models: bool = False
    """Keep the fine-tuned models."""
    card: bool = False
    """Write the scores into the README.md of models that are folders."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products."""

    @field_validator("task")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = next((name for name in value if name not in TASKS and not is_own_task(name)), None)
        if unknown is not None:
            raise ValueError(
                f"there is no task {unknown}{did_you_mean(unknown, TASKS)}; the tasks are "
                f"{', '.join(TASKS)}, or a file of texts with labels, or with texts to generate "
                f"({', '.join(RECORDS)})"
            )
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _tasks_have_data(self) -> "EvaluateConfig":
        own = [name for name in self.task if is_own_task(name)]
        generates = any(isinstance(TASKS.get(name), GenerationTask) for name in self.task)
        if self.generation_given is not None and not own and not generates:
            raise ValueError(f"{self.generation_given} is about texts that are generated: --task squad-qg")
        if len(own) < len(self.task) and self.data is None:
            raise ValueError("--data is missing: the folder with the published files of the task, or hf")
        if own and len(own) == len(self.task) and self.data is not None:
            raise ValueError(f"--data {self.data}: {own[0]} is a file of its own. Leave out --data.")
        names = [Path(name).name for name in own]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled is not None:
            raise ValueError(
                f"two tasks are files called {doubled}, which tables could not tell apart; rename one"
            )
        fields = type(self).model_fields
        for name in ("text_columns", "label_column", "target_column", "metric", "dev"):
            if not own and getattr(self, name) != fields[name].default:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} is about a task of your own: --task FILE")
        if self.dev is not None and len(own) > 1:
            raise ValueError("--dev is the file of one task of your own; give one --task FILE")
        if not 1 <= len(self.text_columns.split(",")) <= 2:  # noqa: PLR2004 - a text or a pair
            raise ValueError(f"--text-columns {self.text_columns}: give one column, or two with a comma")
        return self

    @model_validator(mode="after")
    def _grid_or_own(self) -> "EvaluateConfig":
        if self.grid == "paper" and (self.lr or self.epochs):
            raise ValueError("--grid paper names learning rates and epochs; leave out --lr and --epochs")
        return self

    @model_validator(mode="after")
    def _is_tuned_or_not(self) -> "EvaluateConfig":
        if not self.as_is:
            return self
        fields = type(self).model_fields
        tuning = ("grid", "lr", "epochs", "batch_size", "seeds", "max_train", "untrained", "keep_models")
        for name in (*tuning, "label_smoothing", "target_mask_prob", "positions"):
            if getattr(self, name) != fields[name].default:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} is about fine-tuning, which --as-is leaves out; leave it out")
        spans = [name for name in self.task if isinstance(TASKS.get(name), SpanTask)]
        if spans:
            raise ValueError(f"--as-is scores classes and values, and {spans[0]} is about spans")
        return self

    def settings(self, task: Task) -> list[tuple[float, int]]:
        """Return the learning rates and epochs that are tried of a task; 0 of both means no fine-tuning."""
        if self.as_is:
            return [(0.0, 0)]
        default = (3e-5,) if len(task.recipe.lrs) > 1 else task.recipe.lrs
        lrs = task.recipe.lrs if self.grid == "paper" else self.lr or default
        epochs = task.recipe.epochs if self.grid == "paper" else self.epochs or (task.recipe.epochs[0],)
        return [(lr, number) for lr in dict.fromkeys(lrs) for number in dict.fromkeys(epochs)]


class SpeedConfig(ModelSettings):
    """Settings of a comparison of speeds."""

    group = "Measurement"
    batch_size: Annotated[tuple[Annotated[int, Field(ge=1, le=2**16)], ...], Field(min_length=1)] = (1, 32)
    """Sequences of a forward pass. Repeat the option for several values."""
    length: Annotated[tuple[Annotated[int, Field(ge=4, le=2**16)], ...], Field(min_length=1)] = (32, 128)
    """Tokens of each sequence. Repeat the option for several values."""
    turns: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Timed forward passes of each model; the models take turns."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights in torch."""
    generate: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Tokens to generate from each sequence, greedily, by the models that were fine-tuned for it. None means
    that only forward passes are measured."""
    onnx: Path | None = None
    """Folder to export models to as ONNX, which are measured, too. None means no export."""


class RetrievalData(ColumnSettings):
    """Queries of one's own, their relevant documents, and the texts that are searched."""

    retrieval: Path | None = None
    """Retrieval data of your own: a .jsonl file of `question` and `answer`, or a folder in BEIR's layout
    (corpus.jsonl, queries.jsonl, qrels/test.tsv), or its file of judgements of another split. None means
    that `--queries`, `--corpus` and `--qrels` give them; without these, `embeddings` measures no retrieval,
    and `mine` and `rerank` refuse."""
    corpus: Annotated[str, Field(min_length=1)] | None = None
    """Text whose documents are searched, too: a collection that the relevant documents of `--retrieval` are
    to be found in; a file or a name as for `dump`. With `--qrels`: the .jsonl file of documents, as in BEIR's
    layout. None means that only documents of `--retrieval` are searched."""
    queries: Path | None = None
    """File of queries as in BEIR's layout (`_id`, `text`), where `--qrels` is given. None means that
    `--retrieval` gives them."""
    qrels: Path | None = None
    """File of judgements as in BEIR's layout (query, document, grade; .tsv), for files that stand in no
    folder of that layout; give `--queries` and `--corpus` with it. None means that `--retrieval` gives
    them."""

    @property
    def judged(self) -> Path | None:
        """What says which documents are relevant: `retrieval`, or `qrels`. None means that nothing does."""
        return self.retrieval or self.qrels

    @property
    def beside(self) -> str | None:
        """The text that is searched beside the documents of `retrieval`. None means that there is none."""
        return self.corpus if self.qrels is None else None

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> "RetrievalData":
        if (self.qrels is None) != (self.queries is None) or (self.qrels and not self.corpus):
            raise ValueError("--queries, --corpus and --qrels go together. Give all three files.")
        if self.qrels is not None and self.retrieval is not None:
            raise ValueError("--qrels and --retrieval both give retrieval data. Leave out one of them.")
        if self.judged is None and self.corpus is not None:
            raise ValueError("--corpus goes with --retrieval, or with --queries and --qrels")
        of_text = self.text_column is not None or self.documents != "paragraphs"
        if of_text and (self.corpus is None or self.qrels is not None):
            raise ValueError("--text-column and --documents go with --corpus beside --retrieval")
        return self


class EmbeddingsConfig(RetrievalData, ModelSettings):
    """Settings of a comparison of embeddings."""

    group = "Comparison"
    data: str | None = None
    """Folder of STS-B in GLUE's layout, or a folder of such folders; `hf` or `hf:ID` for the hub. None means
    that only retrieval is measured."""
    max_pairs: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of pairs of the dev set. None means all of them."""
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Maximum tokens of a text; a model whose folder says that it reads fewer reads as many."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Texts of a forward pass."""
    save: Path | None = None
    """Folder to write each model to as a sentence-transformer, beside `--data`. None means that none is
    written."""
    mteb: tuple[str, ...] = ()
    """Task of the Massive Text Embedding Benchmark, like STS12. Repeat the option for several tasks."""

    @model_validator(mode="after")
    def _measures_something(self) -> "EmbeddingsConfig":
        if self.data is None and self.judged is None:
            raise ValueError("give --data (STS-B), --retrieval (your own questions), or both")
        if self.data is None and (self.mteb or self.save or self.max_pairs):
            raise ValueError("--mteb, --save and --max-pairs go with --data")
        return self


class OwnDataSettings(RetrievalData, ModelSettings):
    """Retrieval data of one's own, and what finds candidates in them."""

    group = "Candidates"
    max_length: Annotated[int, Field(ge=4, le=2**16)] = 128
    """Maximum tokens of a text, or of a query with a document."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Texts, or pairs of texts, of a forward pass."""

    @model_validator(mode="after")
    def _has_data(self) -> "OwnDataSettings":
        if self.judged is None:
            raise ValueError("give --retrieval (your own questions), or --queries, --corpus and --qrels")
        return self


class MineConfig(OwnDataSettings):
    """Settings of a search for hard negatives."""

    negatives: Annotated[int, Field(ge=1, le=1000)] = 7
    """Hard negatives (near documents that are not relevant) of each query."""
    among: Annotated[int, Field(ge=1, le=10_000)] = 50
    """Number of nearest documents that negatives are drawn from. If it equals `--negatives`, all are
    taken."""
    margin: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Minimum relative gap, like 0.05: a negative's cosine must be at least 5 % below that of the relevant
    document (the farthest one, if there are several), because a nearer one may be relevant without a mark.
    None means no minimum."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the draw."""

    @model_validator(mode="after")
    def _draws_enough(self) -> "MineConfig":
        if self.among < self.negatives:
            raise ValueError(f"--among {self.among} is below --negatives {self.negatives}; give more")
        return self


class RerankConfig(OwnDataSettings):
    """Settings of a comparison of cross-encoders."""

    first_stage: str
    """Model whose nearest documents are ranked anew: `mini`, a hub id or a folder of a sentence encoder."""
    candidates: Annotated[int, Field(ge=2, le=1000)] = 100
    """Nearest documents of each query that are ranked anew."""
    max_queries: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of queries; the first ones are taken. None means all of them."""


class TrialIdentity(FrozenSettings):
    """Everything that a trial's result depends on: two trials with equal identities are the same trial."""

    task: str
    track: str
    """Language of the training set. Empty if the task is trained on one language only."""
    data_sha256: str
    """SHA-256 (hex) of the examples that scores depend on."""
    model_sha256: str
    """SHA-256 (hex) of the model's weights and configuration."""
    tokenizer_sha256: str
    """SHA-256 (hex) of the tokenizer's words and rules, and of the names of the inputs that it makes."""
    untrained: bool
    """Whether the weights are drawn by the seed, so that only the shape is the model's."""
    lr: float
    epochs: int
    batch_size: int
    seed: int
    max_length: int
    precision: Literal["float32", "bfloat16"]
    generation: Generation | None = None
    """How texts are generated. None means that none are."""

    def digest(self) -> str:
        """Return the end of the folder's name, which does not depend on the name of the model."""
        return canonical_sha256(self.model_dump(mode="json", exclude_none=True))[:12]

    def name(self, slug: str) -> str:
        """Return the name of the trial's folder.

        Args:
            slug: name of the model as a file name.
        """
        model = f"{slug}-untrained" if self.untrained else slug
        track = f"-{self.track}" if self.track else ""
        return f"{model}{track}-lr{self.lr:g}-e{self.epochs}-s{self.seed}-{self.digest()}"


class TrialRecord(FrozenSettings):
    """A finished trial and its scores, times 100; `trial.json` has this content."""

    identity: TrialIdentity
    model: str
    """Name of the model in tables."""
    num_train: int
    num_scored: dict[str, int]
    """Number of examples of each set that has scores."""
    num_cut: dict[str, int] = Field(default_factory=dict)
    """Number of examples of each set, and of `train`, whose texts were cut at `identity.max_length` tokens.
    Sets without any are left out; trials of earlier releases have none, or those of scored sets alone."""
    train_s: float
    """Seconds of training."""
    scores: dict[str, dict[str, FiniteFloat]]
    """Scores by set and metric. Empty if the loss was NaN or infinite in the end."""
    headline: FiniteFloat | None
    """Score that settings are chosen by, the mean over dev sets. None means that the trial diverged."""
    versions: dict[str, str]
    """Versions of the libraries that trained and scored the model, by library."""
    predicted_sha256: str | None = None
    """SHA-256 (hex) of the sets without labels whose predictions are written. None means that there are none,
    or a trial of an earlier release."""


def refuse_no_data(retrieval: Path) -> None:
    """Raise CorpusError if there are no retrieval data at a path."""
    if not retrieval.exists():
        raise CorpusError(f"--retrieval {retrieval} does not exist. Give a folder or a .jsonl file.")
    if retrieval.suffix.lower() in {".csv", ".parquet", ".xlsx", ".txt"} and not retrieval.is_dir():
        raise CorpusError(
            f"--retrieval {retrieval} is neither a .jsonl file of question and answer, nor a folder in "
            "BEIR's layout, nor its .tsv file of judgements. Convert it to one of these."
        )
