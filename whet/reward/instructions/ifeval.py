"""The instructions of IFEval (Zhou et al., arXiv 2311.07911, table 6), each a function of the reply and the instruction's arguments.

A keyword is text, not a pattern: `C++` means those three characters.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from whet.reward.instructions.words import count_words, language, sentences, tokens

Relation = Literal["less than", "at least"]

_JSON_FENCES = ("```json", "```Json", "```JSON", "```")
_FIXED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_END_MARKS = frozenset(".,?!'\"")


def keywords_exist(reply: str, *, keywords: list[str]) -> bool:
    """Every keyword occurs, in any case, as part of a word too."""
    return all(keyword.lower() in reply.lower() for keyword in keywords)


def keyword_frequency(reply: str, *, keyword: str, frequency: int, relation: Relation) -> bool:
    """Number of occurrences of the keyword, in any case, as part of a word too."""
    return _holds(reply.lower().count(keyword.strip().lower()), frequency, relation)


def forbidden_words(reply: str, *, forbidden_words: list[str]) -> bool:
    """None of the words occurs as a whole word, in any case."""
    return not any(re.search(rf"\b{re.escape(word)}\b", reply, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(reply: str, *, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    """Number of occurrences of the letter, in any case."""
    return _holds(reply.lower().count(letter.strip().lower()), let_frequency, let_relation)


def response_language(reply: str, *, language: str) -> bool:
    """The reply is in the language with this ISO code; a reply in no recognisable language passes."""
    return _language_is(reply, language)


def number_sentences(reply: str, *, num_sentences: int, relation: Relation) -> bool:
    return _holds(len(sentences(reply)), num_sentences, relation)


def number_words(reply: str, *, num_words: int, relation: Relation) -> bool:
    return _holds(count_words(reply), num_words, relation)


def number_paragraphs(reply: str, *, num_paragraphs: int) -> bool:
    """Paragraphs parted by `***`; only the first and the last may be empty, and do not count then."""
    paragraphs = [paragraph.strip() for paragraph in reply.split("***")]
    if not all(paragraphs[1:-1]):
        return False
    return sum(bool(paragraph) for paragraph in paragraphs) == num_paragraphs


def nth_paragraph_first_word(reply: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """`num_paragraphs` paragraphs, separated by an empty line, and the n-th of them starts with the
    word."""
    paragraphs = reply.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if count != num_paragraphs or not 1 <= nth_paragraph <= count:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    if not words:
        return False
    word = words[0].lstrip("'").lstrip('"')
    end = next((place for place, mark in enumerate(word) if mark in _END_MARKS), len(word))
    return word[:end].lower() == first_word.lower()


def number_placeholders(reply: str, *, num_placeholders: int) -> bool:
    """At least `num_placeholders` `[placeholders]`, each on one line."""
    found = 0
    for line in reply.split("\n"):
        place = line.find("[")
        while place >= 0 and (end := line.find("]", place)) >= 0:
            found += 1
            place = line.find("[", end)
    return found >= num_placeholders


def postscript(reply: str, *, postscript_marker: str) -> bool:
    """The marker occurs, in any case; `P.S.` and `P.P.S` may have a space after their points."""
    marker = postscript_marker.strip()
    forms = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(forms.get(marker, re.escape(marker.lower())), reply.lower()) is not None


def number_bullet_lists(reply: str, *, num_bullets: int) -> bool:
    """Exactly `num_bullets` lines that start with `*` (not two of them) or with `-`."""
    lines = [line.lstrip() for line in reply.split("\n")]
    return sum(line.startswith("-") or (line.startswith("*") and len(line) > 1 and line[1] != "*") for line in lines) == num_bullets


def constrained_response(reply: str) -> bool:
    """It says that its answer is yes, no or maybe, in those words."""
    return any(answer in reply for answer in _FIXED_ANSWERS)


def number_highlighted_sections(reply: str, *, num_highlights: int) -> bool:
    """At least `num_highlights` `*highlights*` or `**highlights**`, each on one line and not empty."""
    single = re.findall(r"\*[^\n*]*\*", reply)
    double = re.findall(r"\*\*[^\n*]*\*\*", reply)
    return sum(bool(part.strip("*").strip()) for part in (*single, *double)) >= num_highlights


def multiple_sections(reply: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least `num_sections` sections, each headed by the word and a number."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d", reply)) >= num_sections


def json_format(reply: str) -> bool:
    """The whole is JSON, in a code fence or not."""
    text = reply.strip()
    for fence in _JSON_FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(reply: str) -> bool:
    """A `<<title>>` on one line that is not empty."""
    for line in reply.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(reply: str) -> bool:
    """Two different replies parted by `******`; only at the start and the end may a part be empty."""
    parts = [part.strip() for part in reply.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(reply: str, *, prompt_to_repeat: str) -> bool:
    """The request comes first, word for word, in any case."""
    return reply.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(reply: str, *, end_phrase: str) -> bool:
    """The phrase comes last, in any case; quotation marks around the reply do not count."""
    return reply.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(reply: str, *, capital_frequency: int, capital_relation: Relation) -> bool:
    """Number of words in capitals."""
    return _holds(sum(token.isupper() for token in tokens(reply)), capital_frequency, capital_relation)


def english_capital(reply: str) -> bool:
    """No lower-case letter, and English as far as the language can be detected."""
    return reply.isupper() and _language_is(reply, "en")


def english_lowercase(reply: str) -> bool:
    """No capital letter, and English as far as the language can be detected."""
    return reply.islower() and _language_is(reply, "en")


def no_comma(reply: str) -> bool:
    return "," not in reply


def quotation(reply: str) -> bool:
    """The whole reply is in double quotation marks."""
    text = reply.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


def _holds(number: int, bound: int, relation: Relation) -> bool:
    return number < bound if relation == "less than" else number >= bound


def _language_is(reply: str, code: str) -> bool:
    found = language(reply)
    return found is None or found == code.lower().partition("-")[0]
