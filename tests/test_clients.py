"""Real clients against the site: their recorded requests in process, and the clients themselves over sockets.

The slow tests need jira and atlassian-python-api (extra `clients`) and mcp-atlassian, which wants other versions of what we
use and gets an environment of its own. `ATLAS_RLVR_CLIENTS` names a folder that keeps such environments between runs. They
write results/clients.json.
"""
import json
import os
import re
import signal
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from client_calls import CALLS, CLIENTS
from conftest import ROOT

from atlas_rlvr.environments import SEEDS
from atlas_rlvr.runs import write_json
from atlas_rlvr.wire import handle
from atlas_rlvr.world import CATALOGUE, World, api_error

RECORDED = json.loads((ROOT / "tests/client_requests.json").read_text(encoding="utf-8"))
RESULTS = ROOT / "results/clients.json"
VERSIONS = {"jira": "3.10.5", "atlassian-python-api": "5.0.5", "mcp-atlassian": "0.23.1"}
SERVE = [sys.executable, "-c", "from atlas_rlvr.cli import main; main()", "serve", "--port", "0", "--admin",
         "--tokens", str(len(CLIENTS))]


# What the clients were seen to send


@pytest.mark.parametrize("recorded", RECORDED, ids=[f"{row['client']}: {row['call']}" for row in RECORDED])
def test_a_recorded_request_succeeds_or_earns_the_live_error(recorded):
    world = World(SEEDS["wire"])
    for sent in recorded["requests"]:
        body = json.dumps(sent["body"]) if "body" in sent else ""
        status, _, answer = handle(world, sent["method"], sent["path"], sent.get("query", {}), {}, body)
        assert status == sent["status"], answer
        if "row" in sent:
            assert answer == api_error(sent["row"], **sent.get("values", {}))[2]
        else:
            assert 200 <= status < 300


def test_the_recordings_cover_the_three_clients():
    assert {row["client"].split(",")[0] for row in RECORDED} >= {f"{name} {number}" for name, number in VERSIONS.items()}
    assert len({(row["client"], row["call"]) for row in RECORDED}) == len(RECORDED)


# What the clients were seen to do


@pytest.fixture(scope="module")
def rows():
    return json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]


def test_every_client_has_made_every_call(rows):
    assert [(row["client"], row["call"]) for row in rows] == [(client, call) for client in CLIENTS for call in CALLS]
    assert {row["package"]: row["version"] for row in rows} == VERSIONS


def test_every_gap_has_a_reason_and_nothing_fails(rows):
    assert {row["outcome"] for row in rows} == {"passes", "live error", "gap"}
    assert [row for row in rows if row["outcome"] != "passes" and not row["note"]] == []
    assert [row for row in rows if row["outcome"] != "gap" and not row["requests"]] == []


def test_every_live_error_has_its_source(rows):
    for row in rows:
        assert (row["outcome"] == "live error") == bool(row.get("rows")), row
        assert {str(CATALOGUE[name]["status"]) for name in row.get("rows", ())} <= {row["note"][:3]}


def test_the_extra_holds_what_was_tested():
    text = (ROOT / "settings.ini").read_text(encoding="utf-8")
    found = dict(pin.split("==") for pin in re.search(r"^clients_requirements = (.*)$", text, re.MULTILINE)[1].split())
    assert found == {name: number for name, number in VERSIONS.items() if name != "mcp-atlassian"}


# The clients themselves


def is_here(package: str) -> bool:
    try:
        return version(package) == VERSIONS[package]
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def python_of(tmp_path_factory):
    "A function that gives the Python with a package in it: ours, or that of an environment made for it."
    folder = Path(os.environ.get("ATLAS_RLVR_CLIENTS") or tmp_path_factory.mktemp("clients"))

    def find(package: str) -> Path:
        wanted = [name for name in VERSIONS if (name == "mcp-atlassian") == (package == "mcp-atlassian")]
        if all(map(is_here, wanted)):
            return Path(sys.executable)
        place = folder / "-".join(f"{name}-{VERSIONS[name]}" for name in wanted)
        python = place / "bin" / "python"
        if not (place / "complete").exists():
            venv.create(place, with_pip=True, clear=True)
            pins = [f"{name}=={VERSIONS[name]}" for name in wanted]
            done = subprocess.run([python, "-m", "pip", "install", "-q", *pins], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{' and '.join(pins)} cannot be had: {done.stderr.strip().splitlines()[-1:]}")
            (place / "complete").touch()
        return python
    return find


@pytest.fixture(scope="module")
def url():
    "The address of `atlas-rlvr serve`."
    with subprocess.Popen(SERVE, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield re.search(r"http://\S+", process.stdout.readline())[0]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 0


def keep(rows: list[dict]):
    "Write the rows of one client into the table."
    old = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    others = [row for row in old if row["client"] != rows[0]["client"]]
    every = sorted([*others, *rows], key=lambda row: list(CLIENTS).index(row["client"]))
    write_json(RESULTS, {"schema": 1, "rows": every})


def texts(body) -> list[str]:
    "Every text in a body or in a template of one."
    inner = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    return [body] if isinstance(body, str) else [text for value in inner for text in texts(value)]


def is_told_by(answer, rows: list[str]) -> bool:
    "Whether every text of an error stands in these rows of the catalogue, its placeholders filled."
    patterns = [re.sub(r"\\\{\w+\\\}", ".*", re.escape(text)) for row in rows for text in texts(CATALOGUE[row]["body"])]
    return all(any(re.fullmatch(pattern, text, re.DOTALL) for pattern in patterns) for text in texts(answer))


def complaints(row: dict) -> list:
    "What is wrong with the answers of one call: a failure of ours, or an error that its rows do not tell."
    errors = [entry for entry in row["requests"] if entry["status"] >= 400]
    refused = [entry for entry in errors if row["outcome"] == "live error" and str(entry["status"]) == row["note"][:3]]
    untold = [entry for entry in refused if not is_told_by(entry["answer"], row["rows"])]
    return [entry for entry in errors if entry["status"] >= 500] + untold


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_makes_its_calls(client, url, python_of):
    python, token = python_of(CLIENTS[client][0]), f"synthetic-{list(CLIENTS).index(client) + 1}"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HTTP_PROXY", "http_proxy")}
    done = subprocess.run([python, ROOT / "tests/client_calls.py", client, url, token], cwd=ROOT / "tests", env=env,
                          capture_output=True, text=True, timeout=600, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"client"')]
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["call"] for row in rows] == list(CALLS)
    assert {row["call"]: row["note"] for row in rows if row["outcome"] == "fails"} == {}
    assert [complaint for row in rows for complaint in complaints(row)] == []
    keep([{**row, "requests": [f"{entry['method']} {entry['path']} {entry['status']}" for entry in row["requests"]]}
          for row in rows])
