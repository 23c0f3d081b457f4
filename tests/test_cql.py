"CQL: what it finds, what it refuses, and that no text makes it fail otherwise."
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atlas_rlvr.confluence import handle
from atlas_rlvr.cql import FIELDS, CqlError, parse, select, words
from atlas_rlvr.world import CATALOGUE, World, load_data, now

SITE, SEARCH = load_data("site.json"), "/wiki/rest/api/search"


@pytest.fixture(scope="module")
def world():
    "The site with two labels, an edit and a page below a page."
    world = World(SITE)
    pages = world.tables["pages"]
    pages["10001"] = {**pages["10001"], "labels": ["runbook", "ci/cd"], "updated": "2026-01-03T10:00:00", "editorId": "qa789"}
    pages["10005"] = {**pages["10005"], "labels": ["runbook"], "parentId": "10001", "authorId": "dev456",
                      "created": "2026-01-02T00:00:00"}
    world.writes = 3 * 86400  # the fourth of January
    return world


def found(world, cql):
    status, _, answer = handle(world, "GET", SEARCH, {"cql": cql, "limit": "100"})
    return [hit["content"]["id"] for hit in answer["results"]] if status == 200 else status


ALL = ["100", "450", "789", "10001", "10002", "10003", "10004", "10005", "10006"]
HR = ["450", "10003", "10004"]


@pytest.mark.parametrize("cql, ids", [
    ("space = HR", HR), ("space.key = HR", HR), ("SPACE=HR", HR), ("space in (HR, NOPE)", HR), ('space = "HR"', HR),
    ("space not in (PAY,ENG)", HR), ("not (space = PAY or space = ENG)", HR), ("not space in (PAY, ENG)", HR),
    ("space != PAY and space != ENG", HR), ("not not space = HR", HR),
    ("space = HR or space = ENG and title ~ interface", ["450", "10002", *HR[1:]]), ("(space = HR or space = ENG) and title ~ interface", ["10002"]),
    ("type = page and space = HR", HR), ("type in (page, blogpost) AND space = HR", HR), ("type != page", []), ("type = comment", []),
    ("label = runbook", ["10001", "10005"]), ("label = RUNBOOK", ["10001", "10005"]), ('label = "ci/cd"', ["10001"]),
    ("label = ci/cd and label = runbook", ["10001"]), ("label in (ci/cd, other)", ["10001"]),
    ("space = PAY and label != runbook", ["789"]), ("space = PAY and label not in (ci/cd)", ["789", "10005"]),
    ('title = "payment OUTAGE guide"', ["10001"]), ('title in ("Night shift handbook", x)', ["10005"]),
    ("title ~ guide", ["10001"]), ("title !~ home and space = PAY", ["10001", "10005"]), ("title = guide", []),
    ('text ~ "rollback"', ["10001"]), ("text ~ roll*", ["10001"]), ('text ~ "monit?ring"', ["10001"]),
    ('text ~ "\\"first hour\\""', ["10001"]), ('text ~ "\\"hour first\\""', []), ("text ~ 'hour first'", ["10001"]),
    ('siteSearch ~ "runbook"', ["10001", "10005"]), ("text !~ the and space = PAY", []),
    ("id = 10001", ["10001"]), ("id in (10001, 0789)", ["789", "10001"]), ("content = 789", ["789"]),
    ("parent = 789", ["10001"]), ("ancestor = 789", ["10001", "10005"]), ("ancestor in (10001, 450)", ["10003", "10004", "10005"]),
    ("space = PAY and ancestor != 789", ["789"]), ("creator = dev456", ["10005"]), ("creator != admin123", ["10005"]),
    ("creator = currentUser() and space = PAY", ["789", "10001"]), ("contributor = qa789", ["10001"]),
    ("contributor in (currentUser(), qa789) and label = runbook", ["10001"]),
    ("created >= 2026-01-02", ["10005"]), ('created > "2026/01/01 23:59"', ["10005"]), ('lastmodified > "2026-01-03 09:59"', ["10001"]),
    ("created < 2026-01-02 and space = PAY", ["789", "10001"]), ('created > now("-3d")', ["10005"]), ("created >= now(-49h)", ["10005"]),
    ("lastmodified > now(-1w) and created <= now()", ALL), ('lastModified > now("-20h")', ["10001"])])
def test_what_is_found(world, cql, ids):
    assert found(world, cql) == ids


@pytest.mark.parametrize("cql, ids", [
    ("space = PAY order by title", ["10005", "10001", "789"]), ("space = PAY ORDER BY title DESC", ["789", "10001", "10005"]),
    ("space = PAY order by created desc", ["10005", "789", "10001"]),
    ("space = PAY order by lastmodified desc, title asc", ["10001", "10005", "789"])])
def test_order(world, cql, ids):
    assert found(world, cql) == ids


@pytest.mark.parametrize("cql", [
    "space =", "= HR", "space HR", "space = HR and", "and", "or space = HR", "(space = HR", "space = HR)", "space in ()", "space in HR",
    "space = HR title ~ x", "space == HR", "space = HR, PAY", 'title ~ "x', "title ~ x y", "not", "space not HR", "space in (HR PAY)",
    "space = HR order title", "space = HR order by", "space = HR order by title up", "order by title", "label is null", "space = (HR)",
    "currentUser()", "space = HR andor title ~ x", "space = order"])
def test_what_is_no_cql(world, cql):
    assert found(world, cql) == 400
    with pytest.raises(CqlError, match="search.not_cql"):
        parse(cql)


@pytest.mark.parametrize("cql, row", [
    ("colour = red", "search.no_such_field"), ("space = HR order by colour", "search.no_such_field"), ('title = ""', "search.empty_value"),
    ('text ~ "..."', "search.empty_value"), ('siteSearch ~ ""', "search.empty_site_search"), ("created > yesterday", "search.not_a_date"),
    ("created > 2026-02-30", "search.not_a_date"), ("created > 2026", "search.not_a_date"), ("parent = Home", "search.not_an_id"),
    ("id in (1, x)", "search.not_an_id"), ("space = HR and colour = red or", "search.not_cql"),
    ("watcher = a", "any.not_built"), ("favourite = currentUser()", "any.not_built"), ("type = space", "any.not_built"),
    ("text = x", "any.not_built"), ("space ~ HR", "any.not_built"), ("created = 2026-01-01", "any.not_built"),
    ("space > HR", "any.not_built"), ("space.title = x", "any.not_built"), ('text ~ "a OR b"', "any.not_built"),
    ('text ~ "-the"', "any.not_built"), ('text ~ "*back"', "any.not_built"), ('text ~ "r*back"', "any.not_built"),
    ('text ~ "roll~2"', "any.not_built"), ('text ~ "\\"roll* back\\""', "any.not_built"), ("text ~ '\"a'", "any.not_built"),
    ("space = currentSpace()", "any.not_built"), ("created > startOfDay()", "any.not_built"), ("created > now(-1y)", "any.not_built"),
    ("created > now(1, 2)", "any.not_built"), ("creator = currentUser(x)", "any.not_built"), ("space = HR order by space", "any.not_built"),
    ("siteSearch !~ a", "any.not_built"), ("(" * 101 + "space = HR" + ")" * 101, "any.not_built")])
def test_what_is_refused(cql, row):
    with pytest.raises(CqlError) as caught:
        parse(cql)
    assert caught.value.row_id == row and f"confluence.{row}" in CATALOGUE


def test_deep_queries_are_answered(world):
    assert found(world, "(" * 100 + "space = HR" + ")" * 100) == HR
    assert found(world, "(space = HR and " * 90 + "id != 1" + ")" * 90) == HR
    assert found(world, "not " * 100 + "space = HR") == HR
    assert found(world, " or ".join(["space = HR"] * 2000)) == HR


def test_words_to_mark():
    assert words(parse('title ~ "Roll back" or not (text ~ x and title !~ y)')) == {"roll", "back", "x"}


def test_operators_of_a_field_are_documented_ones():
    assert {operator for operators in FIELDS.values() for operator in operators} \
        == {"=", "!=", "~", "!~", ">", ">=", "<", "<=", "in", "not in"}


def test_trash_is_not_searched(world):
    other = World(SITE)
    other.tables["pages"]["450"] = {**other.get("pages", "450"), "status": "trashed"}
    assert found(other, "space = HR") == HR[1:]


def test_a_query_leaves_the_world_alone(world):
    writes = world.writes
    assert found(world, "space = HR") == found(world, "space = HR") and world.writes == writes and now(world).startswith("2026-01-04")


CLAUSES = st.sampled_from(["space = HR", "label = runbook", "title ~ home", "id = 789", "type = page", "text ~ the"])
QUERIES = st.recursive(CLAUSES, lambda inner: st.one_of(
    st.builds("({} and {})".format, inner, inner), st.builds("({} or {})".format, inner, inner), st.builds("not ({})".format, inner)),
    max_leaves=6)


@settings(max_examples=60, deadline=None)
@given(QUERIES, QUERIES)
def test_logic_is_that_of_sets(world, one, other):
    left, right, every = {*found(world, one)}, {*found(world, other)}, {*ALL}
    assert {*found(world, f"{one} and {other}")} == left & right
    assert {*found(world, f"{one} or {other}")} == left | right
    assert {*found(world, f"not {one}")} == every - left


TOKENS = st.lists(st.sampled_from([
    "space", "title", "=", "~", "!=", "in", "not", "and", "or", "(", ")", ",", "HR", '"a b"', "order", "by", "now()", "id", "1", "desc",
    "created", ">", "*", "'", "\\", "currentUser()", "\u00e9", "\x00"]), max_size=12).map(" ".join)


@settings(max_examples=500, deadline=None)
@given(TOKENS | st.text())
@example("created > now(9999w)")
@example("created < 0001-01-01")
@example('title ~ "\\')
def test_any_text_is_answered_or_refused(cql):
    try:
        select(parse(cql), [], "ada", "2026-01-01T00:00:00")
    except CqlError as error:
        assert f"confluence.{error.row_id}" in CATALOGUE
