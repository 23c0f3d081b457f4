"Folders, strict JSON, the recorder, recovery and collection."
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from atlas_rlvr import runs
from atlas_rlvr.runs import (
    Recorder,
    alone,
    batch_row,
    collect,
    finished,
    project_root,
    read_lines,
    read_rollouts,
    record_key,
    recover,
    result_text,
    run_folder,
    safe_model,
    set_aside,
    write_json,
)

ROOT = Path(__file__).parents[1]


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def record(batch=1, generation=0, task="t1", reward=0.5, phase="train", **more):
    where = {"model": "embedded", "seed": 0, "scenario": "subtask", "split": "train", "phase": phase, "batch": batch}
    return where | {"task": task, "generation": generation, "reward": reward, "reward_hash": "h1", "calls": []} | more


def fill(folder, batches, generations=2):
    recorder = Recorder(folder)
    for batch in batches:
        for generation in range(generations):
            recorder.append(record(batch, generation))
        recorder.end_batch(batch, epoch=batch, seconds=1.0)
    return recorder


# Folders


def test_project_root_from_the_root_and_from_nbs(tmp_path, monkeypatch):
    (tmp_path / "nbs").mkdir()
    (tmp_path / "settings.ini").write_text("[DEFAULT]\n")
    for place in (tmp_path, tmp_path / "nbs"):
        monkeypatch.chdir(place)
        assert project_root() == tmp_path.resolve()


def test_project_root_without_settings_is_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert project_root() == tmp_path.resolve()


def test_models_do_not_share_a_folder(tmp_path):
    models = ["embedded", "Qwen/Qwen3-1.7B", "Qwen_Qwen3-1.7B", "Qwen-Qwen3-1.7B", "Qwen%2FQwen3-1.7B", "qwen3-1.7b",
              str(tmp_path / "a" / "m"), str(tmp_path / "b" / "m"), "m"]
    names = [run_folder("page", model, 0).name for model in models]
    assert len(set(names)) == len(models)
    assert all("/" not in name and str(tmp_path) not in name for name in names)


def test_run_folder_place(tmp_path):
    assert run_folder("label", "embedded", 3, tmp_path) == tmp_path / "results/runs/label/embedded-s3"
    assert safe_model("qwen3-1.7b") == "qwen3-1.7b"


def test_set_aside_loses_nothing(tmp_path):
    folder = tmp_path / "qwen3-1.7b-s0"
    for text in ("first", "second"):
        folder.mkdir()
        (folder / "run.json").write_text(text)
        set_aside(folder)
    assert not folder.exists() and set_aside(folder) is None
    assert [(tmp_path / f"qwen3-1.7b-s0.aside-{n}" / "run.json").read_text() for n in (1, 2)] == ["first", "second"]


def test_import_needs_the_standard_library_only():
    code = "import sys; before = set(sys.modules); import atlas_rlvr.runs; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    tops = {name.split(".")[0] for name in loaded.split()}
    assert tops <= set(sys.stdlib_module_names) | {"atlas_rlvr"}


# Strict JSON


def test_nan_becomes_null_with_a_reason(tmp_path):
    write_json(tmp_path / "m.json", {"scenario": "label", "mean": math.nan, "ci": [-math.inf, 1.0]})
    data = strict((tmp_path / "m.json").read_text())
    assert data == {"scenario": "label", "mean": None, "ci": [None, 1.0], "nulls": {"mean": "nan", "ci.0": "-inf"}}


def test_write_json_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "rollouts.json"
    write_json(path, {"rollouts": [1]})
    monkeypatch.setattr(runs.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        write_json(path, {"rollouts": [2]})
    assert json.loads(path.read_text()) == {"rollouts": [1]}


@pytest.mark.parametrize("text, where", [
    ('[{"scenario": "cross_product", "step": 0, "reward": 0.0, "tool_calls": [{"name": "get_is', "line 1, column 82"),
    ('{"schema": 1,\n"rollouts": [', "line 2, column 14"),
    ("", "line 1, column 1"),
    ('{"schema": 1, "rollouts": ["\u00e9'.encode()[:-1], "byte 28"),
    ('{"schema": 1, "rollouts": [{"reward": NaN}]}', "NaN is not JSON"),
    ('{"schema": 9, "rollouts": []}', "not a rollouts file of schema 1"),
    ("[]", "not a rollouts file of schema 1"),
], ids=["E07", "cut", "empty", "half a character", "nan", "schema", "list"])
def test_a_damaged_rollouts_file_is_named_and_left_alone(tmp_path, text, where):
    path = tmp_path / "atlassian_rollouts.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="atlassian_rollouts.json") as caught:
        read_rollouts(path)
    assert where in str(caught.value) and "collect" in str(caught.value)
    assert path.read_bytes() == (text if isinstance(text, bytes) else text.encode())


def test_a_damaged_line_is_never_dropped_silently(tmp_path):
    fill(tmp_path, [1])
    path = tmp_path / "rollouts.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0][:20], *lines[1:]]))
    for job in (read_lines, lambda p: recover(p.parent), lambda p: Recorder(p.parent)):
        with pytest.raises(ValueError, match="rollouts.jsonl, record 1, line 1, column"):
            job(path)


# The recorder


def test_each_key_once(tmp_path):
    recorder = fill(tmp_path, [1, 2])
    recorder.append(record(1, 0, reward=0.9))
    again = Recorder(tmp_path)
    again.append(record(2, 1))
    again.append(record(2, 2))
    keys = [record_key(r) for r in read_lines(tmp_path / "rollouts.jsonl")]
    assert len(keys) == len(set(keys)) == 5


def test_foreign_objects_become_text(tmp_path):
    numpy = pytest.importorskip("numpy")
    recorder = Recorder(tmp_path)
    recorder.append(record(reward=numpy.float32(0.5), raw=float("nan"), error=OSError("gone"), odd=object(), b=b"x",
                           surrogate="\ud800", line="\u2028", ids=numpy.arange(2), names={"b", "a"}, keys={1: 2}))
    stored = strict((tmp_path / "rollouts.jsonl").read_text())
    assert recorder.errors == 0
    assert (stored["reward"], stored["raw"], stored["nulls"]) == (0.5, None, {"raw": "nan"})
    assert (stored["error"], stored["odd"]) == ("<OSError> gone", "<object> <object object>")
    assert (stored["ids"], stored["names"], stored["keys"]) == ([0, 1], ["a", "b"], {"1": 2})
    assert (stored["line"], stored["surrogate"]) == ("\u2028", "\\ud800")


class Hostile:
    "An object that fails whatever is asked of it."

    def __str__(self):
        raise RuntimeError("no text")


def test_what_cannot_be_recorded_is_counted_and_warned_about_once(tmp_path):
    recorder, loop = Recorder(tmp_path), []
    loop.append(loop)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for bad in (Hostile(), loop, Hostile()):
            recorder.append(record(extra=bad))
        recorder.append("not a record")
        recorder.end_batch("one", None, None)
    assert recorder.errors >= 4 and len(caught) == 1
    recorder.append(record(batch=7))
    assert [r["batch"] for r in read_lines(tmp_path / "rollouts.jsonl")] == [7]


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    recorder, real = Recorder(tmp_path), runs.append_text

    def full(path, text):
        raise OSError("disk full")

    monkeypatch.setattr(runs, "append_text", full)
    with pytest.warns(UserWarning, match="disk full"):
        recorder.append(record(1, 0))
    recorder.end_batch(1, 1.0, 1.0)
    monkeypatch.setattr(runs, "append_text", real)
    recorder.append(record(2, 0))
    assert [r["batch"] for r in read_lines(tmp_path / "rollouts.jsonl")] == [1, 2]
    assert len((tmp_path / "rewards.csv").read_text().splitlines()) == 2


def test_a_short_write_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    runs.append_text(path, "whole\n")

    class Short:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            return self.file.write(data[:3])

    monkeypatch.setattr("builtins.open", lambda *a, real=open, **k: Short(real(*a, **k)))
    with pytest.raises(OSError, match="disk is full"):
        runs.append_text(path, "second\n")
    monkeypatch.undo()
    assert path.read_text() == "whole\n"


def test_min_and_max_are_averages_over_groups():
    rewards = {"a": (0.0, 1.0), "b": (0.4, 0.4), "c": (None, 0.2)}
    records = [record(1, g, task, reward) for task, pair in rewards.items() for g, reward in enumerate(pair)]
    row = batch_row(records, 4, 0.5, 2.0)
    assert list(row) == list(runs.COLUMNS)
    assert (row["min"], row["max"]) == (0.2, round((1.0 + 0.4 + 0.2) / 3, 6))
    assert (row["n"], row["errors"], row["zero_std_groups"], row["mean"]) == (5, 1, 2, 0.4)
    empty = batch_row([record(reward=None)], 4, 0.5, 2.0)
    assert (empty["mean"], empty["n"], empty["errors"]) == ("", 0, 1)


# After a kill


def test_a_half_written_last_line_goes_into_a_side_file(tmp_path):
    fill(tmp_path, [1])
    path, torn = tmp_path / "rollouts.jsonl", '{"model":"embedded","error":"é'.encode()[:-1]
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert recover(tmp_path) == {"torn": 1, "aside": 0}
    assert path.read_bytes() == whole
    assert (tmp_path / "rollouts.torn.txt").read_text().startswith('{"model":"embedded"')
    assert recover(tmp_path) == {"torn": 0, "aside": 0}


def test_newer_records_are_set_aside_and_made_again(tmp_path):
    fill(tmp_path, [1, 2, 3])
    assert recover(tmp_path, batch=2) == {"torn": 0, "aside": 2}
    assert [r["batch"] for r in read_lines(tmp_path / "rollouts.aside-1.jsonl")] == [3, 3]
    fill(tmp_path, [3, 4])
    assert recover(tmp_path, batch=3)["aside"] == 2
    assert [r["batch"] for r in read_lines(tmp_path / "rollouts.jsonl")] == [1, 1, 2, 2, 3, 3]
    rows = (tmp_path / "rewards.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["batch", "1", "2", "3"]
    assert (tmp_path / "rewards.aside-2.csv").read_text().splitlines()[1].startswith("4,")


def test_evaluations_follow_the_policy_that_made_them(tmp_path):
    recorder = fill(tmp_path, [1, 2])
    for phase in ("before", "after"):
        recorder.append(record(None, 0, phase=phase))
    recover(tmp_path, batch=2)
    assert [r["phase"] for r in read_lines(tmp_path / "rollouts.jsonl")][-2:] == ["before", "after"]
    recover(tmp_path, batch=1)
    assert [r["phase"] for r in read_lines(tmp_path / "rollouts.jsonl")][-1] == "before"


def test_a_kill_loses_at_most_the_batch_under_way(tmp_path):
    code = ("import os, signal, sys\nsys.path.insert(0, 'tests')\nfrom test_runs import fill, record\n"
            f"recorder = fill({str(tmp_path)!r}, [1, 2])\nrecorder.append(record(3, 0))\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -9
    recover(tmp_path, batch=2)
    assert [r["batch"] for r in read_lines(tmp_path / "rollouts.jsonl")] == [1, 1, 2, 2]


# E06: finished work is not done again


def test_a_second_pass_over_the_same_work_adds_nothing(tmp_path):
    fill(tmp_path, [1, 2])
    size = os.path.getsize(tmp_path / "rollouts.jsonl")
    recorder = Recorder(tmp_path)
    for generation in range(2):
        recorder.append(record(1, generation))
    assert os.path.getsize(tmp_path / "rollouts.jsonl") == size and len(recorder.seen) == 4


@pytest.mark.parametrize("reason, ended", [("converged", True), ("plateau", True), ("max_steps", True),
                                           ("interrupted", False), (None, False)])
def test_which_runs_are_finished(tmp_path, reason, ended):
    assert finished(tmp_path) is None
    write_json(tmp_path / "run.json", {"scenario": "page", "model": "embedded", "seed": 0, "stop_reason": reason})
    run = finished(tmp_path)
    assert bool(run) is ended
    assert not run or result_text(run).startswith(f"page, embedded, seed 0: {reason} after")


def test_a_cut_run_json_is_named(tmp_path):
    (tmp_path / "run.json").write_text('{"scenario": "pa')
    with pytest.raises(ValueError, match=r"run\.json, line 1, column 14.*fresh True"):
        finished(tmp_path)


# One file for tables and figures


def test_collect_merges_runs(tmp_path):
    fill(tmp_path / "a", [1])
    recorder = Recorder(tmp_path / "b")
    call = {"name": "get_issue", "raw": "{}", "body": {"key": "ABC-123"}}
    recorder.append(record(1, 0, task="t9", calls=[call], messages=[{"role": "user", "content": "x"}]))
    write_json(tmp_path / "a" / "run.json", {"scenario": "subtask", "stop_reason": "plateau"})
    data = collect([tmp_path / "a", tmp_path / "b", tmp_path / "a"], tmp_path / "rollouts.json")
    assert len(data["rollouts"]) == 3
    assert data["rollouts"][-1]["calls"] == [{"name": "get_issue", "raw": "{}"}] and "messages" not in data["rollouts"][-1]
    assert set(data) == {"schema", "manifest", "suite", "rollouts"}
    assert data["suite"]["reward_hash"] == "h1" and data["suite"]["runs"][0]["stop_reason"] == "plateau"
    assert strict((tmp_path / "rollouts.json").read_text()) == read_rollouts(tmp_path / "rollouts.json")


def test_collect_builds_calls_from_messages(tmp_path):
    answer = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "get_issue", "arguments": {"issueIdOrKey": "ABC-123"}}}]}
    tool = {"role": "tool", "name": "get_issue", "content": '{"status":200,"body":{"key":"ABC-123"}}'}
    one = record(messages=[answer, tool])
    del one["calls"]
    calls = runs.compact(one)["calls"]
    assert [(c["name"], c["outcome"], "body" in c) for c in calls] == [("get_issue", "ok", False)]


def test_collect_refuses_two_reward_hashes(tmp_path):
    fill(tmp_path / "a", [1])
    Recorder(tmp_path / "b").append(record(9, 0, reward_hash="h2"))
    with pytest.raises(ValueError, match=r"different rewards \['h1', 'h2'\]"):
        collect([tmp_path / "a", tmp_path / "b"])


def test_collect_refuses_one_key_with_two_contents(tmp_path):
    fill(tmp_path / "a", [1])
    Recorder(tmp_path / "b").append(record(1, 0, reward=0.9))
    with pytest.raises(ValueError, match="give one run another seed"):
        collect([tmp_path / "a", tmp_path / "b"], tmp_path / "rollouts.json")
    assert not (tmp_path / "rollouts.json").exists()


def test_collect_leaves_out_what_was_set_aside(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").write_text("[DEFAULT]\n")
    monkeypatch.chdir(tmp_path)
    folder = run_folder("subtask", "embedded", 0)
    fill(folder, [1, 2])
    set_aside(folder)
    fill(folder, [1])
    assert len(collect()["rollouts"]) == 2
    for wrong in ([], [tmp_path / "nothing"]):
        with pytest.raises(ValueError, match="there is no run here; train or evaluate first"):
            collect(wrong, tmp_path / "kept.json")
    assert not (tmp_path / "kept.json").exists()


def test_the_manifest_names_no_place_and_no_person():
    text = json.dumps(runs.manifest())
    assert str(Path.home()) not in text and str(ROOT) not in text and os.uname().nodename not in text
    assert runs.manifest()["packages"]["papermill"]


def test_a_folder_has_one_run_at_a_time(tmp_path):
    with alone(tmp_path), pytest.raises(ValueError, match="in use by another start of this run; wait for it, or stop it"), \
            alone(tmp_path):
        raise AssertionError("held twice")
    with alone(tmp_path):
        pass


def test_a_torn_header_is_written_again(tmp_path):
    fill(tmp_path, [])
    (tmp_path / "rewards.csv").write_text("batch,epo")
    recover(tmp_path)
    fill(tmp_path, [1])
    assert [line.split(",")[0] for line in (tmp_path / "rewards.csv").read_text().split()] == ["batch", "1"]


def test_one_folder_may_be_collected_by_its_name(tmp_path):
    fill(tmp_path, [1])
    assert len(collect(str(tmp_path))["rollouts"]) == 2
