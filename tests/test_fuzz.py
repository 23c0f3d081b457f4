"Totality: rewards score any trace, and the parser reads any bytes."
import copy
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from time import perf_counter

import pytest
from conftest import ROOT
from fuzz_parser import check, seeds
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from atlas_rlvr import audited, rewards, scenarios, tool_calls
from atlas_rlvr.environments import TOOLS
from atlas_rlvr.final_state import final_state
from atlas_rlvr.rewards import score, score_task
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks
from atlas_rlvr.tool_calls import OUTCOMES, Call, build_trace
from atlas_rlvr.verdicts import misspelt

SETS = ("paper", "audited")
PER_EXAMPLE = 50  # traces that are made of one drawn pool of calls
TOOL_NAMES = sorted({name for names in TOOLS.values() for name in names})
TASKS = {scenario: load_tasks(scenario) for scenario in SCENARIOS}
GOLD_CALLS = [call for scenario in SCENARIOS for call in gold_calls(TASKS[scenario][0])]


def nested(levels: int):
    value = "x"
    for level in range(levels):
        value = [value] if level % 2 else {"fields": value}
    return value


WORDS = sorted({str(value) for task in (TASKS[scenario][0] for scenario in SCENARIOS) for value in task["gold"].values()})
TEXTS = st.text(st.characters(), max_size=12) | st.sampled_from(["\ud800", "\udfff\ud83d", "é" * 300, "0" * 5000, *WORDS])
NUMBERS = st.integers() | st.sampled_from([10**400, -1, 31, 789, True, math.nan, math.inf, -math.inf, 1e308, -0.0])
SCALARS = st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS
KEYS = TEXTS | st.sampled_from(["fields", "page_id", "labels", "title", "parentId", "spaceId", "body", "transition", "key", "id",
                                "issueIdOrKey", "query", "parent", "project", "summary", "assignee", "issuetype", "accountId"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
                      max_leaves=10) | st.sampled_from([nested(60), nested(150), ["ops"] * 400])
OBJECTS = st.none() | st.dictionaries(KEYS, VALUES, max_size=5) | st.sampled_from([arguments for _, arguments in GOLD_CALLS])
NAMES = st.none() | st.sampled_from(TOOL_NAMES + [name for tool in TOOL_NAMES for name in misspelt(tool)]) | TEXTS
CALLS = st.builds(Call, name=st.sampled_from(TOOL_NAMES) | NAMES, arguments=OBJECTS, raw=TEXTS, id=TEXTS,
                  outcome=st.sampled_from(OUTCOMES), status=st.none() | st.integers(-1, 10**6), body=VALUES,
                  repairs=st.sampled_from([(), ("double_encoded",), ("x", "y")]))
GOLD_CALL = st.sampled_from(GOLD_CALLS).map(lambda one: Call(*one, outcome="ok", status=200))
POOLS = st.lists(CALLS | GOLD_CALL, min_size=1, max_size=12)

ISSUES = st.fixed_dictionaries(dict.fromkeys(("summary", "parent", "project", "assignee", "issuetype"), TEXTS))
PAGES = st.fixed_dictionaries(dict.fromkeys(("title", "parentId", "spaceId", "representation"), TEXTS))
GOLDS = st.fixed_dictionaries({
    "transition": st.fixed_dictionaries({"issueIdOrKey": TEXTS, "transition_id": st.integers() | TEXTS, "status": TEXTS}),
    "subtask": ISSUES, "page": PAGES, "label": st.fixed_dictionaries({"page_id": TEXTS, "labels": st.lists(TEXTS, max_size=6)}),
    "cross": st.fixed_dictionaries({"issue": ISSUES, "page": PAGES})})


def check_score(found):
    "Bounds, numbers and the sum of one score."
    numbers = [found.reward, found.raw, *found.components.values()]
    assert all(type(number) in (int, float) and math.isfinite(number) for number in numbers), found
    assert 0.0 <= found.reward <= 1.0 and found.reward == max(0.0, min(1.0, found.raw)), found
    assert sum(round(100 * part) for part in found.components.values()) == round(100 * found.raw), found
    assert math.isclose(sum(found.components.values()), found.raw, abs_tol=1e-9), found


def check_trace(scenario: str, trace: list, gold: dict, task: dict):
    "One trace under both reward sets, with the task's gold and with any gold."
    before, state = copy.deepcopy((trace, gold, task)), final_state(task, trace)
    kept = copy.deepcopy(state)
    for name in SETS:
        for wanted in (task["gold"], gold):
            found = score(scenario, trace, wanted, name, state)
            check_score(found)
            assert score(scenario, trace, wanted, name, state) == found
    assert (trace, gold, task) == before and state == kept


def compose(pool: list, rng: random.Random) -> list:
    "A trace of calls of the pool."
    return rng.choices(pool, k=rng.randint(0, 12))


def run_part(number: int, examples: int, chosen):  # chosen: n-th trace → scenarios
    "Score `examples * PER_EXAMPLE` traces; the same ones for the same number."
    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(pool=POOLS, golds=GOLDS, start=st.integers(0, 2**32))
    def part(pool, golds, start):
        rng = random.Random(start)
        for n in range(PER_EXAMPLE):
            trace = compose(pool, rng)
            for scenario in chosen(n):
                check_trace(scenario, trace, golds[scenario], rng.choice(TASKS[scenario]))
    part()


@pytest.mark.parametrize("number", range(5))
def test_a_thousand_traces_in_every_scenario(number):
    run_part(number, 4, lambda n: SCENARIOS)


@pytest.mark.slow
def test_a_million_traces(request, capsys):
    "Goes on after the last finished part; a change of the code starts again. ATLAS_RLVR_FUZZ: how many traces."
    total, size = int(os.environ.get("ATLAS_RLVR_FUZZ", "1000000")), 10_000
    code = b"".join((ROOT / "atlas_rlvr" / f"{module.__name__.split('.')[-1]}.py").read_bytes()
                    for module in (audited, rewards, scenarios, tool_calls))
    key = f"fuzz/{sha256(code).hexdigest()[:16]}"
    start, began = request.config.cache.get(key, 0), perf_counter()
    for done in range(start, total, size):
        run_part(1000 + done // size, min(size, total - done) // PER_EXAMPLE, lambda n: (SCENARIOS[n % len(SCENARIOS)],))
        request.config.cache.set(key, done + size)
        with capsys.disabled():
            print(f"\n{done + size} traces, {(done + size - start) / (perf_counter() - began):.0f} a second", end="")


# What random values would need long to meet


OTHER_TYPES = (None, 0, 3.5, True, math.nan, "x", "\ud800", [], ["x"], [[]], [{}], {}, {"id": []}, {"id": {}}, {"key": ["x"]},
               nested(150))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_arguments_that_are_no_object(scenario, name):
    "No parser makes such a call; a reward is total all the same."
    task = TASKS[scenario][0]
    for value in OTHER_TYPES:
        trace = [Call(tool, value, outcome="ok", status=200) for tool in TOOLS[scenario]]
        check_score(score_task(task, trace, name))


def replaced(value, path, new):
    "The JSON value with another value at a path."
    return {**value, path[0]: replaced(value[path[0]], path[1:], new)} if path else new


def inner_paths(value, path=()):
    "The paths of everything inside an object."
    members = value.items() if isinstance(value, dict) else ()
    return [found for name, item in members for found in [(*path, name), *inner_paths(item, (*path, name))]]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_members_of_another_type(scenario, name):
    "Every member of every gold call, the others as they were and the call said to be served."
    task = TASKS[scenario][0]
    calls = [Call(*one, outcome="ok", status=200) for one in gold_calls(task)]
    state = final_state(task, calls)
    for number, call in enumerate(calls):
        for path in inner_paths(call.arguments):
            for value in OTHER_TYPES:
                odd = replace(call, arguments=replaced(call.arguments, path, value), body=value)
                trace = [*calls[:number], odd, *calls[number + 1:]]
                check_score(score(scenario, trace, task["gold"], name, state))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_deep_and_huge_arguments(scenario, name):
    task, deep = TASKS[scenario][0], {}
    inner = deep
    for _ in range(20_000):
        inner["fields"] = inner = {}
    for arguments in (deep, {"labels": ["x" * 10**6, *map(str, range(10**4))], "title": "y" * 10**6}):
        check_score(score_task(task, [Call(tool, arguments, outcome="ok", status=200) for tool in TOOLS[scenario]], name))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ten_thousand_calls(scenario):
    task = TASKS[scenario][0]
    trace = [Call(*one, outcome="ok", status=200) for one in gold_calls(task)] * 500
    began = perf_counter()
    assert score(scenario, trace, task["gold"]).raw <= 500.25
    assert perf_counter() - began < 20


# The parser


def test_the_parser_reads_every_seed():
    for data in seeds():
        check(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.lists(st.sampled_from(seeds()) | st.binary(max_size=8), max_size=4).map(b"".join))
def test_the_parser_reads_any_bytes(data):
    check(data)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(seeds()), st.randoms(use_true_random=False))
def test_the_parser_reads_damaged_seeds(data, rng):
    for _ in range(20):
        at, end = sorted(rng.choices(range(len(data) + 1), k=2))
        check(data[:at] + rng.choice([b"", data[at:end] * 2, bytes([rng.randrange(256)])]) + data[end:])


def test_a_trace_read_from_a_transcript_never_has_arguments_that_are_no_object():
    deep = '{"a": ' * 100_000 + "1" + "}" * 100_000
    for text in (deep, "[]", "3", '"x"', "NaN"):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "get_issue", "arguments": text}}]}
        call, = build_trace([message, {"role": "tool", "content": '{"status":200}'}])
        assert (call.arguments, call.outcome) == (None, "malformed")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("atheris") is None, reason="needs atheris: pip install -e '.[fuzz]' (Linux, Python 3.11 to 3.13)")
def test_the_coverage_guided_fuzzer_finds_nothing(request):
    "ATLAS_RLVR_FUZZ_SECONDS: how long; what was interesting is kept in pytest's cache, so that a later run goes on from it."
    seconds, folder = os.environ.get("ATLAS_RLVR_FUZZ_SECONDS", "60"), request.config.cache.mkdir("parser_corpus")
    command = [sys.executable, "tests/fuzz_parser.py", str(folder), f"-max_total_time={seconds}", "-seed=1", "-max_len=4000",
               f"-artifact_prefix={folder}/"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stderr.strip().split("\n")[-1])


def test_the_fuzzer_would_notice(monkeypatch):
    monkeypatch.setattr("fuzz_parser.parse_message", lambda *_: [Call("f", "x", outcome="ok")])
    with pytest.raises(AssertionError):
        check(b"anything")


def test_the_check_of_scores_would_notice():
    task = TASKS["subtask"][0]
    found = score_task(task, [Call(*one, outcome="ok") for one in gold_calls(task)])
    for broken in ({"reward": 1.2}, {"raw": math.nan}, {"components": {**found.components, "verify": 0.3}}):
        with pytest.raises(AssertionError):
            check_score(replace(found, **broken))
