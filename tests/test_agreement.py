"""Training and baselines: TRL's tool loop and ours turn the same texts into the same rollout."""
import json
import re

import pytest

from atlas_rlvr import train as T
from atlas_rlvr.baselines import rollout_record, run_episode
from atlas_rlvr.environments import tool_schemas
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks, messages, task_env
from atlas_rlvr.tool_calls import normalise

TASK = load_tasks("subtask")[0]


def block(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


READ, CREATE, VERIFY = (block(*call) for call in gold_calls(TASK))
STRINGS = block("create_issue", {"fields": json.dumps({"summary": "x"})})
AGREE = {
    "gold": [READ, CREATE, VERIFY, "Done."], "early-stop": [READ, "Done."], "no-call": ["Done."], "empty": [""],
    "two-calls-in-a-turn": [READ + "\n" + CREATE, "Done."], "duplicate": [CREATE, CREATE, CREATE, "Done."],
    "unknown-tool": [block("create_subtask", {"parent": "ABC-123"}), READ, CREATE, "Done."],
    "wrong-keyword": [block("get_issue", {"key": "ABC-123"}), block("create_issue", {}), "Done."],
    "nested-text": [STRINGS, STRINGS, "Done."],
    "parent-as-text": [block("create_issue", {"fields": {"parent": "A"}}), "Done."],
    "malformed": [READ, '<tool_call>\n{"name": "create_issue", "arguments": {"fields": }}\n</tool_call>', CREATE],
    "one-of-two-malformed": [READ + "<tool_call>{]</tool_call>", CREATE], "never-closed": [READ, CREATE[:-14]],
    "thought": [f"<think>\n{CREATE}\n</think>\n\n{READ}", "Done."], "reads-for-ever": [READ] * 40,
    "text-around": [f"First I read.\n{READ}", f"Now I write.\n{CREATE}", "Done."],
}
REPAIRED = {
    "several-values": [READ.replace("\n</tool_call>", '\n{"name": "get_issue", "arguments": {}}</tool_call>'), "Done."],
    "control-characters": [CREATE.replace("Write", "Write\n\t"), "Done."],
    "python-literal": [re.sub("'", "", CREATE).replace('"', "'"), "Done."],
    "double-encoded": [block("get_issue", json.dumps({"issueIdOrKey": "ABC-123"})), CREATE, "Done."],
    "no-arguments": ['<tool_call>{"name": "get_issue", "arguments": null}</tool_call>', CREATE, "Done."],
}


@pytest.fixture(scope="module")
def tiny():
    "A random Qwen3 of one layer and its tokenizer."
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from atlas_rlvr.policy import train_tokenizer
    T.quiet_libraries(T.settings("embedded", "subtask"))
    texts = [json.dumps([messages(load_tasks(name)[0]), tool_schemas(name)]) for name in SCENARIOS]
    tokenizer = train_tokenizer(texts, 600)
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=32, tie_word_embeddings=True)), tokenizer


@pytest.fixture
def trl_record(tiny, monkeypatch):
    "`trl_record(texts)`: the record of an evaluation by TRL's trainer in which these texts are the model's turns."
    from trl import GRPOTrainer
    model, tokenizer = tiny

    def record(texts):
        def turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
            asked = [tokenizer.decode(ids).count("<|im_start|>assistant") - 1 for ids in prompt_ids]
            return [tokenizer(texts[n] + "<|im_end|>")["input_ids"] for n in asked], None
        monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", turn)
        run = T.plan_run("subtask", "embedded", 0, max_completion_length=30000)
        [found] = T.evaluate(run, model, tokenizer, T.evaluation_rows([TASK], 1, "before", 0.7))
        return found
    return record


def our_record(texts):
    def policy(talk):
        return normalise(texts[sum(message["role"] == "assistant" for message in talk)])
    result = run_episode(policy, task_env(TASK), messages(TASK), tool_schemas("subtask"))
    return rollout_record(TASK, *result, None, model="embedded", seed=0, generation=0)


def essence(record):
    kept = ("outcome", "reward", "raw", "components", "turns", "reward_hash", "task", "split", "phase", "batch", "calls")
    return {name: record[name] for name in kept}


@pytest.mark.parametrize("texts", AGREE.values(), ids=AGREE)
def test_same_texts_same_rollout(trl_record, texts):
    assert essence(trl_record(texts)) == essence(our_record(texts))


@pytest.mark.parametrize("texts", REPAIRED.values(), ids=REPAIRED)
def test_same_repairs(trl_record, texts):
    found = essence(trl_record(texts))
    assert found == essence(our_record(texts))
    assert any(call.get("repairs") for call in found["calls"]) and found["outcome"] == "ended"


def test_a22_nested_text_is_refused_in_training_too(trl_record):
    record = trl_record(AGREE["nested-text"])
    assert [call["status"] for call in record["calls"]] == [400, 400]
    assert {type(call["arguments"]["fields"]) for call in record["calls"]} == {str}
