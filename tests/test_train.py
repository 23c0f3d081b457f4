"Training: recipes, batch arithmetic, stop rule, reward function, and whole runs of a tiny policy with scripted turns."

import json
import math
import os
import re
import types

import pytest

from atlas_rlvr import train as T
from atlas_rlvr.baselines import prompt_template, prompt_text
from atlas_rlvr.environments import TOOLS, run_calls, tool_schemas, transcript
from atlas_rlvr.faults import FAULTY_HASH, faulty_env, faulty_score, find_plan
from atlas_rlvr.rewards import rescore
from atlas_rlvr.runs import Recorder, plain_runs, read_lines, record_key, run_folder, write_json
from atlas_rlvr.scenarios import SCENARIOS, find_task, gold_calls, load_tasks, task_env
from atlas_rlvr.supervised import gold_demonstration, template_tokens


def gold_completion(task, verify=True):
    return transcript(task_env(task), gold_calls(task, verify=verify))


def ledger_for(scenario, recorder=None, **changes):
    return T.Ledger(T.plan_run(scenario, "embedded", 0, **changes), recorder)


# ---------------------------------------------------------------------------------------------------------------------
# Recipes and arithmetic


@pytest.mark.parametrize("model", T.RECIPES)
def test_every_setting_has_a_source(model):
    assert {row.source for row in T.recipe(model).values()} == {"paper", "ours"}
    assert all(row.why for row in T.recipe(model).values())


@pytest.mark.parametrize("model", ["qwen3-1.7b", "qwen3.5-4b"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_papers_values(model, scenario):
    values = T.settings(model, scenario)
    assert values["num_generations"] == (16 if scenario in ("transition", "label") else 4)
    assert (values["num_iterations"], values["gradient_accumulation_steps"], values["bf16"]) == (2, 4, True)
    assert 2048 <= values["max_completion_length"] <= 4096
    assert 5 <= values["patience"] <= 10 and (values["delta"], values["window"]) == (0.01, 1)
    assert values["max_tool_calling_iterations"] + 1 == 25 and values["save_total_limit"] == 2


@pytest.mark.parametrize("model", T.RECIPES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_prompt_is_dropped(model, scenario):
    from trl.trainer.utils import RepeatSampler
    values, prompts = T.settings(model, scenario), len(load_tasks(scenario))
    plan = T.batch_plan(prompts, values)
    generated = plan["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert generated == plan["rollouts"] == values["prompts_per_batch"] * values["num_generations"]
    order = RepeatSampler(range(prompts), values["num_generations"], generated // values["num_generations"],
                          values["num_iterations"] * values["gradient_accumulation_steps"], shuffle=False)
    assert set(order) == set(range(prompts))
    assert len(order) == plan["batches_per_epoch"] * generated * values["num_iterations"] * values["gradient_accumulation_steps"]


@pytest.mark.parametrize("chosen", [3, 5, 16])
def test_a_batch_that_would_drop_prompts_is_refused(chosen):
    with pytest.raises(ValueError, match="TRL would drop"):
        T.batch_plan(8, T.settings("embedded", "subtask", prompts_per_batch=chosen))


def test_an_odd_batch_is_refused():
    with pytest.raises(ValueError, match="do not divide into 4"):
        T.batch_plan(6, T.settings("embedded", "label", prompts_per_batch=1, num_generations=6))


def test_a_misspelt_setting_is_refused():
    with pytest.raises(ValueError, match="unknown settings"):
        T.settings("embedded", "page", learning_rat=1e-3)


def test_a_gpu_model_needs_a_gpu():
    with pytest.raises(ValueError, match="needs a GPU that torch can use"):
        T.choose_model("subtask", "qwen3.5-4b", gpu=False)


@pytest.mark.parametrize("given, used", [("2,3", "2"), (None, "0"), ("", ""), ("GPU-ab,GPU-cd", "GPU-ab")])
def test_one_gpu_is_used(monkeypatch, given, used):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert T.one_gpu() == used == os.environ["CUDA_VISIBLE_DEVICES"]


# ---------------------------------------------------------------------------------------------------------------------
# The stop rule


def stops_at(means, **rule):
    "Number of epochs after which the rule fires; None: never."
    return next((n for n in range(1, len(means) + 1) if T.stop_reason(means[:n], **rule)), None)


@pytest.mark.parametrize("means, patience, epoch", [
    pytest.param([0.5], 1, None, id="B14-first-epoch-has-no-delta"),
    pytest.param([0.5, 0.505], 1, 2, id="B14-second-epoch"),
    pytest.param([0.3, 0.305, 0.308, 0.6, 0.605, 0.608], 3, None, id="B15-a-jump-resets"),
    pytest.param([0.9, 0.901, 0.85, 0.851, 0.852, 0.853], 3, 6, id="B15-a-fall-resets"),
    pytest.param([0.9, 0.951, 0.952, 0.953, 0.954, 0.953, 0.952], 5, 7, id="B12-uninterrupted"),
    pytest.param([0.5, 0.51, 0.52, 0.53], 1, None, id="exactly-0.01-is-not-below"),
    pytest.param([0.06, 0.05, 0.04], 1, None, id="exactly-0.01-in-floating-point"),
])
def test_patience(means, patience, epoch):
    assert stops_at(means, patience=patience) == epoch


def test_the_moving_mean_counts_full_windows_only():
    assert T.moving_mean([1, 2, 3, 4, 5, 6], 5) == [3, 4]
    assert stops_at([0.5] * 20, patience=8, window=5) == 13


@pytest.mark.parametrize("level, reason", [(0.0, "plateau"), (0.949, "plateau"), (0.95, "converged"), (1.0, "converged")])
def test_reason(level, reason):
    assert T.stop_reason([level] * 9, patience=8) == reason


@pytest.mark.parametrize("per_epoch", [1, 2])
def test_b12_the_count_survives_a_restart(per_epoch):
    means = [mean for epoch in (0.9, 0.951, 0.952, 0.953, 0.954, 0.953, 0.952) for mean in [epoch] * per_epoch]
    args = {"patience": 5, "window": 1, "delta": 0.01, "batches_per_epoch": per_epoch, "steps_per_batch": 2}
    straight = T.StopRule(**args)
    expected = [straight.add(mean) for mean in means]
    for killed in range(len(means)):
        before = T.StopRule(**args)
        found = [before.add(mean) for mean in means[:killed]]
        saved = json.loads(json.dumps(before.state()))
        after = T.StopRule(**saved["args"])
        vars(after).update(saved["attributes"])
        assert found + [after.add(mean) for mean in means[killed:]] == expected
    assert expected[-1] == "converged"


def test_an_unscored_batch_does_not_count():
    rule = T.StopRule(patience=1, window=1, delta=0.01, batches_per_epoch=1, steps_per_batch=2)
    assert [rule.add(mean) for mean in (0.5, None, 0.505)] == [None, None, "plateau"]


# ---------------------------------------------------------------------------------------------------------------------
# The reward function


def test_b01_keywords():
    task = load_tasks("subtask")[0]
    column = [json.dumps(task)] * 4
    transcripts = [gold_completion(task), gold_completion(task, verify=False), gold_completion(task)[:2], []]
    ledger = ledger_for("subtask")
    scores = ledger.score_rollouts(prompts=[[]] * 4, completions=transcripts, completion_ids=[[1], [2], [3], [4]], task=column,
                                   trainer_state=None, environments=[None] * 4, gold=[task["gold"]] * 4, some_future_kwarg=1)
    assert scores == [1.0, 0.9, 0.0, 0.0]
    assert ledger_for("subtask").score_rollouts(transcripts, column) == scores


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_b01_in_every_scenario(scenario):
    tasks = load_tasks(scenario)[:4]
    scores = ledger_for(scenario).score_rollouts([gold_completion(t) for t in tasks], [json.dumps(t) for t in tasks])
    assert scores == [1.0] * len(tasks)


def test_b03_a_lost_service_is_no_zero(tmp_path):
    task = load_tasks("cross")[0]
    lost = types.SimpleNamespace(_failure="connection lost")
    completions = [gold_completion(task)[:2], [], gold_completion(task)[:4], gold_completion(task, verify=False)]
    ledger = ledger_for("cross", Recorder(tmp_path))
    scores = ledger.score_rollouts(completions, [json.dumps(task)] * 4, environments=[lost, None, None, None])
    assert scores == [None, 0.0, 0.0, 1.0]
    row = ledger.close()
    assert (row["n"], row["errors"], row["mean"]) == (3, 1, pytest.approx(1 / 3, abs=1e-6))
    outcomes = [(r["outcome"], r["reward"]) for r in read_lines(tmp_path / "rollouts.jsonl")]
    assert outcomes[0] == ("error", None) and outcomes[1] == ("ended", 0.0)


def test_b04_an_empty_gold_set_is_refused():
    task = {**load_tasks("label")[0], "gold": {"page_id": "10001", "labels": []}}
    with pytest.raises(ValueError, match="the gold set is empty"):
        T.training_rows([task])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_b04_a_reward_that_is_no_number_stops_the_run(monkeypatch, value):
    score = types.SimpleNamespace(reward=value, raw=value, components={})
    monkeypatch.setattr(T.rewards, "score", lambda *args: score)
    with pytest.raises(ValueError, match="no number.*subtask-01"):
        ledger_for("subtask").score_rollouts([[]], [json.dumps(load_tasks("subtask")[0])])


def test_b05_clamped_groups_are_counted(monkeypatch):
    raws = iter([-0.4, -0.7, -1.15, -0.55])
    monkeypatch.setattr(T.rewards, "score", lambda *args: types.SimpleNamespace(reward=0.0, raw=next(raws), components={}))
    ledger = ledger_for("cross")
    ledger.score_rollouts([[]] * 4, [json.dumps(load_tasks("cross")[0])] * 4)
    assert [record["raw"] for record in ledger.records] == [-0.4, -0.7, -1.15, -0.55]
    row = ledger.close()
    assert row["zero_std_groups"] == 1
    line = T.progress_line(row, [])
    assert "groups without spread 1/1" in line and "raw -0.700" in line
    assert T.stop_reason([0.0] * 20, patience=8, window=5) == "plateau"


def test_b07_the_turn_cap():
    call = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "get_issue", "arguments": {"issueIdOrKey": "ABC-123"}}}]}
    task = load_tasks("cross")[0]
    answered = transcript(task_env(task), [("get_issue", {"issueIdOrKey": "ABC-123"})] * 24)[:-1]
    record = T.judge(task, [*answered, call])
    assert (record["outcome"], record["turns"], len(record["calls"]), record["reward"]) == ("turn_cap", 25, 25, 0.0)
    assert record["raw"] < 0
    assert T.judge(task, [*answered[:-2], call])["outcome"] == "truncated"


def test_b08_a_cut_rollout_is_called_truncated():
    ledger = ledger_for("subtask", max_completion_length=256)
    task = load_tasks("subtask")[0]
    ledger.score_rollouts([gold_completion(task)[:2]] * 2, [json.dumps(task)] * 2, completion_ids=[[7] * 256, [7] * 255])
    assert [record["outcome"] for record in ledger.records] == ["truncated", "ended"]
    assert "cut off 50%" in T.progress_line(ledger.close(), [])


def test_a_malformed_call_ends_a_rollout():
    record = T.judge(load_tasks("subtask")[0], [{"role": "assistant", "content": '<tool_call>\n{"name": "get_issue", \n</tool_call>'}])
    assert (record["outcome"], record["reward"]) == ("malformed", 0.0)


def test_b18_gold_survives_the_dataset():
    from datasets import Dataset
    tasks = [load_tasks("subtask")[0], load_tasks("page")[0]]
    rows = Dataset.from_list(T.training_rows(tasks))
    assert [json.loads(row["task"]) for row in rows] == tasks
    assert [set(json.loads(row["task"])["gold"]) for row in rows] == [set(task["gold"]) for task in tasks]
    assert [row["prompt"] for row in rows] == [T.messages(task) for task in tasks]


def test_b19_a_foreign_object_does_not_lose_the_rollout(tmp_path):
    task = load_tasks("subtask")[0]
    odd = {"role": "assistant", "content": "", "response": object(), "bytes": b"\xff", "set": {1}, "number": math.nan}
    ledger = ledger_for("subtask", Recorder(tmp_path))
    ledger.score_rollouts([[odd]], [json.dumps(task)])
    assert ledger.recorder.errors == 0
    record, = read_lines(tmp_path / "rollouts.jsonl")
    assert record["reward"] == 0.0 and record["messages"][0]["number"] is None


def test_a_recorder_that_fails_does_not_stop_training(tmp_path, recwarn):
    task = load_tasks("subtask")[0]
    recorder = Recorder(tmp_path)
    recorder.rollouts = tmp_path / "missing" / "rollouts.jsonl"
    ledger = ledger_for("subtask", recorder)
    assert ledger.score_rollouts([gold_completion(task)], [json.dumps(task)]) == [1.0]
    assert ledger.close()["mean"] == 1.0 and recorder.errors > 0


def test_interval_draws_prompts():
    records = [{"task": "a", "reward": 1.0}] * 20 + [{"task": "b", "reward": 0.0}] * 20 + [{"task": "c", "reward": None}]
    cell = T.interval(records)
    assert (cell["n"], cell["prompts"], cell["mean"], cell["low"], cell["high"]) == (40, 2, 0.5, 0.0, 1.0)


def test_minutes_to_the_goal():
    rows = [{"mean": str(mean), "seconds": "30"} for mean in [0.5, 0.9] + [0.96] * 5]
    assert T.minutes_to_goal(rows, 1) == 3.5
    assert T.minutes_to_goal(rows[:6], 1) is None


# ---------------------------------------------------------------------------------------------------------------------
# The trainer itself: tiny random weights, real templates, real tool loop, scripted turns


@pytest.fixture(scope="module")
def tokenizer():
    torch = pytest.importorskip("torch")
    from atlas_rlvr.policy import train_tokenizer
    torch.set_num_threads(1)
    texts = [json.dumps([T.messages(load_tasks(name)[0]), tool_schemas(name)]) for name in SCENARIOS]
    T.quiet_libraries(T.settings("embedded", "subtask"))
    return train_tokenizer(texts, 600)


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32,
            "tie_word_embeddings": True}


def tiny_model(tokenizer, kind="qwen3"):
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(0)
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
                  "bos_token_id": None}
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**TINY, **tokens))
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
                  "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY | layers, **tokens))


def as_json(name, arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def as_xml(name, arguments):
    text = "".join(f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{text}</function>\n</tool_call>"


@pytest.fixture
def scripted(monkeypatch):
    "`scripted(policy)`: the trainer's turns come from policy(task, turn) → text; everything else stays TRL's."
    from trl import GRPOTrainer

    def install(policy):
        tasks = {task["prompt"]: task for name in SCENARIOS for split in ("held_out", "train") for task in load_tasks(name, split)}

        def one(self, ids):
            text = self.processing_class.decode(ids)
            task = next(tasks[prompt] for prompt in sorted(tasks, key=len, reverse=True) if prompt in text)
            return self.processing_class(policy(task, text.count("<tool_response>")) + "<|im_end|>")["input_ids"]

        def turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
            return [one(self, ids) for ids in prompt_ids], None

        monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", turn)
    return install


def unreliable(shape=as_json, chance=0.8):
    "The gold calls one by one, each with some chance of stopping instead: what it earns depends on torch's generator."
    import torch

    def policy(task, turn):
        calls = gold_calls(task, verify=False)
        return shape(*calls[turn]) if turn < len(calls) and torch.rand(()) < chance else "Done."
    return policy


@pytest.fixture
def project(tmp_path, monkeypatch, tokenizer):
    "An empty project in which the embedded model is a tiny random one, and evaluations are two tasks a split."
    (tmp_path / "settings.ini").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATLAS_RLVR_EVAL", "2")
    monkeypatch.setattr(T, "check_model", lambda name: None)

    def load(values, checkpoint=None):
        model = tiny_model(tokenizer)
        return (type(model).from_pretrained(checkpoint) if checkpoint else model), tokenizer
    monkeypatch.setattr(T, "load_model", load)
    return tmp_path


SMALL = {"prompts_per_batch": 4, "num_generations": 2, "max_batches": 4, "max_completion_length": 4000, "learning_rate": 1e-2}


def train_rewards(folder):
    records = [r for r in read_lines(folder / "rollouts.jsonl") if r["phase"] == "train"]
    return {(r["batch"], r["task"], r["generation"]): r["reward"] for r in records}


def test_a_whole_run(project, scripted, capsys):
    import torch
    from safetensors.torch import load_file
    scripted(unreliable())
    result = T.train("page", "embedded", 3, **SMALL)
    folder = run_folder("page", "embedded", 3)
    records = read_lines(folder / "rollouts.jsonl")
    assert (result["stop_reason"], result["batches"]) == ("max_steps", 4)
    assert result == json.loads((folder / "run.json").read_text())
    counts = {phase: sum(r["phase"] == phase for r in records) for phase in ("before", "train", "after")}
    assert counts == {"before": 2 * 5 + 2, "train": 4 * 4 * 2, "after": 2 * 5 + 2}
    assert len({record_key(r) for r in records}) == len(records)
    assert {r["temperature"] for r in records if r["phase"] == "train"} == {1.0}
    assert {r["temperature"] for r in records if r["phase"] != "train"} == {0.7}
    assert sorted({(r["batch"], r["epoch"]) for r in records if r["phase"] == "train"}) == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    assert {r["task"] for r in records if r["phase"] == "train"} == {task["id"] for task in load_tasks("page")}
    rows = T.reward_rows(folder)
    rewards = [r["reward"] for r in records if r["batch"] == 1]
    assert float(rows[0]["mean"]) == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
    assert 0 < float(rows[0]["mean"]) < 1
    weights = load_file(folder / result["checkpoint"] / "model.safetensors")
    start = T.load_model(result["config"])[0].state_dict()
    assert any(not torch.equal(weights[name], start[name]) for name in weights)
    assert len(list((folder / "checkpoints").glob("checkpoint-*"))) == 2
    assert rescore(folder / "rollouts.jsonl")["equal"] == len(records)
    printed = capsys.readouterr().out
    assert printed.count("groups without spread") == 4 and "held-out reward at temperature 0.7: before" in printed


def test_b11_pooled_environments_start_clean(project, scripted):
    scripted(unreliable(chance=1.0))
    T.train("page", "embedded", 0, **SMALL | {"max_batches": 2})
    bodies = {}
    for record in read_lines(run_folder("page", "embedded", 0) / "rollouts.jsonl"):
        assert record["reward"] == 0.9
        bodies.setdefault(record["task"], set()).add(json.dumps([call["body"] for call in record["calls"]]))
    assert {len(found) for found in bodies.values()} == {1}


def test_same_seed_same_rewards_and_another_seed_others(project, scripted):
    scripted(unreliable())
    found = []
    for seed, fresh in ((5, False), (5, True), (6, False)):
        T.train("page", "embedded", seed, fresh, **SMALL | {"max_batches": 2})
        found.append(train_rewards(run_folder("page", "embedded", seed)))
    assert found[0] == found[1] != found[2]
    assert run_folder("page", "embedded", 5).with_name("embedded-s5.aside-1").is_dir()


def test_the_prompted_policy_is_measured_once(project, scripted, monkeypatch):
    scripted(unreliable())
    T.train("page", "embedded", 5, **SMALL | {"max_batches": 2})
    phases, measure = [], T.measure
    monkeypatch.setattr(T, "measure", lambda *args: phases.append(args[-1]) or measure(*args))
    for seed, changes in ((5, {"tag": "again"}), (5, {"rewards": "audited"}), (5, {"repeats_train": 1, "tag": "once"}), (6, {})):
        T.train("page", "embedded", seed, **SMALL | {"max_batches": 2} | changes)
    assert phases == ["after", *["before", "after"] * 3]
    one, other = (read_lines(run_folder("page", "embedded", 5, variant=variant) / "rollouts.jsonl") for variant in ("", "again"))
    assert one == other  # training is not moved by what was taken over


@pytest.mark.parametrize("torn", [False, True], ids=["whole-checkpoint", "half-written-checkpoint"])
def test_a_killed_run_goes_on(project, scripted, monkeypatch, torn):
    scripted(unreliable())
    T.train("page", "embedded", 1, **SMALL)
    expected = train_rewards(run_folder("page", "embedded", 1))
    T.set_aside(run_folder("page", "embedded", 1))
    folder = run_folder("page", "embedded", 1)

    def die(self, record):
        if record["batch"] == 3 and record["generation"] == 1:
            raise KeyboardInterrupt
        append(self, record)
    append = Recorder.append
    monkeypatch.setattr(Recorder, "append", die)
    with pytest.raises(KeyboardInterrupt):
        T.train("page", "embedded", 1, **SMALL)
    monkeypatch.setattr(Recorder, "append", append)
    assert json.loads((folder / "run.json").read_text())["stop_reason"] == "interrupted"
    assert {batch for batch, _, _ in train_rewards(folder)} == {1, 2, 3}
    if torn:
        newest = folder / "checkpoints" / "checkpoint-4" / "trainer_state.json"
        newest.write_text(newest.read_text()[:100])
        with open(folder / "rollouts.jsonl", "a") as file:
            file.write('{"model": "embed')
    result = T.train("page", "embedded", 1, **SMALL)
    records = read_lines(folder / "rollouts.jsonl")
    assert (result["stop_reason"], result["batches"]) == ("max_steps", 4)
    assert len({record_key(r) for r in records}) == len(records)
    assert train_rewards(folder) == expected
    assert list(folder.glob("rollouts.aside-*.jsonl"))


def twice(task, turn):
    "The gold calls, the create once more than needed."
    calls = gold_calls(task, verify=False)
    return as_json(*[*calls, calls[-1]][turn]) if turn <= len(calls) else "Done."


def under_plan(folder, phase):
    return {(r["batch"], r["task"], r["generation"]): (r["faults"], r["reward"])
            for r in read_lines(folder / "rollouts.jsonl") if r["phase"] == phase}


def test_training_under_faults(project, scripted, monkeypatch):
    "Each task and batch has its plan, a group shares it, the state counts, and a killed run meets the same plans."
    scripted(twice)
    values = SMALL | {"max_batches": 3, "faults": "lost_response:7"}
    folder = run_folder("subtask", "embedded", 2, variant="lost_response-7")
    result = T.train("subtask", "embedded", 2, **values)
    records = read_lines(folder / "rollouts.jsonl")
    expected = under_plan(folder, "train")
    assert result["variant"] == "lost_response-7" and result["reward_hash"] == FAULTY_HASH and plain_runs() == []
    assert len(expected) == 3 * 4 * 2 and len({faults for faults, _ in expected.values()}) == 3 * 4
    assert under_plan(folder, "before") == under_plan(folder, "after")
    for record in records:
        env = faulty_env(find_task("subtask", record["task"]), find_plan(record["faults"]))
        again = run_calls(env, [(call["name"], call["arguments"]) for call in record["calls"]])
        assert [call.status for call in again] == [call["status"] for call in record["calls"]]
        assert faulty_score(find_task("subtask", record["task"]), again, env._world).reward == record["reward"]
        assert record["components"]["state.duplicate"] == -0.15

    T.set_aside(folder)
    append = Recorder.append

    def die(self, record):
        if (record["batch"], record["generation"]) == (3, 1):
            raise KeyboardInterrupt
        append(self, record)
    monkeypatch.setattr(Recorder, "append", die)
    with pytest.raises(KeyboardInterrupt):
        T.train("subtask", "embedded", 2, **values)
    monkeypatch.setattr(Recorder, "append", append)
    T.train("subtask", "embedded", 2, **values)
    assert under_plan(folder, "train") == expected


@pytest.mark.parametrize("values, reason", [({"faults": "storm"}, "unknown faults 'storm'"),
                                            ({"faults": "slow:1", "rewards": "audited"}, "leave `rewards` out")])
def test_faults_that_cannot_be_are_refused(values, reason):
    with pytest.raises(ValueError, match=reason):
        T.plan_run("subtask", "embedded", 0, **values)


@pytest.mark.parametrize("name, value", [
    ("seed", -1), ("seed", 1.5), ("seed", True), ("seed", "0"), ("seed", 2**32), ("prompts", -8), ("prompts", 8.0), ("token_budget", -1),
    ("token_budget", math.nan), ("learning_rate", 0), ("learning_rate", -1e-4), ("learning_rate", math.nan), ("learning_rate", math.inf),
    ("learning_rate", "fast"), ("tag", "a/b"), ("tag", "two words"), ("tag", "../../up"), ("tag", ".."), ("tag", 7), ("start", "../sft")])
def test_values_that_no_run_can_have_are_refused_before_anything_is_written(project, name, value):
    before = sorted(project.rglob("*"))
    with pytest.raises(ValueError, match=rf"^`{name}` must be .*, not {re.escape(repr(value))}$"):
        T.train("subtask", "embedded", **{name: value})
    assert sorted(project.rglob("*")) == before


@pytest.mark.parametrize("changes", [{"tag": "asks-gold.2"}, {"learning_rate": 1}, {"prompts": 8}, {"token_budget": 1}, {"start": "sft-own t1"}])
def test_values_that_a_run_can_have(changes):
    assert T.plan_run("subtask", "embedded", 2**32 - 1, **changes).values.items() >= changes.items()


def test_b12_a_finished_run_trains_no_further(project, scripted, monkeypatch, capsys):
    scripted(unreliable(chance=1.0))
    values = SMALL | {"max_batches": 20, "patience": 2, "window": 1, "prompts_per_batch": 8}
    result = T.train("page", "embedded", 0, **values)
    folder = run_folder("page", "embedded", 0)
    assert (result["stop_reason"], result["batches"], result["final_mean"]) == ("plateau", 3, 0.9)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert T.train("page", "embedded", 0, **values) == result
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert "-p fresh True" in capsys.readouterr().out
    # killed after the rule had fired, before the last evaluation
    (folder / "run.json").unlink()
    monkeypatch.setattr(T, "learn", lambda *args: pytest.fail("it trained again"))
    again = T.train("page", "embedded", 0, **values)
    assert (again["stop_reason"], again["batches"]) == ("plateau", 3)


def test_b08_a_budget_below_the_gold_is_refused(project, tokenizer):
    with pytest.raises(ValueError, match="cannot hold the gold transcript of page-01.*2048–4096"):
        T.train("page", "embedded", 0, **SMALL | {"max_completion_length": 64})


def evaluated(scenario, tokenizer, tasks=1, **changes):
    "Records of one evaluation of the tiny model."
    rows = T.evaluation_rows(load_tasks(scenario)[:tasks], 1, "before", 0.7)
    return T.evaluate(T.plan_run(scenario, "embedded", 0, **changes), tiny_model(tokenizer), tokenizer, rows)


def test_b07_the_turn_cap_in_the_trainer(tokenizer, scripted):
    scripted(lambda task, turn: as_json("get_issue", {"issueIdOrKey": "ABC-123"}))
    record, = evaluated("cross", tokenizer, max_completion_length=20000)
    assert (record["outcome"], record["turns"], len(record["calls"]), record["reward"]) == ("turn_cap", 25, 25, 0.0)


def test_an_answer_beyond_the_budget_truncates(tokenizer, scripted):
    scripted(lambda task, turn: as_json("get_issue", {"issueIdOrKey": "ABC-123"}))
    record, = evaluated("subtask", tokenizer, max_completion_length=300)
    assert record["outcome"] == "truncated"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_b09_the_tool_menu_is_table_1(tmp_path, tokenizer, scenario):
    ledger = ledger_for(scenario)
    trainer = T.make_trainer(ledger.run, tiny_model(tokenizer), tokenizer, T.grpo_config(ledger.run, tmp_path),
                             T.training_rows(load_tasks(scenario)), ledger)
    trainer._batch_environments = [None]
    (ids,), _, _ = trainer._tokenize_prompts([T.messages(load_tasks(scenario)[0])])
    menu = tokenizer.decode(ids).split("<tools>\n")[1].split("\n</tools>")[0]
    shown = [json.loads(line) for line in menu.strip().splitlines()]
    assert sorted(tool["function"]["name"] for tool in shown) == sorted(TOOLS[scenario])
    assert shown == tool_schemas(scenario)  # by name too: imitation, prompts and training see one order


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_imitation_baselines_and_the_trainer_show_one_prompt(tmp_path, tokenizer, scenario):
    ledger, talk = ledger_for(scenario), T.messages(load_tasks(scenario)[0])
    trainer = T.make_trainer(ledger.run, tiny_model(tokenizer), tokenizer, T.grpo_config(ledger.run, tmp_path),
                             T.training_rows(load_tasks(scenario)), ledger)
    trainer._batch_environments = [None]
    (ids,), _, _ = trainer._tokenize_prompts([talk])
    taught, _ = template_tokens(tokenizer, gold_demonstration(load_tasks(scenario)[0]))
    prompted = prompt_text(tokenizer, prompt_template(tokenizer), talk, tool_schemas(scenario))
    assert ids == taught[:len(ids)] == tokenizer(prompted, add_special_tokens=False)["input_ids"]


def test_weights_that_cannot_be_had_are_one_sentence(monkeypatch):
    monkeypatch.setattr("atlas_rlvr.runs.missing", lambda model: "not there")
    with pytest.raises(ValueError, match="^model `Qwen/Qwen3-1.7B` cannot be loaded .not there.; give a folder"):
        T.load_model(T.settings("qwen3-1.7b", "subtask"))


def test_b09_reset_is_no_tool(tokenizer, scripted):
    calls = gold_calls(load_tasks("subtask")[0], verify=False)
    script = [calls[1], ("reset_synthetic_data", {}), calls[1]]
    scripted(lambda task, turn: as_json(*script[turn]) if turn < 3 else "Done.")
    record, = evaluated("subtask", tokenizer, max_completion_length=4000)
    assert [call["outcome"] for call in record["calls"]] == ["ok", "unknown_tool", "ok"]
    assert record["components"]["hallucinated"] < 0 and record["components"]["duplicate"] < 0


@pytest.mark.parametrize("model, kind, template, shape", [
    ("qwen3-1.7b", "qwen3", "qwen3_chat_template", as_json),
    ("qwen3.5-4b", "qwen3.5", "qwen3_5_think_chat_template", as_xml),
])
@pytest.mark.parametrize("sampled", [False, True], ids=["scripted", "sampled"])
def test_the_papers_recipes_take_a_step(tmp_path, tokenizer, scripted, model, kind, template, shape, sampled):
    "Real configuration classes and TRL's own templates; few layers, random BF16 weights, on the CPU."
    import copy

    import torch
    from trl import chat_template_utils
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template, tokenizer.response_template = getattr(chat_template_utils, template), None
    scenario = "transition" if model == "qwen3-1.7b" else "subtask"
    changes = {"max_completion_length": 12} if sampled else {}
    run = T.plan_run(scenario, model, 0, use_cpu=True, max_batches=1, learning_rate=1e-2, **changes)
    ledger = T.Ledger(run, Recorder(tmp_path))
    policy = tiny_model(tokenizer, kind).to(torch.bfloat16)
    start = {name: weight.clone() for name, weight in policy.state_dict().items()}
    if not sampled:
        scripted(unreliable(shape, chance=0.7))
    trainer = T.make_trainer(run, policy, tokenizer, T.grpo_config(run, tmp_path / "checkpoints"),
                             T.training_rows(load_tasks(scenario)), ledger, [T.stop_rule(run, ledger)])
    trainer.train()
    records = read_lines(tmp_path / "rollouts.jsonl")
    assert trainer.state.global_step == run.plan["steps_per_batch"] == 2
    assert len(records) == run.plan["rollouts"] == run.values["num_generations"]
    if sampled:
        assert all(record["reward"] is not None for record in records)
        return
    assert {call.get("outcome") for record in records for call in record["calls"]} == {"ok"}
    assert len({record["reward"] for record in records}) > 1
    assert any(not torch.equal(weight, policy.state_dict()[name]) for name, weight in start.items())


def test_another_setting_does_not_take_a_runs_place(project, scripted):
    run = T.plan_run("page", "embedded", 0)
    run.folder.mkdir(parents=True)
    write_json(run.folder / "run.json", {"stop_reason": "interrupted", "config": {**run.values, **run.plan}})
    assert T.already_done(T.plan_run("page", "embedded", 0, max_batches=3)) is None
    with pytest.raises(ValueError, match="has another `learning_rate`, `temperature`; give this one a `tag` of its own, or `fresh=True`"):
        T.train("page", "embedded", 0, learning_rate=9e-4, temperature=0.3)


def test_a_torn_file_of_another_run_is_not_read(project):
    torn = run_folder("label", "embedded", 3)
    torn.mkdir(parents=True)
    (torn / "rollouts.jsonl").write_text('{"phase": "bef')
    assert T.known_before(T.plan_run("page", "embedded", 0), {("train", "page-01", 0)}) == []


def test_what_breaks_in_an_environment_has_no_reward(project, monkeypatch):
    task = load_tasks("page")[0]
    env = T.environment_factory(T.Ledger(T.plan_run("page", "embedded", 0)))()
    env.reset(task=json.dumps(task))
    with monkeypatch.context() as patch:
        patch.setattr("atlas_rlvr.environments.send", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            env.get_page(page_id="789")
    assert T.judge(task, [], failure=env._failure)["reward"] is None
    env.reset(task=json.dumps(task))
    assert env._failure is None
