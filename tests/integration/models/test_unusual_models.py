"""Teachers whose states, positions or segments are not what those of most families are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModel,
    ConvBertConfig,
    DPRConfig,
    DPRQuestionEncoder,
    FunnelConfig,
    MPNetConfig,
    PreTrainedConfig,
    XLNetConfig,
)

from minilm_cache.cache import open_cache
from minilm_cache.errors import TeacherError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.locate import TeacherSource
from minilm_cache.models.tap import Tap
from minilm_cache.models.teacher import Teacher
from minilm_cache.storage_schema.states import POOLED
from tests.fixtures import Command
from tests.support import VOCABULARY, save_teacher, tiny_tokenizer, write_corpus, write_groups

HIDDEN: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
ALBERT: dict[str, Any] = {"hidden_size": 32, "embedding_size": 16, "num_hidden_layers": 3}
OTHERS: dict[str, PreTrainedConfig] = {
    "albert of inner groups": AlbertConfig(
        **ALBERT, num_attention_heads=4, intermediate_size=64, inner_group_num=2, vocab_size=len(VOCABULARY)
    ),
    "funnel": FunnelConfig(
        architectures=["FunnelModel"],
        block_sizes=[2, 2],
        num_decoder_layers=2,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        vocab_size=len(VOCABULARY),
    ),
    "xlnet": XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=len(VOCABULARY)),
}


def saved(folder: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    config.pad_token_id = 0
    AutoModel.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_an_encoder_inside_another_one_is_refused(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "teacher"
    config = DPRConfig(vocab_size=len(VOCABULARY), num_hidden_layers=2, **HIDDEN)
    DPRQuestionEncoder(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    text = write_corpus(tmp_path / "corpus.txt")
    words = ("dump", "--teacher", folder, "--corpus", text, "--codec", "none", "--pooled", "--pooling", "cls")
    command.fails(
        *words, "--packing", "records", "--max-length", 32, code=1, says="gives no last hidden states"
    )


@pytest.mark.parametrize("name", OTHERS)
def test_the_last_state_is_what_the_model_calls_its_last(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "teacher", OTHERS[name])
    teacher = Teacher(TeacherSource(name=name, folder=folder), torch.device("cpu"), layers=())
    teacher.check_length(32)
    rows = torch.randint(5, len(VOCABULARY), (2, 12), generator=torch.Generator().manual_seed(1))
    last = teacher.num_layers
    found = teacher.read(Inputs.full(rows), Tap(hidden=(last,))).hidden[last]
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder).eval()(rows).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_pooled_vectors_are_those_of_that_state(tmp_path: Path, command: Command) -> None:
    folder = saved(tmp_path / "teacher", OTHERS["albert of inner groups"])
    corpus = write_corpus(tmp_path / "corpus.txt")
    code, *_ = command(
        *(
            "dump",
            "--teacher",
            folder,
            "--corpus",
            corpus,
            "--codec",
            "none",
            "--pooled",
            "--pooling",
            "mean",
        ),
        *("--packing", "records", "--max-length", "32", "--out", tmp_path / "cache"),
    )
    assert code == 0
    model = AutoModel.from_pretrained(folder).eval()
    for sequence in list(open_cache(tmp_path / "cache"))[:5]:
        with torch.no_grad():
            last = model(sequence.input_ids[None].long()).last_hidden_state[0]
        stored = torch.as_tensor(sequence.states()[POOLED]).flatten()
        assert float(torch.cosine_similarity(stored, last.mean(0), dim=0)) > 0.999
    shown = command.fails(
        *("dump", "--teacher", folder, "--corpus", corpus, "--codec", "none", "--hidden", "1"),
        *("--packing", "records", "--max-length", "32", "--out", tmp_path / "other"),
        code=1,
        says="gives 7 hidden states in 3 layers",
    )
    assert "--pooled" in shown
    assert not (tmp_path / "other").exists()


def test_a_state_within_another_family_is_refused_in_python(tmp_path: Path) -> None:
    folder = saved(tmp_path / "teacher", OTHERS["funnel"])
    teacher = Teacher(TeacherSource(name="funnel", folder=folder), torch.device("cpu"), layers=())
    with pytest.raises(TeacherError, match=r"hidden states in 4 layers"):
        teacher.read(Inputs.full(torch.full((1, 12), 6)), Tap(hidden=(1,)))


def with_segments(folder: Path) -> Path:
    """Let a tokenizer name the segments of pairs."""
    file = folder / "tokenizer_config.json"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_input_names": names}))
    return folder


@pytest.mark.parametrize("asks", ["dump", "donor"])
def test_a_model_of_one_segment_reads_no_pairs_with_two(tmp_path: Path, command: Command, asks: str) -> None:
    one = with_segments(save_teacher(tmp_path / "one", type_vocab_size=1))
    pairs = write_groups(tmp_path / "pairs.jsonl")
    dump = ("--corpus", pairs, "--pair-columns", "query,right+wrong", "--max-length", "32")
    says = "knows one segment alone (type_vocab_size 1)"
    if asks == "dump":
        command.fails("dump", "--teacher", one, *dump, "--out", tmp_path / "cache", code=1, says=says)
        return
    two = with_segments(save_teacher(tmp_path / "two"))
    code, _, err = command("dump", "--teacher", two, *dump, "--out", tmp_path / "cache")
    assert code == 0, err
    command.fails(
        *("train", tmp_path / "cache", "--arch", "1x32", "--init", "slice", "--init-teacher", one),
        *("--steps", "2", "--out", tmp_path / "run"),
        code=1,
        says=says,
    )


@pytest.mark.parametrize(
    ("config", "is_alone"),
    [
        (ConvBertConfig(**HIDDEN, num_hidden_layers=2, embedding_size=16, vocab_size=len(VOCABULARY)), True),
        (MPNetConfig(**HIDDEN, num_hidden_layers=2, vocab_size=len(VOCABULARY)), False),
    ],
    ids=["convbert", "mpnet"],
)
def test_what_padding_changes_is_read_without_padding(
    tmp_path: Path, command: Command, config: PreTrainedConfig, is_alone: bool
) -> None:
    """Convolutions over tokens see padding: a text's vector is what it is alone."""
    folder = saved(tmp_path / "teacher", config)
    write_corpus(tmp_path / "corpus.txt")
    cache = tmp_path / "cache"
    code, _, err = command(
        *("dump", "--teacher", folder, "--corpus", tmp_path / "corpus.txt", "--for", "embedding"),
        *("--pooling", "mean", "--min-cosine", 0.99999, "--max-length", 32, "--out", cache),
    )
    assert code == 0, err
    assert ("so it reads sequences one by one" in err) == is_alone
    model = AutoModel.from_pretrained(folder).eval()
    for sequence in open_cache(str(cache)):
        with torch.no_grad():
            alone = model(sequence.input_ids[None].long()).last_hidden_state[0].mean(0)
        stored = sequence.states()[POOLED][0]
        assert float(torch.cosine_similarity(stored, alone, 0)) > 0.9998
    words = ("--teacher", folder, "--corpus", tmp_path / "corpus.txt")
    code, _, err = command("verify", cache, "--full", *words)
    assert code == 0, err
