"""`minilm-cache demo`: from Python's documentation to students that search it."""

import shlex
import sys
from typing import TYPE_CHECKING

from minilm_cache.cli.console import print_json, print_pairs, print_table
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import JsonOption
from minilm_cache.cli.tables import fidelity_table

if TYPE_CHECKING:
    from minilm_cache.workflows.demo import DemoResult

_LONGEST = 60
"""Most characters of an answer that are shown."""


def demo(json: JsonOption = False) -> None:
    """Try it all: one teacher, one cache, two students, and a search.

    This needs no network and takes some minutes. Run it again to resume or reuse what is done.
    """
    from minilm_cache.workflows.demo import run_demo  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        result = run_demo(session=session)
    if json:
        print_json(_document(result))
    else:
        _print(result)


def _document(result: "DemoResult") -> dict[str, object]:
    manifest = result.dump.manifest
    return {
        "cache": result.dump.path,
        "run": result.train.path,
        "page": result.page,
        "num_tokens": manifest.num_tokens,
        "measured": manifest.measured,
        "students": result.train.record.students,
        "num_documents": result.num_documents,
        "num_questions": result.num_questions,
        "models": result.searchers,
    }


def _print(result: "DemoResult") -> None:
    from minilm_cache.workflows.demo import QUESTIONS, TOP  # noqa: PLC0415 - importing it takes seconds

    fidelity_table(result.dump.manifest)
    searchers = result.searchers
    for number, question in enumerate(QUESTIONS):
        print_table(
            f"Question: {question}",
            ["model", f"the best of {result.num_documents:,} texts of Python's documentation"],
            [
                [searcher.model if place == 0 else "", _short(answer)]
                for searcher in searchers
                for place, answer in enumerate(searcher.answers[number])
            ],
            num_names=2,
        )
    print_table(
        f"The teacher's {TOP} best texts for {result.num_questions} held-out questions, and costs",
        ["model", f"among its own {TOP} best", "parameters", "texts per second"],
        [
            [
                searcher.model,
                f"{100 * searcher.agreement:.0f} %",
                f"{searcher.num_parameters:,}",
                f"{searcher.texts_per_s:,.0f}",
            ]
            for searcher in searchers
        ],
    )
    program, folder = sys.argv[0], str(result.train.path)
    print_pairs(
        {
            "cache": result.dump.path,
            "run": result.train.path,
            "ask more": shlex.join([program, "search-text", folder, "open a file"]),
            "what it learned": shlex.join([program, "info", folder]),
            "closer students, in three times the minutes": shlex.join(
                [
                    *(program, "train", str(result.dump.path), "--objective", "embedding"),
                    *("--steps", "300", "--arch", "3x384", "--arch", "3x192"),
                ]
            ),
            "a file to ship": shlex.join(
                [program, "export-model", str(searchers[1].path), "--onnx", "--int8", "--out", "shipped"]
            ),
            "in Python": f"sentence_transformers.SentenceTransformer({str(searchers[1].path)!r})",
            "curves, sizes, attention maps": result.page.resolve().as_uri(),
        }
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
