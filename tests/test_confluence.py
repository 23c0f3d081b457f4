"Confluence on the wire: every row of the error catalogue, the rules of each operation, and the published schemas."
import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_rlvr.confluence import OPERATIONS, ROUTES, handle
from atlas_rlvr.world import CATALOGUE, World, canonical, load_data, state_hash

SITE = load_data("site.json")
SPECS = Path(__file__).parents[2] / "shared" / "specs"
ROWS = {name: row for name, row in CATALOGUE.items() if row["api"] == "confluence"}
PAGES, LABEL, SEARCH = "/wiki/api/v2/pages", "/wiki/rest/api/content/10001/label", "/wiki/rest/api/search"
PAYLOAD = {"spaceId": "65540", "title": "Release Notes 1.0", "parentId": "789",
           "body": {"representation": "storage", "value": "<p>x</p>"}}
OPS = {"prefix": "global", "name": "ops"}


def template(row):
    "A pattern that matches exactly the bodies a catalogue row can give."
    return re.compile(re.sub(r"\\\{[a-z_]+\\\}", ".*", re.escape(canonical(row["body"]))), re.DOTALL)


TEMPLATES = {name: template(row) for name, row in ROWS.items()}


def is_row(name, status, body):
    return ROWS[name]["status"] == status and TEMPLATES[name].fullmatch(canonical(body)) is not None


def ask(world, method, path, body=None, raw=None, **query):
    "Status and body; an error must be a catalogue row and must leave the state as it was."
    before = state_hash(world)
    text = raw if raw is not None else "" if body is None else json.dumps(body)
    status, headers, answer = handle(world, method, path, query, {}, text)
    assert status == 204 or headers["Content-Type"]
    json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()
    if status >= 400:
        assert any(is_row(name, status, answer) for name in ROWS), answer
    if status >= 400 or method == "GET":
        assert state_hash(world) == before
    return status, answer


@pytest.fixture
def world():
    return World(copy.deepcopy(SITE))


def but(**changes):
    "The good payload with some members changed; `None` drops one."
    return {name: value for name, value in {**PAYLOAD, **changes}.items() if value is not None}


def named(*names):
    return [{"prefix": "global", "name": name} for name in names]


# One request for each row of the catalogue: (method, path, body, query).
REACHED = {
    "any.unknown_path": ("GET", "/wiki/api/v2/nope", None, {}),
    "any.not_built": ("GET", f"{PAGES}/789/versions", None, {}),
    "v2.method_not_allowed": ("POST", f"{PAGES}/789/labels", [], {}),
    "v1.method_not_allowed": ("POST", "/wiki/rest/api/content/789/child/label", [], {}),
    "getPage.missing": ("GET", f"{PAGES}/999", None, {}),
    "getPage.id_not_long": ("GET", f"{PAGES}/Docs", None, {}),
    "getPage.status": ("GET", f"{PAGES}/789", None, {"status": "published"}),
    "getPage.body_format": ("GET", f"{PAGES}/789", None, {"body-format": "markdown"}),
    "list.limit_not_int": ("GET", f"{PAGES}/789/labels", None, {"limit": "many"}),
    "list.limit_too_large": ("GET", f"{PAGES}/789/labels", None, {"limit": "300"}),
    "list.limit_too_small": ("GET", f"{PAGES}/789/labels", None, {"limit": "0"}),
    "list.choice": ("GET", f"{PAGES}/789/labels", None, {"sort": "size"}),
    "list.not_long": ("GET", "/wiki/api/v2/spaces", None, {"ids": "PAY"}),
    "list.cursor": ("GET", f"{PAGES}/789/labels", None, {"cursor": "next"}),
    "createPage.not_json_object": ("POST", PAGES, [PAYLOAD], {}),
    "createPage.space_missing": ("POST", PAGES, but(spaceId=None), {}),
    "createPage.space_not_long": ("POST", PAGES, but(spaceId="PAY"), {}),
    "createPage.space_unknown": ("POST", PAGES, but(spaceId="131074"), {}),
    "createPage.status": ("POST", PAGES, but(status="published"), {}),
    "createPage.title_missing": ("POST", PAGES, but(title=" "), {}),
    "createPage.title_not_string": ("POST", PAGES, but(title=1.0), {}),
    "createPage.title_too_long": ("POST", PAGES, but(title="x" * 256), {}),
    "createPage.body_not_object": ("POST", PAGES, but(body="<p>x</p>"), {}),
    "createPage.representation": ("POST", PAGES, but(body={"value": "<p>x</p>"}), {}),
    "createPage.value_not_string": ("POST", PAGES, but(body={"representation": "storage"}), {}),
    "createPage.parent_not_string": ("POST", PAGES, but(parentId=789), {}),
    "createPage.parent_not_long": ("POST", PAGES, but(parentId="Home"), {}),
    "createPage.parent_missing": ("POST", PAGES, but(parentId="999"), {}),
    "createPage.parent_elsewhere": ("POST", PAGES, but(parentId="100"), {}),
    "createPage.root_level": ("POST", PAGES, PAYLOAD, {"root-level": "true"}),
    "createPage.duplicate_title": ("POST", PAGES, but(title="payments HOME"), {}),
    "content.missing": ("POST", "/wiki/rest/api/content/999/label", [OPS], {}),
    "content.id_not_long": ("GET", "/wiki/rest/api/content/Docs/label", None, {}),
    "content.page_request": ("GET", LABEL, None, {"start": "-1"}),
    "addLabels.not_labels": ("POST", LABEL, ["ops"], {}),
    "addLabels.empty_name": ("POST", LABEL, named(" , "), {}),
    "addLabels.invalid_characters": ("POST", LABEL, named("v1.2"), {}),
    "addLabels.too_long": ("POST", LABEL, named("x" * 256), {}),
    "search.cql_missing": ("GET", SEARCH, None, {}),
    "search.not_cql": ("GET", SEARCH, None, {"cql": 'title ~ "open'}),
    "search.no_such_field": ("GET", SEARCH, None, {"cql": "Grill = x"}),
    "search.not_a_date": ("GET", SEARCH, None, {"cql": "created > yesterday"}),
    "search.not_an_id": ("GET", SEARCH, None, {"cql": "parent = Home"}),
    "search.empty_value": ("GET", SEARCH, None, {"cql": 'title = ""'}),
    "search.empty_site_search": ("GET", SEARCH, None, {"cql": 'siteSearch ~ ""'}),
}


@pytest.mark.parametrize("name", sorted(REACHED))
def test_the_row_is_reached(world, name):
    method, path, body, query = REACHED[name]
    status, answer = ask(world, method, path, body, **query)
    assert is_row(f"confluence.{name}", status, answer), (status, answer)


@pytest.mark.parametrize("path, name", [(f"{PAGES}/789", "v2.bad_credential"), (SEARCH, "v1.bad_credential")])
def test_an_empty_site_refuses_everybody(path, name):
    assert is_row(f"confluence.{name}", *ask(World({}), "GET", path))
    assert ask(World({**SITE, "users": {}}), "GET", path, cql="type=page")[0] == 200


def test_rows_say_where_they_come_from():
    for name, row in ROWS.items():
        assert row["provenance"] in ("OBS", "USER", "SPEC", "DC", "UNVERIFIED", "OURS") and row["source"], name
        assert 400 <= row["status"] < 600, name


RECORDED = {  # (api, operation, condition) of the recorded answers
    "getPage.missing": ("conf2", "getPageById", "missing"),
    "getPage.id_not_long": ("conf2", "getPageById", "id not numeric"),
    "list.limit_too_large": ("conf2", "list", "limit > 250"),
    "v2.method_not_allowed": ("conf2", "labels", "POST/DELETE"),
    "createPage.space_missing": ("conf2", "createPage", "spaceId missing"),
    "createPage.space_not_long": ("conf2", "createPage", "spaceId is a key"),
    "createPage.space_unknown": ("conf2", "createPage", "space unknown / no permission"),
    "createPage.title_missing": ("conf2", "createPage", "title missing, not draft"),
    "createPage.parent_elsewhere": ("conf2", "createPage", "parent in another space"),
    "createPage.duplicate_title": ("conf2", "createPage", "duplicate title in space"),
    "content.missing": ("conf1", "content", "missing"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_bodies_are_the_recorded_ones(name):
    path = SPECS.parent / "wire" / "error_catalogue.json"
    if not path.exists():
        pytest.skip(f"no recorded answers at {path}")
    found = {(row["api"], row["op"], row["condition"]): row for row in json.loads(path.read_text())}[RECORDED[name]]
    ours = ROWS[f"confluence.{name}"]
    bodies = [re.sub(r"{[a-z]+}", "{}", canonical(row["body"])) for row in (ours, found)]
    assert ours["status"] == found["status"] and bodies[0] == bodies[1]


# Pages

def test_page_has_no_body_unless_asked(world):
    assert ask(world, "GET", f"{PAGES}/789")[1]["body"] == {}
    status, page = ask(world, "GET", f"{PAGES}/789", **{"body-format": "storage"})
    assert status == 200 and page["body"]["storage"]["value"] == SITE["pages"]["789"]["body"]


def test_page_body_in_a_format_that_is_not_built(world):
    assert ask(world, "GET", f"{PAGES}/789", **{"body-format": "view"})[0] == 501
    assert ask(world, "GET", f"{PAGES}/789", **{"include-labels": "true"})[0] == 501
    assert ask(world, "GET", f"{PAGES}/789", **{"include-labels": "false", "version": "", "made-up": "1"})[0] == 200


def test_page_by_status(world):
    world.tables["pages"]["10001"] = {**world.get("pages", "10001"), "status": "trashed"}
    assert [ask(world, "GET", f"{PAGES}/10001", status=status)[0] for status in ("current", "trashed", "draft,trashed")] \
        == [404, 200, 200]


def test_root_level(world):
    assert ask(world, "POST", PAGES, but(parentId=None), **{"root-level": "true"})[1]["parentId"] is None


@pytest.mark.parametrize("page_id, status", [("789", 200), ("0789", 200), ("-1", 404), ("9" * 18, 404), ("9" * 19, 400),
                                             ("789.0", 400), ("789%20", 400), ("%EF%BC%97", 400), ("", 404), ("a/b", 404)])
def test_page_ids(world, page_id, status):
    assert ask(world, "GET", f"{PAGES}/{page_id}")[0] == status


def test_trashed_page_is_gone_and_frees_its_title(world):
    world.tables["pages"]["10001"] = {**world.get("pages", "10001"), "status": "trashed"}
    assert ask(world, "GET", f"{PAGES}/10001")[0] == 404
    assert ask(world, "POST", LABEL, [OPS])[0] == 404
    assert ask(world, "POST", PAGES, but(parentId="10001"))[0] == 404
    assert ask(world, "POST", PAGES, but(title=SITE["pages"]["10001"]["title"]))[0] == 200


def test_archived_page_keeps_its_title(world):
    world.tables["pages"]["10001"] = {**world.get("pages", "10001"), "status": "archived"}
    assert ask(world, "POST", PAGES, but(title=SITE["pages"]["10001"]["title"]))[0] == 400


def test_create_answers_200_with_the_next_id(world):
    status, page = ask(world, "POST", PAGES, PAYLOAD)
    assert (status, page["id"], page["version"]["number"]) == (200, "10007", 1)
    assert page["_links"]["webui"] == "/spaces/PAY/pages/10007/Release+Notes+1.0"


def test_without_parent_the_page_goes_below_the_homepage(world):
    assert ask(world, "POST", PAGES, but(parentId=None))[1]["parentId"] == "789"


def test_without_body_the_page_is_empty(world):
    assert ask(world, "POST", PAGES, but(body=None))[1]["body"]["storage"]["value"] == ""


def test_nested_body(world):
    page = ask(world, "POST", PAGES, but(body={"storage": {"value": "<p>x</p>"}}))[1]
    assert page["body"]["storage"] == {"representation": "storage", "value": "<p>x</p>"}


@pytest.mark.parametrize("body, status", [
    ({}, 400), ([], 400), ("x", 400), ({"representation": "storage", "value": {}}, 400),
    ({"representation": "html", "value": "x"}, 400), ({"storage": "x"}, 400), ({"storage": {}}, 400),
    ({"representation": "storage", "value": ""}, 200), ({"representation": "wiki", "value": "x"}, 501),
    ({"atlas_doc_format": {"value": "{}"}}, 501)])
def test_odd_bodies(world, body, status):
    assert ask(world, "POST", PAGES, but(body=body))[0] == status


@pytest.mark.parametrize("raw", ["", "{", "null", "[]", '"x"', "NaN", '{"title": NaN}', "[" * 100000, "1" * 5000])
def test_bodies_that_are_no_object(world, raw):
    assert is_row("confluence.createPage.not_json_object", *ask(world, "POST", PAGES, raw=raw))


def test_errors_come_in_the_order_of_the_service(world):
    wrong = {"title": "", "body": 1, "parentId": "100"}
    seen = []
    for fix in ({}, {"spaceId": "65540"}, {"title": "Payments Home"}, {"body": None}, {"parentId": "789"}):
        wrong.update(fix)
        seen.append(ask(world, "POST", PAGES, wrong)[1]["errors"][0]["title"].split(":")[0])
    assert seen == ["spaceId", "Non-drafts cannot have empty titles", "body", "Can't add a parent from another space.",
                    "A page with this title already exists"]


def test_deep_values_are_refused_not_quoted(world):
    for depth in (10, 800, 980):
        status, answer = ask(world, "POST", PAGES, raw='{"spaceId": ' + "[" * depth + "]" * depth + "}")
        assert status == 400 and len(str(answer)) < 300


def test_half_a_surrogate_pair_is_stored_as_a_question_mark(world):
    assert ask(world, "POST", PAGES, raw=json.dumps(but(title="a\ud800")))[1]["title"] == "a?"


@pytest.mark.parametrize("space_id, status", [("PAY", 400), ("131074", 404), (131074, 404), ("65540", 200), (65540, 200),
                                              (65540.0, 400), (True, 400), ([], 400), ("", 400)],
                         ids=lambda value: f"D13-{value}")
def test_space_id_is_a_number(world, space_id, status):
    answer = ask(world, "POST", PAGES, but(spaceId=space_id))
    assert answer[0] == status
    if status == 200:
        assert answer[1]["spaceId"] == "65540"


@pytest.mark.parametrize("parent", ["789", "10001"], ids=["D11-same-parent", "D11-other-parent"])
def test_title_is_unique_in_the_space(world, parent):
    assert ask(world, "POST", PAGES, PAYLOAD)[0] == 200
    status, answer = ask(world, "POST", PAGES, but(parentId=parent, title="release notes 1.0"))
    assert status == 400 and "title already exists" in answer["errors"][0]["title"]
    assert sum(row["title"] == PAYLOAD["title"] for row in world.rows("pages")) == 1
    assert ask(world, "POST", PAGES, but(spaceId="65541", parentId="100"))[0] == 200


@pytest.mark.parametrize("parent, status", [("789", 200), (789, 400)], ids=["D14-string", "D14-integer"])
def test_parent_id_is_typed_as_in_the_schema(world, parent, status):
    assert ask(world, "POST", PAGES, but(parentId=parent))[0] == status
    assert ask(world, "GET", f"{PAGES}/{parent}")[0] == 200


def test_d15_parent_and_space_can_be_verified(world):
    made = ask(world, "POST", PAGES, PAYLOAD)[1]
    read = ask(world, "GET", f"{PAGES}/{made['id']}")[1]
    assert [(page["parentId"], page["spaceId"]) for page in (made, read)] == [("789", "65540")] * 2


# Labels

@pytest.mark.parametrize("sent, names", [
    ("Runbook Two", ["runbook", "two"]), ("a,b", ["a", "b"]), ("trail ", ["trail"]), ("UPPER", ["upper"]),
    ("HÉLLO", ["héllo"]), ("ci/cd", ["ci/cd"]), ("a\"b'c+d_e-1", ["a\"b'c+d_e-1"]), ("é" * 255, ["é" * 255])])
def test_what_becomes_of_a_name(world, sent, names):
    assert ask(world, "POST", LABEL, named(sent))[0] == 200
    assert world.get("pages", "10001")["labels"] == names


@pytest.mark.parametrize("sent", [*("a" + character for character in "!#&()*.:;<>?@[]^\t\n"), "my:foo", "é" * 256,
                                  "\N{GRINNING FACE}" * 128, "", ",", 5, None, ["ops"]])
def test_names_that_are_refused(world, sent):
    assert ask(world, "POST", LABEL, named("good", sent))[0] == 400
    assert world.get("pages", "10001")["labels"] == []


@pytest.mark.parametrize("body, status", [
    (OPS, 200), ([OPS, OPS], 200), ([], 400), ({}, 400), ("ops", 400), (None, 400), ({"labels": ["ops"]}, 400),
    ({"name": "ops"}, 400), ({"prefix": "own", "name": "ops"}, 400), ({"prefix": "team", "name": "ops"}, 501)])
def test_forms_of_the_label_body(world, body, status):
    assert ask(world, "POST", LABEL, raw=json.dumps(body))[0] == status


def test_labels_add_up_and_leave_the_version(world):
    ask(world, "POST", LABEL, named("one"))
    answer = ask(world, "POST", LABEL, named("two"))[1]
    assert [label["name"] for label in answer["results"]] == ["one", "two"] and answer["size"] == 2
    assert ask(world, "GET", f"{PAGES}/10001")[1]["version"]["number"] == 1
    assert ask(world, "GET", LABEL) == (200, answer)


def test_a_label_has_one_id_everywhere(world):
    first = ask(world, "POST", LABEL, [OPS])[1]["results"][0]
    ask(world, "POST", "/wiki/rest/api/content/10002/label", named("a", "ops"))
    ids = {label["name"]: label["id"] for label in ask(world, "GET", f"{PAGES}/10002/labels")[1]["results"]}
    assert ids["ops"] == first["id"] != ids["a"]


def test_labels_of_the_shared_seed_are_never_touched(world):
    other = World(world._seed)
    ask(world, "POST", LABEL, [OPS])
    assert other.get("pages", "10001")["labels"] == []
    world.reset()
    assert ask(world, "GET", LABEL)[1]["results"] == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"], ids=lambda method: f"D19-{method}")
def test_labels_cannot_be_written_in_v2(world, method):
    assert ask(world, method, f"{PAGES}/10001/labels", [OPS])[0] == 405
    assert ask(world, "POST", LABEL, [OPS])[0] == 200


def test_d20_adding_labels_again_changes_nothing(world):
    ask(world, "POST", LABEL, [OPS])
    before = state_hash(world)
    assert ask(world, "POST", LABEL, [OPS, OPS])[0] == 200
    assert state_hash(world) == before
    assert [label["name"] for label in ask(world, "GET", f"{PAGES}/10001/labels")[1]["results"]] == ["ops"]


# Search and lists

@pytest.mark.parametrize("cql, found", [
    ("type = page AND space = HR", ["450", "10003", "10004"]),
    ("type=page and space='HR'", ["450", "10003", "10004"]),
    ('title ~ "home engineering"', ["100"]),
    ('text ~ "rollback"', ["10001"]),
    ('siteSearch ~ "the maintenance window"', ["10006"]),
    ('space = PAY AND siteSearch ~ "the"', ["789", "10001", "10005"]),
    ('title = "payments home"', ["789"]),
    ('text ~ "outage in HR and or not"', []),
    ("label = nothing", []), ("space = NOPE", []), ("type = blogpost", []), ('text ~ "p"', [])])
def test_search_finds(world, cql, found):
    status, answer = ask(world, "GET", SEARCH, cql=cql)
    assert (status, [hit["content"]["id"] for hit in answer["results"]]) == (200, found)
    assert answer["size"] == answer["totalSize"] == len(found)


@pytest.mark.parametrize("cql, status", [
    ("watcher = a", 501), ("favourite = currentUser()", 501), ("type = space", 501), ("text = x", 501),
    ('text ~ "a OR b"', 501), ('text ~ "-the"', 501), ("rollback", 400), ("text ~", 400), ("foo = bar", 400),
    ('text ~ "..."', 400), (" ", 400)])
def test_search_refuses_what_it_cannot_answer(world, cql, status):
    assert ask(world, "GET", SEARCH, cql=cql)[0] == status


def test_search_sees_labels_and_escapes_titles(world):
    ask(world, "POST", PAGES, but(title="Q&A <ops>", body=None))
    ask(world, "POST", "/wiki/rest/api/content/10007/label", [OPS])
    hit = ask(world, "GET", SEARCH, cql='label = ops AND title ~ "ops"')[1]["results"][0]
    assert hit["title"] == "Q&amp;A &lt;@@@hl@@@ops@@@endhl@@@&gt;"


def test_d25_search_finds_a_new_page_at_once(world):
    made = ask(world, "POST", PAGES, PAYLOAD)[1]
    hits = ask(world, "GET", SEARCH, cql='siteSearch ~ "Release Notes 1.0"')[1]["results"]
    assert [hit["content"]["id"] for hit in hits] == [made["id"]]


def follow(world, path, read, **query):
    "All items of a list by its `next` links, and how many requests that took."
    items, requests = [], 0
    while query is not None:
        answer = ask(world, "GET", path, **query)[1]
        items, requests = items + [read(item) for item in answer["results"]], requests + 1
        link = answer["_links"].get("next")
        query = None if link is None else dict(pair.split("=", 1) for pair in link.split("?")[1].split("&"))
        query = query and {name: value.replace("%20", " ") for name, value in query.items()}
    return items, requests


def test_d21_paging_ends(world):
    for number in range(60):
        ask(world, "POST", PAGES, but(title=f"Entry {number}"))
    ids, requests = follow(world, SEARCH, lambda hit: hit["content"]["id"], cql="title ~ entry")
    assert (len(set(ids)), len(ids), requests) == (60, 60, 3)


def test_labels_page_too(world):
    ask(world, "POST", LABEL, named(*(f"label-{number}" for number in range(30))))
    names, requests = follow(world, f"{PAGES}/10001/labels", lambda label: label["name"])
    assert (len(set(names)), requests) == (30, 2)
    assert follow(world, f"{PAGES}/10001/labels", lambda label: label["name"], limit="15")[1] == 2
    assert ask(world, "GET", LABEL, start="10", limit="5")[1]["size"] == 5


def test_spaces_by_key(world):
    def keys(**query):
        return [space["key"] for space in ask(world, "GET", "/wiki/api/v2/spaces", **query)[1]["results"]]
    assert (keys(keys="PAY"), keys(keys="ENG,PAY"), keys(keys="NOPE")) == (["PAY"], ["PAY", "ENG"], [])
    assert keys() == ["PAY", "ENG", "HR"]
    assert (keys(ids="65542,65540"), keys(ids=["65541"]), keys(sort="-name")) == (["PAY", "HR"], ["ENG"], ["HR", "PAY", "ENG"])
    assert (keys(type="personal"), keys(status="archived")) == ([], [])


# Routes

@pytest.mark.parametrize("template", sorted(OPERATIONS))
def test_every_operation_of_the_real_api_is_answered_or_refused(world, template):
    path = re.sub(r"\{[^}]+\}", "789", template)
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
        status, _ = ask(world, method, path, {})
        if method not in OPERATIONS[template]:
            assert status == 405
        elif (method, template) not in ROUTES:
            assert status == 501


def test_405_names_the_methods_that_would_do(world):
    for path in (f"{PAGES}/789/labels", LABEL):
        status, headers, _ = handle(world, "PATCH", path)
        assert status == 405 and "GET" in headers["Allow"]


@pytest.mark.parametrize("path", ["", "/", "/wiki", "/rest/api/3/issue", "/wiki/api/v2/pages/", "/wiki/api/v1/pages/789",
                                  "wiki/api/v2/pages", "/wiki/api/v2/search"])
def test_unknown_paths(world, path):
    assert is_row("confluence.any.unknown_path", *ask(world, "GET", path))


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)
WORTHY = st.sampled_from(["65540", 65540, "PAY", "789", "100", "storage", "current", "", "global", "Runbook Two", "a", 1])
FIELD = st.one_of(WORTHY, JSON, st.fixed_dictionaries({}, optional={"representation": WORTHY, "value": WORTHY | JSON}))
CREATE = st.fixed_dictionaries({}, optional={name: FIELD for name in ("spaceId", "title", "body", "parentId", "status")})
LABELS = st.lists(st.fixed_dictionaries({}, optional={"prefix": WORTHY, "name": WORTHY | st.text()}), max_size=3)
PATHS = st.sampled_from([PAGES, LABEL, f"{PAGES}/789", f"{PAGES}/789/labels", SEARCH, "/wiki/api/v2/spaces"])
QUERY = st.dictionaries(st.sampled_from(["cql", "limit", "cursor", "start", "keys", "body-format", "prefix", "x"]),
                        st.text() | st.sampled_from(["storage", "1", "PAY", "type = page", 'text ~ "the"']))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["GET", "POST", "PUT"]), PATHS | st.text(), JSON | CREATE | LABELS, QUERY)
def test_any_request_has_an_answer(method, path, body, query):
    status = ask(World(SITE), method, path, body, **query)[0]
    assert status < 500 or status == 501


@settings(max_examples=200, deadline=None)
@given(CREATE)
def test_any_create_is_whole_or_nothing(body):
    world = World(SITE)
    status, answer = ask(world, "POST", PAGES, body)
    assert len(world.rows("pages")) - len(SITE["pages"]) == (status == 200)
    if status == 200:
        assert ask(world, "GET", f"{PAGES}/{answer['id']}", **{"body-format": "storage"}) == (200, answer)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.builds('{} {} "{}"'.format, st.sampled_from(["text", "title", "space"]), st.sampled_from("=~"),
                             st.text()))
def test_any_cql_has_an_answer(cql):
    assert ask(World(SITE), "GET", SEARCH, cql=cql)[0] in (200, 400, 501)


# The same calls, another process

SCRIPT = """
import json
from atlas_rlvr.confluence import handle
from atlas_rlvr.world import World, load_data, state_hash
world = World(load_data("site.json"))
for method, path, query, body in json.loads(input()):
    print(json.dumps(handle(world, method, path, query, {}, body)))
print(state_hash(world))
"""


def test_same_bytes_in_every_process():
    calls = [["POST", PAGES, {}, json.dumps(PAYLOAD)], ["POST", LABEL, {}, json.dumps(named("b", "a", "Runbook Two"))],
             ["GET", f"{PAGES}/10001/labels", {}, ""], ["GET", SEARCH, {"cql": 'text ~ "the"'}, ""],
             *[[method, path, query, json.dumps(body)] for method, path, body, query in REACHED.values()]]
    outputs = [subprocess.run([sys.executable, "-c", SCRIPT], input=json.dumps(calls), text=True, capture_output=True,
                              check=True, cwd=Path(__file__).parents[1], env={**os.environ, "PYTHONHASHSEED": seed}).stdout
               for seed in ("1", "2")]
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == len(calls) + 1


# The published schemas

def patched(schema):
    "`oneOf` as `anyOf` (its branches overlap), `nullable` as JSON Schema knows it."
    if isinstance(schema, list):
        return [patched(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    fixed = {"anyOf" if name == "oneOf" else name: patched(value) for name, value in schema.items()}
    if "or null" in str(schema.get("description")) or schema.get("nullable"):
        fixed["type"] = [schema["type"], "null"]
        fixed.update({"enum": [*schema["enum"], None]} if "enum" in schema else {})
    return fixed


@pytest.fixture(scope="module")
def spec():
    found = sorted(SPECS.glob("confluence-v2*.json"))
    if not found:
        pytest.skip(f"no copy of Confluence's OpenAPI document in {SPECS}")
    return patched(json.loads(found[-1].read_text()))


def check(spec, schema, value):
    from jsonschema import Draft4Validator
    errors = list(Draft4Validator({**schema, "components": spec["components"]}).iter_errors(value))
    assert errors == []


@pytest.mark.parametrize("method, template, page_id, query, body", [
    ("GET", "/pages/{id}", "789", {}, None), ("GET", "/pages/{id}", "10001", {"body-format": "storage"}, None),
    ("POST", "/pages", "", {}, PAYLOAD), ("POST", "/pages", "", {}, but(body={"storage": {"value": "<p>x</p>"}})),
    ("GET", "/pages/{id}/labels", "10001", {"limit": "1"}, None), ("GET", "/spaces", "", {"keys": "PAY"}, None)])
def test_answers_follow_the_published_schema(world, spec, method, template, page_id, query, body):
    ask(world, "POST", LABEL, named("a", "b"))
    operation = spec["paths"][template][method.lower()]
    if body is not None:
        request = spec["components"]["requestBodies"]["PageCreateRequest"]["content"]["application/json"]["schema"]
        check(spec, request, body)
    status, answer = ask(world, method, "/wiki/api/v2" + template.replace("{id}", page_id), body, **query)
    assert status == 200
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    check(spec, schema, answer)
    properties = json.dumps(schema)
    assert "results" in properties or "PageSingle" in properties


def test_the_schema_check_can_fail(world, spec):
    page = ask(world, "GET", f"{PAGES}/789")[1]
    with pytest.raises(AssertionError):
        check(spec, spec["components"]["schemas"]["PageSingle"], {**page, "spaceId": 65540})


def test_operations_are_those_of_the_published_document(spec):
    published = {"/wiki/api/v2" + path: {name.upper() for name in methods} & {"GET", "POST", "PUT", "DELETE", "PATCH"}
                 for path, methods in spec["paths"].items()}
    assert {path: set(methods) for path, methods in OPERATIONS.items() if "/api/v2" in path} == published
