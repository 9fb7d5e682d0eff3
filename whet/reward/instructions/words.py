# ruff: noqa: SIM905, RUF001
"""Words, sentences and languages of a text, as the instruction checkers count them. Every function takes time linear in the text."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
EDGES = string.punctuation + " "

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+(?:[-.,:/'’]\w+)*|[^\w\s]")
_CONTRACTION = re.compile(r"(?P<word>.+?)(?P<rest>n't|'(?:s|re|ve|ll|d|m))", re.IGNORECASE)
_ENDS = ".!?…。！？"
_CLOSING = "\"')]}”’»*_"
_ABBREVIATIONS = frozenset(
    "dr mr mrs ms prof sr jr st vs etc inc ltd co corp dept est approx cf al gen col lt sgt rev hon messrs mt ave blvd "
    "jan feb mar apr jun jul aug sep sept oct nov dec e.g i.e u.s u.k a.m p.m ph.d b.c a.d".split()
)
_BEFORE_NUMBERS = frozenset("no nos fig eq vol pp p ch sec".split())
_SCRIPTS = {
    "HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "CJK": "zh", "THAI": "th", "HEBREW": "he", "GREEK": "el", "BENGALI": "bn",
    "TAMIL": "ta", "TELUGU": "te", "KANNADA": "kn", "MALAYALAM": "ml", "GUJARATI": "gu", "GURMUKHI": "pa", "DEVANAGARI": "hi",
    "ARABIC": "ar", "CYRILLIC": "ru", "LATIN": "en", "ARMENIAN": "hy", "GEORGIAN": "ka",
}  # fmt: skip
_COMMON = {
    "en": "the of and to in is that it for was on are with as be at by this have from or an not but you they we what can his her",
    "de": "der die und das ist nicht ein eine zu den mit von auf für sich auch es dem des sie ich wir wird sind im",
    "fr": "le la les et des est une un que qui dans pour pas sur plus avec ce il elle nous vous du au sont en je",
    "es": "el la los las y que de en un una es por con para no se lo como más pero su al del está yo",
    "it": "il lo la gli le e che di un una è per con non si come più ma del della sono anche questo nel",
    "pt": "o a os as e que de em um uma é por com para não se como mais mas seu ao do da está eu são no na",
    "fi": "ja on ei se että hän oli ovat joka mutta kun niin tai myös kuin minä olen tämä sen ole",
    "pl": "i w nie na się że to jest z do jak ale o co po tak za od czy dla są przez być ten",
    "vi": "và là của có không được cho một trong với những các người này đã để khi từ cũng như",
    "sw": "na ya wa ni kwa katika za la kuwa yake hii cha watu huo kama lakini sana mtu vya hiyo",
}
_CYRILLIC = {"uk": "іїєґ", "bg": "ъщ", "ru": "ыэё"}
_DEVANAGARI = {
    "mr": "आहे आणि नाही हे ते या च्या होते मी तो ही".split(),
    "ne": "छ र हो को मा लाई पनि गर्न भएको छन् यो".split(),
    "hi": "है और का की के में को से यह हैं नहीं".split(),
}
_PERSIAN, _URDU = "پچژگ", "ٹڈڑےں"


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores."""
    return len(_WORD.findall(text))


def tokens(text: str) -> list[str]:
    """Words and marks: a mark is an item of its own, contractions are parted (`do`, `n't`), hyphenated words are not."""
    found: list[str] = []
    for token in _TOKEN.findall(text):
        match = _CONTRACTION.fullmatch(token.replace("’", "'"))
        found += [match["word"], match["rest"]] if match else [token]
    return found


def sentences(text: str) -> list[str]:
    """Sentences with their closing marks: they end at . ! ? before white space or the end, but not after an abbreviation or an initial."""
    found: list[str] = []
    current: list[str] = []
    words = text.split()
    for place, word in enumerate(words):
        current.append(word)
        following = words[place + 1] if place + 1 < len(words) else ""
        if _ends_sentence(word, following):
            found.append(" ".join(current))
            current = []
    return [*found, " ".join(current)] if current else found


def language(text: str) -> str | None:
    """The ISO 639-1 code of the language that a text is most likely in; None where nothing tells.

    By script where a script tells, else by letters and by the most frequent short words of the language.
    """
    counts: dict[str, int] = {}
    for character in text:
        if character.isalpha():
            script = unicodedata.name(character, "").partition(" ")[0]
            counts[_SCRIPTS.get(script, "")] = counts.get(_SCRIPTS.get(script, ""), 0) + 1
    if not counts:
        return None
    found = "ja" if counts.get("ja", 0) * 10 > sum(counts.values()) else max(counts, key=lambda code: counts[code])
    words = [word.strip(EDGES) for word in text.lower().split()]
    if found == "en":
        return _by_words(words, {code: common.split() for code, common in _COMMON.items()})
    if found == "hi":
        return _by_words(words, _DEVANAGARI) or "hi"
    if found == "ru":
        return next((code for code in ("uk", "ru") if any(letter in _CYRILLIC[code] for letter in text.lower())), _bulgarian(text))
    if found == "ar":
        return "ur" if any(letter in _URDU for letter in text) else "fa" if any(letter in _PERSIAN for letter in text) else "ar"
    return found or None


def is_emoji(character: str) -> bool:
    """True if a character is shown as a picture, by Unicode's blocks of emoji."""
    code = ord(character)
    blocks = ((0x1F300, 0x1FAFF), (0x2600, 0x27BF), (0x1F1E6, 0x1F1FF), (0x2B05, 0x2B55), (0x1F000, 0x1F2FF))
    return any(first <= code <= last for first, last in blocks) or code in (0x203C, 0x2049, 0x2139, 0x231A, 0x231B, 0x23E9, 0x23F0, 0x3030)


def _ends_sentence(word: str, following: str) -> bool:
    bare = word.rstrip(_CLOSING)
    if not bare or bare[-1] not in _ENDS:
        return False
    if bare[-1] != "." or bare.endswith("..") or not following:
        return True
    stem = bare.rstrip(".").lstrip("(\"'“‘[")
    if stem.lower() in _ABBREVIATIONS or (len(stem) == 1 and stem.isupper() and stem != "I"):
        return False
    return not following[0].islower() and not (stem.lower() in _BEFORE_NUMBERS and following[0].isdigit())


def _by_words(words: Sequence[str], common: Mapping[str, Sequence[str]]) -> str | None:
    hits = {code: sum(word in known for word in words) for code, known in ((code, set(known)) for code, known in common.items())}
    best = max(hits, key=lambda code: hits[code])
    return best if hits[best] else None


def _bulgarian(text: str) -> str:
    return "bg" if any(letter in _CYRILLIC["bg"] for letter in text.lower()) else "ru"
