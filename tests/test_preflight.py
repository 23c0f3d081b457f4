"The forecast before training: exact shares, a stated bias, honest intervals, one warning for each way to learn nothing."
import random
from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from math import comb, prod, sqrt
from statistics import fmean, stdev

import pytest
from conftest import ROOT

from atlas_rlvr.preflight import (
    WEIGHTS,
    advantages,
    by_prompt,
    epochs_ahead,
    epochs_seen,
    equal_share,
    follows_calls,
    interval,
    loudness,
    pool_weight,
    pooled,
    preflight,
    prompted,
    silent,
    with_replacement,
    without_replacement,
)
from atlas_rlvr.results import load_rollouts, pick
from atlas_rlvr.runs import Recorder, read_rollouts
from atlas_rlvr.scenarios import SCENARIOS

SHIPPED = ROOT / "results" / "atlassian_rollouts.json"


def rollouts(scenario, *prompts, **fields):
    "Records of prompts, each a list of rewards."
    return [{"scenario": scenario, "model": "m", "seed": 0, "split": "train", "phase": "before", "batch": None,
             "task": f"t{number}", "generation": n, "reward": reward, "raw": reward} | fields
            for number, rewards in enumerate(prompts) for n, reward in enumerate(rewards)]


# Shares of equal groups


SAMPLES = [[0.0], [1.0, 1.0], [0.0, 0.5, 1.0], [0.0, 0.0, 0.0, 1.0], [0.9, 0.9, 0.9, 0.9, 0.0], [0.5] * 6, [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]]


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("rewards", SAMPLES, ids=str)
def test_without_replacement_counts_every_subset(rewards, group):
    groups = list(combinations(rewards, group))
    expected = fmean(len(set(one)) == 1 for one in groups) if groups else None
    assert without_replacement(Counter(rewards), group) == (pytest.approx(expected) if groups else None)


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("rewards", SAMPLES, ids=str)
def test_with_replacement_counts_every_draw(rewards, group):
    expected = fmean(len(set(one)) == 1 for one in product(rewards, repeat=group))
    assert with_replacement(Counter(rewards), group) == pytest.approx(expected)


def expected_value(estimator, chances, n, group):
    "Mean of an estimator over all samples of n rollouts with three possible rewards, exactly."
    total = Fraction(0)
    for a in range(n + 1):
        for b in range(n + 1 - a):
            counts = +Counter({0.0: a, 0.5: b, 1.0: n - a - b})
            ways = comb(n, a) * comb(n - a, b) * prod(p**k for p, k in zip(chances, (a, b, n - a - b)))
            total += ways * Fraction(estimator(counts, group))
    return total


CHANCES = [(Fraction(1, 3),) * 3, (Fraction(9, 10), Fraction(1, 10), Fraction(0)), (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)),
           (Fraction(1), Fraction(0), Fraction(0))]


@pytest.mark.parametrize("n, group", [(2, 2), (4, 2), (4, 4), (5, 4), (8, 4), (8, 8)])
@pytest.mark.parametrize("chances", CHANCES, ids=str)
def test_without_replacement_is_unbiased(chances, n, group):
    truth = sum(p**group for p in chances)
    assert float(expected_value(without_replacement, chances, n, group)) == pytest.approx(float(truth), abs=1e-12)


@pytest.mark.parametrize("n, group", [(4, 2), (5, 4), (5, 16), (8, 4), (16, 16)])
@pytest.mark.parametrize("chances", CHANCES[:3], ids=str)
def test_with_replacement_is_never_too_small(chances, n, group):
    truth = sum(p**group for p in chances)
    assert expected_value(with_replacement, chances, n, group) > truth


@pytest.mark.parametrize("shape", [(4.5, 0.5), (0.5, 0.5), (2, 2), (30, 10)], ids=str)
@pytest.mark.parametrize("group", [4, 16])
def test_the_urn_is_nearly_unbiased_where_draws_with_replacement_are_not(shape, group):
    "Sixty scenarios of eight prompts with five rollouts, whose true shares of ones are known."
    rng, plug_in, urn = random.Random(3), [], []
    for _ in range(60):
        ones = [rng.betavariate(*shape) for _ in range(8)]
        prompts = [Counter(float(rng.random() < p) for _ in range(5)) for p in ones]
        truth, pool, weight = fmean(p**group + (1 - p)**group for p in ones), pooled(prompts), pool_weight(prompts)
        plug_in.append(fmean(with_replacement(counts, group) for counts in prompts) - truth)
        urn.append(fmean(equal_share(counts, pool, weight, group) for counts in prompts) - truth)
    assert abs(fmean(urn)) < 0.06 < fmean(plug_in)
    assert fmean(map(abs, urn)) < fmean(map(abs, plug_in))


# The urn


@pytest.mark.parametrize("weight", [0.125, 1.0, 7.0])
@pytest.mark.parametrize("group", [2, 3, 5])
def test_the_closed_form_is_the_sequence_of_draws(weight, group):
    "Draw, put back with its like, draw again."
    counts, pool = Counter({0.0: 3, 1.0: 2}), {0.0: 0.5, 0.5: 0.25, 1.0: 0.25}
    shape = {reward: counts[reward] + weight * share for reward, share in pool.items()}
    expected = sum(prod((a + i) / (5 + weight + i) for i in range(group)) for a in shape.values())
    assert equal_share(counts, pool, weight, group) == pytest.approx(expected)


def test_without_a_pool_and_with_nothing_but_the_pool():
    counts, pool = Counter({0.0: 3, 1.0: 2}), {0.0: 0.5, 1.0: 0.5}
    assert equal_share(counts, pool, 1e9, 4) == pytest.approx(2 * 0.5**4)
    assert equal_share(Counter({1.0: 5}), {1.0: 1.0}, 1.0, 64) == pytest.approx(1.0)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_larger_groups_are_equal_less_often(weight):
    counts, pool = Counter({0.0: 4, 1.0: 1}), {0.0: 0.7, 1.0: 0.3}
    shares = [equal_share(counts, pool, weight, group) for group in (1, 2, 4, 8, 16, 32, 64)]
    assert shares[0] == pytest.approx(1.0) and shares == sorted(shares, reverse=True) and shares[-1] > 0


def test_the_weight_says_how_alike_prompts_are():
    alike, apart = [Counter({0.0: 3, 1.0: 2})] * 6, [Counter({0.0: 5}), Counter({1.0: 5})] * 3
    assert pool_weight(alike) == max(WEIGHTS) and pool_weight(apart) == min(WEIGHTS)


def test_simulated_epochs_agree_with_the_closed_form():
    prompts = by_prompt(rollouts("page", [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.0, 1.0]))
    exact = fmean(equal_share(counts, pooled(prompts), pool_weight(prompts), 4) for counts in prompts)
    ahead = epochs_ahead(prompts, 4, draws=2000)
    assert {len(epoch) for epoch in ahead} == {3} and {len(group) for epoch in ahead for group in epoch} == {4}
    assert fmean(map(silent, ahead)) == pytest.approx(exact, abs=0.04)


def true_epoch(rng, chances, group):
    return [rng.choices((0.0, 0.5, 1.0), own, k=group) for own in chances]


@pytest.mark.parametrize("group", [4, 16])
def test_intervals_hold_what_they_promise(group):
    "Scenarios whose true chances are known: five rollouts of eight prompts, then the first epoch."
    rng, inside, means = random.Random(1), [], []
    for trial in range(80):
        chances = [[rng.gammavariate(shape, 1) for shape in (1.0, 0.4, 0.8)] for _ in range(8)]
        prompts = [Counter(rewards) for rewards in true_epoch(rng, chances, 5)]
        ahead, epoch = epochs_ahead(prompts, group, draws=80, seed=trial), true_epoch(rng, chances, group)
        for found, value in ((inside, silent), (means, lambda groups: fmean(map(fmean, groups)))):
            low, high = interval([value(groups) for groups in ahead])
            found.append(low <= value(epoch) <= high)
    assert fmean(inside) >= 0.88 and fmean(means) >= 0.88, (fmean(inside), fmean(means))


# Advantages


GROUPS = [[0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.9, 0.95, 1.0, 0.15], [0.0] * 8 + [1.0] * 8]


@pytest.mark.parametrize("rewards", GROUPS, ids=str)
def test_advantages_are_those_of_grpo(rewards):
    "Centred; scaled by the deviation with n - 1 and 1e-4, as TRL does."
    centred = [reward - fmean(rewards) for reward in rewards]
    assert advantages(rewards, "none") == pytest.approx(centred)
    assert advantages(rewards) == pytest.approx([value / (stdev(rewards) + 1e-4) for value in centred])
    assert sum(advantages(rewards)) == pytest.approx(0, abs=1e-9)
    assert loudness(rewards, "group") <= sqrt((len(rewards) - 1) / len(rewards))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_equal_rewards_have_no_advantage(scale):
    assert advantages([0.9] * 4, scale) == pytest.approx([0.0] * 4, abs=1e-9)


# Warnings


MIXED = [[0.0, 0.5, 1.0, 0.9, 0.2], [0.0, 0.0, 1.0, 0.5, 0.6], [1.0, 0.9, 0.0, 0.4, 0.3]]
STEPS = [0.5, 0.75, 1.0, 0.75, 0.5]
WARNED = {
    "healthy": (rollouts("page", *MIXED), []),
    "all at the top": (rollouts("page", *[[1.0] * 5] * 3), ["100% of the rollouts already earn 1.00", "equal rewards and no gradient"]),
    "most at the top": (rollouts("page", *[[1.0, 1.0, 1.0, 1.0, 0.9]] * 3), ["80% of the rollouts already earn 1.00"]),
    "all at the bottom": (rollouts("page", *[[0.0] * 5] * 3), ["100% of the rollouts earn 0.00", "equal rewards and no gradient"]),
    "half the prompts solved": (rollouts("page", *[[1.0] * 5] * 2, *[[0.0] * 5] * 2), ["have equal rewards and no gradient"]),
    "equal in the middle": (rollouts("page", *[[0.5] * 5] * 2), ["no group of up to 64 changes that"]),
    "one rollout a prompt": (rollouts("page", [0.0], [0.5], [1.0]), ["a single rollout says nothing about groups; sample at least 4"]),
    "every call pays": ([r | {"calls": [{"name": "x", "arguments": {}, "outcome": "ok"}] * round(4 * r["reward"])}
                         for r in rollouts("transition", STEPS, STEPS, STEPS)], ["follows the number of calls (r = 1.00)"]),
}


@pytest.mark.parametrize("records, expected", WARNED.values(), ids=WARNED)
def test_a_warning_is_one_sentence_of_what_and_what_to_do(records, expected):
    [found] = preflight(records, draws=40)
    assert len(found.warnings) == len(expected)
    for text, part in zip(found.warnings, expected, strict=True):
        assert part in text and text.startswith(f"{found.scenario}: ") and text.endswith(".")
        assert ";" in text and "\n" not in text and text.count(". ") == 0


def test_a_larger_group_is_advised_where_it_helps():
    prompts = [[0.0] * 9 + [1.0]] * 4
    [found] = preflight(rollouts("cross", *prompts), group=4, draws=40)
    assert 0.5 < found.equal < 0.8 and any("groups of 16 bring it to" in text or "groups of 8 bring it to" in text
                                           for text in found.warnings)


@pytest.mark.parametrize("fields", [{"raw": None}, {"calls": []}, {"messages": []}, {}])
def test_calls_are_not_blamed_where_none_are_known(fields):
    assert follows_calls(rollouts("page", *MIXED, **fields)) == 0.0


# The function


def test_one_forecast_a_scenario_and_model():
    records = rollouts("page", *MIXED) + rollouts("label", *MIXED) + rollouts("page", *MIXED, model="other")
    found = preflight(records, draws=40)
    assert [(f.scenario, f.model) for f in found] == [("page", "m"), ("label", "m"), ("page", "other")]
    assert found[0].equal == found[2].equal


def test_the_forecast_is_the_same_twice_and_in_any_order():
    records = rollouts("page", *MIXED)
    assert preflight(records, draws=40) == preflight(records, draws=40) == preflight(records[::-1], draws=40)


def test_errors_of_the_machinery_are_left_out():
    records = rollouts("page", *MIXED)
    broken = [*records, records[0] | {"generation": 9, "reward": None, "raw": None}]
    assert preflight(broken, draws=40)[0].mean == preflight(records, draws=40)[0].mean
    with pytest.raises(ValueError, match="no rollout of page has a reward"):
        preflight(rollouts("page", [None, None]))


@pytest.mark.parametrize("group", [1, 0, -4])
def test_a_group_of_one_is_refused(group):
    with pytest.raises(ValueError, match="a group needs at least 2 rollouts"):
        preflight(rollouts("page", *MIXED), group=group)


def test_a_run_folder_and_its_file_are_read(tmp_path):
    recorder = Recorder(tmp_path)
    for record in rollouts("page", *MIXED) + rollouts("page", [1.0], phase="after") + rollouts("page", [1.0], split="held_out"):
        recorder.append(record)
    expected = preflight(rollouts("page", *MIXED), draws=40)
    assert preflight(tmp_path, draws=40) == preflight(str(tmp_path / "rollouts.jsonl"), draws=40) == expected


def test_a_file_without_prompted_rollouts_is_refused(tmp_path):
    Recorder(tmp_path).append(rollouts("page", [1.0], phase="after")[0])
    with pytest.raises(ValueError, match="holds no rollouts of training prompts from before training; sample some"):
        prompted(tmp_path)
    with pytest.raises(ValueError, match="there is no such rollouts file"):
        prompted(tmp_path / "nowhere.json")


def test_unknown_shares_are_none_where_groups_are_larger_than_samples():
    [small], [large] = (preflight(rollouts("page", *MIXED), group=group, draws=40) for group in (4, 8))
    assert small.equal_without is not None and large.equal_without is None and large.equal < small.equal


# Training, as it was shipped


def test_groups_of_training_are_counted_epoch_by_epoch():
    rows = [("a", 1), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("a", 4)]
    records = [r | {"task": task, "batch": batch} for task, batch in rows
               for r in rollouts("page", [batch / 10, 0.5], phase="train")]
    assert [len(epoch) for epoch in epochs_seen(records)] == [3, 2, 1]
    assert epochs_seen(records)[2] == [[0.4, 0.5]]


@pytest.fixture(scope="module")
def shipped():
    data = read_rollouts(SHIPPED)
    sizes = {run["scenario"]: run["config"]["num_generations"] for run in data["suite"]["runs"]
             if (run["model"], run["seed"]) == ("embedded", 0)}
    return pick(data["rollouts"], model="embedded", seed=0), sizes


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_first_epoch_is_what_was_forecast(shipped, scenario):
    "At 1.0 and learning, beside rollouts at 0.7: silent groups in their interval, the mean within 0.15."
    records, sizes = shipped
    own = pick(records, scenario=scenario)
    [found] = preflight(pick(own, phase="before", split="train"), sizes[scenario])
    epoch = epochs_seen(own)[0]
    assert found.equal_range[0] <= silent(epoch) <= found.equal_range[1]
    assert abs(fmean(map(fmean, epoch)) - found.mean) < 0.15
    assert {len(group) for group in epoch} == {sizes[scenario]}


def test_only_transition_is_warned_about(shipped):
    records, _ = shipped
    found = preflight(pick(records, phase="before", split="train"), draws=40)
    assert [f.scenario for f in found if f.warnings] == ["transition"]
    assert "follows the number of calls" in next(f for f in found if f.warnings).warnings[0]


def test_the_trained_policy_is_told_to_stop(shipped):
    records, _ = shipped
    for found in preflight(pick(records, phase="after", split="train"), draws=40):
        assert "little is left to learn" in " ".join(found.warnings)


def test_the_shipped_file_is_read_by_its_path():
    found = preflight(SHIPPED, draws=40)
    expected = pick(load_rollouts(SHIPPED), phase="before", split="train")
    assert sum(f.prompts for f in found) == len({(r["scenario"], r["model"], r["task"]) for r in expected})
