"The embedded policy: how it is made, what ships, and that it is unreliable in the ways the paper describes."
import json
import random
from collections import Counter

import pytest

from atlas_rlvr.environments import tool_schemas
from atlas_rlvr.policy import (
    HOME,
    STAGES,
    Stage,
    _excluded,
    _save,
    bare,
    corpus,
    demonstrate,
    drill,
    dropped,
    encode,
    examples,
    load_policy,
    pretrain,
    short,
    train_tokenizer,
    wrong_value,
)
from atlas_rlvr.rewards import score
from atlas_rlvr.runs import project_root, read_rollouts
from atlas_rlvr.scenarios import SCENARIOS, STEPS, generate_tasks, gold_calls, load_tasks, messages, task_env
from atlas_rlvr.tool_calls import build_trace

BUDGET = {"subtask": 900, "page": 900, "label": 1400, "cross": 1600}
SHIPPED = project_root() / "results" / "atlassian_rollouts.json"


def write_of(scenario):
    return STEPS[scenario](load_tasks(scenario)[0]["gold"])[1][0]


@pytest.fixture(scope="module")
def shipped():
    return load_policy()


def test_it_is_small_and_a_qwen3(shipped):
    model, tokenizer = shipped
    assert sum(path.stat().st_size for path in HOME.iterdir()) < 10 * 2**20
    assert model.config.model_type == "qwen3" and model.num_parameters() < 5e6
    assert len(tokenizer) == model.config.vocab_size == 1536


def test_gold_transcripts_fit_their_budgets(shipped):
    _, tokenizer = shipped
    for scenario, most in BUDGET.items():
        for task in load_tasks(scenario):
            talk, env = messages(task), task_env(task)
            for name, arguments in gold_calls(task):
                call = {"type": "function", "function": {"name": name, "arguments": arguments}}
                talk += [{"role": "assistant", "content": "", "tool_calls": [call]},
                         {"role": "tool", "name": name, "content": env._send(name, arguments)}]
            ids, _ = encode([*talk, {"role": "assistant", "content": "Done."}], tool_schemas(scenario), tokenizer)
            assert len(ids) <= most, task["id"]


def test_only_what_the_assistant_samples_carries_loss(shipped):
    _, tokenizer = shipped
    talk = demonstrate(load_tasks("subtask")[0], random.Random(0))
    ids, mask = encode(talk, tool_schemas("subtask"), tokenizer)
    learnt = tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept])
    assert learnt.count("<|im_end|>") == sum(message["role"] == "assistant" for message in talk)
    assert "tool_response" not in learnt and "<think>" not in learnt and "system" not in learnt


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_demonstrator_is_neither_hopeless_nor_perfect(scenario):
    rng, rewards = random.Random(1), []
    for task in generate_tasks(scenario, 150, seed=5):
        rewards.append(score(scenario, build_trace(demonstrate(task, rng)[2:]), task["gold"]).reward)
    assert 0.25 < sum(rewards) / len(rewards) < 0.9 and 1.0 in rewards
    assert min(rewards) == (0.25 if scenario == "transition" else 0.0)  # which pays for every call


def test_the_demonstrator_has_the_failure_modes_of_the_paper():
    rng, seen = random.Random(2), Counter()
    for task in generate_tasks("subtask", 300, seed=6):
        calls = build_trace(demonstrate(task, rng)[2:])
        writes = [call for call in calls if call.name == "create_issue"]
        seen["early stop"] += not writes
        seen["bare string"] += any(isinstance(w.arguments["fields"].get("parent"), str) for w in writes)
        seen["retries"] += len(writes) > 1
    assert min(seen.values()) > 300 * 0.1


@pytest.mark.parametrize(("scenario", "where"), [("subtask", "fields"), ("page", "body"), ("label", "labels"),
                                                 ("transition", "transition")])
def test_a_bare_string_is_refused_by_the_environment(scenario, where):
    name, arguments = write_of(scenario)
    bent = bare(name, arguments, random.Random(0))
    assert bent != arguments and where in bent
    assert json.loads(task_env(load_tasks(scenario)[0])._send(name, bent))["status"] == 400


@pytest.mark.parametrize("scenario", ["subtask", "page", "label"])
def test_a_field_is_dropped_and_nothing_else_changes(scenario):
    name, arguments = write_of(scenario)
    assert len(json.dumps(dropped(name, arguments, random.Random(0)))) < len(json.dumps(arguments))


@pytest.mark.parametrize("scenario", ["label", "transition"])
def test_a_wrong_value_keeps_the_shape(scenario):
    name, arguments = write_of(scenario)
    bent = wrong_value(name, arguments, random.Random(0))
    assert bent != arguments and set(bent) == set(arguments)


def test_imitation_sees_no_prompt_of_the_project_and_is_seeded(shipped):
    _, tokenizer = shipped
    stage = Stage("imitate", 1, 6000, 1e-3, {"subtask": 1}, "whole")
    assert len(_excluded()) == sum(len(load_tasks(s, split)) for s in SCENARIOS for split in ("train", "held_out"))
    first, again = (examples(stage, 3, 0, tokenizer, _excluded()) for _ in range(2))
    assert first == again != examples(stage, 4, 0, tokenizer, _excluded())
    assert max(len(ids) for ids, _ in first) * len(first) <= stage.tokens + 2000


def stop_after(steps):
    "A `_save` that is interrupted when so many steps are stored."
    def save(path, done, model, optimizer):
        _save(path, done, model, optimizer)
        if done == steps:
            raise KeyboardInterrupt
    return save


def test_an_interrupted_making_continues_to_the_same_weights(tmp_path, shipped, monkeypatch):
    import torch
    _, tokenizer = shipped
    stages = (Stage("copy", 4, 300, 1e-3, {"subtask": 1}, "short", plain=True),)
    quiet = {"log": lambda *a, **k: None}
    for name in "ab":
        (tmp_path / name).mkdir()
    whole = pretrain(tmp_path / "a", tokenizer, 0, stages, **quiet)
    monkeypatch.setattr("atlas_rlvr.policy.SAVE_EVERY", 1)
    monkeypatch.setattr("atlas_rlvr.policy._save", stop_after(2))
    with pytest.raises(KeyboardInterrupt):
        pretrain(tmp_path / "b", tokenizer, 0, stages, **quiet)
    monkeypatch.undo()
    again = pretrain(tmp_path / "b", tokenizer, 0, stages, **quiet)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_the_tokenizer_gives_a_name_the_same_tokens_in_prompt_and_json():
    tokenizer = train_tokenizer(corpus(4, 0), 600)
    name = tokenizer.tokenize("Lena Budget")
    for around in ("‘{}’ under", '"summary": "{}", "issuetype"'):
        tokens = tokenizer.tokenize(around.format("Lena Budget"))
        assert any(tokens[i:i + len(name)] == name for i in range(len(tokens)))
    assert tokenizer.decode(tokenizer("Grüße ‘x’")["input_ids"]) == "Grüße ‘x’"


def test_the_recipe_of_the_making_starts_short_and_plain():
    assert (STAGES[0].form, STAGES[0].plain, STAGES[-1].form, STAGES[-1].plain) == ("short", True, "whole", False)


def test_a_drill_holds_one_system_prompt_right_writes_and_reads_of_what_they_made():
    tasks = generate_tasks("page", 3, seed=9)
    talk = drill(tasks)
    assert [message["role"] for message in talk] == ["system"] + ["user", "assistant", "tool", "assistant"] * 3
    writes, answers, reads = talk[2::4], talk[3::4], talk[4::4]
    asked = [message["tool_calls"][0]["function"]["arguments"] for message in writes + reads]
    assert [arguments["title"] for arguments in asked[:3]] == [task["gold"]["title"] for task in tasks]
    assert [arguments["page_id"] for arguments in asked[3:]] == [json.loads(a["content"])["body"]["id"] for a in answers]


def test_the_id_of_a_new_page_cannot_be_guessed_from_its_parent():
    tasks = generate_tasks("page", 60, seed=9, pieces=("ab", "cd"))
    made = [json.loads(message["content"])["body"] for task in tasks for message in short(task) if message["role"] == "tool"]
    assert sum(int(body["id"]) == int(body["parentId"]) + 1 for body in made) < 25


# --- what the shipped rollouts say about it ------------------------------------------------------------------------

def before(scenario, split):
    return [r for r in read_rollouts(SHIPPED)["rollouts"]
            if (r["scenario"], r["split"], r["phase"], r["model"]) == (scenario, split, "before", "embedded")]


needs_rollouts = pytest.mark.skipif(not SHIPPED.exists(), reason="no shipped rollouts yet")


@needs_rollouts
@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("scenario", ["subtask", "page", "label", "cross"])
def test_it_is_unreliable_like_the_papers_prompted_models(scenario, split):
    rewards = [r["reward"] for r in before(scenario, split)]
    assert len(rewards) >= 30 and 0.25 <= sum(rewards) / len(rewards) <= 0.85


def failures(record):
    calls = record["calls"]
    issues = [c for c in calls if c["name"] == "create_issue"]
    parents = [((c.get("arguments") or {}).get("fields") or {}) for c in issues]
    writes = Counter(c["name"] for c in calls if c["name"] in ("create_issue", "create_page"))
    return {"early stop": bool(calls) and not writes and record["outcome"] == "ended",
            "wrong shape": any(isinstance(f.get("parent"), str) or isinstance(f.get("assignee"), str)
                               for f in parents if isinstance(f, dict)),
            "retries": any(n > 1 for n in writes.values())}


@needs_rollouts
@pytest.mark.parametrize("scenario", ["subtask", "cross"])
def test_each_failure_mode_of_the_paper_is_at_least_one_in_twenty(scenario):
    records = before(scenario, "train") + before(scenario, "held_out")
    counts = Counter(name for record in records for name, seen in failures(record).items() if seen)
    assert all(counts[name] >= 0.05 * len(records) for name in ("early stop", "wrong shape", "retries")), counts


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["subtask", "cross"])
def test_sampling_it_again_gives_a_mean_in_the_same_range(scenario, tmp_path, monkeypatch):
    from atlas_rlvr.train import evaluate, evaluation_rows, plan_run
    run = plan_run(scenario, "embedded", 1)
    rows = evaluation_rows(load_tasks(scenario, "held_out")[:20], 1, "before", 0.7)
    rewards = [record["reward"] for record in evaluate(run, *load_policy(), rows)]
    assert len(rewards) == 20 and 0.2 <= sum(rewards) / 20 <= 0.9
