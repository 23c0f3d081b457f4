"The `paper` reward set: every row of its table, its known defects, and faults that other projects met."
import copy
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas_rlvr.environments import ENVIRONMENTS, TOOLS, run_calls
from atlas_rlvr.rewards import COMPONENTS, EXCESS_LIMITS, REWARD_HASH, REWARD_SETS, rescore, score, score_task
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, lint, load_tasks, task_env
from atlas_rlvr.tool_calls import OUTCOMES, Call, call_to_json, parse_message

ISSUE_GOLD = {"summary": "Write Release Notes", "parent": "ABC-123", "project": "ABC", "assignee": "admin123",
              "issuetype": "10003"}
PAGE_GOLD = {"title": "Release Notes 1.0", "parentId": "789", "spaceId": "PAY", "representation": "storage"}
LABEL_GOLD = {"page_id": "10001", "labels": ["incident-response", "oncall", "payments", "runbook", "sev1"]}
MOVE_GOLD = {"issueIdOrKey": "ISK1", "transition_id": 31, "status": "Resolved"}
GOLD = {"transition": MOVE_GOLD, "subtask": ISSUE_GOLD, "page": PAGE_GOLD, "label": LABEL_GOLD,
        "cross": {"issue": ISSUE_GOLD, "page": PAGE_GOLD}}

FIELDS = {"project": {"key": "ABC"}, "parent": {"key": "ABC-123"}, "summary": "Write Release Notes",
          "issuetype": {"id": "10003"}, "assignee": {"accountId": "admin123"}}
PAGE_ARGUMENTS = {"spaceId": "PAY", "title": "Release Notes 1.0", "parentId": "789",
                  "body": {"representation": "storage", "value": "<p>x</p>"}}
READ_ISSUE, READ_PAGE = ("get_issue", {"issueIdOrKey": "ABC-123"}), ("get_page", {"page_id": "789"})
CREATE_ISSUE, CREATE_PAGE = ("create_issue", {"fields": FIELDS}), ("create_page", PAGE_ARGUMENTS)
READ_CONTENT, READ_LABELS = ("get_page_content", {"page_id": "10001"}), ("get_page_labels", {"page_id": "10001"})
UNKNOWN = ("make_issue", {})


OTHER_USER = min(set(ENVIRONMENTS["subtask"]()._world.tables["users"]) - {"admin123"})
OTHER_PAGE = min(set(ENVIRONMENTS["label"]()._world.tables["pages"]) - {"10001"})


def play(scenario, *calls):
    return run_calls(ENVIRONMENTS[scenario](), list(calls))


def judge(scenario, *calls, gold=None):
    return score(scenario, play(scenario, *calls), gold or GOLD[scenario])


def issue(**changes):
    "A call of `create_issue` with some fields replaced; None leaves a field out."
    fields = {name: value for name, value in {**FIELDS, **changes}.items() if value is not None}
    return "create_issue", {"fields": fields}


def page(**changes):
    arguments = {name: value for name, value in {**PAGE_ARGUMENTS, **changes}.items() if value is not None}
    return "create_page", arguments


def add(*labels, page_id="10001"):
    return "add_labels", {"page_id": page_id, "labels": list(labels)}


def move(transition_id, key="ISK1"):
    return "transition_issue", {"issueIdOrKey": key, "transition": {"id": transition_id}}


# --- the table -------------------------------------------------------------------------------------------------------

CROSS = [READ_ISSUE, READ_PAGE, CREATE_ISSUE, CREATE_PAGE]
NEW_ISSUE, NEW_PAGE = ("get_issue", {"issueIdOrKey": "ABC-124"}), READ_PAGE


@pytest.mark.parametrize(("component", "calls", "value"), [
    ("issue.summary", [issue(summary="Write notes")], 0.0),
    ("issue.summary", [CREATE_ISSUE], 0.10),
    ("issue.parent", [issue(parent="ABC-123")], 0.0),
    ("issue.parent", [CREATE_ISSUE], 0.10),
    ("issue.project", [issue(project={"key": "XYZ"})], 0.0),
    ("issue.project", [CREATE_ISSUE], 0.10),
    ("issue.assignee", [issue(assignee="admin123")], 0.0),
    ("issue.assignee", [CREATE_ISSUE], 0.10),
    ("issue.issuetype", [issue(issuetype={"name": "Sub-task"})], 0.0),
    ("issue.issuetype", [CREATE_ISSUE], 0.10),
    ("page.title", [page(title="Notes")], 0.0),
    ("page.title", [CREATE_PAGE], 0.10),
    ("page.parentId", [page(parentId=None)], 0.0),
    ("page.parentId", [CREATE_PAGE], 0.10),
    ("page.spaceId", [page(spaceId="ENG")], 0.0),
    ("page.spaceId", [CREATE_PAGE], 0.10),
    ("page.body", [page(body={"representation": "storage", "value": ""})], 0.0),
    ("page.body", [page(body="<p>x</p>")], 0.0),
    ("page.body", [CREATE_PAGE], 0.10),
    ("issue.read_first", [READ_ISSUE, CREATE_ISSUE], 0.05),
    ("issue.read_first", [CREATE_ISSUE, READ_ISSUE], 0.0),
    ("issue.read_first", [READ_ISSUE], 0.0),
    ("issue.read_first", [issue(parent="ABC-123"), READ_ISSUE, CREATE_ISSUE], 0.0),
    ("issue.create", [CREATE_ISSUE], 0.05),
    ("issue.create", [issue(parent="ABC-123")], 0.0),
    ("issue.verify", [CREATE_ISSUE, NEW_ISSUE], 0.05),
    ("issue.verify", [CREATE_ISSUE, READ_ISSUE], 0.05),
    ("issue.verify", [CREATE_ISSUE, ("get_issue", {"issueIdOrKey": "XYZ-456"})], 0.0),
    ("issue.verify", [NEW_ISSUE, CREATE_ISSUE], 0.0),
    ("page.read_first", [READ_PAGE, CREATE_PAGE], 0.05),
    ("page.read_first", [("get_page", {"page_id": "100"}), CREATE_PAGE], 0.0),
    ("page.create", [CREATE_PAGE], 0.05),
    ("page.create", [page(title=None)], 0.0),
    ("page.verify", [CREATE_PAGE, NEW_PAGE], 0.05),
    ("page.verify", [CREATE_PAGE], 0.0),
    ("both", [CREATE_ISSUE, CREATE_PAGE], 0.15),
    ("both", [CREATE_ISSUE], 0.0),
    ("issue.missing", [CREATE_PAGE], -0.25),
    ("issue.missing", [issue(parent="ABC-123")], 0.0),
    ("page.missing", [CREATE_ISSUE], -0.25),
    ("issue.invalid", [issue(parent="ABC-123")] * 3, -0.75),
    ("page.invalid", [page(body="<p>x</p>"), CREATE_PAGE], -0.25),
    ("page.invalid", [CREATE_PAGE, CREATE_PAGE], 0.0),
    ("issue.duplicate", [CREATE_ISSUE] * 3, -0.30),
    ("page.duplicate", [CREATE_PAGE] * 2, -0.15),
    ("hallucinated", [UNKNOWN] * 2, -0.30),
    ("excess", [READ_ISSUE] * 6, 0.0),
    ("excess", [READ_ISSUE] * 9, -0.15),
])
def test_table_2(component, calls, value):
    assert judge("cross", *calls).components[component] == value


def test_table_2_budget():
    positive = [row["value"] for row in COMPONENTS if row["scenario"] == "cross" and row["value"] > 0]
    assert round(sum(positive), 2) == 1.35
    assert judge("cross", *CROSS, NEW_ISSUE, NEW_PAGE).raw == 1.35
    assert {row["provenance"] for row in COMPONENTS if row["scenario"] == "cross"} == {"paper"}


@pytest.mark.parametrize(("scenario", "name", "value"), [
    *(("subtask", slot, 0.10) for slot in ("summary", "parent", "project", "assignee", "issuetype")),
    ("subtask", "read_first", 0.20), ("subtask", "create", 0.20), ("subtask", "verify", 0.10),
    *(("page", slot, 0.15) for slot in ("title", "parentId", "spaceId")), ("page", "body", 0.10),
    ("page", "read_first", 0.15), ("page", "create", 0.20), ("page", "verify", 0.10),
    ("label", "label", 0.50), ("label", "read_content", 0.15), ("label", "read_labels", 0.10), ("label", "add", 0.15),
    ("label", "verify", 0.10),
])
def test_single_product_values(scenario, name, value):
    calls = {"subtask": [READ_ISSUE, CREATE_ISSUE, NEW_ISSUE], "page": [READ_PAGE, CREATE_PAGE, NEW_PAGE],
             "label": [READ_CONTENT, READ_LABELS, add(*LABEL_GOLD["labels"]), READ_LABELS]}[scenario]
    result = judge(scenario, *calls)
    assert result.raw == 1.0
    assert result.components[name] == value


@pytest.mark.parametrize("row", COMPONENTS, ids=lambda row: f"{row['scenario']}-{row['name']}")
def test_every_row_is_used(row):
    "A score names each row of its scenario, and a table with another value gives another score."
    scenario, name = row["scenario"], row["name"]
    calls = {"transition": [move(31), ("close", {})], "label": [READ_CONTENT, READ_LABELS, add("oncall"), READ_LABELS]}
    full = {"subtask": [READ_ISSUE, CREATE_ISSUE, READ_ISSUE], "page": [READ_PAGE, CREATE_PAGE, READ_PAGE],
            "cross": [*CROSS, READ_ISSUE, READ_PAGE]} | calls
    spoilt = {"subtask": [issue(parent="ABC-123")] * 2, "page": [page(body="x")] * 2, "label": [add(1), add(1)],
              "cross": [issue(parent="ABC-123"), page(body="x")] * 2, "transition": []}
    used = set()
    for some in (full[scenario], [*spoilt[scenario], *[UNKNOWN] * 9], []):
        used |= {part for part, value in judge(scenario, *some).components.items() if value}
    assert (name in used) == (row["value"] != 0)


def test_every_value_has_a_provenance():
    assert {row["provenance"] for row in COMPONENTS} == {"paper", "ours"}
    assert {row["group"] for row in COMPONENTS} == {"R1", "R2", "R3"}
    assert EXCESS_LIMITS == {"subtask": 3, "page": 3, "label": 5, "cross": 6}


@pytest.mark.parametrize(("scenario", "calls"), [("subtask", [READ_ISSUE]), ("page", [READ_PAGE]),
                                                 ("label", [READ_LABELS]), ("cross", [READ_PAGE])])
def test_excess_is_per_call_beyond_the_limit(scenario, calls):
    limit = EXCESS_LIMITS[scenario]
    values = [judge(scenario, *calls * n).components["excess"] for n in (limit, limit + 1, limit + 4)]
    assert values == [0.0, -0.05, -0.20]


def test_transition_has_no_penalties():
    result = judge("transition", *[UNKNOWN] * 40)
    assert (result.raw, result.reward) == (10.0, 1.0)
    assert (result.counts["hallucinated"], result.counts["excess"]) == (40, 0)


# --- wrong and missing arguments -------------------------------------------------------------------------------------

@pytest.mark.parametrize(("scenario", "read", "wrong", "loss"), [
    ("subtask", READ_ISSUE, issue(summary="Write release notes"), 0.10),
    ("subtask", READ_ISSUE, issue(assignee={"accountId": OTHER_USER}), 0.10),
    ("subtask", READ_ISSUE, issue(assignee=None), 0.10),
    ("page", READ_PAGE, page(title="Release Notes"), 0.15),
    ("page", READ_PAGE, page(parentId=None), 0.15),
    ("page", READ_PAGE, page(body={"representation": "storage", "value": ""}), 0.10),
    ("label", READ_LABELS, add(*LABEL_GOLD["labels"][1:], "other"), 0.10),
])
def test_wrong_but_accepted_value_costs_its_slot(scenario, read, wrong, loss):
    right = {"subtask": CREATE_ISSUE, "page": CREATE_PAGE, "label": add(*LABEL_GOLD["labels"])}[scenario]
    made = play(scenario, read, wrong)[1]
    assert made.outcome == "ok"
    verify = {"subtask": lambda: ("get_issue", {"issueIdOrKey": made.body["key"]}),
              "page": lambda: ("get_page", {"page_id": made.body["id"]}), "label": lambda: READ_LABELS}[scenario]()
    raws = [judge(scenario, read, write, verify).raw for write in (right, wrong)]
    assert round(raws[0] - raws[1], 2) == loss


@pytest.mark.parametrize("slot", ["summary", "project", "parent", "issuetype"])
def test_required_field_left_out(slot):
    result = judge("subtask", READ_ISSUE, issue(**{slot: None}), READ_ISSUE)
    assert result.raw == round(1.00 - 0.10 - 0.50 - 0.25, 2)


@pytest.mark.parametrize("slot", ["title", "spaceId"])
def test_required_page_argument_left_out(slot):
    assert judge("page", READ_PAGE, page(**{slot: None}), READ_PAGE).raw == round(1.00 - 0.15 - 0.45 - 0.25, 2)


def test_a_page_without_body_is_accepted_but_breaks_the_schema_of_the_tool():
    assert judge("page", READ_PAGE, page(body=None), READ_PAGE).raw == round(1.00 - 0.10 - 0.25, 2)


def test_refusal_that_respects_the_schema_costs_no_penalty():
    result = judge("subtask", READ_ISSUE, issue(assignee={"accountId": "nobody"}))
    assert (result.raw, result.counts["invalid"]) == (0.40, 0)


def test_first_usable_write_is_judged_else_the_first():
    worse, better = issue(parent="ABC-123", summary="x"), issue(parent="ABC-123")
    assert judge("subtask", worse, better).components["summary"] == 0.0
    assert judge("subtask", worse, CREATE_ISSUE, issue(summary="y")).components["summary"] == 0.10


@pytest.mark.parametrize("outcome", ["malformed", "truncated", "unexecuted"])
def test_calls_that_were_never_answered_count_only_towards_the_budget(outcome):
    trace = play("subtask", READ_ISSUE, CREATE_ISSUE, READ_ISSUE)
    lost = Call("create_issue", CREATE_ISSUE[1], outcome=outcome)
    assert score("subtask", [*trace, lost, lost], ISSUE_GOLD).raw == 0.90
    only = score("subtask", [lost], ISSUE_GOLD)
    assert (only.raw, only.components["missing"]) == (-0.30, -0.30)
    assert score("transition", [replace(lost, name="transition_issue", arguments=move(31)[1])], MOVE_GOLD).raw == 0.0


# --- faults that people met in public --------------------------------------------------------------------------------

class TestC01:
    def test_useless_reads_are_perfect(self):
        result = judge("transition", *[("get_transitions", {"issueIdOrKey": "ISK1"})] * 4)
        assert (result.reward, result.clean) == (1.0, False)

    def test_nine_transitions_are_perfect(self):
        result = judge("transition", *[move("31")] * 9)
        assert (result.reward, result.raw, result.counts["duplicates"]) == (1.0, 2.25, 8)


@pytest.mark.parametrize(("transition_id", "bonus"), [(31, 0.25), ("31", 0.0), (31.0, 0.0), (True, 0.0), (11, 0.0),
                                                      ("31 ", 0.0), (None, 0.0)])
def test_C02_only_the_integer_gold_id_gets_the_bonus(transition_id, bonus):
    assert judge("transition", move(transition_id)).components["integer_id"] == bonus


def test_C02_the_environment_accepts_the_string():
    assert play("transition", move("31"))[0].outcome == "ok"
    assert judge("transition", move(31, key="ISK2")).components["integer_id"] == 0.0


@pytest.mark.parametrize(("key", "value"), [("ABC-123", 0.10), ("ABC123", 0.0), ("abc-123", 0.0), ("ABC_123", 0.0),
                                            (" ABC-123", 0.0), (["ABC-123"], 0.0)])
def test_C04_identifiers_are_compared_exactly(key, value):
    assert judge("subtask", issue(parent={"key": key})).components["parent"] == value


@pytest.mark.parametrize(("title", "value"), [("Oncall Runbook - Payments", 0.15), (" Oncall Runbook - Payments ", 0.0),
                                              ("Oncall Runbook -  Payments", 0.0), ("oncall runbook - payments", 0.0)])
def test_C05_titles_are_neither_trimmed_nor_folded(title, value):
    gold = {**PAGE_GOLD, "title": "Oncall Runbook - Payments"}
    assert judge("page", page(title=title), gold=gold).components["title"] == value


@pytest.mark.parametrize(("change", "slot", "value"), [
    ({"title": "Release Notes 1.0"}, "title", 0.15), ({"title": "Release Notes 1.0.1"}, "title", 0.0),
    ({"title": "Draft: Release Notes 1.0"}, "title", 0.0), ({"parentId": "789"}, "parentId", 0.15),
    ({"parentId": "7890"}, "parentId", 0.0), ({"parentId": 789}, "parentId", 0.0)])
def test_C07_equality_not_containment(change, slot, value):
    assert judge("page", page(**change)).components[slot] == value


@pytest.mark.parametrize(("labels", "recalled"), [(["devops", "ops-runbook", "not-ops"], 0), (["ops"], 1), ("ops", 0),
                                                  ([["ops"]], 0), (["OPS"], 0), (None, 0)])
def test_C08_labels_are_compared_as_whole_names(labels, recalled):
    call = ("add_labels", {"page_id": "10001", "labels": labels})
    result = judge("label", call, gold={"page_id": "10001", "labels": ["ops"]})
    assert result.components["label"] == recalled / 10


@pytest.mark.parametrize(("fields", "earned"), [
    ({}, 0.0), ({"summary": "Write QA test cases"}, 0.10),
    ({"project": {"key": "ABC"}, "summary": "Write QA test cases"}, 0.20)])
def test_C09_the_loop_runs_over_the_gold(fields, earned):
    gold = {**ISSUE_GOLD, "summary": "Write QA test cases"}
    result = judge("subtask", ("create_issue", {"fields": fields}), gold=gold)
    assert sum(result.components[slot] for slot in gold) == pytest.approx(earned)


def test_C09_no_arguments_earn_nothing():
    assert judge("subtask", ("create_issue", {})).raw == -0.25
    assert judge("cross", ("create_issue", {}), ("create_page", {})).raw == -0.50


def test_C11_perfect_is_not_validated_first():
    result = judge("cross", CREATE_ISSUE, CREATE_PAGE)
    assert (result.perfect, result.raw, result.clean) == (True, 1.15, False)
    assert judge("cross", *CROSS).clean


def test_C12_scoring_is_pure():
    for calls in ([], CROSS):
        trace, gold = play("cross", *calls), copy.deepcopy(GOLD["cross"])
        before = copy.deepcopy(trace)
        assert score("cross", trace, gold) == score("cross", trace, gold)
        assert (trace, gold) == (before, GOLD["cross"])


GOLD_RAW = {"transition": (1.0, 0.75), "subtask": (1.0, 0.9), "page": (1.0, 0.9), "label": (1.0, 0.9),
            "cross": (1.35, 1.25)}  # with a final read, without


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_C13_doing_nothing_earns_nothing_and_gold_everything(scenario, split):
    for task in load_tasks(scenario, split):
        assert score(scenario, [], task["gold"]).reward == 0.0
        for verify, raw in zip((True, False), GOLD_RAW[scenario], strict=True):
            trace = run_calls(task_env(task), gold_calls(task, verify=verify))
            result = score(scenario, trace, task["gold"])
            assert {call.outcome for call in trace} == {"ok"}, task["id"]
            assert (result.raw, result.reward, result.clean) == (raw, min(1.0, raw), True), task["id"]


def test_C13_transition_in_three_calls_with_the_integer():
    task = load_tasks("transition")[0]
    *reads, (tool, arguments) = gold_calls(task, verify=False)
    integer = (tool, {**arguments, "transition": {"id": task["gold"]["transition_id"]}})
    assert score("transition", run_calls(task_env(task), [*reads, integer]), task["gold"]).reward == 1.0


def test_C15_penalties_are_subtracted_before_the_only_clamp():
    early, guessing = judge("cross", READ_ISSUE, READ_PAGE), judge("cross", READ_ISSUE, READ_PAGE, *[UNKNOWN] * 3)
    assert (early.reward, guessing.reward) == (0.0, 0.0)
    assert round(early.raw - guessing.raw, 2) == 0.45


@pytest.mark.parametrize(("more", "raw", "count"), [([], 1.25, None), ([CREATE_ISSUE], 1.10, "duplicates"),
                                                    ([("make_page", {})], 1.10, "hallucinated")])
def test_C16_what_the_clamp_hides_is_counted(more, raw, count):
    result = judge("cross", *CROSS, *more)
    assert (result.reward, result.raw, result.clean) == (1.0, raw, count is None)
    assert count is None or result.counts[count] == 1


def test_C18_structure_is_gated_by_a_usable_write():
    result = judge("page", READ_PAGE, page(spaceId="ENG"), READ_PAGE)
    assert [result.components[step] for step in ("read_first", "create", "verify")] == [0.0, 0.0, 0.0]
    assert result.raw == 0.40


def test_C18_text_is_no_call():
    said = parse_message({"role": "assistant", "content": "I will get_page(page_id=789) and create_page(...)."})
    assert score("page", said, PAGE_GOLD).raw == -0.30


def test_C19_order_without_meaning():
    page_id, labels = "10001", LABEL_GOLD["labels"]
    a = judge("label", ("add_labels", {"page_id": page_id, "labels": labels}))
    b = judge("label", ("add_labels", {"labels": labels[::-1], "page_id": page_id}))
    assert (a.raw, a.components) == (b.raw, b.components)
    swapped = judge("cross", READ_PAGE, CREATE_PAGE, NEW_PAGE, READ_ISSUE, CREATE_ISSUE, NEW_ISSUE)
    assert swapped.raw == judge("cross", READ_ISSUE, CREATE_ISSUE, NEW_ISSUE, READ_PAGE, CREATE_PAGE, NEW_PAGE).raw


def test_C19_order_with_meaning():
    assert judge("cross", CREATE_ISSUE, CREATE_PAGE, READ_ISSUE, READ_PAGE).components["issue.read_first"] == 0.0
    result = judge("label", add(*LABEL_GOLD["labels"]), READ_CONTENT, READ_LABELS)
    assert (result.components["read_content"], result.components["verify"]) == (0.0, 0.10)


@pytest.mark.parametrize(("scenario", "gold", "message"), [
    ("page", {"parentId": "789", "spaceId": "ENG"}, "not in space ENG"),
    ("transition", {"transition_id": 99}, "not offered"),
    ("label", {"labels": ["Incident Response"]}, "not a legal label name"),
    ("label", {"labels": []}, "empty"),
    ("subtask", {"parent": "ABC-123", "project": "XYZ"}, "differs from the project")])
def test_C21_gold_that_contradicts_its_world_is_refused(scenario, gold, message):
    task = load_tasks(scenario)[0]
    faults = lint({**task, "gold": {**task["gold"], **gold}})
    assert len(faults) == 1
    assert message in faults[0]


def test_C23_recall_pays_everything_so_precision_stands_beside_it():
    sprayed = judge("label", READ_CONTENT, add(*LABEL_GOLD["labels"], "hr", "finance", "legal", "policy", "howto"))
    exact = judge("label", READ_CONTENT, add(*LABEL_GOLD["labels"]))
    assert sprayed.components["label"] == exact.components["label"] == 0.50
    assert (sprayed.precision, exact.precision) == (0.5, 1.0)
    assert judge("label").precision is None
    assert judge("subtask", CREATE_ISSUE).precision is None


@pytest.mark.parametrize("name", ["Get_Issue", "get-issue", "functions.get_issue", "get_issue ", "getIssue", ""])
def test_C24_names_are_never_normalised(name):
    trace = play("subtask", (name, {"issueIdOrKey": "ABC-123"}), CREATE_ISSUE)
    result = score("subtask", trace, ISSUE_GOLD)
    assert (result.components["hallucinated"], result.components["read_first"]) == (-0.15, 0.0)


def test_C24_a_tool_of_another_scenario_is_unknown():
    assert judge("subtask", CREATE_PAGE).components["hallucinated"] == -0.15


def test_labels_of_another_page_are_not_recalled():
    assert judge("label", add(*LABEL_GOLD["labels"], page_id=OTHER_PAGE)).components["label"] == 0.0


@pytest.mark.parametrize(("calls", "duplicates"), [
    ([add("a"), add("b"), add("c")], 0), ([add("a"), add("a")], 1), ([add("a", "b"), add("b"), add("a"), add("c")], 2),
    ([add(), add("a")], 0), ([add("a"), add()], 1)])
def test_an_add_is_a_duplicate_when_it_adds_nothing_new(calls, duplicates):
    result = judge("label", *calls)
    assert (result.counts["duplicates"], result.components["duplicate"]) == (duplicates, -15 * duplicates / 100)


# --- training signal -------------------------------------------------------------------------------------------------

def test_B03_an_error_has_no_reward_and_an_early_stop_has_zero(tmp_path):
    error = stored("cross", play("cross", READ_ISSUE), reward=None, raw=None, outcome="error")
    early = stored("cross", play("cross", READ_ISSUE, READ_PAGE), reward=0.0, raw=-0.5, generation=1)
    early["components"] = {"issue.missing": -0.25, "page.missing": -0.25}
    report = rescore(write(tmp_path, [error, early]))
    assert (report["skipped"], report["equal"], report["differences"]) == (1, 1, [])
    assert report["rows"][0]["stored"]["reward"] is None
    assert "new" not in report["rows"][0]


def test_B04_an_empty_gold_set_gives_a_finite_reward():
    result = judge("label", READ_CONTENT, gold={"page_id": "10001", "labels": []})
    assert (result.reward, result.raw, result.precision) == (0.0, -0.30, None)


def test_B05_raw_separates_what_the_clamp_makes_equal():
    traces = [[READ_ISSUE], [issue(parent="ABC-123")] * 3, [UNKNOWN], [UNKNOWN] * 2]
    results = [judge("cross", *calls) for calls in traces]
    assert {result.reward for result in results} == {0.0}
    assert len({result.raw for result in results}) == 4


# --- properties ------------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(
    ["ABC-123", "789", "10001", "PAY", "storage", 31])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                                           max_size=3), max_leaves=6)
SLOTS = st.dictionaries(st.sampled_from(["fields", "page_id", "labels", "title", "parentId", "spaceId", "body", "transition",
                                         "issueIdOrKey"]), VALUES, max_size=4)
GOOD = [arguments for _, arguments in (CREATE_ISSUE, CREATE_PAGE, READ_ISSUE, READ_PAGE, add("oncall"), move(31))]
NAMES = sorted({tool for tools in TOOLS.values() for tool in tools})
CALLS = st.builds(Call, name=st.sampled_from(NAMES) | st.none() | st.text(max_size=4),
                  arguments=st.none() | st.sampled_from(GOOD) | SLOTS, raw=st.just(""), id=st.just(""),
                  outcome=st.sampled_from(OUTCOMES), status=st.none() | st.integers(100, 599), body=VALUES,
                  repairs=st.sampled_from([(), ("double_encoded",)]))


@given(scenario=st.sampled_from(SCENARIOS), trace=st.lists(CALLS, max_size=9))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_score_is_total_bounded_and_pure(scenario, trace):
    before = repr(trace)
    result = score(scenario, trace, GOLD[scenario])
    assert result == score(scenario, trace, GOLD[scenario])
    assert repr(trace) == before
    assert 0.0 <= result.reward <= 1.0
    assert result.reward == max(0.0, min(1.0, result.raw))
    assert math.isclose(sum(result.components.values()), result.raw, abs_tol=1e-9)
    assert round(result.raw * 20, 6).is_integer()
    json.dumps([result.reward, result.components, result.counts], allow_nan=False)


@given(scenario=st.sampled_from(SCENARIOS), trace=st.lists(CALLS, max_size=6), n=st.integers(1, 4))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_penalties_are_per_occurrence(scenario, trace, n):
    unknown = Call("make_issue", {}, outcome="unknown_tool")
    one, more = (score(scenario, [*trace, *[unknown] * k], GOLD[scenario]) for k in (1, 1 + n))
    assert more.counts["hallucinated"] - one.counts["hallucinated"] == n
    if scenario != "transition":
        assert round(one.components["hallucinated"] - more.components["hallucinated"], 2) == round(0.15 * n, 2)


def test_deep_arguments_do_not_overflow():
    deep = value = {}
    for _ in range(20000):
        value["fields"] = value = {}
    call = Call("create_issue", deep, outcome="api_error", status=400)
    assert score("subtask", [call], GOLD["subtask"]).raw == -0.25


POOL = {"transition": [move("31"), move(31), move(99), ("get_transitions", {"issueIdOrKey": "ISK1"}), UNKNOWN],
        "subtask": [READ_ISSUE, CREATE_ISSUE, NEW_ISSUE, issue(parent="ABC-123"), issue(summary="x"), UNKNOWN],
        "page": [READ_PAGE, CREATE_PAGE, page(parentId=None), page(spaceId="ENG"), page(body="x"), UNKNOWN],
        "label": [READ_CONTENT, READ_LABELS, add("oncall"), add("oncall", "runbook"), add(1), UNKNOWN]}
POOL["cross"] = POOL["subtask"] + POOL["page"]


def test_a_changed_rule_needs_a_new_version():
    "Frozen scores of one version: whoever changes a rule raises the version in `REWARD_SETS` and freezes anew."
    rng, made, scores = random.Random(7), {"key": "ABC-124", "id": "10124"}, []
    for scenario in SCENARIOS * 200:
        calls = rng.choices(POOL[scenario], k=rng.randint(0, 8))
        outcomes = rng.choices(OUTCOMES, weights=[12, 3, 1, 1, 1, 1], k=len(calls))
        trace = [Call(*call, outcome=outcome, body=made) for call, outcome in zip(calls, outcomes, strict=True)]
        result = score(scenario, trace, GOLD[scenario])
        scores.append([result.raw, result.components])
    digest = sha256(json.dumps(scores, sort_keys=True).encode()).hexdigest()[:16]
    assert {REWARD_SETS["paper"].version: (REWARD_HASH, digest)} == {"1": ("a86d1f9e2ac1b1ef", "367f1eaceff8a7c7")}


def test_the_hash_is_the_same_in_another_process():
    code = "from atlas_rlvr.rewards import REWARD_HASH; print(REWARD_HASH)"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == REWARD_HASH


def test_a_set_with_another_value_has_another_hash_and_score(monkeypatch):
    paper = REWARD_SETS["paper"]
    rows = tuple({**row, "value": 0.2} if row["name"] == "summary" else row for row in paper.components)
    monkeypatch.setitem(REWARD_SETS, "other", replace(paper, name="other", components=rows))
    trace = play("subtask", issue(assignee=None))
    other = score("subtask", trace, ISSUE_GOLD, rewards="other")
    assert other.hash == REWARD_SETS["other"].hash != REWARD_HASH
    assert round(other.raw - score("subtask", trace, ISSUE_GOLD).raw, 2) == 0.10


@pytest.mark.parametrize(("arguments", "message"), [(("tickets", [], {}), "unknown scenario 'tickets'"),
                                                    (("page", [], PAGE_GOLD, "fixed"), "unknown reward set 'fixed'")])
def test_unknown_names_are_refused_in_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        score(*arguments)


# --- scoring stored rollouts again -----------------------------------------------------------------------------------

TASK = next(t for t in load_tasks("cross") if t["gold"]["page"]["title"] == "Release Notes 1.0")
BARE = {**FIELDS, "parent": "ABC-123"}
UNASSIGNED = {name: value for name, value in BARE.items() if name != "assignee"}
NO_PROJECT = {"projectKey": "ABC", **{name: value for name, value in UNASSIGNED.items() if name != "project"}}
LISTING_2 = [READ_ISSUE, READ_PAGE, ("create_issue", {"fields": BARE}), CREATE_PAGE,
             *(("create_issue", {"fields": fields}) for fields in ({**BARE, "assignee": "admin123"}, UNASSIGNED,
                                                                   NO_PROJECT, BARE))]


def stored(scenario, trace, *, task=TASK, outcome="ended", generation=0, **changes):
    "A rollout record as the shipped file keeps it: calls without the bodies of their answers."
    result = score(scenario, trace, task["gold"])
    calls = [{name: value for name, value in call_to_json(call).items() if name != "body"} for call in trace]
    return {"scenario": scenario, "model": "test", "split": "train", "phase": "train", "batch": 0, "epoch": 0.0,
            "task": task["id"], "generation": generation, "seed": 0, "outcome": outcome, "reward": result.reward,
            "raw": result.raw, "components": result.components, "reward_hash": result.hash, "calls": calls, **changes}


def write(folder, records, name="rollouts.json"):
    path = folder / name
    text = "".join(json.dumps(r) + "\n" for r in records) if name.endswith("l") else json.dumps({"schema": 1, "rollouts": records})
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["rollouts.json", "rollouts.jsonl"])
def test_C25_stored_scores_are_reproduced(tmp_path, name):
    rng = random.Random(7)
    traces = [play("cross", *rng.choices(POOL["cross"], k=rng.randint(0, 8))) for _ in range(40)]
    path = write(tmp_path, [stored("cross", trace, generation=n) for n, trace in enumerate(traces)], name)
    before = path.read_bytes()
    report = rescore(path)
    assert (report["records"], report["equal"], report["differences"]) == (40, 40, [])
    assert path.read_bytes() == before


def test_C25_listing_2_is_reported_beside_its_printed_reward(tmp_path):
    error = stored("cross", play("cross", READ_ISSUE), outcome="error", reward=None, raw=None, components={})
    printed = stored("cross", play("cross", *LISTING_2), reward=0.52, reward_hash="printed", generation=1)
    report = rescore(write(tmp_path, [error, printed]))
    assert (report["records"], report["skipped"], report["equal"]) == (2, 1, 0)
    [row] = report["differences"]
    assert row["differs"] == ["reward"]
    assert row["stored"] == {"reward": 0.52, "hash": "printed"}
    assert row["new"] == {"reward": 0.0, "raw": -1.05, "hash": REWARD_HASH}


def test_six_creates_of_listing_2():
    assert judge("cross", *LISTING_2).raw == -1.05
    assert judge("cross", *LISTING_2, LISTING_2[-1]).raw == -1.50


@pytest.mark.parametrize(("change", "differs"), [
    ({"raw": 1.0}, ["raw"]), ({"components": {}}, ["components"]), ({"reward": None}, ["reward"])])
def test_rescore_names_what_differs(tmp_path, change, differs):
    report = rescore(write(tmp_path, [stored("cross", play("cross", *CROSS), **change)]))
    assert [row["differs"] for row in report["differences"]] == [differs]


def test_rescore_checks_the_answers(tmp_path):
    record = stored("cross", play("cross", *CROSS))
    record["calls"][0] |= {"status": 404, "outcome": "api_error"}
    assert rescore(write(tmp_path, [record]))["differences"][0]["differs"] == ["answers"]


def test_rescore_executes_only_what_was_executed(tmp_path):
    lost = Call("create_issue", CREATE_ISSUE[1], raw="{", outcome="truncated")
    record = stored("cross", [lost, *play("cross", *CROSS, NEW_ISSUE)])
    assert rescore(write(tmp_path, [record]))["equal"] == 1


@pytest.mark.parametrize("rewards", ["paper", "audited"])
@pytest.mark.parametrize(("trace", "gold", "message"), [
    ([("get_issue", {})], ISSUE_GOLD, r"not tuple; `run_calls\(env, calls\)` makes them"),
    ([{"role": "assistant", "content": ""}], ISSUE_GOLD, r"not dict; .*`build_trace\(messages\)`"),
    ([], TASK, r"not a whole task; pass task\[\"gold\"\], or call `score_task\(task, trace\)`"),
    ([], None, "must be the `gold` of a task, not NoneType")], ids=["tuples", "messages", "task", "None"])
def test_what_is_easily_mixed_up_gives_one_sentence(trace, gold, message, rewards):
    with pytest.raises(TypeError, match=message):
        score("cross", trace, gold, rewards, {})
    with pytest.raises(TypeError, match=message):
        score_task({**TASK, "gold": gold}, trace, rewards)


def test_rescore_reads_transcripts_too(tmp_path):
    call = {"type": "function", "function": {"name": "get_issue", "arguments": {"issueIdOrKey": "ABC-123"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "get_issue", "content": task_env(TASK).get_issue(issueIdOrKey="ABC-123")}]
    record = stored("cross", play("cross", READ_ISSUE))
    del record["calls"]
    assert rescore(write(tmp_path, [{**record, "messages": messages}]))["equal"] == 1


@pytest.mark.parametrize(("text", "message"), [
    ('{"rollouts": [{"scenario": "cro', r"json, line 1, column 28: the file is cut or damaged \(Unterminated"),
    ('{"rollouts": [NaN]}', "NaN is not JSON"), ("[]", "not a rollouts file"), ("", "cut or damaged")])
def test_a_broken_file_gives_one_sentence(tmp_path, text, message):
    path = tmp_path / "rollouts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        rescore(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_gives_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="there is no such rollouts file"):
        rescore(tmp_path / "rollouts.json")


@pytest.mark.parametrize("damage", [{"task": None}, {"calls": "x"}, {"calls": [{}]}, {"calls": [{"name": "a", "zz": 1}]}, 7])
def test_a_damaged_record_is_named(tmp_path, damage):
    good = stored("cross", play("cross", READ_ISSUE))
    bad = {**good, **damage} if isinstance(damage, dict) else damage
    path = write(tmp_path, [good, bad])
    with pytest.raises(ValueError, match=r"rollouts\.json, record 2: it cannot be scored"):
        rescore(path)


def test_a_line_separator_in_a_text_is_no_end_of_a_line(tmp_path):
    trace = run_calls(task_env(TASK), [("get_issue", {"issueIdOrKey": "ABC\u2028-1"})])
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(stored(TASK["scenario"], trace), ensure_ascii=False) + "\n", encoding="utf-8")
    assert rescore(path)["equal"] == 1
