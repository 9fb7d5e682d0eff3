"""Prometheus' text format: what is written is read alike by Prometheus' own parser, and what is not of the format is refused by line."""

from __future__ import annotations

import math
import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from whet.observe.exposition import ExposedSample, Family, gauge, labelled, legal_name, merge, parse, render

HOSTILE = 'a "quoted"\\ back\\slash\nnew line, {braces} = é 中'


def theirs(text):
    """All samples as Prometheus' own parser reads them."""
    return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]


def ours(text):
    return [(s.name, dict(s.labels), s.value) for family in parse(text) for s in family.samples]


@pytest.fixture(scope="module")
def text():
    """A server's text, as prometheus_client writes it."""
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Tokens of\nprompts", ["model"], registry=registry).labels(HOSTILE).inc(7)
    Gauge("vllm:running", "Requests", registry=registry).set(3.5)
    Gauge("odd", "Not finite", ["sign"], registry=registry).labels("+").set(math.inf)
    times = Histogram("latency_seconds", "Seconds", ["route"], buckets=(0.1, 1.0), registry=registry)
    times.labels("/generate").observe(0.25)
    Summary("size_bytes", "Sizes", registry=registry).observe(12)
    return generate_latest(registry).decode()


def test_a_text_is_read_as_prometheus_own_parser_reads_it(text):
    assert ours(text) == theirs(text) and len(ours(text)) > 10
    kinds = {family.name: family.kind for family in parse(text)}
    assert kinds["latency_seconds"] == "histogram" and kinds["size_bytes"] == "summary" and kinds["vllm:prompt_tokens_total"] == "counter"
    (latency,) = [family for family in parse(text) if family.name == "latency_seconds"]
    assert {sample.name for sample in latency.samples} == {f"latency_seconds_{part}" for part in ("bucket", "sum", "count")}


def test_what_is_written_is_read_back(text):
    assert theirs(render(parse(text))) == theirs(text)
    again = render([Family("x", "gauge", (ExposedSample("x", (("a", HOSTILE),), math.nan, 1700000000000),), "help\\ of\nx")])
    (family,) = text_string_to_metric_families(again)
    (sample,) = family.samples
    assert sample.labels == {"a": HOSTILE} and math.isnan(sample.value) and family.documentation == "help\\ of\nx"
    (mine,) = parse(again)[0].samples
    assert mine.labels == (("a", HOSTILE),) and mine.timestamp_ms == 1700000000000 and parse(again)[0].help == "help\\ of\nx"


def test_texts_of_several_servers_are_one_family_of_each_name(text):
    merged = render(merge([*labelled(parse(text), "server", "one"), *labelled(parse(text), "server", "two")]))
    heads = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) == len(parse(text)), "the format has each name once"
    found = theirs(merged)
    assert [labels["server"] for name, labels, _ in found if name == "vllm:running"] == ["one", "two"]
    assert len(found) == 2 * len(theirs(text))
    names = [line.split("{")[0].split()[0] for line in merged.splitlines() if not line.startswith("#")]
    families = [re.sub("_(bucket|sum|count)$", "", name) for name in names]
    changes = [name for i, name in enumerate(families) if i == 0 or families[i - 1] != name]
    assert len(changes) == len(set(families)), "samples of a family stand together"


def test_a_label_that_has_the_name_is_kept_under_another():
    (family,) = labelled(parse('x{server="mine",other="y"} 1\n'), "server", "vllm 0")
    assert family.samples[0].labels == (("server", "vllm 0"), ("exported_server", "mine"), ("other", "y"))


def test_of_two_samples_or_kinds_of_one_name_the_first_stays():
    a, b = gauge("x", "", {(("l", "1"),): 1.0}), gauge("x", "", {(("l", "1"),): 2.0, (("l", "2"),): 3.0})
    counter = Family("x", "counter", (ExposedSample("x", (("l", "3"),), 4.0),))
    assert [(s.labels, s.value) for s in merge([a, b, counter])[0].samples] == [((("l", "1"),), 1.0), ((("l", "2"),), 3.0)]
    assert render([gauge("empty", "nothing", {})]) == ""


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "x",
        "x one",
        "x{a=1} 2",
        'x{a="1" b="2"} 3',
        'x{a="1",a="2"} 3',
        'x{a="1} 3',
        "9x 1",
        "x 1 2 3",
        "# TYPE x nonsense",
        "# TYPE x gauge\n# TYPE x gauge",
        "x " + "1" * 10 + '{a="',
    ],
)
def test_a_text_that_is_not_of_the_format_is_refused(line):
    with pytest.raises(ValueError, match=r"line \d is no|line \d has"):
        parse(f"{line}\n")


@pytest.mark.parametrize(
    ("name", "legal"), [("reward/total", "whet_reward_total"), ("eval/a-b/mean@4", "whet_eval_a_b_mean_4"), ("é", "whet__")]
)
def test_every_metric_has_a_legal_name(name, legal):
    assert legal_name(name) == legal
    assert theirs(f"{legal} 1\n") == [(legal, {}, 1.0)]
