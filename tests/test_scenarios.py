"Prompts, gold, lint and the generator of unseen tasks."
import json

import pytest

from atlas_rlvr import results, scenarios
from atlas_rlvr.scenarios import (
    HELD_OUT_SEED,
    LABELS,
    SCENARIOS,
    TRAINING_NAMES,
    find_task,
    generate_tasks,
    gold_calls,
    held_out_rows,
    lint,
    load_tasks,
    messages,
    system_prompt,
)
from atlas_rlvr.world import load_data

PAPER_PROMPTS = {  # Section 3.3
    "transition": "Please resolve ticket ISK1.",
    "subtask": "Create a sub-task ‘Write QA test cases’ under ABC-123 and assign to admin123.",
    "page": "Create a page ‘Oncall Runbook - Payments’ under parent page 789 in space PAY.",
    "label": "Can you correctly label page 10001?",
    "cross": "Create a sub-task ‘Write Release Notes’ under ABC-123 and assign to admin123. "
             "Also create a Confluence page ‘Release Notes 1.0’ under parent 789 in space PAY.",
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_papers_prompt_is_there_word_for_word(scenario):
    assert PAPER_PROMPTS[scenario] in [task["prompt"] for task in load_tasks(scenario)]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("dialect", ["paper", "wire"])
def test_shipped_gold_is_accepted_by_its_own_world(scenario, split, dialect):
    assert [fault for task in load_tasks(scenario, split, dialect) for fault in lint(task, dialect)] == []


def broken(scenario, **gold):
    task = load_tasks(scenario)[0]
    return {**task, "gold": {**task["gold"], **gold}}


@pytest.mark.parametrize(("task", "fault"), [
    (broken("page", spaceId="ENG"), "parent page 789 is not in space ENG"),
    (broken("page", parentId="7890"), "parent page 7890 does not exist"),
    (broken("page", spaceId="NOPE"), "space NOPE does not exist"),
    (broken("page", title=""), "create_page answers 400"),
    (broken("transition", transition_id=99), "transition 99 is not offered for ISK1"),
    (broken("transition", status="Closed"), "transition 31 leads to Resolved"),
    (broken("transition", issueIdOrKey="ISK9"), "ticket ISK9 does not exist"),
    (broken("label", labels=["Incident Response"]), "'Incident Response' is not a legal label name"),
    (broken("label", labels=["v1.2"]), "'v1.2' is not a legal label name"),
    (broken("label", labels=[]), "the gold set is empty"),
    (broken("label", labels=["ops", "ops"]), "a label is repeated"),
    (broken("label", page_id="1"), "page 1 does not exist"),
    (broken("subtask", project="XYZ"), "project XYZ differs from the project of parent ABC-123"),
    (broken("subtask", parent="ABC-1"), "parent ABC-1 does not exist"),
    (broken("subtask", assignee="ghost"), "assignee ghost does not exist"),
    (broken("subtask", issuetype="10001"), "issue type 10001 is no sub-task"),
    (broken("subtask", summary="x" * 300), "create_issue answers 400"),
])
def test_C21_lint_gives_one_message_for_a_fault(task, fault):
    found = lint(task)
    assert len(found) == 1 and fault in found[0]


def test_lint_of_cross_reads_both_halves():
    task = load_tasks("cross")[0]
    gold = {"issue": {**task["gold"]["issue"], "project": "XYZ"}, "page": {**task["gold"]["page"], "spaceId": "ENG"}}
    assert len(lint({**task, "gold": gold})) == 2


def test_the_frozen_split_is_what_the_generator_makes():
    assert held_out_rows() == load_data("held_out.json")


def names(value):
    if isinstance(value, dict):
        return set().union(set(), *map(names, value.values()))
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_held_out_shares_no_entity_with_training(scenario):
    for task in load_tasks(scenario, "held_out"):
        gold = {k: v for k, v in task["gold"].items() if k != "status"}
        for half in (gold, gold.get("issue", {}), gold.get("page", {})):
            half.pop("issuetype", None), half.pop("representation", None)
        assert not names(gold) & TRAINING_NAMES
        for table in ("projects", "users", "issues", "pages"):
            assert not set(task["world"].get(table, {})) & TRAINING_NAMES
    prompts = [task["prompt"] for split in ("train", "held_out") for task in load_tasks(scenario, split)]
    assert len(prompts) == len(set(prompts)) == len(load_tasks(scenario)) + 40


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_generator_is_seeded_and_makes_sound_tasks(scenario):
    tasks = generate_tasks(scenario, 60, seed=3)
    assert tasks == generate_tasks(scenario, 60, seed=3) != generate_tasks(scenario, 60, seed=4)
    assert [fault for task in tasks for fault in lint(task)] == []
    assert {task["prompt"] for task in tasks}.isdisjoint(
        task["prompt"] for task in generate_tasks(scenario, 40, seed=HELD_OUT_SEED))


def test_the_generator_avoids_given_prompts():
    first = generate_tasks("subtask", 3, seed=3)
    again = generate_tasks("subtask", 3, seed=3, exclude=frozenset([first[0]["prompt"]]))
    assert first[0]["prompt"] not in [task["prompt"] for task in again]


def test_label_bodies_mention_their_gold_and_no_other_label_in_use():
    for split in ("train", "held_out"):
        for task in load_tasks("label", split):
            pages = (task["world"] or load_data("site.json"))["pages"]
            text = pages[task["gold"]["page_id"]]["body"]
            words = "".join(c if c.isalpha() else " " for c in text).split()
            assert [word for word in words if word in LABELS] == task["gold"]["labels"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_system_prompt_names_the_type_and_shows_no_call(scenario):
    text = system_prompt(scenario)
    assert "{" not in text and "_" not in text
    assert ("10003" in text) == (scenario in ("subtask", "cross"))
    assert [message["role"] for message in messages(load_tasks(scenario)[0])] == ["system", "user"]


def test_every_task_can_be_found_by_its_id():
    for scenario in SCENARIOS:
        for split in ("train", "held_out"):
            for task in load_tasks(scenario, split):
                assert find_task(scenario, task["id"]) == task
    with pytest.raises(ValueError, match="no task 'x' in scenario page; ids look like 'page-01'"):
        find_task("page", "x")


@pytest.mark.parametrize(("scenario", "split", "text"), [("ticket", "train", "choose one of transition"),
                                                         ("page", "dev", "choose one of train")])
def test_unknown_names_are_refused_in_one_sentence(scenario, split, text):
    with pytest.raises(ValueError, match=text):
        load_tasks(scenario, split)


def test_gold_calls_without_verify_are_a_prefix():
    for scenario in SCENARIOS:
        task = load_tasks(scenario)[0]
        assert gold_calls(task)[:len(gold_calls(task, verify=False))] == gold_calls(task, verify=False)


def test_B18_gold_survives_json_text():
    task = load_tasks("cross")[0]
    assert json.loads(json.dumps(task)) == task


def test_a_found_task_is_the_callers_own():
    for find in (lambda: scenarios.find_task("subtask", "subtask-01"), lambda: scenarios.more_tasks("subtask", 1)[0]):
        gold = find()["gold"]
        gold["summary"] += "!"
        assert find()["gold"]["summary"] + "!" == gold["summary"]


def test_a_scenario_entered_again_is_scored_by_its_new_gold(monkeypatch):
    for table in (scenarios.DATA, scenarios.STEPS, scenarios.LINTS):
        monkeypatch.setitem(table, "again", None)
    row = {"id": "again-01", "prompt": "Do.", "gold": {"summary": "one"}}
    for summary in ("one", "two"):
        data = {"title": "Again", "system": "", "tasks": [row | {"gold": {"summary": summary}}], "held_out": []}
        scenarios.enter("again", data, lambda gold: [[], [], []])
        assert results.gold("again", "again-01") == {"summary": summary}
