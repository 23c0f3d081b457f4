"""Scaffolds: the same calls in three forms, what a turn out of form costs, and runs that nothing can be mistaken for."""
import json
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from conftest import ROOT

from atlas_rlvr import baselines, runs, scaffolds
from atlas_rlvr.baselines import call_message, connect, run_episode, script
from atlas_rlvr.endpoints import Connection, Refused, chat_response, make_client, scripted_server
from atlas_rlvr.environments import tool_schemas
from atlas_rlvr.repl import missing
from atlas_rlvr.rewards import score_task
from atlas_rlvr.runs import plain_runs, read_lines, read_run, record_key, run_folder
from atlas_rlvr.scaffolds import (
    SCAFFOLDS,
    Rollout,
    costs,
    format_rate,
    in_form,
    local_policy,
    play_chunk,
    read_code,
    read_plan,
    read_turn,
    recite,
    refusal,
    run_scaffold,
    scaffold_prompt,
    scaffold_table,
)
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks, messages, task_env
from atlas_rlvr.tool_calls import build_trace

SUBTASK = load_tasks("subtask")[0]
RIGHT = gold_calls(SUBTASK)
READ = ("get_issue", {"issueIdOrKey": "ABC-123"})
needs_repl = pytest.mark.skipif(bool(missing()), reason="the Python prompt is not installed")
each_scaffold = pytest.mark.parametrize("scaffold", ["react", "plan", pytest.param("repl", marks=needs_repl)])


def play(scaffold, turns, task=SUBTASK):
    [record] = play_chunk(scaffold, [(task, 0)], recite(turns), {"model": f"script+{scaffold}", "seed": 0})
    return record


def block(code):
    return f"```python\n{code}\n```"


# The three loops


@each_scaffold
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gold_earns_all_and_an_early_stop_nothing(scenario, scaffold):
    for task in load_tasks(scenario):
        calls = gold_calls(task)
        record = play(scaffold, in_form(scaffold, calls), task)
        assert (record["outcome"], record["reward"], format_rate([record])) == ("ended", 1.0, 1.0)
        assert [(call["name"], call["arguments"]) for call in record["calls"]] == calls
        assert record["cost"] | {"extra_turns": 1, "code_errors": 0} == record["cost"]
        early = play(scaffold, in_form(scaffold, calls[:1]), task)
        assert (early["outcome"], early["reward"]) == ("ended", 0.25 if scenario == "transition" else 0.0)


@each_scaffold
def test_the_trace_is_that_of_the_plain_loop(scaffold):
    talk, _ = run_episode(script([[call] for call in RIGHT]), task_env(SUBTASK), messages(SUBTASK), tool_schemas("subtask"))
    record = play(scaffold, in_form(scaffold, RIGHT))
    assert build_trace(record["messages"]) == build_trace(talk)
    assert record["components"] == score_task(SUBTASK, build_trace(talk)).components


@each_scaffold
def test_a_turn_out_of_form_is_recovered_and_counted(scaffold):
    right = in_form(scaffold, RIGHT)
    record = play(scaffold, [said for text in right for said in ("Let me think.", text)])
    assert (record["outcome"], record["reward"], record["cost"]["out_of_form"]) == ("ended", 1.0, len(right))
    assert format_rate([record]) == 0.5 and refusal([record]) == ""
    assert record["dialogue"][3]["content"].startswith("Format error: ")


DRAFTS = {"react": "Perhaps\nAction: create_issue\nAction Input: {}", "plan": "1. Cook.\n2. Eat.",
          "repl": "```python\ncreate_issue(fields={})\n```"}


@each_scaffold
@pytest.mark.parametrize("thought", ["<think>{}\nNo.</think>\n", "{}\nNo.</think>\n"], ids=["tagged", "opened by the template"])
def test_what_is_drafted_in_a_thought_is_not_done(scaffold, thought):
    turns = in_form(scaffold, RIGHT)
    record = play(scaffold, [thought.format(DRAFTS[scaffold]) + text for text in turns])
    assert (record["reward"], record["outcome"], record["cost"]["out_of_form"]) == (1.0, "ended", 0)
    assert [call["name"] for call in record["calls"]] == [name for name, _ in RIGHT]


@each_scaffold
def test_three_in_a_row_end_the_rollout_and_keep_its_calls(scaffold):
    record = play(scaffold, [*in_form(scaffold, RIGHT)[:2], "Hm.", "Hm.", "Hm.", *in_form(scaffold, RIGHT)])
    assert (record["outcome"], record["cost"]["turns"], record["cost"]["out_of_form"]) == ("malformed", 5, 3)
    assert [call["name"] for call in record["calls"]] == [name for name, _ in RIGHT][:1 + (scaffold != "plan")]


@each_scaffold
def test_the_model_is_asked_in_turns(scaffold):
    record = play(scaffold, ["Hm.", *in_form(scaffold, [READ, *RIGHT])])
    roles = [message["role"] for message in record["dialogue"]]
    assert roles[:3] == ["system", "user", "assistant"] and "system" not in roles[1:]
    assert all(one != other for one, other in pairwise(roles))
    assert not any(message.keys() - {"role", "content"} for message in record["dialogue"])


@each_scaffold
@pytest.mark.parametrize("reply, outcome", [(None, "truncated"), ({"content": "Thought:", "finish_reason": "length"}, "truncated"),
                                            ("", "malformed"), ({}, "malformed"), (7, "malformed"),
                                            (call_message([READ]), "malformed")])
def test_replies_that_make_no_call(reply, outcome, scaffold):
    [record] = play_chunk(scaffold, [(SUBTASK, 0)], lambda talks: [reply for _ in talks], {"model": "m", "seed": 0})
    assert (record["outcome"], record["calls"], record["reward"]) == (outcome, [], 0.0)
    assert record["cost"]["out_of_form"] == record["cost"]["turns"] == {"malformed": 3}.get(outcome, reply is not None)


@each_scaffold
def test_a_lost_connection_is_an_error_with_its_calls(scaffold):
    def policy(talks):
        if len(talks[0]) > 5:
            raise TimeoutError("gone")
        return recite(in_form(scaffold, [READ, *RIGHT]))(talks)
    [record] = play_chunk(scaffold, [(SUBTASK, 0)], policy, {"model": "m", "seed": 0})
    assert (record["outcome"], record["reward"], record["audited"]) == ("error", None, None)
    assert record["error"] == "TimeoutError: gone" and record["calls"] and format_rate([record]) is None


@each_scaffold
def test_rollouts_of_a_chunk_do_not_mix(scaffold):
    tasks = load_tasks("subtask")[:4]

    def policy(talks):
        by_prompt = {task["prompt"]: task for task in tasks}
        whose = [next(task for prompt, task in by_prompt.items() if prompt in talk[1]["content"]) for talk in talks]
        turns = [in_form(scaffold, gold_calls(task)[:1 + tasks.index(task)]) for task in whose]
        return [recite(turn)([talk])[0] for turn, talk in zip(turns, talks, strict=True)]
    records = play_chunk(scaffold, [(task, n) for n, task in enumerate(tasks)], policy, {"model": "m", "seed": 0})
    assert [record["generation"] for record in records] == [0, 1, 2, 3]
    for n, (task, record) in enumerate(zip(tasks, records, strict=True), 1):
        assert [(call["name"], call["arguments"]) for call in record["calls"]] == gold_calls(task)[:n]


# ReAct


@pytest.mark.parametrize("text, outcome, reward", [
    ("Action: create_subtask\nAction Input: {}", "unknown_tool", 0.8),
    ("Thought: a\nThought: b\nAction: `get_issue`\nAction Input: ```json\n{\"issueIdOrKey\": \"NO-1\"}\n```", "api_error", 0.95),
    ("Action: get_issue\nAction Input: {'issueIdOrKey': 'ABC-123'}\nObservation: made up\nFinal Answer: done", "ok", 0.95)])
def test_a_call_more_is_judged_as_in_the_plain_loop(text, outcome, reward):
    record = play("react", [text, *in_form("react", RIGHT)])
    assert (record["calls"][0]["outcome"], record["reward"], record["cost"]["out_of_form"]) == (outcome, reward, 0)
    assert "made up" not in json.dumps(record["calls"])


@pytest.mark.parametrize("text", [
    "", "Thought: hm", "Action: get_issue", "Action Input: {}", "Action: get_issue\nAction Input: [1]",
    "Action: get_issue\nAction Input: ABC-123", "Action: get_issue\nAction Input: {\"a\": 1", "Action: get_issue\nAction Input:",
    "Action Input: {}\nAction: get_issue", "Action: a\nAction Input: {}\nAction: b\nAction Input: {}",
    "Action: a\nAction Input: {}\nFinal Answer: done", "Observation: {}\nAction: a\nAction Input: {}", "Skip: no",
    "Final Answer: a\nFinal Answer: b", "Action: \nAction Input: {}", '<tool_call>{"name": "a", "arguments": {}}</tool_call>'])
def test_turns_that_are_out_of_form(text):
    assert isinstance(read_turn(text), str) and read_turn(text).endswith(".")


def test_a_policy_that_reads_for_ever_meets_the_cap():
    record = play("react", in_form("react", [READ] * 99))
    assert (record["outcome"], len(record["calls"]), record["cost"]["turns"]) == ("turn_cap", 25, 25)
    assert record["calls"][-1].get("outcome", "unexecuted") == "unexecuted" and record["calls"][-2]["outcome"] == "ok"


# Plans


def test_a_step_is_repeated_until_it_is_accepted():
    wrong = ("create_issue", {"fields": {"summary": "x"}})
    actions = in_form("plan", [RIGHT[0], wrong, *RIGHT[1:]])[1:]
    record = play("plan", ["1. Read.\n2. Create.\n3. Read.", *actions])
    assert [call["outcome"] for call in record["calls"]] == ["ok", "api_error", "ok", "ok"]
    assert "The call was refused" in record["dialogue"][7]["content"] and record["outcome"] == "ended"


def test_a_step_that_stays_refused_is_left_after_three_calls():
    wrong = in_form("plan", [("get_issue", {"issueIdOrKey": "NO-1"})])[1]
    record = play("plan", ["1. Read.\n2. Read again.", *[wrong] * 3, "Skip: there is no such issue"])
    assert ([call["outcome"] for call in record["calls"]], record["outcome"]) == (["api_error"] * 3, "ended")
    assert record["cost"]["turns"] == 5 and record["cost"]["extra_turns"] == 2


@pytest.mark.parametrize("text, steps", [("1. Read\n2) Write it. \n\n 3. Check", ["Read", "Write it.", "Check"]),
                                         ("Plan:\n1. Read", ["Read"]), ("- Read\n- Write", None), ("1.\n2.", None), ("", None)])
def test_plans(text, steps):
    assert read_plan(text) == steps or (steps is None and isinstance(read_plan(text), str))


def test_a_plan_beyond_the_cap():
    record = play("plan", in_form("plan", [READ] * 40))
    assert (record["outcome"], record["cost"]["turns"], len(record["calls"])) == ("turn_cap", 25, 24)


# Code


@pytest.mark.parametrize("text, code", [
    ("```python\nx\n```", "x\n"), ("First:\n```py\nx\n```\nthen\n```python\ny\n```", "x\n"), ("```\nx\n```", "x\n"),
    ("```python\nx", "x"), ("x = 1", None), ("", None)])
def test_blocks(text, code):
    assert read_code(text) == [code] or (code is None and isinstance(read_code(text), str))


@needs_repl
def test_one_block_makes_all_calls():
    lines = "\n".join(text.split("\n")[1] for text in in_form("repl", RIGHT))
    record = play("repl", [block(lines)])
    assert (record["outcome"], record["reward"], record["cost"]["turns"], record["cost"]["extra_turns"]) == ("ended", 1.0, 1, 0)
    assert record["turns"] == len(RIGHT) + 1  # of the trace: one call each, and the end


@needs_repl
def test_answers_are_values_and_variables_stay():
    made = [f"parent = get_issue('ABC-123')\nkey = create_issue({RIGHT[1][1]['fields']!r})['body']['key']",
            "print(get_issue(key)['status'])\nfinal_answer(key)"]
    record = play("repl", [block(code) for code in made])
    assert record["reward"] == 1.0 and record["dialogue"][3]["content"] == "Output:"


@needs_repl
def test_errors_of_code_are_shown_and_counted():
    record = play("repl", [block("import os"), block("get_parent('ABC-123')"), *in_form("repl", RIGHT)])
    assert (record["reward"], record["cost"]["code_errors"], record["cost"]["out_of_form"]) == (1.0, 2, 0)
    assert record["dialogue"][3]["content"] == "Output:\nError: `import os` is not allowed; there are only json, math, re."


@needs_repl
def test_a_loop_of_calls_meets_the_cap():
    record = play("repl", [block("while True:\n    try:\n        get_issue('ABC-123')\n    except Exception:\n        pass")])
    assert (record["outcome"], len(record["calls"]), record["cost"]["turns"]) == ("turn_cap", 25, 1)
    assert [call.get("outcome") for call in record["calls"]] == ["ok"] * 24 + [None]


@needs_repl
def test_code_for_ever_meets_the_cap():
    record = play("repl", [block("1 + 1")] * 99)
    assert (record["outcome"], record["calls"], record["cost"]["turns"]) == ("turn_cap", [], 25)


def test_the_other_two_need_no_interpreter(monkeypatch):
    monkeypatch.setattr("atlas_rlvr.repl.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "smolagents", None)  # an import of it would raise
    assert play("react", in_form("react", RIGHT))["reward"] == play("plan", in_form("plan", RIGHT))["reward"] == 1.0
    for attempt in (lambda: run_scaffold("repl", "subtask", "embedded"), lambda: play("repl", [block("1")])):
        with pytest.raises(ValueError, match=r"pip install -e '.\[scaffolds\]'"):
            attempt()


# Prompts, costs and scores


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("scaffold", SCAFFOLDS)
def test_every_prompt_names_every_tool(scaffold, scenario):
    prompt = scaffold_prompt(scaffold, scenario)
    assert all(tool["function"]["name"] in prompt for tool in tool_schemas(scenario))
    assert messages(load_tasks(scenario)[0])[0]["content"] in prompt and "{scenario}" not in prompt and "{tools}" not in prompt


def test_tokens_are_added_up_and_unknown_ones_are_not_zero():
    def counted(talks):
        return [reply | {"usage": {"prompt_tokens": 100, "completion_tokens": 7}} for reply in recite(in_form("plan", RIGHT))(talks)]
    [record] = play_chunk("plan", [(SUBTASK, 0)], counted, {"model": "m", "seed": 0})
    assert list(record["cost"]) == list(costs([]))
    assert [record["cost"][name] for name in ("prompt_tokens", "generated_tokens", "extra_tokens")] == [400, 28, 7]
    assert play("plan", in_form("plan", RIGHT))["cost"]["generated_tokens"] is None


@pytest.mark.parametrize("good, bad, shown", [(4, 0, True), (4, 4, True), (4, 5, False), (0, 3, False)])
def test_a_score_needs_half_of_the_turns_in_form(good, bad, shown):
    records = [play("react", in_form("react", RIGHT))] * (good // 4)
    records += [dict(play("react", ["Hm."]), cost={**play("react", ["Hm."])["cost"], "turns": bad, "out_of_form": bad})] * (bad > 0)
    table = scaffold_table(records)
    assert format_rate(records) == good / (good + bad)
    assert [table[name] is not None for name in ("mean", "audited", "perfect")] == [shown] * 3
    assert (table["no_score"] == "") is shown
    assert shown or table["no_score"].startswith(f"no score: script+react kept to the form in {good} of {good + bad} turns")


def test_no_records_and_only_errors_give_no_score():
    error = dict(play("react", []), outcome="error", reward=None, audited=None)
    assert [bool(refusal(records)) for records in ([], [error])] == [True, True] and format_rate([]) is None


# Runs


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scaffolds, "load_tasks", lambda scenario, split="train": load_tasks(scenario, split)[:2])
    return tmp_path


def reciter(body):
    tasks = {task["prompt"]: task for task in load_tasks("subtask")}
    task = next(task for prompt, task in tasks.items() if prompt in body["messages"][1]["content"])
    said = sum(message["role"] == "assistant" for message in body["messages"])
    return 200, {}, chat_response({"role": "assistant", "content": in_form("react", gold_calls(task))[said]}, tokens=(50, 5))


def test_a_run_through_an_endpoint(project, capsys):
    with scripted_server(reciter) as (url, log):
        records = run_scaffold("react", "subtask", connect(url, "some/model"), seed=3, repeats=2)
        asked = len(log)
        assert run_scaffold("react", "subtask", connect(url, "some/model"), seed=3, repeats=2) == records
    assert [record["reward"] for record in records] == [1.0] * 4 and asked == len(log) == 16
    assert not any("tools" in entry["body"] for entry in log)
    assert records[0]["cost"]["prompt_tokens"] == 200 and records[0]["endpoint"] == url
    assert "16 of 16 turns in form" in capsys.readouterr().out
    folder = run_folder("subtask", "some/model", 3, project, variant="react")
    assert read_lines(folder / "rollouts.jsonl") == records and read_run(folder)["variant"] == "react"


def test_nothing_can_be_taken_for_a_baseline(project):
    with scripted_server(reciter) as (url, _):
        connection = connect(url, "some/model")
        [record, _] = run_scaffold("react", "subtask", connection, repeats=1)
        plain = connection.endpoint.model
    assert record["model"] == f"{plain}+react" and record["scaffold"] == "react"
    assert record_key(record) != record_key(record | {"model": plain})
    assert run_folder("subtask", plain, 0, variant="react") != run_folder("subtask", plain, 0)
    assert plain_runs() == []  # no table of the paper reads it


def test_another_prompt_is_another_run(project, monkeypatch):
    with scripted_server(reciter) as (url, _):
        run_scaffold("react", "subtask", connect(url, "m"), repeats=1)
        changed = SCAFFOLDS["react"] | {"system": [*SCAFFOLDS["react"]["system"], "Be brief."]}
        monkeypatch.setitem(scaffolds.SCAFFOLDS, "react", changed)
        with pytest.raises(ValueError, match="with another hashes"):
            run_scaffold("react", "subtask", connect(url, "m"), repeats=1)


def test_a_refusal_stops_the_run_and_errors_are_asked_again(project):
    answers = [(400, {}, {"error": "no"})]
    with scripted_server(lambda body: answers.pop() if answers else reciter(body)) as (url, _):
        first = run_scaffold("react", "subtask", connect(url, "m"), repeats=1, width=1)
        assert [record["outcome"] for record in first] == ["error", "ended"]
        again = run_scaffold("react", "subtask", connect(url, "m"), repeats=1, width=1)
        assert [record["outcome"] for record in again] == ["ended", "ended"]
    with scripted_server(lambda body: (401, {}, {"error": "who?"})) as (url, _), pytest.raises(Refused, match="answered 401"):
        run_scaffold("react", "subtask", connect(url, "n"), repeats=1)


@pytest.mark.parametrize("width", [1, 3])
def test_side_by_side_keeps_the_order(project, monkeypatch, width):
    monkeypatch.setattr(scaffolds, "load_tasks", load_tasks)
    with scripted_server(reciter) as (url, _):
        records = run_scaffold("react", "subtask", connect(url, "m"), repeats=2, width=width)
    order = [(task["id"], generation) for generation in (0, 1) for task in load_tasks("subtask")]
    assert [(record["task"], record["generation"]) for record in records] == order


def test_a_refusal_keeps_what_ended_beside_it_and_nothing_is_asked_for_twice(project, capsys):
    first, second = load_tasks("subtask")[:2]
    ended = threading.Event()

    def poor(body):
        if first["prompt"] in body["messages"][1]["content"]:
            return (402, {}, {"error": "no credit"}) if ended.wait(30) else None
        answer = reciter(body)
        if sum(message["role"] == "assistant" for message in body["messages"]) == 3:
            ended.set()
        return answer
    folder = run_folder("subtask", "m", 0, project, variant="react")
    with scripted_server(poor) as (url, _):
        connection = connect(url, "m")
        with pytest.raises(Refused, match="finished rollouts are kept"):
            run_scaffold("react", "subtask", connection, repeats=1)
        source = connection.endpoint
    assert [record["task"] for record in read_lines(folder / "rollouts.jsonl")] == [second["id"]]
    assert "stopped; a part and no baseline: 1/2" in capsys.readouterr().out
    with scripted_server(reciter) as (url, log):
        connection = Connection(source)  # the address stays the same
        connection.client = make_client(replace(source, url=url))
        records = run_scaffold("react", "subtask", connection, repeats=1)
    assert [record["task"] for record in records] == [first["id"], second["id"]] and len(log) == 4


def test_a_run_of_the_embedded_policy(project, capsys):
    records = run_scaffold("react", "subtask", "embedded", repeats=1)
    assert [record["task"] for record in records] == [task["id"] for task in load_tasks("subtask")[:2]]
    assert {record["model"] for record in records} == {"embedded+react"} and not any("error" in r for r in records)
    assert all(record["cost"]["generated_tokens"] > 0 < record["cost"]["prompt_tokens"] for record in records)
    assert run_scaffold("react", "subtask", "embedded", repeats=1) == records
    assert "turns in form" in capsys.readouterr().out


def test_any_model_that_chats_is_a_policy(monkeypatch):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "atlas_rlvr/data/policy")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turns = iter(in_form("react", RIGHT))
    monkeypatch.setattr(baselines, "sample", lambda model, tokenizer, prompts, *_: [
        [*tokenizer(next(turns))["input_ids"], tokenizer.eos_token_id] for _ in prompts])
    network = SimpleNamespace(eval=lambda: None, config=SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(max_position_embeddings=10**5)))
    policy = local_policy(network, tokenizer, 10**4, seed=0)
    [record] = play_chunk("react", [(SUBTASK, 0)], policy, {"model": "m", "seed": 0})
    written = [message["content"] for message in record["dialogue"] if message["role"] == "assistant"]
    assert (record["reward"], written) == (1.0, in_form("react", RIGHT))
    assert record["cost"]["generated_tokens"] == sum(len(tokenizer(text)["input_ids"]) + 1 for text in written)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="made to chat"):
        local_policy(network, tokenizer, 10**4, seed=0)


@pytest.mark.parametrize("arguments, words", [(("reakt", "subtask", "embedded"), "did you mean `react`"),
                                              (("react", "subtasks", "embedded"), "unknown scenario"),
                                              (("react", "subtask", "embeded"), "did you mean `embedded`")])
def test_bad_input_is_one_sentence(arguments, words, project):
    with pytest.raises(ValueError, match=words):
        run_scaffold(*arguments)
    assert not (project / "results").exists()


def test_a_rollout_says_what_it_is():
    rollout = Rollout("react", SUBTASK)
    assert rollout.view[0]["content"] == scaffold_prompt("react", "subtask") and rollout.talk == messages(SUBTASK)
    assert runs.KEY == ("model", "seed", "scenario", "split", "phase", "batch", "task", "generation")
