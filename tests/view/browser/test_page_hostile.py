"""Texts that mean harm are shown as text, with what would hide or move letters as a visible escape."""

from __future__ import annotations

import json
import shutil
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest

from tests.view.served import serving

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m",
    "abc\u202edcba\u202c",
    "zero\u200bwidth",
    "tag\U000e0041",
    "a" * 1_000_000,
]


LONG = "w" * 4000
RUN = "run<b>\u202e"
TRAJECTORY = "<script>alert(2)</script>\u202e\x1b[31m"


@pytest.fixture(scope="module")
def hostile(lessons, tmp_path_factory):
    """The poem's run, its texts and tokens replaced."""
    run = tmp_path_factory.mktemp("hostile") / RUN
    shutil.copytree(lessons / "poem", run)
    tokenizer = json.loads((run / "model/tokenizer.json").read_text())
    table = pq.read_table(run / "rollouts/rollout_000000.parquet")
    rows = table.to_pylist(maps_as_pydicts="strict")
    vocabulary = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    sampled = [i for i, origin in enumerate(rows[0]["origin"]) if origin == 1]
    for place, text in zip(sampled, HOSTILE, strict=False):
        token = len(vocabulary)
        vocabulary[token] = text
        rows[0]["tokens"][place] = token
    tokenizer["model"]["vocab"] = {text: token for token, text in vocabulary.items()}
    (run / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    rows[0]["turns"][0] |= {"content": "\n".join(HOSTILE), "reasoning_content": HOSTILE[1], "tool_calls": HOSTILE[0]}
    rows[0]["turns"][0]["finish"] = HOSTILE[2]
    rows[0]["prompt"][0]["content"] = HOSTILE[1]
    rows[0] |= {"trajectory": TRAJECTORY, "task_id": HOSTILE[3], "outcome": HOSTILE[4], "label": HOSTILE[0], "dropped": HOSTILE[5]}
    rows[0]["timings"] = {HOSTILE[3]: 1.0, "constructor": 2.0}
    rows[0]["token_rewards"] = [float("inf")] * len(rows[0]["tokens"])
    rows[0]["reward_detail"] = rows[0]["stop"] = HOSTILE[0]
    rows[0]["reward_components"] = {HOSTILE[1]: 1.0, **{f"{i}{LONG}"[:3000]: float(i) for i in range(500)}}
    rows[0]["notes"] = [{"turn": 0, "tool": HOSTILE[0] + LONG, "metrics": {}, "attachments": None}]
    calls = [{"function": {"name": HOSTILE[1] + HOSTILE[3] + LONG, "arguments": {"a": HOSTILE[2]}}}]
    rows[1] |= {"outcome": LONG, "dropped": LONG, "stop": LONG, "reward_detail": LONG * 30, "reward": float("nan"), "label": LONG}
    rows[1]["turns"][0]["tool_calls"] = json.dumps(calls)
    rows[1]["advantages"] = [(float("nan"), float("inf"), 3e38, None)[i % 4] for i in range(len(rows[1]["tokens"]))]
    rows[1]["reward_components"] = {"nan": float("nan"), "inf": float("inf"), "large": 1.7e308}
    rows[0]["error"] = {"kind": HOSTILE[0], "message": HOSTILE[1], "where": HOSTILE[2], "traceback": HOSTILE[3]}
    with pq.ParquetWriter(run / "rollouts/rollout_000000.parquet", table.schema) as writer:
        writer.write_table(table.from_pylist(rows, schema=table.schema))
    shutil.rmtree(run / "rollouts/index")
    failure = {"kind": HOSTILE[0], "message": HOSTILE[2], "where": "x", "traceback": HOSTILE[1]}
    other = {"kind": "\udcff" + LONG, "message": "\ud800" + LONG, "where": LONG, "traceback": HOSTILE[3] + HOSTILE[6]}
    (run / "failures.jsonl").write_text(json.dumps(failure) + "\n" + json.dumps(other) + "\n")
    odd = {HOSTILE[1]: 1.0, HOSTILE[3]: 1.0, f"reward/{HOSTILE[0]}": 1.0, f"reward/{HOSTILE[3]}": 2.0}
    odd |= {"__proto__": 1.0, "constructor": 1e308}
    odd |= {"\udcff": 1.0, LONG: 1.0, **{f"reward/part{i}": 1.0 for i in range(300)}, **{f"time/phase{i}_s": 0.01 for i in range(100)}}
    odd |= {"time/step_s": 1.0, f"time/{HOSTILE[3]}_s": 0.5, "time/rollout_s": float("inf")}
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/total": 1.0, **odd}) + "\n")
    with serving(run) as served:
        yield served, sampled


ADDRESS = "#/trajectory?" + urlencode({"run": RUN, "rollout": 0, "trajectory": TRAJECTORY})


def harmless(page) -> None:
    assert page.locator("main img, main script, main iframe, main [onerror]").count() == 0
    hidden = "[...document.querySelectorAll('option, [title]')].map((each) => each.textContent + each.title).join()"
    text = page.locator("body").inner_text() + page.evaluate(hidden)
    assert not set(text) & set("\x1b\u202e\u202c\u200b\U000e0041")
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "a long word makes no page wider"
    assert page.evaluate("document.documentElement.scrollHeight") < 12_000, "nor many parts a page endless"


def test_a_trajectory_of_hostile_texts(open_page, hostile):
    served, sampled = hostile
    page = open_page(served.address + ADDRESS)
    page.wait_for_selector(".strip .token")
    harmless(page)
    text = page.locator("article").inner_text()
    for shown in ("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\\x1b", "\\u202e", "\\u200b", "\\u{e0041}"):
        assert shown in text, shown
    for place in sampled[: len(HOSTILE)]:
        page.locator(f".strip [data-token='{place}']").click()
        harmless(page)
    assert "more letters" in page.locator(".token-name").inner_text(), "a megabyte in one token"
    assert len(page.locator(".strip").inner_text()) < 5000


def test_lists_of_hostile_texts(open_page, hostile):
    served, _ = hostile
    run = urlencode({"run": RUN})
    views = {f"#/groups?{run}": ".group", "#/runs": ".error", f"#/groups?{run}&text=alert": ".list mark"}
    views |= {f"#/groups?{run}&rollout=all": ".list a"}
    views |= {f"#/compare?{run}": ".bar", "#/compare" + ADDRESS.removeprefix("#/trajectory"): ".note", "#/constructor": "h1"}
    for address, wanted in views.items():
        for width in (1300, 390):
            page = open_page(served.address + address, locale="zh-CN", viewport={"width": width, "height": 900})
            page.wait_for_selector(wanted)
            harmless(page)
            page.context.close()


def test_a_trajectory_of_long_words_and_numbers_without_end(open_page, hostile):
    served, sampled = hostile
    given = {"run": RUN, "rollout": 0, "trajectory": "lesson/0#0/1"}
    for more in ({"token": sampled[0]}, {"view": "steps"}):
        page = open_page(f"{served.address}#/trajectory?{urlencode({**given, **more})}")
        page.wait_for_selector(".strip .token, tr[data-step]")
        harmless(page)
        assert "<img src=x onerror=alert(1)>abc\\u202edcba" in page.locator(".conversation").inner_text()
        page.context.close()


@pytest.mark.parametrize("name", ["advantages", "old_logprobs", "values", "origin", "first_entropy", "first_weights", "logprobs"])
def test_records_without_a_column(open_page, lessons, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(lessons / "research", run)
    path = run / "rollouts/rollout_000000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns([name]), path)
    (run / "rollouts/index/rollout_000000.parquet").unlink()
    given = {"run": "run", "rollout": 0, "trajectory": "lesson/0#0/0"}
    with serving(run) as served:
        page = open_page(f"{served.address}#/trajectory?" + urlencode({**given, "token": 178}))
        page.wait_for_selector(".token-panel")
        page.keyboard.press("s")
        page.wait_for_selector("tr[data-step]")


def test_an_export_of_hostile_texts(open_page, hostile, tmp_path):
    served, _ = hostile
    file = tmp_path / "exported.html"
    file.write_bytes(served.get("export", run=RUN, rollout=0, trajectory=TRAJECTORY).body)
    page = open_page(file.as_uri())
    page.wait_for_selector(".strip .token")
    harmless(page)
