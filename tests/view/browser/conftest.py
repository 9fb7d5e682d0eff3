"""Chromium for the tests of the page, found or installed, and never skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.e2e.test_records_recomputed import CASES, RUN
from tests.e2e.tiny_run import make_files, over, run_config
from tests.view.browser.variants import VARIANTS
from tests.view.served import serving

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = (
    "none of the page's views was tested: these tests need Chromium: "
    "`apt-get install chromium` on Debian and Ubuntu, elsewhere set CHROMIUM to the program"
)


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/view/browser" in str(item.path):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(1800))  # the first one plays the runs of all, on a machine that may be busy


@pytest.fixture(scope="session")
def chromium():
    path = find_chromium()
    if path is None and os.environ.get("CI") and shutil.which("apt-get"):
        print("no Chromium here, and CI is set: apt-get installs it", file=sys.stderr)
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "chromium"]):
            subprocess.run([*(["sudo"] if os.geteuid() else []), *command], timeout=600, check=False)
        path = find_chromium()
    if path is None:
        pytest.fail(HOW, pytrace=False)
    return path


@pytest.fixture(scope="session")
def browser(chromium, request):
    """Chromium, after the runs of all chosen tests were played: the driver has an event loop of its own, which a run in the same process
    does not bear."""
    from playwright.sync_api import sync_playwright

    wanted = {name for item in request.session.items for name in item.fixturenames}
    for name in wanted & {"runs", "variants", "quickstart", "lessons"}:
        request.getfixturevalue(name)
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """Opens an address in a window of its own. What the console reports as an error, and a request to elsewhere, fails the test."""
    wrong: list[str] = []
    contexts = []

    def open_at(address: str, **options):
        context = browser.new_context(**{"viewport": {"width": 1300, "height": 900}, "locale": "en-US", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        origin = "/".join(address.split("/")[:3])
        page.on("console", lambda said: wrong.append(f"console: {said.text}") if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        own = (origin, "file:", "blob:", "data:")
        page.on("request", lambda asked: None if asked.url.startswith(own) else wrong.append(f"request: {asked.url}"))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Runs of four algorithms, of seconds each, with two epochs and an environment that answers."""
    from whet.runs.commands import train

    folder = tmp_path_factory.mktemp("played")
    make_files(folder)
    for name, changes in CASES.items():
        train(run_config(folder, name, **RUN, **changes))
    return folder


@pytest.fixture(scope="session")
def variants(tmp_path_factory):
    """Runs of the other algorithms, losses and options, of one rollout each."""
    from whet.runs.commands import train

    folder = tmp_path_factory.mktemp("variants")
    make_files(folder)
    for name, changes in VARIANTS.items():
        train(run_config(folder, name, **over(RUN, {"num_rollouts": 1, **changes})))
    return folder


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory):
    """A quickstart, short: warm-up, reinforcement learning with a tool, evaluations."""
    from whet.quickstart.run import QuickstartConfig, run_quickstart

    folder = tmp_path_factory.mktemp("first") / "quickstart"
    run_quickstart(QuickstartConfig(seed=0, run_dir=str(folder), num_rollouts=2, warmup_steps=40, num_held_out=8), None, "test")
    return folder


@pytest.fixture(scope="session")
def played(runs):
    with serving(runs) as served:
        yield served


@pytest.fixture(scope="session")
def started(quickstart):
    with serving(quickstart) as served:
        yield served
