"""Requests that schemathesis makes from the published documents, sent to the server's application.

Of a document only the served operations are kept. One third of the requests fits it, one third does not, and one third is
made from a version in which members and parameters take values that the site knows: random text alone would never find an
issue or a page. All of this happens in memory, and the seed is fixed.
"""
import asyncio
import json
from collections import Counter, defaultdict
from urllib.parse import unquote, urlsplit
from zlib import crc32

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from specs import PREFIXES, patched, served

from atlas_rlvr.server import Site, make_app, make_tokens
from atlas_rlvr.world import state_hash

BASE = "http://testserver"
ADF = {"type": "doc", "version": 1, "content": [{"type": "paragraph", "content": [{"type": "text", "text": "Said"}]}]}
SUBTASK = {"project": {"key": "ABC"}, "parent": {"key": "ABC-123"}, "issuetype": {"id": "10003"}, "summary": "Write QA test cases"}
STORAGE = {"representation": "storage", "value": "<p>x</p>"}
KNOWN = {  # product → name of a parameter or a member → values that mean something on the seed site
    "jira": {
        "issueIdOrKey": ["ABC-123", "10100", "isk1", "ABC-124", "XYZ-456"], "projectIdOrKey": ["ABC", "10000", "ISK"],
        "issueTypeId": ["10001", "10003"], "linkId": ["10003"], "id": ["10000", "10001", "10002", "10003", "1", "31"],
        "idOrName": ["Done", "10002"], "idOrKey": ["new", "3"], "accountId": ["qa789", "admin123", "-1"], "query": ["a", "dev"],
        "jql": ["project = ABC", "project = ISK order by key", "assignee is empty and text ~ export", "labels in (x, y)"],
        "fields": [SUBTASK, {"summary": "Other"}, {"labels": ["a", "b"]}, {"priority": {"name": "High"}, "assignee": None}, {}],
        "update": [{"labels": [{"add": "x"}, {"remove": "a"}]}, {"comment": [{"add": {"body": ADF}}]}, {}],
        "transition": [{"id": "31"}, {"id": 21}, {}], "body": [ADF, {**ADF, "content": []}], "comment": [ADF, {"body": ADF}],
        "timeSpent": ["1h", "2d 4h", "30m"], "timeSpentSeconds": [60, 3600], "started": ["2026-01-01T09:00:00.000+0000"],
        "type": [{"name": "Blocks"}, {"id": "10003"}], "inwardIssue": [{"key": "ABC-123"}], "outwardIssue": [{"key": "ISK1"}],
        "project": ["ABC", "10001"], "issueKey": ["ABC-123"], "permissions": ["BROWSE"], "maxResults": [1, 2, 50],
        "startAt": [0, 1], "expand": ["names", "renderedFields,schema", "transitions"],
    },
    "confluence": {
        "id": [789, 10001, 10002, 65540, 100, "10001"], "spaceId": ["65540", "65541"], "parentId": ["789", "10001"], "title": ["A new page", "x"],
        "status": ["current"], "body": [STORAGE, {"storage": {"value": "<p>x</p>"}}], "version": [{"number": 2}, {"number": 3}],
        "keys": [["PAY"], ["PAY", "ENG"]], "limit": [1, 25, 250], "cursor": ["0", "1"], "body-format": ["storage"],
        "sort": ["title", "-id", "child-position"], "space-id": [[65540]],
    },
}

A_PART = {"issueIdOrKey": ["ABC-123"]}  # the issue that has a comment and a worklog
IN_PATHS = {"/rest/api/3/issue/{issueIdOrKey}/comment/{id}": {**A_PART, "id": ["10001"]},
            "/rest/api/3/issue/{issueIdOrKey}/worklog/{id}": {**A_PART, "id": ["10002"]},
            "/labels/{id}/pages": {"id": [crc32(b"a") % 10**8]}, "/pages/{id}": {"id": [10001, 789]},
            "/spaces/{id}": {"id": [65540]}, "/spaces/{id}/pages": {"id": [65540]}}
UPDATE = {"id": "10001", "status": "current", "title": "Outage guide", "body": STORAGE}
BODIES = {  # (path, method) → whole bodies, where members drawn one by one would hardly ever fit together
    ("/rest/api/3/issue", "post"): [{"fields": {**SUBTASK, **more}} for more in (
        {}, {"assignee": {"accountId": "qa789"}}, {"description": ADF}, {"labels": ["a", "b"]}, {"issuetype": {"name": "Task"}})],
    ("/pages/{id}", "put"): [{**UPDATE, "version": {"number": number}, **more} for number in (2, 3, 4)
                             for more in ({}, {"parentId": "789"}, {"title": "payments HOME"})],
}
UNBUILT = {  # answered 501, so a request that is to get further leaves them out
    "jira": ("properties", "historyMetadata", "visibility", "newEstimate", "reduceBy", "startedAfter", "startedBefore"),
    "confluence": ("get-draft", "subtype", "labels", "favorited-by", "not-favorited-by", "description-format", "draft", "embedded",
                   "private", "include-labels", "include-properties", "include-operations", "include-likes", "include-versions",
                   "include-version", "include-favorited-by-current-user-status", "include-webresources", "include-collaborators",
                   "include-direct-children", "include-icon", "include-permissions", "include-role-assignments"),
}


def without(node, names: tuple, inside: str = ""):
    "A part of a document without some optional members and parameters."
    if isinstance(node, list):
        return [without(item, names) for item in node if not (isinstance(item, dict) and "in" in item and item.get("name") in names)]
    if not isinstance(node, dict):
        return node
    return {name: without(value, names, name) for name, value in node.items() if inside != "properties" or name not in names}


def told(node, known: dict, inside: str = ""):
    "A part of a document in which members and parameters take only known values, where there are any."
    if isinstance(node, list):
        return [told(item, known) for item in node]
    if not isinstance(node, dict):
        return node
    made = {name: told(value, known, name) for name, value in node.items()}
    if inside == "properties":
        return {name: one_of(value, known.get(name)) for name, value in made.items()}
    if "in" in made and "schema" in made:
        made["schema"] = one_of(made["schema"], known.get(made["name"]))
    return made


def one_of(schema, values):
    "A schema that takes only some values; values of another type are no choice."
    if not isinstance(schema, dict) or schema.get("readOnly"):  # what is never sent needs no values
        return schema
    kind = schema.get("type")
    types = {"string": str, "integer": int, "array": list, "object": dict}
    kinds = schema.get("enum") and object or tuple(types[one] for one in ([kind] if isinstance(kind, str) else kind or types) if one in types)
    fitting = [value for value in values or () if isinstance(value, kinds)]
    return {"enum": fitting} if fitting else schema


def narrowed(product: str) -> dict:
    "The patched document with the served operations only."
    document, prefix, paths = patched(product), PREFIXES[product], defaultdict(dict)
    for _, method, template in [row for row in served() if row[0] == product and row[2].startswith(prefix)]:
        path = template if product == "jira" else template.removeprefix(prefix)
        found = document["paths"][path]
        paths[path] |= {"parameters": found.get("parameters", []), method.lower(): found[method.lower()]}
    return {**document, "paths": dict(paths), "servers": [{"url": BASE + ("" if product == "jira" else prefix)}]}


def knowing(product: str) -> dict:
    "The same with values that the site knows."
    document = narrowed(product)
    built = {part: without(document[part], UNBUILT[product]) for part in ("paths", "components")}
    made = {**document, **told(built, KNOWN[product])}
    for path in made["paths"]:
        made["paths"][path] = told(made["paths"][path], IN_PATHS.get(path, {}))
    for path, method in BODIES.keys() & {(path, method) for path, found in made["paths"].items() for method in found}:
        content = {"application/json": {"schema": {"enum": BODIES[path, method]}}}
        made["paths"][path][method] = {**made["paths"][path][method], "requestBody": {"content": content, "required": True}}
    return made


def operations(document: dict) -> dict:
    return {found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()}


async def exchange(app, request: requests.PreparedRequest) -> tuple[int, dict, bytes]:
    "Send one request to an ASGI application."
    parts, sent = urlsplit(request.url), []
    body = request.body.encode() if isinstance(request.body, str) else request.body or b""
    headers = [(name.lower().encode(), str(value).encode("latin-1", "replace")) for name, value in request.headers.items()]
    scope = {"type": "http", "http_version": "1.1", "method": request.method, "scheme": "http", "path": unquote(parts.path),
             "raw_path": parts.path.encode(), "query_string": parts.query.encode(), "headers": headers, "root_path": "",
             "server": ("testserver", 80), "client": ("127.0.0.1", 1), "state": {}}

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)
    await app(scope, receive, send)
    headers = {name.decode().title(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


class Drive:
    "Sends generated requests and counts the answers by operation."

    def __init__(self, make_world, check):  # check(operation, status, headers, body, whether the state changed) → complaints
        self.make_world, self.check = make_world, check
        self.site = Site(make_tokens(1), dialect="paper")
        self.app, self.answers, self.complaints = make_app(self.site), defaultdict(Counter), []

    def send(self, product: str, case):
        "One case: answered, checked, counted."
        arguments = case.as_transport_kwargs(base_url=BASE + ("" if product == "jira" else PREFIXES[product]))
        request = requests.Request(**{name: arguments.get(name) for name in ("method", "url", "headers", "params", "data", "json")})
        request.headers = {**(arguments.get("headers") or {}), "Authorization": "Bearer synthetic-1"}
        prepared, before = request.prepare(), state_hash(self.site.sessions["synthetic-1"].world)
        status, headers, raw = asyncio.run(exchange(self.app, prepared))
        template = case.operation.path if product == "jira" else PREFIXES[product] + case.operation.path
        body = json.loads(raw) if raw and "json" in headers.get("Content-Type", "") else raw.decode() or None
        self.answers[prepared.method, template][status] += 1
        changed = state_hash(self.site.sessions["synthetic-1"].world) != before
        found = self.check((product, prepared.method, template), status, headers, body, changed)
        self.complaints += [(prepared.method, prepared.url, prepared.body, status, body, one) for one in found]

    def operation(self, product: str, operation, mode: GenerationMode, count: int):
        "Some requests for one operation, on a world of its own."
        self.site.sessions["synthetic-1"].world = self.make_world()

        @settings(max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def each(case):
            self.send(product, case)
        each()

    def run(self, product: str, count: int, every: int = 1):
        "About `3 * count` requests for each operation, or for every n-th."
        plain, known = operations(narrowed(product)), operations(knowing(product))
        for label in list(plain)[::every]:
            self.operation(product, plain[label], GenerationMode.POSITIVE, count)
            self.operation(product, known[label], GenerationMode.POSITIVE, count)
            if known[label].query or known[label].body or known[label].path_parameters:  # there is something to get wrong
                self.operation(product, known[label], GenerationMode.NEGATIVE, count)

    def total(self) -> int:
        return sum(sum(counts.values()) for counts in self.answers.values())
