"JQL: what it finds on the seed site, what it refuses, and that no text makes it raise anything else."

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_rlvr.jira_site import flat, names_in, run_query
from atlas_rlvr.jql import RESERVED_WORDS, Refused, Site, parse, search
from atlas_rlvr.wire import handle
from atlas_rlvr.world import World, load_data, now


def post(world, path, payload, version="3"):
    return handle(world, "POST", f"/rest/api/{version}{path}", {}, {}, json.dumps(payload))


@pytest.fixture(scope="module")
def world():
    "The seed site with a labelled sub-task, a comment, a link and one resolved ticket."
    made = World(load_data("site.json"))
    fields = {"project": {"key": "ABC"}, "parent": {"key": "ABC-123"}, "issuetype": {"id": "10003"}, "labels": ["Ops", "q1"],
              "summary": "Write release notes", "assignee": {"accountId": "admin123"}, "priority": {"name": "High"}}
    assert post(made, "/issue", {"fields": fields})[0] == 201
    assert post(made, "/issue/ISK1/transitions", {"transition": {"id": "31"}})[0] == 204
    assert post(made, "/issue/ISK2/comment", {"body": "The gateway restarts hourly"}, "2")[0] == 201
    link = {"type": {"name": "Blocks"}, "inwardIssue": {"key": "ABC-123"}, "outwardIssue": {"key": "XYZ-456"}}
    assert post(made, "/issueLink", link)[0] == 201
    return made


def found(world, text):
    return [row["key"] for row in run_query(world, text)]


ALL = ["ABC-123", "ABC-124", "ISK1", "ISK2", "ISK3", "ISK4", "ISK5", "ISK6", "XYZ-456"]
QUERIES = {
    "project = ABC": ["ABC-123", "ABC-124"],
    "project = abc": ["ABC-123", "ABC-124"],
    "project = 10000": ["ABC-123", "ABC-124"],
    'project = "Alpha Billing"': ["ABC-123", "ABC-124"],
    "project in (ABC, XYZ)": ["ABC-123", "ABC-124", "XYZ-456"],
    "project not in (ABC, XYZ)": ["ISK1", "ISK2", "ISK3", "ISK4", "ISK5", "ISK6"],
    "project != ISK": ["ABC-123", "ABC-124", "XYZ-456"],
    "key = ABC-123": ["ABC-123"],
    "issuekey in (abc-123, ISK1)": ["ABC-123", "ISK1"],
    "id = 10102": ["ISK1"],
    "parent = ABC-123": ["ABC-124"],
    "parent is not EMPTY": ["ABC-124"],
    "type = Sub-task": ["ABC-124"],
    "issuetype in (Story, 'Sub-task')": ["ABC-123", "ABC-124", "XYZ-456"],
    "status = Resolved": ["ISK1"],
    "status != Resolved and project = ISK": ["ISK2", "ISK3", "ISK4", "ISK5", "ISK6"],
    "statusCategory = Done": ["ISK1"],
    '"Status Category" = done': ["ISK1"],
    "resolution = Unresolved AND project = ISK AND assignee = dev456": ["ISK2"],
    "resolution is EMPTY and assignee = dev456": ["ISK2"],
    "resolution = Done": ["ISK1"],
    "assignee = currentUser()": ["ABC-124", "ISK3", "ISK4"],
    "assignee in (currentUser(), qa789)": ["ABC-124", "ISK3", "ISK4", "ISK5", "ISK6"],
    'assignee = "Quinn Alvarez"': ["ISK5", "ISK6"],
    'assignee = "qa789@example.com"': ["ISK5", "ISK6"],
    "assignee is EMPTY": ["ABC-123", "XYZ-456"],
    "assignee = null": ["ABC-123", "XYZ-456"],
    "assignee != admin123": ["ISK1", "ISK2", "ISK5", "ISK6"],
    "not assignee = admin123": ["ISK1", "ISK2", "ISK5", "ISK6"],
    "assignee in (EMPTY, admin123)": ["ABC-123", "ABC-124", "ISK3", "ISK4", "XYZ-456"],
    "labels = ops": ["ABC-124"],
    "labels in (nothing, Q1)": ["ABC-124"],
    "labels = never-used": [],
    "labels != q2": ["ABC-124"],
    "labels is empty and project = ABC": ["ABC-123"],
    "priority = High": ["ABC-124"],
    "priority in (High, Highest)": ["ABC-124"],
    "summary ~ release": ["ABC-124"],
    "summary ~ 'rel*'": ["ABC-124"],
    "summary ~ 'notes release'": ["ABC-124"],
    "summary ~ '\"notes release\"'": [],
    "summary ~ '\"release notes\"'": ["ABC-124"],
    "summary !~ 'the' and project = ABC": ["ABC-124"],
    "description ~ invoices": ["ABC-123"],
    "description is EMPTY": ["ABC-124"],
    "description !~ nothing and project = ABC": ["ABC-123"],
    "comment ~ gateway": ["ISK2"],
    "text ~ gateway": ["ISK2"],
    "text ~ tunnel or text ~ firewall": ["ISK2", "ISK4"],
    "issue in linkedIssues(ABC-123)": ["XYZ-456"],
    "issue in linkedIssues('XYZ-456')": ["ABC-123"],
    "created > '2026-01-01 00:00' and project = ABC": [],
    "created <= now() and project = ABC": ["ABC-123", "ABC-124"],
    "created >= -1d and project = XYZ": ["XYZ-456"],
    "created < -1w": [],
    "updated >= startOfDay() and key = ISK1": ["ISK1"],
    "updated < startOfYear()": [],
    "created >= 2026-01-01 and created < '2026/01/02' and project = XYZ": ["XYZ-456"],
    "not (project = ISK or project = XYZ)": ["ABC-123", "ABC-124"],
    "!(project = ISK) && project = ABC": ["ABC-123", "ABC-124"],
    "project = ABC || project = XYZ": ["ABC-123", "ABC-124", "XYZ-456"],
    "project = ABC or project = XYZ and type = Story": ["ABC-123", "ABC-124", "XYZ-456"],
    "(project = ABC or project = XYZ) and type = Story": ["ABC-123", "XYZ-456"],
    "fixVersion is EMPTY and key = ISK1": ["ISK1"],
    "reporter = currentUser() and key = ISK1": ["ISK1"],
    "project is not EMPTY": ALL,
}


@pytest.mark.parametrize("text", QUERIES)
def test_what_a_query_finds(world, text):
    assert found(world, f"{text} order by key") == QUERIES[text]


ORDERS = {
    "ORDER BY key DESC": ["XYZ-456", "ABC-124", "ABC-123"],
    "order by created": ["ABC-124", "XYZ-456", "ABC-123"],
    "ORDER BY created ASC": ["ABC-123", "XYZ-456", "ABC-124"],
    "order by updated desc": ["ABC-123", "ABC-124", "XYZ-456"],
    "order by priority": ["ABC-124", "ABC-123", "XYZ-456"],
    "order by priority asc, key desc": ["XYZ-456", "ABC-123", "ABC-124"],
    "order by summary": ["XYZ-456", "ABC-123", "ABC-124"],
    "order by assignee": ["ABC-124", "ABC-123", "XYZ-456"],
    "": ["ABC-124", "XYZ-456", "ABC-123"],
}


@pytest.mark.parametrize("order", ORDERS)
def test_orders(world, order):
    assert found(world, f"project in (ABC, XYZ) {order}") == ORDERS[order]


REFUSED = {
    "": "unbounded",
    "order by created desc": "unbounded",
    "project": "syntax_end",
    "project =": "syntax_end",
    "project = ABC and": "syntax_end",
    "(project = ABC": "syntax_end",
    "project ABC": "syntax",
    "project = ABC DEF": "syntax",
    "project in ABC": "syntax_end",
    "project in ABC and key = x": "syntax",
    "= ABC": "syntax",
    "project = ABC)": "syntax",
    "project in ()": "syntax",
    "summary ~ foo*": "reserved_character",
    "assignee = a@b": "reserved_character",
    "cf[10010] = 1": "reserved_character",
    "order = 1": "reserved_word",
    "project = select": "reserved_word",
    "summary ~ 'open": "quote_open",
    'summary ~ "open': "quote_open",
    "project = NOPE": "value_unknown",
    "issuetype = Epic": "value_unknown",
    "status in (Done, Nope)": "value_unknown",
    "assignee = nobody": "value_unknown",
    "fixVersion = v1": "value_unknown",
    "project = 99999": "id_unknown",
    "key = ABC-999": "issue_unknown",
    "parent = ABC-999": "issue_unknown",
    "issue in linkedIssues(ABC-999)": "issue_unknown",
    "sprint = 1": "field_unknown",
    "'Epic Link' = ABC-1": "field_unknown",
    "duedate < now()": "field_unknown",
    "summary = x": "operator_unsupported",
    "project ~ ABC": "operator_unsupported",
    "priority > Low": "operator_unsupported",
    "created = 2026-01-01": "operator_unsupported",
    "created is EMPTY": "operator_unsupported",
    "summary > a": "operator_unsupported",
    "assignee in membersOf(team)": "function_unknown",
    "project = currentUser()": "function_unknown",
    "created > startOfDay(-1)": "function_unknown",
    "created > endOfDay()": "function_unknown",
    "created > soon": "date_invalid",
    "created > 2026-13-01": "date_invalid",
    "created > '-9999w 9999w 9999w'": "date_invalid",
    "created > -1y": "date_invalid",
    "summary ~ ''": "text_empty",
    "summary ~ EMPTY": "text_empty",
    "summary ~ currentUser()": "text_empty",
    "summary ~ '*x'": "text_wildcard",
    "summary ~ 'x -y'": "text_operator",
    "summary ~ 'x~'": "text_operator",
    "summary ~ 'x OR y'": "text_operator",
    "summary ~ '...'": "text_operator",
    "status WAS Done": "history",
    "status was not in (Done)": "history",
    "status changed": "history",
    "project = ABC order by points": "sort_unknown",
    "(" * 60 + "project = ABC" + ")" * 60: "too_deep",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40] or "empty")
def test_what_is_refused(world, text):
    site = Site(names_in(world), datetime.fromisoformat(now(world)), "admin123", lambda key: None)
    with pytest.raises(Refused) as refused:
        search(text, [flat(world, row) for row in world.rows("issues")], site)
    assert refused.value.row == REFUSED[text]


def test_a_wrong_value_is_an_error_even_where_no_issue_is_asked(world):
    for text in ("project = ABC and project = NOPE", "labels = x and status = Nope", "project = ABC or key = ABC-999"):
        status, _, body = handle(world, "GET", "/rest/api/3/search/jql", {"jql": text}, {}, "")
        assert status == 400 and "does not exist" in body["errorMessages"][0]


@pytest.mark.parametrize("word", sorted(RESERVED_WORDS - {"empty", "null", "not"}))
def test_reserved_words_need_quotes(word):
    with pytest.raises(Refused):
        parse(f"labels = {word}")
    assert parse(f"labels = '{word}'").where.operands == (word,)


@pytest.mark.parametrize("word", ["android", "notes", "inbox", "island", "orders", "emptying", "wasteful", "not-now", "in-review"])
def test_a_keyword_inside_a_word_is_none(word):
    assert parse(f"labels = {word} and {word} = x").where[1][0].operands == (word,)


@pytest.mark.parametrize("text, said", [(r"'it\'s'", "it's"), (r'"a \"b\""', 'a "b"'), (r"'\u0041'", "A"), (r"'a\\b'", r"a\b")])
def test_escapes(text, said):
    assert parse(f"summary ~ {text}").where.operands == (said,)


pieces = st.sampled_from(["project", "status", "summary", "created", "assignee", "key", "=", "!=", "~", "!~", "<", ">=", "in", "not in",
                          "is", "not", "EMPTY", "(", ")", ",", "and", "or", "!", "ABC", "Done", "'x y'", '"', "-7d", "now()",
                          "currentUser()", "order by", "desc", "was", "*", "\\", "{", "\n"])


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(pieces, max_size=12).map(" ".join) | st.text(max_size=30))
def test_any_text_is_answered_or_refused(world, text):
    status, _, body = handle(world, "GET", "/rest/api/3/search/jql", {"jql": text}, {}, "")
    assert (status == 200 and set(body) >= {"issues", "isLast"}) or (status == 400 and len(body["errorMessages"]) == 1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(QUERIES)), st.sampled_from(sorted(QUERIES)))
def test_laws_of_and_or_not(world, one, other):
    first, second = set(found(world, one)), set(found(world, other))
    assert set(found(world, f"({one}) and ({other})")) == first & second
    assert set(found(world, f"({one}) or ({other})")) == first | second
    assert not set(found(world, f"not ({one})")) & first
    assert set(found(world, f"not not ({one})")) == first


def test_deep_negation_and_long_lists(world):
    assert found(world, "not " * 5001 + "project = ABC") == found(world, "project != ABC")
    assert found(world, "key in (" + ", ".join(["ISK1"] * 3000) + ")") == ["ISK1"]
    assert len(found(world, " or ".join(["project = ABC"] * 1000))) == 2
