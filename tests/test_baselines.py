"""The episode loop: what ends it, what it never runs twice, and a whole baseline of a tiny random model."""
import copy
import json
from functools import partial
from types import SimpleNamespace

import pytest

from atlas_rlvr import baselines, runs
from atlas_rlvr.baselines import (
    MAX_TURNS,
    batch_policy,
    call_message,
    episode,
    outcome_table,
    play_tasks,
    prompt_template,
    prompt_text,
    rollout_record,
    run_baseline,
    run_episode,
    run_episodes,
    script,
)
from atlas_rlvr.endpoints import with_retries
from atlas_rlvr.environments import run_calls, tool_schemas
from atlas_rlvr.faults import FAULTY_HASH, faulty_env, faulty_score, find_plan
from atlas_rlvr.rewards import replay, score
from atlas_rlvr.runs import Recorder, plain_runs, read_lines, run_folders
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks, messages, task_env
from atlas_rlvr.tool_calls import build_trace, response_parser

SUBTASK, PAGE, CROSS = (load_tasks(scenario)[0] for scenario in ("subtask", "page", "cross"))
READ = ("get_issue", {"issueIdOrKey": "ABC-123"})


def turns_of(task, verify=True):
    return [[call] for call in gold_calls(task, verify)]


def play(policy, task, **options):
    env = task_env(task)
    talk, outcome = run_episode(policy, env, messages(task), tool_schemas(task["scenario"]), **options)
    return talk, outcome, build_trace(talk), env


def test_b07_policy_that_reads_for_ever():
    talk, outcome, trace, env = play(script([[READ]] * 99), CROSS)
    assert (outcome, len(trace), sum(message["role"] == "assistant" for message in talk)) == ("turn_cap", 25, MAX_TURNS)
    assert [call.outcome for call in trace] == ["ok"] * 24 + ["unexecuted"] and len(env._log) == 24
    result = score("cross", trace, CROSS["gold"])
    assert result.reward == 0.0 and result.raw < 0


def test_f14_right_calls_before_the_cap_still_count():
    right = turns_of(CROSS, verify=False)
    talk, outcome, trace, _ = play(script(right + [[("get_page", {"page_id": "789"})]] * 99), CROSS)
    assert (outcome, len(trace), len(right)) == ("turn_cap", 25, 4)
    short = score("cross", play(script(right), CROSS)[2], CROSS["gold"])
    long = score("cross", trace, CROSS["gold"])
    assert long.components["excess"] == pytest.approx(-0.05 * 19) and long.raw < short.raw
    assert long.components["issue.summary"] == short.components["issue.summary"] > 0
    assert rollout_record(CROSS, talk, outcome, None, model="m", seed=0, generation=0)["outcome"] == "turn_cap"


@pytest.mark.parametrize("cap", [1, 2, 3, 4])
def test_any_cap(cap):
    _, outcome, trace, env = play(script(turns_of(SUBTASK)), SUBTASK, max_turns=cap)
    assert (outcome, len(trace)) == ("ended", 3) if cap == 4 else ("turn_cap", cap)
    assert len(env._log) == (3 if cap == 4 else cap - 1)


def flaky(policy, failures, after):
    def service(talk):
        if failures and sum(message["role"] == "assistant" for message in talk) >= after:
            raise failures.pop()
        return policy(talk)
    return service


def test_f10_request_is_repeated_and_no_call_is():
    policy = with_retries(flaky(script(turns_of(PAGE)), [TimeoutError("once")], after=2), wait=0)
    _, outcome, trace, env = play(policy, PAGE)
    pages = [row["title"] for row in env._world.rows("pages")].count(PAGE["gold"]["title"])
    assert (outcome, pages, [call.name for call in trace].count("create_page")) == ("ended", 1, 1)
    assert score("page", trace, PAGE["gold"]).reward == 1.0


@pytest.mark.parametrize("failure", [TimeoutError("gone"), ValueError("no choices"), MemoryError()])
def test_a_broken_service_is_an_error_and_no_zero(failure):
    policy = flaky(script(turns_of(PAGE)), [failure] * 9, after=2)
    [result] = run_episodes(lambda talks: [policy(talk) for talk in talks],
                            [episode(task_env(PAGE), messages(PAGE), tool_schemas("page"))])
    record = rollout_record(PAGE, *result, model="m", seed=0, generation=0)
    assert (record["outcome"], record["reward"], record["raw"]) == ("error", None, None)
    assert type(failure).__name__ in record["error"] and len(record["calls"]) == 2
    assert outcome_table([record]) == {"n": 0, "mean": None, "audited": None, "perfect": 0, "errors": 1, "ended": 0, "truncated": 0,
                                       "malformed": 0, "turn_cap": 0}


def test_a_site_that_breaks_costs_one_rollout():
    envs = [task_env(SUBTASK) for _ in range(3)]
    envs[1]._handle = lambda *request: 1 / 0
    policy, tools = script(turns_of(SUBTASK)), tool_schemas("subtask")
    episodes = [episode(env, messages(SUBTASK), tools) for env in envs]
    played = run_episodes(lambda talks: [policy(talk) for talk in talks], episodes)
    records = [rollout_record(SUBTASK, *result, model="m", seed=0, generation=0) for result in played]
    assert [(record["outcome"], record["reward"]) for record in records] == [("ended", 1.0), ("error", None), ("ended", 1.0)]
    assert records[1]["error"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gold_through_the_loop(scenario):
    for task in load_tasks(scenario):
        _, outcome, trace, _ = play(script(turns_of(task)), task)
        assert outcome == "ended" and {call.outcome for call in trace} == {"ok"}
        assert score(scenario, trace, task["gold"]).reward == 1.0


def test_every_call_id_is_answered_in_order():
    talk, _, trace, env = play(script([gold_calls(CROSS, verify=False)]), CROSS)
    asked = [call["id"] for call in talk[2]["tool_calls"]]
    assert asked == [message["tool_call_id"] for message in talk if message["role"] == "tool"] == [
        call.id for call in trace]
    assert [name for name, _, _ in env._log] == [call.name for call in trace] and len(trace) == 4


@pytest.mark.parametrize("reply, outcome", [
    ('<tool_call>{"name": "get_issue", "arguments": {}}</tool_call><tool_call>{"name": }</tool_call>', "malformed"),
    ('<tool_call>{"name": "get_issue", "argum', "truncated"),
    ({"content": "I will", "finish_reason": "length"}, "truncated"),
    (call_message([READ]) | {"finish_reason": "length"}, "truncated"),
    ({"tool_calls": [{"function": {"name": "get_issue", "arguments": '["ABC-123"]'}}]}, "malformed"),
    (None, "truncated"), ("", "ended"), ({}, "ended"), (7, "ended")])
def test_turns_that_end_an_episode_run_nothing(reply, outcome):
    talk, found, _, env = play(lambda talk: reply, SUBTASK)
    assert (found, env._log) == (outcome, [])
    assert found == outcome and not any(message["role"] == "tool" for message in talk)


def test_answers_without_room_are_dropped():
    talk, outcome, trace, env = play(lambda talk: call_message([READ]) if len(talk) < 6 else None, SUBTASK)
    assert (outcome, [call.outcome for call in trace]) == ("truncated", ["ok", "unexecuted"])
    assert len(env._log) == 2 and talk[-1]["role"] == "assistant"


@pytest.mark.parametrize("text", [
    '<tool_call>\n{"name": "get_issue", "arguments": {"issueIdOrKey": "ABC-123"}}\n</tool_call><|im_end|>',
    'First.\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
    "Done.<|im_end|>", '<tool_call>\n{"name": "get_issue", "arguments": {"issueIdOrKey": }}\n</tool_call><|im_end|>',
    '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": "b", ]}</tool_call><|im_end|>',
    '<tool_call>\n{"name": "get_issue", "argum', '<tool_call>{"arguments": {}}</tool_call>',
    '<think>\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n</think>\nDone.<|im_end|>'])
def test_trl_runs_the_same_calls(text):
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    from trl import chat_template_utils as trl

    class Characters:
        eos_token, response_template = "<|im_end|>", trl.qwen3_template

        def decode(self, ids, skip_special_tokens=False):
            text = "".join(map(chr, ids))
            return text.replace("<|im_end|>", "") if skip_special_tokens else text

        def parse_response(self, ids, prefix, tools=None):
            return chat_parsing.parse_response(self.decode(ids), trl.qwen3_template, prefix=self.decode(prefix))

    def functions(tokenizer):
        message = trl.parse_response(tokenizer, [*map(ord, text)], prefix=[*map(ord, "<|im_start|>assistant\n")])
        return [call["function"] for call in message.get("tool_calls", [])]
    stock, ours = Characters(), Characters()
    ours.parse_response = response_parser(ours)
    assert functions(stock) == functions(ours)
    talk, _, _, env = play(lambda talk: text.replace("<|im_end|>", "") if len(talk) == 2 else "Done.", SUBTASK)
    assert [name for name, *_ in env._log] == [f["name"] for f in functions(stock) if f["name"] == "get_issue"]
    assert sum(message["role"] == "tool" for message in talk) == len(functions(stock))


def keyed(records):
    return {(record["task"], record["generation"]): record["reward"] for record in records}


def solver(tasks, log=None):
    "A batch policy that knows every task by its prompt."
    by_prompt = {task["prompt"]: script(turns_of(task)) for task in tasks}

    def policy(talks):
        if log is not None:
            log.append(len(talks))
        return [by_prompt[talk[1]["content"]](talk) for talk in talks]
    return policy


def test_records_come_in_input_order_and_rescore(tmp_path):
    tasks, run = load_tasks("cross"), {"model": "m", "seed": 3}
    records = play_tasks(lambda seed: solver(tasks), tasks, 2, 5, Recorder(tmp_path), run)
    assert [(r["task"], r["generation"]) for r in records] == [(t["id"], g) for g in (0, 1) for t in tasks]
    assert {r["reward"] for r in records} == {1.0} and {r["phase"] for r in records} == {"before"}
    one_by_one = play_tasks(lambda seed: solver(tasks), tasks, 2, 1, Recorder(tmp_path / "one"), run)
    assert one_by_one == records == read_lines(tmp_path / "rollouts.jsonl")
    for record in records[:3]:
        shipped = {**record, "calls": [{k: v for k, v in call.items() if k != "body"} for call in record["calls"]]}
        del shipped["messages"]
        assert [call.status for call in replay(shipped)] == [call.get("status") for call in record["calls"]]


def test_an_interrupted_baseline_goes_on(tmp_path):
    tasks, run, log = load_tasks("subtask"), {"model": "m", "seed": 0}, []
    seeds = []

    def make(seed):
        seeds.append(seed)
        return solver(tasks, log)
    whole = play_tasks(make, tasks, 1, 3, Recorder(tmp_path / "whole"), run)
    assert seeds == [0, 3, 6]
    part = tmp_path / "part"
    part.mkdir()
    lines = (tmp_path / "whole" / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (part / "rollouts.jsonl").write_text("".join(lines[:4]))  # the second chunk is not complete
    seeds.clear()
    assert play_tasks(make, tasks, 1, 3, Recorder(part), run) == whole
    assert seeds == [3, 6] and len(read_lines(part / "rollouts.jsonl")) == len(tasks)
    seeds.clear()
    assert play_tasks(make, tasks, 1, 3, Recorder(part), run) == whole and seeds == []


def test_faults_strike_a_baseline_and_its_reward_reads_the_state(tmp_path):
    tasks, run = load_tasks("subtask"), {"model": "m", "seed": 0}

    def twice(seed):
        "Each create once more than needed."
        by_prompt = {task["prompt"]: script([[call] for call in [*gold_calls(task)[:2], gold_calls(task)[1]]]) for task in tasks}
        return lambda talks: [by_prompt[talk[1]["content"]](talk) for talk in talks]
    records = play_tasks(twice, tasks, 2, 3, Recorder(tmp_path), run, partial(baselines._chunk, faults="lost_response:3"))
    assert len({record["faults"] for record in records}) == len(records) == 16
    for record in records:
        task = next(task for task in tasks if task["id"] == record["task"])
        env = faulty_env(task, find_plan(record["faults"]))
        again = run_calls(env, [(call["name"], call["arguments"]) for call in record["calls"]])
        assert [call.status for call in again] == [call["status"] for call in record["calls"]]
        assert faulty_score(task, again, env._world).reward == record["reward"]
        assert record["components"]["state.duplicate"] == -0.15 and record["reward_hash"] == FAULTY_HASH
    assert play_tasks(None, tasks, 2, 3, Recorder(tmp_path), run) == records


def test_a_baseline_under_faults_has_a_folder_that_says_so(tiny, tmp_path, monkeypatch):
    (tmp_path / "settings.ini").write_text("")
    monkeypatch.chdir(tmp_path)
    made = {faults: run_baseline("subtask", str(tiny.folder), repeats=1, faults=faults) for faults in ("", "slow:1")}
    assert [record["faults"].partition(":")[0] for record in made["slow:1"]] == ["slow"] * 8
    assert all("faults" not in record for record in made[""])
    folders = run_folders()
    assert len(folders) == 2 and [folder.name for folder in plain_runs()] == [f.name for f in folders if "slow" not in f.name]
    with pytest.raises(ValueError, match="unknown faults 'storm'"):
        run_baseline("subtask", str(tiny.folder), faults="storm")


def test_a_folder_that_is_no_model_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    (tmp_path / "settings.ini").write_text("")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="model `empty` cannot be loaded .*; give a folder that `save_pretrained` wrote") as error:
        run_baseline("subtask", "empty", faults="slow:1")
    assert "\n" not in str(error.value) and not (tmp_path / "results").exists()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "A folder with a random Qwen3 of two layers, and a tokenizer trained on one conversation."
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from atlas_rlvr.policy import train_tokenizer
    text = json.dumps([messages(task) for task in load_tasks("subtask")] + tool_schemas("subtask"))
    tokenizer = train_tokenizer([text], size=700)
    template = prompt_template(tokenizer)
    schemas = tool_schemas("subtask")
    prompts = [prompt_text(tokenizer, template, messages(task), schemas) for task in load_tasks("subtask")]
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, max_position_embeddings=longest + 40, tie_word_embeddings=True))
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return SimpleNamespace(folder=folder, model=model, tokenizer=tokenizer, torch=torch)


def test_a_whole_baseline_of_a_tiny_model(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "run_folder", lambda scenario, model, seed, variant="": tmp_path / f"{variant}{seed}")
    records = run_baseline("subtask", str(tiny.folder), seed=1, repeats=1)
    assert [record["task"] for record in records] == [task["id"] for task in load_tasks("subtask")]
    assert {record["model"] for record in records} == {str(tiny.folder)} and not any("error" in r for r in records)
    assert all(record["reward"] == 0.0 and record["temperature"] == 0.7 for record in records)
    printed = capsys.readouterr().out
    assert "8/8" in printed and "errors 0" in printed
    assert run_baseline("subtask", str(tiny.folder), seed=1, repeats=1) == records
    assert capsys.readouterr().out == ""
    (tmp_path / "1" / "rollouts.jsonl").unlink()
    assert run_baseline("subtask", str(tiny.folder), seed=1, repeats=1) == records


def test_errors_of_a_local_baseline_are_played_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "run_folder", lambda scenario, model, seed, variant="": tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(baselines, "sample", lambda *_: 1 / 0)
        assert {record["outcome"] for record in run_baseline("subtask", str(tiny.folder), repeats=1)} == {"error"}
    records = run_baseline("subtask", str(tiny.folder), repeats=1)
    assert not any("error" in record for record in records) and len(records) == 8
    assert len(read_lines(tmp_path / "run" / "rollouts.aside-1.jsonl")) == 8
    fresh = tmp_path / "fresh"
    monkeypatch.setattr(baselines, "run_folder", lambda scenario, model, seed, variant="": fresh)
    assert run_baseline("subtask", str(tiny.folder), repeats=1) == records


def test_errors_of_a_training_stay_where_they_are(tmp_path):
    error = {"outcome": "error", "phase": "train", "batch": 1}
    Recorder(tmp_path).append(error)
    with baselines.open_run(tmp_path, {}) as recorder:
        assert read_lines(recorder.rollouts) == [error]


def test_one_start_at_a_time_holds_a_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "run_folder", lambda scenario, model, seed, variant="": tmp_path)
    with runs.alone(tmp_path), pytest.raises(ValueError, match="in use by another start"):
        run_baseline("subtask", str(tiny.folder), repeats=1)


class Parrot:
    "A model that writes given texts, one a turn."

    def __init__(self, tiny, texts):
        self.config, self.device, self.tiny, self.texts = tiny.model.config, "cpu", tiny, texts

    def eval(self):
        return self

    def generate(self, input_ids, attention_mask, generation_config):
        rows = [self.tiny.tokenizer(self.texts[self.turn(row)])["input_ids"] for row in input_ids]
        rows = [row[:generation_config.max_new_tokens] for row in rows]
        pad = [generation_config.pad_token_id] * max(map(len, rows))
        made = self.tiny.torch.tensor([(row + pad)[:len(pad)] for row in rows])
        return self.tiny.torch.cat([input_ids, made], dim=1)

    def turn(self, row):
        return self.tiny.tokenizer.decode(row).count("<|im_start|>assistant") - 1


def written(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def alone(*made, **options):
    "A local model as a policy of one conversation."
    many = batch_policy(*made, **options)
    return lambda talk: many([talk])[0]


@pytest.fixture
def roomy(tiny, monkeypatch):
    monkeypatch.setattr(tiny.model.config, "max_position_embeddings", 10**6)
    return tiny


def test_text_of_a_local_model_gives_the_scripted_episode(roomy):
    texts = [written(*call) for [call] in turns_of(SUBTASK)] + ["Done.<|im_end|>"]
    policy = alone(Parrot(roomy, texts), roomy.tokenizer, tool_schemas("subtask"), budget=10**5)
    talk, outcome, trace, _ = play(policy, SUBTASK)
    assert (outcome, trace) == ("ended", play(script(turns_of(SUBTASK)), SUBTASK)[2])
    assert talk[-1]["content"] == "Done."


def test_budget_covers_answers_and_is_per_conversation(roomy):
    texts = [written(*READ)] * 50
    tokens = len(roomy.tokenizer(texts[0])["input_ids"])

    def ending(budget):
        policy = alone(Parrot(roomy, texts), roomy.tokenizer, tool_schemas("subtask"), budget=budget)
        return play(policy, SUBTASK)
    assert [call.outcome for call in ending(tokens - 5)[2]] == ["truncated"]
    assert [call.outcome for call in ending(tokens + 5)[2]] == ["unexecuted"]  # its answer does not fit
    outcomes = [call.outcome for call in ending(10 * tokens)[2]]
    assert set(outcomes[:-1]) == {"ok"} and outcomes[-1] != "ok" and len(outcomes) < 10
    assert ending(10 * tokens)[1] == "truncated"


def test_a_batch_gives_what_single_episodes_give(roomy):
    texts = [written(*call) for [call] in turns_of(SUBTASK)] + ["Done.<|im_end|>"]
    tasks = load_tasks("subtask")[:3]
    policy = batch_policy(Parrot(roomy, texts), roomy.tokenizer, tool_schemas("subtask"), budget=10**5)
    episodes = [episode(task_env(task), messages(task), tool_schemas("subtask")) for task in tasks]
    single = alone(Parrot(roomy, texts), roomy.tokenizer, tool_schemas("subtask"), budget=10**5)
    assert [(talk, outcome) for talk, outcome, _ in run_episodes(policy, episodes)] == [
        play(single, task)[:2] for task in tasks]


def test_sampling_is_seeded_and_padding_does_not_matter(tiny):
    def write(seed, talks, temperature=0.7):
        policy = batch_policy(tiny.model, tiny.tokenizer, tool_schemas("subtask"), 20, temperature, seed=seed)
        return policy(talks)
    short, long = (messages(task) for task in load_tasks("subtask")[:2])
    long = [*long[:1], {"role": "user", "content": long[1]["content"] * 2}]
    assert write(0, [short, long]) == write(0, [short, long]) != write(1, [short, long])
    assert write(0, [short, long], 0) == [*write(0, [short], 0), *write(0, [long], 0)]
    assert all(message["finish_reason"] == "length" for message in write(0, [short]))


@pytest.mark.parametrize("temperature", [0.7, 0])
def test_a_models_own_settings_do_not_bend_the_distribution(tiny, monkeypatch, temperature):
    from transformers import GenerationConfig

    def write():
        policy = batch_policy(tiny.model, tiny.tokenizer, tool_schemas("subtask"), 20, temperature)
        return policy([messages(SUBTASK)])
    plain = write()
    own = {"do_sample": True, "top_k": 3, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1}
    monkeypatch.setattr(tiny.model, "generation_config", GenerationConfig(**own))
    assert write() == plain


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_a_template_without_tools_is_refused(tiny, template):
    plain = copy.copy(tiny.tokenizer)
    plain.chat_template = template
    with pytest.raises(ValueError, match="shows no tools"):
        batch_policy(tiny.model, plain, tool_schemas("subtask"), 20)


@pytest.mark.parametrize("arguments, message", [
    (("tickets", "embedded"), "unknown scenario"), (("subtask", "gpt-9"), "gpt-9")])
def test_bad_input_is_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        run_baseline(*arguments)
    assert "\n" not in str(error.value)
