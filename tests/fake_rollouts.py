"""A rollouts file that no model made: scripted calls, for tests of the pages that read rollouts. Never a result."""

import copy
import json
from pathlib import Path

from atlas_rlvr.environments import run_calls
from atlas_rlvr.rewards import REWARD_HASH, score
from atlas_rlvr.runs import SCHEMA, compact, write_json
from atlas_rlvr.scenarios import gold_calls, load_tasks, task_env
from atlas_rlvr.tool_calls import Call, call_to_json

MODEL = "scripted-fake"


def bare_parent(calls: list) -> list:
    "The sub-task's parent as text, tried again three times before the rest goes on as planned."
    at = next(i for i, (name, _) in enumerate(calls) if name == "create_issue")
    wrong = copy.deepcopy(calls[at])
    wrong[1]["fields"]["parent"] = wrong[1]["fields"]["parent"]["key"]
    return [*calls[:at], *[wrong] * 4, *calls[at + 1 :]]


def no_assignee(calls: list) -> list:
    "The sub-task without its assignee."
    calls = copy.deepcopy(calls)
    for name, arguments in calls:
        if name == "create_issue":
            del arguments["fields"]["assignee"]
    return calls


def reads(calls: list) -> list:
    "Only what comes before the first write."
    return [call for call in calls if call[0].startswith("get")]


SCRIPTS = {  # name → (what becomes of the gold calls without verify, outcome)
    "gold": (lambda calls: calls, "ended"),
    "early": (reads, "ended"),
    "bare": (bare_parent, "ended"),
    "dropped": (no_assignee, "ended"),
    "invented": (lambda calls: [("make_it_so", {}), *calls], "ended"),
    "twice": (lambda calls: [*calls, calls[-1]], "ended"),
    "cap": (lambda calls: [calls[0]] * 25, "turn_cap"),
    "error": (lambda calls: [], "error"),
}


def record(task: dict, script: str, **where) -> dict:
    "One scripted rollout as the recorder would keep it."
    change, outcome = SCRIPTS[script.removesuffix("+verify")]
    calls = run_calls(task_env(task), change(gold_calls(task, verify=script.endswith("+verify"))))
    result = score(task["scenario"], calls, task["gold"])
    values = {"reward": result.reward, "raw": result.raw, "components": result.components}
    if outcome == "error":
        values = {"reward": None, "raw": None, "components": {}, "error": "scripted"}
    stored = {
        "scenario": task["scenario"],
        "model": MODEL,
        "seed": 0,
        "split": task["split"],
        "task": task["id"],
        "outcome": outcome,
        "reward_hash": REWARD_HASH,
        "turns": len(calls) + 1,
        "calls": [call_to_json(call) for call in calls],
        **values,
        **where,
    }
    return compact(stored)


def broken(task: dict, outcome: str, **where) -> dict:
    "A rollout whose only call was malformed or cut."
    stored = record(task, "early", **where)
    call = Call(None, None, raw='<tool_call>\n{"name": "get_', outcome=outcome)
    result = score(task["scenario"], [call], task["gold"])
    return stored | {
        "outcome": outcome,
        "calls": [call_to_json(call)],
        "reward": result.reward,
        "raw": result.raw,
        "components": result.components,
    }


def choice(scripts: list[str], *numbers: int) -> str:
    "A script, spread evenly and without chance."
    return scripts[(numbers[0] + 3 * sum(numbers[1:])) % len(scripts)]


BEFORE = {
    "transition": ["gold", "early"],
    "subtask": ["early", "bare", "gold+verify", "dropped", "error"],
    "label": ["early", "gold", "twice", "gold+verify"],
    "cross": ["gold", "early", "bare", "twice", "invented", "cap", "dropped"],
}
AFTER = {
    "transition": ["gold"],
    "subtask": ["gold+verify", "gold"],
    "label": ["gold+verify", "twice+verify"],
    "cross": ["gold", "gold+verify", "twice"],
}


def phase_records(scenario: str, split: str, phase: str, scripts: list[str]) -> list[dict]:
    "Two generations of each prompt (held out: of the first six)."
    tasks = load_tasks(scenario, split)[: 6 if split == "held_out" else None]
    return [
        record(
            task, choice(scripts, i, g), split=split, phase=phase, batch=None, epoch=None, generation=g, temperature=0.7
        )
        for i, task in enumerate(tasks)
        for g in range(2)
    ]


def train_records(scenario: str, batches: int = 8) -> list[dict]:
    "Batches of two groups of two; the scripts of AFTER take over from those of BEFORE."
    tasks = load_tasks(scenario)
    where = [(b, tasks[(2 * b + k) % len(tasks)], g) for b in range(batches) for k in range(2) for g in range(2)]
    return [
        record(
            task,
            choice((AFTER if b + g >= batches // 2 else BEFORE)[scenario], b, g),
            phase="train",
            batch=b + 1,
            epoch=2 * (b + 1) / len(tasks),
            generation=g,
            temperature=1.0,
        )
        for b, task, g in where
    ]


def suite() -> dict:
    "Four scenarios (page has no rollouts, so that a gap is tested), every phase, every outcome."
    records = [
        broken(
            load_tasks("cross")[0], outcome, phase="before", batch=None, epoch=None, generation=2 + i, temperature=0.7
        )
        for i, outcome in enumerate(("malformed", "truncated"))
    ]
    for scenario, scripts in BEFORE.items():
        records += train_records(scenario)
        for split in ("train", "held_out"):
            records += phase_records(scenario, split, "before", scripts)
            records += phase_records(scenario, split, "after", AFTER[scenario])
    return {
        "schema": SCHEMA,
        "manifest": {"note": "scripted by tests/fake_rollouts.py; no model made these"},
        "suite": {},
        "rollouts": records,
    }


def write_suite(path: Path) -> Path:
    "The fake rollouts file."
    write_json(path, json.loads(json.dumps(suite())), indent=None)
    return path
