"""The tool that the model may call: a search in corpus.jsonl, ranked by BM25 (Robertson and Zaragoza, 2009)."""

import json
import math
import re
from collections import Counter
from pathlib import Path

PASSAGES = [json.loads(line) for line in Path(__file__).with_name("corpus.jsonl").read_text().splitlines()]
K, B = 1.2, 0.75


def words(text: str) -> list[str]:
    """Lower-case words of a text."""
    return re.findall(r"\w+", text.lower())


COUNTS = [Counter(words(f"{passage['title']} {passage['text']}")) for passage in PASSAGES]
MEAN = sum(count.total() for count in COUNTS) / len(COUNTS)
HAVING = Counter(word for count in COUNTS for word in count)


def bm25(query: str, count: Counter[str]) -> float:
    """Score of a passage whose words are counted."""
    length = K * (1 - B + B * count.total() / MEAN)
    rare = {word: math.log(1 + (len(COUNTS) - HAVING[word] + 0.5) / (HAVING[word] + 0.5)) for word in words(query)}
    return sum(idf * count[word] * (K + 1) / (count[word] + length) for word, idf in rare.items())


def search(query: str) -> str:
    """Find the passage that fits best.

    Args:
        query: words to look for.
    """
    scores = [bm25(query, count) for count in COUNTS]
    best = max(range(len(scores)), key=scores.__getitem__)
    return PASSAGES[best]["text"] if scores[best] > 0 else "Nothing was found."
