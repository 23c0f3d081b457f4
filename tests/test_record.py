"Recordings: no secret reaches the disk, a replay answers as it was, a diff names what differs, the canary is careful."
import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qsl, quote, urlsplit
from urllib.request import Request, urlopen

import pytest

from atlas_rlvr import record
from atlas_rlvr.cli import main
from atlas_rlvr.environments import ENVIRONMENTS, SEEDS, run_calls
from atlas_rlvr.faults import Faults, expand
from atlas_rlvr.record import (
    CANARY,
    LIMIT,
    Recording,
    Replay,
    Scrubber,
    canary,
    diff,
    exchange,
    read_recording,
    record_http,
    recorded,
)
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks
from atlas_rlvr.wire import handle as site
from atlas_rlvr.world import CATALOGUE, World, canonical

TOKEN = "ATATT3xFfGF0" + "aB3-_=" * 6
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"
PAIR = base64.b64encode(f"ada@acme.example:{TOKEN}".encode()).decode()
SECRETS = [TOKEN, JWT, PAIR, "ada@acme.example", "bob.b+x@mail.acme.co.uk", "acme-inc", "c00kie", "hunter2", "pa55word"]


def leaks(text):
    return [secret for secret in SECRETS if secret in text or quote(secret, safe="") in text]


# Secrets

REQUESTS = {
    "headers": ("GET", "/rest/api/3/myself", {}, {"Authorization": f"Basic {PAIR}", "Cookie": "tenant.session.token=c00kie",
                                                  "X-Api-Key": TOKEN, "Proxy-Authorization": f"Bearer {JWT}"}, ""),
    "path": ("GET", "/rest/api/3/user/ada@acme.example/" + quote("bob.b+x@mail.acme.co.uk", safe=""), {}, {}, ""),
    "query": ("GET", "/rest/api/3/user/search", {"query": "ada@acme.example", "os_password": "pa55word", "token": "hunter2",
                                                 "jwt": JWT, "list": ["bob.b+x@mail.acme.co.uk"]}, {}, ""),
    "json": ("POST", "/rest/api/3/issue", {}, {}, json.dumps({"password": "pa55word", "fields": {
        "summary": f"mail ada@acme.example with {TOKEN}", "apiToken": {"deep": "x"}, "api_key": "hunter2",
        "description": {"content": [{"text": f"Bearer {JWT}"}]}, "ada@acme.example": 1}})),
    "form": ("POST", "/login", {}, {}, f"user=ada@acme.example&password=pa55word&token={TOKEN}"),
    "broken": ("POST", "/rest/api/3/issue", {}, {}, '{"password": "pa55word", "mail": "ada@acme.example'),
}
ANSWER = (200, {"Set-Cookie": "atlassian.xsrf.token=c00kie", "X-AUSERNAME": "ada@acme.example", "Content-Type": "application/json"},
          {"self": "https://acme-inc.atlassian.net/rest/api/3/myself", "emailAddress": "ada@acme.example", "cookies": ["c00kie"],
           "text": f"Basic {PAIR}", "html": '<a href="https://acme-inc.atlassian.net/x?token=hunter2">x</a>'})


@pytest.mark.parametrize("place", REQUESTS)
def test_no_secret_reaches_the_disk(tmp_path, place):
    wrapped = recorded(lambda *request: ANSWER, Recording(tmp_path / "r.jsonl"))
    assert wrapped(None, *REQUESTS[place]) == ANSWER
    text = (tmp_path / "r.jsonl").read_text(encoding="utf-8")
    assert leaks(text) == [] and len(read_recording(tmp_path / "r.jsonl")) == 1


def test_the_search_for_secrets_can_fail():
    assert leaks(json.dumps([REQUESTS["headers"], ANSWER[2]])) and leaks(quote("ada@acme.example", safe=""))


def test_named_secrets_and_the_own_host_are_taken_out():
    scrub = Scrubber(("s3cret/with+signs",), "jira.acme.example:8443")
    text = scrub.text("https://jira.acme.example:8443/x?a=s3cret%2Fwith%2Bsigns and s3cret/with+signs")
    assert text == "https://synthetic.atlassian.net/x?a=REMOVED and REMOVED"


@pytest.mark.parametrize("value", [
    "Reset the password by mail", "token bucket", "Basic page", "A bearer of news", "@mention", "a@b", {"nextPageToken": "abc"},
    {"tokenCount": 3}, {"id": "10100", "key": "ABC-123"}, "/x?nextPageToken=abc", {"token": None}, 3, None, True])
def test_plain_values_stay(value):
    assert Scrubber()(value) == value


def test_scrubbing_twice_changes_nothing():
    scrub = Scrubber()
    once = scrub(ANSWER[2])
    assert scrub(once) == once


def test_headers_are_kept_by_name_only():
    line = exchange(("get", "/", {}, {"X-New-Credential": "hunter2", "ACCEPT": "a/b"}, ""), (429, {"Retry-After": 3}, None), Scrubber())
    assert (line["headers"], line["answer_headers"]) == ({"accept": "a/b"}, {"retry-after": "3"})


# Recording and replay


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_policy_meets_again_what_it_met(tmp_path, scenario):
    task, file = load_tasks(scenario)[0], tmp_path / "r.jsonl"
    env = ENVIRONMENTS[scenario]("paper", lambda: recorded(site, Recording(file)))
    env.reset(task=json.dumps(task))
    first = run_calls(env, gold_calls(task))
    again = ENVIRONMENTS[scenario]("paper", lambda: Replay(read_recording(file)))
    again.reset(task=json.dumps(task))
    assert run_calls(again, gold_calls(task)) == first and {call.outcome for call in first} == {"ok"}
    assert {row["verdict"] for row in diff(read_recording(file), World(task["world"] or SEEDS["paper"]))} == {"same"}


def test_faults_are_recorded_with_what_to_wait(tmp_path):
    handle = recorded(Faults(expand("rate_burst", 1)), Recording(tmp_path / "r.jsonl"))
    world, read = World(SEEDS["wire"]), ("GET", "/rest/api/3/issue/ABC-123", {}, {}, "")
    create = ("POST", "/rest/api/3/issue", {}, {}, "{}")
    told = [handle(world, *request) for request in (read, create)]
    limit = next(answer for answer in told if answer[0] == 429)
    replay = Replay(read_recording(tmp_path / "r.jsonl"))
    back = [replay(None, *request) for request in (read, create)]
    assert [answer[0] for answer in back] == [answer[0] for answer in told]
    assert next(answer for answer in back if answer[0] == 429)[1]["Retry-After"] == limit[1]["Retry-After"]


def test_repeated_requests_get_successive_answers(tmp_path):
    answers = iter([(404, {}, None), (200, {}, {"n": 1}), (201, {}, {"id": "1"})])
    handle = recorded(lambda *request: next(answers), Recording(tmp_path / "r.jsonl"))
    for method in ("GET", "GET", "POST"):
        handle(None, method, "/x", {"a": "1", "b": "2"}, {}, "")
    replay = Replay(read_recording(tmp_path / "r.jsonl"))
    query = {"b": "2", "a": 1}
    assert [replay(None, "get", "/x", query, {"Other": "header"}, "")[0] for _ in range(4)] == [404, 200, 200, 200]
    assert [replay(None, "POST", "/x", query)[0] for _ in range(2)] == [201, 501]
    status, _, body = replay(None, "GET", "/y")
    row = CATALOGUE["faults.replay.not_recorded"]
    assert (status, body) == (501, json.loads(json.dumps(row["body"]).replace("{method} {path}", "GET /y")))


def test_a_replayed_request_with_an_email_is_found(tmp_path):
    handle = recorded(lambda *request: (200, {}, {"mail": "bob.b+x@mail.acme.co.uk"}), Recording(tmp_path / "r.jsonl"))
    asked = ("GET", "/rest/api/3/user/search", {"query": "ada@acme.example"}, {}, "")
    handle(None, *asked)
    assert Replay(read_recording(tmp_path / "r.jsonl"))(None, *asked)[0] == 200


@pytest.mark.parametrize(("text", "reason"), [
    ("{", "not JSON"), ("[" * 50_000, "not JSON"), ("[]", "no object"), ("3", "no object"), ("{}", "method is missing"),
    ('{"method": "GET", "path": "/", "query": [], "headers": {}, "status": 200, "answer_headers": {}}', "query is missing"),
    ('{"method": "GET", "path": "/", "query": {}, "headers": {}, "status": "200", "answer_headers": {}}', "status is missing")])
def test_a_line_that_does_not_parse_is_one_sentence(tmp_path, text, reason):
    good = exchange(("GET", "/", {}, {}, ""), (200, {}, None), Scrubber())
    (tmp_path / "r.jsonl").write_text(json.dumps(good) + "\n\n" + text + "\n")
    with pytest.raises(ValueError, match=rf"^line 3 of the recording r\.jsonl cannot be used: .*{reason}") as caught:
        read_recording(tmp_path / "r.jsonl")
    assert "\n" not in str(caught.value)


def test_a_lone_surrogate_does_not_stop_a_recording(tmp_path):
    recorded(lambda *request: (200, {}, {"x": "\ud800"}), Recording(tmp_path / "r.jsonl"))(None, "GET", "/", {}, {}, "\ud800")
    assert len(read_recording(tmp_path / "r.jsonl")) == 1


# Diff


def verdict(answer, ours, status=200):
    line = exchange(("GET", "/", {}, {}, ""), (status, {}, answer), Scrubber())
    [row] = diff([line], None, lambda *request: (200, {}, ours))
    return row["verdict"], row["where"]


@pytest.mark.parametrize(("answer", "ours", "expected"), [
    ({"a": 1}, {"a": 1}, ("same", [])), (None, None, ("same", [])), ({"a": 1}, {"a": 2}, ("different value", ["a"])),
    ({"a": 1}, {"a": "1"}, ("different shape", ["a"])), ({"a": True}, {"a": 1}, ("different shape", ["a"])),
    ({"a": 1}, {"b": 1}, ("different shape", ["a", "b"])), ({"a": None}, {"a": {}}, ("different shape", ["a"])),
    ({"a": [1, 2]}, {"a": [1]}, ("different value", ["a[]"])), ({"a": [{"b": 1}]}, {"a": [{"c": 1}]}, ("different shape", ["a[].b", "a[].c"])),
    ({"a": 1, "b": 1}, {"a": 2, "b": "1"}, ("different shape", ["a", "b"])), ("x", {"a": 1}, ("different shape", [""])),
    ("x", "y", ("different value", [""]))])
def test_verdicts(answer, ours, expected):
    assert verdict(answer, ours) == expected


def test_another_status_is_another_shape():
    assert verdict({"a": 1}, {"a": 1}, status=201) == ("different shape", ["status"])


def test_requests_are_sent_again_in_order_to_one_world(tmp_path):
    world, handle = World(SEEDS["wire"]), recorded(site, Recording(tmp_path / "r.jsonl"))
    body = json.dumps({"transition": {"id": "31"}})
    for request in (("POST", "/rest/api/3/issue/ISK-1/transitions", {}, {}, body), ("POST", "/rest/api/3/issue", {}, {}, "{"),
                    ("GET", "/rest/api/3/issue/ISK-1", {"fields": "status"}, {}, "")):
        handle(world, *request)
    lines = read_recording(tmp_path / "r.jsonl")
    assert lines[2]["answer"]["fields"]["status"]["name"] == "Resolved"
    assert [row["verdict"] for row in diff(lines, World(SEEDS["wire"]))] == ["same"] * 3
    assert [row["verdict"] for row in diff(lines[2:], World(SEEDS["wire"]))] != ["same"]


# HTTP clients


class Site(BaseHTTPRequestHandler):
    "The synthetic site on a socket; it notes what came, and sets a cookie."

    def do_GET(self):
        parts = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.seen.append((self.command, self.path, self.headers.get("Authorization")))
        location = self.server.redirects.get(parts.path)
        status, headers, body = (302, {"Location": location}, None) if location else site(
            self.server.world, self.command, parts.path, dict(parse_qsl(parts.query)), {}, text)
        raw = b"" if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in {**headers, "Set-Cookie": "session=c00kie", "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *args):
        pass


def start_server():
    server = HTTPServer(("127.0.0.1", 0), Site)
    server.world, server.seen, server.redirects = World(SEEDS["wire"]), [], {}
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def server():
    running = start_server()
    yield running
    running.shutdown()
    running.server_close()


def with_urllib(url):
    return json.load(urlopen(Request(url, headers={"Authorization": f"Basic {PAIR}", "Cookie": "c00kie"})))


def with_requests(url):
    return pytest.importorskip("requests").get(url, auth=("ada@acme.example", TOKEN)).json()


def with_httpx(url):
    return pytest.importorskip("httpx").get(url, auth=("ada@acme.example", TOKEN)).json()


@pytest.mark.parametrize("get", [with_urllib, with_requests, with_httpx])
def test_http_clients_are_recorded_without_secrets(tmp_path, server, get):
    pytest.importorskip("vcr", reason="vcrpy is in the extra `record`")
    with record_http(tmp_path / "r.jsonl", (TOKEN,)):
        answer = get(f"{server.url}/rest/api/3/issue/ABC-123?fields=summary&who=ada%40acme.example")
    text = (tmp_path / "r.jsonl").read_text()
    [line] = read_recording(tmp_path / "r.jsonl")
    assert server.seen[0][2] == f"Basic {PAIR}" and leaks(text) == []
    assert line["answer"] == answer and line["query"] == {"fields": "summary", "who": "someone@example.invalid"}
    assert diff([line], World(SEEDS["wire"]))[0]["verdict"] == "same"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.jsonl"]


def test_without_vcrpy_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vcr", None)
    with pytest.raises(ModuleNotFoundError, match=r"atlas-rlvr\[record\]"), record_http(tmp_path / "r.jsonl"):
        pass


# Canary


@pytest.fixture
def signed(monkeypatch):
    monkeypatch.setenv("ATLAS_EMAIL", "ada@acme.example")
    monkeypatch.setenv("ATLAS_TOKEN", TOKEN)


def test_the_canary_compares_and_changes_nothing(tmp_path, server, signed):
    before = canonical(server.world.tables)
    rows = canary(server.url, live=True, out=tmp_path / "c.jsonl")
    assert 15 < len(rows) == len(server.seen) <= LIMIT == 30 and canonical(server.world.tables) == before
    assert {auth for *_, auth in server.seen} == {f"Basic {PAIR}"}
    assert [row for row in rows if row["verdict"] != "same" and "/pages/" not in row["request"]
            and "/content/" not in row["request"]] == []  # its first page is not the one that we name
    assert "different shape" not in {row["verdict"] for row in rows}
    text = (tmp_path / "c.jsonl").read_text()
    assert leaks(text) == [] and len(read_recording(tmp_path / "c.jsonl")) == len(rows)


def test_the_canary_is_read_mostly_and_bounded():
    writes = [row for row in CANARY if row[0] != "GET"]
    assert len(CANARY) <= LIMIT and writes == [("POST", "/rest/api/3/issue", {}, {"fields": {}})]
    assert site(World(SEEDS["wire"]), "POST", "/rest/api/3/issue", {}, {}, '{"fields": {}}')[0] == 400


def test_more_questions_than_allowed_are_not_asked(tmp_path, server, signed, monkeypatch):
    monkeypatch.setattr(record, "CANARY", CANARY * 3)
    canary(server.url, live=True, out=tmp_path / "c.jsonl")
    assert len(server.seen) <= 30


def test_a_site_that_answers_otherwise_is_told(tmp_path, server, signed):
    server.world.tables["issues"]["ABC-123"] = {**server.world.get("issues", "ABC-123"), "summary": "Another"}
    row = next(r for r in canary(server.url, live=True, out=tmp_path / "c.jsonl") if r["request"].endswith("/issue/ABC-123"))
    assert (row["verdict"], row["where"]) == ("different value", ["fields.summary"])


def test_the_canary_needs_the_flag(tmp_path, server, signed):
    with pytest.raises(ValueError, match="pass live=True"):
        canary(server.url, out=tmp_path / "c.jsonl")
    assert server.seen == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ATLAS_EMAIL", "ATLAS_TOKEN"])
def test_the_canary_needs_credentials_from_the_environment(tmp_path, server, signed, monkeypatch, name):
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="set ATLAS_EMAIL and ATLAS_TOKEN"):
        canary(server.url, live=True, out=tmp_path / "c.jsonl")
    assert server.seen == []


@pytest.mark.parametrize("address", ["http://acme.atlassian.net", "ftp://acme.atlassian.net", "acme.atlassian.net", "",
                                     "https://ada:pw@acme.atlassian.net", "http://127.0.0.1.evil.example", "file:///etc"])
def test_credentials_go_to_https_only(tmp_path, signed, address):
    with pytest.raises(ValueError, match="needs an https address"):
        canary(address, live=True, out=tmp_path / "c.jsonl")


def test_credentials_do_not_follow_a_redirect(tmp_path, server, signed):
    other = start_server()
    server.redirects["/rest/api/3/myself"] = f"{other.url}/rest/api/3/myself"
    row = canary(server.url, live=True, out=tmp_path / "c.jsonl")[1]
    assert other.seen == [] and (row["recorded"], row["verdict"]) == (302, "different shape")
    other.shutdown()
    other.server_close()


def test_the_commands_exit_codes(tmp_path, server, signed, capsys, monkeypatch):
    def command(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["canary", *arguments, "--out", str(tmp_path / "c.jsonl")])
        return left.value.code
    assert command(server.url) == 2 and not (tmp_path / "c.jsonl").exists()
    assert command(server.url, "--live") == 0
    server.redirects["/rest/api/3/myself"] = server.url
    assert command(server.url, "--live") == 1
    assert command("http://127.0.0.1:9", "--live") == 2
    monkeypatch.delenv("ATLAS_TOKEN")
    assert command(server.url, "--live") == 2
    printed = capsys.readouterr()
    assert len(printed.err.strip().split("\n")) == 3 and leaks(printed.err + printed.out) == []


def test_an_older_file_survives_the_canary(tmp_path, signed):
    (tmp_path / "c.jsonl").write_text("precious")
    with pytest.raises(OSError):
        canary("https://x.invalid", live=True, out=tmp_path / "c.jsonl")
    assert (tmp_path / "c.aside-1.jsonl").read_text() == "precious"
