"""Lines of progress where stderr is not a terminal."""

import re

import pytest

from minilm_cache.cli.console import TerminalProgress


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of two tasks, one with a loss and one of bytes."""
    monkeypatch.setattr("minilm_cache.cli.console._PLAIN_PERIOD_S", 0)
    with TerminalProgress().shown() as progress:
        progress.start("train", 200, "tokens")
        progress.advance(100, "loss 0.5")
        progress.advance(100, "loss 0.25")
        progress.start("push", 1, "shards")
        progress.advance(1)
        progress.start("pull", 4_969_340_657, "bytes")
        progress.advance(4_969_340_657)
    return capsys.readouterr().err.splitlines()


def test_a_loss_stands_next_to_the_rate(shown: list[str]) -> None:
    assert re.fullmatch(r"train: 50% \(100 tokens, [\d,]+ tokens/s, loss 0\.5(, 0:00 left)?\)", shown[0])
    assert "loss 0.25" in shown[1]


def test_what_is_finished_has_no_time_left(shown: list[str]) -> None:
    assert all("left" not in line for line in shown if "100%" in line)


def test_one_has_no_plural_and_bytes_have_prefixes(shown: list[str]) -> None:
    assert any(line.startswith("push: 100% (1 shard, ") for line in shown)
    assert any(line.startswith("pull: 100% (5.0 GB, ") for line in shown)
