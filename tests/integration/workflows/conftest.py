"""Fixtures of workflows."""

import pytest
from markupsafe import Markup


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Leave figures, which take most of the time, out of pages unless a test is marked `figures`.

    tests/integration/report has tests of every figure, of chains and of studies, too.
    """
    if "figures" not in request.keywords:
        empty = Markup('<svg class="left-out"></svg>')
        monkeypatch.setattr("minilm_cache.report.page.svg", lambda *_, **__: empty)
