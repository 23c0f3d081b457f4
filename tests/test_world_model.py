"""Random sequences of calls against a simple model of the site.

The model is written from the rules of the two products and shares no code with the site: after each call everything that can be
read must be what the model says. At the end of a sequence the same calls on a fresh site give the same answers and state.
"""
import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from atlas_rlvr.wire import handle
from atlas_rlvr.world import World, load_data, state_hash

SITE = load_data("site.json")
STATUSES = {number: row["name"] for number, row in SITE["statuses"].items()}
SPACES = {row["id"]: row["key"] for row in SITE["spaces"].values()}
TYPES = {"Story": 0, "Task": 0, "Sub-task": -1}
summaries = st.sampled_from(["Ship it", "x", "New", "Old", "y" * 255, "x" * 256, " ", "", "two\nlines", "Ünïcode"])
issue_labels = st.lists(st.sampled_from(["a", "B", "b", "c-d", "two words"]), max_size=3)
page_labels = st.sampled_from(["ops", "Runbook Two", "a,b", "v1.2", "x" * 256, " , ", "ci/cd"])
titles = st.sampled_from(["Notes", "NOTES", "Plan", "Ünïcode", "A", "B", "payments home", " ", "x" * 256])
users = st.sampled_from(["admin123", "dev456", "qa789", None, "nobody"])
versions = st.sampled_from("23")
some = st.data()


def said(text: str) -> dict:
    "A document of one line."
    return {"type": "doc", "version": 1, "content": [{"type": "paragraph", "content": [{"type": "text", "text": text}]}]}


class Site(RuleBasedStateMachine):
    "Calls of both products; `issues`, `links` and `pages` are the model."
    sequences, calls, statuses = 0, 0, Counter()

    @initialize()
    def begin(self):
        Site.sequences += 1
        self.world, self.log = World(SITE), []
        self.issues = {key: {"project": row["project"], "type": SITE["issuetypes"][row["issuetype"]]["name"], "summary": row["summary"],
                             "labels": row["labels"], "status": STATUSES[row["status"]], "assignee": row["assignee"],
                             "parent": row["parent"], "comments": [], "workflow": row["workflow"]}
                       for key, row in SITE["issues"].items()}
        self.highest = {"ABC": 123, "XYZ": 456, "ISK": 0}
        self.links, self.homes = [], {row["id"]: row["homepageId"] for row in SITE["spaces"].values()}
        self.pages = {number: {name: row[name] for name in ("title", "spaceId", "parentId", "status", "labels", "version", "body")}
                      for number, row in SITE["pages"].items()}

    def call(self, method: str, path: str, body=None, **query):
        "Status and body; a refused call and a read leave the state as it was."
        before = state_hash(self.world)
        text = "" if body is None else json.dumps(body)
        status, _, answer = handle(self.world, method, path, query, {}, text)
        self.log.append(((method, path, query, text), (status, json.dumps(answer))))
        Site.calls, Site.statuses[status] = Site.calls + 1, Site.statuses[status] + 1
        assert status < 500
        assert (state_hash(self.world) == before) or (status < 300 and method != "GET")
        return status, answer

    def read(self, path: str, **query):
        "A read that must succeed and is not logged."
        status, _, answer = handle(self.world, "GET", path, query)
        assert status == 200, answer
        return answer

    # Jira

    def issue(self, data, *more) -> str:
        "A key, most often of an issue that exists."
        return data.draw(st.sampled_from([*self.issues, *more, "ABC-999"]), label="issue")

    @rule(data=some, project=st.sampled_from(["ABC", "XYZ", "NOPE"]), kind=st.sampled_from([*TYPES]), summary=summaries,
          labels=issue_labels, user=users, version=versions)
    def create_issue(self, data, project, kind, summary, labels, user, version):
        parent = data.draw(st.sampled_from([None, *self.issues]), label="parent")
        fields = {"project": {"key": project}, "issuetype": {"name": kind}, "summary": summary, "labels": labels,
                  **({"parent": {"key": parent}} if parent else {}), **({"assignee": {"accountId": user}} if user else {})}
        status, answer = self.call("POST", f"/rest/api/{version}/issue", {"fields": fields})
        above = self.issues.get(parent)
        placed = kind != "Sub-task" if parent is None else (
            kind == "Sub-task" and above["type"] != "Sub-task" and above["project"] == project)
        valid = project != "NOPE" and good_summary(summary) and "two words" not in labels and user != "nobody" and placed
        assert status == (201 if valid else 400), answer
        if valid:
            self.highest[project] += 1
            assert answer["key"] == f"{project}-{self.highest[project]}"
            self.issues[answer["key"]] = {"project": project, "type": kind, "summary": summary, "labels": [*dict.fromkeys(labels)],
                                          "status": "To Do", "assignee": user, "parent": parent, "comments": [], "workflow": "simple"}

    @rule(data=some, number=st.sampled_from(["11", "21", "31", 31, "41", "71", "99", None]), version=versions)
    def transition(self, data, number, version):
        key = self.issue(data)
        status, _ = self.call("POST", f"/rest/api/{version}/issue/{key}/transitions", {"transition": {"id": number}})
        if key not in self.issues:
            assert status == 404
            return
        edges = {edge["id"]: edge["to"] for edge in SITE["workflows"][self.issues[key]["workflow"]]["transitions"]}
        assert status == (204 if str(number) in edges else 400)
        if status == 204:
            self.issues[key]["status"] = STATUSES[edges[str(number)]]

    @rule(data=some, summary=summaries, labels=issue_labels, how=st.sampled_from(["set", "add", "remove"]), version=versions)
    def edit_issue(self, data, summary, labels, how, version):
        key = self.issue(data)
        operations = [{"set": labels}] if how == "set" else [{how: label} for label in labels]
        payload = {"fields": {"summary": summary}, "update": {"labels": operations}}
        status, answer = self.call("PUT", f"/rest/api/{version}/issue/{key}", payload)
        wrong = not good_summary(summary) or (how != "remove" and "two words" in labels)
        assert status == (404 if key not in self.issues else 400 if wrong else 204), answer
        if status == 204:
            row = self.issues[key]
            wanted = labels if how == "set" else [*row["labels"], *labels] if how == "add" else [
                label for label in row["labels"] if label not in labels]
            row |= {"summary": summary, "labels": [*dict.fromkeys(wanted)]}

    @rule(data=some, user=users)
    def assign(self, data, user):
        key = self.issue(data)
        status, _ = self.call("PUT", f"/rest/api/3/issue/{key}/assignee", {"accountId": user})
        assert status == (404 if key not in self.issues else 400 if user == "nobody" else 204)
        if status == 204:
            self.issues[key]["assignee"] = user

    @rule(data=some, text=st.sampled_from(["Done", "", "two\nlines"]), version=versions, right=st.booleans())
    def comment(self, data, text, version, right):
        key = self.issue(data)
        body = text if (version == "2") == right else said(text or "x")
        status, answer = self.call("POST", f"/rest/api/{version}/issue/{key}/comment", {"body": body})
        valid = right and (text or version == "3")
        assert status == (404 if key not in self.issues else 201 if valid else 400), answer
        if status == 201:
            self.issues[key]["comments"].append((answer["id"], text or "x"))

    @rule(data=some)
    def delete_comment(self, data):
        found = [(key, number) for key, row in self.issues.items() for number, _ in row["comments"]] or [("ABC-123", "1")]
        key, number = data.draw(st.sampled_from(found))
        status, _ = self.call("DELETE", f"/rest/api/2/issue/{key}/comment/{number}")
        comments = self.issues.get(key, {"comments": []})["comments"]
        kept = [entry for entry in comments if entry[0] != number]
        assert status == (204 if len(kept) < len(comments) else 404)
        comments[:] = kept

    @rule(data=some, kind=st.sampled_from(["Blocks", "Relates", "Bogus"]))
    def link(self, data, kind):
        ends = self.issue(data), self.issue(data)
        payload = {"type": {"name": kind}, "inwardIssue": {"key": ends[0]}, "outwardIssue": {"key": ends[1]}}
        status, answer = self.call("POST", "/rest/api/3/issueLink", payload)
        known = kind != "Bogus" and {*ends} <= {*self.issues}
        assert status == (404 if not known else 400 if ends[0] == ends[1] else 201), answer
        if status == 201:
            self.links.append((kind, *ends))

    @rule(data=some, together=st.booleans())
    def delete_issue(self, data, together):
        key = self.issue(data)
        children = [other for other, row in self.issues.items() if row["parent"] == key]
        status, _ = self.call("DELETE", f"/rest/api/3/issue/{key}", deleteSubtasks=str(together).lower())
        assert status == (404 if key not in self.issues else 400 if children and not together else 204)
        for gone in [key, *children] * (status == 204):
            del self.issues[gone]
            self.links = [link for link in self.links if gone not in link[1:]]

    @rule(text=st.sampled_from(["project = ABC", "status = Done", "labels = b", "assignee is empty", "parent = ABC-123"]))
    def search_issues(self, text):
        tests = {"project = ABC": lambda row: row["project"] == "ABC", "status = Done": lambda row: row["status"] == "Done",
                 "labels = b": lambda row: "b" in map(str.lower, row["labels"]),
                 "assignee is empty": lambda row: row["assignee"] is None, "parent = ABC-123": lambda row: row["parent"] == "ABC-123"}
        status, answer = self.call("GET", "/rest/api/3/search/jql", jql=text, fields="summary")
        if text.startswith("parent") and "ABC-123" not in self.issues:
            assert status == 400
            return
        assert {hit["key"] for hit in answer["issues"]} == {key for key, row in self.issues.items() if tests[text](row)}

    # Confluence

    def page(self, data) -> str:
        return data.draw(st.sampled_from([*self.pages, "999"]), label="page")

    def live(self, number) -> bool:
        return number in self.pages and self.pages[number]["status"] == "current"

    def taken(self, space: str, title: str, but=None) -> bool:
        return any(row["status"] == "current" and row["spaceId"] == space and row["title"].lower() == title.lower() and number != but
                   for number, row in self.pages.items())

    @rule(data=some, space=st.sampled_from([*SPACES, "1"]), title=titles, api=st.sampled_from(["v1", "v2"]))
    def create_page(self, data, space, title, api):
        parent = data.draw(st.sampled_from([None, *self.pages, "999"]), label="parent")
        v1 = {"type": "page", "title": title, "space": {"key": SPACES.get(space, "NOPE")},
              "body": {"storage": {"value": "<p>x</p>", "representation": "storage"}}, **({"ancestors": [{"id": parent}]} if parent else {})}
        v2 = {"spaceId": space, "title": title, "body": {"representation": "storage", "value": "<p>x</p>"},
              **({"parentId": parent} if parent else {})}
        status, answer = self.call("POST", "/wiki/rest/api/content" if api == "v1" else "/wiki/api/v2/pages", v1 if api == "v1" else v2)
        placed = parent is None or (self.live(parent) and self.pages[parent]["spaceId"] == space)
        valid = space in SPACES and good_title(title) and placed and not self.taken(space, title)
        unknown = 403 if api == "v1" else 404  # of a space or, in both, of a parent
        assert (status == 200) == valid and status in ((200, 400, 404) if space in SPACES else (unknown,)), answer
        if valid:
            assert answer["id"] not in self.pages
            self.pages[answer["id"]] = {"title": title, "spaceId": space, "parentId": parent or self.homes[space], "status": "current",
                                        "labels": [], "version": 1, "body": "<p>x</p>"}

    @rule(data=some, title=titles, step=st.sampled_from([1, 1, 1, 0, 2]), api=st.sampled_from(["v1", "v2"]))
    def update_page(self, data, title, step, api):
        number = self.page(data)
        row = self.pages.get(number, {"version": 1, "status": "deleted", "spaceId": ""})
        parent = data.draw(st.sampled_from([None, *self.pages]), label="parent")
        version, moved = {"number": row["version"] + step}, parent if row["status"] == "current" else None
        v1 = {"type": "page", "title": title, "version": version, "body": {"storage": {"value": "<p>y</p>", "representation": "storage"}},
              **({"ancestors": [{"id": moved}]} if moved else {})}
        v2 = {"id": number, "status": "current", "title": title, "version": version,
              "body": {"representation": "storage", "value": "<p>y</p>"}, **({"parentId": moved} if moved else {})}
        path = f"/wiki/rest/api/content/{number}" if api == "v1" else f"/wiki/api/v2/pages/{number}"
        status, _ = self.call("PUT", path, v1 if api == "v1" else v2)
        if row["status"] == "trashed":
            self.restored(number, step, api, status)
            return
        self.updated(number, row, title, step, moved, status)

    def updated(self, number, row, title, step, moved, status):
        "What an update of a page must have done."
        placed = moved is None or (self.live(moved) and self.pages[moved]["spaceId"] == row["spaceId"] and number not in self.above(moved))
        valid = placed and good_title(title) and step == 1 and not self.taken(row["spaceId"], title, but=number)
        assert (status == 404 if row["status"] != "current" else status == 200 if valid else status in (400, 404, 409)), status
        if status == 200:
            row |= {"title": title, "version": row["version"] + 1, "body": "<p>y</p>", "parentId": moved or row["parentId"]}

    def restored(self, number, step, api, status):
        "What an update of a page in the trash must have done: v1 checks the version number, v2 does not."
        row = self.pages[number]
        valid = (api == "v2" or step == 1) and not self.taken(row["spaceId"], row["title"])
        assert (status == 200) == valid and status in (200, 400, 409)
        if valid:
            row |= {"status": "current", "parentId": row["parentId"] if self.live(row["parentId"]) else self.homes[row["spaceId"]]}

    def above(self, number) -> list[str]:
        "A page and the pages above it."
        found = []
        while number is not None:
            found.append(number)
            number = self.pages[number]["parentId"]
        return found

    @rule(data=some, purge=st.booleans(), api=st.sampled_from(["v1", "v2"]))
    def delete_page(self, data, purge, api):
        number = self.page(data)
        row, old = self.pages.get(number, {}), self.pages.get(number, {}).get("status")
        query = {"status": "trashed"} if purge and api == "v1" else {"purge": "true"} if purge else {}
        status, _ = self.call("DELETE", f"/wiki/rest/api/content/{number}" if api == "v1" else f"/wiki/api/v2/pages/{number}", **query)
        refused = 400 if purge and api == "v2" and old == "current" else 404
        assert status == (204 if old == ("trashed" if purge else "current") else refused)
        if status == 204 and purge:
            row["status"] = "deleted"
        elif status == 204:
            for other in self.pages.values():
                if other["parentId"] == number and other["status"] == "current":
                    other["parentId"] = row["parentId"]
            row["status"] = "trashed"
            self.homes = {space: None if home == number else home for space, home in self.homes.items()}

    @rule(data=some, name=page_labels)
    def add_label(self, data, name):
        number = self.page(data)
        status, _ = self.call("POST", f"/wiki/rest/api/content/{number}/label", [{"prefix": "global", "name": name}])
        valid = name not in ("v1.2", "x" * 256, " , ")
        assert status == (404 if not self.live(number) else 200 if valid else 400)
        if status == 200:
            self.pages[number]["labels"] = [*dict.fromkeys([*self.pages[number]["labels"], *name.lower().replace(",", " ").split()])]

    @rule(data=some, name=st.sampled_from(["ops", "OPS", "two", "b"]))
    def remove_label(self, data, name):
        number = self.page(data)
        labels = self.pages[number]["labels"] if self.live(number) else []
        status, _ = self.call("DELETE", f"/wiki/rest/api/content/{number}/label", name=name)
        assert status == (204 if name.lower() in labels else 404)
        if status == 204:
            self.pages[number]["labels"] = [label for label in labels if label != name.lower()]

    @rule(text=st.sampled_from(["label = ops", "space = PAY", 'title = "Notes"']))
    def search_pages(self, text):
        tests = {"label = ops": lambda row: "ops" in row["labels"], "space = PAY": lambda row: SPACES[row["spaceId"]] == "PAY",
                 'title = "Notes"': lambda row: row["title"].lower() == "notes"}
        answer = self.call("GET", "/wiki/rest/api/search", cql=text, limit="200")[1]
        found = {number for number, row in self.pages.items() if self.live(number) and tests[text](row)}
        assert {hit["content"]["id"] for hit in answer["results"]} == found

    # Everything that can be read

    @invariant()
    def issues_are_those_of_the_model(self):
        found = self.read("/rest/api/2/search/jql", jql="created > 2000-01-01", fields="*all", maxResults="5000")["issues"]
        assert {issue["key"] for issue in found} == {*self.issues}
        for issue in found:
            key, fields, row = issue["key"], issue["fields"], self.issues[issue["key"]]
            assert fields["summary"] == row["summary"] and fields["labels"] == row["labels"]
            assert (fields["project"]["key"], fields["issuetype"]["name"]) == (row["project"], row["type"])
            assert (fields["assignee"] or {}).get("accountId") == row["assignee"]
            assert (fields.get("parent") or {}).get("key") == row["parent"] and fields["status"]["name"] == row["status"]
            assert [(entry["id"], entry["body"]) for entry in fields["comment"]["comments"]] == row["comments"]
            assert {child["key"] for child in fields["subtasks"]} == {k for k, other in self.issues.items() if other["parent"] == key}
            links = Counter((link["type"]["name"], *((key, link["outwardIssue"]["key"]) if "outwardIssue" in link else
                                                     (link["inwardIssue"]["key"], key))) for link in fields["issuelinks"])
            assert links == Counter(link for link in self.links if key in link[1:])

    @invariant()
    def pages_are_those_of_the_model(self):
        pages = self.read("/wiki/api/v2/pages", limit="250", **{"body-format": "storage", "status": "current,trashed"})["results"]
        found = {page["id"]: page for page in pages}
        assert {*found} == {number for number, row in self.pages.items() if row["status"] != "deleted"}
        for number, page in found.items():
            row = self.pages[number]
            assert {name: page[name] for name in ("title", "spaceId", "parentId", "status")} == {
                name: row[name] for name in ("title", "spaceId", "parentId", "status")}
            assert (page["version"]["number"], page["body"]["storage"]["value"]) == (row["version"], row["body"])
        current = self.read("/wiki/rest/api/content", limit="250", expand="metadata.labels,version")["results"]
        assert {page["id"]: [label["name"] for label in page["metadata"]["labels"]["results"]] for page in current} == {
            number: row["labels"] for number, row in self.pages.items() if self.live(number)}

    @invariant()
    def one_issue_and_one_page_read_alone_are_the_same(self):
        key, number = max(self.issues, default=None), max(filter(self.live, self.pages), default=None)
        if key:
            assert self.read(f"/rest/api/3/issue/{key}")["fields"]["summary"] == self.issues[key]["summary"]
        if number:
            assert self.read(f"/wiki/api/v2/pages/{number}")["title"] == self.pages[number]["title"]

    def teardown(self):
        "The same calls give the same answers and the same state, and a reset takes everything back."
        fresh = World(SITE)
        for request, answer in self.log:
            status, _, body = handle(fresh, *request[:3], {}, request[3])
            assert (status, json.dumps(body)) == answer
        assert state_hash(fresh) == state_hash(self.world)
        self.world.reset()
        assert state_hash(self.world) == state_hash(World(SITE))


def good_summary(text: str) -> bool:
    return bool(text.strip()) and len(text) <= 255 and "\n" not in text


def good_title(text: str) -> bool:
    return bool(text.strip()) and len(text) <= 255


def sequences(count: int, steps: int):
    "Run the machine and say what it did."
    Site.sequences, Site.calls, Site.statuses = 0, 0, Counter()
    run_state_machine_as_test(Site, settings=settings(
        max_examples=count, stateful_step_count=steps, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck)))
    print(f"{Site.sequences} sequences, {Site.calls} calls, answers {dict(sorted(Site.statuses.items()))}")


def test_the_site_is_its_model_in_some_sequences():
    sequences(30, 20)
    assert Site.sequences >= 30 and {200, 201, 204, 400, 404, 409} <= {*Site.statuses}


@pytest.mark.slow
def test_the_site_is_its_model_in_a_thousand_sequences():
    sequences(1000, 20)
    assert Site.sequences >= 1000 and Site.calls >= 10_000


def test_the_check_can_fail():
    machine = Site()
    machine.begin()
    machine.world.tables["issues"]["ABC-123"] = {**machine.world.get("issues", "ABC-123"), "summary": "Other"}
    machine.world.tables["pages"]["10001"] = {**machine.world.get("pages", "10001"), "version": 7}
    for check in (machine.issues_are_those_of_the_model, machine.pages_are_those_of_the_model):
        with pytest.raises(AssertionError):
            check()
