"Jira beyond the paper's operations: both API versions, every error row, all-or-nothing writes, real schemas."

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator
from test_jira import ADF, EDGES, ISSUE, REACHED, ROWS, SPEC, agrees, call, catalogued, create, keys, read, site, values

from atlas_rlvr.jira import BASE, HANDLERS
from atlas_rlvr.rich_text import document, html, plain_text
from atlas_rlvr.world import World, restore, snapshot, state_hash

ABC, SEARCH, V2 = f"{ISSUE}/ABC-123", "/rest/api/3/search/jql", "/rest/api/2"
LINK = {"type": {"name": "Blocks"}, "inwardIssue": {"key": "ABC-123"}, "outwardIssue": {"key": "XYZ-456"}, "comment": None}


def busy() -> World:
    "A site in which ABC-123 has a sub-task, a comment, a worklog and a link."
    world = site()
    assert create(world)[0] == 201
    assert call(world, "POST", f"{ABC}/comment", {"body": ADF})[0] == 201
    assert call(world, "POST", f"{ABC}/worklog", {"timeSpent": "1h 30m", "comment": ADF})[0] == 201
    assert call(world, "POST", "/rest/api/3/issueLink", LINK)[0] == 201
    return world


def edit(world, key="ABC-123", version="3", **payload):
    return call(world, "PUT", f"/rest/api/{version}/issue/{key}", payload)[::2]


def find(world, jql, **query):
    return call(world, "GET", SEARCH, query={"jql": jql, **query})[::2]


# Every row is reached, and nothing else leaves

PUT, COMMENT, WORKLOG = ("PUT", ABC), ("POST", f"{ABC}/comment"), ("POST", f"{ABC}/worklog")


def searched(jql, **query):
    return "GET", SEARCH, None, {"jql": jql, **query}


MORE = {
    "jira.any.not_a_number": ("GET", SEARCH, None, {"jql": "key = ABC-123", "maxResults": "x"}),
    "jira.any.entity_missing": ("GET", "/rest/api/3/status/Nope"),
    "jira.createIssue.description_not_string": ("POST", f"{V2}/issue", REACHED["jira.createIssue.description_malformed"][2]),
    "jira.searchJql.unbounded": searched("order by key"),
    "jira.searchJql.max_results": searched("key = ABC-123", maxResults="6000"),
    "jira.searchJql.bad_token": searched("key = ABC-123", nextPageToken="CAEaAggD"),
    "jira.searchJql.syntax": searched("project ABC"),
    "jira.searchJql.syntax_end": searched("project ="),
    "jira.searchJql.reserved_character": searched("summary ~ a*"),
    "jira.searchJql.reserved_word": searched("order = 1"),
    "jira.searchJql.quote_open": searched("summary ~ 'a"),
    "jira.searchJql.value_unknown": searched("project = NOPE"),
    "jira.searchJql.id_unknown": searched("project = 99999"),
    "jira.searchJql.issue_unknown": searched("key = ABC-999"),
    "jira.searchJql.field_unknown": searched("bogus = 1"),
    "jira.searchJql.operator_unsupported": searched("project ~ ABC"),
    "jira.searchJql.function_unknown": searched("assignee in membersOf(x)"),
    "jira.searchJql.date_invalid": searched("created > soon"),
    "jira.searchJql.text_empty": searched("summary ~ ''"),
    "jira.searchJql.text_wildcard": searched("summary ~ '*a'"),
    "jira.searchJql.text_operator": searched("summary ~ 'a OR b'"),
    "jira.searchJql.history": searched("status was Done"),
    "jira.searchJql.too_deep": searched("(" * 51),
    "jira.searchJql.sort_unknown": searched("key = ABC-123 order by points"),
    "jira.getProject.missing": ("GET", "/rest/api/3/project/NOPE"),
    "jira.createmeta.limit": ("GET", f"{ISSUE}/createmeta/ABC/issuetypes", None, {"maxResults": "201"}),
    "jira.createmeta.issuetype_unknown": ("GET", f"{ISSUE}/createmeta/ABC/issuetypes/9"),
    "jira.getCurrentUser.anonymous": ("GET", "/rest/api/3/myself"),
    "jira.getUser.missing": ("GET", "/rest/api/3/user", None, {"accountId": "nobody"}),
    "jira.getUser.no_account": ("GET", "/rest/api/3/user"),
    "jira.findUsers.no_query": ("GET", "/rest/api/3/user/search"),
    "jira.findUsers.exclusive": ("GET", "/rest/api/3/user/search", None, {"query": "a", "accountId": "admin123"}),
    "jira.findAssignableUsers.nowhere": ("GET", "/rest/api/3/user/assignable/search"),
    "jira.findUsersWithPermissions.no_permissions": ("GET", "/rest/api/3/user/permission/search"),
    "jira.editIssue.nothing": (*PUT, {}),
    "jira.editIssue.twice": (*PUT, {"fields": {"labels": []}, "update": {"labels": [{"add": "x"}]}}),
    "jira.editIssue.issuetype_invalid": (*PUT, {"fields": {"issuetype": {"id": "10003"}}}),
    "jira.editIssue.subtask_project": ("PUT", f"{ISSUE}/ABC-124", {"fields": {"project": {"key": "XYZ"}}}),
    "jira.editIssue.verb": (*PUT, {"update": {"summary": [{"add": "x"}]}}),
    "jira.deleteIssue.has_subtasks": ("DELETE", ABC),
    "jira.addComment.body_invalid": (*COMMENT, {"body": "hi"}),
    "jira.addComment.body_empty": (*COMMENT, {}),
    "jira.getComment.missing": ("GET", f"{ABC}/comment/1"),
    "jira.addWorklog.time_missing": (*WORKLOG, {}),
    "jira.addWorklog.time_invalid": (*WORKLOG, {"timeSpent": "soon"}),
    "jira.addWorklog.started_invalid": (*WORKLOG, {"timeSpentSeconds": 60, "started": "today"}),
    "jira.addWorklog.comment_invalid": (*WORKLOG, {"timeSpentSeconds": 60, "comment": "hi"}),
    "jira.getWorklog.missing": ("GET", f"{ABC}/worklog/1"),
    "jira.linkIssues.type_unknown": ("POST", "/rest/api/3/issueLink", {**LINK, "type": {"name": "Bogus"}}),
    "jira.linkIssues.itself": ("POST", "/rest/api/3/issueLink", {**LINK, "outwardIssue": {"key": "abc-123"}}),
    "jira.getIssueLink.missing": ("GET", "/rest/api/3/issueLink/999"),
}


def test_the_two_tables_reach_every_row():
    assert set(REACHED) | set(MORE) == set(ROWS) and not set(REACHED) & set(MORE)


@pytest.mark.parametrize("row_id", MORE)
def test_every_row_is_reached_and_changes_nothing(row_id):
    world = World({}) if row_id == "jira.getCurrentUser.anonymous" else busy()
    before = state_hash(world)
    status, headers, body = call(world, *MORE[row_id])
    row = ROWS[row_id]
    assert (status, headers["Content-Type"]) == (row["status"], row["content_type"])
    assert agrees(row["body"], body) and catalogued(status, headers, body)
    assert state_hash(world) == before


members = st.sampled_from(["fields", "update", "body", "comment", "worklog", "labels", "summary", "set", "add", "remove", "accountId",
                           "timeSpent", "timeSpentSeconds", "started", "type", "inwardIssue", "outwardIssue", "key", "id", "name",
                           "jql", "maxResults", "nextPageToken", "issuelinks", "transition", "parent", "none"]) | st.text(max_size=5)
parts = st.recursive(values | st.sampled_from(["1h", "Blocks", "XYZ-456", "-1", ADF]),
                     lambda inner: st.lists(inner, max_size=2) | st.dictionaries(members, inner, max_size=3), max_leaves=10)
payloads = st.dictionaries(members, parts, max_size=3) | parts
WRITES = sorted((method, template) for method, template in HANDLERS if method != "GET")
NAMES = {"{issueIdOrKey}": "ABC-123", "{linkId}": "10003", "{id}": "10001"}
BUSY = busy()
SAVED, PRISTINE = snapshot(BUSY), state_hash(BUSY)


def filled(template):
    for name, value in NAMES.items():
        template = template.replace(name, value)
    return template


def check(method, path, query, body):
    restore(BUSY, SAVED)
    status, headers, answer = call(BUSY, method, path, body, query)
    json.dumps(answer, allow_nan=False)
    assert status < 300 or (catalogued(status, headers, answer) and state_hash(BUSY) == PRISTINE), (status, answer)
    assert method != "GET" or state_hash(BUSY) == PRISTINE
    for key in keys(BUSY):
        assert call(BUSY, "GET", f"{V2}/issue/{key}", query={"expand": "renderedFields"})[0] == 200
    assert find(BUSY, "project = ABC or text ~ x", fields="*all")[0] == 200


@pytest.mark.parametrize("version", "23")
@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(WRITES), payloads)
def test_any_body_of_any_write(version, target, body):
    check(target[0], f"/rest/api/{version}{filled(target[1])}", {}, json.dumps(body))


words = st.sampled_from(["ABC", "ABC-123", "10003", "x", "-1", "99999999999", "true", "*all", "names,schema,changelog", ""])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(HANDLERS)), st.dictionaries(
    st.sampled_from(["startAt", "maxResults", "query", "accountId", "project", "issueKey", "expand", "fields", "orderBy", "jql",
                     "projectKeys", "nextPageToken", "permissions", "keys", "deleteSubtasks"]), values | words, max_size=3))
def test_any_query_of_any_operation(target, query):
    check(target[0], f"/rest/api/3{filled(target[1])}", query, "")


# One document, two versions


@pytest.mark.parametrize("version", ["2", "3", "latest"])
def test_paths_that_clients_use(version):
    world, root = busy(), f"/rest/api/{version}"
    paths = ["serverInfo", "myself", "field", "project", "project/ABC", "project/10000", "project/search", "issue/ABC-123",
             "issue/ABC-123/transitions", "issue/ABC-123/comment", "issue/ABC-123/worklog", "issue/createmeta", "issueLinkType",
             "issue/createmeta/ABC/issuetypes", "issue/createmeta/ABC/issuetypes/10003", "status", "priority", "resolution",
             "issuetype", "statuscategory", "issue/ABC-123/editmeta", "project/ABC/versions", "project/ABC/components",
             "project/ABC/statuses", "issueLink/10003", "issue/ABC-123/comment/10001", "issue/ABC-123/worklog/10002"]
    shown = "3" if version == "3" else "2"
    for path in paths:
        status, _, body = call(world, "GET", f"{root}/{path}", query={"expand": "issueTypes"})
        assert status == 200 and f"rest/api/{5 - int(shown)}/" not in json.dumps(body), path
    assert call(world, "GET", f"{root}/search/jql", query={"jql": "project = ABC"})[0] == 200
    assert call(world, "POST", f"{root}/search/jql", {"jql": "project = ABC"})[0] == 200
    assert call(world, "POST", f"{root}/search/approximate-count", {"jql": "project = ABC"})[2] == {"count": 2}
    for path, query in (("user", {"accountId": "qa789"}), ("user/search", {"query": "qu"}),
                        ("user/assignable/search", {"project": "ABC"}), ("user/assignable/search", {"issueKey": "ABC-123"}),
                        ("user/permission/search", {"permissions": "BROWSE", "query": "quinn"})):
        assert "qa789" in json.dumps(call(world, "GET", f"{root}/{path}", query=query)[2]), path
    for method in ("GET", "POST"):
        assert call(world, method, f"{root}/search")[0] == 410


@pytest.mark.parametrize("text", ["plain", "two\nlines", "a\n\nb", "\n\n\n", "*stars* and h1. x", "ü 🙂", " "])
def test_text_written_in_v2_is_a_document_in_v3_and_the_same_text_in_v2(text):
    world = site()
    fields = {"project": {"key": "ABC"}, "issuetype": {"name": "Task"}, "summary": "x", "description": text}
    assert call(world, "POST", f"{V2}/issue", {"fields": fields})[0] == 201
    stored = read(world, "ABC-124")["fields"]["description"]
    assert stored["type"] == "doc" and create(world, description=stored)[0] == 201
    shown = call(world, "GET", f"{V2}/issue/ABC-124")[2]
    assert shown["fields"]["description"] == text and shown["self"].startswith(BASE.replace("/3", "/2"))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(min_size=1, max_size=40))
def test_text_survives_the_document(text):
    assert plain_text(document(text)) == text and html(document(text))


@pytest.mark.parametrize("node, text", [
    ({"type": "heading", "attrs": {"level": 2}, "content": [{"type": "text", "text": "T"}]}, "h2. T"),
    ({"type": "codeBlock", "content": [{"type": "text", "text": "x = 1"}]}, "{code}\nx = 1\n{code}"),
    ({"type": "paragraph", "content": [{"type": "mention", "attrs": {"id": "1", "text": "@Ada"}}]}, "@Ada"),
    ({"type": "paragraph", "content": [{"type": "text", "text": "t", "marks": [{"type": "link", "attrs": {"href": "u"}}]}]}, "[t|u]"),
    ({"type": "orderedList", "content": [{"type": "listItem", "content": [
        {"type": "paragraph", "content": [{"type": "text", "text": "a"}]},
        {"type": "bulletList", "content": [{"type": "listItem", "content": [{"type": "text", "text": "b"}]}]}]}]}, "# a\n#* b"),
    ({"type": "unheardOf", "content": [{"type": "text", "text": "kept"}]}, "kept"), ({"type": "rule"}, "----"),
    ({"type": "paragraph", "attrs": 5}, ""),
], ids=lambda value: value if isinstance(value, str) else value["type"])
def test_documents_as_text(node, text):
    world = site()
    assert create(world, description={"type": "doc", "version": 1, "content": [node]})[0] == 201
    assert call(world, "GET", f"{V2}/issue/ABC-124")[2]["fields"]["description"] == text


def test_each_version_refuses_the_rich_text_of_the_other():
    world = busy()
    for path, member in (("comment", "body"), ("worklog", "comment")):
        for version, wrong in (("3", "text"), ("2", ADF)):
            payload = {member: wrong, "timeSpentSeconds": 60} if path == "worklog" else {member: wrong}
            assert call(world, "POST", f"/rest/api/{version}/issue/ABC-123/{path}", payload)[0] == 400
    assert edit(world, version="2", fields={"description": ADF})[1]["errors"] == {"description": "Operation value must be a string"}
    assert edit(world, version="2", fields={"description": "plain"})[0] == edit(world, fields={"description": ADF})[0] == 204


# Edits


EDITED = {
    "summary": ({"fields": {"summary": "New"}}, "summary", "New"),
    "labels set": ({"fields": {"labels": ["b", "a", "b"]}}, "labels", ["b", "a"]),
    "labels add": ({"update": {"labels": [{"add": "x"}, {"add": "y"}, {"remove": "x"}]}}, "labels", ["y"]),
    "labels replace": ({"update": {"labels": [{"set": ["z"]}]}}, "labels", ["z"]),
    "summary by update": ({"update": {"summary": [{"set": "U"}]}}, "summary", "U"),
    "description": ({"fields": {"description": ADF}}, "description", ADF),
    "no description": ({"fields": {"description": None}}, "description", None),
    "no parent": ({"update": {"parent": [{"set": {"none": True}}]}, "fields": {"summary": "x"}}, "summary", "x"),
    "same project": ({"fields": {"project": {"key": "ABC"}, "summary": "p"}}, "summary", "p"),
    "transition is ignored": ({"fields": {"summary": "t"}, "transition": {"id": "31"}}, "summary", "t"),
}


@pytest.mark.parametrize("name", EDITED)
def test_edits_that_succeed(name):
    world = busy()
    payload, field, value = EDITED[name]
    assert edit(world, **payload) == (204, None)
    fields = read(world, "ABC-123")["fields"]
    assert (fields[field], fields["status"]["name"]) == (value, "To Do") and fields["comment"]["total"] == 1


@pytest.mark.parametrize("fields, wrong", [
    ({"status": {"name": "Done"}}, {"status"}), ({"summary": None, "labels": ["a b"], "points": 1}, {"summary", "labels", "points"}),
    ({"assignee": "admin123"}, {"assignee"}), ({"assignee": {"accountId": "nobody"}}, {"assignee"}),
    ({"description": "text"}, {"description"}), ({"priority": {"name": "Urgent"}}, {"priority"}),
    ({"parent": {"key": "XYZ-456"}}, {"parentId"}), ({"parent": "XYZ-456"}, {"parent"}), ({"issuetype": {"id": "9"}}, {"issuetype"}),
    ({"project": {"key": "NOPE"}}, {"project"}), ({"resolution": {"name": "Done"}}, {"resolution"}),
], ids=str)
def test_a_refused_edit_changes_nothing(fields, wrong):
    world = busy()
    before = state_hash(world)
    status, body = edit(world, fields={"summary": "changed", **fields})
    assert (status, set(body["errors"]), state_hash(world)) == (400, wrong, before)


def test_update_adds_a_comment_a_worklog_and_a_link_or_nothing():
    world = busy()
    part = {"comment": [{"add": {"body": ADF}}], "worklog": [{"add": {"timeSpent": "2h"}}],
            "issuelinks": [{"add": {"type": {"name": "Relates"}, "outwardIssue": {"key": "ISK1"}}}]}
    before = state_hash(world)
    assert edit(world, update={**part, "labels": [{"add": "a b"}]})[0] == 400
    assert edit(world, update={**part, "issuelinks": [{"add": {"type": {"name": "Bogus"}}}]})[0] == 404
    assert edit(world, update={**part, "comment": [{"add": {"body": "text"}}]})[0] == 400
    assert edit(world, update={**part, "comment": part["comment"] * 2})[0] == 501
    assert state_hash(world) == before
    assert edit(world, update=part)[0] == 204
    fields = read(world, "ABC-123")["fields"]
    assert (fields["comment"]["total"], fields["worklog"]["total"], len(fields["issuelinks"])) == (2, 2, 2)


def test_an_edit_can_return_the_issue():
    status, _, body = call(busy(), "PUT", ABC, {"fields": {"summary": "New"}}, {"returnIssue": "true"})
    assert (status, body["fields"]["summary"]) == (200, "New")


@pytest.mark.parametrize("version, body, status", [("2", "hi", 204), ("3", "hi", 400), ("3", ADF, 204), ("2", ADF, 400)], ids=str)
def test_a_comment_with_a_transition(version, body, status):
    world = busy()
    before = state_hash(world)
    payload = {"transition": {"id": 21}, "fields": {}, "update": {"comment": [{"add": {"body": body}}]}}
    assert call(world, "POST", f"/rest/api/{version}/issue/ABC-123/transitions", payload)[0] == status
    fields = read(world, "ABC-123")["fields"]
    done = status == 204
    assert (fields["status"]["name"], fields["comment"]["total"]) == (("In Progress", 2) if done else ("To Do", 1))
    assert done or state_hash(world) == before


def test_other_updates_are_on_no_transition_screen():
    status, _, body = call(busy(), "POST", EDGES, {"transition": {"id": "31"}, "update": {"worklog": [{"add": {}}], "labels": []}})
    assert status == 400 and set(body["errors"]) == {"worklog", "labels"}


# Delete, and what is never given again


@pytest.mark.parametrize("value, status", [("True", 204), ("true", 204), (True, 204), ("false", 400), (None, 400), ("", 400)], ids=repr)
def test_delete_with_subtasks(value, status):
    world = busy()
    assert call(world, "DELETE", ABC, query={"deleteSubtasks": value})[0] == status
    assert ("ABC-124" in keys(world)) is (status == 400)
    assert find(world, "summary ~ billing")[1]["issues"] == ([] if status == 204 else [{"id": "10100"}])
    assert read(world, "XYZ-456")["fields"]["issuelinks"] == [] or status == 400


def test_keys_and_ids_are_not_given_again():
    world = busy()
    first = read(world, "ABC-124")
    assert call(world, "DELETE", f"{ISSUE}/ABC-124")[0] == 204
    second = create(world)[1]
    assert second["key"] == "ABC-125" and int(second["id"]) > int(first["id"])
    assert call(world, "DELETE", f"{ABC}/comment/10001")[0] == 204
    assert call(world, "POST", f"{ABC}/comment", {"body": ADF})[2]["id"] != "10001"
    assert call(world, "GET", f"{ABC}/comment/10001")[0] == 404


def test_reset_takes_everything_back():
    world = busy()
    world.reset()
    assert state_hash(world) == state_hash(site())
    fields = read(world, "ABC-123")["fields"]
    assert (fields["comment"]["total"], fields["worklog"]["total"], fields["issuelinks"], fields["subtasks"]) == (0, 0, [], [])


# Comments, worklogs, links, assignee


def test_comments_are_read_changed_and_deleted():
    world = busy()
    call(world, "POST", f"{V2}/issue/ABC-123/comment", {"body": "second"})
    listed = call(world, "GET", f"{V2}/issue/ABC-123/comment", query={"orderBy": "-created", "maxResults": "1"})[2]
    assert (listed["total"], listed["maxResults"], [c["body"] for c in listed["comments"]]) == (2, 1, ["second"])
    name = listed["comments"][0]["id"]
    assert call(world, "PUT", f"{V2}/issue/ABC-123/comment/{name}", {"body": "changed"})[2]["body"] == "changed"
    assert call(world, "GET", f"{ABC}/comment/{name}")[2]["body"] == document("changed")
    assert call(world, "PUT", f"{ABC}/comment/{name}", {"body": "text"})[0] == 400
    assert call(world, "DELETE", f"{ABC}/comment/{name}")[0] == 204
    assert call(world, "GET", f"{ABC}/comment")[2]["total"] == 1


@pytest.mark.parametrize("payload, seconds", [
    ({"timeSpent": "1w 2d 3h 4m"}, 144000 + 57600 + 10800 + 240), ({"timeSpentSeconds": 3600}, 3600), ({"timeSpent": " 90m "}, 5400),
    ({"timeSpentSeconds": 59}, None), ({"timeSpentSeconds": True}, None), ({"timeSpentSeconds": "60"}, None), ({"timeSpent": ""}, None),
    ({"timeSpent": 5}, None), ({"timeSpent": "1x"}, None), ({"timeSpentSeconds": 10**12}, None),
], ids=str)
def test_time_spent(payload, seconds):
    status, _, body = call(site(), "POST", f"{ABC}/worklog", payload)
    assert (status, body.get("timeSpentSeconds")) == ((201, seconds) if seconds else (400, None))


def test_a_link_is_seen_from_both_ends():
    world = busy()
    out, back = (read(world, key)["fields"]["issuelinks"][0] for key in ("ABC-123", "XYZ-456"))
    assert (out["type"]["outward"], out["outwardIssue"]["key"], "inwardIssue" in out) == ("blocks", "XYZ-456", False)
    assert (back["type"]["inward"], back["inwardIssue"]["key"], back["id"]) == ("is blocked by", "ABC-123", out["id"])
    assert call(world, "DELETE", f"/rest/api/3/issueLink/{out['id']}")[0] == 204
    assert read(world, "XYZ-456")["fields"]["issuelinks"] == []


@pytest.mark.parametrize("change", [{"inwardIssue": {"key": "ABC-999"}}, {"outwardIssue": {}}, {"outwardIssue": "ABC-124"},
                                    {"type": {}}, {"type": "Blocks"}, {"comment": {"body": "text"}}], ids=str)
def test_a_refused_link_changes_nothing(change):
    world = busy()
    before = state_hash(world)
    assert call(world, "POST", "/rest/api/3/issueLink", {**LINK, **change})[0] in (400, 404) and state_hash(world) == before


@pytest.mark.parametrize("payload, status, account", [
    ({"accountId": "qa789"}, 204, "qa789"), ({"accountId": None}, 204, None), ({"accountId": "-1"}, 204, None),
    ({"accountId": "nobody"}, 400, "admin123"), ({"accountId": 5}, 400, "admin123"), ({}, 400, "admin123"),
    ({"name": "qa789"}, 400, "admin123"), (None, 400, "admin123")], ids=str)
@pytest.mark.parametrize("version", ["2", "3", "latest"])
def test_assignee(version, payload, status, account):
    world = busy()
    assert call(world, "PUT", f"/rest/api/{version}/issue/ABC-124/assignee", payload)[0] == status
    assignee = read(world, "ABC-124")["fields"]["assignee"]
    assert (assignee and assignee["accountId"]) == account


# Search


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_d21_pages_by_token_end_and_hold_every_issue_once(size):
    world = busy()
    query, seen, token = {"jql": "project in (ABC, ISK) order by key", "maxResults": size}, [], None
    for _ in range(20):
        body = call(world, "POST", SEARCH, {**query, "nextPageToken": token})[2]
        seen += [issue["id"] for issue in body["issues"]]
        token = body.get("nextPageToken")
        assert body["isLast"] is (token is None) and not {"total", "startAt"} & set(body)
        if token is None:
            break
    assert len(seen) == len(set(seen)) == 8 and token is None


def test_d21_the_old_search_is_gone_and_an_offset_is_refused():
    for version in "23":
        for method in ("GET", "POST"):
            assert call(site(), method, f"/rest/api/{version}/search", query={"jql": "project = ABC"})[0] == 410
    assert call(site(), "POST", SEARCH, {"jql": "project = ABC", "startAt": 0})[2] == ROWS["jira.any.invalid_payload"]["body"]


def test_d25_a_search_sees_a_write_at_once():
    world = site()
    for number in range(3):
        create(world, summary=f"Fresh {number}")
        assert len(find(world, "summary ~ fresh")[1]["issues"]) == number + 1
    edit(world, "ABC-124", fields={"summary": "Other"})
    assert len(find(world, "summary ~ fresh")[1]["issues"]) == 2


@pytest.mark.parametrize("fields, expected", [
    (None, None), ("id", None), ("summary", {"summary"}), ("summary,status", {"summary", "status"}), ("key", set()),
    ("*navigable", {"summary", "issuelinks"}), ("*all", {"summary", "comment", "worklog"})], ids=str)
def test_fields_of_a_search(fields, expected):
    world = busy()
    hit = find(world, "key = ABC-123", **({"fields": fields} if fields else {}))[1]["issues"][0]
    assert hit == {"id": "10100"} if expected is None else expected <= set(hit["fields"]) and hit["key"] == "ABC-123"
    assert fields != "*navigable" or "comment" not in hit["fields"]


@pytest.mark.parametrize("payload", [{"jql": 5}, {"maxResults": "5"}, {"maxResults": True}, {"fields": "summary"}, {"startAt": 0},
                                     {"expand": ["names"]}, []], ids=str)
def test_search_bodies_of_another_shape(payload):
    body = {"jql": "key = ABC-123", **payload} if isinstance(payload, dict) else payload
    assert call(site(), "POST", SEARCH, body)[::2] == (400, ROWS["jira.any.invalid_payload"]["body"])


@pytest.mark.parametrize("size, status", [(0, 400), (1, 200), (5000, 200), (5001, 400), (-1, 400)])
def test_bounds_of_a_page(size, status):
    assert call(site(), "POST", SEARCH, {"jql": "key = ABC-123", "maxResults": size})[0] == status
    assert find(site(), "key = ABC-123", maxResults=str(size))[0] == status


def test_an_anonymous_caller_sees_an_empty_site():
    nobody = World({})
    for jql in ("project = ABC", "key = ABC-123", "bogus = 1", "assignee = currentUser()"):
        assert find(nobody, jql) == (200, {"issues": [], "isLast": True})
    assert [call(nobody, "GET", path)[0] for path in (ABC, "/rest/api/3/project/ABC", "/rest/api/3/myself")] == [404, 404, 401]
    assert [call(nobody, "GET", f"/rest/api/3/{path}")[0] for path in ("serverInfo", "field")] == [200, 200]
    assert create(nobody)[1]["errors"] == {"project": "Specify a valid project ID or key"}
    assert find(nobody, "project =")[0] == 400


# Metadata


def test_createmeta_says_what_a_create_requires():
    "Leaving out any required field is refused; leaving out any other is not."
    metas = call(site(), "GET", f"{ISSUE}/createmeta/ABC/issuetypes/10003")[2]["fields"]
    for meta in metas:
        if meta["key"] in ("project", "parent", "issuetype", "summary", "assignee"):
            assert (create(site(), **{meta["key"]: ...})[0] == 400) is meta["required"], meta["key"]


@pytest.mark.parametrize("query, found", [
    ({}, ["ABC", "ISK", "XYZ"]), ({"orderBy": "-key"}, ["XYZ", "ISK", "ABC"]), ({"orderBy": " name"}, None), ({"id": "10000"}, ["ABC"]),
    ({"keys": "ISK,XYZ"}, ["ISK", "XYZ"]), ({"typeKey": "business"}, []), ({"status": "archived"}, []), ({"orderBy": "category"}, 501),
    ({"categoryId": "1"}, 501), ({"expand": "insight"}, 501)])
def test_projects_are_chosen_and_ordered_or_the_request_is_refused(query, found):
    status, _, body = call(site(), "GET", "/rest/api/3/project/search", query=query)
    names = [row["name"].lower() for row in body.get("values", [])]
    assert status == (found if found == 501 else 200)
    assert found == 501 or (names == sorted(names) if found is None else [row["key"] for row in body["values"]] == found)


def test_both_forms_of_createmeta_agree():
    world = site()
    old = call(world, "GET", f"{ISSUE}/createmeta", query={"projectKeys": "ABC", "expand": "projects.issuetypes.fields"})[2]
    kinds = call(world, "GET", f"{ISSUE}/createmeta/ABC/issuetypes")[2]["issueTypes"]
    assert [kind["id"] for kind in old["projects"][0]["issuetypes"]] == [kind["id"] for kind in kinds]
    for kind in old["projects"][0]["issuetypes"]:
        new = call(world, "GET", f"{ISSUE}/createmeta/ABC/issuetypes/{kind['id']}")[2]["fields"]
        assert {meta["fieldId"]: {k: v for k, v in meta.items() if k != "fieldId"} for meta in new} == kind["fields"]


def test_an_answer_is_no_way_into_the_world():
    world = busy()
    before = state_hash(world)
    for path in ("issue/ABC-123", "issue/ABC-123/comment", "issue/ABC-123/worklog", "project/ABC", "priority", "resolution"):
        body = call(world, "GET", f"/rest/api/3/{path}")[2]
        for part in (body, *(body.get("fields", {}).values() if isinstance(body, dict) else body)):
            for name in list(part) if isinstance(part, dict) else ():
                part[name] = [inner.clear() for inner in (part[name] if isinstance(part[name], list) else [part[name]])
                              if isinstance(inner, dict | list)]
    assert state_hash(world) == before == state_hash(busy()) and call(world, "GET", "/rest/api/3/resolution")[2][0]["name"] == "Done"


# The real API document


@pytest.fixture(scope="module")
def spec():
    if not SPEC.exists():
        pytest.skip("the OpenAPI document of Jira Cloud is not beside this checkout; get it from developer.atlassian.com")
    return json.loads(SPEC.read_text(encoding="utf-8"))


SCHEMAS = {
    "ServerInformation": ["serverInfo"], "User": ["myself", "user?accountId=qa789"], "Project": ["project/ABC"],
    "PageBeanProject": ["project/search"], "PageOfComments": ["issue/ABC-123/comment"], "Comment": ["issue/ABC-123/comment/10001"],
    "PageOfWorklogs": ["issue/ABC-123/worklog"], "Worklog": ["issue/ABC-123/worklog/10002"], "IssueLinkTypes": ["issueLinkType"],
    "IssueLink": ["issueLink/10003"], "IssueCreateMetadata": ["issue/createmeta", "issue/createmeta?expand=projects.issuetypes.fields"],
    "PageOfCreateMetaIssueTypes": ["issue/createmeta/ABC/issuetypes"], "StatusDetails": ["status/Done"], "Priority": ["priority/1"],
    "PageOfCreateMetaIssueTypeWithField": ["issue/createmeta/ABC/issuetypes/10003"], "IssueUpdateMetadata": ["issue/ABC-123/editmeta"],
    "SearchAndReconcileResults": ["search/jql?jql=project=ABC&fields=*all&expand=names,schema", "search/jql?jql=key=ABC-123"],
    "IssueBean": ["issue/ABC-123?expand=names,schema,renderedFields,editmeta,transitions", "issue/ABC-124"],
    "IssueTypeDetails": ["issuetype/10003"], "Resolution": ["resolution/10000"], "StatusCategory": ["statuscategory/new"],
}
LISTS = {"FieldDetails": "field", "StatusDetails": "status", "Priority": "priority", "IssueTypeDetails": "issuetype",
         "User": "user/assignable/search?project=ABC", "Project": "project", "IssueTypeWithStatus": "project/ABC/statuses"}


def ask(path):
    path, _, query = path.partition("?")
    return call(busy(), "GET", f"/rest/api/3/{path}", query=dict(pair.split("=", 1) for pair in query.split("&") if pair))[2]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_fit_the_real_schemas(spec, schema):
    for path in SCHEMAS[schema]:
        Draft4Validator({"$ref": f"#/components/schemas/{schema}", "components": spec["components"]}).validate(ask(path))


@pytest.mark.parametrize("schema", LISTS)
def test_lists_fit_the_real_schemas(spec, schema):
    root = {"type": "array", "minItems": 1, "items": {"$ref": f"#/components/schemas/{schema}"}, "components": spec["components"]}
    Draft4Validator(root).validate(ask(LISTS[schema]))


def test_every_operation_is_a_real_one_and_answers_a_documented_status(spec):
    for (method, template), request in [(key, key) for key in HANDLERS]:
        documented = spec["paths"][f"/rest/api/3{template}"][method.lower()]["responses"]
        status = call(busy(), method, f"/rest/api/3{filled(template)}", {} if method != "GET" else None)[0]
        assert str(status) in documented or any(row["status"] == status for row in ROWS.values()), request


# Determinism

SCRIPT = """
import json
from tests.test_jira_site import MORE, busy, call, edit, read
from atlas_rlvr.world import state_hash
world = busy()
answers = [call(world, *request) for request in MORE.values()]
answers += [edit(world, update={"labels": [{"add": "b"}, {"add": "a"}]}), read(world, "ABC-123", expand="names,schema,editmeta")]
print(json.dumps(answers), state_hash(world))
"""


def test_other_processes_give_the_same_bytes():
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    printed = [subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, check=True,
                              env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}).stdout for seed in ("1", "77")]
    assert printed[0] == printed[1] and len(printed[0]) > 1000
