"""Rows of the three stages and of the tasks, from plays in two spellings and from general text.

The domain is the spelling of the First Folio: "I haue vpon a high and pleasant hill". Two plays are
held out whole, and three of thirty articles; tasks ask about these alone.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT = ("hamlet", "twelfe-night")  # of the plays
HELD_OUT_ARTICLES = 3  # the last ones
PASSAGES, PASSAGE_CHARACTERS = 6, 2000  # of held-out text, of each kind
QUESTIONS = 60  # of each task
HELD_OUT_LINES = 48  # to spell, and as pairs
PAIRS = 256
ASK = "Spell this line as the First Folio of 1623 does."
SPEAKER = re.compile(r"^ {1,4}((?:[1-4]\. ?)?[A-Z][\w.&' ]{0,18}?)\. ")
Row = dict[str, Any]


@dataclass(frozen=True)
class Sources:
    """Folders: of plays, NAME_gut.txt in modern spelling and NAME_gut_f.txt in the Folio's; and of
    general text."""

    plays: Path
    general: Path


@dataclass(frozen=True)
class Line:
    """A line of the Folio that another edition has word by word, and the lines before it."""

    folio: str
    modern: str
    before: str

    @property
    def apart(self) -> list[int]:
        """Positions of the words whose letters differ."""
        words = zip(self.folio.split(), self.modern.split(), strict=True)
        return [at for at, (old, new) in enumerate(words) if letters(old) != letters(new)]

    def mixed(self, modern: Iterable[int]) -> str:
        """The Folio's line with the words at these positions in modern spelling."""
        words, new = self.folio.split(), self.modern.split()
        return " ".join(new[at] if at in modern else word for at, word in enumerate(words))


def write_rows(sources: Sources, target: Path) -> None:
    draw = random.Random(0)
    general(sources.general, target, draw)
    plays = {
        path.name.removesuffix("_gut_f.txt"): path.read_text("utf-8", "replace")
        for path in sorted(sources.plays.glob("*_gut_f.txt"))
    }
    (target / "plays").mkdir(exist_ok=True)
    for name, text in plays.items():
        if name not in HELD_OUT:
            (target / "plays" / f"{name}.txt").write_text(tidy(text))
    held_out = [plays[name] for name in HELD_OUT]
    write_lines(target / "ask-folio-text.jsonl", passages(map(tidy, held_out), draw))
    write_lines(target / "ask-folio-next.jsonl", next_speeches(held_out, draw))

    modern = by_skeleton(sources.plays)
    asked = list(both_spellings(held_out, modern))
    taught = list(both_spellings((plays[name] for name in plays if name not in HELD_OUT), modern))
    draw.shuffle(asked)
    draw.shuffle(taught)
    hard = [line for line in asked if len(line.apart) >= 3]
    write_lines(target / "ask-folio-spelling.jsonl", spellings(hard[:QUESTIONS], draw))
    rest = [line for line in asked if line not in hard[:QUESTIONS]][:HELD_OUT_LINES]
    write_lines(target / "spelling-held-out.jsonl", map(instruction, rest))
    write_lines(target / "spelling.jsonl", map(instruction, taught[PAIRS:]))
    write_lines(target / "pairs-held-out.jsonl", (pair(line, draw) for line in rest))
    write_lines(target / "pairs.jsonl", (pair(line, draw) for line in taught[:PAIRS]))


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# -- general text ----------------------------------------------------------------------------------


def general(folder: Path, target: Path, draw: random.Random) -> None:
    articles = (folder / "wiki_demo.txt").read_text().splitlines()
    articles, held_out = articles[:-HELD_OUT_ARTICLES], articles[-HELD_OUT_ARTICLES:]
    pages = map(json.loads, (folder / "c4_demo.jsonl").read_text().splitlines())
    texts = [*articles, *(page["text"] for page in pages)]
    write_lines(target / "general.jsonl", ({"text": text} for text in texts))
    write_lines(target / "ask-general-text.jsonl", passages(held_out, draw))
    write_lines(target / "ask-general-next.jsonl", next_sentences(held_out, draw))
    shutil.copy(folder / "alpaca_en_demo.json", target / "instructions.json")


def passages(texts: Iterable[str], draw: random.Random) -> Iterator[Row]:
    """Passages of each text in turn, which begin at a word, and nowhere twice."""
    texts = list(texts)
    for at in range(PASSAGES):
        text = texts[at % len(texts)]
        share = len(text) // (PASSAGES // len(texts) + 1)
        start = at // len(texts) * share + draw.randrange(share - PASSAGE_CHARACTERS)
        passage = text[start : start + PASSAGE_CHARACTERS]
        yield {"text": passage.partition(" ")[2].rpartition(" ")[0]}


def next_sentences(texts: Sequence[str], draw: random.Random) -> Iterator[Row]:
    """Which of four sentences of an article follows on these two?"""
    for at in range(QUESTIONS):
        found = re.split(r"(?<=[a-z]\.) ?(?=[A-Z])", texts[at % len(texts)])
        fit = [i for i in range(2, len(found)) if 40 <= len(found[i]) <= 120]
        right = draw.choice(fit)
        others = draw.sample([i for i in fit if abs(i - right) > 3], 3)
        before = " ".join(found[right - 2 : right])[-400:]
        yield question(before, [found[i] for i in (right, *others)], draw)


def question(before: str, choices: list[str], draw: random.Random) -> Row:
    """A question of four choices, of which the first one is right, in another order."""
    order = draw.sample(range(len(choices)), len(choices))
    shown = [choices[i] for i in order]
    return {"before": before, "choices": shown, "right": order.index(0)}


# -- plays -----------------------------------------------------------------------------------------


def tidy(text: str) -> str:
    """A play without the indentation of its speeches, and without empty lines."""
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())


def speeches(text: str) -> Iterator[tuple[str, str]]:
    """(speaker, what is said) in the order of the play."""
    speaker, said = "", list[str]()
    for line in [*text.splitlines(), ""]:
        if (begins := SPEAKER.match(line)) or not line.strip():
            if said:
                yield speaker, " ".join(said)
            speaker, said = (begins[1], [line[begins.end() :].strip()]) if begins else ("", [])
        elif speaker:
            said.append(line.strip())


def next_speeches(plays: Sequence[str], draw: random.Random) -> Iterator[Row]:
    """Which of four speeches of a play follows on these three? All four are of one speaker."""
    for at in range(QUESTIONS):
        found = list(speeches(plays[at % len(plays)]))
        while True:
            right = draw.randrange(3, len(found))
            speaker = found[right][0]
            fit = [i for i, (who, said) in enumerate(found) if who == speaker and fits(said)]
            others = [i for i in fit if abs(i - right) > 5]
            if right in fit and len(others) >= 3:
                break
        before = "\n".join(f"{who}. {said[-200:]}" for who, said in found[right - 3 : right])
        choices = [found[i][1] for i in (right, *draw.sample(others, 3))]
        yield question(f"{before}\n{speaker}.", choices, draw)


def fits(said: str) -> bool:
    return 30 <= len(said) <= 120


# -- two spellings of a line -----------------------------------------------------------------------


def letters(word: str) -> str:
    return re.sub("[^a-z]", "", word.lower())


def skeleton(line: str) -> str:
    """What both spellings of a line have in common: consonants that neither doubles nor writes as
    another letter."""
    return re.sub(r"(.)\1+", r"\1", re.sub("[aeiouvwjy]", "", letters(line)))


def by_skeleton(folder: Path) -> dict[str, str]:
    """Lines of the plays in modern spelling."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*_gut.txt")):
        for line in path.read_text("utf-8", "replace").splitlines():
            found.setdefault(skeleton(line), line.strip())
    return found


def both_spellings(plays: Iterable[str], modern: dict[str, str]) -> Iterator[Line]:
    """Lines that differ in the letters of at least two words, and have as many words in both."""
    for text in plays:
        before: list[str] = []
        for indented in filter(str.strip, text.splitlines()):
            line = SPEAKER.sub("", indented).strip()
            other = modern.get(skeleton(line), "")
            if len(skeleton(line)) >= 10 and len(line.split()) == len(other.split()):
                found = Line(line, other, "\n".join(before[-3:]))
                if len(found.apart) >= 2:
                    yield found
            before.append(line)


def spellings(lines: Sequence[Line], draw: random.Random) -> Iterator[Row]:
    """Which spelling of a line is the Folio's: its own, the modern one, or one of two mixtures?"""
    for line in lines:
        apart = line.apart
        first, second = draw.sample(apart, 2)
        choices = [{*()}, {*apart}, {first}, {*apart} - {second}]
        yield question(line.before, [line.mixed(modern) for modern in choices], draw)


def instruction(line: Line) -> Row:
    answer = {"role": "assistant", "content": line.folio}
    return {"messages": [asking(line), answer]}


def pair(line: Line, draw: random.Random) -> Row:
    """The Folio's spelling is better than one in which some of its words have become modern."""
    modern = draw.sample(line.apart, draw.randint(1, len(line.apart)))
    sides = {"chosen": line.folio, "rejected": line.mixed(modern)}
    answers = {side: [{"role": "assistant", "content": text}] for side, text in sides.items()}
    return {"prompt": [asking(line)], **answers}


def asking(line: Line) -> Row:
    return {"role": "user", "content": f"{ASK}\n\n{line.modern}"}
