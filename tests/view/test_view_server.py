"""The viewer answers its own page on this machine, shows the named folders alone, and writes nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.view.served import ROOT, serving
from whet.view.access import POLICY
from whet.view.folders import find_runs, inside


def test_without_the_token_nothing_is_shown(viewer):
    for path in ("/", "/api/runs", "/wrong/api/runs", "/index.html", f"/{viewer.token}x/"):
        answer = viewer.raw(path)
        assert answer.status == 403 and b"lesson" not in answer.body, path
    assert viewer.raw(f"/{viewer.token}/").status == 200


def test_every_start_has_a_token_of_its_own(viewer, lessons):
    with serving(lessons) as other:
        assert other.token != viewer.token and len(other.token) >= 20


HOSTS = ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "", "10.0.0.1:80", "[::1")
ODD_HOSTS = ("evil@127.0.0.1", "127.0.0.1@evil.example", "127.0.0.1#.evil.example", "127.0.0.1/evil", "127.0.0.1:80:80", "127.0.0.1:x")


@pytest.mark.parametrize("host", [*HOSTS, *ODD_HOSTS])
def test_another_name_of_this_machine_is_refused(viewer, host):
    assert viewer.raw(f"/{viewer.token}/api/runs", headers={"Host": host}).status in (400, 403)


def test_a_page_of_another_site_is_refused(viewer):
    for site in ("cross-site", "same-site"):
        assert viewer.raw(f"/{viewer.token}/api/runs", headers={"Sec-Fetch-Site": site}).status == 403
    for host in (f"localhost:{viewer.port}", "LocalHost", "127.0.0.1:9000"):
        own = {"Host": host, "Sec-Fetch-Site": "same-origin"}
        assert viewer.raw(f"/{viewer.token}/api/runs", headers=own).status == 200, host


def test_nothing_but_reading_is_answered(viewer):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert viewer.raw(f"/{viewer.token}/api/runs", method).status == 405


def test_scripts_come_from_files_alone(viewer):
    assert "unsafe" not in POLICY and "script-src 'self'" in POLICY and POLICY.startswith("default-src 'none'")
    for path in ("", "app.js", "api/runs", "nothing"):
        assert viewer.raw(f"/{viewer.token}/{path}").headers["content-security-policy"] == POLICY
    page = viewer.raw(f"/{viewer.token}/").body.decode()
    assert "<script>" not in page and " style=" not in page and " on" not in page.replace(" content", "")


def test_only_loopback_listens(viewer):
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1", "127.0.1.1"}
    for address in addresses:
        with pytest.raises(OSError):
            socket.create_connection((address, viewer.port), 2).close()


@pytest.mark.parametrize("path", ["../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "vendor/../../app.py", "//etc/passwd", "..%2fapp.py"])
def test_no_path_leads_out_of_the_page(viewer, path):
    answer = viewer.raw(f"/{viewer.token}/{path}")
    assert answer.status == 404 and b"root:" not in answer.body and b"import" not in answer.body


def test_no_link_leads_out_of_the_named_folder(lessons, tmp_path):
    run, secret = tmp_path / "run", tmp_path / "secret"
    shutil.copytree(lessons / "poem", run)
    secret.mkdir()
    (secret / "metrics.jsonl").write_text('{"step": 1, "secret": 42}\n')
    shutil.copytree(lessons / "research/rollouts", secret / "rollouts")
    (run / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    (run / "failures.jsonl").symlink_to(secret / "metrics.jsonl")
    (run / "rollouts/rollout_000001.parquet").symlink_to(secret / "rollouts/rollout_000000.parquet")
    (run / "evaluations").symlink_to(secret)
    with serving(run) as served:
        assert b"secret" not in served.get("metrics", run="run").body
        assert served.get("failures", run="run").json() == []
        assert served.get("rollout", run="run", rollout=1).status == 404
        assert served.get("rollout", run="run", rollout=0).status == 200
        assert [each["name"] for each in served.get("runs").json()] == ["run"]


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert inside(tmp_path, tmp_path / "metrics.jsonl") is None


def test_an_index_that_names_another_file_is_not_followed(lessons, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(lessons / "poem", run)
    path = run / "rollouts/index/rollout_000000.parquet"
    table = pq.read_table(path)
    names = pa.array(["../../../../../../etc/passwd"] * len(table))
    table = table.set_column(table.schema.get_field_index("file"), "file", names)
    pq.write_table(table.set_column(table.schema.get_field_index("row"), "row", pa.array([10**6] * len(table))), path)
    with serving(run) as served:
        answer = served.get("trajectory", run="run", rollout=0, trajectory="lesson/0#0/0")
        assert answer.status == 404 and "does not fit" in answer.json()["error"]


def test_nothing_is_written(lessons):
    def state():
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(Path(lessons).rglob("*"))}

    before = state()
    with serving(lessons) as served:
        name = f"{lessons.name}/poem"
        for api, more in (("rollout", {"rollout": 0}), ("groups", {}), ("search", {"text": "a"}), ("worst", {"rollout": 0})):
            assert served.get(api, run=name, **more).status == 200
        assert served.get("export", run=name, rollout=0, trajectory="lesson/0#0/0").status == 200
    assert state() == before


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("rollout", {"run": "nobody", "rollout": 0}, "no run 'nobody'"),
        ("rollout", {}, "run is missing"),
        ("rollout", {"run": "poem", "rollout": "-1"}, "whole number"),
        ("rollout", {"run": "poem", "rollout": 7}, "not recorded"),
        ("groups", {"run": "poem", "sort": "x"}, "sorted by"),
        ("search", {"run": "poem", "text": ""}, "type a word"),
        ("trajectory", {"run": "poem", "rollout": 0, "trajectory": "x"}, "no trajectory 'x'"),
    ],
)
def test_a_wrong_question_is_answered_plainly(viewer, lessons, name, given, said):
    given = {**given, **({"run": f"{lessons.name}/poem"} if given.get("run") == "poem" else {})}
    answer = viewer.get(name, **given)
    assert answer.status == 404 and said in answer.json()["error"]


def whet_view(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "whet", "view", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_wrong_folder_is_reported_plainly(tmp_path):
    assert whet_view(tmp_path / "none") == (2, f"error: there is no folder {tmp_path / 'none'}: give a run's folder (its run_dir)\n")
    status, said = whet_view(tmp_path)
    assert status == 2 and "neither records nor metrics.jsonl" in said
    status, said = whet_view()
    assert status == 2 and "--lesson all" in said
    status, said = whet_view("--lesson", "chemistry")
    assert status == 2 and "one-plus-one, two-prompts, research, poem, and all" in said


def test_a_taken_port_is_reported_plainly(viewer, lessons):
    status, said = whet_view(lessons, "--port", viewer.port)
    assert status == 2 and f"cannot listen on 127.0.0.1:{viewer.port}" in said


def test_runs_of_one_name_have_two_names_on_the_page(lessons, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "run").mkdir(parents=True)
        (tmp_path / folder / "run/metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    assert [run.name for run in find_runs([tmp_path / "a/run", tmp_path / "b/run"])] == ["run", "run (2)"]
    assert [run.name for run in find_runs([tmp_path / "a"])] == ["a/run"]
