"The HTTP server: who is asking, links, limits, malformed requests, worlds that stay apart, admin calls, faults."

import base64
import http.client
import json
import socket
import threading
import time
from contextlib import closing

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from atlas_rlvr.environments import ROUTES, _path, _payload, run_calls
from atlas_rlvr.faults import Fault, Plan, plan_to_json
from atlas_rlvr.rewards import score
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, task_env
from atlas_rlvr.server import (
    SITE,
    Site,
    compact,
    credential,
    listen,
    make_server,
    make_tokens,
    pick_task,
    respond,
    session_score,
)
from atlas_rlvr.world import CATALOGUE, state_hash

ROWS = {name: row for name, row in CATALOGUE.items() if row["api"] == "server"}
LIMIT = 5000
ISSUE, PAGE, SEARCH = "/rest/api/3/issue/ABC-123", "/wiki/api/v2/pages/789", "/wiki/rest/api/search?cql=type=page"
CREATE = {"fields": {"project": {"key": "ABC"}, "issuetype": {"id": "10001"}, "summary": "Ship it"}}


class Running:
    "A server in a thread, on a free port."

    def __init__(self, **options):
        self.site = Site(make_tokens(options.pop("tokens", 4)), **options)
        listening = listen("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(self.site)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]})
        self.thread.start()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(timeout=5)
        assert not self.thread.is_alive()

    def ask(self, method, path, body=None, auth="Bearer synthetic-1", **headers):
        "Status, headers and JSON value (or text) of one request on a connection of its own."
        sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = {**({"Authorization": auth} if auth else {}), "Content-Type": "application/json", **headers}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request(method, path, sent, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        is_json = "json" in (answer.headers["Content-Type"] or "")
        return answer.status, answer.headers, json.loads(text) if is_json and text else text

    def raw(self, data: bytes) -> bytes:
        "What comes back for a request written by hand, until the server closes."
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture(scope="module")
def running():
    running = Running(task=pick_task("subtask", None), admin=True, limit=LIMIT)
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def pristine(request):
    if "running" in request.fixturenames:
        for session in request.getfixturevalue("running").site.sessions.values():
            session.plan = None
            session.start(pick_task("subtask", None))


def basic(name, token):
    return "Basic " + base64.b64encode(f"{name}:{token}".encode()).decode()


# Who is asking


@pytest.mark.parametrize("auth", [basic("me@example.com", "synthetic-1"), basic("", "synthetic-1"), "Bearer synthetic-1",
                                  "bearer  synthetic-1", basic("me@example.com", "synthetic-1").replace("Basic", "BASIC")])
@pytest.mark.parametrize("path", [ISSUE, PAGE, SEARCH])
def test_a_printed_token_opens_both_products(running, auth, path):
    assert running.ask("GET", path, auth=auth)[0] == 200


BAD = [
    (basic("me@example.com", "guess"), ISSUE, "jira.getIssue.missing"),
    (None, ISSUE, "jira.getIssue.missing"),
    ("Digest username=me", ISSUE, "jira.getIssue.missing"),
    ("Basic ???", ISSUE, "server.basic.unparsable_jira"),
    ("Basic bm9jb2xvbg==", ISSUE, "server.basic.unparsable_jira"),
    ("Basic /////w==", ISSUE, "server.basic.unparsable_jira"),
    ("Bearer guess", ISSUE, "server.bearer.opaque"),
    (basic("me@example.com", "guess"), PAGE, "confluence.v2.bad_credential"),
    (None, "/wiki/api/v2/spaces", "confluence.v2.bad_credential"),
    ("Bearer guess", PAGE, "confluence.v2.bad_credential"),
    (basic("me@example.com", "guess"), SEARCH, "confluence.v1.bad_credential"),
    ("Bearer guess", SEARCH, "confluence.v1.bad_credential"),
    ("Basic ???", PAGE, "server.basic.unparsable_confluence"),
    ("Basic ???", SEARCH, "server.basic.unparsable_confluence"),
]


@pytest.mark.parametrize("auth, path, row", BAD)
def test_a_bad_token_is_treated_as_the_live_services_do(running, auth, path, row):
    status, headers, body = running.ask("GET", path, auth=auth)
    row = CATALOGUE[row]
    assert (status, headers["Content-Type"].split(";")[0], body) == (row["status"], row["content_type"], row["body"])
    assert ("WWW-Authenticate" in headers) is (status == 401)


def test_only_a_failed_login_is_called_one(running):
    reasons = [running.ask("GET", ISSUE, auth=auth)[1]["X-Seraph-LoginReason"]
               for auth in (basic("me", "guess"), None, "Bearer synthetic-1")]
    assert reasons == ["AUTHENTICATED_FAILED", None, None]


@pytest.mark.parametrize("path, status", [("serverInfo", 200), ("field", 200), ("project/ABC", 404), ("myself", 401),
                                          ("issue/ABC-123/transitions", 404), ("nope", 404)])
def test_a_stranger_sees_an_empty_jira(running, path, status):
    assert running.ask("GET", f"/rest/api/3/{path}", auth=basic("me", "guess"))[0] == status


def test_a_stranger_finds_and_writes_nothing(running):
    before = [state_hash(session.world) for session in running.site.sessions.values()]
    auth = basic("me@example.com", "guess")
    status, _, body = running.ask("GET", "/rest/api/3/search/jql?jql=project%20%3D%20ABC&fields=summary", auth=auth)
    assert (status, body["issues"]) == (200, [])
    assert running.ask("POST", "/rest/api/3/issue", CREATE, auth=auth)[0] == 400
    assert [state_hash(session.world) for session in running.site.sessions.values()] == before


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_authorization_header_is_read(text):
    scheme, token = credential(text)
    assert scheme in ("basic", "bearer", "none") and (token is None or isinstance(token, str))


# Links

READS = ["/rest/api/3/issue/ABC-123", "/rest/api/2/issue/ABC-123?fields=*all", "/rest/api/3/issue/ISK-1/transitions",
         "/rest/api/3/project/ABC?expand=issueTypes", "/rest/api/3/project/search", "/rest/api/3/myself",
         "/rest/api/3/serverInfo", "/rest/api/3/user/search?query=admin", "/rest/api/3/issue/createmeta?projectKeys=ABC",
         "/rest/api/3/search/jql?jql=project%20%3D%20ABC&fields=*all", "/rest/api/3/issueLinkType", PAGE, SEARCH,
         "/wiki/rest/api/content/789?expand=version,space,history", "/wiki/rest/api/space/PAY", "/wiki/api/v2/spaces",
         "/wiki/api/v2/pages?limit=1", "/wiki/api/v2/pages/789/children"]


@pytest.mark.parametrize("path", READS)
def test_no_answer_leads_elsewhere(running, path):
    running.site.sessions["synthetic-1"].task = None
    running.site.sessions["synthetic-1"].reset()
    status, headers, body = running.ask("GET", path)
    assert status in (200, 501) and SITE not in f"{headers} {json.dumps(body)}"


def test_a_self_link_can_be_followed(running):
    link = running.ask("GET", ISSUE)[2]["self"]
    assert link.startswith(running.url + "/")
    assert running.ask("GET", link.removeprefix(running.url))[2]["key"] == "ABC-123"


@pytest.mark.parametrize("host, base", [("jira.test:8080", "http://jira.test:8080"), ("[::1]:8000", "http://[::1]:8000"),
                                        ('evil"<script>', None), ("a b", None), ("jira.test/x", None)])
def test_links_begin_with_the_host_that_the_client_used(running, host, base):
    link = running.ask("GET", ISSUE, Host=host)[2]["self"]
    assert link == f"{base or running.url}/rest/api/3/issue/10100"


def test_a_given_base_wins():
    site = Site(make_tokens(1), base="https://jira.example/")
    running = Running(base="https://jira.example/", tokens=1)
    link = running.ask("GET", ISSUE)[2]["self"]
    running.stop()
    assert link == "https://jira.example/rest/api/3/issue/10100" and site.base


def test_text_that_mentions_the_site_stays(running):
    fields = CREATE["fields"] | {"summary": f"{SITE}/rest is slow"}
    key = running.ask("POST", "/rest/api/3/issue", {"fields": fields})[2]["key"]
    assert running.ask("GET", f"/rest/api/3/issue/{key}")[2]["fields"]["summary"] == f"{SITE}/rest is slow"


# Targets, sizes, malformed requests


@pytest.mark.parametrize("target", ["http://synthetic.atlassian.net", "HTTP://synthetic.atlassian.net:80"])
def test_a_whole_url_as_target(running, target):
    data = f"GET {target}{ISSUE}?fields=summary HTTP/1.1\r\nHost: proxy\r\nAuthorization: Bearer synthetic-1\r\n\r\n"
    head, _, body = running.raw(data.encode()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and list(json.loads(body)["fields"]) == ["summary"]
    assert json.loads(body)["self"].startswith("http://synthetic.atlassian.net")


@pytest.mark.parametrize("target", ["*", "http://synthetic.atlassian.net", "http://[bad/x", "host:443", "http:///x", "ftp://x/y"])
def test_an_odd_target_is_an_unknown_path(running, target):
    answer = running.raw(f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer synthetic-1\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))


def test_a_line_break_in_a_path_is_part_of_a_name(running):
    status, _, body = running.ask("GET", "/rest/api/3/issue/ABC%0A123")
    assert (status, body) == (404, CATALOGUE["jira.getIssue.missing"]["body"])
    assert running.ask("GET", "/%0A")[2]["title"] == "Not Found"


def padded(size):
    text = json.dumps(CREATE)
    return (text + " " * (size - len(text))).encode()


def test_a_body_may_have_the_limit_and_no_more(running):
    assert running.ask("POST", "/rest/api/3/issue", padded(LIMIT))[0] == 201
    status, _, body = running.ask("POST", "/rest/api/3/issue", padded(LIMIT + 1))
    assert (status, body["errorMessages"]) == (413, [ROWS["server.request.too_large"]["body"]["errorMessages"][0]
                                                     .replace("{limit}", str(LIMIT))])
    assert running.ask("GET", "/rest/api/3/issue/ABC-125")[0] == 404
    assert running.ask("POST", "/rest/api/3/issue", padded(50 * LIMIT))[0] == 413


def test_a_body_in_chunks_is_counted_too(running):
    head = b"POST /rest/api/3/issue HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer synthetic-1\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    assert running.raw(head + chunk * 6 + b"0\r\n\r\n").startswith(b"HTTP/1.1 413")
    assert running.raw(head + chunk * 4 + b"0\r\n\r\n").startswith(b"HTTP/1.1 400")


HEAD = b"POST /rest/api/3/issue HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer synthetic-1\r\n"
JSON_HEAD = HEAD + b"Content-Type: application/json\r\n"
MALFORMED = [
    b"\x00\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /rest/api/3/field HTTP/1.1\r\n\r\n",
    b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 99_999 + b"\r\n\r\n",
    JSON_HEAD + b"Content-Length: -1\r\n\r\n", JSON_HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}",
    JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", JSON_HEAD + b"Content-Length: 4\r\n\r\n\xff\xfe{}",
    JSON_HEAD + b"Content-Length: 3000\r\n\r\n" + b"[" * 3000, HEAD + b"Content-Length: 1\r\n\r\n{",
    HEAD + b"Content-Type: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}", JSON_HEAD + b"Content-Length: 8\r\n\r\n{\"a\":NaN",
    b"GET /rest/api/3/issue/%00%ff%zz?fields=%ff&fields=%zz&=&& HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer synthetic-1\r\n\r\n",
    b"GET /wiki/api/v2/pages/%F0%9F?limit=%F0&limit=2 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer synthetic-1\r\n\r\n",
    b"BREW /rest/api/3/issue HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer synthetic-1\r\n\r\n",
    b"GET /rest/api/3/field HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
]


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_request_is_the_client_s_fault(running, data):
    before = state_hash(running.site.sessions["synthetic-1"].world)
    answer = running.raw(data)
    assert answer == b"" or int(answer.split(b" ")[1]) // 100 in (2, 4)
    assert state_hash(running.site.sessions["synthetic-1"].world) == before
    assert running.ask("GET", ISSUE)[0] == 200


@pytest.mark.parametrize("admin", [True, False])
def test_requests_are_only_logged_for_admin_calls(admin):
    site = Site(make_tokens(1), admin=admin)
    respond(site, "http://x", "GET", ISSUE, {}, {"authorization": "Bearer synthetic-1"}, "")
    assert len(site.sessions["synthetic-1"].log) == admin


def test_an_answer_waits_for_no_acknowledgement(running):
    "A second small write waits 40 ms where Nagle's algorithm is on."
    with socket.create_connection(("127.0.0.1", running.port), timeout=5) as connection:
        connection.sendall(f"GET {ISSUE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        connection.recv(1)
        ends = [open_one.transport.get_extra_info("socket") for open_one in list(running.server.server_state.connections)]
        assert ends and all(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends)


def test_half_a_request_does_nothing(running):
    text = json.dumps(CREATE).encode()
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % (len(text) + 1) + text)
    assert running.ask("GET", ISSUE, auth="Bearer synthetic-2")[0] == 200
    assert running.site.sessions["synthetic-1"].log == []


PIECES = ["rest", "api", "3", "2", "latest", "wiki", "v2", "issue", "ABC-123", "pages", "789", "content", "label", "search", "jql",
          "comment", "transitions", "space", "PAY", "%2F", "%00", "é", "", "createmeta", "user", "project", "fields"]
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3))
NAMES = st.sampled_from(["jql", "cql", "fields", "expand", "limit", "cursor", "maxResults", "startAt", "query", "body-format"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD"]), st.lists(st.sampled_from(PIECES), max_size=7),
       st.dictionaries(NAMES, st.text(max_size=12), max_size=3), VALUES)
def test_no_request_is_a_server_error(method, pieces, query, value):
    site = Site(make_tokens(1))
    headers = {"authorization": "Bearer synthetic-1", "content-type": "application/json"}
    status, _, body = respond(site, "http://x", method, "/" + "/".join(pieces), query, headers, json.dumps(value))
    assert status < 500 or status == 501 or body == CATALOGUE["confluence.search.empty_site_search"]["body"]


# Answers


def test_head_is_get_without_a_body(running):
    status, headers, body = running.ask("HEAD", ISSUE)
    assert (status, body) == (200, "") and int(headers["Content-Length"]) > 100


def test_no_content_has_no_content(running):
    edge = running.ask("GET", f"{ISSUE}/transitions")[2]["transitions"][0]["id"]
    status, headers, body = running.ask("POST", f"{ISSUE}/transitions", {"transition": {"id": int(edge)}})
    assert (status, body, headers["Content-Type"]) == (204, "", None)


def test_no_answer_says_when_or_by_whom(running):
    assert not {"Date", "Server"} & set(running.ask("GET", ISSUE)[1])


# Worlds that stay apart

SEQUENCE = [("POST", "/rest/api/3/issue", CREATE), ("GET", "/rest/api/3/issue/ABC-124", None),
            ("POST", "/wiki/rest/api/content/789/label", [{"prefix": "global", "name": "ops"}]), ("GET", f"{PAGE}/labels", None)]


def test_the_same_requests_get_the_same_bytes(running):
    answers = [[running.ask(*one, auth=f"Bearer {token}")[2] for one in SEQUENCE] for token in ("synthetic-1", "synthetic-2")]
    assert json.dumps(answers[0]) == json.dumps(answers[1])


TEXTS = st.text(st.characters(), max_size=8)  # half surrogate pairs as well
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8)


@settings(deadline=None)
@given(JSON)
@example(2**64)
@example(["\ud800", "\u2028", "\x00", "\x7f", "é"])
def test_any_value_is_encoded_without_loss(value):
    assert json.loads(compact(value)) == value


def test_ordinary_text_is_encoded_as_before():
    value = {"a": ["é\n\x01\\\"", 1, 1.5, True, None], "b": {}}
    assert compact(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def test_concurrent_clients_never_see_each_other(running):
    made = {token: [] for token in running.site.tokens}

    def work(token):
        for n in range(12):
            fields = CREATE["fields"] | {"summary": f"{token} {n}"}
            key = running.ask("POST", "/rest/api/3/issue", {"fields": fields}, auth=f"Bearer {token}")[2]["key"]
            made[token].append((key, running.ask("GET", f"/rest/api/3/issue/{key}", auth=f"Bearer {token}")[2]["fields"]["summary"]))

    threads = [threading.Thread(target=work, args=(token,)) for token in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {token: [(f"ABC-{124 + n}", f"{token} {n}") for n in range(12)] for token in made}


def test_a_reset_is_one_token_s_own(running):
    for token in ("synthetic-1", "synthetic-2"):
        running.ask("POST", "/rest/api/3/issue", CREATE, auth=f"Bearer {token}")
    assert running.ask("POST", "/__synthetic/reset")[0] == 200
    found = [running.ask("GET", "/rest/api/3/issue/ABC-124", auth=f"Bearer {token}")[0] for token in ("synthetic-1", "synthetic-2")]
    assert found == [404, 200]


# Admin calls


@pytest.mark.parametrize("method, name", [("POST", "reset"), ("GET", "snapshot"), ("GET", "trace"), ("GET", "score"), ("POST", "faults")])
def test_admin_calls_are_off_unless_asked_for(method, name):
    site = Site(make_tokens(1))
    running = Running(tokens=1)
    status, _, body = running.ask(method, f"/__synthetic/{name}")
    running.stop()
    assert (status, body["title"]) == (404, "Not Found") and not site.admin


@pytest.mark.parametrize("method, path, auth, body, row", [
    ("GET", "score", None, None, "server.admin.credential"), ("GET", "score", "Bearer guess", None, "server.admin.credential"),
    ("GET", "scores", "Bearer synthetic-1", None, "server.admin.unknown"), ("GET", "reset", "Bearer synthetic-1", None, "server.admin.unknown"),
    ("POST", "reset", "Bearer synthetic-1", {"scenario": "ticket"}, "server.admin.invalid"),
    ("POST", "reset", "Bearer synthetic-1", {"scenario": "page", "task": "page-99"}, "server.admin.invalid"),
    ("POST", "reset", "Bearer synthetic-1", [1], "server.admin.invalid"), ("POST", "reset", "Bearer synthetic-1", b"{", "server.admin.invalid"),
    ("POST", "faults", "Bearer synthetic-1", {"profile": "slow"}, "server.admin.invalid"),
])
def test_a_wrong_admin_call_says_what_is_wrong(running, method, path, auth, body, row):
    status, _, answer = running.ask(method, f"/__synthetic/{path}", body, auth=auth)
    assert status == ROWS[row]["status"] and len(answer["error"]) > 20 and "{" not in answer["error"].replace("`{", "")


def test_a_score_needs_a_task():
    running = Running(tokens=1, admin=True)
    status, _, body = running.ask("GET", "/__synthetic/score")
    running.stop()
    assert status == 400 and "reset with a scenario" in body["error"]


def test_snapshot_and_trace_hold_the_state_and_no_credentials(running):
    running.ask("POST", "/rest/api/3/issue", CREATE, auth=basic("me@example.com", "synthetic-1"))
    snapshot = running.ask("GET", "/__synthetic/snapshot")[2]
    assert snapshot["hash"] == state_hash(running.site.sessions["synthetic-1"].world)
    assert snapshot["tables"]["issues"]["ABC-124"]["summary"] == "Ship it"
    trace = running.ask("GET", "/__synthetic/trace")[2]
    assert [(one["method"], one["status"]) for one in trace["requests"]] == [("POST", 201)]
    assert not any(word in json.dumps(trace) for word in ("synthetic-1", "me@example.com", "Basic", "uthorization"))


# The same scorer


def http_form(call):
    "Method, path, query and body of a tool call, as the tool sends it."
    name, arguments = call
    query, text = _payload(name, {k: v for k, v in arguments.items() if "{" + k + "}" not in ROUTES[name].path})
    return ROUTES[name].method, _path(name, arguments)[0], query, text


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("verify", [True, False])
def test_what_a_client_does_earns_what_a_policy_earns(scenario, verify):
    task = pick_task(scenario, None)
    site = Site(make_tokens(1), task, admin=True)
    calls = gold_calls(task, verify, "wire")
    for call in calls:
        method, path, query, text = http_form(call)
        respond(site, "http://x", method, path, query, {"authorization": "Bearer synthetic-1"}, text)
    found, expected = session_score(site.sessions["synthetic-1"]), score(scenario, run_calls(task_env(task, "wire"), calls), task["gold"])
    assert (found["raw"], found["components"], found["clean"]) == (expected.raw, expected.components, expected.clean)
    assert [call["name"] for call in found["calls"]] == [name for name, _ in calls]


def test_the_older_apis_are_the_same_calls(running):
    running.ask("POST", "/__synthetic/reset", {"scenario": "cross", "task": "cross-01"})
    task = pick_task("cross", "cross-01")
    gold = task["gold"]
    (_, issue), (_, page) = gold_calls(task, False, "wire")[2:]
    key = {space["id"]: space["key"] for space in running.site.sessions["synthetic-1"].world.rows("spaces")}[page["spaceId"]]
    v1 = {"type": "page", "title": page["title"], "space": {"key": key}, "ancestors": [{"id": page["parentId"]}],
          "body": {"storage": page["body"]}}
    for one in [("GET", f"/rest/api/2/issue/{gold['issue']['parent']}"), ("GET", f"/wiki/rest/api/content/{page['parentId']}"),
                ("POST", "/rest/api/2/issue", issue), ("POST", "/wiki/rest/api/content", v1)]:
        status, _, body = running.ask(*one)
        assert status in (200, 201), body
    found = running.ask("GET", "/__synthetic/score")[2]
    assert (found["raw"], found["reward"]) == (1.25, 1.0)


# Faults


def put_faults(running, *faults):
    assert running.ask("POST", "/__synthetic/faults", json.loads(plan_to_json(Plan(faults))))[0] == 200


def test_a_lost_answer_and_a_blind_retry_are_two_issues(running):
    put_faults(running, Fault("lost_response", "write", status=504))
    assert [running.ask("POST", "/rest/api/3/issue", CREATE)[0] for _ in range(2)] == [504, 201]
    assert running.ask("GET", "/rest/api/3/issue/ABC-125")[0] == 200
    assert "state.duplicate" in running.ask("GET", "/__synthetic/score")[2]["components"]


def test_a_connection_is_cut_after_the_write(running):
    put_faults(running, Fault("lost_response", "write", status=0))
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        running.ask("POST", "/rest/api/3/issue", CREATE)
    assert running.ask("GET", "/rest/api/3/issue/ABC-124")[0] == 200


def test_one_token_s_delay_holds_nobody_else(running):
    put_faults(running, Fault("slow", seconds=1))
    times = {}

    def read(token):
        start = time.monotonic()
        status, headers, _ = running.ask("GET", ISSUE, auth=f"Bearer {token}")
        times[token] = status, time.monotonic() - start, any(name.startswith("Atlas") for name in headers)

    slow = threading.Thread(target=read, args=("synthetic-1",))
    slow.start()
    read("synthetic-2")
    slow.join()
    assert times["synthetic-1"][0] == times["synthetic-2"][0] == 200 and not times["synthetic-1"][2]
    assert times["synthetic-1"][1] >= 1 > times["synthetic-2"][1]


def test_a_limit_names_the_wait_and_no_faults_are_left_after_an_empty_plan(running):
    put_faults(running, Fault("rate_burst", "read", seconds=3))
    status, headers, _ = running.ask("GET", ISSUE)
    assert (status, headers["Retry-After"]) == (429, "3")
    assert running.ask("POST", "/__synthetic/faults")[2] == {"faults": None}
    assert running.ask("GET", ISSUE)[0] == 200


def test_every_row_of_the_catalogue_has_a_test():
    reached = {row for *_, row in BAD} | {"server.request.too_large", "server.admin.credential", "server.admin.unknown",
                                          "server.admin.invalid"}
    assert set(ROWS) <= reached
