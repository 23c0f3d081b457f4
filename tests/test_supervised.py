"Supervised training: examples, loss mask, budgets of tokens, whole runs of a tiny policy, GRPO from them, more prompts."
import json

import pytest
from conftest import ROOT
from test_train import SMALL, project, scripted, tiny_model, tokenizer, unreliable  # noqa: F401 (fixtures)

from atlas_rlvr import supervised as S
from atlas_rlvr import train as T
from atlas_rlvr.rewards import rescore, score_task
from atlas_rlvr.runs import check_run, read_lines, run_folder, write_json
from atlas_rlvr.scenarios import SCENARIOS, _names, find_task, load_tasks, more_tasks
from atlas_rlvr.tool_calls import build_trace, call_to_json

# ---------------------------------------------------------------------------------------------------------------------
# Examples


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("prompts", [0, 10], ids=["paper", "generated"])
def test_gold_demonstrations_earn_everything(scenario, prompts):
    for task in T.training_tasks(scenario, prompts):
        example = S.gold_demonstration(task)
        assert score_task(task, build_trace(example["messages"])).reward == 1.0
        assert [message["role"] for message in example["messages"][:2]] == ["system", "user"]
        assert example["messages"][1]["content"] == task["prompt"]
        assert json.loads(example["tools"]) == T.tool_schemas(scenario)


def rollout(task, generation, reward=1.0, **changed):
    calls = [call_to_json(call) for call in build_trace(S.gold_demonstration(task)["messages"])]
    calls[0] = calls[0] | changed
    return {"task": task["id"], "generation": generation, "reward": reward, "calls": calls}


def test_only_successes_are_imitated_and_each_once():
    one, other = load_tasks("subtask")[:2]
    records = [rollout(one, 0, 0.9), rollout(one, 1), rollout(one, 2), rollout(one, 3, None), rollout(other, 0),
               rollout(one, 4, arguments={"issueIdOrKey": "XYZ-456"})]
    assert S.successes(records) == [records[1], records[4], records[5]]
    table = S.counts(records, S.successes(records), 2.0)
    assert (table["sampled"], table["errors"], table["successful"], table["examples"]) == (6, 1, 4, 3)
    assert (table["prompts"], table["of"]) == (2, 2)


def test_calls_survive_the_table():
    from datasets import Dataset
    shapes = ["ABC-123", {"key": "ABC-123"}, None, ["ABC-123"]]
    calls = [[{"type": "function", "function": {"name": "create_issue", "arguments": {"fields": {"parent": shape}}}}] for shape in shapes]
    rows = [{"messages": [{"role": "assistant", "content": "", "tool_calls": call}], "tools": "[]"} for call in calls]
    rows.append(S.gold_demonstration(load_tasks("cross")[0]))
    assert list(Dataset.from_list(rows, on_mixed_types="use_json")) == rows


# ---------------------------------------------------------------------------------------------------------------------
# The loss mask


@pytest.fixture(scope="module")
def shipped():
    transformers = pytest.importorskip("transformers")
    from atlas_rlvr.policy import HOME
    return transformers.AutoTokenizer.from_pretrained(HOME)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_only_the_assistant_carries_loss(shipped, scenario):
    from atlas_rlvr.policy import encode
    for task in load_tasks(scenario)[:3]:
        example = S.gold_demonstration(task)
        ids, mask = S.template_tokens(shipped, example)
        same, written = encode(example["messages"], T.tool_schemas(scenario), shipped)
        assert ids == same and all(theirs for theirs, ours in zip(mask, written) if ours)
        beyond = shipped.decode([token for token, theirs, ours in zip(ids, mask, written) if theirs and not ours])
        assert beyond.replace("\n", "") == "<think></think>" * sum(m["role"] == "assistant" for m in example["messages"])
        text = shipped.decode([token for token, on in zip(ids, mask) if on])
        assert text.count("<tool_call>") == len(build_trace(example["messages"])) and text.rstrip().endswith("Done.<|im_end|>")


def test_the_mask_is_the_one_of_the_trainer(project, tokenizer):  # noqa: F811
    from datasets import Dataset
    from trl import SFTTrainer
    run = S.plan_imitation("subtask", "gold", "embedded", 0, token_budget=1)
    examples, _ = S.gold_examples(run)
    trainer = SFTTrainer(tiny_model(tokenizer), S.imitation_config(run), processing_class=tokenizer,
                         train_dataset=Dataset.from_list(examples, on_mixed_types="use_json"))
    for row, example in zip(trainer.train_dataset, examples, strict=True):
        ids, mask = S.template_tokens(tokenizer, example)
        assert row["input_ids"] == ids
        assert [label != -100 for label in row["labels"]] == [bool(on) for on in mask]


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


@pytest.fixture
def place(project, monkeypatch):  # noqa: F811
    "The empty project, where the tiny policy is also what gets imitated."
    monkeypatch.setattr(S, "load_model", T.load_model)
    monkeypatch.setattr(S, "SAMPLES", {"embedded": 32})
    return project


def loss_tokens(examples, tokenizer):  # noqa: F811
    return sum(sum(S.template_tokens(tokenizer, example)[1]) for example in examples)


def weights(folder):
    from safetensors.torch import load_file
    return load_file(T.newest_checkpoint(folder) / "model.safetensors")


def same_weights(one, other):
    import torch
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


BRIEF = {"max_completion_length": 4000, "repeats_train": 1}


def test_imitation_of_gold(place, scripted, tokenizer, capsys):  # noqa: F811
    scripted(unreliable())
    per_step = loss_tokens([S.gold_demonstration(task) for task in load_tasks("page")], tokenizer)
    result = S.supervise("page", "gold", "embedded", 3, token_budget=3 * per_step - 1, **BRIEF)
    folder = run_folder("page", "embedded", 3, variant=f"sft-gold-t{3 * per_step - 1}")
    assert result == json.loads((folder / "run.json").read_text()) and result["stop_reason"] == "budget"
    tokens = result["tokens"]
    assert (tokens["start"], tokens["generated"], tokens["optimised"], tokens["used"]) == (0, 0, 3 * per_step, 3 * per_step)
    records = read_lines(folder / "rollouts.jsonl")
    assert {(r["phase"], r["split"]) for r in records} == {(p, s) for p in ("before", "after") for s in ("train", "held_out")}
    assert tokens["evaluated"] == sum(r["tokens"] for r in records) > 0
    assert {r["temperature"] for r in records} == {0.7} and rescore(folder / "rollouts.jsonl")["equal"] == len(records)
    assert not same_weights(weights(folder), tiny_model(tokenizer).state_dict())
    assert result["demonstrations"]["examples"] == 8
    assert not result["losses"]  # after five steps
    assert not run_folder("page", "embedded", 3).exists()
    S.supervise("page", "gold", "embedded", 3, token_budget=3 * per_step - 1, **BRIEF)
    assert "Nothing was changed" in capsys.readouterr().out


def often_right(task, turn):
    import torch
    calls = T.gold_calls(task)
    if turn == len(calls) or torch.rand(()) > 0.9:
        return "Done."
    return "<tool_call>\n" + json.dumps(dict(zip(("name", "arguments"), calls[turn]))) + "\n</tool_call>"


def test_own_successes_are_counted_and_paid_for(place, scripted, monkeypatch, tokenizer):  # noqa: F811
    scripted(often_right)
    taught = []
    learn = S.imitate
    monkeypatch.setattr(S, "imitate", lambda run, model, tok, examples, at: (taught.extend(examples), learn(run, model, tok, examples, at)))
    result = S.supervise("page", "own", "embedded", 0, token_budget=9000, **BRIEF)
    folder = run_folder("page", "embedded", 0, variant="sft-own-t9000")
    sampled = [r for r in read_lines(folder / "rollouts.jsonl") if r["phase"] == "sampled"]
    table = result["demonstrations"]
    assert table["successful"] == sum(r["reward"] == 1 for r in sampled) > table["examples"] == len(taught) > 0
    assert {score_task(find_by_prompt(e), build_trace(e["messages"])).reward for e in taught} == {1.0}
    assert result["tokens"]["generated"] == sum(r["tokens"] for r in sampled)
    assert result["tokens"]["used"] == result["tokens"]["generated"] + result["tokens"]["optimised"] >= 9000
    step = max(sum(S.template_tokens(tokenizer, example)[1]) for example in taught) * S.BATCH * S.ACCUMULATE
    assert result["tokens"]["used"] < 9000 + step


def find_by_prompt(example):
    return next(task for task in load_tasks("page") if task["prompt"] == example["messages"][1]["content"])


def test_nothing_to_imitate_is_said(place, scripted):  # noqa: F811
    scripted(lambda task, turn: "Done.")
    with pytest.raises(ValueError, match="none of 32 rollouts earned 1.00, so there is nothing to imitate"):
        S.supervise("page", "own", "embedded", 0, token_budget=1000, **BRIEF)


def test_a_killed_imitation_goes_on(place, scripted, monkeypatch, tokenizer):  # noqa: F811
    scripted(unreliable(chance=1.0))
    monkeypatch.setattr(S, "SAVE_EVERY", 2)
    per_step = loss_tokens([S.gold_demonstration(task) for task in load_tasks("page")], tokenizer)
    budget = 5 * per_step
    run = S.plan_imitation("page", "gold", "embedded", 1, token_budget=budget, **BRIEF)
    whole = S.supervise("page", "gold", "embedded", 1, token_budget=budget, **BRIEF)
    expected = weights(run.folder)
    T.set_aside(run.folder)
    step_end = S.Spending.on_step_end

    def die(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt
        return step_end(self, args, state, control, **kwargs)
    monkeypatch.setattr(S.Spending, "on_step_end", die)
    with pytest.raises(KeyboardInterrupt):
        S.supervise("page", "gold", "embedded", 1, token_budget=budget, **BRIEF)
    assert json.loads((run.folder / "run.json").read_text())["stop_reason"] == "interrupted"
    assert T.newest_checkpoint(run.folder).name == "checkpoint-2"
    monkeypatch.setattr(S.Spending, "on_step_end", step_end)
    again = S.supervise("page", "gold", "embedded", 1, token_budget=budget, **BRIEF)
    assert again["tokens"]["optimised"] == whole["tokens"]["optimised"] == budget
    assert same_weights(weights(run.folder), expected)


# ---------------------------------------------------------------------------------------------------------------------
# GRPO from it, at the same price


def test_reinforcement_from_imitation(place, scripted, monkeypatch, tokenizer):  # noqa: F811
    scripted(unreliable())
    loaded, load = [], T.load_model
    monkeypatch.setattr(T, "load_model", lambda values, checkpoint=None: loaded.append(checkpoint) or load(values, checkpoint))
    changes = {name: SMALL[name] for name in ("prompts_per_batch", "num_generations", "max_completion_length")} | {"repeats_train": 1}
    changes |= {"repeats_held_out": 1}
    result = S.climb("page", "sft-gold-grpo", "embedded", 2, 12_000, **changes)
    first = run_folder("page", "embedded", 2, variant="sft-gold-t6000")
    second = run_folder("page", "embedded", 2, variant="from-sft-gold-t6000 t12000")
    assert loaded == [T.newest_checkpoint(first)] and result["stop_reason"] == "budget"
    tokens, before = result["tokens"], json.loads((first / "run.json").read_text())["tokens"]
    assert tokens["start"] == before["used"] >= 6000 and tokens["optimised"] == 2 * tokens["generated"]
    assert tokens["used"] == tokens["start"] + 3 * tokens["generated"] >= 12_000
    last = [r["tokens"] for r in read_lines(second / "rollouts.jsonl") if r["phase"] == "train" and r["batch"] == result["batches"]]
    assert tokens["used"] - 3 * sum(last) < 12_000
    assert not run_folder("page", "embedded", 2).exists() and not same_weights(weights(first), weights(second))
    after, taken = ([r["calls"] for r in read_lines(folder / "rollouts.jsonl") if r["phase"] == phase]
                    for folder, phase in ((first, "after"), (second, "before")))
    assert after == taken and len(taken) == 4


def test_every_written_token_is_counted(place, scripted, monkeypatch):  # noqa: F811
    from trl import GRPOTrainer
    scripted(unreliable())
    turn, written = GRPOTrainer._generate_single_turn, []

    def counted(self, *args, **kwargs):
        ids, logprobs = turn(self, *args, **kwargs)
        written.append(sum(map(len, ids)))
        return ids, logprobs
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", counted)
    result = T.train("page", "embedded", 0, **SMALL | {"max_batches": 2})
    assert result["tokens"]["generated"] + result["tokens"]["evaluated"] == sum(written)
    assert result["tokens"]["used"] == 3 * result["tokens"]["generated"]


def test_a_budget_ends_grpo_also_after_a_kill(place, scripted, monkeypatch):  # noqa: F811
    scripted(unreliable(chance=1.0))
    plan = SMALL | {"token_budget": 9000, "max_batches": 50, "patience": 1, "window": 1}
    whole = T.train("page", "embedded", 0, **plan)
    folder = run_folder("page", "embedded", 0, variant="t9000")
    assert whole["stop_reason"] == "budget" and whole["batches"] > 2  # the rule alone would have ended it: patience 1
    T.set_aside(folder)
    place_of, killed = T.Batches._place, []

    def die(self, task_id):
        if self.batch == 2 and not killed:
            killed.append(True)
            raise KeyboardInterrupt
        return place_of(self, task_id)
    monkeypatch.setattr(T.Batches, "_place", die)
    with pytest.raises(KeyboardInterrupt):
        T.train("page", "embedded", 0, **plan)
    again = T.train("page", "embedded", 0, **plan)
    assert (again["batches"], again["tokens"]) == (whole["batches"], whole["tokens"])


def test_a_start_that_is_not_there_is_refused(place):
    with pytest.raises(ValueError, match="embedded-sft-own-t5-s0, which has not ended; finish it first"):
        T.train("page", "embedded", 0, start="sft-own-t5")


@pytest.mark.parametrize("changes, name", [
    ({}, "embedded-s0"), ({"rewards": "audited"}, "embedded-audited-s0"), ({"prompts": 40}, "embedded-p40-s0"),
    ({"token_budget": 9, "tag": "lr0.001", "learning_rate": 1e-3}, "embedded-t9-lr0.001-s0"),
    ({"start": "sft-gold-t5", "token_budget": 9}, "embedded-from-sft-gold-t5-t9-s0")])
def test_names_of_folders(changes, name):
    assert T.plan_run("subtask", "embedded", 0, **changes).folder.name == name


def test_the_curve_of_a_training_is_kept(tmp_path):
    (tmp_path / "model.safetensors").touch()
    log = [{"step": 5, "loss": 2.5, "learning_rate": 0.1}, {"step": 7, "train_runtime": 3.0}, {"step": 10, "loss": 1.5}]
    write_json(tmp_path / "trainer_state.json", {"log_history": log})
    assert S.losses(tmp_path) == [{"step": 5, "loss": 2.5}, {"step": 10, "loss": 1.5}]


def test_a_finished_run_of_grpo_does_not_answer_for_this_page(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").write_text("")
    monkeypatch.chdir(tmp_path)
    write_json(run_folder("page", "embedded", 0) / "run.json", {"stop_reason": "converged", "scenario": "page", "model": "embedded",
                                                                "seed": 0, "batches": 1, "minutes": 1.0})
    values = {"scenario": "page", "model": "embedded", "seed": 0, "fresh": False}
    also = {"source": "gold", "prompts": 0, "budget": 0, "sft_rate": 0.0, "grpo_rate": 0.0}
    assert "converged" in check_run(values, ROOT / "nbs/05_train.ipynb", tmp_path)
    assert check_run(values | also, ROOT / "nbs/23_supervised.ipynb", tmp_path) is None


# ---------------------------------------------------------------------------------------------------------------------
# More prompts


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_more_prompts_share_nothing_with_the_held_out(scenario):
    tasks, held_out = more_tasks(scenario, 120), load_tasks(scenario, "held_out")
    names = set().union(*(_names(task["gold"]) for task in held_out))
    assert len({task["prompt"] for task in tasks}) == 120
    assert not {task["prompt"] for task in tasks} & {task["prompt"] for task in held_out}
    assert not set().union(*(_names(task["gold"]) for task in tasks)) & names
    assert more_tasks(scenario, 10) == tasks[:10] and more_tasks(scenario, 40) == tasks[:40]
    assert {task["split"] for task in tasks} == {"train"} and all(find_task(scenario, t["id"]) == t for t in tasks)
    assert [fault for task in tasks for fault in T.lint(task)] == []


@pytest.mark.parametrize("scenario", ["subtask", "cross"])
@pytest.mark.parametrize("n", S.PROMPTS)
def test_more_prompts_fit_the_batches(scenario, n):
    run = T.plan_run(scenario, "embedded", 0, **S.on_prompts(n))
    assert run.plan["prompts"] == len(run.tasks) == n and run.plan["batches_per_epoch"] == n // 5
    assert len(T.split_tasks(run)["train"]) == min(n, 40) and len(T.split_tasks(run)["held_out"]) == 40


def test_a_run_on_more_prompts(place, scripted, monkeypatch):  # noqa: F811
    tasks = {task["prompt"]: task for task in more_tasks("page", 10)}
    read = T.load_tasks
    import test_train
    monkeypatch.setattr(test_train, "load_tasks", lambda name, split="train": read(name, split) + (
        list(tasks.values()) if (name, split) == ("page", "train") else []))
    scripted(unreliable())
    result = T.train("page", "embedded", 0, **SMALL | S.on_prompts(10) | {"num_generations": 4, "max_batches": 2})
    folder = run_folder("page", "embedded", 0, variant="p10")
    records = read_lines(folder / "rollouts.jsonl")
    assert {r["task"] for r in records if r["phase"] == "train"} == {task["id"] for task in tasks.values()}
    assert result["variant"] == "p10" and rescore(folder / "rollouts.jsonl")["equal"] == len(records)


def test_pages_parameters_are_those_of_climb():
    import ast
    import inspect
    cells = json.loads((ROOT / "nbs/23_supervised.ipynb").read_text())["cells"]
    tagged, = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    names = [line.target.id for line in ast.parse("".join(tagged["source"])).body]
    assert names[0] == "scenario" and set(names) - {"source", "grpo", "prompts"} <= set(inspect.signature(S.climb).parameters)


def test_only_what_is_missing_is_sampled_again(place, scripted, monkeypatch):  # noqa: F811
    scripted(unreliable())
    run = S.plan_imitation("page", "own", "embedded", 0, token_budget=9000, **BRIEF)
    recorder, asked = S.Recorder(run.folder), []
    play = S.evaluate
    monkeypatch.setattr(S, "evaluate", lambda run, model, tok, rows, rec: (asked.append(len(rows)), play(run, model, tok, rows, rec)))
    model, tok = S.load_model(run.values, None)
    first = S.sample_own(run, model, tok, recorder)
    lines = recorder.rollouts.read_text().splitlines(keepends=True)
    recorder.rollouts.write_text("".join(lines[:-3]))
    again = S.sample_own(run, model, tok, S.Recorder(run.folder))
    assert asked == [32, 3] and len(again) == len(first) == 32 and again[:29] == first[:29]
    assert S.sample_own(run, model, tok, S.Recorder(run.folder)) == again and asked == [32, 3]


def test_a_budget_that_sampling_spends_is_refused(place, scripted):  # noqa: F811
    scripted(often_right)
    with pytest.raises(ValueError, match="sampling alone has spent the budget of 100 tokens; give a larger one"):
        S.supervise("page", "own", "embedded", 0, token_budget=100, **BRIEF)
