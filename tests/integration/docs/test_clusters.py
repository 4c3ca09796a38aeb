"""The commands of compose.yaml and of the page on clusters, run against a server that speaks S3."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import save_teacher, write_corpus

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/clusters.md").read_text()


def _compose() -> list[list[str]]:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {services[name]["build"] for name in ("dump", "train")} == {"."}
    return [shlex.split(services[name]["command"]) for name in ("dump", "train")]


def _kubernetes() -> list[list[str]]:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    jobs: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    return [job["spec"]["template"]["spec"]["containers"][0]["args"] for job in jobs]


def _slurm() -> list[list[str]]:
    return [shlex.split(line)[2:] for line in re.findall("^srun .*", PAGE, re.MULTILINE)]


@pytest.mark.parametrize("commands", [_compose, _kubernetes, _slurm])
def test_a_dump_and_a_training_from_it(
    commands: Any, tmp_path: Path, command: Command, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shape: dict[str, Any] = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 12}
    teacher = save_teacher(tmp_path / "small", max_position_embeddings=256, **shape)
    save_encoder(teacher, "mean", width=192, max_length=128)
    (tmp_path / "text").mkdir()
    write_corpus(tmp_path / "text/corpus.txt", num_documents=90)
    places = {
        "s3://caches": store,
        "/text": "text",
        "/students": "students",
        "3x384": "2x96",
        "mini": "small",
    }
    found = commands()
    assert len(found) == 2
    for arguments, more in zip(found, [(), ("--steps", 2, "--batch-size", 4)], strict=True):
        assert arguments[0] in {"dump", "train"}
        given = arguments[:1]
        for word in arguments[1:]:
            start = next((one for one in places if word == one or word.startswith(f"{one}/")), None)
            given.append(word if start is None else places[start] + word.removeprefix(start))
        code, _, err = command(*given, *more)
        assert code == 0 or "ended worse than with the weights" in err, err
    record = json.loads(next(Path().glob("students/**/run.json")).read_text())
    assert record["complete"]
