"The ladder: what is shipped, names and prices of rungs, claims, the three sentences, the figure, a row for another model."
import json

import pytest

from atlas_rlvr import ladder as L
from atlas_rlvr.environments import run_calls
from atlas_rlvr.results import from_root
from atlas_rlvr.rewards import rescore
from atlas_rlvr.runs import read_lines, read_run, write_json
from atlas_rlvr.scenarios import gold_calls, load_tasks, task_env
from atlas_rlvr.supervised import RUNGS
from atlas_rlvr.tool_calls import call_to_json


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(reward, task, generation=0, phase="after", **other):
    trace = run_calls(task_env(task), gold_calls(task)) if reward else []
    return {"scenario": "subtask", "model": "embedded", "seed": 0, "split": task["split"], "phase": phase, "batch": None, "epoch": None,
            "task": task["id"], "generation": generation, "reward": reward, "raw": reward, "components": {}, "outcome": "ended",
            "calls": [call_to_json(call) for call in trace], "messages": [{"role": "user", "content": "x"}], "tokens": 7} | other


def a_run(project, variant, after, before=None, start="", seed=0, minutes=2.0, used=1000):
    "A finished run's folder: every rollout of a phase earns the same."
    folder = project / "results/runs/subtask" / "-".join(["embedded", *variant.split(), f"s{seed}"])
    tasks = [task for split in ("train", "held_out") for task in load_tasks("subtask", split)[:4]]
    phases = {"before": before, "after": after}
    rows = [record(reward, task, n, phase, seed=seed)
            for phase, reward in phases.items() if reward is not None for task in tasks for n in range(2)]
    folder.mkdir(parents=True)
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.csv").write_text("batch\n1\n")
    write_json(folder / "run.json", {"scenario": "subtask", "model": "embedded", "seed": seed, "stop_reason": "budget",
                                     "variant": variant, "minutes": minutes, "tokens": {"used": used}, "config": {"start": start}})
    return folder


# Shipping


def test_a_run_is_shipped_without_messages_and_with_its_evaluations_alone(project):
    folder = a_run(project, "t100", 1.0, 0.0)
    with open(folder / "rollouts.jsonl", "a") as file:
        file.write(json.dumps(record(1.0, load_tasks("subtask")[0], phase="train", batch=1)) + "\n")
    target = L.ship(folder)
    rows = read_lines(target / "rollouts.jsonl")
    assert target.relative_to(project).as_posix() == "results/ladder/subtask/embedded-t100-s0" and len(rows) == 32
    assert {row["phase"] for row in rows} == {"before", "after"} and not any({"messages", "batch", "rung"} & row.keys() for row in rows)
    assert (target / "rewards.csv").read_text() == "batch\n1\n" and L.shipped() == [target]


def test_rollouts_of_the_prompted_policy_are_shipped_once(project):
    first, second = (L.ship(a_run(project, variant, 1.0, 0.0)) for variant in ("t100", "sft-gold t100"))
    assert [len(read_lines(path / "rollouts.jsonl")) for path in (first, second)] == [32, 16]
    again = {path: (path / "rollouts.jsonl").read_bytes() for path in (first, second)}
    for path in (first, second):
        L.ship(project / "results/runs/subtask" / path.name)
        assert (path / "rollouts.jsonl").read_bytes() == again[path]


@pytest.mark.parametrize("content", [None, {"stop_reason": "interrupted"}])
def test_an_unfinished_run_is_not_shipped(project, content):
    folder = project / "results/runs/subtask/embedded-t100-s0"
    if content:
        write_json(folder / "run.json", content)
    with pytest.raises(ValueError, match="holds no finished run; finish it with the command that began it"):
        L.ship(folder)
    assert not (project / "results/ladder").exists()


# Names and prices


def test_the_minutes_of_the_start_belong_to_the_price(project):
    a_run(project, "sft-gold t50", 1.0, 0.0, minutes=3.0)
    own = a_run(project, "from-sft-gold-t50 t100", 1.0, start="sft-gold-t50", minutes=2.5, used=900)
    shipped = L.ship(own)
    assert [L.cost(path) for path in (own, shipped)] == 2 * [{"tokens": 900, "minutes": 5.5}]
    assert L.costs(shipped) == {("subtask", "embedded", "SFT gold + GRPO"): {"tokens": 900, "minutes": 5.5}}


def test_costs_are_means_over_seeds(project):
    runs = [a_run(project, "t100", 1.0, seed=seed, minutes=minutes) for seed, minutes in enumerate((1.0, 2.0, 6.0))]
    assert L.costs(*runs) == {("subtask", "embedded", "GRPO"): {"tokens": 1000, "minutes": 3.0}}


def test_two_budgets_of_a_rung_are_refused(project):
    runs = [a_run(project, f"t{budget}", 1.0) for budget in (100, 200)]
    with pytest.raises(ValueError, match="two budgets of the rung `GRPO` in subtask"):
        L.rungs(*runs)


def test_the_table(project):
    rows = L.table(a_run(project, "t100", 1.0, 0.0), a_run(project, "sft-gold t100", 1.0))
    held = {row["rung"]: row for row in rows if row["split"] == "held_out"}
    assert [held[name]["mean"] for name in ("prompted", "GRPO", "SFT gold")] == [0.0, 1.0, 1.0]
    assert [held[name]["tokens"] for name in ("prompted", "GRPO", "SFT gold")] == [0, 1000, 1000]
    assert held["GRPO"]["mark"] == "†" and held["GRPO"]["pass^2"] == 1.0 and held["GRPO"]["pass^3"] is None


def test_a_run_on_other_prompts_is_not_in_the_main_table():
    names = ("prompted", "prompted p40", "GRPO", "GRPO p40", "SFT gold + GRPO", "prompted, react")
    assert [row["rung"] for row in L.main([{"rung": name} for name in names])] == [names[0], names[2], names[4], names[5]]


# Claims


def claim(one, other, difference, claimed=True, scenario="subtask"):
    return {"scenario": scenario, "one": one, "other": other, "difference": difference, "claimed": claimed}


def test_all_comparisons_are_one_family(project):
    runs = [a_run(project, "t100", 1.0, 0.0), a_run(project, "sft-gold t100", 1.0)]
    found = L.comparisons(L.rungs(*runs))
    assert [(line["one"], line["other"], line["difference"]) for line in found] == [
        ("prompted", "GRPO", 1.0), ("prompted", "SFT gold", 1.0), ("SFT gold", "GRPO", 0.0)]
    assert [line["p"] for line in found] == [0.375, 0.375, 1.0]  # 2/16 three times, of four prompts
    assert not any(line["claimed"] for line in found)


def test_the_answer_counts_what_is_claimed_and_nothing_else():
    found = [claim("prompted", "GRPO", 0.5), claim("prompted", "GRPO", 0.1, False, "page"), claim("SFT gold", "GRPO", -0.2),
             claim("SFT gold", "GRPO", 0.3, True, "page"), claim("SFT gold", "SFT gold + GRPO", 0.01, False)]
    first, second, third = L.answer(found)
    assert "in 1 of 2 scenarios (subtask)" in first
    assert "in 1 of 2 scenarios (page), and below it in 1 (subtask)" in second
    assert "in 0 of 1 scenarios (none), and below it in 0 (none)" in third


# A row for another model


def test_the_names_of_all_rungs_are_known():
    assert set(L.LABELS) == set(RUNGS)


def test_what_is_there_is_not_run_again(project, monkeypatch):
    L.ship(a_run(project, "t100", 1.0, 0.0))
    asked = []

    def climb(scenario, name, model, seed):
        asked.append((scenario, name, model, seed))
        return {"variant": "sft-gold t100"}
    monkeypatch.setattr("atlas_rlvr.supervised.climb", climb)
    made = L.fill("subtask", "embedded", 0, "grpo sft-gold")
    assert asked == [("subtask", "sft-gold", "embedded", 0)] and [path.name for path in made] == ["embedded-sft-gold-t100-s0"]


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:1/v1"])
def test_a_model_without_a_recipe_is_only_asked(project, monkeypatch, endpoint):
    asked = []
    monkeypatch.setattr("atlas_rlvr.baselines.run_baseline", lambda *given: asked.append(given))
    monkeypatch.setattr("atlas_rlvr.baselines.run_endpoint", lambda connection, *given: asked.append((*given, "remote")))
    [folder] = L.fill("page", "maker/model", 3, "grpo", endpoint)
    rest = ("remote",) if endpoint else ()
    head = ("page",) if endpoint else ("page", "maker/model")
    assert asked == [(*head, 3, split, 8, *rest) for split in ("train", "held_out")]
    assert folder.name == "maker%2Fmodel-s3"


@pytest.mark.parametrize("wanted, message", [
    ("grpo sft", "unknown rung `sft`"), ("", "names no rung"), ("sft-gold-grpo", None)])
def test_the_pages_parameters_are_checked_first(wanted, message):
    values = {"scenario": "subtask", "model": "embedded", "seed": 0, "wanted": wanted, "endpoint": ""}
    if message is None:
        return L.check_parameters(values)
    with pytest.raises(ValueError, match=message):
        L.check_parameters(values)


# What is shipped here


SHIPPED = L.shipped(from_root("results/ladder"))


def test_the_ladder_is_shipped():
    assert len(SHIPPED) >= 2


@pytest.mark.parametrize("folder", SHIPPED, ids=[path.name for path in SHIPPED])
def test_shipped_rollouts_score_equal_and_their_run_adds_up(folder):
    report, run = rescore(folder / "rollouts.jsonl"), read_run(folder)
    assert report["records"] and not report["differences"] and not report["skipped"]
    records = [r for r in read_lines(folder / "rollouts.jsonl") if r["phase"] == "after"]
    for split in ("train", "held_out"):
        means = {}
        for r in records:
            if r["split"] == split:
                means.setdefault(r["task"], []).append(r["reward"])
        assert round(sum(sum(v) / len(v) for v in means.values()) / len(means), 4) == pytest.approx(run[split]["after"]["mean"], abs=1e-4)
    assert run["stop_reason"] == "budget" and run["tokens"]["used"] >= run["tokens"]["budget"]
    assert str(from_root(".")) not in json.dumps(run)


def test_the_figure_shows_what_is_shipped():
    assert L.plotted(L.table(*SHIPPED)) == from_root("figures/ladder.csv").read_text()
