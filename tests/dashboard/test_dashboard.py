"""The dashboard: logs as they are followed, what its endpoints tell, and what it never does."""

import contextlib
import json
import math
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the dashboard needs polyreme[serve]")
pytest.importorskip("httpx", reason="starlette's TestClient needs httpx")

from starlette.testclient import TestClient

from polyreme.cli.main import main
from polyreme.dashboard.app import Dashboard
from polyreme.dashboard.log import Curve, FollowedLog
from polyreme.dashboard.run import RunList
from polyreme.recipes.training.logs import JsonlLog
from polyreme.serving.guard import Access, Guard
from polyreme.serving.service import ServiceLimits

HOSTILE = "<img src=x onerror=alert(1)> \"'&"


def client(*folders, host="localhost"):
    app = Guard(Dashboard(RunList(folders)).app(), Access.of("127.0.0.1"), ServiceLimits())
    return contextlib.nullcontext(TestClient(app, base_url=f"http://{host}"))


def write(folder, records, mode="a"):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def losses(steps, value=1.0):
    return [{"kind": "train", "step": step, "loss": value, "grad_norm": 0.5} for step in steps]


def checkpoint(folder, step, config):
    place = folder / "checkpoints" / f"step_{step:08}"
    place.mkdir(parents=True)
    (place / "data.bin").write_bytes(b"x" * 1000)
    (place / "MANIFEST.json").write_text(json.dumps({"step": step, "meta": {"config": config}}))


# logs


def test_a_log_is_followed_while_it_is_written_torn_and_broken(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = FollowedLog(path)
    assert not log.poll()
    with JsonlLog(path) as written:
        written.write({"kind": "train", "step": 1, "loss": 2.0, "note": "text", "flag": True})
        assert log.poll()
        assert not log.poll()
        written.write({"kind": "train", "step": 2, "loss": math.nan})
        written.write({"kind": "validation", "step": 2, "loss": 3})
        written.write({"kind": "sample", "step": 2, "text": "In the"})
    with path.open("ab") as file:
        file.write(b'not json\n\n[1]\n{"kind": "train"}\n{"kind": "train", "step": 2.5, "loss": NaN}\n')
        file.write(b'{"kind": "train", "step": 3, "lo')
        file.flush()
        assert log.poll()
        assert (log.last_step, log.num_bad, log.num_events) == (2.5, 3, 1)
        file.write(b'ss": 1.5}\n')
    assert log.poll()
    assert set(log.curves) == {"train/loss", "validation/loss"}
    assert log.curves["train/loss"].sampled(10) == ([1, 2, 2.5, 3], [2.0, None, None, 1.5])
    assert log.events == [{"kind": "sample", "step": 2, "text": "In the"}]


def test_a_run_that_goes_back_or_begins_anew_is_read_again(tmp_path):
    log = FollowedLog(tmp_path / "metrics.jsonl")
    write(tmp_path, losses(range(1, 101)))
    log.poll()
    with JsonlLog(log.path, resume_step=50) as written:  # cut, then as long again before the next look
        for record in losses(range(51, 101), 9.0):
            written.write(record)
    log.poll()
    steps, values = log.curves["train/loss"].sampled(1000)
    assert steps == list(range(1, 101))
    assert values == [1.0] * 50 + [9.0] * 50
    write(tmp_path, losses(range(90, 96), 3.0))  # another process goes on in the file from an earlier step
    log.poll()
    assert log.curves["train/loss"].sampled(1000)[0] == list(range(1, 96))
    with JsonlLog(log.path) as written:  # begun anew: the old log has another name
        written.write({"kind": "train", "step": 1, "loss": 7.0})
    log.poll()
    assert log.curves["train/loss"].sampled(10) == ([1], [7.0])
    log.path.unlink()
    assert log.poll()
    assert not log.curves
    assert not log.poll()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32) | st.just(math.nan), min_size=1, max_size=300),
    st.integers(2, 60),
    st.integers(1, 5),
)
def test_a_curve_of_few_points_keeps_least_greatest_and_ends(values, most, stride):
    curve = Curve()
    for place, value in enumerate(values):
        curve.add(place * stride, value)
    steps, sample = curve.sampled(most)
    assert len(steps) <= max(most, 4)
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, (len(values) - 1) * stride)
    assert all(value == values[int(step) // stride] or value is None for step, value in zip(steps, sample, strict=True))
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [value for value in sample if value is not None]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


@pytest.mark.slow
def test_a_hundred_thousand_steps_come_in_a_thousand_points(tmp_path):
    records = losses(range(1, 100_001), 2.0)
    records[54_321]["loss"], records[77_777]["loss"] = 50.0, -3.0
    write(tmp_path, records)
    with client(tmp_path) as web:
        (run,) = web.get("/api/runs").json()["runs"]
        query = {"run": run["id"], "metric": ["train/loss", "train/none"], "points": 1000}
        answer = web.get("/api/series", params=query)
        (series,) = answer.json()["series"]
        assert series["total"] == 100_000
        assert len(series["steps"]) <= 1000
        assert len(answer.content) < 40_000
        assert (max(series["values"]), min(series["values"])) == (50.0, -3.0)
        assert series["steps"][series["values"].index(50.0)] == 54_322
        part = web.get("/api/series", params={**query, "from": 54_300, "to": 54_400}).json()["series"][0]
        assert part["steps"] == list(range(54_300, 54_401))


# endpoints


@pytest.fixture
def runs(tmp_path):
    top = tmp_path / "runs"
    write(top / "first", losses(range(1, 11), 2.0))
    events = [
        {"kind": "sample", "step": 10, "text": HOSTILE},
        {"kind": "spike", "step": 5, "loss": 90.0, "samples": "7 to 9"},
        {"kind": "not_finite", "step": 6, "loss": "nan"},
        {"kind": "remark", "step": 7, "text": "x"},
    ]
    write(top / "first", events)
    checkpoint(top / "first", 5, {"train.steps": 3})
    checkpoint(top / "first", 10, {"train.steps": 10, "plan.pp": 2, "train.accumulation": 4, "plan.schedule": "1F1B"})
    (top / "first" / "loss.png").write_bytes(b"\x89PNG picture")
    (top / "first" / "profile").mkdir()
    (top / "first" / "profile" / "communication.svg").write_text("<svg><script>alert(1)</script></svg>")
    write(top / "group" / HOSTILE.replace("/", "|"), losses(range(1, 4), 1.0))
    (top / "empty").mkdir()
    return top


def test_runs_curves_and_details(runs):
    with client(runs) as web:
        hostile, first = sorted(web.get("/api/runs").json()["runs"], key=lambda run: run["step"])
        assert (first["name"], first["state"], first["step"], first["steps"]) == ("first", "finished", 10, 10)
        assert first["latest"] == {"train/loss": 2.0, "train/grad_norm": 0.5}
        assert (hostile["name"], hostile["state"], hostile["steps"]) == (f"group/{HOSTILE}", "running", None)
        query = {"run": [first["id"], hostile["id"]], "metric": ["train/loss", "train/grad_norm"]}
        series = web.get("/api/series", params=query).json()["series"]
        assert [(s["run"], s["metric"], len(s["steps"])) for s in series] == [
            (run["id"], metric, count)
            for run, count in ((first, 10), (hostile, 3))
            for metric in ("train/loss", "train/grad_norm")
        ]
        details = web.get(f"/api/runs/{first['id']}").json()
        assert details["samples"] == [{"step": 10, "text": HOSTILE}]
        assert [fault["kind"] for fault in details["faults"]] == ["spike", "not_finite"]
        assert [event["kind"] for event in details["events"]] == ["remark"]
        assert [each["step"] for each in details["checkpoints"]] == [5, 10]
        assert all(each["bytes"] > 1000 for each in details["checkpoints"])
        assert details["config"]["train.accumulation"] == 4
        assert details["pictures"] == ["loss.png", "profile/communication.svg"]
        for name, kind in zip(details["pictures"], ("image/png", "image/svg+xml"), strict=True):
            answer = web.get(f"/api/runs/{first['id']}/picture", params={"name": name})
            assert answer.headers["content-type"] == kind
            assert "sandbox" in answer.headers["content-security-policy"]
        schedule = web.get(f"/api/runs/{first['id']}/schedule.svg")
        assert schedule.text.lstrip().startswith("<?xml")
        assert web.get(f"/api/runs/{hostile['id']}/schedule.svg").status_code == 404


def test_folders_appear_and_vanish(runs, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with client(runs, other) as web:
        ids = {run["name"]: run["id"] for run in web.get("/api/runs").json()["runs"]}
        assert "runs/first" in ids
        write(other / "late", losses([1]))
        states = {run["name"]: run["state"] for run in web.get("/api/runs").json()["runs"]}
        assert states["other/late"] == "running"
        os.rename(runs, tmp_path / "elsewhere")
        states = {run["name"]: run["state"] for run in web.get("/api/runs").json()["runs"]}
        assert (states["runs/first"], states["other/late"]) == ("gone", "running")
        details = web.get(f"/api/runs/{ids['runs/first']}").json()
        assert (details["samples"], details["checkpoints"], details["pictures"]) == ([], [], [])
        assert web.get(f"/api/runs/{ids['runs/first']}/picture", params={"name": "loss.png"}).status_code == 404


def test_what_is_refused(runs):
    with client(runs) as web:
        run = web.get("/api/runs").json()["runs"][0]["id"]
        for path, status, message in [
            ("/api/runs/none", 404, "no run 'none'"),
            ("/api/series", 400, "give run and metric"),
            (f"/api/series?run={run}&metric=a&points=1", 400, "points='1': give a number from 2 to 20000"),
            (f"/api/series?run={run}&metric=a&points=nan", 400, "points"),
            (f"/api/series?run={run}&metric=a&from=x", 400, "from='x'"),
            (f"/api/series?run={run}" + "&metric=a" * 201, 400, "up to 200"),
            ("/api/series?run=none&metric=a", 404, "no run"),
            (f"/api/runs/{run}/picture?name=../../first/metrics.jsonl", 404, "no picture"),
            (f"/api/runs/{run}/picture?name=/etc/passwd", 404, "no picture"),
            ("/page/..%2f__init__.py", 404, "no "),
            ("/page/none.js", 404, "no page/none.js"),
            ("/nowhere", 404, "no /nowhere"),
        ]:
            answer = web.get(path)
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), path
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for path in ("/api/runs", f"/api/runs/{run}", "/"):
                assert web.request(method, path).status_code == 405
    with client(runs, host="evil.example") as web:  # a page of another site, whose name was turned to this machine
        assert web.get("/api/runs").status_code == 403


def test_only_pictures_of_the_folder_itself_are_shown(runs, tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    (runs / "first" / "link.png").symlink_to(tmp_path / "secret.png")
    (runs / "first" / "outside").symlink_to(tmp_path)
    (runs / "linked").symlink_to(runs / "first")
    with client(runs) as web:
        names = [run["name"] for run in web.get("/api/runs").json()["runs"]]
        assert "linked" not in names
        run = next(run for run in web.get("/api/runs").json()["runs"] if run["name"] == "first")
        assert web.get(f"/api/runs/{run['id']}").json()["pictures"] == ["loss.png", "profile/communication.svg"]


def test_one_broken_folder_hides_no_other_run(runs):
    write(runs / "nan", [{"kind": "fault", "step": 1, "norms": [math.nan, -math.inf]}, *losses([2])])
    checkpoint(runs / "nan", 1, {"train.learning_rate": math.nan})
    write(runs / "deep", losses([1]))
    checkpoint(runs / "deep", 1, {})
    (runs / "deep" / "checkpoints" / "step_00000001" / "MANIFEST.json").write_text("[" * 100_000)
    (runs / "pipe").mkdir()
    os.mkfifo(runs / "pipe" / "metrics.jsonl")  # whoever opens it waits for a writer
    with client(runs) as web:
        ids = {run["name"]: run["id"] for run in web.get("/api/runs").json()["runs"]}
        assert {"first", "nan", "deep", "pipe"} <= ids.keys()
        details = {name: web.get(f"/api/runs/{ids[name]}").json() for name in ("nan", "deep", "pipe")}
    assert details["nan"]["faults"] == [{"kind": "fault", "step": 1, "norms": ["nan", "-inf"]}]
    assert details["nan"]["config"] == {"train.learning_rate": "nan"}
    assert (details["deep"]["step"], details["deep"]["config"], details["pipe"]["step"]) == (1, {}, None)


def test_the_page_is_of_this_server_alone(runs):
    with client(runs) as web:
        page = web.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        text = "".join(web.get(f"/{path}").text for path in ("", "page/dash.js", "page/dash.css"))
        assert "https://" not in text
        assert "innerHTML" not in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_looking_changes_nothing_and_readers_do_not_disturb_each_other(runs):
    def seen():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in runs.rglob("*") if path.is_file()}

    before, failures = seen(), []
    with client(runs) as web:
        ids = [run["id"] for run in web.get("/api/runs").json()["runs"]]

        def look():
            for _ in range(5):
                for path in ("/api/runs", *(f"/api/runs/{run}" for run in ids)):
                    failures.extend([path] if web.get(path).status_code != 200 else [])

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert seen() == before


def test_the_command_refuses_what_it_cannot_serve(tmp_path, capsys):
    assert main(["dash", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["dash", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "which could read every run; give --insecure" in capsys.readouterr().err
