"The oracle of the final state, and the `audited` reward set that is graded on it."
import copy
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_rlvr import rewards as R
from atlas_rlvr.audited import COMPONENTS, LIMITS, MISSING
from atlas_rlvr.environments import TOOLS, run_calls
from atlas_rlvr.final_state import final_state, goal_reached, harms, matched
from atlas_rlvr.rewards import REWARD_HASH, REWARD_SETS, score, score_task
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks, task_env

SPLITS, DIALECTS = ("train", "held_out"), ("paper", "wire")
CASES = [pytest.param(scenario, split, dialect, id=f"{scenario}-{split}-{dialect}")
         for scenario in SCENARIOS for split in SPLITS for dialect in DIALECTS]
FIRST = {scenario: load_tasks(scenario)[0] for scenario in SCENARIOS}


def play(task, calls, dialect="paper"):
    return run_calls(task_env(task, dialect), calls)


def judge(scenario, calls, rewards="audited"):
    return score_task(FIRST[scenario], play(FIRST[scenario], calls), rewards)


def end(scenario, calls):
    return final_state(FIRST[scenario], play(FIRST[scenario], calls))


def is_write(call):
    return not call[0].startswith(("get_", "search_"))


def spoilt(value):
    if isinstance(value, dict):
        return [{**value, name: wrong} for name in value for wrong in spoilt(value[name])]
    return [value[1:], []] if isinstance(value, list) else ["another", "", 7, {}, [], None, True]


def near_misses(task, dialect):
    calls = gold_calls(task, dialect=dialect)
    return [[*calls[:i], (name, wrong), *calls[i + 1:]] for i, (name, arguments) in enumerate(calls) if is_write((name,))
            for wrong in spoilt(arguments)]


@pytest.mark.parametrize(("scenario", "split", "dialect"), CASES)
def test_gold_reaches_the_goal_without_harm_and_earns_everything(scenario, split, dialect):
    for task in load_tasks(scenario, split, dialect):
        trace = play(task, gold_calls(task, dialect=dialect), dialect)
        state = final_state(task, trace, dialect)
        assert goal_reached(task, state) and not any(harms(task, state).values())
        assert score_task(task, trace, "audited", dialect).raw == 1.0
        assert len(trace) == LIMITS[scenario] - 2


@pytest.mark.parametrize(("scenario", "split", "dialect"), CASES)
def test_no_call_misses_the_goal_and_earns_nothing(scenario, split, dialect):
    for task in load_tasks(scenario, split, dialect):
        assert not goal_reached(task, final_state(task, [], dialect))
        found = score_task(task, [], "audited", dialect)
        assert (found.reward, found.raw) == (0.0, -0.30)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_near_miss_never_stands_below_an_early_stop(scenario, dialect):
    for task in load_tasks(scenario, "train", dialect)[:2]:
        reads = [call for call in gold_calls(task, verify=False) if not is_write(call)]
        stops = [list(some) for n in range(len(reads) + 1) for some in combinations(reads, n)]
        highest = max(score_task(task, play(task, calls, dialect), "audited", dialect).raw for calls in stops)
        for calls in near_misses(task, dialect):
            trace = play(task, calls, dialect)
            found, reached = score_task(task, trace, "audited", dialect), goal_reached(task, final_state(task, trace, dialect))
            assert found.raw >= highest
            assert reached or found.raw <= 0.50


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_harmless_call_more_costs_nothing(scenario):
    calls = gold_calls(FIRST[scenario])
    for i in range(len(calls) + 1):
        for read in calls:
            if not is_write(read) and i <= len(calls) - 2:
                assert judge(scenario, [*calls[:i], read, *calls[i:]]).raw == 1.0


def test_the_positive_values_of_a_scenario_are_one():
    for scenario in SCENARIOS:
        units = {"label": 5}
        assert sum(round(100 * row["value"]) * units.get(row["name"], 1) for row in COMPONENTS
                   if row["scenario"] == scenario and row["value"] > 0) == 100


@pytest.mark.parametrize("row", COMPONENTS, ids=lambda row: f"{row['scenario']}-{row['name']}")
def test_every_row_has_a_size_and_an_owner(row):
    assert row["value"] and row["provenance"] == "ours" and row["name"] in judge(row["scenario"], []).components


GOLD = {scenario: gold_calls(task) for scenario, task in FIRST.items()}
ISSUE, PAGE, LABELS, MOVE = (next(call for call in GOLD[s] if is_write(call)) for s in ("subtask", "page", "label", "transition"))
OTHER = {"page_id": min(set(task_env(FIRST["label"])._world.tables["pages"]) - {FIRST["label"]["gold"]["page_id"]})}
THERE = {"issueIdOrKey": min(set(task_env(FIRST["transition"])._world.tables["issues"])
                             - {FIRST["transition"]["gold"]["issueIdOrKey"]})}
SECOND = ("create_issue", {"fields": ISSUE[1]["fields"] | {"summary": "Something else"}})


@pytest.mark.parametrize(("scenario", "calls", "component", "value"), [
    ("subtask", [*GOLD["subtask"], ISSUE], "surplus", -0.15), ("subtask", [SECOND, *GOLD["subtask"]], "surplus", -0.15),
    ("subtask", [("create_issue", {"fields": {}}), *GOLD["subtask"]], "refused", -0.10),
    ("subtask", [*GOLD["subtask"], ("make_issue", {})], "hallucinated", -0.15),
    ("subtask", [GOLD["subtask"][0]] * 3 + GOLD["subtask"], "excess", -0.05),
    ("page", [*GOLD["page"], PAGE], "refused", -0.10),  # the title is taken
    ("label", [*GOLD["label"], ("add_labels", {**OTHER, "labels": ["x"]})], "foreign", -0.15),
    ("label", [*GOLD["label"], ("add_labels", {**LABELS[1], "labels": ["x", "y"]})], "labels", -0.20),
    ("transition", [*GOLD["transition"], MOVE], "repeated", -0.15),
    ("label", [*GOLD["label"], LABELS], "repeated", -0.15),
    ("transition", [("transition_issue", {**MOVE[1], **THERE}), *GOLD["transition"]], "foreign", -0.15),
    ("cross", [*GOLD["cross"], ISSUE], "surplus", -0.15), ("cross", GOLD["page"], "issue.missing", -0.15)])
def test_every_penalty_shows(scenario, calls, component, value):
    found = judge(scenario, calls)
    assert found.components[component] == value and found.reward < 1.0


@pytest.mark.parametrize(("scenario", "calls", "kind"), [
    ("subtask", [*GOLD["subtask"], ISSUE], "duplicate"), ("subtask", [SECOND, *GOLD["subtask"]], "extra"),
    ("label", [*GOLD["label"], ("add_labels", {**OTHER, "labels": ["x"]})], "foreign"),
    ("label", [("add_labels", {**LABELS[1], "labels": [*LABELS[1]["labels"], "x"]})], "labels"),
    ("transition", [("transition_issue", {**MOVE[1], **THERE}), *GOLD["transition"]], "foreign"),
    ("cross", [*GOLD["cross"], *GOLD["subtask"][1:2]], "extra")])
def test_harm_is_named_even_where_the_goal_is_reached(scenario, calls, kind):
    state = end(scenario, calls)
    assert goal_reached(FIRST[scenario], state)
    assert {name for name, count in harms(FIRST[scenario], state).items() if count} == {kind}


@pytest.mark.parametrize("kind", [str, int])
def test_a_transition_id_is_compared_as_the_wire_compares_it(kind):
    calls = [(name, arguments | ({"transition": {"id": kind(arguments["transition"]["id"])}} if name == MOVE[0] else {}))
             for name, arguments in GOLD["transition"]]
    assert judge("transition", calls).raw == 1.0


@pytest.mark.parametrize("kind", [str.lower, str.upper])
def test_the_case_of_a_key_is_the_wires_business(kind):
    calls = [(name, {**arguments, "issueIdOrKey": kind(arguments["issueIdOrKey"])}) for name, arguments in GOLD["transition"]]
    assert judge("transition", calls).raw == 1.0


def swapped(calls):
    "The write before the reads."
    return sorted(calls, key=lambda call: not is_write(call))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_reading_too_late_never_pays(scenario, verify):
    calls = gold_calls(FIRST[scenario], verify=verify)
    assert judge(scenario, swapped(calls)).raw < judge(scenario, calls).raw


@pytest.mark.parametrize("edge", [11, "11", True, {}, [], None, "31 "])
def test_another_transition_is_not_the_goal(edge):
    calls = [(name, arguments | ({"transition": {"id": edge}} if name == MOVE[0] else {}))
             for name, arguments in GOLD["transition"]]
    assert judge("transition", calls).raw <= 0.50


def test_leaving_the_goal_again_loses_it():
    away = ("transition_issue", {**MOVE[1], "transition": {"id": "11"}})
    assert judge("transition", [*GOLD["transition"], away]).reward <= 0.50


def test_labels_in_two_writes_are_as_good_as_in_one():
    halves = [("add_labels", {**LABELS[1], "labels": part}) for part in (LABELS[1]["labels"][:2], LABELS[1]["labels"][2:])]
    assert judge("label", [*GOLD["label"][:2], *halves, GOLD["label"][-1]]).raw == 1.0


def test_the_platforms_of_a_pair_may_be_done_in_either_order():
    issue, page = GOLD["cross"][0::2], GOLD["cross"][1::2]
    assert judge("cross", [*issue, *page]).raw == judge("cross", [*page, *issue]).raw == 1.0


def test_a_read_after_the_parent_verifies_nothing():
    assert judge("subtask", [*GOLD["subtask"][:2], GOLD["subtask"][0]]).components["verify"] == 0.0


def test_structure_without_a_write_that_landed_pays_nothing():
    refused = ("create_issue", {"fields": {**ISSUE[1]["fields"], "parent": ISSUE[1]["fields"]["parent"]["key"]}})
    found = judge("subtask", [GOLD["subtask"][0], refused, GOLD["subtask"][0]])
    assert max(found.components.values()) == 0.0 and found.raw == -0.10


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_an_answer_that_says_nothing_about_the_request_is_no_refusal(status):
    trace = [R.Call("create_issue", {}, "{}", "t0c0", "api_error", status)]
    assert score("subtask", trace, FIRST["subtask"]["gold"], "audited", end("subtask", [])).raw == 0.0


def test_it_wants_the_state_and_says_how_to_get_it():
    with pytest.raises(ValueError, match="reads the final state; give `state=final_state"):
        score("page", [], FIRST["page"]["gold"], "audited")


def test_the_other_set_is_untouched():
    assert REWARD_HASH == REWARD_SETS["paper"].hash != REWARD_SETS["audited"].hash
    assert score("cross", play(FIRST["cross"], GOLD["cross"]), FIRST["cross"]["gold"]).raw == 1.35


def test_gold_with_a_space_id_is_matched_by_id_or_key():
    state = end("page", GOLD["page"])
    gold = FIRST["page"]["gold"]
    row = next(new for _, new in state["pages"].values())
    assert all(matched("page", gold | {"spaceId": row["spaceId"]}, state).values())
    assert not all(matched("page", gold | {"spaceId": "NOPE"}, state).values())


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=6),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6)


def some_calls(scenario):
    "Gold calls, spoilt ones and nonsense, in any order."
    task = FIRST[scenario]
    known = GOLD[scenario] + [calls[i] for calls in near_misses(task, "paper") for i in range(len(calls)) if is_write(calls[i])]
    wild = st.tuples(st.sampled_from([*TOOLS[scenario], "make_page"]), st.dictionaries(st.text(max_size=12), VALUES, max_size=3))
    return st.lists(st.sampled_from(known) | wild, max_size=9)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_bars_hold_for_any_calls(scenario, data):
    calls = data.draw(some_calls(scenario))
    trace = play(FIRST[scenario], calls)
    state, before = final_state(FIRST[scenario], trace), copy.deepcopy(trace)
    found = score(scenario, trace, FIRST[scenario]["gold"], "audited", state)
    assert trace == before and found == score(scenario, trace, FIRST[scenario]["gold"], "audited", state)
    assert 0 <= found.reward <= 1 and round(sum(found.components.values()), 9) == found.raw
    assert goal_reached(FIRST[scenario], state) or found.reward <= 0.50
    assert found.reward < 1.0 or not any(harms(FIRST[scenario], state).values())
    assert any(name in found.components for name in MISSING[scenario])
