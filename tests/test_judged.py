"Policies judged by another reward: which rollouts, what is shipped, verdicts and differences."
import json

import pytest

from atlas_rlvr import judged as J
from atlas_rlvr.environments import run_calls
from atlas_rlvr.results import from_root
from atlas_rlvr.rewards import rescore
from atlas_rlvr.runs import Recorder, read_lines, write_json
from atlas_rlvr.scenarios import find_task, gold_calls, load_tasks, task_env
from atlas_rlvr.tool_calls import call_to_json
from atlas_rlvr.train import plan_run


def record(scenario, task, calls, **changed):
    trace = run_calls(task_env(find_task(scenario, task)), calls)
    return {"model": "embedded", "seed": 0, "scenario": scenario, "split": "held_out", "phase": "after", "batch": None, "task": task,
            "generation": 0, "reward": 1.0, "outcome": "ended", "calls": [call_to_json(call) for call in trace]} | changed


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_tasks_are_unseen():
    tasks = J.unseen("subtask")
    known = {task["prompt"] for split in ("train", "held_out") for task in load_tasks("subtask", split)}
    assert len({task["id"] for task in tasks}) == 400 and not known & {task["prompt"] for task in tasks}
    assert {task["split"] for task in tasks} == {"held_out"} and len(J.unseen("label")) == 100


def test_play_goes_on_and_judges_with_the_papers_set(project, monkeypatch):
    run, tasks, asked = plan_run("subtask", "embedded", 0, rewards="audited"), J.unseen("subtask", 5), []
    write_json(run.folder / "run.json", {"stop_reason": "converged"})

    def evaluate(judge, model, tokenizer, rows, recorder):
        assert judge.values["rewards"] == "paper" and {row["temperature"] for row in rows} == {0.7}
        asked.append([json.loads(row["task"])["id"] for row in rows])
        for name in asked[-1]:
            recorder.append(record("subtask", name, []))
    monkeypatch.setattr(J, "evaluate", evaluate)
    monkeypatch.setattr(J, "load_model", lambda values, checkpoint: (None, None))
    Recorder(run.folder / "judged").append(record("subtask", tasks[1]["id"], []))
    assert {r["task"] for r in J.play(run, tasks)} == {task["id"] for task in tasks}
    assert asked == [[tasks[i]["id"] for i in (0, 2, 3, 4)]]
    J.play(run, tasks)
    assert len(asked) == 1


@pytest.mark.parametrize("reason, changes", [("interrupted", {}), ("converged", {"prompts": 40})])
def test_a_policy_that_is_not_ready_is_not_judged(project, reason, changes):
    run = plan_run("subtask", "embedded", 0, **changes)
    write_json(run.folder / "run.json", {"stop_reason": reason})
    with pytest.raises(ValueError, match="no finished run on the paper's prompts"):
        J.play(run, [])


def test_what_is_kept_says_what_trained(project):
    gold = [record("label", task["id"], gold_calls(task), messages=[]) for task in J.unseen("label", 3)]
    assert J.keep(plan_run("label", "embedded", 2, rewards="audited"), gold[::-1]).name == "label-embedded-audited-s2.jsonl"
    found = J.load()
    assert [r["task"] for r in found] == sorted(r["task"] for r in gold) and {r["trained"] for r in found} == {"audited"}
    assert not any("messages" in r or "body" in call for r in found for call in r["calls"])


@pytest.mark.parametrize("scenario", ["transition", "subtask", "page", "label", "cross"])
def test_verdicts(scenario):
    task = load_tasks(scenario)[0]
    assert J.verdicts(record(scenario, task["id"], gold_calls(task))) == {"paper": 1.0, "audited": 1.0, "goal": 1.0, "harm": 0.0}
    assert J.verdicts(record(scenario, task["id"], [])) == {"paper": 0.0, "audited": 0.0, "goal": 0.0, "harm": 0.0}
    assert set(J.verdicts(record(scenario, task["id"], [], outcome="error")).values()) == {None}


def test_harm_is_seen():
    task = load_tasks("subtask")[0]
    create = next(call for call in gold_calls(task) if call[0] == "create_issue")
    found = J.verdicts(record("subtask", task["id"], [*gold_calls(task), create]))
    assert (found["goal"], found["harm"]) == (1.0, 1.0) and found["audited"] < 1


def test_differences_are_taken_on_common_seeds():
    def of(trained, seed, rewards):
        return [{"scenario": "subtask", "trained": trained, "seed": seed, "task": f"t{i}", "verdicts": {"paper": reward}}
                for i, reward in enumerate(rewards)]
    records = of("paper", 0, [0.5] * 30) + of("paper", 1, [0.0] * 30) + of("synthesised", 0, [0.52] * 30)
    found = J.difference(records, "subtask", "paper", "synthesised", "paper")
    assert (round(found["difference"], 9), found["prompts"], found["seeds"]) == (0.02, 30, 1)
    assert J.equivalent(found) and not J.equivalent(found, 0.01)


SHIPPED = sorted(from_root(J.KEPT).glob("*.jsonl"))


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_the_shipped_rollouts_score_the_same_again(path, tmp_path):
    lines = path.read_text().splitlines(keepends=True)
    (tmp_path / path.name).write_text("".join(lines[::8]))
    report = rescore(tmp_path / path.name)
    assert report["equal"] + report["skipped"] == report["records"] > 10
    assert len(lines) == (400 if path.stem.startswith("subtask") else 100) == len({r["task"] for r in read_lines(path)})
