"Verdicts against the final state: kinds of wrong verdict that other projects met, relations, counting, the stored run."
import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
from conftest import ROOT

from atlas_rlvr.final_state import final_state
from atlas_rlvr.rewards import COMPONENTS, replay, stored_records
from atlas_rlvr.scenarios import SCENARIOS, find_task, gold_calls, lint, load_tasks
from atlas_rlvr.tool_calls import Call
from atlas_rlvr.verdicts import (
    FORMS,
    MUST,
    RELATIONS,
    ROLLOUTS,
    SETS,
    VERDICTS,
    add,
    all_samples,
    call,
    changed,
    count,
    from_record,
    gold_sample,
    gold_samples,
    interval,
    judge,
    leaves,
    mapped,
    merged,
    mutant,
    mutant_samples,
    places,
    play,
    rates,
    rollout_samples,
    run,
    shorter,
    verdicts,
    writes,
)

BY_NAME = {relation.name: relation for relation in RELATIONS}
STORED = ROOT / "results/verdicts.json"
stored = json.loads(STORED.read_text(encoding="utf-8"))


def first(scenario, verify=True):
    return gold_sample(load_tasks(scenario)[0], verify)


def with_calls(sample, *calls):
    return judge(replace(sample, calls=tuple(call(*one) if isinstance(one, tuple) else one for one in calls)))


def write_with(sample, path, value):
    "The sample's calls, one scalar of its writes changed."
    change = lambda at, old: value if at == path else old
    return [replace(one, arguments=mapped(one.arguments, change)) if i in writes(sample) else one
            for i, one in enumerate(sample.calls)]


def fail_or_pass(judged, rewards="audited"):
    "(perfect, more than half) by a reward set."
    return judged.rewards[rewards] == 1.0, judged.rewards[rewards] > 0.5


# Kinds of wrong verdict that were seen in public


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_C13_nothing_done_is_nothing_earned_and_gold_is_perfect(scenario):
    for task in load_tasks(scenario) + load_tasks(scenario, "held_out"):
        nothing, gold = with_calls(gold_sample(task)), judge(gold_sample(task))
        assert (nothing.reached, nothing.rewards) == (False, dict.fromkeys(SETS, 0.0))
        assert gold.clean and gold.rewards["audited"] == 1.0
        assert all(one.outcome == "ok" for one in gold.trace)
        assert lint(task) == []


def test_C01_reads_alone_pay_in_the_papers_transitions_only():
    sample = first("transition")
    judged = with_calls(sample, *[sample.calls[1]] * 4)
    assert not judged.reached and judged.rewards["paper"] == 1.0 and judged.rewards["audited"] == 0.0


def test_C02_string_and_integer_id():
    sample = first("transition")
    spelt = {kind: judge(replace(sample, calls=tuple(write_with(sample, ("transition", "id"), kind(31))))) for kind in (str, int)}
    assert all(judged.clean for judged in spelt.values())
    assert spelt[str].rewards["audited"] == spelt[int].rewards["audited"] == 1.0
    three = {kind: replace(sample, calls=tuple(write_with(sample, ("transition", "id"), kind(31))[:3])) for kind in (str, int)}
    assert [judge(three[kind]).rewards["paper"] for kind in (str, int)] == [0.75, 1.0]  # the paper's defect


@pytest.mark.parametrize("key, on_site", [("ABC-123", True), ("ABC123", False), ("abc-123", True), ("ABC_123", False)])
def test_C04_identifiers_are_compared_as_the_site_does(key, on_site):
    sample = next(gold_sample(task) for task in load_tasks("subtask") if task["gold"]["parent"] == "ABC-123")
    judged = with_calls(sample, *write_with(sample, ("fields", "parent", "key"), key))
    assert judged.clean == on_site
    assert judged.rewards["audited"] > 0.5 if on_site else judged.rewards["audited"] <= 0.5
    assert (judged.rewards["paper"] == 1.0) == (key == "ABC-123")


@pytest.mark.parametrize("change", [lambda t: t, lambda t: f" {t} ", lambda t: t.replace(" ", "  "), str.lower, lambda t: t + ".1",
                                    lambda t: f"Draft: {t}"], ids=["same", "padded", "double", "lower", "longer", "prefix"])
def test_C05_C07_titles_are_compared_whole_and_exactly(change):
    sample = first("page")
    title = sample.task["gold"]["title"]
    judged = with_calls(sample, *write_with(sample, ("title",), change(title)))
    same = change(title) == title
    assert (judged.clean, *fail_or_pass(judged)) == (same, same, same)
    assert (judged.rewards["paper"] == 1.0) == same


@pytest.mark.parametrize("parent", ["7890", "78", " 789", "0789"])
def test_C07_ids_are_compared_whole(parent):
    sample = next(gold_sample(task) for task in load_tasks("page") if task["gold"]["parentId"] == "789")
    judged = with_calls(sample, *write_with(sample, ("parentId",), parent))
    assert judged.rewards["paper"] < 1.0
    assert judged.clean == (parent == "0789") and (judged.rewards["audited"] > 0.5) == judged.clean


def test_C08_labels_are_compared_whole():
    sample = first("label")
    near = [f"{name}-ops" for name in sample.task["gold"]["labels"]]
    judged = with_calls(sample, *sample.calls[:2], ("add_labels", {"page_id": sample.task["gold"]["page_id"], "labels": near}))
    assert not judged.reached and judged.state["pages"]
    assert judged.rewards["audited"] == 0.0 and judged.rewards["paper"] <= 0.4


@pytest.mark.parametrize("fields", [{}, {"summary": "Write QA test cases"}, {"project": {"key": "ABC"}, "summary": "x"}])
def test_C09_what_is_left_out_is_no_match(fields):
    judged = with_calls(first("subtask"), ("create_issue", {"fields": fields}))
    assert not judged.reached and judged.rewards["audited"] == 0.0


def test_C11_the_papers_cross_is_perfect_without_a_read():
    sample = first("cross", verify=False)
    judged = with_calls(sample, *sample.calls[2:])
    assert judged.rewards["paper"] == 1.0 and judged.clean
    assert 0.5 < judged.rewards["audited"] < 1.0


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_C12_judging_changes_nothing(scenario):
    sample = first(scenario)
    before = copy.deepcopy(sample)
    assert judge(sample) == judge(sample) and sample == before


@pytest.mark.parametrize("scenario", ["subtask", "page", "cross"])
def test_C15_C16_a_fault_shows_in_the_audited_reward_whatever_the_clamp(scenario):
    sample = first(scenario)
    copies = with_calls(sample, *sample.calls, sample.calls[writes(sample)[0]])
    ghost = with_calls(sample, *sample.calls, ("make_page", {}))
    assert copies.rewards["audited"] < 1.0 and ghost.rewards["audited"] < 1.0
    assert (copies.rewards["paper"] == 1.0) == (ghost.rewards["paper"] == 1.0) == (scenario == "cross")


def test_C18_steps_are_paid_behind_a_write_that_took_effect():
    sample = next(gold_sample(task) for task in load_tasks("page") if task["gold"]["spaceId"] == "PAY")
    judged = with_calls(sample, *write_with(sample, ("spaceId",), "ENG")[:2], sample.calls[0])
    assert [one.status for one in judged.trace] == [200, 400, 200] or not judged.reached
    assert judged.rewards["audited"] == 0.0


def test_C19_order_matters_only_where_it_means_something():
    label = first("label")
    other = changed(BY_NAME["label order"], label, judge(label))[1]
    assert other.rewards == judge(label).rewards
    cross = first("cross")
    assert changed(BY_NAME["order of the products"], cross, judge(cross))[1].rewards == judge(cross).rewards


def test_C23_a_flood_of_labels_is_no_recall():
    sample = first("label")
    flood = sample.task["gold"]["labels"] + ["hr", "legal", "finance", "howto", "draft"]
    judged = with_calls(sample, *write_with(sample, ("page_id",), sample.task["gold"]["page_id"])[:2],
                        ("add_labels", {"page_id": sample.task["gold"]["page_id"], "labels": flood}), sample.calls[-1])
    assert judged.reached and not judged.clean
    assert judged.rewards["paper"] == 1.0 and judged.rewards["audited"] < 1.0


@pytest.mark.parametrize("name", ["Get_Issue", "get-issue", "functions.get_issue", "get_issue ", "getIssue"])
def test_C24_a_name_that_is_nearly_a_tool_is_none(name):
    sample = first("subtask")
    judged = with_calls(sample, (name, sample.calls[0].arguments), *sample.calls)
    assert judged.trace[0].outcome == "unknown_tool" and judged.rewards["audited"] < 1.0


# Relations


def test_names_are_unique_and_conditions_known():
    assert len(BY_NAME) == len(RELATIONS) and {relation.must for relation in RELATIONS} == set(MUST)
    assert all(set(relation.scenarios) <= set(SCENARIOS) for relation in RELATIONS)


EVERY = [(relation, scenario) for relation in RELATIONS for scenario in relation.scenarios]


@pytest.mark.parametrize("relation, scenario", EVERY, ids=[f"{relation.name}-{scenario}" for relation, scenario in EVERY])
def test_a_relation_changes_something_and_leaves_the_sample(relation, scenario):
    starts = [sample for sample, _ in gold_samples(scenario)[:20]] + [sample for sample, _ in mutant_samples(scenario, 30, 1)]
    for sample in starts:
        before, judged = copy.deepcopy(sample), judge(sample)
        found = changed(relation, sample, judged)
        assert sample == before
        if found:
            assert found == changed(relation, sample, judged)  # the same change again
            return
    pytest.fail("it never applies")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_three_forms_give_one_trace(scenario):
    traces = [[(one.name, one.arguments, one.outcome, one.status, one.body) for one in play(replace(first(scenario), form=form))[0]]
              for form in FORMS]
    assert traces[0] == traces[1] == traces[2]


def test_a_relation_that_fails_is_seen():
    def plays_wrong(sample, rng):
        return replace(sample, calls=sample.calls[:-1])
    relation = replace(BY_NAME["key order"], change=plays_wrong)
    judged = judge(first("page"))
    after = changed(relation, first("page"), judged)[1]
    assert not MUST[relation.must](judged.rewards["audited"], after.rewards["audited"])


def test_a_change_that_the_site_sees_is_no_other_spelling():
    sample = first("page")
    relation = replace(BY_NAME["letter case"], change=lambda sample, rng: replace(
        sample, calls=tuple(write_with(sample, ("title",), "other"))))
    assert changed(relation, sample, judge(sample)) is None


# Samples


def test_leaves_and_mapped():
    value = {"a": [1, {"b": None}], "c": "x", "d": {}}
    assert leaves(value) == [(("a", 0), 1), (("a", 1, "b"), None), (("c",), "x")]
    assert mapped(value, lambda path, leaf: leaf) == value and mapped(value, lambda path, leaf: 0)["a"] == [0, {"b": 0}]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_mutants_are_the_same_again_and_begin_alike(scenario):
    few, more = mutant_samples(scenario, 5, 0), mutant_samples(scenario, 12, 0)
    assert few == more[:5] and few != mutant_samples(scenario, 5, 1)
    assert all(sample.source == "mutant" for sample, _ in few)


def test_mutants_hit_and_miss():
    judged = [judge(mutant(task, Random(n))) for n, task in enumerate(load_tasks("subtask") * 5)]
    assert {one.reached for one in judged} == {True, False} and {one.clean for one in judged} == {True, False}


def some_records(scenario, n):
    records = [record for record in stored_records(ROOT / ROLLOUTS) if record["scenario"] == scenario]
    return records[::len(records) // n]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_rollout_is_played_as_the_reward_replays_it(scenario):
    for record in some_records(scenario, 8):
        judged = judge(from_record(record))
        assert judged.trace == replay(record) and judged.rewards["paper"] == record["reward"]
        assert judged.state == final_state(find_task(scenario, record["task"]), judged.trace)


def test_rollouts_are_counted_as_often_as_they_occur():
    found = rollout_samples("subtask", ROOT / ROLLOUTS)
    records = [record for record in stored_records(ROOT / ROLLOUTS) if record["scenario"] == "subtask"]
    assert sum(times for _, times in found) == len([record for record in records if record["outcome"] != "error"]) > len(found)


def test_a_call_that_never_ran_stays_as_it_is():
    cut = Call(None, None, "{", outcome="truncated")
    judged = with_calls(first("page"), cut, *first("page").calls)
    assert judged.trace[0] == cut and judged.clean


# Verdicts and counting


@pytest.mark.parametrize("reward, passed", [(1.0, (True, True, True)), (0.95, (False, True, True)), (0.9, (False, False, True)),
                                            (0.5, (False, False, False)), (0.51, (False, False, True))])
def test_bars(reward, passed):
    judged = replace(judge(first("page")), rewards={"paper": reward})
    assert tuple(row[3] for row in verdicts(judged))[:3] == passed


def test_what_a_bar_claims():
    harmed = replace(judge(first("page")), clean=False)
    assert {row[1]: row[2] for row in verdicts(harmed)} == {"= 1.00": False, "≥ 0.95": False, "> 0.50": False, "> 0.50, goal": True}


@pytest.mark.parametrize("k, n, expected", [(0, 0, (0.0, 1.0)), (0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)),
                                            (1, 4, (0.0456, 0.6994)), (50, 100, (0.4038, 0.5962))])
def test_wilson_interval(k, n, expected):
    assert [round(x, 4) for x in interval(k, n)] == [*expected]


def test_rates_by_hand():
    rows = [{"true": True, "passed": True, "n": 7}, {"true": True, "passed": False, "n": 3}, {"true": False, "passed": True, "n": 1}]
    found = rates(rows)
    assert (found["positives"], found["negatives"], found["false_negatives"], found["false_positives"]) == (10, 1, 3, 1)


def test_examples_keep_the_shortest():
    one, other = {"calls": [1, 2]}, {"calls": [1]}
    assert shorter(one, other) == shorter(other, one) == other and shorter(None, one) == one and shorter(None, None) is None
    counted = {}
    for example in (one, other, None):
        add(counted, "wrong", ("k",), 2, example)
    assert counted == {("wrong", "k"): (6, other)}


def test_parts_add_up_to_the_whole():
    samples = gold_samples("page")[:6] + mutant_samples("page", 6, 0)
    whole, parts = count(samples), [count(samples[:5]), count(samples[5:])]
    lines = [{"counts": [[*key, *value] for key, value in part.items()]} for part in parts]
    assert merged(lines) == merged([{"counts": [[*key, *value] for key, value in whole.items()]}])


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    samples = {scenario: gold_samples(scenario)[:3] for scenario in SCENARIOS}
    monkeypatch.setattr("atlas_rlvr.verdicts.all_samples", lambda scenario, traces, start: samples[scenario])
    monkeypatch.setattr("atlas_rlvr.verdicts.PART", 2)
    journal = tmp_path / "runs/j.jsonl"
    whole = run(0, 0, journal)
    assert [line["part"] for line in whole] == [0, 2] * 5
    text = journal.read_text(encoding="utf-8")
    journal.write_text(text[:len(text) * 2 // 3], encoding="utf-8")  # killed inside a line
    calls = []
    monkeypatch.setattr("atlas_rlvr.verdicts.count", lambda samples: calls.append(samples) or count(samples))
    again = run(0, 0, journal)
    assert 0 < len(calls) < 10 and merged(again) == merged(whole)


# The stored run


def test_the_stored_run_is_complete():
    assert set(stored["rewards"]) == set(SETS)
    for scenario in SCENARIOS:
        for rewards in SETS:
            for verdict in VERDICTS:
                rows = [row for row in stored["verdicts"]
                        if (row["scenario"], row["rewards"], row["verdict"]) == (scenario, rewards, verdict)]
                assert {row["source"] for row in rows} == {"gold", "mutant", "rollout"}
                assert sum(row["n"] for row in rows) >= stored["traces"][scenario]
    assert {row["relation"] for row in stored["relations"]} == set(BY_NAME)
    assert STORED.stat().st_size < 500_000


def test_the_stored_examples_are_what_comes_out_now():
    for row in stored["violations"]:
        task, relation = find_task(row["scenario"], row["example"]["task"]), BY_NAME[row["relation"]]
        assert not MUST[relation.must](*row["example"]["rewards"])
        if relation.must == "lower":
            calls = [call(one["name"], one["arguments"]) for one in row["example"]["before"] if one["status"] is not None]
            assert judge(replace(gold_sample(task), calls=tuple(calls))).reached
    for row in stored["wrong"]:
        assert VERDICTS[row["verdict"]][0](row["example"]["reward"]) == (row["kind"] == "false positive")


def test_the_audited_bars_hold_in_the_stored_run():
    wrong = [row for row in stored["wrong"] if row["rewards"] == "audited" and row["kind"] == "false positive"]
    assert [row for row in wrong if row["verdict"] in ("= 1.00", "> 0.50, goal")] == []


def test_every_paper_penalty_has_a_relation_that_meets_it():
    assert {row["name"].split(".")[-1] for row in COMPONENTS if row["value"] < 0} == {
        "missing", "invalid", "duplicate", "hallucinated", "excess"}
    assert {"no write", "the write again", "a tool that does not exist", "a read again, beyond the limit"} <= set(BY_NAME)


@pytest.mark.slow
def test_the_command_writes_a_result(tmp_path):
    out = tmp_path / "verdicts.json"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "atlas_rlvr.verdicts", "--traces", "10", "--seed", "5", "--out", str(out)], cwd=ROOT,
                   env=env, check=True, capture_output=True)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert set(found["traces"]) == set(SCENARIOS) and found["mutants"] == 10
    assert all(math.isfinite(row["n"]) for row in found["verdicts"])


def test_every_sample_of_a_scenario_is_listed_once():
    samples = all_samples("transition", 20, 0)
    assert {sample.source for sample, _ in samples} == {"gold", "mutant", "rollout"}
    assert all(places(sample, ()) == [] and gold_calls(sample.task) for sample, _ in samples[:3])
