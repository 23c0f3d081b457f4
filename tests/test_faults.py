"Faults: a plan is data, the layer is deterministic, and the score reads what was left behind."
import json
import random
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_rlvr import faults
from atlas_rlvr.environments import ENVIRONMENTS, execute, run_calls
from atlas_rlvr.faults import (
    ALWAYS,
    CLASSES,
    KINDS,
    PROFILES,
    Fault,
    Faults,
    Plan,
    environment,
    expand,
    faulty_env,
    faulty_score,
    find_plan,
    in_class,
    plan_to_json,
    read_plan,
    rollout_plan,
    settled,
    state_penalties,
    transport,
    under_faults,
)
from atlas_rlvr.final_state import changes
from atlas_rlvr.retries import blind, careful, fault_record, fault_row, play
from atlas_rlvr.rewards import REWARD_HASH, REWARD_SETS, score
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks, task_env
from atlas_rlvr.tool_calls import call_to_json
from atlas_rlvr.wire import handle as site
from atlas_rlvr.world import CATALOGUE, World, canonical, load_data, snapshot, state_hash

FIELDS = {"project": {"key": "ABC"}, "parent": {"key": "ABC-123"}, "summary": "Write QA test cases",
          "issuetype": {"id": "10003"}, "assignee": {"accountId": "admin123"}}
PAGE = {"spaceId": "65540", "title": "Ledger rules", "parentId": "789",
        "body": {"representation": "storage", "value": "<p>Ledger rules.</p>"}}
READ = ("GET", "/rest/api/3/issue/ABC-123", {}, {}, "")
CREATE = ("POST", "/rest/api/3/issue", {}, {}, json.dumps({"fields": FIELDS}))
MOVE = ("POST", "/rest/api/3/issue/ISK1/transitions", {}, {}, '{"transition": {"id": "31"}}')
NEW_PAGE = ("POST", "/wiki/api/v2/pages", {}, {}, json.dumps(PAGE))
SEARCH = ("GET", "/wiki/rest/api/search", {"cql": 'text ~ "ledger"'}, {}, "")
REQUESTS = [READ, CREATE, MOVE, NEW_PAGE, SEARCH, ("GET", "/wiki/api/v2/pages/789", {}, {}, ""),
            ("GET", "/wiki/api/v2/pages/10001/labels", {}, {}, ""), ("GET", "/rest/api/3/issue/ABC-124", {}, {}, "")]


@pytest.fixture
def world():
    return World(load_data("site.json"))


def layer(kind, **members):
    return Faults(Plan((Fault(kind, **members),)))


def statuses(handle, world, *requests):
    return [handle(world, *request)[0] for request in requests]


# Plans


def test_the_ten_rows_of_the_table_are_there():
    rows = {"rate_burst", "per_issue_write", "stale_search", "lost_response", "transient_5xx", "auth_silent", "no_permission",
            "conflict", "slow"}
    assert set(PROFILES) == set(KINDS) == rows | {"short_page", "missing_fields"}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_plan_survives_json(profile):
    for seed in range(50):
        plan = expand(profile, seed)
        text = plan_to_json(plan)
        json.loads(text, parse_constant=lambda name: pytest.fail(name))
        assert read_plan(text) == plan == expand(profile, seed)


@pytest.mark.parametrize("profile", ["rate_burst", "transient_5xx", "auth_silent", "slow"])
def test_seeds_make_different_plans(profile):
    assert len({plan_to_json(Plan(expand(profile, seed).faults)) for seed in range(50)}) > 3


def test_plans_are_equal_in_every_process():
    code = "from atlas_rlvr.faults import *\nprint([plan_to_json(expand(p, s)) for p in PROFILES for s in range(5)])"
    runs = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                           env={"PYTHONHASHSEED": seed, "PATH": ""}).stdout for seed in ("1", "2")}
    assert len(runs) == 1


BAD = ["", "{", "[]", "null", "1", '"x"', "{}", '{"faults": {}}', '{"faults": [1]}', '{"faults": [{}]}',
       '{"faults": [{"kind": "bad_luck"}]}', '{"faults": [{"kind": ["slow"]}]}', '{"faults": [{"kind": "slow", "nth": 0}]}',
       '{"faults": [{"kind": "slow", "nth": 1.0}]}', '{"faults": [{"kind": "slow", "nth": true}]}',
       '{"faults": [{"kind": "slow", "nth": "1"}]}', '{"faults": [{"kind": "slow", "seconds": -1}]}',
       '{"faults": [{"kind": "slow", "seconds": 1e400}]}', '{"faults": [{"kind": "slow", "seconds": NaN}]}',
       '{"faults": [{"kind": "slow", "match": "every"}]}', '{"faults": [{"kind": "slow", "match": {}}]}',
       '{"faults": [{"kind": "transient_5xx", "status": 503.0}]}', '{"faults": [{"kind": "transient_5xx", "status": 0}]}',
       '{"faults": [{"kind": "transient_5xx", "status": false}]}', '{"faults": [{"kind": "transient_5xx", "status": 418}]}',
       '{"faults": [{"kind": "missing_fields", "fields": "x"}]}', '{"faults": [{"kind": "missing_fields", "fields": [1]}]}',
       '{"faults": [{"kind": "slow", "when": 3}]}', '{"faults": [{"kind": "slow", "tick": 3}]}',
       '{"faults": [], "tick": "1s"}', '{"faults": [], "name": 3}', '{"faults": [], "seed": 3}', "[" * 100_000, b"\xff\xfe\x00"]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_plan_that_does_not_parse_is_one_sentence(text):
    with pytest.raises(ValueError, match="^the fault plan cannot be used: ") as caught:
        read_plan(text)
    assert "\n" not in str(caught.value)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)
                    | st.dictionaries(st.sampled_from(["kind", "match", "nth", "status", "faults", "fields", "tick"]), inner))


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_no_text_breaks_the_reader(value):
    try:
        assert isinstance(read_plan(json.dumps(value)), Plan)
    except ValueError as error:
        assert str(error).startswith("the fault plan cannot be used: ")


def test_a_command_line_names_a_plan(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(expand("slow", 4)))
    assert find_plan(str(file)) == find_plan("slow:4") and find_plan("slow") == expand("slow", 0)
    for wrong in ("slow:x", "sloow", str(tmp_path / "none.json"), str(tmp_path)):
        with pytest.raises(ValueError, match="no fault plan"):
            find_plan(wrong)


# The layer


def run(plan, requests=REQUESTS * 2):
    world, handle = World(load_data("site.json")), Faults(plan)
    return canonical([handle(world, *request) for request in requests]), state_hash(world), handle.log


def test_no_plan_changes_nothing():
    world, other = World(load_data("site.json")), World(load_data("site.json"))
    handle = Faults(Plan())
    for request in REQUESTS:
        assert canonical(handle(world, *request)) == canonical(site(other, *request))
    assert state_hash(world) == state_hash(other)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_same_plan_gives_the_same_bytes(profile):
    for seed in range(3):
        assert run(expand(profile, seed)) == run(expand(profile, seed))


def test_no_clock_and_no_randomness_while_requests_are_answered(monkeypatch):
    plans = [expand(profile, seed) for profile in PROFILES for seed in range(3)]
    for module, name in ((random, "random"), (random.Random, "random"), (time, "time"), (time, "sleep"), (time, "monotonic")):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("a clock or a source of randomness was asked"))
    for plan in plans:
        run(plan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("match", CLASSES)
def test_any_kind_meets_any_request_without_a_crash(kind, match):
    members = {"count": ALWAYS, "limit": 1, "seconds": 45, "fields": ("fields", "id")}
    for status in ((504, 0) if kind == "lost_response" else (500, 502, 503, 504)):
        world, handle = World(load_data("site.json")), layer(kind, match=match, status=status, **members)
        odd = [("POST", "/rest/api/3/search/jql", {}, {}, text) for text in ("", "{", "[]", '{"jql": "project = ABC"}')]
        odd += [("GET", "/", {}, {}, ""), ("PUT", "/wiki/api/v2/pages/789", {}, {}, "{}"), ("GET", "//", None, None, None),
                ("POST", "/wiki/rest/api/content/10001/label", {}, {}, '[{"prefix": "global", "name": "a b"}]')]
        for request in REQUESTS + odd:
            answer = handle(world, *request)
            assert isinstance(answer[0], int) and isinstance(answer[1], dict)
            json.dumps(answer[2], allow_nan=False)


def test_every_body_of_a_fault_is_in_the_catalogue(world):
    def shape(body):
        return set(body) if isinstance(body, dict) else type(body)
    rows = {(row["status"], str(shape(row["body"]))) for row in CATALOGUE.values()}
    for profile in PROFILES:
        for seed in range(10):
            answers = json.loads(run(expand(profile, seed))[0])
            assert {(status, str(shape(body))) for status, _, body in answers if status >= 400} <= rows


@pytest.mark.parametrize("row_id", [name for name, row in CATALOGUE.items() if row["api"] == "faults" and "replay" not in name])
def test_every_row_is_reached(row_id):
    reached = {
        "faults.jira.rate_limited": lambda: layer("rate_burst"), "faults.edge.502": lambda: layer("transient_5xx", status=502),
        "faults.jira.server_error": lambda: layer("transient_5xx", status=500), "faults.edge.503": lambda: layer("transient_5xx"),
        "faults.edge.504": lambda: layer("lost_response", status=504), "faults.tools.timeout": lambda: layer("slow", seconds=31),
        "faults.confluence.rate_limited": lambda: layer("rate_burst", match="write"),
        "faults.confluence.server_error": lambda: layer("transient_5xx", match="write", status=500),
        "faults.jira.conflict": lambda: layer("conflict")}
    request = {"faults.jira.conflict": MOVE, "faults.confluence.rate_limited": NEW_PAGE,
               "faults.confluence.server_error": NEW_PAGE}
    status, headers, body = reached[row_id]()(World(load_data("site.json")), *request.get(row_id, READ))
    row = CATALOGUE[row_id]
    assert (status, headers["Content-Type"]) == (row["status"], row["content_type"])
    assert canonical(row["body"]).replace("{seconds}", "30") == canonical(body)


# Rate limits


@pytest.mark.parametrize("seconds", [1, 2, 5, 30])
def test_waiting_as_told_passes_at_once(world, seconds):
    handle = layer("rate_burst", match="read", seconds=seconds)
    status, headers, _ = handle(world, *READ)
    assert (status, headers["Retry-After"], headers["RateLimit-Reason"]) == (429, str(seconds), "jira-burst-based")
    handle.wait(int(headers["Retry-After"]))
    assert handle(world, *READ)[0] == 200


def test_hammering_is_refused_for_the_whole_window(world):
    assert statuses(layer("rate_burst", match="read", seconds=4), world, *[READ] * 6) == [429] * 4 + [200] * 2


def test_a_limit_is_of_its_class_and_writes_nothing(world):
    handle, before = layer("rate_burst", match="write", seconds=2), state_hash(world)
    assert statuses(handle, world, READ, CREATE, READ) == [200, 429, 200]
    assert state_hash(world) == before
    assert statuses(handle, world, CREATE) == [201]


def test_the_nth_matching_request_is_counted_by_class(world):
    handle = layer("transient_5xx", match="write", nth=2, count=2)
    assert statuses(handle, world, READ, CREATE, READ, CREATE, READ, CREATE, CREATE) == [200, 201, 200, 503, 200, 503, 201]


def test_writes_to_one_issue_are_counted_per_issue(world):
    handle = layer("per_issue_write", count=ALWAYS, limit=2, seconds=30)
    assert statuses(handle, world, MOVE, MOVE, MOVE) == [204, 204, 429]
    other = ("POST", "/rest/api/3/issue/ABC-123/transitions", {}, {}, '{"transition": {"id": "31"}}')
    assert statuses(handle, world, other) == [204]
    _, headers, _ = handle(world, *MOVE)
    assert headers["RateLimit-Reason"] == "jira-per-issue-on-write"
    handle.wait(int(headers["Retry-After"]))
    assert handle(world, *MOVE)[0] == 204


# Lost, late, broken


@pytest.mark.parametrize("status", [504, 0])
def test_a_lost_answer_hides_a_write_that_took_effect(world, status):
    handle = layer("lost_response", match="write", status=status)
    told, headers, _ = handle(world, *CREATE)
    assert told == 504 and world.get("issues", "ABC-124")
    assert transport(headers)[1:] == (0, status == 0) and "Atlas-Reset" not in transport(headers)[0]
    assert statuses(handle, world, CREATE) == [201] and world.get("issues", "ABC-125")


def test_a_server_error_writes_nothing(world):
    before = state_hash(world)
    for status in (500, 502, 503):
        answer = layer("transient_5xx", status=status, seconds=7)(world, *CREATE)
        assert (answer[0], answer[1].get("Retry-After")) == (status, "7" if status == 503 else None)
    assert state_hash(world) == before


def test_a_slow_answer_is_late_or_never_comes(world):
    assert layer("slow", seconds=30)(world, *READ)[0] == 200
    handle = layer("slow", seconds=31)
    assert handle(world, *CREATE)[0] == 504 and world.get("issues", "ABC-124") and handle.clock == 32_000
    handle = Faults(Plan((Fault("slow", seconds=90),)), patience=None)
    status, headers, _ = handle(world, *READ)
    assert (status, transport(headers)[1]) == (200, 90)


# Half truths


def test_a_write_is_found_after_the_lag_and_read_at_once(world):
    for lag in range(4):
        world.reset()
        handle = layer("stale_search", count=ALWAYS, lag=lag)
        page = handle(world, *NEW_PAGE)[2]["id"]
        assert handle(world, "GET", f"/wiki/api/v2/pages/{page}", {}, {}, "")[0] == 200
        sizes = [handle(world, *SEARCH)[2]["size"] for _ in range(5)]
        assert sizes == [0] * max(0, lag - 1) + [1] * (5 - max(0, lag - 1))


def test_a_stale_search_writes_nothing_and_forgets_nothing(world):
    handle = layer("stale_search", count=ALWAYS, lag=50)
    handle(world, *NEW_PAGE)
    before = state_hash(world)
    handle(world, *SEARCH)
    assert state_hash(world) == before


def jql(text, **more):
    return ("POST", "/rest/api/3/search/jql", {}, {}, json.dumps({"jql": text, "fields": ["summary"], **more}))


def test_reconcile_makes_named_issues_current(world):
    handle = layer("stale_search", count=ALWAYS, lag=50)
    made = handle(world, *CREATE)[2]

    def found(**more):
        return {issue["id"] for issue in handle(world, *jql("project = ABC", **more))[2]["issues"]}
    assert made["id"] not in found() and made["id"] in found(reconcileIssues=[int(made["id"])])
    body = handle(world, "GET", "/rest/api/3/search/jql", {"jql": "project = ABC", "reconcileIssues": made["id"]},
                  {}, "")[2]
    assert made["id"] in {issue["id"] for issue in body["issues"]}


def test_a_short_page_leads_to_the_rest(world):
    everything = {"cql": "type = page"}
    whole = [hit["content"]["id"] for hit in site(world, "GET", SEARCH[1], everything, {}, "")[2]["results"]]
    handle, query, seen = layer("short_page"), everything, []
    while query:
        body = handle(world, "GET", SEARCH[1], query, {}, "")[2]
        seen += [hit["content"]["id"] for hit in body["results"]]
        following = body["_links"].get("next")
        query = following and everything | {"cursor": following.split("cursor=")[1].split("&")[0]}
    assert len(whole) > 2 and seen == whole and handle.log[0][3] == ("short_page",)


def test_missing_fields_come_back(world):
    handle = layer("missing_fields", match="read", fields=("assignee", "parentId"))
    first, second = (handle(world, *READ)[2]["fields"] for _ in range(2))
    assert set(second) - set(first) == {"assignee"}


# Somebody else


def test_a_bad_token_sees_an_empty_site_and_writes_nothing(world):
    before = state_hash(world)
    for request, status in ((READ, 404), (CREATE, 400), (MOVE, 404), (NEW_PAGE, 404), (SEARCH, 403),
                            (("GET", "/rest/api/3/myself", {}, {}, ""), 401)):
        answer = layer("auth_silent")(world, *request)
        assert (answer[0], answer[1]["X-Seraph-LoginReason"]) == (status, "AUTHENTICATED_FAILED")
    assert layer("auth_silent")(world, *jql("project = ABC"))[2] == {"issues": [], "isLast": True}
    assert state_hash(world) == before


def test_what_may_not_be_seen_is_missing(world):
    handle = layer("no_permission", match="read")
    missing = site(world, "GET", "/rest/api/3/issue/NOPE-1", {}, {}, "")
    assert canonical(handle(world, *READ)) == canonical(missing)
    assert statuses(handle, world, CREATE, MOVE, NEW_PAGE) == [400, 204, 200]
    by_id = ("GET", "/rest/api/3/issue/10100", {}, {}, "")
    assert statuses(handle, world, by_id) == [404] and world.get("issues", "ABC-123")


def test_a_hidden_page_hides_nothing_else(world):
    handle = layer("no_permission", match="read")
    assert statuses(handle, world, ("GET", "/wiki/api/v2/pages/789", {}, {}, ""), NEW_PAGE) == [404, 404]
    assert statuses(handle, world, ("GET", "/wiki/api/v2/pages/10001", {}, {}, ""), CREATE) == [200, 201]


def test_another_writer_comes_first(world):
    assert statuses(layer("conflict"), world, MOVE, MOVE) == [409, 204]
    update = ("PUT", "/wiki/api/v2/pages/789", {}, {}, json.dumps({
        "id": "789", "status": "current", "title": "Payments Home", "version": {"number": 2},
        "body": {"representation": "storage", "value": "<p>x</p>"}}))
    handle = layer("conflict")
    assert handle(world, *update)[0] == 409 and world.get("pages", "789")["version"] == 2
    third = update[:4] + (update[4].replace('"number": 2', '"number": 3'),)
    assert handle(world, *third)[0] == 200


def test_several_faults_strike_one_after_the_other(world):
    plan = Plan((Fault("rate_burst", match="write", seconds=1), Fault("transient_5xx", match="write", nth=2),
                 Fault("lost_response", match="write", nth=3)))
    handle = Faults(plan)
    assert statuses(handle, world, CREATE, CREATE, CREATE, READ) == [429, 503, 504, 200]
    assert [kinds for *_, kinds in handle.log] == [("rate_burst",), ("transient_5xx",), ("lost_response",), ()]
    assert world.get("issues", "ABC-124") and not world.get("issues", "ABC-125")


@pytest.mark.parametrize(("method", "path", "classes"), [
    ("get", "/rest/api/2/issue/A-1", {"any", "read"}), ("POST", "/rest/api/latest/search", {"any", "read", "search", "list"}),
    ("DELETE", "/rest/api/3/issue/A-1", {"any", "write", "issue_write"}),
    ("PUT", "/wiki/rest/api/content/1", {"any", "write", "update"}),
    ("GET", "/wiki/rest/api/content/1/child/page", {"any", "read", "list"}), ("POST", "/rest/api/3/issueLink", {"any", "write"})])
def test_classes_of_requests(method, path, classes):
    assert {name for name in CLASSES if in_class(name, method, path)} == classes


# In environments


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_environment_without_a_plan_is_the_old_one(scenario):
    for task in load_tasks(scenario)[:3]:
        plain, layered = task_env(task), faulty_env(task, Plan())
        for call in gold_calls(task):
            assert execute(plain, *call) == execute(layered, *call)
        assert state_hash(plain._world) == state_hash(layered._world)


def test_a_reset_starts_the_plan_again():
    env = environment("subtask", expand("transient_5xx", 0))()
    calls = [("get_issue", {"issueIdOrKey": "ABC-123"}), ("create_issue", {"fields": FIELDS})] * 2
    first = [call.status for call in run_calls(env, calls)]
    env.reset()
    assert [call.status for call in run_calls(env, calls)] == first and set(first) & {500, 502, 503}


def test_the_factory_has_the_tools_of_the_scenario():
    for scenario, plain in ENVIRONMENTS.items():
        names = {name for name in dir(environment(scenario, Plan())()) if not name.startswith("_")}
        assert names == {name for name in dir(plain()) if not name.startswith("_")}


def test_the_policy_reads_how_long_to_wait():
    env = faulty_env(load_tasks("subtask")[0], Plan((Fault("rate_burst", match="read", seconds=3),)))
    answers = [json.loads(execute(env, "get_issue", {"issueIdOrKey": "ABC-123"})) for _ in range(4)]
    assert [answer.get("retry_after") for answer in answers] == ["3", "2", "1", None]


@pytest.mark.slow
def test_trl_drives_environments_with_faults(monkeypatch):
    "The trainer's own tool loop, its environments behind a plan that refuses every first read."
    from atlas_rlvr import train
    refused = Plan((Fault("rate_burst", match="read", seconds=10**6),))
    monkeypatch.setattr(train, "ENVIRONMENTS", {"subtask": environment("subtask", refused)})
    run = train.plan_run("subtask", "embedded", 0)
    rows = train.evaluation_rows(load_tasks("subtask")[:2], 1, "before", 0.7)
    model, tokenizer = train.load_model(run.values)
    calls = [call for record in train.evaluate(run, model, tokenizer, rows) for call in record["calls"]]
    reads = [call for call in calls if call["name"] == "get_issue"]
    assert reads and {call.get("status") for call in reads} <= {429, None} and 429 in {call.get("status") for call in reads}


# A plan for each rollout


def test_a_rollout_s_plan_follows_from_its_task_and_place():
    tasks, places = load_tasks("subtask"), ["batch 1", "batch 2", "repeat 0"]
    drawn = {(task["id"], place): rollout_plan("rate_burst:4", task, place) for task in tasks for place in places}
    assert drawn == {(task["id"], place): rollout_plan("rate_burst:4", task, place) for task in tasks for place in places}
    assert len({plan.name for plan in drawn.values()}) == len(drawn)
    assert all(find_plan(plan.name) == plan for plan in drawn.values())
    assert rollout_plan("rate_burst:5", tasks[0], "batch 1") != drawn[tasks[0]["id"], "batch 1"]
    assert rollout_plan("rate_burst", tasks[0], "x") == rollout_plan("rate_burst:0", tasks[0], "x")


@pytest.mark.parametrize("text", ["storm", "slow:x", "slow:-1", "slow:1:2", "plan.json", "slow:\u0663"])
def test_only_a_profile_gives_every_rollout_its_plan(text):
    with pytest.raises(ValueError, match="unknown faults .*; give a profile, with a seed if you like, such as slow:3: rate_burst"):
        faults.check_faults(text)


def rolled(repeats, **record):
    "The record of a script that reads once and creates so often, every create's first answer lost."
    task = load_tasks("subtask")[0]
    env = faulty_env(task, expand("lost_response", 0))
    read_call, create = gold_calls(task)[:2]
    trace = run_calls(env, [read_call, *[create] * repeats])
    return under_faults({"reward": 0.0, "calls": [call_to_json(call) for call in trace], **record}, task, env)


def test_a_record_under_faults_names_its_plan_and_reads_the_state():
    once, twice = rolled(1), rolled(2)
    assert {once["faults"], twice["faults"]} == {"lost_response:0"}
    assert (once["components"]["state.duplicate"], twice["components"]["state.duplicate"]) == (0, -0.15)
    assert once["raw"] > twice["raw"] and once["reward"] > 0
    assert once["reward_hash"] == faults.FAULTY_HASH != REWARD_HASH


def test_a_lost_service_earns_nothing_under_faults_either():
    assert rolled(1, reward=None)["reward"] is None


def test_a_score_that_plays_the_calls_again_is_left_out():
    assert rolled(1, audited=1.0)["audited"] is None and "audited" not in rolled(1)


# The clock


def test_a_clock_can_be_followed(world):
    now = [0.25]
    handle = Faults(Plan((Fault("rate_burst", match="read", seconds=3),)), elapsed=lambda: now[0])
    waits = []
    for seconds in (0, 0, 1.5, 1.4, 0.2):
        now[0] += seconds
        status, headers, _ = handle(world, *READ)
        waits.append((status, headers.get("Retry-After")))
    assert waits == [(429, "3"), (429, "3"), (429, "2"), (429, "1"), (200, None)]


# The state


def test_the_paper_set_is_untouched():
    assert not REWARD_SETS["paper"].reads_state and not [n for n in REWARD_SETS["paper"].hundredths["subtask"] if "state" in n]


def test_two_issues_are_one_too_many():
    task = load_tasks("subtask")[0]
    env = faulty_env(task, expand("lost_response"))
    trace = run_calls(env, [("get_issue", {"issueIdOrKey": "ABC-123"})] + [("create_issue", {"fields": FIELDS})] * 2)
    found = faulty_score(task, trace, env._world)
    assert [call.status for call in trace] == [200, 504, 201] and found.components["state.duplicate"] == -0.15
    once = faulty_env(task, expand("lost_response"))
    trace = run_calls(once, [("get_issue", {"issueIdOrKey": "ABC-123"}), ("create_issue", {"fields": FIELDS}),
                             ("get_issue", {"issueIdOrKey": "ABC-124"})])
    assert faulty_score(task, trace, once._world).raw == 1.0 > found.raw


def test_a_refused_create_is_no_create():
    task = load_tasks("subtask")[0]
    env = faulty_env(task, Plan((Fault("transient_5xx", match="write"),)))
    trace = run_calls(env, [("get_issue", {"issueIdOrKey": "ABC-123"}), ("create_issue", {"fields": FIELDS})])
    assert [call.name for call in settled(trace, changes(World(load_data("site.json")), env._world))] == ["get_issue"]
    assert faulty_score(task, trace, env._world).components["state.missing"] == -0.30


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_faults_the_gold_earns_what_the_paper_gives(scenario):
    for task in load_tasks(scenario):
        env = task_env(task)
        trace = run_calls(env, gold_calls(task))
        assert faulty_score(task, trace, env._world).raw == score(scenario, trace, task["gold"]).raw
        assert set(state_penalties(scenario, World(task["world"] or load_data("site.json")), env._world,
                                   task["gold"]).values()) == {0}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_silence_is_missing(scenario):
    for task in load_tasks(scenario)[:2]:
        world = World(task["world"] or load_data("site.json"))
        found = state_penalties(scenario, world, world, task["gold"])
        assert found == {"missing": 2 if scenario == "cross" else 1, "duplicate": 0, "stray": 0}
        assert faulty_score(task, [], world).reward == 0


def test_a_write_to_something_else_is_stray():
    task = load_tasks("label")[0]
    env = task_env(task)
    run_calls(env, [("add_labels", {"page_id": "789", "labels": ["runbook"]})])
    found = state_penalties("label", World(load_data("site.json")), env._world, task["gold"])
    assert found == {"missing": 1, "duplicate": 0, "stray": 1}


def test_another_writers_version_is_not_the_policys(world):
    faults.put(world, "pages", "789", {**world.get("pages", "789"), "version": 2})
    assert changes(World(load_data("site.json")), world)["pages"] == {}


# Retry rules


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("profile", PROFILES)
def test_the_careful_script_never_leaves_two(scenario, profile):
    for seed in range(4):
        record, _ = play(careful, load_tasks(scenario)[0], expand(profile, seed))
        assert record["duplicates"] == 0 and record["outcome"] == "ended"


@pytest.mark.parametrize("profile", sorted(set(PROFILES) - {"no_permission", "auth_silent"}))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_careful_script_gets_through(scenario, profile):
    for seed in range(4):
        for task in load_tasks(scenario)[:2]:
            assert play(careful, task, expand(profile, seed))[0]["reward"] == 1.0


def test_the_careful_script_works_on_unseen_worlds():
    for task in load_tasks("subtask", "held_out")[:10]:
        assert play(careful, task, expand("lost_response", 1))[0] | {"task": ""} == {
            "task": "", "plan": "lost_response:1", "outcome": "ended", "reward": 1.0, "paper": 0.5, "calls": 3, "struck": 1,
            "duplicates": 0}


def test_the_blind_script_leaves_two():
    record, _ = play(blind, load_tasks("subtask")[0], expand("lost_response"))
    assert record["duplicates"] == 1 and record["reward"] < 1


def test_a_bad_token_does_not_make_the_careful_script_create_again():
    "An empty answer is no proof: the parent is looked at as well."
    task = load_tasks("subtask")[0]
    plan = Plan((Fault("lost_response", match="write", status=504), Fault("auth_silent", nth=3, count=2)))
    record, _ = play(careful, task, plan)
    assert record["duplicates"] == 0


def test_what_may_not_be_seen_is_left_alone():
    task = load_tasks("subtask")[0]
    record, talk = play(careful, task, Plan((Fault("no_permission", match="read"),)))
    assert record["reward"] == 0 and not [m for m in talk if "create_issue" in json.dumps(m.get("tool_calls", []))]


def test_a_layer_does_not_change_a_snapshot_taken_before(world):
    before = snapshot(world)
    frozen = canonical(before)
    run(expand("stale_search", 1))
    handle = layer("stale_search", count=ALWAYS)
    for request in REQUESTS:
        handle(world, *request)
    assert canonical(before) == frozen


def test_an_infrastructure_error_has_no_reward():
    task = load_tasks("subtask")[0]
    plan = expand("slow", 1)
    env = faulty_env(task, plan)
    record = fault_record(task, plan, env, [], "error")
    assert (record["reward"], record["paper"]) == (None, None)
    row = fault_row([record, record | {"reward": 1.0, "paper": 1.0}])
    assert (row["n"], row["reward"], row["paper"]) == (1, 1.0, 1.0)
