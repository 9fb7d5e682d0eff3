"""The page's files: every text in both languages, nothing from elsewhere, and one module out of many for an export."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.view.packs import read_pack
from whet.view.app import PAGE
from whet.view.export import ENTRY, IMPORT, bundle, digest, export_page

MODULES = sorted(path for path in PAGE.glob("*.js"))
TEXT = r'"((?:[^"\\]|\\.)*)"'
SIGNS = {"−β (log π − log π_ref)", "r + γV′ − V", "log π − log π_ref", "–"}


def test_every_text_has_its_chinese():
    chinese = dict(re.findall(rf"{TEXT}:\s+{TEXT}", (PAGE / "chinese.js").read_text()))
    wanted = set()
    for path in MODULES:
        text = path.read_text()
        wanted |= set(re.findall(rf"\bt\({TEXT}", text))
        wanted |= {word for pair in re.findall(rf"\bt\([^()\"]* \? {TEXT} : {TEXT}", text) for word in pair}
    wanted |= set(re.findall(rf"^  \w+: \[{TEXT}", (PAGE / "scales.js").read_text(), re.MULTILINE))
    tables = {"CAUSES": "times", "REDUCERS": "token", "LEFT_OUT": "token", "SORTS": "groups", "FILTERS": "groups"}
    for table, file in tables.items():
        body = re.search(rf"const {table} = \{{(.*?)\}};", (PAGE / f"{file}.js").read_text(), re.DOTALL)
        assert body, table
        wanted |= set(re.findall(rf"\w+: {TEXT}", body[1]))
    assert len(wanted) > 150 and wanted - chinese.keys() == set()
    for english, other in chinese.items():
        assert sorted(re.findall(r"\{\d\}", english)) == sorted(re.findall(r"\{\d\}", other)), english


def test_no_module_makes_elements_of_text():
    for path in MODULES:
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", path.read_text()), path.name


def test_nothing_comes_from_elsewhere():
    for path in (*MODULES, *PAGE.glob("*.html"), *PAGE.glob("*.css")):
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"']*", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not addresses, path.name


def test_the_licence_of_what_is_vendored_is_there():
    assert "MIT License" in (PAGE / "vendor/uPlot.LICENSE").read_text()


def test_modules_of_the_export_share_no_name():
    text = bundle()
    names = re.findall(r"^(?:async )?(?:function|const|class|let) (?:\{[^}]*\}|(\w+))", text, re.MULTILINE)
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert not re.search(r"^(?:import|export) ", text, re.MULTILINE) and IMPORT.search((PAGE / ENTRY).read_text())
    assert "uPlot" not in text and "fetch(" not in text


def test_an_export_holds_its_packs_and_runs_its_own_script_alone(viewer, lessons):
    given = {"run": f"{lessons.name}/research", "rollout": 0, "trajectory": "lesson/0#0/0"}
    pack = viewer.get("trajectory", **given).body
    page = export_page(pack, viewer.get("credit", **{key: given[key] for key in ("run", "rollout")}).body, "zh")
    assert viewer.get("export", **given, language="zh").body.decode() == page
    assert f"script-src '{digest(bundle())}'" in page and "unsafe" not in page and '<html lang="zh-CN">' in page
    assert page.count("<script") == 3 and "http-equiv" in page


def test_an_export_of_4000_tokens_is_smaller_than_a_megabyte(lessons):
    """Every column is there and nothing repeats, which compresses worst."""
    import numpy as np

    from whet.observe.records import COMPUTED
    from whet.view.pack import pack

    random = np.random.default_rng(0)
    columns = {f"0:{name}": random.normal(size=4000).astype(np.float32) for name in COMPUTED if name not in ("first_clip", "last_clip")}
    columns |= {"0:tokens": random.integers(0, 150000, 4000).astype(np.int32), "piece": np.arange(4000, dtype=np.int32)}
    columns |= {"piece_ends": np.arange(1, 4001, dtype=np.int32) * 5, "piece_bytes": random.integers(32, 127, 20000).astype(np.uint8)}
    page = export_page(pack({}, columns), pack({}, {}), "en")
    assert len(page.encode()) < 1_000_000


@pytest.mark.parametrize("language", ["en", "zh"])
def test_hostile_text_stays_in_the_packs(viewer, lessons, language):
    given = {"run": f"{lessons.name}/poem", "rollout": 0, "trajectory": "lesson/0#0/0"}
    head, _ = read_pack(viewer.get("trajectory", **given).body)
    head["prompt"][0]["content"] = "</script><script>alert(1)</script>@script@"
    from whet.view.pack import pack

    page = export_page(pack(head, {}), b"", language)
    assert "alert(1)" not in page and page.count("<script") == 3


def test_a_notebook_displays_a_trajectory_in_a_frame(lessons):
    from whet import show

    shown = show(lessons / "poem", "lesson/0#0/1", language="zh")
    frame = shown._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and 'sandbox="allow-scripts"' in frame and "<script" not in frame
    assert (shown.rollout, '<html lang="zh-CN">' in shown.page) == (0, True)
    with pytest.raises(ValueError, match="no trajectory 'x'"):
        show(lessons / "poem", "x")
