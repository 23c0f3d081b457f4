"Requests that leave something open: what is asked for, what the user says, what asking earns, in a chat and as a tool."
import copy
import json
from types import MethodType

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import SMALL, project, tiny_model, tokenizer  # noqa: F401 (fixtures)

from atlas_rlvr import user_simulator as U
from atlas_rlvr.baselines import call_message
from atlas_rlvr.endpoints import Refused
from atlas_rlvr.final_state import final_state, goal_reached
from atlas_rlvr.rewards import REWARD_SETS, score, score_task
from atlas_rlvr.runs import read_lines
from atlas_rlvr.scenarios import TRAINING_NAMES, gold_calls, load_tasks
from atlas_rlvr.supervised import template_tokens
from atlas_rlvr.tool_calls import Call, build_trace, call_from_json, normalise
from atlas_rlvr.world import load_data

PAIRS = [pytest.param(scenario, split, id=f"{scenario}-{split}") for scenario in U.OPEN for split in U.SPLITS]
ALL = [task for scenario in U.OPEN for split in U.SPLITS for task in U.load_dialogues(scenario, split)]


def first(scenario, kind, field=None):
    found = [task for task in U.load_dialogues(scenario) if task["gold"]["dialogue"]["kind"] == kind]
    return next(task for task in found if field in (None, *task["gold"]["dialogue"]["instead"]))


def play(task, turns, way="chat", **options):
    return U.converse(U.dialogue_script(turns, way), task, way, **options)


def judge(task, turns, way="chat"):
    return U.score_dialogue(task, play(task, turns, way)[0])


def work(task):
    return [[call] for call in gold_calls(task)]


# ---------------------------------------------------------------------------------------------------------------------
# The tasks


@pytest.mark.parametrize(("scenario", "split"), PAIRS)
def test_as_many_of_each_kind_and_every_field_is_left_open(scenario, split):
    tasks = U.load_dialogues(scenario, split)
    talks = [task["gold"]["dialogue"] for task in tasks]
    assert len(tasks) == U.SPLITS[split][0] == 4 * sum(talk["kind"] == "change" for talk in talks)
    assert {kind: sum(t["kind"] == kind for t in talks) for kind in U.KINDS} == dict.fromkeys(U.KINDS, len(tasks) // 4)
    for kind in ("omit", "change"):
        assert {next(iter(t["instead"])) for t in talks if t["kind"] == kind} == set(U.OPEN[scenario])
    assert all(bool(talk["instead"]) == (talk["kind"] != "complete") for talk in talks)


@pytest.mark.parametrize(("scenario", "split"), PAIRS)
def test_every_task_can_be_done_by_asking_and_not_without(scenario, split):
    assert [fault for task in U.load_dialogues(scenario, split) for fault in U.lint_dialogue(task)] == []


@pytest.mark.parametrize("scenario", U.OPEN)
def test_the_files_are_what_the_generator_makes(scenario):
    assert U.dialogue_rows(scenario) == load_data(f"dialogues/{scenario}.json")


@pytest.mark.parametrize("scenario", U.OPEN)
def test_splits_share_no_name(scenario):
    train, held_out = (set().union(*map(U.task_names, U.load_dialogues(scenario, split))) for split in U.SPLITS)
    assert not train & held_out and not (train | held_out) & TRAINING_NAMES


def test_ids_and_prompts_are_unique():
    assert len({task["id"] for task in ALL}) == len({task["prompt"] for task in ALL}) == len(ALL) == 104


def test_a_wrong_guess_is_a_real_row():
    for task in ALL:
        instead, world = task["gold"]["dialogue"]["instead"], task["world"]
        rows = {"assignee": "users", "parent": "issues", "project": "projects", "parentId": "pages"}
        assert all(value in world[rows[name]] for name, value in instead.items() if name in rows)
        assert "spaceId" not in instead or instead["spaceId"] in {space["key"] for space in world["spaces"].values()}


@pytest.mark.parametrize(("spoil", "fault"), [
    (lambda task: {"prompt": f"{task['prompt']} It is for {task['gold']['assignee']}."}, "gives the answer away"),
    (lambda task: {"gold": task["gold"] | {"parent": "NO-1"}}, "does not exist"),
    (lambda task: {"gold": task["gold"] | {"dialogue": task["gold"]["dialogue"] | {"instead": {"summary": task["gold"]["summary"]}}}},
     "a guess reaches the goal"),
    (lambda task: {"gold": task["gold"] | {"dialogue": task["gold"]["dialogue"] | {"kind": "ambiguous"}}}, "does not name the choice"),
], ids=["leak", "no-parent", "guess-is-gold", "no-choice"])
def test_lint_finds_what_is_wrong(spoil, fault):
    task = first("subtask", "omit", "assignee")
    assert any(fault in message for message in U.lint_dialogue(task | spoil(task)))


def test_unknown_names_are_refused():
    for call, text in ((lambda: U.load_dialogues("label"), "choose one of subtask, page"),
                       (lambda: U.load_dialogues("page", "test"), "choose one of train, held_out"),
                       (lambda: U.dialogue_tools("page", "mail"), "choose one of chat, tool")):
        with pytest.raises(ValueError, match=text):
            call()


# ---------------------------------------------------------------------------------------------------------------------
# What is asked for; {…} are values of the task, {other_…} what it would be instead

ASKED = [
    ("subtask", "omit", "assignee", "Who should I assign this sub-task to?", "assignee"),
    ("subtask", "omit", "assignee", "Who gets the sub-task ‘{summary}’ under {parent}?", "assignee"),
    ("subtask", "omit", "assignee", "Under {parent}, who is responsible?", "assignee"),
    ("subtask", "omit", "assignee", "Could you tell me the assignee's account id, please?", "assignee"),
    ("subtask", "omit", "assignee", "What is the name of the person who should own it?", "assignee"),
    ("subtask", "omit", "assignee", "For which user is it?", "assignee"),
    ("subtask", "omit", "assignee", "I have read {parent}. Which project and which assignee do you want?", "project assignee"),
    ("subtask", "omit", "assignee", "Is {other_assignee} fine?", "assignee"),
    ("subtask", "omit", "assignee", "Which issue type should it have?", "issuetype"),
    ("subtask", "omit", "assignee", "What is the summary?", "summary"),
    ("subtask", "omit", "assignee", "Who should the sub-task be assigned to?", "assignee"),
    ("subtask", "omit", "assignee", "Before I create ‘{summary}’ under the parent issue {parent}, whom should I assign it to?", "assignee"),
    ("subtask", "omit", "assignee", "To whom?", "assignee"),
    ("subtask", "omit", "assignee", "I need the assignee. What is it?", "assignee"),
    ("subtask", "omit", "assignee", "Before creating the sub-task under {parent}, I need to know who it goes to. Could you tell me?", "assignee"),
    ("subtask", "omit", "assignee", "Who would you like me to assign it to? Please give the account id.", "assignee"),
    ("subtask", "omit", "assignee", "Could you please specify the assignee for the sub-task '{summary}'?", "assignee"),
    ("subtask", "omit", "assignee", "I have read the parent issue. How are you?", "parent"),
    ("subtask", "change", "summary", "Should I create the sub-task with summary ‘{other_summary}’, parent {parent} and assignee {assignee}?", "summary"),
    ("subtask", "change", "summary", "I will create it under {parent}, assigned to {assignee}. Is that correct?", "confirm"),
    ("subtask", "change", "summary", "Would you like me to create it under {parent}, assigned to {assignee}?", "confirm"),
    ("subtask", "change", "parent", "Create ‘{summary}’ under {other_parent}, assigned to {assignee}?", "parent project"),
    ("subtask", "complete", None, "Should I assign it to {assignee}?", "confirm"),
    ("page", "omit", "title", "Could you please provide the title for the page you want under page {parentId} in space {spaceId}?", "title"),
    ("page", "omit", "title", "What should the title and the content be?", "title body"),
    ("page", "omit", "parentId", "Which parent page should I use, and in which space?", "parentId spaceId"),
    ("page", "ambiguous", "parentId", "There are two pages named ‘{name}’. Which one should be the parent: {parentId} in {spaceId} or {other_parentId} in {other_spaceId}?", "parentId spaceId"),
    ("page", "change", "title", "Just to confirm: a page titled '{other_title}' under page {parentId} in space {spaceId}, right?", "title"),
    ("page", "change", "title", "Does this look good?", "confirm"),
    ("page", "omit", "parentId", "What are parentId and spaceId?", "parentId spaceId"),
    ("page", "omit", "parentId", "spaceId?", "spaceId"),
    ("subtask", "omit", "assignee", "What is the accountId?", "assignee"),
    ("subtask", "omit", "assignee", "Which issuetype?", "issuetype"),
    ("subtask", "omit", "assignee", "Shall I go ahead?", "confirm"),
    ("subtask", "omit", "assignee", "How are you?", ""),
    ("subtask", "omit", "parent", "Which issue is the parent?", "parent"),
    ("subtask", "omit", "parent", "Under which ticket should I put ‘{summary}’?", "parent"),
    ("subtask", "omit", "parent", "Where should I create it?", "parent"),
    ("subtask", "omit", "parent", "Which project is it in?", "project"),
    ("subtask", "omit", "summary", "What should the summary be?", "summary"),
    ("subtask", "omit", "summary", "What should I call it?", "summary"),
    ("subtask", "omit", "summary", "What is the title of the sub-task under {parent} for {assignee}?", "summary"),
    ("subtask", "ambiguous", "assignee", "Which {name} do you mean?", "assignee"),
    ("subtask", "ambiguous", "assignee", "Do you mean {assignee} or {other_assignee}?", "assignee"),
    ("subtask", "ambiguous", "assignee", "{assignee}, {other_assignee}?", "assignee"),
    ("subtask", "ambiguous", "assignee", "Which one?", "assignee"),
    ("subtask", "change", "assignee", "Shall I create it as you said?", "confirm"),
    ("subtask", "change", "assignee", "Should I still assign it to {other_assignee}?", "assignee"),
    ("subtask", "change", "assignee", "Is everything correct?", "confirm"),
    ("subtask", "complete", None, "Who should get ‘{summary}’?", "assignee"),
    ("subtask", "complete", None, "May I create ‘{summary}’ under {parent} for {assignee}?", "confirm"),
    ("page", "omit", "title", "What is the title?", "title"),
    ("page", "omit", "title", "What should the page below {parentId} be called?", "title"),
    ("page", "omit", "title", "Which name should the new page in space {spaceId} have?", "title"),
    ("page", "omit", "parentId", "Which page is the parent?", "parentId"),
    ("page", "omit", "parentId", "Under which page should ‘{title}’ go?", "parentId"),
    ("page", "omit", "parentId", "In which space?", "spaceId"),
    ("page", "omit", "parentId", "What should the body say?", "body"),
    ("page", "ambiguous", "parentId", "Which ‘{name}’ do you mean, {parentId} or {other_parentId}?", "parentId spaceId"),
    ("page", "ambiguous", "parentId", "Is it the one in space {spaceId}?", "parentId spaceId"),
    ("page", "ambiguous", "parentId", "Which of the two?", "parentId spaceId"),
    ("page", "change", "title", "Do you still want it like that?", "confirm"),
    ("page", "change", "title", "Is ‘{other_title}’ final?", "title"),
]


@pytest.mark.parametrize(("scenario", "kind", "field", "text", "fields"), ASKED, ids=[row[3] for row in ASKED])
def test_questions_are_understood(scenario, kind, field, text, fields):
    task = first(scenario, kind, field)
    gold, talk = task["gold"], task["gold"]["dialogue"]
    others = {f"other_{name}": value for name, value in talk["instead"].items()}
    assert U.asked(text.format(**gold | others, name=talk["name"]), scenario, gold) == set(fields.split())


@pytest.mark.parametrize(("text", "found"), [
    ("", []), ("Done.", []), ("Who?", ["Who?"]), ("I read it. Who? Thanks.", ["Who?"]), ("It says “who?”", ["It says “who?”"]),
    ("Done. Is there anything else I can do for you?", []), ("Version 1.0 is there", []), ("A? B?", ["A?", "B?"]),
])
def test_questions_are_sentences_with_their_mark(text, found):
    assert U.questions(text) == found


def test_own_questions_close_every_open_request():
    for task in ALL:
        for question in U.open_question(task):
            user = U.simulated_user(task)
            assert user(question) == U.answer_text(task["gold"]) and not user.needless


# ---------------------------------------------------------------------------------------------------------------------
# The user


def test_the_answer_is_given_once():
    task = first("page", "omit", "title")
    user = U.simulated_user(task)
    assert [user("What is the title?") for _ in range(3)] == [U.answer_text(task["gold"]), U.AGAIN, U.AGAIN]
    assert (user.answered, user.again, user.needless) == (True, 2, 0)


def test_a_question_beside_the_point_gets_one_polite_refusal():
    user = U.simulated_user(first("page", "omit", "title"))
    assert [user("How are you?"), user("Do you like rain?"), user("What is the title?") is None] == [U.REFUSED, None, False]
    assert user.needless == 2


def test_every_answer_is_one_sentence():
    texts = [U.answer_text(task["gold"]) for task in ALL if task["gold"]["dialogue"]["instead"]]
    assert not [text for text in [*texts, U.KNOWN, U.AGAIN, U.REFUSED] if text.count(". ") or not text.endswith(".")]


def test_several_fields_at_once_cost_one_each():
    task = first("subtask", "omit", "assignee")
    user = U.simulated_user(task)
    assert user("What are the summary, the parent and the assignee?") == U.answer_text(task["gold"])
    assert user.needless == 2


def test_one_seed_one_user():
    task = first("subtask", "change")
    texts = ["Shall I?", "Who?", "Why?", "Why not?", "Which project?"]
    assert [*map(U.simulated_user(task), texts)] == [*map(U.simulated_user(copy.deepcopy(task)), texts)]


@given(st.text(max_size=200), st.sampled_from(ALL))
@settings(deadline=None, max_examples=200)
def test_any_text_has_an_answer_or_none(text, task):
    answer = U.put(U.simulated_user(task), text)
    assert answer is None or answer.endswith(".")


def test_a_model_may_be_the_user():
    task = first("subtask", "omit", "assignee")
    seen = []

    def model(talk):
        seen.append(talk)
        return {"role": "assistant", "content": " Ask somebody else. "}
    talk, _ = play(task, U.POLICIES["asks rightly"](task), user=U.model_user(model))
    assert talk[3]["content"] == "Ask somebody else." and U.score_dialogue(task, talk).raw == 1.0
    assert seen[0][0]["role"] == "system" and U.answer_text(task["gold"]) in seen[0][0]["content"]
    env = U.dialogue_env(task, U.model_user(model))
    assert json.loads(env.ask_user(question="Who?"))["body"] == "Ask somebody else."


def absent(task):
    "A user who is played by a service that is gone."
    def user(text):
        raise TimeoutError("nobody there")
    return user


def test_a_user_who_breaks_is_a_failure_of_the_infrastructure():
    task = first("page", "omit", "title")
    env = U.dialogue_env(task, absent)
    with pytest.raises(TimeoutError):
        env.ask_user(question="What is the title?")
    assert env._failure == "TimeoutError: nobody there"
    talk, _ = play(task, U.POLICIES["asks rightly"](task), "tool")
    assert U.dialogue_reward([talk, talk], [json.dumps(task)] * 2, environments=[env, U.dialogue_env(task)]) == [None, 1.0]
    env.reset(task=json.dumps(task))
    assert env._failure is None


@pytest.mark.parametrize("way", U.WAYS)
def test_one_user_who_breaks_leaves_the_others_alone(way):
    tasks = U.load_dialogues("page")[:3]
    scripts = {task["prompt"]: U.dialogue_script(U.POLICIES["asks everything"](task), way) for task in tasks}
    records = U.play_dialogues(lambda talks: [scripts[talk[1]["content"]](talk) for talk in talks], tasks, way,
                               lambda task: (absent if task["id"] == tasks[1]["id"] else U.simulated_user)(task))
    assert [(record["outcome"], record["reward"]) for record in records] == [("ended", 0.9), ("error", None), ("ended", 0.9)]
    assert records[1]["error"] == "TimeoutError: nobody there"


@pytest.mark.parametrize("way", U.WAYS)
def test_a_service_that_refuses_to_play_the_user_ends_the_run(way):
    def refusing(talk):
        raise Refused("no credit")
    task = first("page", "omit", "title")
    with pytest.raises(Refused, match="no credit"):
        play(task, U.POLICIES["asks rightly"](task), way, user=U.model_user(refusing))


# ---------------------------------------------------------------------------------------------------------------------
# Episodes in a chat


def test_the_answer_is_a_turn_of_the_user():
    task = first("page", "omit", "title")
    talk, outcome = play(task, U.POLICIES["asks rightly"](task))
    assert outcome == "ended" and talk[2]["content"] == "What is the title?"
    assert talk[3] == {"role": "user", "content": U.answer_text(task["gold"])}


def test_text_beside_a_call_asks_nobody():
    task = first("page", "omit", "title")
    read = call_message(work(task)[0]) | {"content": "What is the title?"}
    talk, _ = U.converse(lambda talk: read if len(talk) == 2 else "Done.", task)
    assert [message["role"] for message in talk] == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("thought", ["<think>What is it? Hm.</think>", "What is it? Hm.</think>", "<think>What is it? "])
def test_nobody_answers_a_thought(thought):
    task = first("page", "omit", "title")
    talk, outcome = play(task, [thought + "Done."])
    assert (outcome, len(talk)) == ("ended", 3)
    asked, _ = play(task, [f"<think>Is it warm? Hm.</think>{U.open_question(task)[0]}", *work(task)])
    assert U.score_dialogue(task, asked).raw == 1.0


@pytest.mark.parametrize("last", ["Done.", "Done. Can I help you with anything else?"])
def test_a_last_word_ends_it(last):
    task = first("page", "complete")
    turns = work(task)
    talk, outcome = U.converse(lambda talk: call_message(turns[n]) if (n := sum(m["role"] == "assistant" for m in talk)) < 3 else last, task)
    assert outcome == "ended" and talk[-1]["content"] == last and U.score_dialogue(task, talk).raw == 1.0


def test_silence_ends_it():
    task = first("page", "complete")
    talk, outcome = play(task, ["Is it warm?", "Is it cold?", *work(task)])
    assert (outcome, [message["role"] for message in talk[2:]]) == ("ended", ["assistant", "user", "assistant"])


def test_no_turn_is_left_to_read_an_answer():
    task = first("page", "omit", "title")
    talk, outcome = play(task, ["What is the title?"] * 9, max_turns=3)
    assert outcome == "ended" and talk[-1]["role"] == "assistant" and len(talk) == 2 + 3 + 2


def test_a_question_that_was_cut_off_is_not_answered():
    task = first("page", "omit", "title")
    talk, outcome = U.converse(lambda talk: {"content": "What? And the ti", "finish_reason": "length"}, task)
    assert (outcome, len(talk)) == ("truncated", 3)


def test_the_tool_is_unknown_in_a_chat():
    task = first("page", "omit", "title")
    talk, _ = U.converse(U.dialogue_script(U.POLICIES["asks rightly"](task), "tool"), task, "chat")
    found = U.score_dialogue(task, talk)
    assert build_trace(talk)[0].outcome == "unknown_tool"
    assert (found.components["hallucinated"], found.components["ask"]) == (-0.15, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Episodes with the tool


@pytest.mark.parametrize("scenario", U.OPEN)
@pytest.mark.parametrize("name", U.POLICIES)
def test_both_ways_give_one_score(scenario, name):
    for task in U.load_dialogues(scenario):
        chat, tool = (judge(task, U.POLICIES[name](task), way) for way in U.WAYS)
        if name == "asks too late":  # in a chat the last question is the last word only where nobody answers it
            assert chat.components["ask"] == tool.components["ask"]
        assert chat == tool


def test_a_question_without_its_mark_is_one():
    task = first("page", "omit", "title")
    env = U.dialogue_env(task)
    assert json.loads(env.ask_user(question="the title")) == {"status": 200, "body": U.answer_text(task["gold"])}


@pytest.mark.parametrize(("arguments", "status"), [({}, 400), ({"query": "title"}, 400), ({"question": 7}, 400),
                                                   ({"question": None}, 400), ({"question": "", "more": 1}, 200)])
def test_any_arguments_get_an_answer(arguments, status):
    assert json.loads(U.dialogue_env(first("page", "omit", "title")).ask_user(**arguments))["status"] == status


def test_silence_is_204():
    env = U.dialogue_env(first("page", "omit", "title"))
    assert [json.loads(env.ask_user(question="How are you?"))["status"] for _ in range(2)] == [200, 204]


def test_reset_brings_a_new_user():
    task = first("page", "omit", "title")
    env = U.dialogue_env(task)
    one = env.ask_user(question="What is the title?")
    env.reset(task=json.dumps(task), prompt="unused")
    assert env.ask_user(question="What is the title?") == one
    env.reset()
    assert json.loads(env.ask_user(question="What is the title?"))["status"] == 204


@pytest.mark.parametrize("scenario", U.OPEN)
def test_the_schema_is_the_one_that_trl_would_make(scenario):
    from transformers.utils import get_json_schema
    env = U.DIALOGUE_ENVIRONMENTS[scenario]()
    made = get_json_schema(MethodType(type(env).ask_user, env))
    assert made["function"].pop("return") == {"type": "string"}
    assert made == U.ASK_TOOL == dict(env.ask_user)
    names = [tool["function"]["name"] for tool in U.dialogue_tools(scenario)]
    assert "ask_user" in names and names == sorted(names)


# ---------------------------------------------------------------------------------------------------------------------
# The reward


def test_the_positive_values_add_up_to_one():
    for values in REWARD_SETS["dialogue"].hundredths.values():
        assert sum(value for value in values.values() if value > 0) == 100


def mean(scenario, name, kind):
    tasks = [task for task in U.load_dialogues(scenario, "held_out") if task["gold"]["dialogue"]["kind"] == kind]
    return {judge(task, U.POLICIES[name](task)).raw for task in tasks}


@pytest.mark.parametrize("scenario", U.OPEN)
@pytest.mark.parametrize(("name", "opened", "complete"), [
    ("asks rightly", {1.0}, {1.0}), ("never asks, luck", {0.8}, {1.0}), ("asks twice", {0.9}, {0.6}), ("asks too late", {0.8}, {0.7})])
def test_what_each_policy_earns_on_held_out_tasks(scenario, name, opened, complete):
    assert {kind: mean(scenario, name, kind) for kind in U.KINDS} == dict.fromkeys(U.KINDS[:3], opened) | {"complete": complete}


@pytest.mark.parametrize("name", ["never asks, guess", "ignores the answer"])
def test_who_does_not_listen_misses_the_goal(name):
    for task in ALL:
        talk, _ = play(task, U.POLICIES[name](task))
        complete = task["gold"]["dialogue"]["kind"] == "complete"
        assert goal_reached(task, final_state(task, build_trace(talk))) is complete
        assert (U.score_dialogue(task, talk).raw < 0.5) is not complete


def test_needless_questions_cost():
    for task in ALL:
        parts = judge(task, U.POLICIES["asks everything"](task)).components
        extra = len(U.OPEN[task["scenario"]]) - bool(task["gold"]["dialogue"]["instead"])
        assert parts["needless"] == pytest.approx(-0.1 * extra)


def test_asking_everything_in_one_message_is_no_way_out():
    task = first("subtask", "omit", "assignee")
    assert judge(task, ["What are the summary, the parent and the assignee?", *work(task)]).raw == 0.8


@pytest.mark.parametrize("way", U.WAYS)
def test_asking_alone_earns_nothing(way):
    for task in U.load_dialogues("subtask"):
        assert judge(task, U.open_question(task), way).raw == -0.3


def test_an_answer_that_nobody_could_read_before_the_write_earns_nothing():
    task = first("subtask", "omit", "assignee")
    [read], [write], [verify] = work(task)
    asked = (U.ASK, {"question": U.open_question(task)[0]})
    at_once, in_turn = ([[read], [asked, write], [verify]], [[read], [asked], [write], [verify]])
    assert [judge(task, turns, "tool").components["ask"] for turns in (at_once, in_turn)] == [0, 0.2]


def test_an_answer_after_the_write_is_too_late_even_if_it_is_mended():
    task = first("subtask", "omit", "summary")
    turns = [*work(U.as_said(task)), *U.open_question(task), *work(task)]
    parts = judge(task, turns).components
    assert (parts["goal"], parts["ask"], parts["surplus"]) == (0.5, 0, -0.15)


def test_a_task_without_a_user_wants_no_question():
    task = load_tasks("subtask")[0]
    user = U.model_user(lambda talk: "You know.")
    [record] = U.play_dialogues(lambda talks: ["Who?" if len(talks[0]) < 3 else "Done."], [task], user=user)
    assert (record["kind"], record["messages"][3]["content"]) == ("complete", "You know.")
    assert score_task(task, U.dialogue_trace(play(first("subtask", "complete"), [])[0]), "dialogue").raw == -0.3
    talk = [{"role": "user", "content": task["prompt"]}, *play(task | {"world": None}, work(task))[0][2:]]
    assert U.score_dialogue(task, talk).raw == 1.0


def test_the_score_is_a_function_of_the_record():
    for task in U.load_dialogues("page"):
        for way in U.WAYS:
            talk, outcome = play(task, U.POLICIES["asks twice"](task), way)
            record = json.loads(json.dumps(U.dialogue_record(task, talk, outcome, way)))
            trace = [call_from_json(call) for call in record["calls"]]
            again = score("page", trace, task["gold"], "dialogue", final_state(task, trace))
            assert record["raw"] == again.raw == U.score_dialogue(task, record["messages"]).raw


def test_other_sets_read_the_same_trace():
    task = first("page", "omit", "title")
    talk, _ = play(task, U.POLICIES["asks rightly"](task))
    assert score_task(task, U.dialogue_trace(talk), "audited").raw == score_task(task, build_trace(talk), "paper").raw == 1.0


ARGUMENTS = st.one_of(st.none(), st.dictionaries(st.sampled_from(["question", "page_id", "x"]),
                                                 st.one_of(st.text(), st.integers(), st.none(), st.lists(st.text()))), st.lists(st.text()))


@given(st.sampled_from(ALL), st.lists(st.tuples(st.sampled_from(["ask_user", "get_page", "create_issue"]), ARGUMENTS,
                                                st.sampled_from(["ok", "api_error", "unknown_tool", "unexecuted", "malformed"])), max_size=5))
@settings(deadline=None, max_examples=100)
def test_any_trace_has_a_score(task, calls):
    trace = [Call(name, arguments, outcome=outcome) for name, arguments, outcome in calls]
    assert 0 <= score_task(task, trace, "dialogue").reward <= 1


@pytest.mark.parametrize("messages", [[], [None], [{"role": "assistant"}], [{"role": "assistant", "content": None}, {"role": "user"}],
                                      [{"role": "assistant", "content": "Who?"}, {"role": "user", "content": "Me."}, 7]])
def test_any_transcript_has_a_trace(messages):
    assert all(call.name == "ask_user" for call in U.dialogue_trace(messages))


def test_a_broken_policy_is_an_error_without_a_reward():
    def broken(talks):
        raise TimeoutError("no answer")
    [record] = U.play_dialogues(broken, U.load_dialogues("page")[:1], model="script")
    assert (record["outcome"], record["reward"], record["error"]) == ("error", None, "TimeoutError: no answer")


# ---------------------------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize("way", U.WAYS)
def test_demonstrations_are_perfect(way):
    task = first("page", "ambiguous")
    assert U.score_dialogue(task, U.demonstration(task, way)["messages"]).raw == 1.0


def test_lessons_hold_no_name_of_the_frozen_tasks():
    examples = U.lessons(8)
    assert len(examples) == 16 and len({example["messages"][1]["content"] for example in examples}) == 16
    names = {name for task in ALL for name in U.task_names(task) if len(name) > 4}
    text = json.dumps([example["messages"][1:] for example in examples], ensure_ascii=False)
    assert not [name for name in names if f"{name} " in text or f"{name}\"" in text]


@pytest.mark.parametrize("scenario", U.OPEN)
def test_trls_own_loop_carries_the_question(tmp_path, monkeypatch, tokenizer, scenario):  # noqa: F811
    from datasets import Dataset
    from trl import GRPOTrainer

    from atlas_rlvr import train as T
    tasks, seen = U.load_dialogues(scenario)[:4], {}

    def block(message):
        calls = [{name: call["function"][name] for name in ("name", "arguments")} for call in message.get("tool_calls", [])]
        return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls) or message["content"]

    def turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        texts = [tokenizer.decode(ids) for ids in prompt_ids]
        made = []
        for text in texts:
            task = next(task for task in tasks if task["prompt"] in text)
            done = [{"role": "assistant"}] * (text.count("<|im_start|>assistant") - 1)
            made.append(block(U.dialogue_script(U.POLICIES["asks rightly"](task), "tool")(done)) + "<|im_end|>")
        return [tokenizer(text)["input_ids"] for text in made], None

    def reward(completions, task, **columns):
        seen.update({json.loads(one)["id"]: completion for one, completion in zip(task, completions, strict=True)})
        return U.dialogue_reward(completions, task)
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", turn)
    run = T.plan_run(scenario, "embedded", 0, **SMALL | {"max_completion_length": 30000})
    config = T.grpo_config(run, tmp_path)
    config.per_device_eval_batch_size, config.num_generations_eval = 4, 1
    trainer = U.dialogue_trainer(scenario, tiny_model(tokenizer), tokenizer, config, tasks, reward)
    result = trainer.evaluate(Dataset.from_list(U.dialogue_training_rows(tasks)))
    assert result["eval_reward"] == 1.0 and len(seen) == 4
    trainer._batch_environments = [None]
    prompt = U.dialogue_messages(tasks[0])
    (ids,), _, _ = trainer._tokenize_prompts([prompt])
    assert ids == template_tokens(tokenizer, U.demonstration(tasks[0]))[0][:len(ids)]  # what was taught is what is asked
    for task in tasks:
        ours = build_trace(play(task, U.POLICIES["asks rightly"](task), "tool")[0])
        trace = build_trace(seen[task["id"]])
        assert [(c.name, c.arguments, c.status, c.body) for c in trace] == [(c.name, c.arguments, c.status, c.body) for c in ours]
        assert sum(call.name == "ask_user" for call in trace) == bool(task["gold"]["dialogue"]["instead"])


@pytest.mark.parametrize("way", U.WAYS)
def test_a_local_model_plays(tokenizer, way):  # noqa: F811
    from atlas_rlvr.baselines import batch_policy
    policy = batch_policy(tiny_model(tokenizer), tokenizer, U.dialogue_tools("page", way), 4000)
    said = iter(["What is the title?<|im_end|>", "Done.<|im_end|>"])

    def scripted(talks):
        policy(talks)  # renders and samples
        return [{"role": "assistant", "content": next(said).removesuffix("<|im_end|>")} for _ in talks]
    [record] = U.play_dialogues(scripted, [first("page", "omit", "title")], way, model="tiny")
    assert (record["outcome"], record["turns"]) == ("ended", 2 if way == "chat" else 1)


def test_the_table_leaves_errors_out():
    task = first("page", "omit", "title")
    record = U.dialogue_record(task, *play(task, U.POLICIES["asks rightly"](task)), "chat")
    assert U.asking_table([record, record | {"reward": None}]) == {"omit": {"n": 1, "mean": 1, "asked": 1, "needless": 0, "goal": 1}}


@pytest.mark.slow
def test_a_policy_is_taught_and_measured(project, monkeypatch):  # noqa: F811
    folder = U.teach(project / "asks", n=4, budget=6000)
    assert (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
    monkeypatch.setattr(U, "load_dialogues", lambda scenario, split="train", load=U.load_dialogues: load(scenario, split)[:2])
    records = U.measure_asking(folder, "asks", repeats=1)
    assert [(r["scenario"], r["split"]) for r in records] == [(name, split) for name in U.OPEN for split in U.SPLITS for _ in "12"]
    assert all(0 <= record["reward"] <= 1 for record in records)
    assert U.teach(folder, n=4, budget=6000) == folder  # finished: nothing is trained again


# The policy that was taught to ask

SHIPPED = ("embedded", "embedded-asks")


def shipped(model):
    return read_lines(ROOT / U.MEASURED / f"{model}.jsonl")


@pytest.mark.parametrize("model", SHIPPED)
def test_shipped_dialogues_score_equal(model):
    records = shipped(model)
    tasks = {task["id"]: task for name in U.OPEN for split in U.SPLITS for task in U.load_dialogues(name, split)}
    keys = {(r["task"], r["generation"]) for r in records}
    assert keys == {(task, generation) for task in tasks for generation in range(4)} and len(keys) == len(records)
    assert not any(r["outcome"] == "error" for r in records)
    for r in records:
        found = U.score_dialogue(tasks[r["task"]], r["messages"])
        assert (found.reward, found.components, found.hash) == (r["reward"], r["components"], r["reward_hash"])


def test_asking_was_taught():
    for scenario in U.OPEN:
        before, after = (U.asking_table([r for r in shipped(model) if (r["scenario"], r["split"]) == (scenario, "held_out")])
                         for model in SHIPPED)
        for kind in U.KINDS:
            assert after[kind]["mean"] > before[kind]["mean"] and after[kind]["goal"] > before[kind]["goal"]
            assert kind == "complete" or (before[kind]["asked"] == 0 and after[kind]["asked"] > 0.5)
        assert after["complete"]["needless"] < 0.2


def test_the_taught_policy_is_small_and_plays_again(monkeypatch):
    folder = ROOT / "results/policies/embedded-asks"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10e6 and (folder / "README.md").is_file()
    load = U.load_dialogues
    monkeypatch.setattr(U, "load_dialogues", lambda scenario, split="train": load(scenario, split)[:1])
    first, again = (U.measure_asking(folder, "embedded-asks", repeats=1) for _ in range(2))
    assert first == again and [r["reward"] is not None for r in first] == [True] * 4


def test_what_is_kept_has_no_calls_beside_its_messages(tmp_path):
    task = first("page", "omit", "title")
    record = U.dialogue_record(task, *play(task, U.POLICIES["asks rightly"](task)), "chat", model="m")
    [line] = read_lines(U.keep_asking([record], tmp_path))
    assert "calls" not in line and line["messages"] == record["messages"]


def test_messages_are_canonical():
    talk, _ = play(first("page", "change"), ["Is this right?"])
    assert all(normalise(message, n) == message for n, message in enumerate(m for m in talk if m["role"] == "assistant"))
