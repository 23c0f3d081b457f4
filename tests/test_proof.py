"Re-execution: what is shipped verifies in any process, every planted corruption is named, memory does not grow."
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from conftest import ROOT

from atlas_rlvr.cli import main
from atlas_rlvr.environments import run_calls, transcript
from atlas_rlvr.proof import (
    Difference,
    certificate_path,
    certify,
    digest,
    last_line,
    prove_record,
    shortened,
    stream,
    verify,
)
from atlas_rlvr.rewards import score_task, stored_records
from atlas_rlvr.runs import Recorder, compact, write_json
from atlas_rlvr.scenarios import SCENARIOS, find_task, gold_calls, load_tasks, messages, task_env
from atlas_rlvr.tool_calls import build_trace

SHIPPED = sorted(path for path in (ROOT / "results").glob("*rollouts*.json"))
EXTRA = ("get_weather", {"city": "Berlin"})


def record(scenario, number=0, generation=0, calls=(), **fields):
    "A rollout of gold calls and more, as a run records it."
    task = load_tasks(scenario)[number]
    talk = messages(task) + transcript(task_env(task), [*gold_calls(task), *calls])
    found = score_task(task, build_trace(talk))
    return {"scenario": scenario, "task": task["id"], "split": "train", "phase": "before", "model": "script", "seed": 0,
            "batch": None, "epoch": None, "generation": generation, "temperature": 0.7, "outcome": "ended", "turns": 4,
            "reward": found.reward, "raw": found.raw, "components": found.components, "reward_hash": found.hash,
            "messages": talk} | fields


RECORDS = [record(scenario, n, calls=[EXTRA] * n) for n in (0, 1) for scenario in SCENARIOS]


def write(path, records):
    write_json(path, {"schema": 1, "manifest": {"n": 1}, "suite": {}, "rollouts": records}, indent=None)
    return path


@pytest.fixture
def file(tmp_path):
    "A compact rollouts file of ten records and its certificate."
    path = write(tmp_path / "rollouts.json", [compact(r) for r in RECORDS])
    certify(path)
    return path


def changed(path, change):
    "The file with its records changed in place."
    data = json.loads(path.read_text())
    change(data["rollouts"])
    write_json(path, data, indent=None)
    return path


# What is shipped


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_has_a_small_certificate(path):
    certificate = certificate_path(path)
    end = last_line(certificate)
    assert (end["records"], end["file"]) == (len(stored_records(path)), path.name)
    assert certificate.stat().st_size < path.stat().st_size / 4


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_what_is_shipped_verifies_in_another_process_with_another_hash_seed(path):
    code = "import sys; from atlas_rlvr.cli import main; main(['verify', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=900, check=False,
                          env=os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT)}, cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert f"{len(stored_records(path)):,} records" in done.stdout


def test_a_sample_of_the_shipped_records_agrees_with_its_rows():
    "Rows are independent of each other, so that a sample needs nothing but its own lines."
    path = ROOT / "results" / "atlassian_rollouts.json"
    rows = certificate_path(path).read_text().splitlines()
    for number in random.Random(0).sample(range(len(rows) - 1), 150):
        record = stored_records_once()[number]
        assert len(prove_record(path, number + 1, record, json.loads(rows[number]))) == len(record["calls"])


def stored_records_once(cache=[]):  # noqa: B006 (read once for a whole module)
    if not cache:
        cache.extend(stored_records(ROOT / "results" / "atlassian_rollouts.json"))
    return cache


def test_the_stream_gives_what_the_whole_file_holds():
    path = ROOT / "results" / "atlassian_rollouts.json"
    assert all(a == b and repr(a) == repr(b) for a, b in zip(stream(path), stored_records_once(), strict=True))


def test_a_record_is_as_good_in_another_hash_seed(file):
    code = "import sys; from atlas_rlvr.proof import certify; certify(sys.argv[1])"
    certificates = []
    for seed in ("0", "1", "99"):
        subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=300,
                       env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)})
        certificates.append(certificate_path(file).read_bytes())
    assert len(set(certificates)) == 1


# Planted corruptions: where it is, and what is said


def swap(items, a, b):
    items[a], items[b] = items[b], items[a]


PLANTED = {
    "argument": (7, 2, "digest of the request", lambda r: r[6]["calls"][1]["arguments"]["fields"].update(summary="Other")),
    "argument nobody reads": (3, 2, "digest of the request", lambda r: r[2]["calls"][1]["arguments"].update(note="x")),
    "tool name": (2, 1, "digest of the request", lambda r: r[1]["calls"][0].update(name="get_page")),
    "status": (4, 3, "status", lambda r: r[3]["calls"][2].update(status=201)),
    "outcome": (4, 3, "outcome", lambda r: r[3]["calls"][2].update(outcome="api_error")),
    "outcome of a call that is then never made": (7, 2, "digest of the answer", lambda r: r[6]["calls"][1].pop("outcome")),
    "reward": (5, None, "reward", lambda r: r[4].update(reward=0.95)),
    "raw": (5, None, "raw reward", lambda r: r[4].update(raw=1.30)),
    "component": (8, None, "component title", lambda r: r[7]["components"].update(title=0.05)),
    "component that does not exist": (8, None, "component style", lambda r: r[7]["components"].update(style=0.1)),
    "reward hash": (1, None, "reward hash", lambda r: r[0].update(reward_hash="0" * 16)),
    "reward of an error": (1, None, "reward", lambda r: r[0].update(outcome="error")),
    "dropped call": (5, 3, "digest of the request", lambda r: r[4]["calls"].pop(2)),
    "dropped last call": (9, 5, "digest of the request", lambda r: r[8]["calls"].pop()),
    "added call": (3, 4, "digest of the request", lambda r: r[2]["calls"].append(r[2]["calls"][0])),
    "swapped calls": (5, 1, "digest of the request", lambda r: swap(r[4]["calls"], 0, 1)),
    "swapped records": (3, None, "digest of the key", lambda r: swap(r, 2, 7)),
    "dropped record": (5, None, "digest of the key", lambda r: r.pop(4)),
    "repeated record": (6, None, "digest of the key", lambda r: r.insert(5, r[4])),
    "task": (6, None, "digest of the key", lambda r: r[5].update(task="transition-03")),
    "temperature": (10, None, "digest of the record", lambda r: r[9].update(temperature=0.0)),
}


@pytest.mark.parametrize("number, call, what, change", PLANTED.values(), ids=PLANTED)
def test_a_planted_corruption_is_named(file, number, call, what, change):
    with pytest.raises(Difference) as caught:
        verify(changed(file, change))
    found = caught.value
    assert (found.number, found.call, found.what) == (number, call, what)
    assert f"record {number} ({found.key})" in str(found) and found.stored != found.now
    assert "\n" not in str(found) and len(str(found)) < 500


VISIBLE = ("status", "outcome", "reward", "raw", "component", "reward hash", "swapped calls", "dropped call")


@pytest.mark.parametrize("name", VISIBLE)
def test_the_transcript_alone_shows_it_too(tmp_path, name):
    number, _, _, change = PLANTED[name]
    records = [r | {"calls": compact(r)["calls"]} for r in json.loads(json.dumps(RECORDS))]
    change(records)
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    with pytest.raises(Difference) as caught:
        verify(path)
    assert caught.value.number == number


def test_an_answer_of_the_transcript_is_compared_to_the_letter(tmp_path):
    records = json.loads(json.dumps(RECORDS))
    answer = next(m for m in records[4]["messages"] if m["role"] == "tool")
    answer["content"] = answer["content"].replace('{"status":200,', '{"status": 200,')
    path = write(tmp_path / "rollouts.json", records)
    with pytest.raises(Difference) as caught:
        verify(path)
    assert (caught.value.number, caught.value.call, caught.value.what) == (5, 1, "answer")
    assert '"status": 200' in caught.value.stored and '"status":200' in caught.value.now


def test_a_stored_body_is_compared(tmp_path):
    records = json.loads(json.dumps(RECORDS[:1]))
    records[0]["calls"] = compact(records[0])["calls"]
    records[0]["calls"][0]["body"] = {"id": "1"}
    with pytest.raises(Difference, match="call 1: body was"):
        verify(write(tmp_path / "rollouts.json", records))


def test_an_unknown_reward_set_is_said_to_be_one(tmp_path):
    with pytest.raises(Difference, match="reward hash was f{16} and is now none of paper, audited"):
        verify(write(tmp_path / "rollouts.json", [RECORDS[0] | {"reward_hash": "f" * 16}]))


def test_the_last_record_missing(file):
    with pytest.raises(ValueError, match="rollouts.json: the file ends after record 9 of 10"):
        verify(changed(file, lambda records: records.pop()))


def test_a_record_too_many(file):
    with pytest.raises(ValueError, match="record 11 .* the certificate ends before it, after 10 records"):
        verify(changed(file, lambda records: records.append({**records[0], "generation": 9})))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_cut_file(file, share):
    data = file.read_bytes()
    file.write_bytes(data[:int(len(data) * share)])
    with pytest.raises(ValueError, match=r"rollouts.json, after record \d+: the file is cut or damaged"):
        verify(file)


def test_a_cut_run(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(RECORDS[0]) + "\n" + json.dumps(RECORDS[1])[:-200])
    with pytest.raises(ValueError, match="record 2, line 1, column .* cut or damaged"):
        verify(path)


def test_something_outside_the_records(file):
    file.write_text(file.read_text().replace('"n":1', '"n":2'))
    with pytest.raises(ValueError, match="the file is not the certified one .* outside the records"):
        verify(file)


# The certificate


EDITS = {
    "an answer": lambda lines: lines.__setitem__(4, lines[4].replace(lines[4].split(" ")[1], "AAAAAAAA", 1)),
    "its last line": lambda lines: lines.__setitem__(-1, lines[-1].replace('"records":10', '"records":9')),
    "the hash of the file": lambda lines: lines.__setitem__(-1, lines[-1].replace('"sha256":"', '"sha256":"0')),
    "a line dropped": lambda lines: lines.pop(3),
    "lines swapped": lambda lines: swap(lines, 3, 4),
    "no last line": lambda lines: lines.pop(),
    "all of it gone": lambda lines: lines.clear(),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_certificate_is_blamed(file, edit):
    certificate = certificate_path(file)
    lines = certificate.read_text().splitlines()
    edit(lines)
    certificate.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(ValueError, match=f"{certificate.parent.name}/rollouts.jsonl: the certificate was cut or edited"):
        verify(file)


def test_a_certificate_with_a_seal_of_its_own_still_disagrees_with_the_calls(file, tmp_path):
    "Whoever forges the file and its certificate would have to change what the environment answers."
    forged = write(tmp_path / "forged.json", [compact(r) for r in RECORDS])
    changed(forged, lambda r: r[6]["calls"][1]["arguments"]["fields"].update(labels=["urgent"]))
    certify(forged)
    assert verify(forged).records == 10  # nothing in it contradicts itself ...
    with pytest.raises(Difference, match="call 2: digest of the request"):
        verify(forged, certificate_path(file))  # ... but it is not what was published


def test_an_answer_that_changed_since(file, monkeypatch):
    "A later change of the site is found, with the call that shows it."
    from atlas_rlvr import proof
    answers = iter(range(1000))
    monkeypatch.setattr(proof, "execute", lambda env, name, arguments, real=proof.execute: (
        real(env, name, arguments).replace("}", ',"new":1}', 1) if next(answers) == 5 else real(env, name, arguments)))
    with pytest.raises(Difference, match="digest of the answer was") as caught:
        verify(file)
    assert (caught.value.number, caught.value.call) == (2, 2)


def test_a_state_that_changed_since(file, monkeypatch):
    from atlas_rlvr import proof
    monkeypatch.setattr(proof, "state_hash", lambda world, real=proof.state_hash: (
        real(world) if world.writes == 0 else "0" * 16))
    with pytest.raises(Difference, match="digest of the state was") as caught:
        verify(file)
    assert (caught.value.number, caught.value.call) == (1, 3)


def test_a_file_that_contradicts_itself_is_not_certified(file):
    before = certificate_path(file).read_bytes()
    with pytest.raises(Difference, match="reward was 0.95"):
        certify(changed(file, lambda records: records[9].update(reward=0.95)))
    assert certificate_path(file).read_bytes() == before
    assert [path.name for path in certificate_path(file).parent.iterdir()] == ["rollouts.jsonl"]


def test_nothing_to_compare_with(file):
    certificate_path(file).unlink()
    with pytest.raises(ValueError, match="record 1: it holds no answers and .* is missing; ") as refused:
        verify(file)
    typed = shlex.split(re.search("`(.*)`", str(refused.value)).group(1))
    assert typed[:2] == ["python", "-c"]
    subprocess.run([sys.executable, *typed[1:]], cwd=ROOT, check=True)
    assert verify(file).certified


def test_an_edited_certificate_says_how_to_make_it_again(file):
    certificate_path(file).write_text("{}")
    with pytest.raises(ValueError, match=re.escape("certify('FILE')\"`, FILE being the rollouts file")):
        verify(file)


@pytest.mark.parametrize("text, match", [
    ('{"schema":1,"rollouts":[]}', "ends after record 0"), ("{}", "ends after record 0"), ("", "cut or damaged"),
    ('{"rollouts":[{"scenario":"subtask","task":"page-01","messages":[]}]}', "record 1: it cannot be played .*page-01"),
    ('{"rollouts":[{"scenario":"subtask"}]}', "record 1: it holds no answers"),
    ('{"rollouts":[{"messages":[]}]}', "record 1: it cannot be played"),
    ('{"rollouts":[7]}', "record 1"), ('{"rollouts":[NaN]}', "cut or damaged"), ('{"rollouts":[{"a"', "cut or damaged"),
])
def test_other_files_are_refused_in_one_sentence(tmp_path, text, match):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        verify(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# Records of every kind


@pytest.mark.parametrize("fields", [{"outcome": "error", "reward": None, "raw": None, "components": {}}, {}],
                         ids=["error", "no components stored"])
def test_records_without_a_reward_and_without_zeros(tmp_path, fields):
    kept = record("subtask")
    kept["components"] = {name: value for name, value in kept["components"].items() if value}
    assert verify(write(tmp_path / "rollouts.json", [kept | fields])).executed == 3


def test_calls_that_were_never_made_have_no_answer(tmp_path):
    kept = compact(record("page"))
    kept["calls"] += [{"name": "get_page", "arguments": {"page_id": "789"}, "id": "t9c0"},
                      {"name": None, "arguments": None, "raw": "{", "id": "t9c1", "outcome": "malformed"}]
    from atlas_rlvr.rewards import replay
    found = score_task(find_task("page", kept["task"]), replay(kept))
    kept |= {"reward": found.reward, "raw": found.raw, "components": found.components}
    path = write(tmp_path / "rollouts.json", [kept])
    certify(path)
    proof = verify(path)
    assert (proof.calls, proof.executed) == (5, 3)
    with pytest.raises(Difference, match="call 5: digest of the request"):
        verify(changed(path, lambda records: records[0]["calls"][4].update(raw="[")))


def test_arguments_that_a_model_may_write(tmp_path):
    "Integers of any length, text of any alphabet, floats, nesting: read as they were written."
    odd = [("get_page", {"page_id": 12345678901234567890123456789}), ("get_page", {"page_id": "\u2028 ☃ \x00 😀"}),
           ("get_page", {"page_id": 1e300}), ("get_page", {"page_id": [[{"a": [None, True, -0.0]}]]}),
           ("get_weather\n", {}), ("create_page", {"title": "x" * 5000, "parentId": "789", "spaceId": "PAY", "body": {}})]
    path = write(tmp_path / "rollouts.json", [compact(record("page", calls=odd))])
    certify(path)
    assert verify(path).executed == 9


def test_a_run_verifies_as_it_is_recorded(tmp_path):
    recorder = Recorder(tmp_path)
    for kept in RECORDS:
        recorder.append(kept)
    proof = verify(tmp_path / "rollouts.jsonl")
    assert (proof.records, proof.certified) == (10, False)
    certify(tmp_path / "rollouts.jsonl")
    assert verify(tmp_path / "rollouts.jsonl").certified


def test_the_audited_set_is_proven_by_its_own_hash(tmp_path):
    task = load_tasks("subtask")[0]
    kept, found = record("subtask"), score_task(task, run_calls(task_env(task), gold_calls(task)), "audited")
    kept |= {"reward": found.reward, "raw": found.raw, "components": found.components, "reward_hash": found.hash}
    assert verify(write(tmp_path / "rollouts.json", [kept])).records == 1
    with pytest.raises(Difference, match="raw reward was 0.5"):
        verify(write(tmp_path / "rollouts.json", [kept | {"raw": 0.5}]))


# Memory


def peak(path):
    "Largest memory that Python holds while the file is verified, in bytes."
    tracemalloc.start()
    verify(path)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    "Ten times the records; a record is some 3 KB and more than ten times that as objects."
    paths = {}
    for times in (4, 40):
        records = [record_of | {"seed": seed} for seed in range(times) for record_of in map(compact, RECORDS)]
        paths[times] = tmp_path / f"rollouts{times}{suffix}"
        if suffix == ".json":
            write(paths[times], records)
        else:
            paths[times].write_text("".join(json.dumps(r) + "\n" for r in records))
        certify(paths[times])
    verify(paths[4])  # what is loaded once
    small, large = peak(paths[4]), peak(paths[40])
    assert paths[40].stat().st_size > 9.5 * paths[4].stat().st_size
    assert large < small + 250_000, (small, large)


# The command


def test_the_command(file, capsys):
    main(["verify", str(file)])
    said = capsys.readouterr().out
    assert said.startswith(f"{file}: 10 records, 45 of 45 calls made again") and said.endswith("its certificate\n")


def test_the_command_ends_badly_in_one_sentence(file, capsys):
    changed(file, lambda records: records[4].update(reward=0.95))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(file)])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith(f"atlas-rlvr: {file}, record 5 (") and said.err.count("\n") == 1
    assert "reward was 0.95 and is now 1.0" in said.err


# Small parts


def test_digests_are_48_bits():
    assert {len(digest(text)) for text in ("", "a", "ä" * 1000)} == {8}
    assert digest("a") != digest("b")


@pytest.mark.parametrize("stored, now", [("a" * 500, "a" * 499 + "b"), ("a" * 500, "a" * 501), ("", "x"), (None, 0.5),
                                         ([1] * 300, [1] * 150 + [2] + [1] * 149)])
def test_shortened_values_show_the_difference(stored, now):
    texts = shortened(stored, now)
    assert texts[0] != texts[1] and max(map(len, texts)) <= 62


def test_certificates_lie_beside_their_file():
    assert certificate_path("results/mine.json") == Path("results/proof/mine.jsonl")
