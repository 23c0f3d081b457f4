"Every measured number of the README's tables is computed again from the shipped files."
import csv
import json
import re
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from atlas_rlvr.display import short
from atlas_rlvr.final_state import final_state, goal_reached
from atlas_rlvr.rewards import replay
from atlas_rlvr.scenarios import find_task
from atlas_rlvr.statistics import holm, sign_flips
from atlas_rlvr.train import minutes_to_goal, recipe

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHIPPED = json.loads((ROOT / "results/atlassian_rollouts.json").read_text(encoding="utf-8"))
SUITE = SHIPPED["suite"]["runs"]
SEEDS = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "results/seeds").glob("*.json"))]


def rows(heading):
    "First cell → cells of the table that begins with a heading's first words."
    table = README.split(f"| {heading}", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table]
    return {tuple(row[:1]): row for row in cells} if heading.startswith("`") else cells


def lift(run, split):
    return f"{short(run[split]['before']['mean'])} → {short(run[split]['after']['mean'])}"


def reached(scenario, phase):
    "(rollouts that reach the goal, rollouts) of the held-out tasks."
    ends = [goal_reached(task, final_state(task, replay(record))) for record in SHIPPED["rollouts"]
            if (record["scenario"], record["split"], record["phase"]) == (scenario, "held_out", phase)
            for task in [find_task(scenario, record["task"])]]
    return sum(ends), len(ends)


@pytest.mark.parametrize("run", SUITE, ids=[run["scenario"] for run in SUITE])
def test_the_table_of_scenarios(run):
    row = rows("`-p scenario`")[f"`{run['scenario']}`",]
    (before, n), (after, _) = reached(run["scenario"], "before"), reached(run["scenario"], "after")
    assert row[2:] == [lift(run, "train"), lift(run, "held_out"), f"{before} → {after} of {n}", f"{run['minutes_to_095']:.1f} min",
                       f"`{run['stop_reason']}` after {run['batches']} batches, {run['minutes']:.0f} min"]


@pytest.mark.parametrize("split, file, columns", [("train", "results", ("Ours: prompted", "Ours: trained")),
                                                  ("held_out", "held_out", ("Prompted", "Trained"))], ids=["train", "held_out"])
def test_the_tables_of_the_paper_print_the_same_means(split, file, columns):
    with open(ROOT / "paper/tables" / f"{file}.csv", encoding="utf-8", newline="") as table:
        printed = {row["Scenario"].rstrip("*"): " → ".join(row[name].split(" ")[0] for name in columns) for row in csv.DictReader(table)}
    assert printed == {run["scenario"]: lift(run, split) for run in SUITE}


@pytest.mark.parametrize("run", SEEDS, ids=[f"{run['scenario']}-{run['seed']}" for run in SEEDS])
def test_the_table_of_other_seeds(run):
    batches, per_epoch = run["batches_seen"], run["config"]["batches_per_epoch"]
    minutes = minutes_to_goal(batches, per_epoch)
    assert minutes == run["minutes_to_095"] and len(batches) == run["batches"]
    assert round(sum(row["seconds"] for row in batches) / 60, 2) == run["minutes"]
    row = next(row for row in rows("scenario, seed") if row[0] == f"`{run['scenario']}`, {run['seed']}")
    assert row[1:] == [lift(run, "train"), lift(run, "held_out"), f"{minutes:.1f} min",
                       f"`{run['stop_reason']}` after {run['batches']} batches, {run['minutes']:.0f} min"]


def test_the_medians_of_three_seeds():
    runs = {name: [run for run in SUITE + SEEDS if run["scenario"] == name] for name in ("subtask", "page", "label", "cross")}
    assert all(sorted(run["seed"] for run in own) == [0, 1, 2] for own in runs.values())
    goal, end = ([median(run[name] for run in own) for own in runs.values()] for name in ("minutes_to_095", "minutes"))
    a, b, c, d = (f"{minutes:.1f}" for minutes in goal)
    text = " ".join(README.split())
    assert f"took {a} min in `subtask`, {b} in `page`, {c} in `label` and {d} in `cross`" in text
    assert "the end came after {:.0f}, {:.0f}, {:.0f} and {:.0f} min".format(*end) in text


def test_what_six_prompts_cannot_carry():
    "The smallest p of six prompts, last of ten comparisons; and the scenarios that have no more."
    assert "claims none, however large the rise" in README
    least = sign_flips(np.ones(6))
    assert 0.03 < least < 0.035 and holm([0.001] * 8 + [least] * 2)[-1] == 2 * least > 0.05
    assert {run["scenario"] for run in SUITE if run["train"]["after"]["prompts"] < 8} == {"label", "transition"}
    assert {run["train"]["after"]["prompts"] for run in SUITE if run["scenario"] in ("label", "transition")} == {6}


def test_the_cap_of_batches_says_what_was_measured():
    setting = recipe("embedded")["max_batches"]
    converged = [run for run in SUITE + SEEDS if run["stop_reason"] == "converged"]
    assert setting.why.startswith("under an hour where it converges") and max(run["minutes"] for run in converged) < 60
    assert setting.value * max(run["minutes"] / run["batches"] for run in converged) > 60  # so the cap itself is more than an hour


def test_every_seed_has_a_row():
    assert len(rows("scenario, seed")) == len(SEEDS) >= 3


def test_the_notebooks_of_the_table_are_those_of_the_project():
    named = set(re.findall(r"`(\d\d[a-z]?_\w+)`", README.split("## Read", 1)[1].split("## Regenerate", 1)[0]))
    assert named == {path.stem for path in (ROOT / "nbs").glob("*.ipynb")}


def test_the_policy_that_asks():
    means = {}
    for model in ("embedded-asks", "embedded"):
        records = [json.loads(line) for line in (ROOT / f"results/dialogues/{model}.jsonl").read_text(encoding="utf-8").splitlines()]
        for scenario in ("subtask", "page"):
            own = [r for r in records if (r["scenario"], r["split"]) == (scenario, "held_out")]
            assert len({r["task"] for r in own}) == 40 and len(own) == 160
            means[model, scenario] = f"{sum(r['reward'] for r in own) / len(own):.2f}"
    a, b, c, d = means.values()
    text = " ".join(README.split())
    assert f"its reward is {a} in sub-tasks and {b} in pages; the shipped policy, which never asks, gets {c} and {d}." in text


def test_what_smollm2_reached():
    folder = ROOT / "results/ladder/subtask/smollm2-135m-sft-gold-p120-t40000-lr0.001-s0"
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    before, after = (run["held_out"][phase] for phase in ("before", "after"))
    text = " ".join(README.split())
    assert f"{run['tokens']['used']:,} tokens of imitation on {run['config']['prompts']} generated prompts" in text
    assert f"held-out reward from {before['mean']:.2f} to {after['mean']:.2f} in sub-tasks, {after['n']} rollouts" in text
    assert 25 < run["minutes"] < 35
