"P1–P4 of the paper (Section 3.1), and the tool layer over the wire."
import inspect
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_rlvr import confluence, jira
from atlas_rlvr.environments import (
    ENVIRONMENTS,
    ROUTES,
    SCHEMAS,
    TOOLS,
    execute,
    reset_synthetic_data,
    run_calls,
    tool_schemas,
    wire_seed,
)
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks, task_env
from atlas_rlvr.world import CATALOGUE, World, load_data, state_hash

FIELDS = {"project": {"key": "ABC"}, "parent": {"key": "ABC-123"}, "summary": "Write QA test cases",
          "issuetype": {"id": "10003"}, "assignee": {"accountId": "admin123"}}
PAGE = {"spaceId": "PAY", "title": "Release Notes 1.0", "parentId": "789",
        "body": {"representation": "storage", "value": "<p>x</p>"}}


def answer(env, name, **arguments):
    got = json.loads(execute(env, name, arguments))
    return got["status"], got["body"]


# --- P1: schema fidelity -------------------------------------------------------------------------------------------

def test_the_schema_shows_the_nested_shape():
    fields = SCHEMAS["create_issue"]["function"]["parameters"]["properties"]["fields"]
    assert fields["properties"]["parent"]["required"] == ["key"]
    assert fields["properties"]["issuetype"]["properties"]["id"] == {"type": "string"}
    body = SCHEMAS["create_page"]["function"]["parameters"]["properties"]["body"]
    assert body["required"] == ["representation", "value"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_instances_carry_schemas_that_can_be_called(scenario):
    env = ENVIRONMENTS[scenario]()
    for schema in tool_schemas(scenario):
        tool = getattr(env, schema["function"]["name"])
        assert tool == schema and callable(tool) and tool.__name__ == schema["function"]["name"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_public_methods_are_the_tools_of_table_1(scenario):
    public = {n for n, _ in inspect.getmembers(ENVIRONMENTS[scenario], inspect.isfunction) if not n.startswith("_")}
    assert public == set(TOOLS[scenario]) | {"reset"}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_methods_have_the_form_that_transformers_reads(scenario):
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    for name in TOOLS[scenario]:
        schema = chat.get_json_schema(getattr(ENVIRONMENTS[scenario], name).__get__(object()))
        assert schema["function"]["name"] == name
        assert set(schema["function"]["parameters"]["properties"]) == set(SCHEMAS[name]["function"]["parameters"]["properties"])


def test_a_tool_passes_on_what_the_wire_said():
    world = World(load_data("site.json"))
    status, _, body = jira.handle(world, "GET", "/rest/api/3/issue/ABC-123", {"fields": "summary,assignee,parent"}, {}, "")
    got = answer(ENVIRONMENTS["subtask"](), "get_issue", issueIdOrKey="ABC-123")
    assert got == (status, {"id": body["id"], "key": "ABC-123", "fields": body["fields"]})
    assert {"self", "expand"} <= set(body)


def test_a_tool_keeps_the_members_it_names_through_objects_and_lists():
    env = ENVIRONMENTS["subtask"]()
    answer(env, "create_issue", fields=FIELDS)
    fields = answer(env, "get_issue", issueIdOrKey="ABC-124")[1]["fields"]
    assert fields == {"summary": FIELDS["summary"], "assignee": {"accountId": "admin123"}, "parent": {"key": "ABC-123"}}
    offered = answer(ENVIRONMENTS["transition"](), "get_transitions", issueIdOrKey="ISK1")[1]["transitions"]
    assert offered[2] == {"id": "31", "name": "Resolve", "to": {"name": "Resolved"}}


def test_errors_are_never_trimmed():
    world = World(load_data("site.json"))
    _, _, body = confluence.handle(world, "GET", "/wiki/api/v2/pages/999", {}, {}, "")
    assert answer(ENVIRONMENTS["page"](), "get_page", page_id="999") == (404, body)


# --- P2: stateful but resettable -----------------------------------------------------------------------------------

def test_a_write_is_seen_by_later_reads_and_gone_after_reset():
    env = ENVIRONMENTS["cross"]()
    pristine = state_hash(env._world)
    status, made = answer(env, "create_issue", fields=FIELDS)
    assert status == 201 and answer(env, "get_issue", issueIdOrKey=made["key"])[1]["fields"]["summary"] == FIELDS["summary"]
    _, page = answer(env, "create_page", **PAGE)
    assert (page["parentId"], page["spaceId"]) == ("789", "PAY")
    assert answer(env, "get_page", page_id=page["id"])[1] == page
    env.reset()
    assert state_hash(env._world) == pristine
    assert answer(env, "get_issue", issueIdOrKey=made["key"])[0] == 404


def test_reset_synthetic_data_restores_and_is_no_tool():
    env = ENVIRONMENTS["subtask"]()
    pristine = state_hash(env._world)
    answer(env, "create_issue", fields=FIELDS)
    changed = state_hash(env._world)
    assert execute(env, "reset_synthetic_data", {}) == "{'error': 'Tool reset_synthetic_data not found.'}"
    assert state_hash(env._world) == changed != pristine
    reset_synthetic_data(env)
    assert state_hash(env._world) == pristine


def play(order):
    env = ENVIRONMENTS["page"]()
    return [execute(env, *call) for call in order]


def test_B11_rollouts_share_nothing_whatever_ran_before_or_beside():
    write, read = ("create_page", PAGE), ("get_page", {"page_id": "789"})
    alone = play([read, write])
    with ThreadPoolExecutor(8) as pool:
        beside = list(pool.map(play, [[write, read], [read, write]] * 8))
    assert all(answers == alone for answers in beside[1::2])
    assert all(answers == alone[::-1] for answers in beside[::2])


def test_a_pooled_instance_takes_the_world_of_its_task():
    env, (first, second) = ENVIRONMENTS["subtask"](), load_tasks("subtask", "held_out")[:2]
    for task in (first, second, load_tasks("subtask")[0]):
        env.reset(task=json.dumps(task), prompt=[], other_column=1)
        assert {call.outcome for call in run_calls(env, gold_calls(task))} == {"ok"}


# --- P3: determinism -----------------------------------------------------------------------------------------------

REPLAY = """
import json
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks, task_env
from atlas_rlvr.environments import execute
from atlas_rlvr.world import state_hash
for scenario in SCENARIOS:
    for split in ("train", "held_out"):
        task = load_tasks(scenario, split)[0]
        env = task_env(task)
        for call in gold_calls(task) + [("get_page", {}), ("nothing", {})]:
            print(execute(env, *call))
        print(state_hash(env._world))
"""


def replay(seed):
    return subprocess.run([sys.executable, "-c", REPLAY], capture_output=True, check=True, text=True,
                          env={**os.environ, "PYTHONHASHSEED": seed}).stdout


def test_same_calls_same_bytes_and_state_in_another_process():
    first, second = replay("1"), replay("2")
    assert first == second and first.count("\n") > 60


# --- P4: verifiability ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gold_is_a_small_dictionary(scenario):
    for split in ("train", "held_out"):
        for task in load_tasks(scenario, split):
            assert len(json.dumps(task["gold"])) < 500 and isinstance(task["gold"], dict)


# --- bad calls -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("scenario", "name", "arguments", "status"), [
    ("subtask", "get_issue", {}, 400),
    ("subtask", "get_issue", {"key": "ABC-123"}, 400),
    ("subtask", "get_issue", {"issueIdOrKey": ["ABC-123"]}, 400),
    ("subtask", "get_issue", {"issueIdOrKey": "  "}, 400),
    ("subtask", "get_issue", {"issueIdOrKey": "ABC-999"}, 404),
    ("subtask", "get_issue", {"issueIdOrKey": "../../x"}, 404),
    ("subtask", "get_issue", {"issueIdOrKey": "\ud800"}, 404),
    ("subtask", "create_issue", {"fields": "ABC-123"}, 400),
    ("subtask", "create_issue", FIELDS, 400),
    ("page", "create_page", {"title": "x"}, 400),
    ("label", "add_labels", {"page_id": "10001"}, 400),
    ("label", "add_labels", {"page_id": "10001", "labels": "runbook"}, 400),
    ("label", "add_labels", {"page_id": "10001", "labels": [1, None]}, 400),
    ("label", "search_pages", {}, 400),
    ("transition", "transition_issue", {"issueIdOrKey": "ISK1", "transition": "31"}, 400),
])
def test_a_bad_call_gets_the_apis_own_error_and_changes_nothing(scenario, name, arguments, status):
    env = ENVIRONMENTS[scenario]()
    pristine = state_hash(env._world)
    assert answer(env, name, **arguments)[0] == status
    assert state_hash(env._world) == pristine


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([(s, n) for s in SCENARIOS for n in TOOLS[s]]), st.dictionaries(
    st.sampled_from(["issueIdOrKey", "page_id", "fields", "transition", "labels", "query", "spaceId", "title", "body", "x"]),
    JSON, max_size=4))
def test_any_keyword_earns_an_answer(tool, arguments):
    scenario, name = tool
    env = ENVIRONMENTS[scenario]()
    pristine = state_hash(env._world)
    status, _ = answer(env, name, **arguments)
    assert status < 300 or state_hash(env._world) == pristine


@pytest.mark.parametrize("name", ["tools.jira.missing_parameter", "tools.confluence.missing_parameter"])
def test_wording_of_our_own_says_so(name):
    assert CATALOGUE[name]["provenance"] == "OURS"


def test_every_tool_has_a_route():
    assert set(ROUTES) == set(SCHEMAS) == {name for names in TOOLS.values() for name in names}


# --- D14, D13: identifiers and the two dialects --------------------------------------------------------------------

def test_D14_a_path_argument_may_be_an_integer_but_a_body_field_may_not():
    env = ENVIRONMENTS["page"]()
    assert answer(env, "get_page", page_id=789) == answer(env, "get_page", page_id="789")
    assert answer(env, "create_page", **{**PAGE, "parentId": 789})[0] == 400


def test_D13_the_paper_dialect_maps_the_space_key_and_logs_it():
    env = ENVIRONMENTS["page"]()
    assert answer(env, "create_page", **PAGE)[0] == 200 and env._aliases == ["space_key"]
    assert answer(env, "create_page", **{**PAGE, "spaceId": "131074", "title": "y"})[0] == 404


def test_D13_the_wire_dialect_refuses_the_space_key():
    env = ENVIRONMENTS["page"]("wire")
    status, body = answer(env, "create_page", **PAGE)
    assert status == 400 and "Expected type is Long" in body["errors"][0]["title"] and env._aliases == []
    space = answer(env, "get_page", page_id="789")[1]["spaceId"]
    assert space.isdigit() and answer(env, "create_page", **{**PAGE, "spaceId": space})[0] == 200


def test_D23_opaque_keys_are_looked_up():
    assert answer(ENVIRONMENTS["transition"](), "get_transitions", issueIdOrKey="ISK1")[0] == 200
    assert answer(ENVIRONMENTS["transition"]("wire"), "get_transitions", issueIdOrKey="ISK-1")[0] == 200


def test_wire_seed_renames_parents_too():
    row = {"key": "ISK2", "parent": "ISK1"}
    assert wire_seed({"issues": {"ISK2": row}})["issues"]["ISK-2"] == {"key": "ISK-2", "parent": "ISK-1"}


def test_an_unknown_dialect_is_refused():
    with pytest.raises(ValueError, match="choose one of"):
        ENVIRONMENTS["page"]("live")


def test_D25_a_search_sees_a_write_at_once():
    env = ENVIRONMENTS["label"]()
    answer(env, "add_labels", page_id="10001", labels=["runbook"])
    found = answer(env, "search_pages", query="checkout")[1]["results"]
    assert any(hit["content"]["id"] == "10001" for hit in found)


def test_D20_adding_labels_twice_adds_them_once():
    env = ENVIRONMENTS["label"]()
    for labels in (["ops"], ["ops", "ops"]):
        assert answer(env, "add_labels", page_id="10001", labels=labels)[0] == 200
    assert [row["name"] for row in answer(env, "get_page_labels", page_id="10001")[1]["results"]] == ["ops"]


def test_task_env_holds_the_tasks_world():
    task = load_tasks("page", "held_out")[0]
    assert answer(task_env(task), "get_page", page_id=task["gold"]["parentId"])[0] == 200
