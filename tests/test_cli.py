"The console script: it starts fast, says how to be used, ends cleanly, and fails in one sentence."

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from configparser import ConfigParser

import pytest
from conftest import ROOT

from atlas_rlvr.cli import main
from atlas_rlvr.environments import SEEDS
from atlas_rlvr.record import diff, read_recording
from atlas_rlvr.scenarios import load_tasks
from atlas_rlvr.world import World

PROGRAM = [sys.executable, "-c", "from atlas_rlvr.cli import main; main()"]
HEAVY = {"torch", "pandas", "numpy", "matplotlib", "transformers", "trl", "mcp", "fastcore", "nbdev"}


@contextlib.contextmanager
def serving(*arguments):
    "A server process on a free port, and what it has printed."
    process = subprocess.Popen([*PROGRAM, "serve", "--port", "0", *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline()]
    while not lines[-1].startswith("A client that wants") and lines[-1]:
        lines.append(process.stdout.readline())
    try:
        yield process, "".join(lines)
    finally:
        process.kill()
        process.communicate()


def port_of(text):
    return int(re.search(r"http://127\.0\.0\.1:(\d+)", text).group(1))


def ask(port, path, token="synthetic-1"):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or "null")


# Starting


def test_the_first_answer_comes_within_a_second():
    "Its own processor time always; the clock's only where the machine is not busy with other things."
    took = []
    for _ in range(3):
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        with serving() as (_, text):
            assert ask(port_of(text), "/rest/api/3/issue/ABC-123")[0] == 200
            wall = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append((after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall))
        if wall < 1:
            break
    assert min(cpu for cpu, _ in took) < 1
    assert min(wall for _, wall in took) < 1 or os.getloadavg()[0] > (os.cpu_count() or 1)


def test_serving_loads_nothing_heavy():
    code = "import sys, atlas_rlvr.server as s; s.make_server(s.Site(s.make_tokens(1))); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not HEAVY & set(loaded.split())


def test_it_prints_tokens_and_how_to_point_a_client_at_it():
    with serving("--tokens", "2", "--scenario", "page", "--admin") as (_, text):
        port = port_of(text)
        tokens = re.findall(r"token \d: (\S+)", text)
        curl = re.search(r"curl -u \S+:(\S+) http://127\.0\.0\.1:\d+(\S+)", text)
        assert len(tokens) == 2 and load_tasks("page")[0]["prompt"].rstrip(".") in text
        assert f"HTTP_PROXY=http://127.0.0.1:{port}" in text and f"http://127.0.0.1:{port}/wiki" in text
        assert [ask(port, "/wiki/api/v2/pages/789", token)[0] for token in tokens] == [200, 200]
        assert ask(port, curl[2], curl[1])[0] == 200
        assert ask(port, "/__synthetic/score")[1]["task"] == "page-01"


def test_a_task_brings_its_world_and_faults_are_in_front_of_it():
    task = load_tasks("page", "held_out")[0]
    with serving("--scenario", "page", "--task", task["id"], "--faults", "rate_burst:0") as (_, text):
        statuses = [ask(port_of(text), f"/wiki/api/v2/pages/{task['gold']['parentId']}")[0] for _ in range(12)]
        assert ask(port_of(text), "/__synthetic/score")[0] in (404, 429)  # no --admin
    assert set(statuses) <= {200, 429} and 200 in statuses


def test_it_records_what_every_client_said_and_heard(tmp_path):
    file = tmp_path / "calls.jsonl"
    for _ in range(2):  # a second start goes on with the file
        with serving("--tokens", "2", "--record", str(file)) as (_, text):
            asked = [(f"/rest/api/3/issue/ABC-12{n}?fields=summary", f"synthetic-{n}") for n in (1, 2, 3)]
            statuses = [ask(port_of(text), *one)[0] for one in asked]
    lines = read_recording(file)
    assert [line["status"] for line in lines] == statuses * 2 and [line["path"][-7:] for line in lines[:3]] == [
        "ABC-121", "ABC-122", "ABC-123"]
    assert not re.search(r"synthetic-\d|Bearer|authorization|127\.0\.0\.1", file.read_text())
    known = [line for line in lines if line["status"] == 200]
    assert {row["verdict"] for row in diff(known, World(SEEDS["wire"]))} <= {"same"}


@pytest.mark.parametrize("content, reason", [(b"not JSON\n", "line 1 of the recording calls.jsonl cannot be used: it is not JSON"),
                                             (b"{}\n", "line 1 of the recording calls.jsonl cannot be used: method is missing"),
                                             (b"\xff\xfe\n", "the recording calls.jsonl cannot be used: it is no text in UTF-8")])
def test_a_file_that_is_no_recording_is_left_alone(content, reason, tmp_path, capsys):
    (tmp_path / "calls.jsonl").write_bytes(content)
    with pytest.raises(SystemExit) as left:
        main(["serve", "--port", "0", "--record", str(tmp_path / "calls.jsonl")])
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1) and reason in err
    assert (tmp_path / "calls.jsonl").read_bytes() == content


def test_a_client_that_waits_gets_through_where_the_clock_is_the_wall_s(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text('{"faults": [{"kind": "rate_burst", "match": "read", "seconds": 2}], "tick": 0}')
    found = {}
    for clock in ("virtual", "wall"):
        with serving("--faults", str(plan), "--clock", clock) as (_, text):
            first = ask(port_of(text), "/rest/api/3/serverInfo")[0]
            time.sleep(2.1)
            found[clock] = first, ask(port_of(text), "/rest/api/3/serverInfo")[0]
    assert found == {"virtual": (429, 429), "wall": (429, 200)}


# Ending


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(number):
    with serving() as (process, text), socket.create_connection(("127.0.0.1", port_of(text))) as open_connection:
        open_connection.sendall(b"GET /rest/api/3/serverInfo HTTP/1.1\r\nHost: x\r\n\r\n")
        assert open_connection.recv(20).startswith(b"HTTP/1.1 200")
        process.send_signal(number)
        assert process.wait(timeout=10) == 0
        assert process.stderr.read() == ""
    with pytest.raises(ConnectionRefusedError):
        ask(port_of(text), "/rest/api/3/serverInfo")


# Failing

MISTAKES = [
    (["serve", "--scenario", "ticket"], "unknown scenario 'ticket'; choose one of transition, subtask"),
    (["serve", "--scenario", "page", "--task", "page-99"], "no task 'page-99' in scenario page; ids look like 'page-01'"),
    (["serve", "--task", "page-01"], "--task needs --scenario"),
    (["serve", "--port", "eighty"], "'eighty' is not a number from 0 to 65535"),
    (["serve", "--port", "65536"], "'65536' is not a number from 0 to 65535"),
    (["serve", "--tokens", "0"], "'0' is not a number from 1 to 1000"),
    (["serve", "--dialect", "xml"], "invalid choice: 'xml'"),
    (["serve", "--base", "jira.test"], "'jira.test' does not start with http:// or https://"),
    (["serve", "--host", "no.such.host.invalid", "--port", "0"], "cannot listen on no.such.host.invalid port 0"),
    (["serve", "--faults", "bad_luck"], "no fault plan 'bad_luck'"),
    (["serve", "--clock", "wall"], "--clock wall needs --faults or --admin"),
    (["serve", "--faults", "slow", "--clock", "sun"], "invalid choice: 'sun'"),
    (["serve", "--record", "nowhere/calls.jsonl"], "cannot write nowhere/calls.jsonl: there is no such folder"),
    (["serve", "--record", "."], "Is a directory"),
    (["canary"], "base_url"),
    (["canary", "https://acme.atlassian.net"], "pass live=True (--live) to allow it"),
    (["canary", "http://acme.atlassian.net", "--live"], "needs an https address"),
    (["canary", "https://acme.atlassian.net", "--live", "--out", "nowhere/c.jsonl"], "give another --out"),
    (["mcp"], "--scenario"),
    (["mcp", "--scenario", "ticket"], "unknown scenario 'ticket'"),
    (["mcp", "--scenario", "page", "--trace", "nowhere/trace.jsonl"], "cannot write nowhere/trace.jsonl: there is no such folder"),
    (["score", "nowhere.jsonl"], "there is no trace file nowhere.jsonl"),
    ([], "command"),
    (["trian"], "invalid choice: 'trian'"),
]


@pytest.mark.parametrize("arguments, reason", MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_sentence(arguments, reason, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1) and err.startswith("atlas-rlvr: ") and reason in err


def test_a_port_in_use_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([*PROGRAM, "serve", "--port", str(port)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"atlas-rlvr: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port\n"


@pytest.mark.parametrize("arguments, package, extra", [
    (["serve"], "uvicorn", "serve"), (["serve"], "orjson", "serve"),
    (["mcp", "--scenario", "page"], "mcp", "mcp")])
def test_without_the_extra_a_command_names_it(arguments, package, extra, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"atlas-rlvr: this command needs {package}: run pip install 'atlas-rlvr[{extra}]'\n"


def test_the_script_and_the_extras_are_declared():
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    assert {"uvicorn", "orjson"} == {re.split(r"\W", one)[0] for one in settings["DEFAULT"]["serve_requirements"].split()}
    assert settings["DEFAULT"]["mcp_requirements"].startswith("mcp>=2")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert "console_scripts" in setup and ".cli:main" in setup


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["mcp", "--help"], ["score", "--help"], ["canary", "--help"]])
def test_help_is_no_failure(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0 and "atlas-rlvr" in capsys.readouterr().out
