"""Write the tasks on the King James text that evaluation ships: the last word of a verse, the verse that follows."""

import gzip
import json
import random
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "polyreme/evaluation/kjv"
ROWS = 100
CHOICES = 4


def verses() -> list[str]:
    """Every verse without its place."""
    text = gzip.decompress((ROOT / "data/kjv.txt.gz").read_bytes()).decode("ascii")
    parts = re.split(r"^\S+?\d+:\d+ ", text, flags=re.MULTILINE)[1:]
    return [" ".join(part.split()) for part in parts]


def cloze(lines: list[str], draw: random.Random) -> dict:
    """A verse without its last word, which stands among last words of other verses."""
    while True:
        prompt, _, word = draw.choice(lines).removesuffix(".").rpartition(" ")
        if 40 <= len(prompt) <= 160 and word.isalpha() and word.islower() and len(word) > 3:
            break
    words = {word}
    while len(words) < CHOICES:
        other = draw.choice(lines).removesuffix(".").rpartition(" ")[2]
        if other.isalpha() and other.islower() and len(other) > 3:
            words.add(other)
    return _row(prompt, word, sorted(words), draw)


def order(lines: list[str], draw: random.Random) -> dict:
    """A verse, and which one follows it: the right one stands among verses from elsewhere that are about as long."""
    while True:
        place = draw.randrange(len(lines) - 1)
        verse, following = lines[place : place + 2]
        if 60 <= len(verse) <= 160 and 60 <= len(following) <= 120:
            break
    others = {following}
    while len(others) < CHOICES:
        other = draw.choice(lines)
        if abs(len(other) - len(following)) <= 20 and other != verse:
            others.add(other)
    return _row(verse, following, sorted(others), draw)


def _row(prompt: str, right: str, choices: list[str], draw: random.Random) -> dict:
    draw.shuffle(choices)
    return {"prompt": prompt, "choices": choices, "answer": choices.index(right)}


def main() -> None:
    """Write both files; the same bytes on every machine."""
    lines = verses()
    FOLDER.mkdir(exist_ok=True)
    for name, make in (("cloze", cloze), ("order", order)):
        draw = random.Random(f"kjv {name}")
        rows = [json.dumps(make(lines, draw)) + "\n" for _ in range(ROWS)]
        (FOLDER / f"{name}.jsonl").write_text("".join(rows), encoding="ascii")


if __name__ == "__main__":
    main()
