"The adversary finds holes that it was not told of, reports only what can be played again, and is the same for a seed."
import ast
import json
import os
import random
import subprocess
import sys
from itertools import islice

import pytest
from conftest import ROOT

import atlas_rlvr.audit as audit_module
import atlas_rlvr.audited  # noqa: F401 (its import adds the reward set)
from atlas_rlvr.audit import (
    FAULTS,
    HARMS,
    Grammar,
    Move,
    Search,
    Stage,
    audit,
    audit_file,
    described,
    gold_program,
    named_reward,
    run_search,
    short_programs,
    shrink,
    simpler,
    stored_rows,
)
from atlas_rlvr.environments import DIALECTS, run_calls
from atlas_rlvr.final_state import final_state, goal_reached, harms
from atlas_rlvr.rewards import reward_set, score
from atlas_rlvr.scenarios import SCENARIOS, find_task, generate_tasks, gold_calls, load_tasks, task_env, to_wire
from atlas_rlvr.tool_calls import Call

BOTH = pytest.mark.parametrize("dialect", DIALECTS)
EACH = pytest.mark.parametrize("scenario", SCENARIOS)


def first(scenario, dialect="paper"):
    return load_tasks(scenario, dialect=dialect)[:1]


def texts(found, kind):
    return ["; ".join(item["differs"]) for item in found["faults"][kind]["exploits"]]


def served(trace, name):
    return [call for call in trace if call.name == name and call.outcome == "ok"]


def free_edits(found):
    return {row["faults"]: row["edits"] for row in found["free"]}


# Rewards with a hole


def substring(task, trace, state):
    "The summary has to contain the one asked for."
    return float(any(task["gold"]["summary"] in call.arguments["fields"]["summary"] for call in served(trace, "create_issue")))


def any_page(task, trace, state):
    "Any labels that were accepted, on any page."
    return float(bool(served(trace, "add_labels")))


def any_read(task, trace, state):
    "The goal, and 0.50 of it for having read some page before."
    names = [call.name for call in trace if call.outcome == "ok"]
    write = names.index("create_page") if "create_page" in names else 0
    return 0.5 * goal_reached(task, state) + 0.5 * ("get_page" in names[:write])


def unanswered(task, trace, state):
    "The right labels in a call, whatever became of it."
    wanted = set(task["gold"]["labels"])
    return float(any(call.name == "add_labels" and isinstance(labels := (call.arguments or {}).get("labels"), list)
                     and wanted <= {name for name in labels if isinstance(name, str)} for call in trace))


def busy(task, trace, state):
    "A tenth for every call."
    return min(1.0, len(trace) / 10)


def strict(task, trace, state):
    "The goal without harm, and no unknown tool."
    return float(goal_reached(task, state) and not any(harms(task, state).values())
                 and all(call.outcome != "unknown_tool" for call in trace))


def test_a_substring_is_found():
    found = audit(substring, first("subtask"), 800)
    assert found["gap"] == 1.0 and "create_issue, fields.summary changed" in free_edits(found)["goal"]
    shortest = found["faults"]["goal"]["exploits"][0]
    assert len(shortest["calls"]) == 1 and shortest["raw"] is None


def test_a_write_on_any_page_is_found():
    found = audit(any_page, first("label"), 800)
    assert (found["gap"], found["harm"], found["faults"]["foreign"]["reward"]) == (1.0, 1.0, 1.0)
    assert any("add_labels, page_id changed" in text for text in texts(found, "foreign"))
    assert len(found["faults"]["foreign"]["exploits"][0]["calls"]) == 1


def test_a_read_of_anything_is_found():
    found = audit(any_read, first("page"), 800)
    assert found["faults"]["unread"]["reward"] == 1.0
    assert any("get_page before the write, page_id changed" in text for text in texts(found, "unread"))
    assert {len(item["calls"]) for item in found["faults"]["unread"]["exploits"]} == {2}


def test_a_call_that_never_ran_is_found():
    found = audit(unanswered, first("label"), 800)
    assert found["gap"] == 1.0 and any("cut off" in text for text in texts(found, "cut"))
    assert {len(item["calls"]) for item in found["faults"]["goal"]["exploits"]} == {1}


def test_pay_per_call_is_found():
    found = audit(busy, first("page"), 800)
    assert (found["per_call"]["gain"], found["gap"]) == (0.1, 1.0)
    assert len(found["faults"]["goal"]["exploits"][0]["calls"]) == 10


@EACH
def test_a_tight_reward_has_no_gap(scenario):
    found = audit(strict, first(scenario), 600)
    assert (found["gold"]["reward"], found["gap"], found["harm"], found["margin"]) == (1.0, 0.0, 0.0, 1.0)
    assert found["faults"]["unknown"]["reward"] == 0.0 and found["per_call"]["gain"] == 0.0
    assert not [row for row in found["free"] if {"goal", *HARMS} & set(row["faults"].split(", "))]


# The paper's rewards


@pytest.fixture(scope="module")
def paper():
    return {scenario: audit("paper", first(scenario), 1500) for scenario in SCENARIOS}


def test_every_call_pays_in_transition(paper):
    found = paper["transition"]
    assert (found["per_call"]["gain"], found["gap"], found["margin"]) == (0.25, 1.0, 0.0)
    assert len(found["faults"]["goal"]["exploits"][0]["calls"]) == 4


def test_the_integer_id_pays(paper):
    assert paper["transition"]["premium"] == {"gain": 0.25, "differs": "transition_issue, transition.id as int"}


def test_cross_needs_no_read(paper):
    found = paper["cross"]["faults"]["unread"]
    assert (found["reward"], found["most"]) == (1.0, 2)
    assert any({"no read before the write", "no read after the write"} <= set(item["differs"]) and len(item["calls"]) == 2
               and item["raw"] == 1.15 for item in found["exploits"])


def test_a_duplicate_and_an_unknown_tool_hide_under_the_clamp(paper):
    found = paper["cross"]
    assert found["over"] == 0.35 and {found["faults"][kind]["reward"] for kind in ("duplicate", "unknown")} == {1.0}
    assert any(edits == ["create_issue again"] or "create_issue again" in edits for edits in free_edits(found).values())
    assert any(text.startswith("unknown tool") for text in free_edits(found)["unknown"])


def test_label_floods_are_free(paper):
    found = paper["label"]["faults"]["labels"]
    assert found["reward"] == 1.0 and found["most"] >= 20
    assert "add_labels, labels with 1 more" in texts(paper["label"], "labels")


def test_a_wrong_slot_is_free_in_cross(paper):
    assert paper["cross"]["gap"] == 1.0 and free_edits(paper["cross"])["goal"]


# The audited rewards


@BOTH
@EACH
def test_the_bars_of_the_audited_set(scenario, dialect):
    found = audit("audited", first(scenario, dialect), 600, dialect=dialect)
    assert (found["gold"], found["nothing"], found["over"]) == ({"reward": 1.0, "raw": 1.0}, 0.0, 0.0)
    assert found["gap"] <= 0.5 and found["harm"] < 1.0 and found["faults"]["unknown"]["reward"] < 1.0
    assert {found[probe]["gain"] for probe in ("per_call", "premium", "discouraged")} == {0.0}


@pytest.mark.slow
@BOTH
@EACH
def test_the_bars_of_the_audited_set_on_every_task(scenario, dialect):
    found = audit("audited", scenario, 8000, seed=1, dialect=dialect)
    assert found["gold"]["reward"] == 1.0 and found["gap"] <= 0.5 and found["harm"] < 1.0


@EACH
def test_the_raw_value_of_a_near_miss_is_above_giving_up(scenario):
    found = audit(named_reward("audited", "raw"), first(scenario), 600)
    assert found["discouraged"]["gain"] == 0.0, found["discouraged"]


# The search itself


def test_nothing_in_the_search_knows_a_reward():
    tree = ast.parse((ROOT / "atlas_rlvr/audit.py").read_text(encoding="utf-8"))
    taken = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "rewards"
             for alias in node.names]
    users = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
             and {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} & {"score", "reward_set"}}
    assert sorted(taken) == ["reward_set", "score"] and users == {"named_reward", "reward", "is_current", "audit_file"}


@EACH
def test_no_exploit_can_be_made_simpler(scenario):
    search = Search(named_reward("paper"), first(scenario)[0])
    run_search(search, 500)
    for kind in ("goal", *HARMS):
        for reward, _, program in sorted(search.best[kind].values(), reverse=True)[:2]:
            short = shrink(search, program, kind)
            outcome = search.attempt(short)
            assert kind in outcome.faults and outcome.reward >= reward and len(short) <= len(program)
            others = map(search.attempt, simpler(short, search.grammar.gold))
            assert not [other for other in others if kind in other.faults and other.reward >= reward]


def winding(task, trace, state):
    "A sixth each for up to three page reads, up to two pages of other titles, and a refused call."
    titles = {call.arguments["title"] for call in served(trace, "create_page")} - {task["gold"]["title"]}
    refused = any(call.outcome == "api_error" for call in trace)
    return (min(len(served(trace, "get_page")), 3) + min(len(titles), 2) + refused) / 6


def test_breeding_finds_what_order_does_not():
    search = Search(winding, first("page")[0])
    for program in islice(short_programs(search.grammar, search.rng), 3000):
        search.attempt(program)
    ordered = max(outcome.reward for outcome in search.tried.values())
    found = audit(winding, first("page"), 3000)["faults"]["goal"]
    assert ordered < found["reward"] == 1.0 and len(found["exploits"][0]["calls"]) == 6


# What is played is what the environment and the oracle say


@BOTH
@EACH
def test_programs_are_played_as_the_environment_does(scenario, dialect):
    task = first(scenario, dialect)[0]
    stage, rng = Stage(task, dialect), random.Random(0)
    programs = list(islice(short_programs(Grammar(task, dialect), rng), 1500))
    for program in rng.sample(programs, 60) + [program[::-1] for program in rng.sample(programs, 10)]:
        if all(step.ran for step in program):
            node = stage.play(program)
            assert node.trace == run_calls(task_env(task, dialect), [(step.name, step.arguments) for step in program])
            assert node.site.changes == final_state(task, node.trace, dialect)
            assert ("goal" not in node.site.faults) == goal_reached(task, node.site.changes)


def test_a_full_cache_changes_nothing(monkeypatch):
    whole = audit("paper", first("label"), 300)
    monkeypatch.setattr(audit_module, "CACHED", 7)
    assert audit("paper", first("label"), 300) | {"seconds": 0} == whole | {"seconds": 0}


@BOTH
@EACH
def test_gold_has_no_fault(scenario, dialect):
    for task in load_tasks(scenario, dialect=dialect):
        search = Search(strict, task, dialect)
        assert search.attempt(gold_program(task, dialect)).faults == {}
        assert described(search.grammar.gold, search.grammar) == []


def test_a_cut_call_reaches_nothing():
    task = first("page")[0]
    read, write, _ = gold_program(task)
    node = Stage(task).play((read, write._replace(ran=False)))
    assert [call.outcome for call in node.trace] == ["ok", "truncated"] and "goal" in node.site.faults
    assert score("page", node.trace, task["gold"]).counts["truncated"] == 1


@pytest.mark.parametrize("name, same", [("ABC-123", True), ("abc-123", True), ("XYZ-456", False)])
def test_what_counts_as_the_gold_read(name, same):
    search = Search(strict, first("subtask")[0])
    _, write, _ = search.grammar.gold
    outcome = search.attempt((Move("get_issue", json.dumps({"issueIdOrKey": name})), write))
    assert ("unread" not in outcome.faults) is same


def test_the_strict_side_is_probed():
    "The paper compares arguments; a sub-task assigned by `id` is as good on the site."
    found = audit("paper", first("subtask"), 800)["underpaid"]
    assert found["gain"] >= 0.1 and found["differs"]
    assert audit(strict, first("subtask"), 400)["underpaid"] == {"gain": 0.0, "differs": None}


def test_generated_tasks_can_be_audited():
    found = audit("paper", generate_tasks("subtask", 2, seed=5), 400)
    assert found["tasks"] == 2 and 0.8 <= found["gap"] <= 0.95


def test_unknown_scenarios_and_sets_are_refused():
    with pytest.raises(ValueError, match="unknown scenario 'labels'"):
        audit("paper", "labels")
    with pytest.raises(ValueError, match="unknown reward set"):
        audit("papers", "label")
    with pytest.raises(ValueError, match="a budget above 0"):
        audit("paper", "label", 0)


# The same for the same seed


def without_time(found):
    return json.dumps({name: value for name, value in found.items() if name != "seconds"})


def test_a_seed_fixes_the_report():
    one, same, other = (without_time(audit("paper", first("cross"), 500, seed)) for seed in (0, 0, 1))
    assert one == same != other


def test_the_hash_seed_does_not_matter():
    code = ("import json; from atlas_rlvr.audit import *; from atlas_rlvr.scenarios import load_tasks;"
            "found = audit('paper', load_tasks('label')[:1], 400); found.pop('seconds'); print(json.dumps(found))")
    outputs = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                              env=os.environ | {"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(outputs) == 1


# The file


@pytest.fixture
def counted(monkeypatch):
    "`audit` replaced by one that searches a single task and notes what it was asked for."
    asked, real = [], audit_module.audit

    def small(rewards, scenario, budget, seed, dialect):
        asked.append((scenario, dialect, budget))
        return real(rewards, first(scenario, dialect), 60, seed, dialect) | {"budget": budget}

    monkeypatch.setattr(audit_module, "audit", small)
    return asked


def test_a_stopped_run_goes_on(tmp_path, counted):
    path = tmp_path / "audit" / "paper.json"
    audit_file("paper", ("page",), 60, path=path)
    rows = audit_file("paper", ("transition", "page"), 60, path=path)
    assert counted == [("page", "paper", 60), ("page", "wire", 60), ("transition", "paper", 60), ("transition", "wire", 60)]
    assert [(row["scenario"], row["dialect"]) for row in rows] == [("transition", "paper"), ("transition", "wire"),
                                                                   ("page", "paper"), ("page", "wire")]
    assert audit_file("paper", ("transition", "page"), 60, path=path) == rows == stored_rows(path) and len(counted) == 4


@pytest.mark.parametrize("change", [{"hash": "0" * 16}, {"seed": 9}, {"budget": 59}], ids=["reward", "seed", "budget"])
def test_what_is_out_of_date_is_searched_again(tmp_path, counted, change):
    path = tmp_path / "paper.json"
    rows = audit_file("paper", ("page",), 60, path=path)
    path.write_text(json.dumps({"rows": [rows[0] | change, rows[1]]}))
    audit_file("paper", ("page",), 60, path=path)
    assert counted[2:] == [("page", "paper", 60)]


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "paper.json"
    path.write_text('{"rows": [')
    with pytest.raises(ValueError, match=r"paper.json.*delete it and run the audit again"):
        stored_rows(path)


# What is stored


STORED = {rewards: stored_rows(ROOT / "results/audit" / f"{rewards}.json") for rewards in ("paper", "audited")}
ROWS = [pytest.param(rewards, row, id=f"{rewards}-{row['scenario']}-{row['dialect']}")
        for rewards, rows in STORED.items() for row in rows]


@pytest.mark.parametrize("rewards", STORED)
def test_every_scenario_is_stored_in_both_dialects(rewards):
    assert [(row["scenario"], row["dialect"]) for row in STORED[rewards]] == [(s, d) for s in SCENARIOS for d in DIALECTS]
    assert {row["hash"] for row in STORED[rewards]} == {reward_set(rewards).hash}
    assert (ROOT / "results/audit" / f"{rewards}.json").stat().st_size < 2**19


def played(task, dialect, calls):
    "The trace of stored calls, without the adversary's machinery."
    env = task_env(task, dialect)
    cut = [Call(name, arguments, outcome="truncated") if rest else None for name, arguments, *rest in calls]
    return [call or run_calls(env, [(name, arguments)])[0] for call, (name, arguments, *_) in zip(cut, calls, strict=True)]


@pytest.mark.parametrize("rewards, row", ROWS)
def test_stored_exploits_play_again(rewards, row):
    for kind, found in row["faults"].items():
        for item in found["exploits"]:
            task = find_task(row["scenario"], item["task"])
            task = to_wire(task) if row["dialect"] == "wire" else task
            trace = played(task, row["dialect"], item["calls"])
            state = final_state(task, trace, row["dialect"])
            again = score(row["scenario"], trace, task["gold"], rewards, state)
            assert (again.reward, again.raw) == (item["reward"], item["raw"]) and again.reward == found["reward"]
            assert kind in item["faults"] and ("goal" in item["faults"]) != goal_reached(task, state)
            assert {k: n for k, n in harms(task, state).items() if n} == {k: n for k, n in item["faults"].items() if k in HARMS}


@pytest.mark.parametrize("rewards, row", ROWS)
def test_the_numbers_of_a_stored_row_agree(rewards, row):
    assert set(row["faults"]) <= set(FAULTS) and row["tried"] >= row["budget"] and row["gold"]["reward"] == 1.0
    assert row["gap"] == row["faults"]["goal"]["reward"] and row["margin"] == round(1.0 - row["gap"], 6)
    assert row["harm"] == max((row["faults"][kind]["reward"] for kind in HARMS if kind in row["faults"]), default=0.0)


@pytest.mark.parametrize("row", STORED["audited"], ids=lambda row: f"{row['scenario']}-{row['dialect']}")
def test_no_counter_example_to_the_audited_set_is_stored(row):
    assert row["gap"] <= 0.5 and row["harm"] < 1.0 and (row["nothing"], row["over"]) == (0.0, 0.0)


@pytest.mark.parametrize("rewards, row", ROWS)
def test_the_stored_budget_is_the_long_one(rewards, row):
    if row["budget"] < 200_000:
        pytest.skip("the long search is not stored yet: papermill nbs/15_audit.ipynb -p rewards NAME -p budget 200000")
    assert row["tried"] >= 200_000


def test_the_page_shows_the_stored_rows():
    cells = json.loads((ROOT / "nbs/15_audit.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = "".join("".join(output["data"].get("text/html", "")) for cell in cells for output in cell.get("outputs", ())
                    if "data" in output)
    for row in STORED["paper"]:
        assert f"<td>{row['tried']}</td>" in shown, (row["scenario"], row["dialect"])


def test_moves_are_compared_by_value():
    assert Move("a", "{}") == Move("a", "{}") != Move("a", "{}", False)
    assert gold_program(first("page")[0])[0].arguments == gold_calls(first("page")[0])[0][1]
