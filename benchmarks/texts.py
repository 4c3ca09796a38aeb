"""The text that students of embeddings learn from: sentences, whole paragraphs, and questions.

python -m benchmarks.texts PARAGRAPHS.txt > texts.txt    # a paragraph a line; a quarter of them stay whole
"""

import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

SENTENCE: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"])")
STATEMENT: Final = re.compile(
    r"(?P<subject>(?:The |A |An )?[A-Z][^,.;:()\"]{1,60}?) "
    r"(?P<verb>is|was|are|were|has|had|can|could|will|would) (?P<rest>[^,.;:()\"]{10,90})"
)
ORDINARY: Final = ("The", "A", "An", "In", "It", "This", "He", "She", "They", "There", "These", "His", "Her")
"""First words of a sentence that are small within one."""


def records(files: Iterable[Path], *, paragraphs: float, questions: float) -> list[str]:
    """Return the sentences of a text, and some of its paragraphs.

    Args:
        files: text files with a paragraph a line, like `enwiki/train.txt`.
        paragraphs: share of the paragraphs above 200 characters that stay as they are.
        questions: share of the sentences that begin like `Paris is the capital` that become questions.
    """
    generator = random.Random(0)  # noqa: S311 - a sample of text
    found = []
    for file in files:
        for line in file.read_text().splitlines():
            paragraph = line.strip()
            if not paragraph:
                continue
            if generator.random() < paragraphs and len(paragraph) > 200:
                found.append(paragraph)
                continue
            for sentence in SENTENCE.split(paragraph):
                if 20 <= len(sentence) <= 600:
                    statement = STATEMENT.match(sentence) if questions else None
                    asked = statement is not None and generator.random() < questions
                    found.append(_question(statement, generator) if statement and asked else sentence)
    return found


def _question(statement: re.Match[str], generator: random.Random) -> str:
    """Return a sentence as a question: short, and often odd, but with a question's words and order."""
    subject, verb, rest = statement["subject"], statement["verb"], statement["rest"].strip()
    if subject.split()[0] in ORDINARY:
        subject = subject[0].lower() + subject[1:]
    word = generator.choice(["What", "Who", "Which", "When", "Where", "Why", "How"])
    if word in {"What", "Who"}:
        return f"{word} {verb} {rest}?"
    if word == "Which":
        return f"Which {subject.split()[-1]} {verb} {rest}?"
    return f"{word} {verb} {subject} {rest}?"


if __name__ == "__main__":
    print(*records(map(Path, sys.argv[1:]), paragraphs=0.25, questions=0.0), sep="\n\n")
