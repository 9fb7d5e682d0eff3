"""Every view of the page over a quickstart: click paths, filters, addresses, keys, both languages, phone, export."""

from __future__ import annotations

import json
import shutil
from urllib.parse import urlencode

import pytest

from tests.view.browser.until import until
from tests.view.served import serving
from whet.observe.records import read_index, read_records

RL = "quickstart/rl"


@pytest.fixture
def rows(quickstart):
    return read_records(quickstart / "rl/rollouts")


def of_trajectory(row, **more) -> str:
    return "#/trajectory?" + urlencode({"run": RL, "rollout": row["rollout_id"], "trajectory": row["trajectory"], **more})


def test_runs_have_curves_of_all_metrics(open_page, started, quickstart):
    page = open_page(started.address + "#/runs")
    page.wait_for_selector(".chart canvas")
    names = set(json.loads((quickstart / "rl/metrics.jsonl").read_text().splitlines()[0])) - {"step", "time"}
    shown = set(page.locator(".chart").evaluate_all("cards => cards.map(card => card.dataset.metric)"))
    assert names <= shown
    page.fill("input[type=search]", "reward/")
    assert all("reward/" in name for name in page.locator(".chart").evaluate_all("cards => cards.map(card => card.dataset.metric)"))
    assert "metric=reward" in page.url
    assert page.locator(".timeline svg rect").count() > 0
    causes = {text.rsplit(" ", 2)[0] for text in page.locator(".waits .swatch").all_inner_texts()}
    assert {"engine: decoding", "tools and environment", "reward"} <= causes
    page.locator("input[type=range]").fill("0.9")
    until(page, "location.hash.includes('smooth=0.9')")
    assert "metric=reward" in page.url, "one choice in the address leaves the other"


def test_runs_go_on_while_the_page_is_open(open_page, tmp_path):
    file = tmp_path / "run/metrics.jsonl"
    file.parent.mkdir()
    file.write_text('{"step": 1, "reward/total": 0.25}\n')
    with serving(tmp_path / "run") as served:
        page = open_page(served.address)
        page.wait_for_selector(".chart .last b")
        assert page.locator(".chart .last").first.inner_text() == "0.25"
        with open(file, "a") as more:
            more.write('{"step": 2, "reward/total": 0.75}\n')
        until(page, "document.querySelector('.chart .last').textContent === '0.75'")


def test_runs_that_begin_end_and_fail_are_seen_while_the_page_is_open(open_page, lessons, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/starts.jsonl").write_text('{"pid": 1}\n')
    with serving(tmp_path) as served:
        page = open_page(served.address)
        page.wait_for_selector(".run")
        assert "no metrics" in page.locator("main").inner_text()
        (tmp_path / "one/metrics.jsonl").write_text('{"step": 1, "reward/total": 0.25}\n')
        page.wait_for_selector("[data-metric='reward/total'] canvas")
        (tmp_path / "two").mkdir()
        (tmp_path / "two/metrics.jsonl").write_text('{"step": 1, "reward/total": 0.5}\n')
        (tmp_path / "one/end.json").write_text('{"status": "failed"}')
        failure = {"kind": "OSError", "message": "the disk is full", "where": "rollout", "traceback": "Traceback of it"}
        (tmp_path / "one/failures.jsonl").write_text(json.dumps(failure) + "\n")
        until(page, "document.querySelectorAll('.run').length === 2")
        until(page, "document.querySelector('.run').textContent.includes('failed')")
        page.locator(".error summary", has_text="the disk is full").click()
        assert "Traceback of it" in page.locator(".error").inner_text()
        page.locator(".run .dot[aria-pressed=false]").click()
        until(page, "document.querySelectorAll('[data-metric=\"reward/total\"] .last b').length === 2")
        for name in ("poem", "research"):
            shutil.copytree(lessons / name, tmp_path / name)
        page.locator(".run a", has_text="research").click()
        page.wait_for_selector(".group")
        assert page.locator("#run").input_value() == f"{tmp_path.name}/research", "the list of runs has it, too"


def test_a_chart_reads_out_what_the_cursor_is_on(open_page, tmp_path):
    file = tmp_path / "run/metrics.jsonl"
    file.parent.mkdir()
    file.write_text("".join(f'{{"step": {step}, "reward/total": {step / 10}, "policy/loss": {step}}}\n' for step in range(1, 10)))
    with serving(tmp_path / "run") as served:
        page = open_page(served.address)
        page.wait_for_selector("[data-metric='policy/loss'] canvas")
        box = page.locator("[data-metric='reward/total'] .u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
        until(page, "document.querySelector('[data-metric=\"reward/total\"] .last').innerText.replace(/\\s+/g, ' ') === 'step 5 0.5'")
        until(page, "document.querySelector('[data-metric=\"policy/loss\"] .last').innerText.replace(/\\s+/g, ' ') === 'step 5 5'")
        page.mouse.move(0, 0)
        until(page, "document.querySelector('[data-metric=\"reward/total\"] .last').innerText.trim() === '0.9'")


def test_new_points_leave_open_and_zoomed_what_is(open_page, tmp_path):
    file = tmp_path / "run/metrics.jsonl"
    file.parent.mkdir()
    file.write_text("".join(f'{{"step": {step}, "reward/total": 0.25, "memory/peak_gib": 2}}\n' for step in range(1, 41)))
    with serving(tmp_path / "run") as served:
        page = open_page(served.address)
        page.locator("summary", has_text="memory").click()
        page.wait_for_selector("[data-metric='memory/peak_gib'] canvas")
        box = page.locator("[data-metric='reward/total'] .u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
        page.mouse.up()
        ends = "(() => { const { min, max } = document.querySelector('.chart').chart.scales.x; return [min, max]; })()"
        zoomed = page.evaluate(ends)
        assert 8 < zoomed[0] < 13 and 18 < zoomed[1] < 23
        page.locator("summary", has_text="memory").focus()
        with open(file, "a") as more:
            more.write('{"step": 41, "reward/total": 0.75, "memory/peak_gib": 3}\n')
        until(page, "document.querySelector('[data-metric=\"memory/peak_gib\"] .last').textContent === '3'")
        assert page.evaluate(ends) == zoomed
        assert "memory" in page.evaluate("document.activeElement.textContent")
        label = page.locator("[data-metric='reward/total'] .plot").get_attribute("aria-label")
        assert label == "run: 0.25 first, 0.75 last, between 0.25 and 0.75, steps 1 to 41"


def test_from_a_run_to_a_token(open_page, started, rows):
    page = open_page(started.address + "#/runs")
    page.click(f"a:text-is('{RL}')")
    page.wait_for_selector(".group")
    groups = {row["group"] for row in rows if row["rollout_id"] == 1}
    assert page.locator(".group").count() == len(groups)
    page.locator(".siblings .reward a").first.click()
    page.wait_for_selector(".strip .token.model")
    page.locator(".strip .token.model").first.click()
    assert page.locator(".token-panel tr[data-quantity=advantage]").count() == 1
    assert "token=" in page.url
    page.go_back()
    page.wait_for_selector(".group")


def test_an_address_leads_to_the_same_token(open_page, started, rows):
    row = next(row for row in rows if len(row["turns"]) > 1)
    place = row["origin"].index(2) + 1
    page = open_page(started.address + of_trajectory(row, token=place, colour="logprob"))
    page.wait_for_selector(".token-panel")
    assert page.locator(".token-panel").get_attribute("data-place") == str(place)
    assert page.locator("#colour").input_value() == "logprob"
    assert page.locator(".strip .token.chosen").get_attribute("data-token") == str(place)
    assert page.locator(".message.environment").count() >= 1


def test_groups_are_sorted_filtered_and_searched(open_page, started, quickstart, rows):
    page = open_page(started.address + "#/groups?" + urlencode({"run": RL, "rollout": 1}))
    page.wait_for_selector(".group")
    page.select_option("#sort", "best")
    until(page, "location.hash.includes('sort=best')")
    page.wait_for_selector(".group")
    means = {row["group"]: row["group_mean"] for row in rows if row["rollout_id"] == 1}
    order = [int(each) for each in page.locator(".group").evaluate_all("all => all.map(each => each.dataset.group)")]
    assert [means[group] for group in order] == sorted(means.values(), reverse=True)
    page.select_option("#filter", "zero_variance")
    until(page, "location.hash.includes('filter=zero_variance')")
    until(page, "!document.querySelector('.view .state')?.textContent.includes('Reading')")
    flat = {row["group"] for row in rows if row["rollout_id"] == 1 and not row["group_std"]}
    assert page.locator(".group").count() == len(flat)
    page.select_option("#filter", "all")
    page.select_option("#rollout", "all")
    page.wait_for_selector(".list tbody tr")
    assert page.locator(".list tbody tr").count() == min(100, len({(row["rollout_id"], row["group"]) for row in rows}))
    word = rows[0]["prompt"][-1]["content"].split()[0]
    page.fill("#search", word)
    page.press("#search", "Enter")
    page.wait_for_selector(".list mark")
    assert page.locator(".list mark").first.inner_text().lower() == word.lower()
    assert len(read_index(quickstart / "rl/rollouts")) >= page.locator(".list tbody tr").count() > 0


def test_keys_walk_over_tokens_and_views(open_page, started, rows):
    page = open_page(started.address + of_trajectory(rows[0], token=3))
    page.wait_for_selector(".token-panel")
    page.focus(".strip")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token-panel").get_attribute("data-place") == "4"
    page.keyboard.press("End")
    assert page.locator(".token-panel").get_attribute("data-place") == str(len(rows[0]["tokens"]) - 1)
    before = page.locator("#colour").input_value()
    page.keyboard.press("c")
    assert page.locator("#colour").input_value() != before
    page.keyboard.press("s")
    page.wait_for_selector("tr[data-step]")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("1")
    page.wait_for_selector(".chart canvas")


def test_the_keyboard_goes_on_where_it_was(open_page, started):
    page = open_page(started.address + "#/groups?" + urlencode({"run": RL, "rollout": 1}), viewport={"width": 900, "height": 500})
    page.wait_for_selector(".group")
    page.focus("#sort")
    page.keyboard.press("ArrowDown")
    until(page, "location.hash.includes('sort=best')")
    page.wait_for_selector(".group")
    until(page, "document.activeElement.id === 'sort'")
    link = page.locator(".group").nth(3).locator("a").first
    link.focus()
    scrolled = page.evaluate("scrollY")
    assert scrolled > 100
    page.keyboard.press("Enter")
    page.wait_for_selector(".strip .token")
    until(page, "document.activeElement.id === 'main' && scrollY === 0")
    page.focus(".strip")
    page.keyboard.press("ArrowRight")
    chosen = page.locator("[role=option][aria-selected=true]")
    assert page.locator(".strip").get_attribute("aria-activedescendant") == chosen.get_attribute("id")
    assert chosen.get_attribute("aria-posinset") == "1"
    page.go_back()
    page.wait_for_selector(".group")
    until(page, "wanted => Math.abs(scrollY - wanted) < 2", scrolled)


def test_every_view_speaks_chinese(open_page, started, rows):
    page = open_page(started.address + of_trajectory(rows[0], token=len(rows[0]["tokens"]) - 1), locale="zh-CN")
    page.wait_for_selector(".token-panel")
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    assert page.locator("#top nav").inner_text().split() == ["运行", "组", "轨迹", "对比"]
    assert "信用分配" in page.locator(".token-panel").inner_text()
    for view, words in (("runs", "时间花在哪里"), ("groups", "占损失的份额"), ("compare", "训练器与引擎")):
        page.goto(f"{started.address}#/{view}?" + urlencode({"run": RL}))
        until(page, "words => document.querySelector('main').innerText.includes(words)", words)
    page.click("#language")
    until(page, "document.documentElement.lang === 'en'")


def test_two_trajectories_of_a_prompt_are_compared(open_page, started, rows):
    page = open_page(started.address + of_trajectory(rows[0]))
    page.click("a:text-is('Compare') >> nth=1")
    page.wait_for_selector("#other")
    page.select_option("#other", index=1)
    page.wait_for_selector(".sides .card >> nth=1")
    assert page.locator(".diff").count() == 1
    page.goto(started.address + "#/compare?" + urlencode({"run": RL, "rollout": 1}))
    page.wait_for_selector(".list tbody tr")
    page.locator(".list a").first.click()
    page.wait_for_selector(".token-panel")
    assert page.locator("#colour").input_value() == "mismatch"


def test_a_trajectory_is_exported_as_one_file(open_page, started, rows, tmp_path):
    page = open_page(started.address + of_trajectory(rows[0]))
    with page.expect_download() as waiting:
        page.click("#export")
    file = tmp_path / "exported.html"
    waiting.value.save_as(file)
    assert file.stat().st_size < 1_000_000
    page.context.set_offline(True)
    alone = open_page(file.as_uri(), offline=True)
    alone.wait_for_selector(".strip .token.model")
    alone.locator(".strip .token.model").first.click()
    assert alone.locator("tr[data-quantity=advantage] .equal").count() == 1
    alone.click("button:text-is('中文')")
    until(alone, "document.documentElement.lang === 'zh-CN'")


def test_groups_that_changed_most_come_first(open_page, lessons, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = tmp_path / "run"
    shutil.copytree(lessons / "two-prompts", run)
    with serving(run) as served:
        address = served.address + "#/groups?" + urlencode({"run": "run", "sort": "changed"})
        page = open_page(address)
        page.wait_for_selector(".group")
        assert "no change is known" in page.locator("main").inner_text()
        table = pq.read_table(run / "rollouts/rollout_000000.parquet")
        rows = table.to_pylist(maps_as_pydicts="strict")
        for row in rows:
            row |= {"rollout_id": 1, "task_id": row["task_id"].replace("#0", "#1"), "reward": 1.0}
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run / "rollouts/rollout_000001.parquet")
        again = open_page(address)
        again.wait_for_selector(".group")
        assert again.locator(".group .note").all_inner_texts()[0].endswith("changed by 0.6667")
        assert [each.split()[-1] for each in again.locator(".group .note").all_inner_texts()] == ["0.6667", "0.3333"]


def test_a_notebooks_frame_has_the_whole_view(open_page, lessons, tmp_path):
    from whet import show

    file = tmp_path / "cell.html"
    file.write_text("<!doctype html><meta charset=utf-8>" + show(lessons / "poem", "lesson/0#0/0")._repr_html_())
    frame = open_page(file.as_uri()).frame_locator("iframe")
    frame.locator(".strip .token.model").first.click()
    assert frame.locator("tr[data-quantity=advantage] .equal").count() == 1
    frame.get_by_role("button", name="中文").click()
    frame.locator("h3", has_text="信用分配").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(open_page, started, rows, scheme):
    run, token = urlencode({"run": RL}), len(rows[0]["tokens"]) - 1
    for address in ("#/runs", f"#/groups?{run}", of_trajectory(rows[0], token=token), f"#/compare?{run}"):
        page = open_page(started.address + address, viewport={"width": 390, "height": 844}, color_scheme=scheme, reduced_motion="reduce")
        until(page, "!document.querySelector('main').innerText.includes('Reading')")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, address
        page.context.close()


def test_what_is_wrong_is_reported_on_the_page(open_page, started):
    page = open_page(started.address + "#/groups?" + urlencode({"run": RL, "rollout": "all", "sort": "rollout"}))
    page.wait_for_selector(".list")
    assert page.locator("[role=alert]").count() == 0


def test_lessons_lead_to_their_places(open_page, viewer, lessons):
    page = open_page(viewer.address)
    page.wait_for_selector(".stops a")
    links = page.locator(".stops a").evaluate_all("all => all.map(each => each.getAttribute('href'))")
    assert len(links) >= 15
    for link in links:
        page.goto(viewer.address + link)
        page.wait_for_selector("tr[data-step]" if "view=steps" in link else ".token-panel")
        assert page.locator(".lesson").count() == 1 and page.locator(".differs").count() == 0
