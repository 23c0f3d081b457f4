"""Everything a model or a server has been seen to send, through the one parser."""
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_rlvr.tool_calls import (
    OUTCOMES,
    assemble,
    build_trace,
    call_from_json,
    call_to_json,
    from_response,
    normalise,
    parse_message,
    read_arguments,
    response_parser,
    rollout_outcome,
    to_http,
    to_template,
    unknown_tool_answer,
)

READ = {"issueIdOrKey": "ABC-123"}
FIELDS = {"project": {"key": "ABC"}, "parent": {"key": "ABC-123"}, "summary": "Write QA test cases",
          "issuetype": {"id": "10003"}, "assignee": {"accountId": "admin123"}}


def entry(name, arguments, call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*entries, content=None, **more):
    return {"role": "assistant", "content": content, "tool_calls": list(entries), **more}


def block(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool(status=200, body=None, **more):
    return {"role": "tool", "content": json.dumps({"status": status, "body": body}), **more}


def seen(calls):
    return [(call.name, call.arguments) for call in calls]


def one(arguments, name="get_issue"):
    [call] = parse_message(assistant(entry(name, arguments)))
    return call


def test_a01_two_values_in_one_block():
    text = '<tool_call>\n{"name": "get_issue", "arguments": {"issueIdOrKey": "ABC-123"}}\n'
    calls = parse_message(text + '{"name": "get_page", "arguments": {"page_id": "789"}}\n</tool_call>')
    assert seen(calls) == [("get_issue", READ), ("get_page", {"page_id": "789"})]
    assert [call.repairs for call in calls] == [("several_values",)] * 2
    assert [call.id for call in calls] == ["t0c0", "t0c1"]


def test_a03_history_in_both_forms():
    as_text, as_dict = assistant(entry("get_transitions", json.dumps(READ))), assistant(entry("get_transitions", READ))
    assert json.dumps(to_template(as_text)) == json.dumps(to_template(as_dict))
    assert to_http(as_text) == to_http(as_dict)
    assert to_template(as_text)["tool_calls"][0]["function"]["arguments"] == READ
    assert to_http(to_http(as_dict))["tool_calls"][0]["function"]["arguments"] == json.dumps(READ)


def test_a04_double_encoding():
    twice = one(json.dumps(json.dumps(READ)))
    assert (twice.arguments, twice.repairs, twice.outcome) == (READ, ("double_encoded",), "unexecuted")
    assert twice.raw == json.dumps(json.dumps(READ))
    message = assistant(entry("get_issue", json.dumps(json.dumps(READ))))
    assert normalise(normalise(message)) == normalise(message)
    assert parse_message(normalise(message)) == parse_message(message)
    assert '\\"' not in json.dumps(normalise(message)["tool_calls"][0]["function"])


def test_a04_double_encoding_in_text():
    [call] = parse_message(block("get_issue", json.dumps(READ)))
    assert (call.arguments, call.repairs) == (READ, ("double_encoded",))
    assert parse_message(block("get_issue", json.dumps(json.dumps(READ))))[0].outcome == "malformed"
    assert parse_message(block("get_issue", ""))[0].repairs == ("no_arguments",)


@pytest.mark.parametrize("given", [json.dumps(json.dumps(json.dumps(READ))), '"text"', "5", "[1]", '["a"]', "true"])
def test_a04_no_object_is_an_invalid_payload(given):
    assert (one(given).arguments, one(given).outcome, one(given).raw) == (None, "malformed", given)


@pytest.mark.parametrize("function", [
    {"name": "search_pages", "arguments": ""}, {"name": "search_pages", "arguments": None}, {"name": "search_pages"},
    {"name": "get_issue", "arguments": "   "}, {"name": "get_issue", "arguments": "null"}])
def test_a05_no_arguments(function):
    for message in (assistant(function), assistant({"type": "function", "function": function})):
        [call] = parse_message(message)
        assert (call.name, call.arguments, call.outcome) == (function["name"], {}, "unexecuted")
        assert call.repairs == ("no_arguments",)


def test_a07_python_literal():
    given = repr({"fields": FIELDS | {"duedate": None, "flag": True}})
    assert one(given).arguments == {"fields": FIELDS | {"duedate": None, "flag": True}}
    assert one(given).repairs == ("python_literal",)


@pytest.mark.parametrize("given", [
    "{'labels': {'ops', 'runbook'}}", "{'a': (1, 2)}", "{1: 'a'}", "{'a': b'x'}", "{'a': 1j}", "dict(a=1)",
    "__import__('os').getcwd()", '{"a": NaN}', '{"a": 1e999}', '{"a": Infinity}', '{"a": "\\ud800"}', "[" * 100000,
    '{"a": 1} {"b": 2}', "{'a': " + "9" * 5000 + "}"])
def test_a07_what_json_cannot_hold_is_malformed(given):
    call = one(given)
    assert call.arguments is None and call.outcome in ("malformed", "truncated")
    assert call_from_json(json.loads(json.dumps(call_to_json(call), allow_nan=False))) == call


def test_a08_literal_newline_outside_strings():
    given = '{"page_id": "10001", "labels": \\n["ops", "runbook"]\\n\\n}'
    live = one(given, "add_labels")
    stored = json.loads(json.dumps({"calls": [call_to_json(live)], "text": given}))
    assert stored["text"] == given == call_from_json(stored["calls"][0]).raw
    assert one(stored["text"], "add_labels") == live == call_from_json(stored["calls"][0])
    assert live.outcome == "malformed"


def test_a09_control_characters_inside_strings():
    given = '{"title": "Runbook", "body": {"representation": "storage", "value": "<h2>Steps</h2>\n\t<p>page</p>"}}'
    call = one(given, "create_page")
    assert call.arguments["body"]["value"] == "<h2>Steps</h2>\n\t<p>page</p>"
    assert call.repairs == ("control_characters",)
    assert json.loads(json.dumps(call_to_json(call)))["arguments"] == call.arguments


THOUGHT = '<think>\nI will call <tool_call>{"name": "create_issue", "arguments": {}}</tool_call> next.\n'


@pytest.mark.parametrize("text", [THOUGHT + "</think>\n", THOUGHT.removeprefix("<think>\n") + "</think>\n"])
def test_a12_draft_inside_a_thought(text):
    calls = parse_message(text + block("create_issue", {"fields": FIELDS}))
    assert seen(calls) == [("create_issue", {"fields": FIELDS})]
    assert parse_message(text + "Done.") == []


def test_a12_thought_never_closed():
    assert parse_message(THOUGHT) == []
    assert parse_message(block("get_issue", READ) + THOUGHT)[0].arguments == READ


@pytest.mark.parametrize("text", [
    "Done. Note: a <tool_call> block or <function=create_issue> would only be needed to retry.",
    "No <tool_call></tool_call> needed.", "</tool_call>", "The tags are <tool_call> and </tool_call>.", "{}", ""])
def test_a14_prose_about_markup(text):
    assert parse_message(text) == parse_message({"role": "assistant", "content": text, "tool_calls": []}) == []
    assert rollout_outcome([{"role": "assistant", "content": text}], [], False, 25) == "ended"


def test_a15_parallel_calls_keep_their_order():
    message = assistant(entry("get_issue", json.dumps(READ), "a"), entry("get_page", '{"page_id": "789"}', "b"))
    answers = [tool(body="page", tool_call_id="b"), tool(body="issue", tool_call_id="a")]
    trace = build_trace([message, *answers])
    assert [(call.name, call.body) for call in trace] == [("get_issue", "issue"), ("get_page", "page")]
    assert [call["id"] for call in normalise(message, 3)["tool_calls"]] == ["t3c0", "t3c1"]


@pytest.mark.parametrize("call_id", ["", None, "same"])
def test_a17_empty_or_repeated_ids(call_id):
    message = assistant(entry("get_issue", READ, call_id), entry("get_page", {"page_id": "789"}, call_id))
    answers = [tool(body="issue", tool_call_id=call_id), tool(404, "page", tool_call_id=call_id)]
    trace = build_trace([message, *answers])
    assert [(call.id, call.body, call.outcome) for call in trace] == [
        ("t0c0", "issue", "ok"), ("t0c1", "page", "api_error")]
    assert normalise(message) == normalise(message)


CUT = '{"spaceId":"PAY","title":"Runbook","parentId":"789","body":{"representation":"storage","value":"<h2>Onc'


def test_a18_call_cut_by_the_budget():
    message = assistant(entry("create_page", CUT))
    response = {"choice": {"finish_reason": "tool_calls", "message": message}, "usage": {"completion_tokens": 64}}
    complete = {"choices": [{"finish_reason": "tool_calls", "message": assistant(entry("get_issue", READ))}],
                "usage": {"completion_tokens": 64}}
    for cut in (message, from_response(response, 64), from_response(complete, 64), assistant(entry("f", CUT[:5]))):
        [call] = build_trace([{"role": "user"}, cut])
        assert call.outcome == "truncated"
        assert rollout_outcome([cut], [call], False, 25) == "truncated"
    assert parse_message(from_response(complete, 65))[0].outcome == "unexecuted"
    assert parse_message(assistant(entry("get_issue", READ)), truncated=True)[0].outcome == "truncated"
    assert parse_message(assistant(entry("get_issue", READ), finish_reason="length"))[0].outcome == "truncated"


@pytest.mark.parametrize("n", [len("<tool_call>\n"), 20, 40, len(block("get_issue", READ)) - 3])
def test_a18_block_never_closed(n):
    calls = parse_message(block("get_page", {"page_id": "789"}) + "\n" + block("get_issue", READ)[:n])
    assert [call.outcome for call in calls] == ["unexecuted", "truncated"]
    assert "tool_calls" not in normalise(block("get_issue", READ)[:n])


def test_a20_deprecated_function_call():
    old = {"role": "assistant", "content": None, "tool_calls": None,
           "function_call": {"name": "get_issue", "arguments": json.dumps(READ)}}
    assert seen(parse_message(from_response({"choice": {"message": old, "finish_reason": "function_call"}}))) == [
        ("get_issue", READ)]
    assert normalise(old)["tool_calls"][0]["function"] == {"name": "get_issue", "arguments": READ}


def test_a21_null_content_is_kept():
    history = [{"role": "user", "content": "Create a page."}, assistant(entry("get_page", '{"page_id": "789"}')),
               {"role": "tool", "tool_call_id": "c1", "content": "{}"}]
    assert [message["content"] for message in map(to_template, history)] == ["Create a page.", "", "{}"]
    [call] = build_trace(history)
    assert (call.outcome, call.status, call.body) == ("ok", None, {})


def test_a22_nested_text_is_left_alone():
    given = {"fields": json.dumps(FIELDS)}
    assert one(given, "create_issue").arguments == one(json.dumps(given), "create_issue").arguments == given
    assert one(given, "create_issue").repairs == ()


def test_a23_streamed_deltas():
    deltas = [{"tool_calls": [{"index": 0, "id": "t1", "type": "function",
                               "function": {"name": "get_page", "arguments": ""}}]},
              {"tool_calls": [{"index": 0, "function": {"name": "get_page", "arguments": '{"page_id":'}}]},
              {"tool_calls": [{"index": 0, "function": {"arguments": ' "789"}'}}]},
              {"choices": [], "usage": {"completion_tokens": 12}}]
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas[:3]] + deltas[3:]
    for stream in (deltas, chunks):
        assert seen(parse_message(assemble(stream))) == [("get_page", {"page_id": "789"})]


def test_a23_streamed_calls_at_one_index_stay_apart():
    deltas = [{"tool_calls": [{"index": 0, "id": i, "function": {"name": n, "arguments": "{}"}}]}
              for i, n in (("a", "get_page"), ("b", "get_issue"))]
    assert seen(parse_message(assemble(deltas))) == [("get_page", {}), ("get_issue", {})]
    assert assemble([{"content": "Do"}, {"content": "ne."}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]) == {
        "role": "assistant", "content": "Done.", "finish_reason": "stop"}


@pytest.mark.parametrize("name", ["create_subtask", "transition_isue", "", None])
def test_a25_unknown_tools(name):
    answer = {"role": "tool", "content": unknown_tool_answer(name)}
    [call] = build_trace([assistant(entry(name, {"parent": "ABC-123"})), answer])
    assert (call.name, call.outcome, call.status) == (name, "unknown_tool", None)
    assert call_from_json(call_to_json(call)) == call


PARAMETERS = "<parameter=page_id>\n789\n</parameter>\n<parameter=labels>\n[\"ops\", \"7\"]\n</parameter>\n"
XML = f"<tool_call>\n<function=add_labels>\n{PARAMETERS}</function>\n</tool_call>"


def test_qwen35_xml():
    [call] = parse_message(XML)
    assert seen([call]) == [("add_labels", {"page_id": "789", "labels": ["ops", "7"]})]
    assert [call.name for call in parse_message(XML + XML)] == ["add_labels", "add_labels"]
    assert parse_message(XML.removesuffix("</tool_call>"))[0].outcome == "truncated"
    assert parse_message(XML.replace("789\n</parameter>", "789"))[0].outcome == "malformed"


@pytest.mark.parametrize("text, value", [("75001", "75001"), ("007", "007"), ("true", "true"), ("null", "null"),
                                         ('"789"', '"789"'), ("[WIP] title", "[WIP] title"), ('{"a": 1}', {"a": 1}),
                                         ("{'a': None}", {"a": None}), ('{"a":', '{"a":')])
def test_xml_values_stay_text_unless_they_are_containers(text, value):
    [call] = parse_message(XML.replace("789", text))
    assert call.arguments["page_id"] == value and type(call.arguments["page_id"]) is type(value)


def test_integers_stay_integers_and_identifiers_stay_strings():
    given = {"transition": {"id": 31}, "issuetype": {"id": "10003"}, "big": 10**30, "x": 1.5, "yes": True}
    for arguments in (given, json.dumps(given), repr(given)):
        assert json.dumps(one(arguments).arguments) == json.dumps(given)


@pytest.mark.parametrize("inside", [
    "get_issue ABC-123", "{'name': 5}", '{"arguments": {}}', "[]", "5", '{"name": a}'])
def test_closed_block_without_a_call(inside):
    text = f"<tool_call>\n{inside}\n</tool_call>"
    [call] = build_trace([{"role": "assistant", "content": text}])
    assert (call.name, call.arguments, call.outcome) == (None, None, "malformed")
    assert inside in call.raw and "tool_calls" not in normalise(text)


TRL_CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "get_issue", "arguments": READ}}]}


def trl(content, name="get_issue"):
    return [TRL_CALL, {"role": "tool", "name": name, "content": content}, {"role": "assistant", "content": "Done."}]


@pytest.mark.parametrize("content, outcome, status, body", [
    ('{"status":200,"body":{"key":"ABC-123"}}', "ok", 200, {"key": "ABC-123"}),
    ('{"status":204,"body":null}', "ok", 204, None),
    ('{"status":404,"body":"gone"}', "api_error", 404, "gone"),
    ("{'error': 'Tool get_issue not found.'}", "unknown_tool", None, {"error": "Tool get_issue not found."}),
    ("{'error': \"get_issue() got an unexpected keyword argument 'key'\"}", "api_error", None,
     {"error": "get_issue() got an unexpected keyword argument 'key'"}),
    ("{'error': 'cut", "ok", None, "{'error': 'cut"),
    ("plain text", "ok", None, "plain text"), ("", "ok", None, ""), (None, "ok", None, ""), ("[1]", "ok", None, [1]),
    ('{"status":true}', "ok", None, {"status": True})])
def test_answers(content, outcome, status, body):
    [call] = build_trace(trl(content))
    assert (call.outcome, call.status, call.body, call.arguments) == (outcome, status, body, READ)


def test_turn_that_trl_kept_as_text():
    text = block("get_issue", READ) + '<tool_call>{"name": get_page}</tool_call>'
    messages = trl('{"status":200,"body":{}}')[:2] + [{"role": "assistant", "content": text}]
    trace = build_trace(messages)
    assert [call.outcome for call in trace] == ["ok", "unexecuted", "malformed"]
    assert [call.id for call in trace] == ["t0c0", "t1c0", "t1c1"]
    assert rollout_outcome(messages, trace, False, 25) == "malformed"


def test_outcomes_of_a_rollout():
    def outcome(messages, truncated=False, cap=25):
        return rollout_outcome(messages, build_trace(messages), truncated, cap)
    done = trl('{"status":200,"body":{}}')
    assert outcome(done) == outcome([]) == outcome(done[2:]) == "ended"
    assert outcome(done, truncated=True) == "truncated"
    assert outcome(done[:1], cap=1) == "turn_cap"
    assert outcome(done[:1]) == "truncated"  # executed, but its answer did not fit the budget
    assert outcome([{"role": "assistant", "content": block("get_issue", READ)}]) == "malformed"


class Letters:
    "A tokenizer whose tokens are characters."
    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))


def test_parser_inside_trl():
    def parse(text, prefix=""):
        return response_parser(Letters())([*map(ord, text)], prefix=[*map(ord, prefix)], tools=[])
    assert parse(block("get_issue", READ))["tool_calls"][0]["function"] == {"name": "get_issue", "arguments": READ}
    assert parse(block("get_issue", READ), "<think>\n\n</think>\n\n")["content"] == ""
    assert "tool_calls" not in parse(block("get_issue", READ), "<|im_start|>assistant\n<think>\n")
    with pytest.raises(ValueError, match="cannot be run"):
        parse(block("get_issue", READ)[:30])


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))
PIECES = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "\n",
                          "{", "<parameter=p>", "</parameter>", '{"name": "f", "arguments": {}}', '"', "'", "[", "}",
                          "\\n"])
TEXTS = st.lists(PIECES | st.text(max_size=6), max_size=9).map("".join)
ODD = st.builds(object) | st.sets(st.integers()) | st.binary() | st.complex_numbers() | st.dictionaries(
    st.integers(), st.text(max_size=3), max_size=2) | st.tuples(st.text())
ANYTHING = JSON | TEXTS | ODD
CALLS = ANYTHING | st.fixed_dictionaries({}, optional={
    "id": ANYTHING, "raw": ANYTHING, "repairs": ANYTHING, "name": ANYTHING, "arguments": ANYTHING,
    "function": ANYTHING | st.fixed_dictionaries({}, optional={"name": ANYTHING, "arguments": ANYTHING | JSON.map(
        lambda value: json.dumps(value)) | JSON.map(repr)})})
MESSAGES = ANYTHING | st.fixed_dictionaries({}, optional={
    "role": st.sampled_from(["assistant", "tool", "user"]), "content": ANYTHING,
    "tool_calls": st.lists(CALLS, max_size=3), "function_call": CALLS,
    "finish_reason": ANYTHING | st.just("length"), "tool_call_id": ANYTHING})


@settings(max_examples=300, deadline=None)
@given(MESSAGES, st.booleans())
def test_any_message_is_read_and_normalised_once(message, truncated):
    calls = parse_message(message, 2, truncated)
    assert all(call.outcome in OUTCOMES for call in calls)
    assert all(call.arguments is None or isinstance(call.arguments, dict) for call in calls)
    stored = json.dumps([call_to_json(call) for call in calls], allow_nan=False)
    assert [call_from_json(call) for call in json.loads(stored)] == calls
    canonical = normalise(message, 2)
    assert normalise(canonical, 2) == canonical == json.loads(json.dumps(canonical, allow_nan=False))
    assert to_http(canonical)["role"] == to_template(canonical)["role"] == "assistant"


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGES, max_size=5))
def test_any_transcript_gives_a_trace(messages):
    trace = build_trace(messages)
    assert trace == build_trace(messages) and len({call.id for call in trace}) == len(trace)
    json.dumps([call_to_json(call) for call in trace], allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(ANYTHING | st.fixed_dictionaries({}, optional={
    "choices": ANYTHING, "content": ANYTHING, "tool_calls": st.lists(st.fixed_dictionaries({}, optional={
        "index": ANYTHING, "id": ANYTHING, "function": CALLS}))}), max_size=4))
def test_any_stream_is_assembled(chunks):
    parse_message(assemble(chunks))
    for chunk in chunks:
        parse_message(from_response(chunk, 5))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_arguments_survive_every_spelling(arguments):
    try:
        text = json.dumps(arguments, allow_nan=False)
    except ValueError:
        return
    assert read_arguments(arguments)[0] == read_arguments(text)[0] == read_arguments(json.dumps(text))[0] == arguments
