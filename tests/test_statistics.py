"Statistics: both means, intervals and their coverage, pass^k, failure modes, paired tests, and what may be said."
import json
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from conftest import ROOT

from atlas_rlvr import statistics as S
from atlas_rlvr.environments import transcript
from atlas_rlvr.runs import run_folder, write_json
from atlas_rlvr.scenarios import SCENARIOS, STEPS, find_task, gold_calls, load_tasks, more_tasks, task_env
from atlas_rlvr.tool_calls import build_trace, call_to_json


def record(reward, task="subtask-01", generation=0, seed=0, **other):
    return {"scenario": "subtask", "model": "m", "rung": "GRPO", "split": "train", "phase": "after", "task": task, "seed": seed,
            "generation": generation, "reward": reward, "outcome": "ended", "calls": [], "batch": None} | other


def series(rewards_of, **other):
    "{task: rewards} → records."
    return [record(r, task, i, **other) for task, rewards in rewards_of.items() for i, r in enumerate(rewards)]


# Means


@pytest.mark.parametrize("rewards, mean, strict, errors", [
    ([1.0, 0.5], 0.75, 0.75, 0), ([1.0, None], 1.0, 0.5, 1), ([None, None], None, 0.0, 2), ([0.0, None, 0.0, 0.0], 0.0, 0.0, 1)])
def test_an_error_is_no_zero_except_in_the_strict_mean(rewards, mean, strict, errors):
    row = S.row(series({"subtask-01": rewards}))
    assert (row["mean"], row["strict"], row["errors"], row["rollouts"]) == (mean, strict, errors, len(rewards) - errors)


def test_prompts_weigh_alike():
    assert S.row(series({"a": [1.0] * 9, "b": [0.0]}))["mean"] == 0.5


def test_an_empty_series_has_no_numbers():
    row = S.row([])
    assert (row["mean"], row["low"], row["strict_high"], row["rollouts"]) == (None, None, None, 0)


@pytest.mark.parametrize("seeds, mark", [(1, S.MARK), (3, "")])
def test_one_seed_is_marked(seeds, mark):
    rows = [r for seed in range(seeds) for r in series({"a": [0.1, 0.9], "b": [0.5, 0.5]}, seed=seed)]
    assert (S.row(rows)["seeds"], S.row(rows)["mark"]) == (seeds, mark)


# Intervals


def test_an_interval_is_the_same_twice_and_holds_the_mean():
    found = S.cells(series({f"t{i}": [i / 10, 1 - i / 20] for i in range(8)}))
    low, high = S.interval(found)
    assert (low, high) == S.interval(found) and low < S.mean(found) < high


def test_rollouts_are_drawn_within_prompts():
    draws = S.bootstrap({(0, "a"): [0.0, 1.0]})
    assert set(np.unique(draws)) == {0.0, 0.5, 1.0}
    assert np.mean(draws == 0.5) == pytest.approx(0.5, abs=0.05)


def test_prompts_are_drawn():
    draws = S.bootstrap({(0, "a"): [0.0] * 5, (0, "b"): [1.0] * 5})
    assert np.mean(draws == 0.5) == pytest.approx(0.5, abs=0.05) and set(np.unique(draws)) == {0.0, 0.5, 1.0}


def test_seeds_are_drawn():
    draws = S.bootstrap({(0, "a"): [0.0], (1, "a"): [1.0]})
    assert set(np.unique(draws)) == {0.0, 0.5, 1.0}


def test_a_prompt_that_one_seed_lacks_is_no_zero():
    found = {(0, "a"): [1.0], (0, "b"): [1.0], (1, "a"): [1.0]}
    assert S.mean(found) == 1.0 and (S.bootstrap(found) == 1.0)[S.bootstrap(found) > 0].all()


@pytest.mark.parametrize("prompts, rollouts", [(6, 5), (12, 5), (40, 1), (40, 8)])
def test_the_interval_covers(prompts, rollouts):
    "Of 200 made-up suites, at least 90 % of the 95 % intervals hold the truth."
    rng, hits = np.random.default_rng(1), 0
    for _ in range(200):
        chances = rng.beta(2, 1, size=prompts)  # mean 2/3
        found = {(0, f"t{i}"): list((rng.random(rollouts) < chance).astype(float)) for i, chance in enumerate(chances)}
        low, high = np.quantile(S.bootstrap(found, draws=400), (0.025, 0.975))
        hits += low <= 2 / 3 <= high
    assert 180 <= hits < 200


# pass^k


@pytest.mark.parametrize("n, c", [(1, 1), (5, 3), (8, 8), (8, 0), (8, 5), (12, 11)])
def test_pass_k_is_the_share_of_subsets(n, c):
    rewards = [1.0] * c + [0.95] * (n - c)
    for k in range(1, 9):
        subsets = list(combinations(rewards, k))
        expected = fmean(all(r == 1 for r in subset) for subset in subsets) if subsets else None
        assert S.pass_k(rewards, k) == (pytest.approx(expected) if subsets else None)


def test_pass_k_is_unbiased():
    rng = np.random.default_rng(0)
    for k in (1, 3, 8):
        found = [S.pass_k(list((rng.random(10) < 0.8).astype(float)), k) for _ in range(4000)]
        assert fmean(found) == pytest.approx(0.8 ** k, abs=0.015)


def test_pass_k_rests_on_the_prompts_that_reach_k():
    rows = series({"a": [1.0] * 8, "b": [1.0, 0.0]})
    assert [(S.pass_row(rows, k)["pass"], S.pass_row(rows, k)["prompts"]) for k in (1, 2, 3, 8)] == [
        (0.75, 2), (0.5, 2), (1.0, 1), (1.0, 1)]
    assert S.pass_row(rows, 9)["pass"] is None


def test_pass_k_is_averaged_over_seeds_not_pooled():
    rows = series({"a": [1.0, 1.0]}) + series({"a": [0.0, 0.0]}, seed=1)
    assert S.pass_row(rows, 2)["pass"] == 0.5  # pooled, it would be 1/6


# Failure modes


def played(task, turns, **other):
    calls = build_trace(transcript(task_env(task), turns))
    return record(0.5, task["id"], calls=[call_to_json(call) for call in calls], scenario=task["scenario"], **other)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gold_has_no_failure_mode(scenario):
    for task in [*load_tasks(scenario), *load_tasks(scenario, "held_out")[:5], *more_tasks(scenario, 3)]:
        assert S.modes(played(task, gold_calls(task))) == set()


def bent(scenario, path, value, at=0):
    task = load_tasks(scenario)[0]
    reads, writes, _ = STEPS[scenario](task["gold"])
    calls = json.loads(json.dumps(writes))
    place = calls[at][1]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return played(task, reads + [tuple(call) for call in calls])


@pytest.mark.parametrize("scenario, path, value, at", [
    ("subtask", ("fields", "parent", "key"), "XYZ-456", 0), ("subtask", ("fields", "assignee", "accountId"), "nobody", 0),
    ("subtask", ("fields", "summary"), "Something else", 0), ("page", ("parentId",), "100", 0), ("page", ("spaceId",), "ENG", 0),
    ("label", ("page_id",), "10002", 0), ("label", ("labels",), ["onboarding", "not-gold"], 0),
    ("transition", ("transition", "id"), "11", 0), ("cross", ("fields", "parent", "key"), "XYZ-456", 0), ("cross", ("parentId",), "100", 1)])
def test_a_wrong_entity(scenario, path, value, at):
    assert "wrong_entity" in S.modes(bent(scenario, path, value, at))


@pytest.mark.parametrize("scenario, path, value, mode", [
    ("subtask", ("fields", "parent"), "ABC-123", "wrong_shape"), ("page", ("body",), "text", "wrong_shape"),
    ("label", ("labels",), "a, b", "wrong_shape")])
def test_a_wrong_shape_is_no_wrong_entity(scenario, path, value, mode):
    assert S.modes(bent(scenario, path, value)) == {mode}


def test_an_integer_transition_id_is_the_same_entity():
    task = load_tasks("transition")[0]
    assert "wrong_entity" not in S.modes(bent("transition", ("transition", "id"), task["gold"]["transition_id"]))


def test_some_labels_are_no_wrong_entity():
    assert "wrong_entity" not in S.modes(bent("label", ("labels",), load_tasks("label")[0]["gold"]["labels"][:2]))


@pytest.mark.parametrize("outcome", ["malformed", "truncated", "turn_cap"])
def test_outcomes_are_modes(outcome):
    assert outcome in S.modes(record(0.0, outcome=outcome))


def test_the_named_modes_are_all_there():
    row = S.mode_row([record(0.0), record(0.5, calls=played(load_tasks("subtask")[0], gold_calls(load_tasks("subtask")[0]))["calls"]),
                      record(None, outcome="error")])
    wanted = {"early stop", "wrong nested shape", "dropped field", "duplicate", "hallucinated tool", "malformed call", "turn cap", "wrong entity"}
    assert wanted < set(row) and (row["rollouts"], row["early stop"], row["none of these"]) == (2, 0.5, 0.5)


# Paired tests


def test_a_sign_flip_test_by_hand():
    assert S.sign_flips(np.array([1.0, 1.0, 1.0])) == 2 / 8
    assert S.sign_flips(np.array([0.5, -0.5])) == 1.0
    assert S.sign_flips(np.zeros(40)) == 1.0 and S.sign_flips(np.full(40, 0.1)) < 0.001


def test_false_claims_are_rare():
    "Two rungs that are alike: at most 12 of 150 comparisons claim a difference (5 % would be 7.5)."
    rng, claimed = np.random.default_rng(3), 0
    for _ in range(150):
        chance = rng.random(20)
        one, other = (series({f"t{i}": list((rng.random(4) < p).astype(float)) for i, p in enumerate(chance)}) for _ in range(2))
        claimed += S.supported(S.compare(one, other))
    assert claimed <= 12


def test_a_real_difference_is_found():
    one = series({f"t{i}": [0.0, 0.5, 1.0, 0.5] for i in range(20)})
    other = series({f"t{i}": [1.0, 1.0, 0.9, 1.0] for i in range(20)})
    found = S.compare(one, other)
    assert S.supported(found) and found["difference"] == pytest.approx(0.475)
    assert "GRPO is higher than prompted: +0.475" in S.sentence("prompted", "GRPO", found)
    assert "prompted is lower than GRPO: -0.475" in S.sentence("GRPO", "prompted", S.compare(other, one))


def test_pairing_removes_what_makes_a_prompt_hard():
    level = {f"t{i}": i / 20 for i in range(20)}
    one, other = series({t: [v] * 4 for t, v in level.items()}), series({t: [v + 0.04] * 4 for t, v in level.items()})
    (low, _), (_, high) = S.interval(S.cells(other)), S.interval(S.cells(one))
    assert low < high and S.supported(S.compare(one, other))


def test_only_common_prompts_are_compared():
    found = S.compare(series({"a": [0.0], "b": [0.0]}), series({"b": [1.0], "c": [0.0]}))
    assert (found["prompts"], found["difference"]) == (1, 1.0)
    with pytest.raises(ValueError, match="no scored prompt in common"):
        S.compare(series({"a": [0.0]}), series({"b": [0.0]}))


@pytest.mark.parametrize("low, high, p, claimed", [
    (0.1, 0.3, 0.01, True), (-0.3, -0.1, 0.01, True), (-0.01, 0.3, 0.01, False), (0.0, 0.3, 0.01, False), (0.1, 0.3, 0.05, False),
    (0.0, 0.0, 1.0, False)])
def test_no_sentence_claims_what_the_interval_does_not_hold(low, high, p, claimed):
    found = {"difference": (low + high) / 2, "low": low, "high": high, "p": p, "prompts": 8, "seeds": 3}
    assert S.supported(found) is claimed
    text = S.sentence("A", "B", found)
    assert text.startswith("No difference between A and B is claimed") is not claimed
    assert ("higher" in text or "lower" in text) is claimed
    assert "3 seeds" in text and "another training" not in text
    assert "another training" in S.sentence("A", "B", found | {"seeds": 1})


def test_holm():
    assert S.holm([]) == [] and S.holm([0.03]) == [0.03]
    assert S.holm([0.04, 0.01, 0.5]) == [0.08, 0.03, 0.5]
    assert max(S.holm([0.9, 0.8, 0.7])) == 1.0


def test_a_family_is_corrected():
    rows = []
    for scenario in ("subtask", "page"):
        for name, reward in (("prompted", 0.0), ("GRPO", 1.0)):
            rows += series({f"{scenario}-{i}": [reward] for i in range(6)}, scenario=scenario, rung=name,
                           phase="before" if name == "prompted" else "after")
    assert [round(line["p"], 4) for line in S.claims(rows, "prompted", "GRPO")] == [0.0625, 0.0625]
    assert all("No difference" in line["sentence"] for line in S.claims(rows, "prompted", "GRPO"))


# Files and folders


@pytest.mark.parametrize("variant, phase, name", [
    ("", "after", "GRPO"), ("", "before", "prompted"), ("audited", "after", "GRPO audited"), ("sft-gold t9", "before", "prompted"),
    ("sft-gold t9 lr1", "after", "SFT gold t9 lr1"), ("from-sft-own-t4 t9", "after", "SFT own t4 + GRPO t9"), ("p40", "after", "GRPO p40"),
    ("p40 t9", "before", "prompted p40")])
def test_names_of_rungs(variant, phase, name):
    assert S.rung(variant, phase) == name


@pytest.fixture
def runs(tmp_path, monkeypatch):
    "Three finished runs: GRPO, imitation, GRPO from it."
    (tmp_path / "settings.ini").write_text("")
    monkeypatch.chdir(tmp_path)
    folders = []
    for variant, after, tokens in (("", 0.5, 300), ("sft-gold t150", 0.7, 150), ("from-sft-gold-t150 t300", 1.0, 310)):
        folder = run_folder("subtask", "m", 0, variant=variant)
        folder.mkdir(parents=True)
        lines = [record(reward, f"subtask-0{i}", phase=phase) for phase, reward in (("before", 0.1), ("train", 0.3), ("after", after))
                 for i in range(1, 5)]
        (folder / "rollouts.jsonl").write_text("".join(json.dumps({k: v for k, v in line.items() if k != "rung"}) + "\n" for line in lines))
        write_json(folder / "run.json", {"scenario": "subtask", "model": "m", "seed": 0, "variant": variant, "minutes": 2.0,
                                         "tokens": {"used": tokens},
                                         "config": {"start": "sft-gold-t150" if variant.startswith("from-") else ""}})
        folders.append(folder)
    return folders


def test_a_runs_file_is_as_good_as_its_folder(runs):
    assert S.load(runs[1] / "rollouts.jsonl") == S.load(runs[1])


def test_training_rollouts_are_no_evaluation(runs):
    assert {r["phase"] for r in S.load(runs[0])} == {"before", "train", "after"}
    assert {key["rung"] for key in S.keys(S.load(runs[0]))} == {"prompted", "GRPO"}


@pytest.fixture(scope="module")
def shipped():
    return S.load(ROOT / "results/atlassian_rollouts.json")


def test_shipped_means_are_those_of_the_results_page(shipped):
    from atlas_rlvr.results import summarise
    for key in S.keys(shipped):
        own = [r for r in S.evaluations(shipped) if all(r[name] == value for name, value in key.items())]
        if len({r["seed"] for r in own}) == 1:
            assert S.row(own)["mean"] == pytest.approx(summarise(own)["mean"])
        low, high = S.row(own)["low"], S.row(own)["high"]
        assert 0 <= low <= S.row(own)["mean"] + 1e-9 and S.row(own)["mean"] - 1e-9 <= high <= 1


def test_shipped_rollouts_fill_every_row(shipped):
    rows = S.table(shipped)
    assert {(row["scenario"], row["split"]) for row in rows} == {(s, split) for s in SCENARIOS for split in ("train", "held_out")}
    for row in rows:
        known = [row[f"pass^{k}"] for k in S.KS if row[f"pass^{k}"] is not None]
        assert known == sorted(known, reverse=True) and len(known) >= (5 if row["split"] == "train" else 1)


def test_tasks_of_generated_prompts_have_modes():
    task = more_tasks("cross", 12)[-1]
    assert find_task("cross", task["id"]) == task and S.modes(played(task, gold_calls(task)[:2])) == {"early_stop"}


def test_rungs_on_other_training_prompts_are_compared_where_they_can_be(tmp_path):
    rows = [record(reward, f"{split}-{i}", split=split, rung=name, phase="after") for name, reward, split in (
        ("GRPO", 0.2, "train"), ("GRPO", 0.2, "held_out"), ("GRPO p40", 0.9, "held_out")) for i in range(9)]
    rows += [record(0.9, f"other-{i}", split="train", rung="GRPO p40", phase="after") for i in range(9)]
    assert [(line["split"], line["prompts"]) for line in S.claims(rows, "GRPO", "GRPO p40")] == [("held_out", 9)]


def test_rollouts_of_one_name_that_differ_are_refused(runs):
    twin = runs[0].with_name("m-lost-s0")
    twin.mkdir()
    text = (runs[0] / "rollouts.jsonl").read_text()
    (twin / "rollouts.jsonl").write_text(text)
    assert len(S.load(runs[0], twin)) == len(S.load(runs[0]))
    (twin / "rollouts.jsonl").write_text(text.replace('"reward": 0.1', '"reward": 0.9'))
    with pytest.raises(ValueError, match="rung `prompted` that differ .* load runs under other rewards or faults apart"):
        S.load(runs[0], twin)
