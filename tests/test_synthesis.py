"Rewards made from a document: how a document is read, the resource graph, what is paid and what costs, whole documents, a scenario."
import copy
import inspect
import json
import random
from collections import Counter
from dataclasses import replace
from datetime import date

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator, Draft202012Validator, FormatChecker
from specs import as_json_schema, published

from atlas_rlvr import agreement, document_scenario, environments, rewards, scale, scenarios, wire
from atlas_rlvr import train as T
from atlas_rlvr.environments import SCHEMAS, SITE, run_calls
from atlas_rlvr.openapi import (
    LIBRARY,
    Impossible,
    Request,
    a_value,
    argument_schema,
    argument_violations,
    arguments_of,
    find_operation,
    flat,
    kinds,
    load_document,
    operations,
    path_values,
    request_of,
    resolve,
    tool_name,
    tool_schema,
    variants,
    violations,
)
from atlas_rlvr.resources import noun, reads_after, reads_before, singular
from atlas_rlvr.rewards import score, score_task
from atlas_rlvr.runs import project_root
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks, task_env
from atlas_rlvr.synthesis import (
    ANY,
    Plan,
    fits,
    mock_trace,
    register,
    reward,
    scripted,
    slots,
    synthesise,
    table,
    tools,
)
from atlas_rlvr.tool_calls import OUTCOMES, Call
from atlas_rlvr.world import World

LEND = {"bookId": "b1", "reader": {"name": "Ann"}, "days": 3}
BOOK = {"title": "Emma", "shelfId": 3, "author": {"name": "Jane"}}
GOLD = {"addBook": BOOK, "lend": LEND, "removeBook": {"bookId": "b1"}}


REGISTRIES = (rewards.REWARD_SETS, rewards.WRITES, environments.SCHEMAS, environments.TOOLS, environments.ENVIRONMENTS,
              scenarios.DATA, scenarios.STEPS, scenarios.LINTS)


@pytest.fixture(autouse=True)
def own_registries():
    "What a test registers is gone after it."
    kept = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, before in zip(REGISTRIES, kept, strict=True):
        registry.clear()
        registry.update(before)


def earned(name, calls, gold=None):
    "The reward of scripted calls on a site that accepts what is valid."
    one = synthesise(LIBRARY, name, gold or GOLD[name])
    return reward(Plan({"": one}), mock_trace(one, calls), one.gold)


def gold_script(name):
    return scripted(synthesise(LIBRARY, name, GOLD[name]))


# How a document is read


@pytest.mark.parametrize(("source", "says"), [({"swagger": "2.0"}, "3.0 or 3.1"), ({"openapi": "4.0"}, "3.0 or 3.1"),
                                              ([], "give the path of an OpenAPI file"),
                                              ("no such file", "give the path of an OpenAPI file")], ids=str)
def test_a_file_that_is_no_document_is_refused_in_one_sentence(source, says):
    with pytest.raises(ValueError, match=says):
        load_document(source)


def test_a_document_may_be_json_or_yaml(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(LIBRARY))
    (tmp_path / "a.yaml").write_text("openapi: 3.1.0\npaths:\n  /a:\n    get:\n      operationId: getA\n")
    assert load_document(tmp_path / "a.json") == LIBRARY
    assert list(operations(load_document(tmp_path / "a.yaml"))) == ["getA"]


def test_a_broken_file_names_itself(tmp_path):
    (tmp_path / "a.json").write_text('{"openapi": "3.0')
    with pytest.raises(ValueError, match=r"a\.json"):
        load_document(tmp_path / "a.json")


@pytest.mark.parametrize(("schemas", "reference", "says"), [
    ({"A": {"$ref": "#/components/schemas/A"}}, "A", "back to itself"), ({}, "A", "leads nowhere")])
def test_a_reference_that_leads_nowhere_is_named(schemas, reference, says):
    with pytest.raises(ValueError, match=says):
        resolve({"components": {"schemas": schemas}}, {"$ref": f"#/components/schemas/{reference}"})


def test_a_schema_that_is_a_part_of_itself_is_refused():
    document = {"components": {"schemas": {"A": {"allOf": [{"$ref": "#/components/schemas/A"}]}}}}
    with pytest.raises(ValueError, match="contains itself"):
        flat(document, {"$ref": "#/components/schemas/A"})


@pytest.mark.parametrize(("schema", "expected"), [
    ({"type": "string", "nullable": True}, ["string", "null"]), ({"type": ["string", "null"]}, ["string", "null"]),
    ({"properties": {"a": {}}}, ["object"]), ({"items": {}}, ["array"]), ({}, []), ({"type": "a word of their own"}, [])], ids=str)
def test_types_of_both_versions(schema, expected):
    assert kinds(schema) == expected


OBJECT = {"type": "object", "required": ["a"], "additionalProperties": False, "properties": {
    "a": {"type": "string"}, "made": {"type": "string", "readOnly": True}}}
RULES = {  # case: (schema, value, rules broken)
    "text": ({"type": "string"}, "x", []), "number for text": ({"type": "string"}, 1, ["type"]),
    "flag for number": ({"type": "integer"}, True, ["type"]), "whole float": ({"type": "integer"}, 3.0, []),
    "half": ({"type": "integer"}, 3.5, ["type"]), "null": ({"type": "string"}, None, ["type"]),
    "null allowed": ({"type": "string", "nullable": True}, None, []), "listed": ({"enum": ["a", "b"]}, "b", []),
    "not listed": ({"enum": ["a", "b"]}, "c", ["enum"]), "one is not true": ({"enum": [1]}, True, ["enum"]),
    "constant": ({"const": "a"}, "b", []), "long": ({"type": "string", "maxLength": 2}, "abc", ["limit"]),
    "short": ({"type": "string", "minLength": 2}, "a", ["limit"]), "pattern": ({"type": "string", "pattern": "^a"}, "b", ["limit"]),
    "pattern of another language": ({"type": "string", "pattern": r"\p{L}+"}, "b", []),
    "large": ({"type": "integer", "maximum": 3}, 4, ["limit"]), "edge": ({"type": "integer", "maximum": 3}, 3, []),
    "edge excluded in 3.0": ({"type": "integer", "maximum": 3, "exclusiveMaximum": True}, 3, ["limit"]),
    "edge excluded in 3.1": ({"type": "integer", "exclusiveMinimum": 3}, 3, ["limit"]),
    "date": ({"type": "string", "format": "date"}, "2026-02-28", []), "no date": ({"type": "string", "format": "date"}, "soon", ["format"]),
    "no such day": ({"type": "string", "format": "date"}, "2026-02-30", ["format"]),
    "time": ({"type": "string", "format": "date-time"}, "2026-02-28T10:00:00Z", []),
    "no uuid": ({"type": "string", "format": "uuid"}, "1", ["format"]), "no address": ({"type": "string", "format": "uri"}, "a b", ["format"]),
    "too large for int32": ({"type": "integer", "format": "int32"}, 2**31, ["format"]),
    "unknown format": ({"type": "string", "format": "colour"}, "x", []), "list": ({"type": "array", "items": {"type": "string"}}, ["a"], []),
    "item": ({"type": "array", "items": {"type": "string"}}, ["a", 1], ["type"]),
    "too few": ({"type": "array", "minItems": 1}, [], ["limit"]), "repeated": ({"type": "array", "uniqueItems": True}, [1, 1], ["limit"]),
    "required": (OBJECT, {}, ["required"]), "unknown": (OBJECT, {"a": "x", "b": 1}, ["unknown"]),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": "x"}, ["type"]),
    "free map": ({"type": "object", "additionalProperties": {}}, {"a": "x"}, []),
    "either": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, 1, []),
    "neither": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, [], ["type"]),
    "both branches": ({"oneOf": [{"type": "object"}, {"type": "object"}]}, {}, []),
    "nearest branch": ({"anyOf": [OBJECT, {"type": "object", "required": ["x", "y", "z"]}]}, {}, ["required"]),
    "all of": ({"allOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, {}, ["required", "required"]),
    "a member twice": ({"allOf": [{"properties": {"a": {"minLength": 2}}}, {"properties": {"a": {"type": "string"}}}]}, {"a": "x"}, ["limit"]),
}


@pytest.mark.parametrize("case", RULES)
def test_what_a_schema_has_against_a_value(case):
    schema, value, broken = RULES[case]
    expected = broken if case != "constant" else ["enum"]
    assert [one.rule for one in violations({}, schema, value)] == expected


def test_what_the_server_fills_is_not_asked_for():
    schema = {**OBJECT, "required": ["a", "made"]}
    assert violations({}, schema, {"a": "x"}) == []


def test_a_recursive_value_is_followed_to_its_end():
    person = {"$ref": "#/components/schemas/Person"}
    deep = {"name": "a", "pupils": [{"name": "b", "pupils": [{"name": "c", "pupils": [{}]}]}]}
    assert [(one.path, one.rule) for one in violations(LIBRARY, person, deep)] == [("pupils[].pupils[].pupils[].name", "required")]


def test_a_tool_schema_of_a_recursive_document_ends():
    text = json.dumps(tool_schema(LIBRARY, find_operation(LIBRARY, "addBook")))
    assert "$ref" not in text and len(text) < 2000


@pytest.mark.parametrize("wrap", [lambda ref: ref, lambda ref: {"anyOf": [ref, {"type": "null"}]}, lambda ref: {"allOf": [ref]}],
                         ids=["plain", "anyOf", "allOf"])
def test_recursion_is_seen_through_every_composition(wrap):
    pet = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "owner": wrap({"$ref": "#/components/schemas/Pet"})}}
    document = {"openapi": "3.1.0", "components": {"schemas": {"Pet": pet}}, "paths": {"/pets": {"post": {"operationId": "add", "requestBody": {
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}}}}}}}
    one = synthesise(document, "add")
    assert json.dumps(one.tool).count('"name"') <= 6 and json.dumps(one.gold).count("name") <= 2
    assert violations(document, one.operation.body, one.gold) == []


@pytest.mark.parametrize("name", ["addBook", "lend", "getShelf", "removeBook"])
def test_a_tool_schema_is_a_schema(name):
    tool = tool_schema(LIBRARY, find_operation(LIBRARY, name))
    Draft202012Validator.check_schema(tool["function"]["parameters"])
    assert tool["type"] == "function" and tool["function"]["name"] == tool_name(find_operation(LIBRARY, name))


@pytest.mark.parametrize(("name", "expected"), [("addBook", "add_book"), ("getPageByIdV2", "get_page_by_id_v2"), ("a.b/c", "a_b_c"),
                                                ("DynamicModules.getModules_get", "dynamic_modules_get_modules_get")])
def test_names_of_tools(name, expected):
    assert tool_name(replace(find_operation(LIBRARY, "lend"), id=name)) == expected


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["addBook", "lend", "getShelf"])
def test_drawn_values_satisfy_another_validator_too(name, seed):
    operation = find_operation(LIBRARY, name)
    made = a_value(LIBRARY, argument_schema(LIBRARY, operation), random.Random(seed))
    root = as_json_schema(argument_schema(LIBRARY, operation)) | {"components": LIBRARY["components"]}
    root.get("required", []).remove("id") if "id" in root.get("required", []) else None
    assert list(Draft4Validator(root).iter_errors(made)) == [] and argument_violations(LIBRARY, operation, made) == []


@pytest.mark.parametrize(("schema", "says"), [
    ({"type": "string", "pattern": "^[q]{17}$"}, "pattern"), ({"type": "integer", "minimum": 2, "maximum": 1}, "range"),
    ({"type": "object", "required": ["x"], "additionalProperties": False, "properties": {"y": {}}}, "contradicts"),
    ({"$ref": "#/components/schemas/Loop"}, "inside itself")], ids=lambda one: one if isinstance(one, str) else "")
def test_a_value_that_cannot_be_made_has_a_reason(schema, says):
    loop = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/components/schemas/Loop"}}}
    with pytest.raises(Impossible, match=says):
        a_value({"components": {"schemas": {"Loop": loop}}}, schema, random.Random(0))


@pytest.mark.parametrize("value", ["b1", "a b", "a/b", "ü", "50%", "7"])
def test_a_request_can_be_read_back(value):
    lend = find_operation(LIBRARY, "lend")
    request = request_of(LIBRARY, lend, {**LEND, "bookId": value})
    assert arguments_of(LIBRARY, lend, request) == {**LEND, "bookId": value}
    assert request.path.count("/") == 4


@pytest.mark.parametrize(("template", "path", "expected"), [
    ("/a/{x}", "/a/1", {"x": "1"}), ("/a/{x}", "/b/1", None), ("/a/{x}", "/a/1/c", None), ("/a/{x}/c/{y}", "/a/1/c/2", {"x": "1", "y": "2"})])
def test_paths(template, path, expected):
    assert path_values(template, path) == expected


@pytest.mark.parametrize(("value", "broken"), [(3, []), ("3", []), ("three", ["type"]), (None, ["type"]), ([], ["type"]), (True, ["type"])])
def test_a_parameter_is_text_on_the_wire(value, broken):
    shelf = find_operation(LIBRARY, "getShelf")
    assert [one.rule for one in argument_violations(LIBRARY, shelf, {"shelfId": value})] == broken


@pytest.mark.parametrize("arguments", [None, [], "x", 3, {"bookId": None}, {"reader": {}}])
def test_arguments_of_any_shape_are_judged(arguments):
    assert argument_violations(LIBRARY, find_operation(LIBRARY, "lend"), arguments)


def test_a_name_in_path_and_body_is_one_argument():
    document = {"openapi": "3.0.3", "paths": {"/pages/{id}": {"put": {"operationId": "update", "parameters": [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}], "requestBody": {"content": {"application/json": {
            "schema": {"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}, "title": {"type": "string"}}}}}}}}}}
    update = find_operation(document, "update")
    assert request_of(document, update, {"id": "7", "title": "x"}) == Request("PUT", "/pages/7", {}, {"id": "7", "title": "x"})
    assert argument_violations(document, update, {"id": "7", "title": "x"}) == []


# The graph


@pytest.mark.parametrize(("name", "before", "after"), [("addBook", ["getShelf"], ["getBook"]), ("lend", ["getLoans", "getBook"], ["getLoans", "getBook"]),
                                                       ("removeBook", ["getBook"], ["getBook"])])
def test_reads_around_a_write(name, before, after):
    write, paths = find_operation(LIBRARY, name), list(slots(GOLD[name]))
    assert [one.operation.id for one in reads_before(LIBRARY, write, paths)] == before
    assert [one.operation.id for one in reads_after(LIBRARY, write, paths)] == after


@pytest.mark.parametrize(("path", "expected"), [("shelfId", "shelf"), ("fields.parent.key", "parent"), ("assignee.accountId", "assignee"),
                                                ("projectIdOrKey", "project"), ("title", ""), ("id", ""), ("valid", ""), ("space_id", "space")])
def test_what_a_field_names(path, expected):
    assert noun(path) == expected


@pytest.mark.parametrize(("word", "expected"), [("shelves", "shelf"), ("statuses", "status"), ("properties", "property"), ("issue", "issue"),
                                                ("classes", "class"), ("boxes", "box"), ("pages", "page"), ("access", "access")])
def test_singulars(word, expected):
    assert singular(word) == expected


def test_only_offered_reads_count():
    one = synthesise(LIBRARY, "lend", LEND, offered=["getBook"])
    assert [read.operation.id for read in one.before] == ["getBook"] == [read.operation.id for read in one.after]


def test_an_offered_read_that_the_document_does_not_have_is_refused():
    with pytest.raises(ValueError, match="no operation 'getBooks' in this document; it has for example getBook"):
        synthesise(LIBRARY, "lend", LEND, offered=["getBook", "getBooks"])


@pytest.mark.parametrize(("name", "change", "said"), [
    ("lend", {"days": "5"}, r"lend forbids this gold: days \(type\); give"), ("addBook", {"state": "lost"}, r"state \(enum\)"),
    ("addBook", {"pages": 9}, r"pages \(unknown\)"), ("addBook", {"bought": "soon", "shelfId": "3"}, r"shelfId \(type\), bought \(format\)"),
    ("addBook", {"author": {"name": 7}}, r"author.name \(type\)")], ids=["type", "enum", "unknown", "two", "nested"])
def test_gold_that_its_own_schema_forbids_is_refused(name, change, said):
    with pytest.raises(ValueError, match=said):
        synthesise(LIBRARY, name, GOLD[name] | change)


@pytest.mark.parametrize("change", [{"title": ANY}, {"author": ANY}, {"author": {"name": ANY}}, {"state": ANY}])
def test_gold_may_leave_a_value_open(change):
    assert synthesise(LIBRARY, "addBook", BOOK | change).gold == BOOK | change


# What is paid and what costs


@pytest.mark.parametrize("name", list(GOLD))
def test_gold_is_worth_one_and_nothing_zero(name):
    calls = gold_script(name)
    assert (earned(name, calls), earned(name, [])) == (1.0, 0.0)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["addBook", "lend", "removeBook", "getShelf"])
def test_what_can_be_earned_adds_up_to_one(name, count):
    parts = {f"{n}.": synthesise(LIBRARY, name) for n in range(count)}
    rows = table("x", parts)
    assert sum(round(100 * row["value"]) for row in rows if row["value"] > 0) == 100
    assert len({row["name"] for row in rows}) == len(rows)


READS, WRITE, CHECK = gold_script("lend")[:2], gold_script("lend")[2], gold_script("lend")[3]
SLIPS = {  # what goes wrong: (calls, reward)
    "no read": ([WRITE, CHECK], 0.9), "one read": ([READS[0], WRITE, CHECK], 0.95), "read too late": ([WRITE, *READS], 0.9),
    "no check": ([*READS, WRITE], 0.9), "read of another": ([("get_book", {"bookId": "b2"}), READS[0], WRITE, CHECK], 0.95),
    "twice": ([*READS, WRITE, WRITE, CHECK], 0.85), "wrong slot": ([*READS, ("lend", {**LEND, "days": 4}), CHECK], 0.35),
    "another book": ([*READS, ("lend", {**LEND, "bookId": "b2"}), CHECK], 0.0),
    "as well another book": ([*READS, WRITE, ("lend", {**LEND, "bookId": "b2"}), CHECK], 0.85),
    "wrong type": ([*READS, ("lend", {**LEND, "days": "3"}), CHECK], 0.0), "no reader": ([*READS, ("lend", {"bookId": "b1", "days": 3})], 0.0),
    "out of range": ([*READS, ("lend", {**LEND, "days": 31})], 0.0), "then right": ([*READS, ("lend", {**LEND, "days": "3"}), WRITE, CHECK], 0.9),
    "unknown tool": ([*READS, WRITE, CHECK, ("give", {})], 0.85), "reads only": (READS, 0.0), "too many reads": ([*READS * 3, WRITE, CHECK], 0.9),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_what_a_slip_costs(slip):
    calls, expected = SLIPS[slip]
    assert earned("lend", calls) == expected


@pytest.mark.parametrize("name", list(GOLD))
def test_every_planted_fault_costs(name):
    one = synthesise(LIBRARY, name, GOLD[name])
    found = scale.faults(one)
    for rule, place, arguments in found:
        calls = [(tool, arguments if tool == one.name else asked) for tool, asked in scripted(one)]
        assert earned(name, calls) < 1, (rule, place)
    assert {"type"} <= {rule for rule, *_ in found}


def test_each_rule_is_planted_and_seen_by_another_validator():
    add = synthesise(LIBRARY, "addBook", {**BOOK, "bought": "2026-01-01", "state": "new"})
    found = scale.faults(add)
    assert {rule for rule, *_ in found} == {"type", "required", "enum", "format", "unknown"}
    root = copy.deepcopy(argument_schema(LIBRARY, add.operation)) | {"components": LIBRARY["components"]}
    formats = FormatChecker(["date"])
    formats.checks("date", ValueError)(lambda value: not isinstance(value, str) or bool(date.fromisoformat(value)))
    checker = Draft4Validator(root, format_checker=formats)
    assert all(list(checker.iter_errors(arguments)) for _, _, arguments in found)


def test_what_the_site_takes_breaks_no_rule():
    one = synthesise(LIBRARY, "lend", LEND)
    calls = [replace(call, outcome="ok", status=200) for call in mock_trace(one, [*READS, ("lend", {**LEND, "days": "3"}), CHECK])]
    assert reward(Plan({"": one}), calls, LEND) == 1.0


@pytest.mark.parametrize(("gold", "value", "expected"), [
    (3, "3", True), ("3", 3, True), (True, "True", False), (1, True, False), ("a", "A", False), (ANY, "x", True), (ANY, "", False),
    ({"a": 1}, {"a": 1, "b": 2}, True), ({"a": 1}, {"b": 2}, False), ([1, 2], [2, 1, 3], True), ([1], [], False), ({}, "x", False)])
def test_what_fits_gold(gold, value, expected):
    assert fits(gold, value) is expected


def test_a_list_is_paid_item_by_item_and_pooled():
    document = copy.deepcopy(LIBRARY)
    document["components"]["schemas"]["Loan"] = {"type": "array", "items": {"type": "string"}}
    one = synthesise(document, "lend", {"bookId": "b1", "body": ["a", "b", "c", "d"]})
    plan, (*reads, _, check) = Plan({"": one}), scripted(one)

    def worth(*lists):
        calls = [*reads, *(("lend", {"bookId": "b1", "body": items}) for items in lists), check]
        return reward(plan, mock_trace(one, calls), one.gold)
    assert [worth(["a", "b", "c", "d"]), worth(["a", "b"], ["c", "d"]), worth(["a", "b"]), worth(["a", "b", "c", "d", "e"])] == [1.0, 1.0, 0.35, 0.9]


def test_removed_means_not_found():
    calls = gold_script("removeBook")
    one = synthesise(LIBRARY, "removeBook", GOLD["removeBook"])
    assert [call.status for call in mock_trace(one, calls)] == [200, 200, 404]


def test_the_same_seed_gives_the_same():
    one, other = (synthesise(LIBRARY, "addBook", seed=3) for _ in range(2))
    assert (one.gold, tools(one)) == (other.gold, tools(other)) and one.gold != synthesise(LIBRARY, "addBook", seed=4).gold


def test_the_hash_knows_the_schema():
    made = [register(name, {"lend": Plan({"": synthesise(document, "lend", LEND)})}).hash for name, document in (
        ("x", LIBRARY), ("x", LIBRARY), ("x", {**LIBRARY, "paths": {**LIBRARY["paths"], "/books/{bookId}/loans": {
            **LIBRARY["paths"]["/books/{bookId}/loans"], "post": {**LIBRARY["paths"]["/books/{bookId}/loans"]["post"], "requestBody": {
                "content": {"application/json": {"schema": {"type": "object", "properties": {"days": {"type": "integer"}}}}}}}}}}))]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("spare", [0, 2])
def test_calls_are_free_up_to_the_spare_ones(spare):
    one, calls = synthesise(LIBRARY, "lend", LEND), gold_script("lend")
    plan = Plan({"": one}, spare=spare)
    found = [reward(plan, mock_trace(one, [*calls, *[calls[-1]] * more]), one.gold) for more in (0, spare, spare + 1)]
    assert found == [1.0, 1.0, 0.95] and plan.limit == len(calls) + spare


def test_a_registered_set_scores_as_the_plan_does():
    one = synthesise(LIBRARY, "lend", LEND)
    made = register("library", {"lend": Plan({"": one})})
    for calls, expected in SLIPS.values():
        found = score("lend", mock_trace(one, calls), LEND, "library")
        assert found.reward == expected and found.hash == made.hash
        assert found.raw == pytest.approx(sum(found.components.values()))


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)
near_gold = st.fixed_dictionaries({}, optional={"bookId": st.just("b1") | json_values, "reader": st.just({"name": "Ann"}) | json_values,
                                                "days": st.just(3) | json_values})
a_call = st.builds(lambda name, arguments, outcome, status, body: Call(name, arguments, "", "t0c0", outcome, status, body),
                   st.sampled_from(["lend", "get_book", "get_loans", "give", None]), st.none() | near_gold, st.sampled_from(OUTCOMES),
                   st.sampled_from([200, 400, 404, 429, None]), json_values)


@given(st.lists(a_call, max_size=8))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_any_trace_has_a_reward_between_0_and_1(trace):
    one = synthesise(LIBRARY, "lend", LEND)
    before = copy.deepcopy(trace)
    first, second = (reward(Plan({"": one}), trace, LEND) for _ in range(2))
    assert 0 <= first <= 1 and first == second and trace == before


# Where the document is silent

SILENT = {"openapi": "3.0.1", "paths": {
    "/rest/api/3/issue": {"post": {"operationId": "createIssue", "requestBody": {"content": {"application/json": {"schema": {
        "type": "object", "properties": {"fields": {"type": "object", "additionalProperties": {}}}}}}}}},
    "/rest/api/3/issue/{issueIdOrKey}": {"get": {"operationId": "getIssue", "parameters": [
        {"name": "issueIdOrKey", "in": "path", "required": True, "schema": {"type": "string"}}]}}}}
FIELDS = {"project": {"key": "ABC"}, "parent": {"key": "ABC-123"}, "summary": "Write QA test cases", "issuetype": {"id": "10003"},
          "assignee": {"accountId": "admin123"}}
META = wire.handle(World(SITE), "GET", "/rest/api/3/issue/createmeta/ABC/issuetypes/10003")[2]
WRONG_FIELDS = {"parent": ("ABC-123", "type"), "assignee": ("admin123", "type"), "description": ("text", "type"), "summary": (7, "type"),
                "labels": ("a", "type"), "projectKey": ("ABC", "unknown")}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_createmeta_says_what_the_document_does_not(name):
    value, rule = WRONG_FIELDS[name]
    told, silent = (synthesise(SILENT, "createIssue", {"fields": FIELDS}, meta) for meta in (META, None))
    wrong = {"fields": {**FIELDS, name: value}}
    assert argument_violations(silent.document, silent.operation, wrong) == []
    assert rule in [one.rule for one in argument_violations(told.document, told.operation, wrong)]


@pytest.mark.parametrize("name", ["project", "issuetype", "summary", "parent"])
def test_createmeta_requires(name):
    told = synthesise(SILENT, "createIssue", {"fields": FIELDS}, META)
    less = {"fields": {other: value for other, value in FIELDS.items() if other != name}}
    assert [one.rule for one in argument_violations(told.document, told.operation, less)] == ["required"]
    assert argument_violations(told.document, told.operation, {"fields": FIELDS}) == []


def test_createmeta_of_an_operation_that_is_not_silent_is_refused():
    with pytest.raises(ValueError, match="describes no free map of lend"):
        synthesise(LIBRARY, "lend", LEND, META)


def test_the_papers_tool_comes_out_of_createmeta():
    made = tools(synthesise(SILENT, "createIssue", {"fields": FIELDS}, META))[-1]["function"]["parameters"]["properties"]["fields"]
    hand = SCHEMAS["create_issue"]["function"]["parameters"]["properties"]["fields"]
    assert set(made["required"]) == set(hand["required"]) and made["properties"].keys() == hand["properties"].keys()
    assert all(made["properties"][name]["type"] == hand["properties"][name]["type"] for name in FIELDS)


# Agreement


def test_agreement_counts_ties_by_halves():
    same, one_ties, both_tie, opposite = (0, 1), (1, 2), (2, 3), (0, 4)
    found = agreement.agreement([same, one_ties, both_tie, opposite], [0, 1, 1, 1, 1], [0, 1, 0, 0, -1])
    assert found == {"pairs": 3, "same": 1, "one_ties": 1, "opposite": 1, "agreement": 0.5}
    assert agreement.agreement([(0, 1)], [0, 0], [1, 1])["agreement"] is None


def test_pairs_are_the_same_every_time():
    found = [agreement.draw("label", agreement.ROLLOUTS, 40, 50) for _ in range(2)]
    assert found[0][1:] == found[1][1:] and [row[0] for row in found[0][0]] == [row[0] for row in found[1][0]]
    assert len({row[0] for row in found[0][0]}) > 20


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_labels_need_no_published_document(split):
    register("own", {"label": agreement.plan_scenario([agreement.OWN], "label")})
    for task in load_tasks("label", split):
        trace = run_calls(task_env(task), gold_calls(task))
        assert (score_task(task, trace, "own").reward, score_task(task, [], "own").reward) == (1.0, 0.0)


@pytest.mark.parametrize("name", sorted({name for names in environments.TOOLS.values() for name in names}))
@pytest.mark.parametrize("arguments", [{}, {"issueIdOrKey": 7, "page_id": 7}, {"labels": "a", "page_id": "1"}, {"x": None}], ids=str)
def test_every_hand_made_tool_has_a_request(name, arguments):
    request = agreement.site_request(Call(name, arguments, ""))
    assert request.method == environments.ROUTES[name].method


def test_an_unknown_tool_has_none():
    assert agreement.site_request(Call("make_page", {}, "")) is None


def stored(name):
    return json.loads((project_root() / "results" / "synthesis" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_stored_agreement_meets_its_bar(scenario):
    row = next(row for row in stored("agreement.json")["rows"] if row["scenario"] == scenario)
    found = row["audited"]
    assert found["pairs"] >= 5000 and found["agreement"] >= 0.95
    assert found["agreement"] == round((found["same"] + found["one_ties"] / 2) / found["pairs"], 4)
    assert sum(count for *_, count in found["why"]) == found["one_ties"] + found["opposite"]


@pytest.fixture(scope="module")
def documents():
    return [published("confluence"), published("jira"), agreement.OWN]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_five_scenarios_from_the_published_documents(documents, scenario):
    register("synthesised", {scenario: agreement.plan_scenario(documents, scenario)})
    for task in load_tasks(scenario) + load_tasks(scenario, "held_out"):
        trace = run_calls(task_env(task), gold_calls(task))
        found = score_task(task, trace, "synthesised")
        assert (found.reward, found.raw, score_task(task, [], "synthesised").reward) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_small_comparison_comes_near_the_bar(documents, scenario):
    register("synthesised", {scenario: agreement.plan_scenario(documents, scenario)})
    row = agreement.compare(scenario, size=200, pairs=1500)
    assert row["audited"]["agreement"] >= 0.92 and row["audited"]["pairs"] > 500


# Whole documents


@pytest.mark.parametrize("document", list(stored("scale.json")["documents"]))
def test_the_stored_survey_meets_its_bars(document):
    row = stored("scale.json")["documents"][document]
    total = sum(row["bite"].values())
    assert row["bite"]["passes"] >= 0.9 * total and total + sum(row["path_only"].values()) == row["operations"]
    assert sum(row["caught"].values()) >= 0.95 * sum(row["planted"].values())
    assert len(row["not_passed"]) == row["operations"] - row["bite"]["passes"] - row["path_only"].get("passes", 0)


def test_both_documents_were_surveyed():
    assert sorted(row["operations"] for row in stored("scale.json")["documents"].values()) == [218, 619]


def test_a_survey_of_the_example():
    found = scale.survey(LIBRARY)
    assert found["not_passed"] == {} and found["caught"] == found["planted"] and found["operations"] == 6


def test_a_fault_that_goes_unseen_is_a_reason(monkeypatch):
    monkeypatch.setattr(scale, "faults", lambda one: [("required", ("x",), one.gold), ("enum", ("x",), one.gold)])
    row = scale.examine(LIBRARY, "lend")
    assert row["reason"] == "a fault of required goes unseen" and row["planted"] == {"required": 1, "enum": 1} and row["caught"] == {}


def test_a_folder_without_documents_is_said_to_be_one(tmp_path):
    for measure in (scale.measure, agreement.load_documents):
        with pytest.raises(ValueError, match=r"no \.json document"):
            measure(tmp_path)


@pytest.mark.parametrize("product", ["jira", "confluence"])
def test_every_twentieth_operation_of_the_published_documents(product):
    document = published(product)
    rows = [scale.examine(document, name) for name in list(operations(document))[::20]]
    assert Counter(row["reason"] for row in rows)["passes"] >= 0.9 * len(rows)


@pytest.mark.parametrize(("product", "step"), [pytest.param("jira", 20, marks=pytest.mark.slow), ("confluence", 8)])
def test_another_validator_sees_the_planted_faults(product, step):
    """`oneOf` is read as `anyOf`; formats are left out, which that validator does not check.

    The few it does not see are in schemas that have properties and no type: read here as objects, there as anything.
    """
    document = published(product)
    text = json.dumps(document).replace('"oneOf"', '"anyOf"')
    components, seen, missed = as_json_schema(json.loads(text)["components"]), 0, []
    for name in list(operations(document))[5::step]:
        try:
            one = synthesise(document, name)
        except Impossible:
            continue
        schema = json.loads(json.dumps(argument_schema(document, one.operation)).replace('"oneOf"', '"anyOf"'))
        checker = Draft4Validator(as_json_schema(schema) | {"components": components})
        for rule, place, arguments in scale.faults(one):
            if rule != "format" and argument_violations(document, one.operation, arguments):
                seen += 1
                missed += [] if list(checker.iter_errors(arguments)) else [(name, rule, place)]
    assert seen > 50 and len(missed) <= 0.03 * seen, missed[:10]


@pytest.mark.slow
@pytest.mark.parametrize("product", ["jira", "confluence"])
def test_every_operation_of_the_published_documents(product):
    found = scale.survey(published(product))
    assert found["bite"]["passes"] >= 0.9 * sum(found["bite"].values())
    assert sum(found["caught"].values()) >= 0.95 * sum(found["planted"].values())


# A scenario out of a document


def pages_document():
    "A small document of one operation that the paper never touched."
    identity = {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}
    body = {"type": "object", "required": ["representation", "value"], "properties": {
        "representation": {"type": "string", "enum": ["storage", "wiki"]}, "value": {"type": "string"}}}
    page = {"type": "object", "required": ["id", "status", "title", "body", "version"], "properties": {
        "id": {"type": "string"}, "status": {"type": "string", "enum": ["current", "draft"]}, "title": {"type": "string"}, "body": body,
        "version": {"type": "object", "required": ["number"], "properties": {"number": {"type": "integer"}}}}}
    return {"openapi": "3.0.3", "servers": [{"url": "https://{domain}/wiki/api/v2"}], "paths": {"/pages/{id}": {
        "get": {"operationId": "getPageById", "parameters": [identity]},
        "put": {"operationId": "updatePage", "summary": "Update page", "parameters": [identity],
                "requestBody": {"content": {"application/json": {"schema": page}}}}}}}


@pytest.fixture
def free_names():
    "Two documents here make other tools of the same names; a page that ran in this process may have done so too."
    before = dict(document_scenario.SCHEMAS)
    for tool in ("get_page_by_id", "update_page"):
        document_scenario.SCHEMAS.pop(tool, None)
    yield
    document_scenario.SCHEMAS.clear()
    document_scenario.SCHEMAS.update(before)


@pytest.fixture
def installed(free_names):
    document_scenario.install_operation(pages_document(), "updatePage", "update", train=8, held_out=4)
    return scenarios.DATA["update"]["tasks"]


def test_a_scenario_has_tasks_tools_and_a_reward(installed):
    assert [tool["function"]["name"] for tool in environments.tool_schemas("update")] == ["get_page_by_id", "update_page"]
    for task in installed + scenarios.DATA["update"]["held_out"]:
        trace = run_calls(task_env(task), gold_calls(task))
        assert [call.outcome for call in trace] == ["ok"] * 3
        assert score("update", trace, task["gold"], "update").reward == 1.0
        assert score("update", [], task["gold"], "update").reward == 0.0
        assert scenarios.lint(task) == [] and scenarios.messages(task)[1]["content"] == task["prompt"]


def test_a_scenario_that_is_entered_again_has_its_new_tasks(installed):
    first = scenarios.find_task("update", installed[0]["id"])
    document_scenario.install_operation(pages_document(), "updatePage", "update", train=3, held_out=2, seed=1)
    task = scenarios.DATA["update"]["tasks"][0]
    found = scenarios.find_task("update", task["id"])
    assert found["prompt"] == task["prompt"] != first["prompt"]


def test_what_breaks_in_such_an_environment_has_no_reward(installed, monkeypatch):
    env, [call, *_] = task_env(installed[0]), gold_calls(installed[0])
    monkeypatch.setattr(document_scenario, "answer", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        env._send(*call)
    assert env._failure == "ZeroDivisionError: division by zero"


def test_no_task_is_in_both_splits(installed):
    held_out = scenarios.DATA["update"]["held_out"]
    assert not {task["prompt"] for task in installed} & {task["prompt"] for task in held_out}


def test_the_prompt_names_what_no_read_shows_and_nothing_else(installed):
    for task in installed:
        assert task["gold"]["title"] in task["prompt"] and task["gold"]["body"]["value"] in task["prompt"]
        assert "version" not in task["prompt"]


def test_the_number_that_must_be_read_matters(installed):
    task = installed[0]
    for step in (-1, 1):
        wrong = {**task["gold"], "version": {"number": task["gold"]["version"]["number"] + step}}
        trace = run_calls(task_env(task), [gold_calls(task)[0], ("update_page", wrong)])
        assert trace[-1].status == 409 and score("update", trace, task["gold"], "update").reward == 0.0


def test_the_class_is_what_the_trainer_wants(installed):
    made = environments.ENVIRONMENTS["update"]
    names = {name for name, _ in inspect.getmembers(made, predicate=inspect.isfunction) if not name.startswith("_")}
    assert names == {"reset", "get_page_by_id", "update_page"}
    env = made()
    env.reset(task=json.dumps(installed[0]))
    assert json.loads(env.get_page_by_id(id=installed[0]["gold"]["id"]))["status"] == 200
    assert env.update_page["function"]["name"] == "update_page"


@pytest.mark.parametrize("arguments", [{}, {"id": None}, {"id": []}, {"id": "no such"}, {"id": "1/2"}, {"x": 1}], ids=str)
def test_any_call_is_answered(installed, arguments):
    env = task_env(installed[0])
    for name in ("get_page_by_id", "update_page"):
        assert json.loads(environments.execute(env, name, arguments))["status"] >= 400


def test_an_operation_that_the_site_never_accepts_is_named():
    one = synthesise(LIBRARY, "lend", LEND)
    with pytest.raises(Impossible, match="the site accepts no lend"):
        document_scenario.find_gold(one, World(SITE), random.Random(0))


def scored(scenario, rewards_name, tasks):
    "What the training's reward function gives for gold and for silence."
    run = T.plan_run(scenario, "embedded", 0, rewards=rewards_name, max_completion_length=640)
    completions = [talk for task in tasks for talk in (environments.transcript(task_env(task), gold_calls(task)), [
        {"role": "assistant", "content": "Done."}])]
    ledger = T.Ledger(run)
    found = ledger.score_rollouts(completions, [json.dumps(task) for task in tasks for _ in range(2)])
    return found, {record["reward_hash"] for record in ledger.records}


def test_training_takes_a_synthesised_set_of_a_scenario_of_the_paper():
    made = register("own", {"label": agreement.plan_scenario([agreement.OWN], "label")})
    assert scored("label", "own", load_tasks("label")[:2]) == ([1.0, 0.0] * 2, {made.hash})


def test_training_takes_a_scenario_out_of_a_document(installed, monkeypatch):
    "Where the list of scenarios is fixed, the name is added to it."
    monkeypatch.setattr(scenarios, "SCENARIOS", (*SCENARIOS, "update"))
    assert scored("update", "update", installed[:2])[0] == [1.0, 0.0] * 2
    assert [row["task"] for row in T.training_rows(installed)] == [json.dumps(task) for task in installed]


def test_a_name_is_taken_once(installed):
    with pytest.raises(ValueError, match="is taken"):
        document_scenario.install_operation(pages_document(), "updatePage", "page", train=2, held_out=2)


def test_the_published_document_gives_the_same_scenario(free_names):
    made = document_scenario.install_operation(published("confluence"), "updatePage", "published", train=3, held_out=2)
    for task in scenarios.DATA["published"]["tasks"]:
        trace = run_calls(task_env(task), gold_calls(task))
        assert score("published", trace, task["gold"], made.rewards).reward == 1.0


def test_variants_are_bounded():
    wide = {"allOf": [{"oneOf": [{"type": "string"}] * 9}, {"oneOf": [{"type": "string"}] * 9}, {"oneOf": [{"type": "string"}] * 9}]}
    assert len(variants({}, wide)) <= 40
