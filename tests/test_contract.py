"""The answers against the published documents: each operation's own schema, and requests that schemathesis makes from them.

The documents are not part of the project; without a copy the tests that need one are skipped. `specs.py` says where a copy
is looked for, how it is patched and why.
"""
import json
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit
from zlib import crc32

import pytest
from specs import PATCHES, documented, errors_of, patch, patched, published, served, wrong_answer
from test_confluence import ROWS, is_row
from test_jira import GOOD, catalogued
from test_jira_site import ADF, busy

from atlas_rlvr import confluence, jira
from atlas_rlvr.wire import handle
from atlas_rlvr.world import World, load_data, restore, snapshot

LINK = {"type": {"name": "Relates"}, "inwardIssue": {"key": "ISK1"}, "outwardIssue": {"key": "ISK2"}}
STORAGE = {"representation": "storage", "value": "<p>New</p>"}
PAGE = {"spaceId": "65540", "status": "current", "title": "Release Notes 1.0", "parentId": "789", "body": STORAGE}
UPDATE = {"id": "10001", "status": "current", "title": "Outage guide", "body": STORAGE, "version": {"number": 2, "message": "Shorter"}}
CONTENT = {"type": "page", "title": "Release Notes 1.0", "space": {"key": "PAY"}, "ancestors": [{"id": "789"}],
           "body": {"storage": {"value": "<p>New</p>", "representation": "storage"}}}
STORY = {"fields": {"project": {"key": "ABC"}, "issuetype": {"name": "Story"}, "summary": "Export", "description": ADF}}
J, V2, V1 = "/rest/api/3", "/wiki/api/v2", "/wiki/rest/api"


def send(world, method: str, target: str, body=None):
    "Answer of the site to a request whose target has a query."
    parts = urlsplit(target)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return handle(world, method, parts.path, query, {}, "" if body is None else json.dumps(body))


def lived_in() -> World:
    "A site with a sub-task, two comments, a worklog, a link, labels and a property."
    world = busy()
    assert send(world, "POST", f"{J}/issue/ABC-123/comment", {"body": ADF})[0] == 201
    assert send(world, "POST", f"{V1}/content/10001/label", [{"prefix": "global", "name": name} for name in "ab"])[0] == 200
    assert send(world, "POST", f"{V1}/content/10001/property", {"key": "state", "value": {"done": False}})[0] == 200
    return world


JIRA = [
    *(("GET", f"{J}/{path}") for path in (
        "serverInfo", "myself", "user?accountId=qa789", "user/search?query=a", "user/assignable/search?project=ABC",
        "user/permission/search?permissions=BROWSE", "project", "project/ABC", "project/search", "project/search?maxResults=1",
        "project/ABC/components", "project/ABC/versions", "project/ABC/statuses", "field", "issueLinkType", "issueLink/10003",
        "status", "status/Done", "priority", "priority/1", "issuetype", "issuetype/10003", "resolution", "resolution/10000",
        "statuscategory", "statuscategory/new", "issue/createmeta", "issue/createmeta?expand=projects.issuetypes.fields",
        "issue/createmeta/ABC/issuetypes", "issue/createmeta/ABC/issuetypes/10003", "issue/ABC-123", "issue/ABC-124", "issue/ISK1",
        "issue/ABC-123?expand=names,schema,renderedFields,editmeta,transitions", "issue/ABC-123/editmeta",
        "issue/ABC-123/comment", "issue/ABC-123/comment/10001", "issue/ABC-123/worklog", "issue/ABC-123/worklog/10002",
        "issue/ABC-123/transitions", "issue/ABC-123/transitions?expand=transitions.fields", "search/jql?jql=key=ABC-123",
        "search/jql?jql=project=ABC&fields=*all&expand=names,schema", "search/jql?jql=project=ISK&maxResults=1")),
    ("POST", f"{J}/issue", STORY), ("PUT", f"{J}/issue/ABC-123", {"fields": {"summary": "Other"}}),
    ("PUT", f"{J}/issue/ABC-123?returnIssue=true", {"update": {"labels": [{"add": "x"}]}}),
    ("DELETE", f"{J}/issue/ABC-124"), ("DELETE", f"{J}/issue/ABC-123?deleteSubtasks=true"), ("PUT", f"{J}/issue/ABC-123/assignee", {"accountId": "qa789"}),
    ("POST", f"{J}/issue/ABC-123/transitions", {"transition": {"id": "31"}}),
    ("POST", f"{J}/issue/ABC-123/comment", {"body": ADF}), ("PUT", f"{J}/issue/ABC-123/comment/10001", {"body": ADF}),
    ("DELETE", f"{J}/issue/ABC-123/comment/10001"), ("DELETE", f"{J}/issue/ABC-123/worklog/10002"),
    ("POST", f"{J}/issue/ABC-123/worklog", {"timeSpent": "1h", "started": "2026-01-01T09:00:00.000+0000"}),
    ("POST", f"{J}/issueLink", LINK), ("DELETE", f"{J}/issueLink/10003"),
    ("POST", f"{J}/search/jql", {"jql": "project = ABC", "fields": ["summary", "status"]}),
    ("POST", f"{J}/search/approximate-count", {"jql": "project = ABC"}),
]
CONFLUENCE = [
    *(("GET", V2 + path) for path in (
        "/pages", "/pages?limit=1&body-format=storage", "/pages/789", "/pages/10001", "/pages/10001?body-format=storage", "/pages/10001/labels",
        "/pages/789/children", "/pages/789/direct-children?limit=1", "/pages/789/descendants", "/pages/10001/ancestors",
        "/spaces", "/spaces?keys=PAY", "/spaces/65540", "/spaces/65540/pages?depth=root", f"/labels/{crc32(b'a') % 10**8}/pages")),
    ("POST", f"{V2}/pages", PAGE), ("POST", f"{V2}/pages", {**PAGE, "body": {"storage": {"value": "<p>x</p>"}}}),
    ("PUT", f"{V2}/pages/10001", UPDATE), ("PUT", f"{V2}/pages/10001/title", {"status": "current", "title": "x"}),
    ("DELETE", f"{V2}/pages/10001"),
]
CONFLUENCE_V1 = [
    *(("GET", V1 + path) for path in (
        "/content", "/content/10001?expand=body.storage,version,ancestors", "/content/10001/history", "/content/789/child?expand=page",
        "/content/789/child/page", "/content/789/child/attachment", "/content/789/descendant?expand=page",
        "/content/789/descendant/page", "/content/10001/label", "/content/10001/property", "/content/10001/property/state",
        "/content/search?cql=space=PAY", "/search?cql=type=page", "/space", "/space/PAY", "/space/PAY/content/page", "/user/current",
        "/user?accountId=qa789")),
    ("POST", f"{V1}/content", CONTENT), ("DELETE", f"{V1}/content/10001"), ("DELETE", f"{V1}/content/10001/label?name=a"),
    ("PUT", f"{V1}/content/10001", {"type": "page", "title": "x", "version": {"number": 2}}),
    ("DELETE", f"{V1}/content/10001/label/a"), ("POST", f"{V1}/content/10001/label", {"prefix": "global", "name": "c"}),
    ("POST", f"{V1}/content/10001/property", {"key": "k", "value": 1}), ("POST", f"{V1}/content/10001/property/k", {"value": 1}),
    ("PUT", f"{V1}/content/10001/property/state", {"value": 2, "version": {"number": 2}}),
    ("DELETE", f"{V1}/content/10001/property/state"),
]
REQUESTS = JIRA + CONFLUENCE + CONFLUENCE_V1
GONE = {("jira", method, f"{J}/search") for method in ("GET", "POST")}  # 410 for everybody


def operation(method: str, target: str) -> tuple[str, str, str]:
    "The operation that a request is for."
    path = urlsplit(target).path
    if not path.startswith("/wiki/"):
        return "jira", method, J + next(template for template, _ in jira.match(path)[1] if method in jira.OPERATIONS[template])
    template = next(template for pattern, template in confluence.PATTERNS if pattern.fullmatch(path))
    return "confluence", method, template


def test_each_served_operation_has_a_request():
    assert {operation(method, target) for method, target, *_ in REQUESTS} == set(served()) - GONE


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: f"{request[0]} {request[1]}")
def test_answers_fit_the_published_document(request_):
    status, _, body = send(lived_in(), *request_)
    assert 200 <= status < 300, body
    assert (body is None) == (status == 204 or operation(*request_[:2])[2].endswith("/issueLink"))
    assert wrong_answer(*operation(*request_[:2]), status, body) == []


@pytest.mark.parametrize("request_", [request for request in REQUESTS if operation(*request[:2])[2].startswith((J, V2))],
                         ids=lambda request: f"{request[0]} {request[1]}")
def test_the_check_of_an_answer_can_fail(request_):
    found = documented(*operation(*request_[:2]))
    status, _, body = send(lived_in(), *request_)
    assert wrong_answer(*operation(*request_[:2]), 299, body)
    if any(content.get("schema") for content in found["responses"][str(status)].get("content", {}).values()):
        whole = body[0] if isinstance(body, list) and body else body
        spoilt = [{**whole, name: [{"x": 1}] if isinstance(whole[name], dict | str | int) else 7} for name in whole] if whole else [7]
        assert any(wrong_answer(*operation(*request_[:2]), status, [one] if isinstance(body, list) else one) for one in spoilt)


# Parameters: each has an effect, is refused, or has none on this site for a reason

NO_EFFECT = {  # parameter of Jira, or operation and parameter → why
    **dict.fromkeys(("username", "key"), "names are gone from Jira Cloud; the document says that the parameter is no longer available"),
    **dict.fromkeys(("permissions", "action", "overrideScreenSecurity", "overrideEditableFlag"), "everybody may do everything"),
    **dict.fromkeys(("sessionId", "actionDescriptorId", "recommend"), "everybody may be assigned anywhere, in one order"),
    **dict.fromkeys(("skipRemoteOnlyCondition", "includeUnavailableTransitions"), "every transition is available"),
    "sortByOpsBarAndStatus": "transitions have the order of their workflow", "fieldsByKeys": "the key of each field is its id",
    "updateHistory": "no history of views is kept", "failFast": "no field fails", "componentSource": "there are no components",
    "reconcileIssues": "a search sees each write at once", "notifyUsers": "nobody gets mail",
    "adjustEstimate": "no estimates are kept", f"GET {J}/project/{{projectIdOrKey}}/versions expand": "there are no versions",
}
VALUES = ("true", "false", "1", "0", "x", "10001", "-key", "2", "names", "groups", "projectKeys", "renderedBody", "properties",
          "projects.issuetypes.fields", "transitions.fields")


def parameters(key: tuple[str, str, str]) -> dict:
    "The documented query parameters of an operation: name → schema."
    product, _, template = key
    path = template if product == "jira" else template.removeprefix(V2)
    both = patched(product)["paths"][path].get("parameters", []) + documented(*key).get("parameters", [])
    return {one["name"]: one.get("schema", {}) for one in both if one["in"] == "query"}


def has_effect(world, saved, request_, name: str, schema: dict) -> bool:
    "Whether some value of a parameter makes another answer than none does."
    method, target, *body = request_
    answers = []
    for value in (None, *schema.get("enum", ()), *schema.get("items", {}).get("enum", ()), *VALUES):
        restore(world, saved)
        more = "" if value is None else f"{'&' if '?' in target else '?'}{name}={quote(str(value))}"
        status, _, answer = send(world, method, (target if value is None else target.replace(f"{name}=", "was=")) + more, *body)
        answers.append((status, {key: part for key, part in answer.items() if key != "_links"} if isinstance(answer, dict) else answer))
    return any(answer != answers[0] for answer in answers)


@pytest.mark.parametrize("key", [key for key in served() if key[2].startswith((J, V2)) and key not in GONE], ids=" ".join)
def test_no_documented_parameter_is_dropped_in_silence(key):
    world = lived_in()
    saved, requests = snapshot(world), [request for request in REQUESTS if operation(*request[:2]) == key]
    for name, schema in parameters(key).items():
        none = bool(NO_EFFECT.get(name) or NO_EFFECT.get(f"{key[1]} {key[2]} {name}"))
        assert any(has_effect(world, saved, request, name, schema) for request in requests) != none, name


# Claims beside the catalogue

CLAIMS = load_data("claims.json")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim['api']} {claim['op']}: {claim['claim']}")
def test_each_claim_names_its_source_and_a_test_that_exists(claim):
    file, _, name = claim["test"].partition("::")
    assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    assert claim["provenance"] in {"OBS", "USER", "CLIENT", "SPEC", "DC", "UNVERIFIED", "OURS"} and claim["source"]


# The documents


@pytest.mark.parametrize("one", PATCHES, ids=lambda one: f"{one.product} {one.at}")
def test_each_patch_is_needed_and_has_a_reason(one):
    assert one.reason
    before = published(one.product)
    assert patch(before, [one]) != before  # and it finds its place


def fields(**changes):
    return {"fields": {**GOOD, **changes}}


def body_schema(product: str, path: str, method: str, document) -> dict:
    "The schema of a request body."
    body = document(product)["paths"][path][method]["requestBody"]
    for name in body.get("$ref", "").split("/")[1:]:
        body = document(product)[name] if name == "components" else body.get(name) or document(product)["components"]["requestBodies"][name]
    return body["content"]["application/json"]["schema"]


ISSUE, MOVE = ("jira", f"{J}/issue", "post"), ("jira", f"{J}/issue/{{issueIdOrKey}}/transitions", "post")
VERDICTS = {  # what a client sends, whether the document takes it, with patches, and what the site answers
    "a parent that is a bare string": (*ISSUE, fields(parent="ABC-123"), True, True, 400),
    "an assignee that is a bare string": (*ISSUE, fields(assignee="admin123"), True, True, 400),
    "a description that is text": (*ISSUE, fields(description="text"), True, True, 400),
    "no project": (*ISSUE, {}, True, True, 400),
    "no transition": (*MOVE, {}, True, True, 400),
    "the number of a transition": (*MOVE, {"transition": {"id": 31}}, False, True, 204),
    "a comment that is text": ("jira", f"{J}/issue/{{issueIdOrKey}}/comment", "post", {"body": "hi"}, True, True, 400),
    "the offset of the old search": ("jira", f"{J}/search/jql", "post", {"jql": "project = ABC", "startAt": 0}, False, False, 400),
    "the key of a space": ("confluence", "/pages", "post", {"spaceId": "PAY", "title": "x"}, True, True, 400),
    "the id of a space as a number": ("confluence", "/pages", "post", {"spaceId": 65540, "title": "x"}, False, False, 200),
    "a correct page": ("confluence", "/pages", "post", PAGE, False, True, 200),
    "an update without status": ("confluence", "/pages/{id}", "put", {k: v for k, v in UPDATE.items() if k != "status"}, False, False, 400),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_what_the_document_can_and_cannot_prove(name):
    product, path, method, body, before, after, status = VERDICTS[name]
    prefix = V2 if product == "confluence" else ""
    target = prefix + path.replace("{issueIdOrKey}", "ABC-123").replace("{id}", "10001")
    assert send(lived_in(), method.upper(), target, body)[0] == status
    assert (errors_of(product, body_schema(product, path, method, published), body, published) == []) == before
    assert (errors_of(product, body_schema(product, path, method, patched), body) == []) == after


# Generated requests


def complaints(operation, status, headers, body, changed) -> list[str]:
    "What is wrong with the answer to a generated request."
    product, method, _ = operation
    if status < 300:
        return wrong_answer(*operation, status, body) + (["a read changed the state"] if changed and method == "GET" else [])
    rows = catalogued(status, headers, body) if product == "jira" else any(is_row(name, status, body) for name in ROWS)
    found = ["no row of the catalogue"] if not rows else []
    found += ["a refused request changed the state"] if changed else []
    return found + (["a server error"] if status >= 500 and status != 501 else [])


def drive(count: int, every: int):
    "Send generated requests for both documents, and print what came back."
    for product in ("jira", "confluence"):
        published(product)
    pytest.importorskip("schemathesis", reason="schemathesis is not installed; it comes with the extra contract")
    from generated import Drive
    driven = Drive(lived_in, complaints)
    for product in ("jira", "confluence"):
        driven.run(product, count, every)
    statuses = sum(driven.answers.values(), Counter())
    print(f"{driven.total()} requests for {len(driven.answers)} operations, answers {dict(sorted(statuses.items()))}, "
          f"{len(driven.complaints)} complaints")
    return driven


def test_some_generated_requests_are_answered_as_documented_or_catalogued():
    driven = drive(3, 4)
    assert driven.complaints == [] and driven.total() >= 120


@pytest.mark.slow
def test_generated_requests_are_answered_as_documented_or_catalogued():
    driven = drive(20, 1)
    assert driven.complaints == [] and driven.total() >= 3000
    assert {row[1:] for row in served() if row[2].startswith((J, V2))} == {*driven.answers}
    never = {key for key, counts in driven.answers.items() if min(counts) >= 300}
    assert never == {("GET", f"{J}/search"), ("POST", f"{J}/search")}  # removed, on the live service too
