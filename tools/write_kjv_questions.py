"""Write data/kjv_questions.jsonl and data/kjv_preferences.jsonl, by rule from data/kjv.txt.gz: questions about the King
James text with their answers; and some of them with the answer to another one as the worse.

Run it in the repository's root: python tools/write_kjv_questions.py
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

BOOKS = {"Ge": "Genesis", "Exo": "Exodus", "Ruth": "Ruth", "Psa": "Psalm", "Prv": "Proverbs", "Eccl": "Ecclesiastes",
         "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John", "1Cor": "1 Corinthians"}  # fmt: skip
_VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*?)(?=^\d?[A-Za-z]+\d+:\d+ |\Z)", re.MULTILINE | re.DOTALL)
_BEGAT = re.compile(r"\b([A-Z][a-z]+) begat ([A-Z][a-z]+)\b")
_DAYS = re.compile(r"all the days of ([A-Z][a-z]+) were ([a-z ]+ years)")
LONGEST = 120  # characters of a verse that is asked about
PREFERENCES = 120
EVERY = 9  # so many verses apart are those that are asked about


def verses(text: str) -> Iterator[tuple[str, str, str]]:
    """(book, "Genesis 1:1", its text) of the books that are asked about."""
    for code, chapter, verse, words in _VERSE.findall(text):
        if code in BOOKS:
            yield BOOKS[code], f"{BOOKS[code]} {chapter}:{verse}", " ".join(words.split())


def pairs(text: str) -> Iterator[tuple[str, str]]:
    """Questions and answers."""
    listed = list(verses(text))
    seen: set[str] = set()

    def ask(question: str, answer: str) -> Iterator[tuple[str, str]]:
        if question not in seen:
            seen.add(question)
            yield question, answer

    for number, (book, place, words) in enumerate(listed[:-1]):
        for father, child in _BEGAT.findall(words):
            yield from ask(f"Who begat {child}?", f"{father} begat {child}. ({place})")
        for name, years in _DAYS.findall(words):
            yield from ask(f"How long did {name} live?", f"All the days of {name} were {years}. ({place})")
        following = listed[number + 1]
        if number % EVERY or len(words) > LONGEST:
            continue
        if number // EVERY % 3 == 0:
            yield from ask(f"What does {place} say?", words)
        elif number // EVERY % 3 == 1:
            yield from ask(f'Where is it written: "{words}"?', f"It is written in {place}.")
        elif len(following[2]) <= LONGEST and following[0] == book:
            yield from ask(f'What comes after "{words}"?', f"{following[2]} ({following[1]})")


def main() -> None:
    """Write the file."""
    root = Path(__file__).resolve().parents[1]
    text = gzip.decompress((root / "data" / "kjv.txt.gz").read_bytes()).decode("ascii")
    asked = list(pairs(text))
    questions = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in asked
    ]
    every = len(asked) // PREFERENCES
    preferences = [
        {"prompt": question, "chosen": answer, "rejected": asked[(number + every // 2) % len(asked)][1]}
        for number, (question, answer) in enumerate(asked)
        if number % every == 0
    ]
    for name, rows in (("questions", questions), ("preferences", preferences)):
        lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        (root / "data" / f"kjv_{name}.jsonl").write_text(lines, encoding="ascii")
        print(f"{name}: {len(rows)} rows, {len(lines):,} bytes")


if __name__ == "__main__":
    main()
