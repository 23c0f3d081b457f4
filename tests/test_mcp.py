"A scenario over MCP: its tools and no others, API errors as answers, a reset out of band, the same score."

import asyncio
import json
import signal
import subprocess
import sys
from functools import partial

import pytest
from conftest import ROOT
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from atlas_rlvr.cli import main
from atlas_rlvr.environments import SCHEMAS, TOOLS, run_calls
from atlas_rlvr.mcp_server import Rollout, make_server, read_trace, score_trace
from atlas_rlvr.rewards import score
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, system_prompt, task_env
from atlas_rlvr.server import pick_task

PROGRAM = ["-c", "from atlas_rlvr.cli import main; main()"]
BARE = {"fields": {"project": {"key": "ABC"}, "parent": "ABC-123", "issuetype": {"id": "10003"}, "summary": "Ship it"}}


def visit(server, steps):
    "What a client gets from each step: a call `(name, arguments)`, `tools`, or a function to run between calls."
    async def talk():
        async with Client(server) as client:
            return [(await client.list_tools()).tools if step == "tools" else
                    step() if callable(step) else await client.call_tool(*step) for step in steps]
    return asyncio.run(talk())


def answer(result):
    return json.loads(result.content[0].text)


def program(*arguments):
    return stdio_client(StdioServerParameters(command=sys.executable, args=[*PROGRAM, *arguments], cwd=str(ROOT)))


def scored(path):
    "What `atlas-rlvr score` prints."
    command = [sys.executable, *PROGRAM, "score", str(path)]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_exactly_the_scenario_s_tools_with_their_schemas(scenario):
    [tools] = visit(make_server(Rollout(pick_task(scenario, None, "paper"))), ["tools"])
    assert [tool.name for tool in tools] == sorted(TOOLS[scenario])
    for tool in tools:
        function = SCHEMAS[tool.name]["function"]
        assert (tool.description, tool.input_schema) == (function["description"], function["parameters"])


@pytest.mark.parametrize("dialect", ["paper", "wire"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_agent_earns_what_a_policy_earns(scenario, dialect, tmp_path):
    task, path = pick_task(scenario, None, dialect), tmp_path / "trace.jsonl"
    calls = gold_calls(task, dialect=dialect)
    results = visit(make_server(Rollout(task, dialect, path)), calls)
    assert not any(result.is_error for result in results)
    found, expected = score_trace(path), score(scenario, run_calls(task_env(task, dialect), calls), task["gold"])
    assert (found["reward"], found["raw"], found["components"]) == (expected.reward, expected.raw, expected.components)


def test_over_stdio_listed_called_reset_and_scored(tmp_path):
    path = tmp_path / "trace.jsonl"
    calls = gold_calls(pick_task("subtask", "subtask-01", "paper"))
    seen = {}
    steps = ["tools", ("create_issue", BARE), ("close_ticket", {}), *calls, partial(lambda: seen.update(first=scored(path))),
             path.unlink, *calls]
    server = program("mcp", "--scenario", "subtask", "--task", "subtask-01", "--trace", str(path))
    tools, bare, unknown, *rest = visit(server, steps)
    assert [tool.name for tool in tools] == ["create_issue", "get_issue"]
    assert bare.is_error and answer(bare) == {"status": 400, "body": {"errorMessages": [], "errors": {"parent": "data was not an object"}}}
    assert unknown.is_error and unknown.content[0].text == "{'error': 'Tool close_ticket not found.'}"
    assert [answer(rest[i])["body"]["key"] for i in (1, 6)] == ["ABC-124", "ABC-124"]  # the reset gave the key back
    first, second = seen["first"], scored(path)
    assert (first["counts"]["hallucinated"], first["counts"]["duplicates"], first["counts"]["invalid"], first["reward"]) == (1, 1, 1, 0.15)
    assert (second["calls"], second["reward"], second["clean"]) == (3, 1.0, True)


def test_an_interrupt_ends_it():
    process = subprocess.Popen([sys.executable, *PROGRAM, "mcp", "--scenario", "page"], cwd=ROOT, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    process.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}) + "\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "atlas-rlvr"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert "Traceback" not in err and process.returncode == -signal.SIGINT


def test_the_instructions_are_the_system_prompt():
    assert make_server(Rollout(pick_task("page", None, "paper"))).instructions == system_prompt("page")


@pytest.mark.parametrize("arguments", [{}, {"key": "ABC-123"}, {"issueIdOrKey": None}, {"issueIdOrKey": 5, "x": [1]}])
def test_wrong_arguments_reach_the_api(arguments):
    [result] = visit(make_server(Rollout(pick_task("subtask", None, "paper"))), [("get_issue", arguments)])
    assert result.is_error and answer(result)["status"] in (400, 404)


def test_two_servers_do_not_share_a_world():
    task = pick_task("subtask", None, "paper")
    create = gold_calls(task)[1]
    keys = [answer(visit(make_server(Rollout(task)), [create])[0])["body"]["key"] for _ in range(2)]
    assert keys == ["ABC-124", "ABC-124"]


def test_a_new_server_begins_a_new_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    task = pick_task("subtask", None, "paper")
    Rollout(task, trace=path).call("get_issue", {"issueIdOrKey": "ABC-123"})
    Rollout(task, trace=path)
    assert read_trace(path) == ({"scenario": "subtask", "task": "subtask-01", "dialect": "paper"}, [])


HEAD = json.dumps({"scenario": "subtask", "task": "subtask-01", "dialect": "paper"})


@pytest.mark.parametrize("text, reason", [
    ("", "line 1: no line of a trace"), ("{}", "its first line names no scenario"), ("[1]", "line 1: no line of a trace"),
    (HEAD + "\n{", "line 2: no line of a trace"), (HEAD + "\n[]", "line 2: no line of a trace"),
    (HEAD + '\n{"nom": 1}', "line 2: no line of a trace"), (HEAD.replace("subtask-01", "subtask-99"), "no task 'subtask-99'"),
    (HEAD.replace('"subtask"', '"ticket"'), "unknown scenario 'ticket'"),
])
def test_a_damaged_trace_is_one_sentence(text, reason, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        score_trace(path)
    with pytest.raises(SystemExit, match="2"):
        main(["score", str(path)])
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and reason in err


def test_an_older_file_survives_a_trace(tmp_path):
    (tmp_path / "t.jsonl").write_text("precious")
    Rollout(pick_task("subtask", None, "paper"), trace=tmp_path / "t.jsonl")
    assert (tmp_path / "t.aside-1.jsonl").read_text() == "precious"


@pytest.mark.parametrize("head", [{"scenario": ["x"]}, {"task": 5}, {"dialect": "zzz"}], ids=lambda head: next(iter(head)))
def test_a_head_of_wrong_kinds_is_one_sentence(tmp_path, head):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"scenario": "subtask", "task": "subtask-01", "dialect": "paper"} | head) + "\n")
    with pytest.raises(ValueError, match="its first line names no scenario, task and dialect"):
        score_trace(path)
