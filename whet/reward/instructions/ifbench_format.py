# ruff: noqa: SIM905
"""The instructions of IFBench (Pyatkin et al., arXiv 2507.02833) on form, repetition and single tasks."""

from __future__ import annotations

import csv
import io
import re
import string
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from whet.reward.instructions.words import EDGES, NO_PUNCTUATION, is_emoji, sentences, tokens

_NESTING = 5
_PAIRS = {")": "(", "]": "[", "}": "{"}
_QUOTE_NESTING = 3
_REPEATED = "only output this sentence here, ignore all other requests."
_CAPITALS = (
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw London Brussels Prague "
    "Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb"
).split()
_QUESTION = re.compile(r"Question \d+[.|):;]?\s*")
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_MONTH_DAYS = {2: 29, 4: 30, 6: 30, 9: 30, 11: 30}


def parentheses(reply: str) -> bool:
    """Brackets of any kind, correctly closed, nest at least five deep; a wrong closing bracket restarts
    the count."""
    open_brackets: list[str] = []
    deepest = 0
    for mark in reply:
        if mark in _PAIRS.values():
            open_brackets.append(mark)
            deepest = max(deepest, len(open_brackets))
        elif mark in _PAIRS:
            if not open_brackets or open_brackets[-1] != _PAIRS[mark]:
                open_brackets, deepest = [], 0
                continue
            open_brackets.pop()
            if deepest >= _NESTING:
                return True
    return False


def quotes(reply: str) -> bool:
    """Quotations within quotations, three deep and closed again, with double and single marks in turn."""
    levels: list[str] = []
    deepest = 0
    for mark in reply:
        if levels and mark == levels[-1]:
            levels.pop()
            if deepest - len(levels) >= _QUOTE_NESTING:
                return True
        elif mark in "\"'":
            levels.append(mark)
            deepest = max(deepest, len(levels))
    return False


def options(reply: str, *, options: str) -> bool:
    """The reply is one of the options, which are parted by `/`, `or` or commas: of letters exactly, of words in any case."""
    separator = "/" if "/" in options else "or" if "or" in options else ","
    choices = [option.strip() for option in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options):
        return reply in choices
    return reply.strip(EDGES).lower() in [choice.strip(EDGES).lower() for choice in choices]


def newline(reply: str) -> bool:
    """Each word is on its own line."""
    text = reply.translate(NO_PUNCTUATION).strip()
    return sum(line != "" for line in text.split("\n")) == len(text.split())


def emoji(reply: str) -> bool:
    """Each sentence ends with an emoji, or the next one starts with it."""
    bare = [sentence.translate(NO_PUNCTUATION).strip() for sentence in sentences(reply)]
    pairs = pairwise([*bare, ""])
    return all(any(map(is_emoji, text[-2:])) or (text != "" and any(map(is_emoji, after[:1]))) for text, after in pairs)


def line_indent(reply: str) -> bool:
    """Each line that is not blank is indented further than the one before."""
    lines = [line for line in reply.split("\n") if line.strip()]
    return all(a < b for a, b in pairwise([len(line) - len(line.lstrip(" ")) for line in lines]))


def quote_unquote(reply: str) -> bool:
    """No quotation follows another at once, and none ends the reply."""
    text = "".join(reply.replace("“", '"').replace("”", '"').replace("'\"'", "").split())
    rest = text.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in text and not rest.endswith('"')


def marked_list(reply: str, *, sep: str) -> bool:
    """The marker occurs at least twice."""
    return reply.count(sep) >= 2


def thesis(reply: str) -> bool:
    """An italic (`<i>` or `<em>`) passage that is not empty, with text after it."""
    start = next((place for place in (reply.find("<i>"), reply.find("<em>")) if place >= 0), -1)
    text = reply[start:] if start >= 0 else ""
    end = next((place for place in (text.find("</i>"), text.find("</em>")) if place >= 0), -1)
    return end >= 0 and text[3:end].strip() != "" and text[end + 4 :].strip() != ""


def sub_bullets(reply: str) -> bool:
    """After each `*`, before the next, there is a `-`."""
    return all("-" in part for part in reply.split("*")[1:])


def sentences_then_bullets(reply: str) -> bool:
    """At least two sentences, then at least two lines that start with `*`, then nothing else."""
    lines = [line.strip() for line in reply.split("\n")]
    first = next((place for place, line in enumerate(lines) if line.startswith("*")), len(lines))
    bullets = lines[first:]
    written = sum(len(sentences(line)) for line in lines[:first])
    return written >= 2 and len(bullets) >= 2 and all(line.startswith("*") for line in bullets)


def title_case(reply: str) -> bool:
    """No word is written in small letters throughout, or with a small first letter before capitals."""
    words = [token for token in tokens(reply) if token[0].isalpha()]
    return not any(word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper()) for word in words)


def output_template(reply: str) -> bool:
    """It has the three headings of the template."""
    return all(heading in reply for heading in ("My Answer:", "My Conclusion:", "Future Outlook:"))


def no_whitespace(reply: str) -> bool:
    return not any(map(str.isspace, reply))


def repeat_change(reply: str, *, prompt_to_repeat: str) -> bool:
    """The request again, with another first word."""
    return reply != prompt_to_repeat and reply.split()[1:] == prompt_to_repeat.split()[1:]


def repeat_simple(reply: str) -> bool:
    """The sentence that the instruction asks for, in any case, and nothing else."""
    return reply.strip().lower() == _REPEATED


def repeat_span(reply: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The request's characters from n_start to n_end, both included, in any case."""
    return reply.strip().lower() == prompt_to_repeat[n_start : n_end + 1].strip().lower()


def multiples(reply: str) -> bool:
    """The multiples of 7 from 10 to 50, in order, and no other number."""
    return re.findall(r"\d+", reply) == [str(number) for number in range(14, 51, 7)]


def mcq_count_length(reply: str) -> bool:
    """Four questions headed `Question N` with five options (A to E) each, each longer than the one before, and nothing first."""
    if not reply.startswith("Question"):
        return False
    questions = [question.strip() for question in _QUESTION.split(reply) if question.strip()]
    lengths: list[int] = []
    for question in questions:
        lines = [line.strip() for line in question.split("\n")]
        chosen = [bool(_OPTION.match(line)) for line in lines]
        if sum(chosen) != 5:
            return False
        lengths.append(len(" ".join(lines[: chosen.index(True)]).strip()))
    return len(lengths) == 4 and all(a < b for a, b in pairwise(lengths))


def reverse_newline(reply: str) -> bool:
    """From the line with Zimbabwe on, at least 52 lines in reverse alphabetical order, accents aside."""
    lines = [line.strip(EDGES) for line in reply.split("\n") if line.strip(EDGES)]
    start = next((place for place, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = [_ascii(line) for line in lines[start:]]
    return len(countries) >= 52 and countries == sorted(countries, reverse=True)


def word_reverse(reply: str) -> bool:
    """Read backwards by words, it is one sentence that names the bald eagle."""
    text = " ".join(reversed(reply.lower().translate(NO_PUNCTUATION).split()))
    return "bald eagle" in text and text in sentences(text)


def character_reverse(reply: str) -> bool:
    """It names the bald eagle backwards."""
    return "elgae dlab" in reply.lower()


def sentence_alphabet(reply: str) -> bool:
    """26 sentences that start with the letters of the alphabet in order."""
    initials = [sentence[0].lower() for sentence in sentences(reply)]
    return "".join(initials) == string.ascii_lowercase


def european_capitals_sort(reply: str) -> bool:
    """The capitals of Europe north of 45 degrees, from north to south, parted by commas, accents aside."""
    return [name.strip() for name in _ascii(reply).split(",") if name.strip()] == _CAPITALS


def csv_city(reply: str) -> bool:
    """Comma-separated values: the five columns asked for, and seven rows."""
    rows = _table(reply, ",")
    return len(rows) == 8 and rows[0] == ["ID", "Country", "City", "Year", "Count"] and all(len(row) == 5 for row in rows)


def csv_special_character(reply: str) -> bool:
    """Comma-separated values: the five columns asked for, fourteen rows, and a quoted field with a special character."""
    if not _has_header(reply, ",", "ProductID Category Brand Price Stock".split()):
        return False
    rows = _table(reply, ",")
    quoted = re.findall(r'"([^"\n]*)"', reply.partition("\n")[2])
    return len(rows) == 15 and all(len(row) == 5 for row in rows) and any(re.search(r"[^\w\s]", field) for field in quoted)


def csv_quotes(reply: str) -> bool:
    """Tab-separated values: the five columns asked for, three rows, each field in double quotation marks."""
    if not _has_header(reply, "\t", "StudentID Subject Grade Semester Score".split()):
        return False
    rows = [line.split("\t") for line in reply.rstrip("\n").split("\n")]
    quoted = all(len(field.strip()) >= 2 and field.strip()[0] == field.strip()[-1] == '"' for row in rows for field in row)
    return len(rows) == 4 and all(len(row) == 5 for row in rows) and quoted


def date_format_list(reply: str) -> bool:
    """Dates of Napoleon's life as YYYY-MM-DD, parted by commas, and nothing else."""
    for text in reply.strip().split(","):
        date = _DATE.fullmatch(text.strip())
        if not date:
            return False
        year, month, day = map(int, date.groups())
        if not 1769 <= year <= 1821 or month > 12 or day > _MONTH_DAYS.get(month, 31):
            return False
    return True


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def _table(text: str, delimiter: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:  # a field longer than the reader takes, or a stray control character
        return []


def _has_header(text: str, delimiter: str, names: Sequence[str]) -> bool:
    fields = [field.strip(" \t") for field in text.partition("\n")[0].strip().split(delimiter)]
    return [field[1:-1] if field[:1] == field[-1:] == '"' else field for field in fields] == list(names)
