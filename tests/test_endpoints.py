"""Endpoints: what servers send, how they fail, what stops a run, and that no token is ever written down.

The servers are scripts on this machine; the last test asks a real one that serves the embedded policy."""
import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, pvariance

import pytest
from conftest import ROOT

from atlas_rlvr import baselines, endpoints, rewards, train
from atlas_rlvr.baselines import PARTS, call_message, connect, hashes, play_remote, run_endpoint, script, service_table
from atlas_rlvr.endpoints import (
    ROUTER,
    STOPS,
    Answer,
    Connection,
    Endpoint,
    Refused,
    Unavailable,
    chat_response,
    endpoint_policy,
    find_endpoint,
    new_tally,
    probe,
    read_response,
    redact,
    retry_after,
    scripted_server,
    with_retries,
)
from atlas_rlvr.environments import tool_schemas
from atlas_rlvr.rewards import score
from atlas_rlvr.runs import Recorder, prepare_command, read_lines, run_folder
from atlas_rlvr.scenarios import DATA, gold_calls, load_tasks, messages
from atlas_rlvr.tool_calls import call_from_json, to_http

TASKS = {scenario: load_tasks(scenario) for scenario in ("subtask", "page", "cross")}
SUBTASK, PAGE = TASKS["subtask"][0], TASKS["page"][0]
RUN = {"model": "scripted", "seed": 0}
READ = {"name": "get_issue", "arguments": '{"issueIdOrKey": "ABC-123"}'}
PROBED = chat_response(to_http(call_message([("get_issue", {"issueIdOrKey": "ABC-123"})])))
SECRET = "hf_" + "Sesame" * 5


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    "No tokens of this machine, no waiting; `quiet` holds the seconds that would have been waited."
    for name in endpoints.TOKENS:
        monkeypatch.delenv(name, raising=False)
    waits = []
    monkeypatch.setattr(Connection, "pause", lambda self, seconds: waits.append(seconds))
    return waits


def turn_of(body):
    return sum(message["role"] == "assistant" for message in body["messages"])


def solver(tasks):
    "Right answers for every task, which is known by its prompt."
    scripts = {task["prompt"]: script([[call] for call in gold_calls(task)]) for task in tasks}

    def answer(body):
        return 200, {}, chat_response(to_http(scripts[body["messages"][1]["content"]](body["messages"])))
    return answer


def saying(*replies, after="Done."):
    "A server that sends the given message in each turn, whatever came before."
    def answer(body):
        turn = turn_of(body)
        reply = replies[turn] if turn < len(replies) else {"role": "assistant", "content": after}
        return 200, {}, reply if "choices" in reply else chat_response(reply)
    return answer


def port_of(folder):
    "A port that stays the same for a folder, as an address does between two starts."
    kept = folder.parent / f"{folder.name}.port"
    if not kept.exists():
        with socket.create_server(("127.0.0.1", 0)) as free:
            kept.write_text(str(free.getsockname()[1]))
    return int(kept.read_text())


def play(answer, folder, tasks=(SUBTASK,), repeats=1, probed=True, width=4, **changes):
    "(records, requests) of a run against a scripted server."
    with scripted_server(answer, port_of(folder)) as (url, log):
        connection = Connection(replace(Endpoint(url, "scripted"), **changes))
        connection.probed = probed
        return play_remote(connection, list(tasks), repeats, Recorder(folder), RUN, width), log


def one(answer, folder, **options):
    [record], log = play(answer, folder, **options)
    return record, log


def calls_of(record):
    return [call_from_json(call) for call in record["calls"]]


# What servers send


def entry(name="get_issue", arguments='{"issueIdOrKey": "ABC-123"}', **more):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def assistant(*entries, content=None):
    return {"role": "assistant", "content": content, "tool_calls": list(entries)}


GOOD = {"issueIdOrKey": "ABC-123"}
BLOCK = '<tool_call>\n{"name": "get_issue", "arguments": {"issueIdOrKey": "ABC-123"}}\n</tool_call>'
FIELDS = ("{'fields': {'project': {'key': 'ABC'}, 'parent': {'key': 'ABC-123'}, 'summary': 'Write QA test cases', "
          "'issuetype': {'id': '10003'}, 'assignee': {'accountId': 'admin123'}, 'duedate': None}}")
LINES = '{"fields": {"project": {"key": "ABC"}, "summary": "two\nlines\tand a tab"}}'
SERVED = {  # id: (message, outcomes of its calls, outcome of the rollout, structured turns, text turns, repaired calls)
    "A01-two-values-in-a-block": (
        {"role": "assistant", "content": BLOCK.replace("}}\n", '}}\n{"name": "get_issue", "arguments": {}}\n')},
        ["ok", "api_error"], "ended", 0, 1, 2),
    "A04-encoded-twice": (assistant(entry(arguments=json.dumps(json.dumps(GOOD)))), ["ok"], "ended", 1, 0, 1),
    "A05-empty": (assistant(entry(arguments="")), ["api_error"], "ended", 1, 0, 1),
    "A05-null": (assistant(entry(arguments=None)), ["api_error"], "ended", 1, 0, 1),
    "A05-blanks": (assistant(entry(arguments="   ")), ["api_error"], "ended", 1, 0, 1),
    "A05-null-as-text": (assistant(entry(arguments="null")), ["api_error"], "ended", 1, 0, 1),
    "A05-missing": (assistant({"type": "function", "function": {"name": "get_issue"}}), ["api_error"], "ended", 1, 0, 1),
    "A07-python-literal": (assistant(entry("create_issue", FIELDS)), ["api_error"], "ended", 1, 0, 1),
    "A07-a-set": (assistant(entry("get_issue", "{'a': {'b', 'c'}}")), ["malformed"], "malformed", 1, 0, 0),
    "A08-backslash-outside": (assistant(entry(arguments='{"issueIdOrKey": \\n"ABC-123"}')), ["malformed"], "malformed", 1, 0, 0),
    "A09-control-characters": (assistant(entry("create_issue", LINES)), ["api_error"], "ended", 1, 0, 1),
    "A12-draft-in-a-thought": (
        {"role": "assistant", "content": f"<think>\nI will {BLOCK}\n</think>\n{BLOCK}"}, ["ok"], "ended", 0, 1, 0),
    "A14-prose-about-markup": (
        {"role": "assistant", "content": "Done. A <tool_call> block would be needed to retry.", "tool_calls": []},
        [], "ended", 0, 0, 0),
    "A15-two-at-once": (assistant(entry(id="a"), entry(id="b")), ["ok", "ok"], "ended", 1, 0, 0),
    "A17-empty-ids": (assistant(entry(id=""), entry("nothing", id="")), ["ok", "unknown_tool"], "ended", 1, 0, 0),
    "A17-null-ids": (assistant(entry(id=None), entry("nothing", id=None)), ["ok", "unknown_tool"], "ended", 1, 0, 0),
    "A17-repeated-ids": (assistant(entry(), entry("nothing")), ["ok", "unknown_tool"], "ended", 1, 0, 0),
    "A18-cut-and-called-complete": (
        chat_response(assistant(entry("create_issue", '{"fields": {"summ')), "tool_calls", (9, 2048)),
        ["truncated"], "truncated", 1, 0, 0),
    "A18-cut-by-its-count": (chat_response(assistant(entry()), "tool_calls", (9, 2048)), ["truncated"], "truncated", 1, 0, 0),
    "A18-length-without-calls": (chat_response({"role": "assistant", "content": "I"}, "length"), [], "truncated", 0, 0, 0),
    "A20-function-call": ({"role": "assistant", "content": None, "function_call": READ, "tool_calls": None},
                          ["ok"], "ended", 1, 0, 0),
    "A21-null-content": (assistant(entry(), content=None), ["ok"], "ended", 1, 0, 0),
    "A22-object-as-text": (assistant(entry("create_issue", json.dumps({"fields": "{}"}))), ["api_error"], "ended", 1, 0, 0),
    "A25-unknown": (assistant(entry("create_subtask")), ["unknown_tool"], "ended", 1, 0, 0),
    "A25-nameless": (assistant(entry(None), entry("")), ["unknown_tool", "unknown_tool"], "ended", 1, 0, 0),
    "content-in-parts": ({"role": "assistant", "content": [{"type": "text", "text": BLOCK}]}, ["ok"], "ended", 0, 1, 0),
    "no-object": (assistant(entry(arguments='["ABC-123"]')), ["malformed"], "malformed", 1, 0, 0),
    "empty-message": ({}, [], "ended", 0, 0, 0),
}


@pytest.mark.parametrize("case", SERVED)
def test_what_a_server_may_send(case, tmp_path):
    reply, outcomes, outcome, structured, text, repaired = SERVED[case]
    record, log = one(saying(reply), tmp_path)
    assert [call.outcome for call in calls_of(record)] == outcomes
    assert (record["outcome"], record["reward"] is None) == (outcome, False)
    served = record["served"]
    assert (served["structured"], served["text"], served["calls"], served["repaired"]) == (
        structured, text, len(outcomes), repaired)
    for name in ("malformed", "truncated"):
        assert served[f"{name}_calls"] == outcomes.count(name)
    assert score("subtask", calls_of(record), SUBTASK["gold"]).raw == record["raw"]  # as stored and read back
    assert len(log) == served["requests"] == served["replies"] == (2 if outcome == "ended" and outcomes else 1)


@pytest.mark.parametrize("case", [case for case in SERVED if SERVED[case][2] == "ended" and SERVED[case][1]])
def test_the_next_request_is_valid(case, tmp_path):
    "Arguments are JSON text, ids are unique over the conversation and answered once each, in order."
    reply = SERVED[case][0]
    _, log = one(saying(reply, reply), tmp_path)
    sent = log[-1]["body"]["messages"]
    entries = [e for message in sent for e in message.get("tool_calls", [])]
    ids = [e["id"] for e in entries]
    assert ids and len(set(ids)) == len(ids)
    assert ids == [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    assert all(isinstance(json.loads(e["function"]["arguments"]), dict) and set(e) == {"id", "type", "function"} for e in entries)
    assert all(isinstance(message["content"], str) for message in sent)
    assert log[0]["body"]["messages"] == sent[:2] == messages(SUBTASK)


def test_a_request_says_what_the_paper_says(tmp_path):
    _, log = one(saying(), tmp_path, provider="together", options={"chat_template_kwargs": {"enable_thinking": False}})
    body = {key: value for key, value in log[0]["body"].items() if key != "messages"}
    assert body == {"model": "scripted:together", "tools": tool_schemas("subtask"), "temperature": 0.7, "top_p": 1.0,
                    "max_tokens": 2048, "stream": False, "chat_template_kwargs": {"enable_thinking": False}}
    assert log[0]["path"] == "/v1/chat/completions"


def test_a_field_can_be_taken_away(tmp_path):
    _, log = one(saying(), tmp_path, options={"top_p": None})
    assert "top_p" not in log[0]["body"]


def test_f19_names_are_sent_unchanged_and_do_not_collide(tmp_path):
    _, log = one(saying(), tmp_path, model="Qwen/Qwen3.5-4B:together")
    assert log[0]["body"]["model"] == "Qwen/Qwen3.5-4B:together"
    names = ("Qwen/Qwen3.5-4B", "Qwen_Qwen3.5-4B", "Qwen/Qwen3.5-4B:together", "Qwen%2FQwen3.5-4B")
    folders = {run_folder("page", name, 0, tmp_path) for name in names}
    assert len(folders) == 4 and {folder.parent.name for folder in folders} == {"page"}


def test_f14_twenty_five_turns(tmp_path):
    record, log = one(saying(*[assistant(entry())] * 30), tmp_path)
    assert (record["outcome"], record["turns"], len(log)) == ("turn_cap", 25, 25)
    assert record["reward"] is not None and record["components"]["excess"] < 0


# Failures on the way


def after(n, failures, answer):
    "The server answers n requests, then fails as told, then goes on."
    failures, count = list(failures), iter(range(10**6))

    def flaky(body):
        if next(count) >= n and failures:
            failure = failures.pop(0)
            if isinstance(failure, type):
                raise failure
            return failure
        return answer(body)
    return flaky


HTML = (503, {"Content-Type": "text/html"}, "<html><body>Service Unavailable</body></html>")
EMPTY = {"choices": None, "error": {"code": 502, "message": "upstream"}}
HALF = chat_response({"role": "assistant", "content": ""})
BUSY = (429, {"Retry-After": "2"}, {"error": "rate limit"})
PASSING = {
    "F05-429": (BUSY, 2.0), "500": ((500, {}, {"error": "oops"}), None), "502-empty": ((502, {}, ""), None),
    "F08-html": (HTML, None), "F07-null-choices": ((200, {}, EMPTY), None), "F07-no-choices": ((200, {}, {"choices": []}), None),
    "F07-null-message": ((200, {}, {"choices": [{"message": None, "finish_reason": "stop"}]}), None),
    "F07-filtered": ((200, {}, chat_response({"role": "assistant", "content": ""}, "content_filter")), None),
    "beside-a-message": ((200, {}, HALF | {"error": {"code": 502, "message": "died"}}), None),
    "in-a-choice": ((200, {}, {"choices": [HALF["choices"][0] | {"error": {"code": 502, "message": "died"}}]}), None),
    "html-200": ((200, {"Content-Type": "text/html"}, "<html>Welcome</html>"), None), "a-list": ((200, {}, [1]), None),
    "deep": ((200, {}, "[" * 10**5), None), "408": ((408, {}, ""), None), "reset": (ConnectionError, None),
}


@pytest.mark.parametrize("case", PASSING)
def test_a_passing_failure_changes_nothing(case, tmp_path, quiet):
    "The third request fails once: the same request is made again, and no call is."
    failure, told = PASSING[case]
    record, log = one(after(2, [failure], solver([PAGE])), tmp_path, tasks=[PAGE])
    calm, _ = one(solver([PAGE]), tmp_path / "calm", tasks=[PAGE])
    assert (record["outcome"], record["reward"], record["calls"]) == ("ended", 1.0, calm["calls"])
    assert (len(log), record["served"]["requests"], record["served"]["replies"]) == (5, 5, 4)
    assert log[2]["body"] == log[3]["body"] and quiet == [told or 1.0]


def test_f10_one_page_is_made(tmp_path):
    "Silence after the create: the request is repeated, and the create is not."
    slow = [True]

    def answer(body):
        if turn_of(body) == 2 and slow:
            slow.pop()
            threading.Event().wait(1.5)
        return solver([PAGE])(body)
    record, log = one(answer, tmp_path, tasks=[PAGE], timeout=0.5)
    names = [call.name for call in calls_of(record)]
    assert (record["outcome"], record["reward"], names.count("create_page"), len(log)) == ("ended", 1.0, 1, 5)


def test_f05_waits_as_told_and_goes_on(tmp_path, quiet):
    record, _ = one(after(1, [BUSY, BUSY], solver([SUBTASK])), tmp_path)
    assert (record["outcome"], record["reward"], quiet) == ("ended", 1.0, [2.0, 2.0])


@pytest.mark.parametrize("failure, text", [
    (BUSY, "429 (rate limit)"), (HTML, "503 (Service Unavailable)"), ((200, {}, EMPTY), "502 (upstream)"),
    (ConnectionError, "127.0.0.1")], ids=["429", "html", "null", "reset"])
def test_after_the_last_attempt_it_is_an_error_and_no_zero(failure, text, tmp_path, quiet):
    tasks = TASKS["subtask"][:3]
    unlucky = tasks[1]["prompt"]

    def answer(body):
        if body["messages"][1]["content"] == unlucky and turn_of(body) == 1:
            if isinstance(failure, type):
                raise failure
            return failure
        return solver(tasks)(body)
    records, _ = play(answer, tmp_path, tasks=tasks)
    assert [(r["task"], r["outcome"], r["reward"]) for r in records] == [
        (tasks[0]["id"], "ended", 1.0), (tasks[1]["id"], "error", None), (tasks[2]["id"], "ended", 1.0)]
    assert text in records[1]["error"] and len(records[1]["calls"]) == 1 and records[1]["raw"] is None
    table = service_table(records)
    assert (table["n"], table["mean"], table["errors"], table["repeated"]) == (2, 1.0, 1, 4)
    assert quiet == ([2.0] * 4 if failure is BUSY else [1.0, 2.0, 4.0, 8.0])


def test_the_clients_own_retries_are_off(tmp_path):
    with scripted_server(lambda body: HTML) as (url, log):
        connection = Connection(Endpoint(url, "scripted"))
        with pytest.raises(Unavailable):
            endpoints.ask(connection, tool_schemas("subtask"), new_tally(), messages(SUBTASK))
    assert len(log) == connection.requests == 1


def test_a_bad_request_costs_one_rollout(tmp_path, quiet):
    tasks = TASKS["subtask"][:2]

    def answer(body):
        first = body["messages"][1]["content"] == tasks[0]["prompt"]
        return (400, {}, {"error": {"message": "cannot render"}}) if first else solver(tasks)(body)
    records, _ = play(answer, tmp_path, tasks=tasks)
    assert [r["outcome"] for r in records] == ["error", "ended"] and "400 (cannot render)" in records[0]["error"]
    assert quiet == [] and records[0]["served"]["requests"] == 1


NO_ROOM = {  # server: (status, body)
    "OpenAI": (400, '{"error": {"code": "context_length_exceeded"}}'), "others": (400, '{"message": "prompt is too long"}'),
    "vLLM": (400, '{"message": "The decoder prompt (length 9000) is longer than the maximum model length of 4096."}'),
    "llama.cpp": (400, '{"error": {"code": 400, "message": "the request exceeds the available context size"}}'),
    "inside-200": (200, '{"error": {"code": 400, "message": "the request exceeds the available context size"}}'),
    "TGI": (422, '{"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 3000 and 2048"}'),
}


@pytest.mark.parametrize("server", NO_ROOM)
def test_no_room_left_is_the_policys_doing(server, tmp_path):
    status, text = NO_ROOM[server]
    record, _ = one(after(1, [(status, {}, text)], solver([SUBTASK])), tmp_path)
    assert (record["outcome"], record["reward"], len(record["calls"])) == ("truncated", 0.0, 1)
    assert service_table([record])["repeated"] == 0


def test_a_probe_without_room_says_so(tmp_path):
    with pytest.raises(Refused, match="no room for the probe; give its server a longer context"):
        play(lambda body: (400, {}, NO_ROOM["llama.cpp"][1]), tmp_path, probed=False)


@pytest.mark.parametrize("most, outcome", [("2048", "truncated"), ("8192", "ended"), ("null", "ended")])
def test_a_turn_is_cut_where_its_own_limit_says(most, outcome, tmp_path):
    def answer(body):
        status, headers, reply = solver([SUBTASK])(body)
        return status, headers, reply | {"usage": {"prompt_tokens": 9, "completion_tokens": 3000}}
    found = find_endpoint("http://127.0.0.1:8000/v1", "scripted", options=f'{{"max_tokens": {most}, "top_k": 1}}')
    record, log = one(answer, tmp_path, max_tokens=found.max_tokens, options=found.options)
    assert (record["outcome"], record["max_tokens"], log[0]["body"].get("max_tokens")) == (outcome, *[json.loads(most)] * 2)
    assert record["options"] == {"top_k": 1} == {"top_k": log[0]["body"]["top_k"]}


@pytest.mark.parametrize("value, seconds", [
    ("0", 0.0), ("7", 7.0), ("1.5", 1.5), ("-3", 0.0), ("", None), (None, None), ("soon", None), ("nan", None), ("1e99", None),
    ("Mon, 30 Nov 2026 12:01:00 GMT", 60.0), ("Mon, 30 Nov 2026 11:00:00 GMT", 0.0), ("Mon, 30 Nov 2026 13:01:00 +0100", 60.0),
    ("Mon, 30 Nov 2026 12:01:00", 60.0), ("Mon, 99 Nov 2026 12:01:00 GMT", None)])
def test_retry_after(value, seconds):
    assert retry_after(value, datetime(2026, 11, 30, 12, tzinfo=UTC)) == seconds


def test_a_date_is_waited_for(tmp_path, quiet):
    soon = datetime.fromtimestamp(time.time() + 90, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    record, _ = one(after(0, [(503, {"retry-after": soon}, "")], solver([SUBTASK])), tmp_path)
    assert record["outcome"] == "ended" and len(quiet) == 1 and 60 < quiet[0] <= 90


def test_who_asks_to_wait_for_hours_is_given_up(tmp_path, quiet):
    record, log = one(after(0, [(429, {"Retry-After": "7200"}, "")], solver([SUBTASK])), tmp_path)
    assert (record["outcome"], record["reward"], len(log), quiet) == ("error", None, 1, [])


def test_who_waits_wakes_up_when_the_run_stops(tmp_path, monkeypatch):
    monkeypatch.undo()
    tasks = TASKS["subtask"][:2]
    asked = threading.Event()

    def answer(body):
        if body["messages"][1]["content"] == tasks[0]["prompt"]:
            asked.set()
            return 429, {"Retry-After": "300"}, {}
        asked.wait(30)
        return 401, {}, {}
    start = time.monotonic()
    with pytest.raises(Refused, match="missing, wrong or expired"):
        play(answer, tmp_path, tasks=tasks, width=2)
    assert time.monotonic() - start < 60


def test_text_that_utf_8_cannot_carry(tmp_path):
    record, log = one(saying({**assistant(entry()), "content": "\ud800 odd"}), tmp_path)
    assert (record["outcome"], record["served"]["requests"]) == ("ended", 2)
    assert log[1]["body"]["messages"][2]["content"] == "? odd"


def test_the_audited_reward_stands_beside_the_papers(tmp_path):
    right, _ = one(solver([SUBTASK]), tmp_path)
    wrong, _ = one(saying(assistant(entry("create_issue", '{"fields": {}}'))), tmp_path / "wrong")
    assert (right["reward"], right["audited"], wrong["audited"]) == (1.0, 1.0, 0.0)
    assert service_table([right, wrong])["audited"] == 0.5


def test_only_what_may_be_repeated_is():
    def broken(messages):
        raise ValueError("no")
    with pytest.raises(ValueError, match="no"):
        with_retries(broken)([])


# What stops a run


STOPPING = {
    "401": (401, {"error": "Invalid credentials"}, "the token in ENDPOINT_TOKEN is missing, wrong or expired"),
    "F04-402": (402, {"error": "You have exceeded your monthly included credits"}, "monthly included credits): the account"),
    "403": (403, {"error": "insufficient permissions"}, "may not use this model"),
    "404": (404, {"error": {"message": "no such model"}}, "there is no model `scripted` at this address; check `-p model`"),
    "F01-422": (422, {"error_type": "UNSUPPORTED_OPENAI_PARAMS", "message": "tools, tool_choice not supported"},
                "(tools, tool_choice not supported): the provider that was chosen does not take these requests; choose one"),
    "F03-400": (400, {"error": {"message": "The requested model is not supported by any provider you have enabled.",
                                "code": "model_not_supported"}}, "serve it yourself and give its address as `-p endpoint`"),
    "402-as-text": (200, {"choices": None, "error": {"code": "402", "message": "credit"}}, "no credit left"),
    "402-inside-200": (200, {"choices": None, "error": {"code": 402, "message": "credit"}}, "no credit left"),
}


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("case", STOPPING)
def test_it_stops_at_once_and_keeps_what_is_finished(case, width, tmp_path, capsys, quiet):
    status, body, words = STOPPING[case]
    tasks = TASKS["subtask"]
    bad = tasks[2]["prompt"]

    def answer(sent):
        return (status, {}, body) if sent["messages"][1]["content"] == bad else solver(tasks)(sent)
    with pytest.raises(Refused) as stop:
        play(answer, tmp_path, tasks=tasks, width=width)
    sentence = str(stop.value)
    assert words in sentence and "\n" not in sentence and quiet == []
    kept = read_lines(tmp_path / "rollouts.jsonl")
    assert [r["task"] for r in kept[:2]] == [t["id"] for t in tasks[:2]] if width == 1 else all(r["reward"] == 1.0 for r in kept)
    assert tasks[2]["id"] not in {r["task"] for r in kept} and len(kept) < len(tasks)
    assert f"stopped; a part and no baseline: {len(kept)}/8" in capsys.readouterr().out
    records, log = play(solver(tasks), tmp_path, tasks=tasks)  # paid: the rest is played, and nothing twice
    assert [r["task"] for r in records] == [t["id"] for t in tasks] and len(log) == 4 * (8 - len(kept))


def test_every_stopping_status_names_the_pinned_provider_or_the_setting():
    for status, sentence in STOPS.items():
        error = endpoints.failure(Endpoint(ROUTER, "m", "together"), Answer(status, {}, ""), status)
        assert isinstance(error, Refused) and str(error).startswith(f"router.huggingface.co answered {status}: ")
        assert re.search(r"HF_TOKEN|`together`|`-p |`m:together`|add credit", str(error)), sentence


def test_a_cap_on_requests(tmp_path, capsys):
    tasks = TASKS["subtask"]
    with scripted_server(solver(tasks)) as (url, log):
        connection = Connection(Endpoint(url, "scripted"), max_requests=10)
        with pytest.raises(Refused, match="the cap of 10 requests is reached"):
            play_remote(connection, tasks, 1, Recorder(tmp_path), RUN, 1)
        assert len(log) == 10 and len(read_lines(tmp_path / "rollouts.jsonl")) == 2  # the probe, 4, 4, and one begun
        assert len(play_remote(Connection(Endpoint(url, "scripted")), tasks, 1, Recorder(tmp_path), RUN)) == 8


def test_f01_the_provider_that_refused_is_named(tmp_path):
    def answer(body):
        return 422, {"x-inference-provider": "cheapo"}, STOPPING["F01-422"][1]
    with pytest.raises(Refused, match="provider `cheapo` does not take these requests; choose one that takes tools"):
        play(answer, tmp_path, probed=False)


# The probe


@pytest.mark.parametrize("reply, words", [
    ({"role": "assistant", "content": BLOCK}, "returns tool calls as text, not as `tool_calls`; start the server with a parser"),
    ({"role": "assistant", "content": "I cannot."}, "answered the probe without a tool call ('I cannot.')"),
    ({}, "without a tool call"), ({"choices": []}, "did not answer the probe"),
], ids=["markup", "prose", "empty", "no-choices"])
def test_an_endpoint_without_structured_calls_is_refused(reply, words, tmp_path):
    with pytest.raises(Refused, match=re.escape(words)):
        play(saying(reply), tmp_path, probed=False)
    assert read_lines(tmp_path / "rollouts.jsonl") == []


@pytest.mark.parametrize("answer, words", [
    (HTML, "answered 503 (Service Unavailable); check `-p endpoint`"), ((400, {}, "nonsense"), "answered 400 (nonsense)"),
    ((404, {}, "404 page not found"), "there is no model `scripted`")], ids=["503", "400", "404"])
def test_a_probe_that_fails_stops_the_run(answer, words, tmp_path):
    with pytest.raises(Refused, match=re.escape(words)):
        play(lambda body: answer, tmp_path, probed=False)


def test_the_probe_is_one_call_and_only_where_something_is_missing(tmp_path):
    record, log = one(solver([SUBTASK]), tmp_path, probed=False)
    assert len(log) == 5 and log[0]["body"]["temperature"] == 0.0 and record["served"]["requests"] == 4
    assert log[0]["body"]["messages"] == log[1]["body"]["messages"] and log[0]["body"]["tools"] == log[1]["body"]["tools"]
    again, log = one(solver([SUBTASK]), tmp_path, probed=False)
    assert (again, log) == (record, [])


def test_nobody_is_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Refused, match="did not answer the probe: 127.0.0.1: ConnectError"):
        probe(Connection(Endpoint(f"http://127.0.0.1:{port}/v1", "m")), messages(SUBTASK), tool_schemas("subtask"))


# Side by side


def test_f11_results_keep_the_order_of_the_tasks(tmp_path):
    tasks = TASKS["subtask"]
    right, wrong = solver(tasks), tasks[3]["prompt"]

    def answer(body):
        prompt = body["messages"][1]["content"]
        if prompt == tasks[0]["prompt"]:
            threading.Event().wait(0.2)
        return saying()(body) if prompt == wrong else right(body)
    many, _ = play(answer, tmp_path / "4", tasks=tasks, repeats=2, width=4)
    single, _ = play(answer, tmp_path / "1", tasks=tasks, repeats=2, width=1)
    rewards = [[(r["task"], r["generation"], r["reward"], r["calls"]) for r in records] for records in (many, single)]
    assert rewards[0] == rewards[1] and [r["reward"] for r in many].count(0.0) == 2
    assert read_lines(tmp_path / "4" / "rollouts.jsonl") == many
    assert [(r["task"], r["generation"]) for r in many] == [(t["id"], g) for g in (0, 1) for t in tasks]


def test_two_providers_are_told_apart(tmp_path):
    tasks = TASKS["subtask"][:2]

    def answer(body):
        status, _, reply = solver(tasks)(body)
        if turn_of(body) == 3:
            return status, {}, reply | {"provider": "inside"}
        return status, {"X-Inference-Provider": "novita" if turn_of(body) else "together"}, reply
    records, _ = play(answer, tmp_path, tasks=tasks)
    assert [r["served"]["providers"] for r in records] == [{"together": 1, "novita": 2, "inside": 1}] * 2
    table = service_table(records)
    assert table["providers"] == "inside 2, novita 4, together 2"
    assert (table["n"], table["requests"], table["structured"], table["calls"], table["completion_tokens"]) == (2, 8, 1.0, 6, 72)


def test_the_share_of_structured_calls(tmp_path):
    record, _ = one(saying(assistant(entry()), {"role": "assistant", "content": BLOCK}), tmp_path)
    assert service_table([record])["structured"] == 0.5


# Kill and resume


KILLED = """
import sys
from pathlib import Path
from atlas_rlvr.baselines import connect, play_remote
from atlas_rlvr.runs import Recorder
from atlas_rlvr.scenarios import load_tasks
connection = connect(sys.argv[1], "scripted")
connection.probed = True
play_remote(connection, load_tasks("subtask"), 2, Recorder(Path(sys.argv[2])), {"model": "scripted", "seed": 0}, 2)
"""


def test_a_killed_run_goes_on_where_it_was(tmp_path, monkeypatch):
    tasks, held = TASKS["subtask"], threading.Event()
    count = iter(range(10**6))

    def answer(body):
        if next(count) >= 22 and not held.is_set():  # in the sixth rollout
            held.wait(60)
        return solver(tasks)(body)
    monkeypatch.undo()  # time passes here
    with scripted_server(answer) as (url, log):
        process = subprocess.Popen([sys.executable, "-c", KILLED, url, str(tmp_path)], cwd=ROOT,
                                   env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
        while len(log) < 23 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        held.set()
        before = read_lines(tmp_path / "rollouts.jsonl")
        connection = connect(url, "scripted")
        connection.probed = True
        first = len(log)
        records = play_remote(connection, tasks, 2, Recorder(tmp_path), RUN)
    assert 2 <= len(before) < 16 and records[:len(before)] == before
    assert [(r["task"], r["generation"]) for r in records] == [(t["id"], g) for g in (0, 1) for t in tasks]
    assert len(log) - first == 4 * (16 - len(before)) and {r["reward"] for r in records} == {1.0}


def test_errors_are_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "run_folder", lambda *names, **more: tmp_path / "run")
    tasks = TASKS["subtask"]

    def answer(body):
        return HTML if body["messages"][1]["content"] == tasks[0]["prompt"] else solver(tasks)(body)

    def run(answer):
        with scripted_server(answer) as (url, log):
            connection = Connection(Endpoint("http://127.0.0.1/v1", "scripted"))  # the address stays the same
            connection.client, connection.probed = endpoints.make_client(Endpoint(url, "scripted")), True
            return run_endpoint(connection, "subtask", repeats=1), len(log)
    records, _ = run(answer)
    assert [r["outcome"] for r in records] == ["error"] + ["ended"] * 7
    again, requests = run(solver(tasks))
    assert [r["outcome"] for r in again] == ["ended"] * 8 and requests == 4 and again[1:] == records[1:]
    assert [r["outcome"] for r in read_lines(tmp_path / "run" / "rollouts.aside-1.jsonl")] == ["error"]


@pytest.mark.parametrize("change", [{"model": "other"}, {"options": {"top_k": 1}}, {"max_tokens": 9}])
def test_a_folder_holds_rollouts_of_one_source(change, tmp_path):
    with scripted_server(solver([SUBTASK])) as (url, _):
        for changed in ({}, change):
            connection = Connection(replace(Endpoint(url, "scripted"), **changed))
            connection.probed = True
            if changed:
                with pytest.raises(ValueError, match="give this run another seed"):
                    play_remote(connection, [SUBTASK], 1, Recorder(tmp_path), RUN)
            else:
                play_remote(connection, [SUBTASK], 1, Recorder(tmp_path), RUN)
        with pytest.raises(ValueError, match="another endpoint"):
            baselines.check_source(Recorder(tmp_path), {})


# The same as training


def test_f17_one_scorer_parser_and_environment():
    assert baselines.score is score is rewards.score
    assert train.tool_schemas is baselines.tool_schemas and train.build_trace is baselines.build_trace
    assert train.messages is baselines.messages and train.task_env is baselines.task_env
    found = hashes("subtask")
    assert found["rewards"] == rewards.REWARD_HASH and len(set(found.values())) == len(found) == 7
    assert {name for name in found if found[name] != hashes("page")[name]} == {"tasks", "system_prompt", "tools"}


def test_the_hash_of_the_environments_covers_what_they_import():
    def reached(name, seen):
        if name not in seen and (path := ROOT / "atlas_rlvr" / f"{name}.py").is_file():
            seen.add(name)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("atlas_rlvr")):
                    inner = (node.module or "").removeprefix("atlas_rlvr").strip(".")
                    for found in [inner] if inner else [alias.name for alias in node.names]:
                        reached(found, seen)
        return seen
    assert reached("environments", set()) <= {name for part in PARTS.values() for name in part}


def test_the_hash_of_the_environments_covers_the_data_they_read():
    texts = [(ROOT / "atlas_rlvr" / f"{name}.py").read_text(encoding="utf-8") for name in PARTS["environments"]]
    read = {name for text in texts for name in re.findall(r'load_data\("(\w+)\.json"\)', text)}
    errors = {"errors_jira", "errors_confluence", "errors_tools"}  # read by one loop, not by name
    assert set(baselines.READ) == read - {"tools", "site"} | errors


@pytest.mark.parametrize("name, changed", [("tasks", "scenarios.DATA"), ("environments", "baselines.load_data")])
def test_another_request_or_another_error_is_another_hash(name, changed, monkeypatch):
    before = hashes("page")
    row = dict(DATA["page"]["tasks"][0], prompt="Do something else.")
    other = {"scenarios.DATA": DATA | {"page": DATA["page"] | {"tasks": [row]}}, "baselines.load_data": lambda name: "Not found."}
    monkeypatch.setattr(f"atlas_rlvr.{changed}", other[changed])
    assert {part for part, value in hashes("page").items() if value != before[part]} == {name}


def test_records_carry_the_hashes(tmp_path):
    record, _ = one(solver([SUBTASK]), tmp_path, provider="together")
    assert record["hashes"] == hashes("subtask") and record["reward_hash"] == rewards.REWARD_HASH
    assert (record["asked"], record["model"], record["temperature"], record["phase"]) == (
        "scripted:together", "scripted", 0.7, "before")


# Tokens


def test_the_token_goes_to_its_own_address_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    _, log = one(solver([SUBTASK]), tmp_path)
    assert all(request["headers"]["authorization"] == "Bearer none" for request in log)
    monkeypatch.setenv("ENDPOINT_TOKEN", "sesame-sesame\n")
    _, log = one(solver([SUBTASK]), tmp_path / "2")
    assert all(request["headers"]["authorization"] == "Bearer sesame-sesame" for request in log)
    assert endpoints.token(Endpoint(ROUTER, "m")) == SECRET
    assert endpoints.token_name(Endpoint("https://x.endpoints.huggingface.cloud/v1", "m")) == "HF_TOKEN"
    assert endpoints.token_name(Endpoint("https://evilhuggingface.co/v1", "m")) == "ENDPOINT_TOKEN"


def echoing(body):
    "A server that repeats the token in its answers: in an error, in a header, in a message and in arguments."
    if body["messages"][1]["content"] == TASKS["subtask"][0]["prompt"]:
        return 500, {}, {"error": f"bad token {SECRET}"}
    arguments = json.dumps({"issueIdOrKey": SECRET})
    reply = {"role": "assistant", "content": f"your token is {SECRET}", "tool_calls": [entry(arguments=arguments)]}
    return 200, {"x-inference-provider": SECRET}, chat_response(reply)


def test_no_token_in_a_record_a_log_or_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ENDPOINT_TOKEN", SECRET)
    records, log = play(echoing, tmp_path, tasks=TASKS["subtask"][:2])
    assert log[0]["headers"]["authorization"] == f"Bearer {SECRET}" and records[0]["outcome"] == "error"
    assert "[ENDPOINT_TOKEN]" in records[0]["error"] and "[ENDPOINT_TOKEN]" in records[1]["messages"][2]["content"]
    stopped = []
    for status in STOPS:
        with pytest.raises(Refused) as stop:
            play(lambda body, status=status: (status, {}, {"error": f"Bearer {SECRET}"}), tmp_path / str(status), probed=False)
        stopped.append("".join(traceback.format_exception(stop.value)))
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "[ENDPOINT_TOKEN]" in written and all("[ENDPOINT_TOKEN]" in text for text in stopped)
    output = capsys.readouterr()
    assert not [text for text in (written, output.out, output.err, repr(records), *stopped) if SECRET in text or "Sesame" in text]


def test_a_connection_does_not_show_its_token(monkeypatch):
    monkeypatch.setenv("ENDPOINT_TOKEN", SECRET)
    connection = connect("http://127.0.0.1:9/v1", "m")
    with pytest.raises(Unavailable) as error:
        endpoints.ask(connection, [], new_tally(), [])
    shown = [repr(connection), repr(connection.endpoint), repr(connection.client), str(error.value)]
    assert not [text for text in shown if SECRET in text]
    assert error.value.__suppress_context__


def test_what_looks_like_a_token_is_taken_out():
    assert redact(f"a {'hf_' + 'x' * 30} b {'sk-' + 'y' * 20}") == "a [token] b [token]"
    assert redact("hf_token and task-1234567890123456789") == "hf_token and task-1234567890123456789"


@pytest.mark.parametrize("written", [r"abc\/def+\"ghi", r"abc/def+\\\"ghi", "abc/def+\"ghi"])
def test_a_token_is_found_with_the_backslashes_of_json(written, monkeypatch):
    monkeypatch.setenv("ENDPOINT_TOKEN", "abc/def+\"ghi")
    assert redact(f"bad token {written}!") == "bad token [ENDPOINT_TOKEN]!"


# Bad input


BAD = {
    "no-token": ({"endpoint": "router", "model": "Qwen/Qwen3-1.7B"}, "set the environment variable HF_TOKEN"),
    "no-token-elsewhere": ({"endpoint": "https://x.org/v1", "model": "m"}, "no token for x.org: set the environment variable ENDP"),
    "no-address": ({"endpoint": "127.0.0.1:8000", "model": "m"}, "must be `router` or a base URL"),
    "misspelt": ({"endpoint": "ruoter", "model": "m"}, "must be `router` or a base URL"),
    "password": ({"endpoint": f"https://me:{SECRET}@x.org/v1", "model": "m"}, "without user, password, query or token"),
    "query": ({"endpoint": f"https://x.org/v1?key={SECRET}", "model": "m"}, "without user, password, query or token"),
    "token-in-the-path": ({"endpoint": f"http://127.0.0.1/{SECRET}/v1", "model": "m"}, "without user, password, query or token"),
    "auto": ({"endpoint": "router", "model": "auto"}, "needs the name of a model"),
    "token-as-model": ({"endpoint": "router", "model": SECRET}, "needs the name of a model"),
    "unknown-provider": ({"endpoint": "router", "model": "m", "provider": "togehter"}, "did you mean `together`?"),
    "token-as-provider": ({"endpoint": "router", "model": "m", "provider": SECRET}, "unknown provider `[token]`"),
    "token-as-provider-elsewhere": ({"endpoint": "http://127.0.0.1/v1", "model": "m", "provider": SECRET}, "provider `[token]`"),
    "two-providers": ({"endpoint": "router", "model": "m:novita", "provider": "together"}, "name the provider once"),
    "options": ({"endpoint": "http://127.0.0.1/v1", "model": "m", "options": "top_k=1"}, "must be a JSON object"),
    "options-list": ({"endpoint": "http://127.0.0.1/v1", "model": "m", "options": "[1]"}, "must be a JSON object"),
    "options-fixed": ({"endpoint": "http://127.0.0.1/v1", "model": "m", "options": '{"temperature": 1}'}, "without messages, model"),
    "options-no-tokens": ({"endpoint": "http://127.0.0.1/v1", "model": "m", "options": '{"max_tokens": 0}'}, "a positive number"),
    "options-token": ({"endpoint": "http://127.0.0.1/v1", "model": "m", "options": f'{{"k": "{SECRET}"}}'}, "without a token"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_repeats_no_secret(case):
    values, words = BAD[case]
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        find_endpoint(**values)
    assert "\n" not in str(error.value) and "Sesame" not in str(error.value)


@pytest.mark.parametrize("name, value, url, words", [
    ("ENDPOINT_TOKEN", SECRET, "http://x.org/v1", "unencrypted; use https"),
    ("ENDPOINT_TOKEN", "two words", "https://x.org/v1", "holds no token"),
    ("HF_TOKEN", "päss", "router", "holds no token"), ("HF_TOKEN", SECRET, "router", "HF_HUB_OFFLINE is set")])
def test_tokens_that_cannot_be_sent(name, value, url, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words) as error:
        find_endpoint(url, "m")
    assert value not in str(error.value)


def command(*words):
    return prepare_command(["papermill", "nbs/04_baselines.ipynb", "-p", "scenario", "subtask", *words])


@pytest.fixture
def project(tmp_path, monkeypatch):
    "A project with the page of baselines."
    (tmp_path / "nbs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "settings.ini").write_text("[DEFAULT]\nlib_path = atlas_rlvr\n")
    shutil.copy(ROOT / "nbs" / "04_baselines.ipynb", tmp_path / "nbs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words, message", [
    (["-p", "provider", "together"], "parameter `provider` needs an endpoint; add `-p endpoint router`"),
    (["-p", "max_requests", "9"], "parameter `max_requests` needs an endpoint"),
    (["-p", "model", "Qwen/Qwen3.5-4B:together"], "a provider after the colon needs an endpoint"),
    (["-p", "endpoint", "router", "-p", "model", "m"], "set the environment variable HF_TOKEN"),
    (["-p", "endpoint", "router", "-p", "model", "m", "-p", "concurrency", "0"], "`concurrency` must be at least 1"),
    (["-p", "endpiont", "router"], "has no parameter `endpiont`, did you mean `endpoint`?"),
    (["-p", "endpoint", "http://127.0.0.1:9/v1", "-p", "model", "m"], "127.0.0.1 (model `m`) did not answer the probe"),
], ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_a_command_is_refused_before_anything_is_opened(words, message, project):
    with pytest.raises(ValueError, match=re.escape(message)):
        command(*words)
    assert not any((project / "results").iterdir())


def misspelt(body):
    return 404, {}, {"error": {"message": f"The model {body['model']} does not exist"}}


def test_a_misspelt_model_ends_the_command_with_one_line(project):
    papermill = [shutil.which("papermill", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))]
    with scripted_server(misspelt) as (url, log):
        done = subprocess.run([*papermill, "nbs/04_baselines.ipynb", "-p", "model", "Qwen/Qwn3", "-p", "endpoint", url],
                              cwd=project, env=os.environ | {"PYTHONPATH": str(ROOT), "ENDPOINT_TOKEN": SECRET}, check=False,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(log)) == (2, "", 1)
    assert done.stderr.strip() == ("127.0.0.1 answered 404 (The model Qwen/Qwn3 does not exist): there is no model `Qwen/Qwn3` "
                                   "at this address; check `-p model` and `-p endpoint` (up to /v1)")
    assert not any((project / "results").iterdir())


@pytest.mark.slow
def test_the_whole_command(project):
    "A run that loses its credit exits with an error, keeps its rollouts and no token; the next start finishes it."
    everything = [task for split in ("train", "held_out") for task in load_tasks("subtask", split)]
    credit = iter([True] * 41 + [False] * 100)

    def poor(body):
        return solver(everything)(body) if next(credit) else (402, {}, {"error": f"no credit for {SECRET}"})

    def run(answer):
        with scripted_server(answer, port_of(project)) as (url, _):
            words = ["-p", "model", "Qwen/scripted", "-p", "endpoint", url, "-p", "seed", "3", "-k", "python3"]
            return subprocess.run([sys.executable, "-m", "papermill", "nbs/04_baselines.ipynb", *words], cwd=project, check=False,
                                  env=os.environ | {"PYTHONPATH": str(ROOT), "ENDPOINT_TOKEN": SECRET},
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True)
    stopped = run(poor)
    folder = run_folder("subtask", "Qwen/scripted", 3, project)
    assert stopped.returncode != 0 and "the account has no credit left" in stopped.stderr
    assert 0 < len(read_lines(folder / "rollouts.jsonl")) < 40
    done = run(solver(everything))
    assert done.returncode == 0, done.stderr[-2000:]
    records = read_lines(folder / "rollouts.jsonl")
    assert len(records) == sum(len(load_tasks("subtask", split)) * n for split, n in baselines.REPEATS.items())
    assert {record["reward"] for record in records} == {1.0}
    written = "".join(path.read_text(errors="replace") for path in project.rglob("*") if path.is_file())
    assert "Sesame" not in written + stopped.stdout + stopped.stderr + done.stdout + done.stderr
    assert "completion_tokens" in (project / "results" / "subtask" / "04_baselines.ipynb").read_text()


# A real server


def interval(one, other):
    "Half the width of a 99 % interval of the difference of two means."
    return 2.58 * (pvariance(one) / len(one) + pvariance(other) / len(other)) ** 0.5


@pytest.fixture
def real_server(tmp_path):
    "`transformers serve` with the embedded policy; it samples only where the folder of the model says so."
    for name in ("fastapi", "openai", "uvicorn", "torch"):
        pytest.importorskip(name)
    folder = tmp_path / "policy"
    shutil.copytree(ROOT / "atlas_rlvr" / "data" / "policy", folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True, "top_k": 0, "top_p": 1.0}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32", "--reasoning", "off",
             "--default-seed", "0"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([str(Path(sys.executable).parent / "transformers"), *words], stdout=log, stderr=log,
                                   env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})
    try:
        wait_for(port, process)
        yield Endpoint(f"http://127.0.0.1:{port}/v1", str(folder), max_tokens=300)
    finally:
        process.terminate()
        process.wait()


def wait_for(port, process, seconds=300):
    for _ in range(seconds):
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, "the server has ended"
        threading.Event().wait(1)
    pytest.fail("the server did not start")


def prompt_length():
    "Tokens of the first prompt as training renders it."
    from atlas_rlvr.policy import load_policy
    _, tokenizer = load_policy()
    text = baselines.prompt_text(tokenizer, baselines.prompt_template(tokenizer), messages(SUBTASK), tool_schemas("subtask"))
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.slow
def test_a_real_server_gives_the_mean_of_the_policy_in_this_process(real_server, tmp_path, monkeypatch):
    repeats = int(os.environ.get("ATLAS_RLVR_REPEATS", "5"))
    monkeypatch.setattr(baselines, "run_folder", lambda *names, **more: tmp_path / "here")
    here = baselines.run_baseline("subtask", "embedded", repeats=repeats)
    there = play_remote(Connection(real_server), load_tasks("subtask"), repeats, Recorder(tmp_path / "there"),
                        {"model": "embedded", "seed": 0}, 1)
    table = service_table(there)
    assert probe(Connection(real_server), messages(SUBTASK), tool_schemas("subtask"))["prompt_tokens"] == prompt_length()
    print(json.dumps({"here": fmean(r["reward"] for r in here), "there": table}))
    assert (table["errors"], table["structured"], len(there)) == (0, 1.0, len(here))
    one, other = ([r["reward"] for r in records] for records in (here, there))
    assert abs(fmean(one) - fmean(other)) <= interval(one, other)


def test_a_policy_can_be_used_alone():
    "The same function drives an episode of one's own."
    with scripted_server(solver([SUBTASK])) as (url, _):
        policy = endpoint_policy(connect(url, "scripted"), tool_schemas("subtask"), new_tally())
        talk, outcome = baselines.run_episode(policy, baselines.task_env(SUBTASK), messages(SUBTASK), tool_schemas("subtask"))
    assert outcome == "ended" and score("subtask", baselines.build_trace(talk), SUBTASK["gold"]).reward == 1.0
    assert read_response(Endpoint(ROUTER, "m"), Answer(200, {}, json.dumps(PROBED))) == PROBED
