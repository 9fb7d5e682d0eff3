# ruff: noqa: SIM905
"""The instructions of IFBench (Pyatkin et al., arXiv 2507.02833) on counts, ratios, words and sentences."""

from __future__ import annotations

import re
import string
from collections import Counter
from itertools import pairwise

from whet.reward.instructions.words import EDGES, NO_PUNCTUATION, count_words, sentences, tokens

_CONJUNCTIONS = frozenset("and but for nor or so yet".split())
_NAMES = (
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper Leo Zoe Daniel "
    "Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah "
    "Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan"
).split()
_PRONOUNS = frozenset(
    "i me we us you he him she her it they them my mine our ours your yours his hers its their theirs myself ourselves yourself yourselves "
    "himself herself itself themselves this that these those who whom whose which what whoever whomever whatever whichever anybody anyone "
    "anything everybody everyone everything nobody nothing somebody someone something each either neither both all some any none".split()
)
_STOP_WORDS = frozenset(
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it its itself "
    "they them their theirs themselves what which who whom this that these those am is are was were be been being have has had having "
    "do does did did doing a an the and but if or because as until while of at by for with about against between into through during "
    "before after above below to from up down in out on off over under again further then once here there when where why how all any "
    "both each few more most other some such no nor not only own same so than too very s t can will just don should now d ll m o re "
    "ve y ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn".split()
)
_CONSONANTS, _VOWELS = frozenset("bcdfghjklmnpqrstvwxyz"), frozenset("aeiou")
_PRIMES = frozenset(n for n in range(2, 100) if all(n % k for k in range(2, n)))
_JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
_MULTIPLE_COUNTS = (1, 2, 3, 5, 7)


def word_count_range(reply: str, *, min_words: int, max_words: int) -> bool:
    return min_words <= count_words(reply) <= max_words


def unique_word_count(reply: str, *, N: int) -> bool:
    """At least N different words, without punctuation at their edges, in any case."""
    return len({word.strip(EDGES) for word in reply.lower().split()}) >= N


def stop_words(reply: str, *, percentage: float) -> bool:
    """At most `percentage` per cent of the words are English stop words."""
    words = re.findall(r"\w+", reply.lower())
    return bool(words) and 100 * sum(word in _STOP_WORDS for word in words) / len(words) <= percentage


def sentence_type(reply: str) -> bool:
    """Two sentences that end with a full stop for each that ends with a question mark."""
    ends = Counter(sentence[-1] for sentence in sentences(reply))
    return ends["."] == 2 * ends["?"]


def sentence_balance(reply: str) -> bool:
    """As many sentences end with a full stop as with a question mark as with an exclamation mark."""
    ends = Counter(sentence[-1] for sentence in sentences(reply))
    return ends["."] == ends["?"] == ends["!"]


def conjunctions(reply: str, *, small_n: int) -> bool:
    """At least `small_n` different spellings of coordinating conjunctions."""
    return len({word for word in reply.split() if word.strip(EDGES).lower() in _CONJUNCTIONS}) >= small_n


def person_names(reply: str, *, N: int) -> bool:
    """At least N different names of the instruction's list."""
    return len(set(_NAMES) & set(re.findall(r"\w+", reply))) >= N


def overlap(reply: str, *, reference_text: str, percentage: float) -> bool:
    """`percentage` per cent (2 more or less) of the reply's different runs of three characters are in
    the reference."""
    mine, reference = ({text[i : i + 3] for i in range(len(text) - 2)} for text in (reply, reference_text))
    return bool(mine) and abs(100 * len(mine & reference) / len(mine) - percentage) <= 2


def numbers(reply: str, *, N: int) -> bool:
    """Exactly N runs of digits, after all punctuation is removed."""
    return len(re.findall(r"\d+", reply.translate(NO_PUNCTUATION))) == N


def alphabet(reply: str) -> bool:
    """Each word starts with the next letter of the alphabet; after Z comes A."""
    words = reply.translate(NO_PUNCTUATION).lower().split()
    if not words or words[0][0] not in string.ascii_lowercase:
        return False
    first = string.ascii_lowercase.index(words[0][0])
    return all(word[0] == string.ascii_lowercase[(first + place) % 26] for place, word in enumerate(words))


def vowel(reply: str) -> bool:
    """One paragraph with at most three different vowels."""
    return "\n" not in reply.strip() and len(_VOWELS & set(reply.lower())) <= 3


def consonants(reply: str) -> bool:
    """Each word has two consonants side by side."""
    return all(any(a in _CONSONANTS and b in _CONSONANTS for a, b in pairwise(word)) for word in reply.lower().split())


def alliteration_increment(reply: str) -> bool:
    """Each sentence has more words in alliterating runs than the one before."""
    before = -1
    for sentence in sentences(reply):
        initials = [word.lstrip(EDGES)[0] for word in sentence.lower().split() if word.lstrip(EDGES)]
        alike = [a == b for a, b in pairwise(initials)]
        count = sum(1 if place and alike[place - 1] else 2 for place, same in enumerate(alike) if same)
        if count <= before:
            return False
        before = count
    return True


def palindrome(reply: str) -> bool:
    """At least ten palindromes of one word and five letters or more."""
    words = reply.translate(NO_PUNCTUATION).lower().split()
    return sum(len(word) >= 5 and word == word[::-1] for word in words) >= 10


def punctuation(reply: str) -> bool:
    """Each of . , ! ? ; : occurs, and besides them an interrobang (`?!`, `!?` or the sign)."""
    if not any(mark in reply for mark in ("!?", "?!", "‽")):
        return False
    rest = reply.replace("?!", "", 1)
    rest = reply.replace("!?", "", 1) if rest == reply else rest
    return set(".,!?;:") <= set(rest)


def prime_lengths(reply: str) -> bool:
    """Each word's length is prime."""
    return all(len(word) in _PRIMES for word in reply.translate(NO_PUNCTUATION).split())


def words_japanese(reply: str, *, N: int) -> bool:
    """Every n-th word has a Japanese character; numbers and bare punctuation pass."""
    chosen = [word.strip(EDGES) for word in reply.split()[N - 1 :: N]] if N > 0 else []
    return all(not word or word.isdigit() or _JAPANESE.search(word) for word in chosen)


def repeats(reply: str, *, small_n: int) -> bool:
    """No word occurs more often than that."""
    return max(Counter(reply.lower().translate(NO_PUNCTUATION).split()).values(), default=0) <= small_n


def sentence_keyword(reply: str, *, word: str, N: int) -> bool:
    """The n-th sentence has the word as a whole word, in any case."""
    found = sentences(reply)
    return 1 <= N <= len(found) and re.search(rf"\b{re.escape(word)}\b", found[N - 1], re.IGNORECASE) is not None


def pronouns(reply: str, *, N: int) -> bool:
    return sum(token in _PRONOUNS for token in tokens(reply.replace("/", " ").lower())) >= N


def last_first(reply: str) -> bool:
    """Each sentence starts with the last word of the one before, in any case."""
    for one, other in pairwise(sentences(reply)):
        last, first = one.rstrip(EDGES).split(), other.lstrip(EDGES).split()
        if not last or not first or last[-1].lower() != first[0].lower():
            return False
    return True


def paragraph_last_first(reply: str) -> bool:
    """Each line ends with the word that it starts with, in any case."""
    lines = [line.strip().lower().strip(EDGES).split() for line in reply.split("\n")]
    return all(line[0] == line[-1] for line in lines if line)


def sentence_increment(reply: str, *, small_n: int) -> bool:
    """Each sentence has exactly `small_n` words more than the one before."""
    counts = [len(sentence.translate(NO_PUNCTUATION).split()) for sentence in sentences(reply)]
    return all(after == before + small_n for before, after in pairwise(counts))


def no_consecutive(reply: str) -> bool:
    """No two neighbouring words start with the same letter."""
    return all(a[0] != b[0] for a, b in pairwise(reply.lower().translate(NO_PUNCTUATION).split()))


def sentence_words(reply: str) -> bool:
    """Three sentences with the same number of characters."""
    lengths = [len(sentence) for sentence in sentences(reply)]
    return len(lengths) == 3 and len(set(lengths)) == 1


def keywords_multiple(reply: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str) -> bool:
    """The five keywords occur 1, 2, 3, 5 and 7 times, in any case, as part of a word too."""
    keywords = (keyword1, keyword2, keyword3, keyword4, keyword5)
    return all(reply.lower().count(word.strip().lower()) == n for word, n in zip(keywords, _MULTIPLE_COUNTS, strict=True))


def keywords_specific_position(reply: str, *, keyword: str, n: int, m: int) -> bool:
    """The m-th word of the n-th sentence is the keyword, in any case."""
    found = sentences(reply)
    if not 1 <= n <= len(found):
        return False
    words = [token for token in tokens(found[n - 1]) if any(map(str.isalnum, token))]
    return 1 <= m <= len(words) and words[m - 1].lower() == keyword.strip().lower()


def words_position(reply: str, *, keyword: str) -> bool:
    """The second word and the second to last are the keyword, in any case; a mark at the end does not count."""
    found = [token.lower() for token in tokens(reply)]
    found = found[:-1] if found and found[-1] in string.punctuation else found
    return len(found) >= 2 and found[1] == found[-2] == keyword.strip().lower()
