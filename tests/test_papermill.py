"""The README's papermill command, in a small project whose `05_train` only says what it was given.

`--prepare-only` leaves out the kernel, so most of these take a second; the last ones execute."""
import ast
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atlas_rlvr import runs
from atlas_rlvr.runs import check_model, check_writable, prepare_command, run_folder, split_command, write_json

ROOT = Path(__file__).parents[1]
COMMAND = shutil.which("papermill", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
PARAMETERS = ('scenario: str = "page"  # transition, subtask, page, label or cross\n'
              'model: str = "embedded"  # auto or a name\nseed: int = 0  # any\nfresh: bool = False  # start anew\n')
POLICY = ROOT / "atlas_rlvr" / "data" / "policy"
BODY = "from pathlib import Path\n(scenario, model, seed, fresh, str(Path.cwd()))"


def notebook(*cells):
    kernel = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    code = [{"cell_type": "code", "execution_count": None, "id": f"c{n}", "outputs": [], "source": source,
             "metadata": {"tags": tags}} for n, (source, *tags) in enumerate(cells)]
    return {"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture
def project(tmp_path):
    "A project as a reader has it, with two small notebooks."
    (tmp_path / "nbs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "settings.ini").write_text("[DEFAULT]\nlib_path = atlas_rlvr\n")
    for name in ("05_train", "04_baselines"):
        write_json(tmp_path / "nbs" / f"{name}.ipynb", notebook((PARAMETERS, "parameters"), (BODY,)))
    write_json(tmp_path / "nbs" / "06_tables.ipynb", notebook(('rollouts: str = "r.json"', "parameters"), ("rollouts",)))
    return tmp_path


def papermill(project, *words, execute=False, **more):
    "Run the command in the project; stdout is piped and stdin empty unless said otherwise."
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | more.pop("env", {})
    command = [COMMAND, *words, *([] if execute else ["--prepare-only"])]
    options = {"cwd": project, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 100}
    return subprocess.run(command, env=environment, check=False, **options | more)


def files(project):
    return {str(path.relative_to(project)): path.read_bytes() for path in sorted(project.rglob("*")) if path.is_file()}


def refused(project, *words, **more):
    "The last line printed, after checking that the command failed and touched nothing."
    before = files(project)
    done = papermill(project, *words, **more)
    assert (done.returncode, done.stdout) == (2, "")
    assert files(project) == before
    lines = done.stderr.strip().split("\n")
    assert len(lines) == 1, done.stderr
    return lines[-1]


def parameters(path):
    return json.loads(path.read_text())["metadata"]["papermill"]["parameters"]


# As typed


def test_the_entry_point_is_installed():
    from importlib.metadata import entry_points

    loaded = [point.load() for point in entry_points(group="papermill.io") if point.name == "results/"]
    assert loaded and all(hasattr(loaded[0], name) for name in ("read", "write", "listdir", "pretty_path"))


def test_stdout_piped(project):
    done = papermill(project, "nbs/05_train.ipynb", "-p", "scenario", "subtask")
    assert (done.returncode, done.stdout) == (0, "")
    assert parameters(project / "results/subtask/05_train.ipynb") == {"scenario": "subtask"}


def test_in_a_terminal(project):
    ours, theirs = pty.openpty()
    done = papermill(project, "nbs/05_train.ipynb", "-p", "scenario", "subtask", stdin=theirs, stdout=theirs,
                     stderr=theirs, capture_output=False)
    os.close(theirs)
    assert done.returncode == 0, os.read(ours, 9999)
    assert b"results/subtask/05_train.ipynb" in os.read(ours, 9999)
    assert (project / "results/subtask/05_train.ipynb").is_file()


def test_stdin_is_a_pipe(project):
    source = (project / "nbs/05_train.ipynb").read_bytes()
    done = papermill(project, "nbs/05_train.ipynb", "-p", "scenario", "subtask", stdin=None, input="{}")
    assert done.returncode == 0, done.stderr
    assert (project / "results/subtask/05_train.ipynb").is_file()
    assert (project / "nbs/05_train.ipynb").read_bytes() == source


@pytest.mark.parametrize("output", ["mine.ipynb", "results/deep/mine.ipynb"])
def test_an_output_path_is_left_alone(project, output):
    done = papermill(project, "nbs/05_train.ipynb", output, "-p", "scenario", "subtask")
    assert done.returncode == 0, done.stderr
    assert parameters(project / output) == {"scenario": "subtask"}
    assert not (project / "results/subtask").exists()


def test_output_after_the_options(project):
    done = papermill(project, "-p", "scenario", "subtask", "nbs/05_train.ipynb", "mine.ipynb")
    assert done.returncode == 0 and (project / "mine.ipynb").is_file(), done.stderr


def test_the_default_scenario_is_the_notebooks(project):
    assert papermill(project, "nbs/05_train.ipynb").returncode == 0
    assert (project / "results/page/05_train.ipynb").is_file()


def test_baselines_and_their_models(project, tmp_path_factory):
    "The hub is a folder of downloads that holds one model."
    hub = tmp_path_factory.mktemp("hub")
    shutil.copytree(POLICY, hub / "models--Qwen--Qwen3-0.6B" / "snapshots" / "one")
    (hub / "models--Qwen--Qwen3-0.6B" / "refs").mkdir()
    (hub / "models--Qwen--Qwen3-0.6B" / "refs" / "main").write_text("one")
    done = papermill(project, "nbs/04_baselines.ipynb", "-p", "scenario", "label", "-p", "model", "Qwen/Qwen3-0.6B",
                     env={"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert (project / "results/label/04_baselines.ipynb").is_file()


def test_a_notebook_without_a_scenario(project):
    write_json(project / "mine.json", {"schema": 1, "rollouts": []})
    assert papermill(project, "nbs/06_tables.ipynb", "-p", "rollouts", "mine.json").returncode == 0
    assert parameters(project / "results/paper/06_tables.ipynb") == {"rollouts": "mine.json"}


def test_from_the_notebooks_folder(project):
    done = papermill(project, "05_train.ipynb", "-p", "scenario", "subtask", cwd=project / "nbs")
    assert done.returncode == 0, done.stderr
    assert (project / "results/subtask/05_train.ipynb").is_file() and not (project / "nbs/results").exists()


def test_as_a_module(project):
    command = [sys.executable, "-m", "papermill", "nbs/05_train.ipynb", "-p", "scenario", "label", "--prepare-only"]
    done = subprocess.run(command, cwd=project, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (project / "results/label/05_train.ipynb").is_file()


def test_help_of_the_notebook(project):
    done = papermill(project, "nbs/05_train.ipynb", "--help-notebook", execute=True)
    assert done.returncode == 0 and not any((project / "results").iterdir())
    for text in ("scenario: str", "transition, subtask, page, label or cross", "model: str", "seed: int", "fresh: bool"):
        assert text in done.stdout


def test_help_of_the_training_notebook():
    done = papermill(ROOT, "nbs/05_train.ipynb", "--help-notebook", execute=True)
    lines = [line.strip() for line in done.stdout.split("\n") if re.match(r"\s*(scenario|model|seed|fresh): ", line)]
    assert [line.split(":")[0] for line in lines] == ["scenario", "model", "seed", "fresh"]
    assert all("(default" in line for line in lines), done.stdout


def test_other_projects_are_left_alone(project):
    (project / "settings.ini").write_text("[DEFAULT]\nlib_path = something_else\n")
    done = papermill(project, "nbs/05_train.ipynb", "-p", "scenari", "x")
    assert done.returncode == 0 and json.loads(done.stdout)["cells"]
    assert not any((project / "results").iterdir())


def test_papermill_itself_still_works(project):
    assert "papermill" in papermill(project, "--help").stdout
    assert papermill(project, "--version", execute=True).returncode == 0


@pytest.mark.parametrize("words, expected", [
    ("a.ipynb -p x 1", ([1], [("-p", "x", "1")])),
    ("-pscenario page a.ipynb", ([3], [("-p", "scenario", "page")])),
    ("--parameters=scenario page a.ipynb b.ipynb", ([3, 4], [("--parameters", "scenario", "page")])),
    ("a.ipynb -k python3 -y {x:1} --log-output -", ([1, 7], [("-k", "python3"), ("-y", "{x:1}"), ("--log-output",)])),
    ("a.ipynb -p seed -1", ([1], [("-p", "seed", "-1")])),
], ids=["plain", "glued", "equals", "mixed", "negative"])
def test_the_command_line_is_read_as_click_reads_it(words, expected):
    assert split_command(["papermill", *words.split(" ")]) == expected


# Bad input


@pytest.mark.parametrize("words, message", [
    (["-p", "scenario", "subtsk"], "unknown scenario `subtsk`, did you mean `subtask`?"),
    (["-p", "scenario", "cross_product"], "It is one of: transition, subtask, page, label, cross"),
    (["-p", "scenari", "page"], "nbs/05_train.ipynb has no parameter `scenari`, did you mean `scenario`?"),
    (["-r", "sed", "1"], "did you mean `seed`?"),
    (["-y", "{frsh: true}"], "did you mean `fresh`?"),
    (["-p", "model", "qwen3-4b"], "unknown model `qwen3-4b`, did you mean `qwen3.5-4b`?"),
    (["-p", "model", "Qwen/Qwen3-1.7B"], "unknown model"),
    (["-p", "model", "qwen3-1.7b"], "needs a GPU and none is visible"),
    (["-p", "seed", "one"], "parameter `seed` must be an integer, not 'one'"),
    (["-p", "seed", "1.5"], "must be an integer"),
    (["-p", "seed", "True"], "must be an integer"),
    (["-p", "seed", "-1"], "must lie between 0 and"),
    (["-p", "fresh", "yes"], "must be True or False"),
    (["-p", "scenario", "nan"], "must be finite, not nan"),
    (["-p", "seed", "1e999"], "must be finite, not inf"),
    (["-p", "model", "None"], "must be text"),
    (["-p", "model", "007"], "`-r` keeps it as typed"),
    (["-y", "{bad: ["], "cannot be read"),
    (["-y", "- 1"], "cannot be read"),
    (["-f", "nofile.yaml"], "`-f nofile.yaml` cannot be read"),
], ids=lambda value: "-".join(value[1:]) if isinstance(value, list) else "")
def test_bad_parameters(project, monkeypatch, words, message):
    monkeypatch.chdir(project)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_command(["papermill", "nbs/05_train.ipynb", *words])


@pytest.mark.parametrize("words, message", [
    (["source", "godl"], "unknown source `godl`, did you mean `gold`?"),
    (["budget", "-5"], "parameter `budget` must not be negative"),
    (["prompts", "7"], "5 prompts a batch do not divide 7"),
    (["prompts", "4000"], "choose 1 to 400"),
    (["sft_rate", "-1.0"], "parameter `sft_rate` must not be negative"),
], ids=lambda value: "-".join(value) if isinstance(value, list) else "")
def test_bad_parameters_of_a_rung(project, monkeypatch, words, message):
    shutil.copy(ROOT / "nbs/23_supervised.ipynb", project / "nbs")
    monkeypatch.chdir(project)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_command(["papermill", "nbs/23_supervised.ipynb", "-p", *words])


@pytest.mark.parametrize("words, message", [
    (["-p", "scenario", "nan"], "must be finite"),
    (["-p", "model", "qwen3.5-4b"], "needs a GPU"),
    (["old.ipynb", "-p", "scenari", "page"], "did you mean `scenario`?"),
], ids=["value", "machine", "name"])
def test_the_command_is_refused_before_anything_is_opened(project, words, message):
    (project / "old.ipynb").write_text("precious")
    assert message in refused(project, "nbs/05_train.ipynb", *words)


@pytest.mark.parametrize("words", [[], ["mine.ipynb"], ["--cwd", "."]], ids=["plain", "output", "cwd"])
def test_a_command_from_outside_the_project_says_where_to_go(project, tmp_path_factory, words):
    outside = tmp_path_factory.mktemp("outside")
    line = refused(outside, project / "nbs/05_train.ipynb", *words, "-p", "scenario", "subtask")
    assert line == (f"{outside} is outside the project, where nobody would look for runs and results; "
                    f"run `cd {project}` and then the command again")


def test_a_working_folder_outside_the_project_is_refused_too(project, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    assert f"{outside} is outside the project" in refused(project, "nbs/05_train.ipynb", "--cwd", outside)


def test_the_last_line_in_a_terminal_is_the_reason(project):
    ours, theirs = pty.openpty()
    done = papermill(project, "nbs/05_train.ipynb", "-p", "scenario", "x", stdin=theirs, stdout=theirs, stderr=theirs,
                     capture_output=False)
    os.close(theirs)
    assert done.returncode == 2 and os.read(ours, 9999).startswith(b"unknown scenario `x`")


def test_a_baseline_model_that_is_no_name_folder_or_hub_id(project):
    for model in ("nothing", "./no/such/folder", "a/b/c"):
        with pytest.raises(ValueError, match="unknown model"):
            check_model(model, only=False)
    check_model(str(project), only=False)


@pytest.mark.parametrize("model, reason", [("nbs", "the folder holds no config.json"), ("bare", "the folder holds no weights"),
                                           ("nobody/no-model", "the hub does not give its config.json: LocalEntryNotFoundError")],
                         ids=["folder", "weights", "hub"])
def test_a_baseline_model_that_cannot_be_loaded_is_one_line(project, model, reason):
    shutil.copytree(POLICY, project / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    write_json(project / "results/page/04_baselines.ipynb", {"precious": True})
    line = refused(project, "nbs/04_baselines.ipynb", "-p", "model", model, env={"HF_HUB_OFFLINE": "1"})
    assert line == (f"model `{model}` cannot be loaded ({reason}); give a folder that `save_pretrained` wrote, or the id "
                    "of a model on a hub that this machine can reach")


def test_a_lost_parameters_tag_is_noticed(project):
    "E02: papermill would put its cell on top, and the notebook's own values would win."
    write_json(project / "nbs/05_train.ipynb", notebook((PARAMETERS,), (BODY,)))
    with pytest.raises(ValueError, match="tagged `parameters` is missing"):
        prepare_command(["papermill", str(project / "nbs/05_train.ipynb"), "-p", "scenario", "subtask"])


def test_e15_a_token_is_no_parameter_and_is_not_repeated(project):
    line = refused(project, "nbs/05_train.ipynb", "-p", "hf_token", "hf_secret")
    assert "no parameter `hf_token`" in line and "hf_secret" not in line


def test_a_results_folder_that_cannot_be_written(project):
    (project / "results").rmdir()
    (project / "results").write_text("in the way")
    assert "cannot write to results/" in refused(project, "nbs/05_train.ipynb")


def test_a_results_folder_without_permission(project, monkeypatch):
    def denied(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(runs.tempfile, "TemporaryFile", denied)  # root may write everywhere, so no chmod
    with pytest.raises(ValueError, match=r"cannot write to results/ \(permission denied\)"):
        check_writable(project / "results" / "page")


def test_a_missing_checkpoint(project):
    "A copy of the package without its policy."
    package = project / "lib" / "atlas_rlvr"
    shutil.copytree(ROOT / "atlas_rlvr", package, ignore=shutil.ignore_patterns("policy", "__pycache__"))
    line = refused(project, "nbs/05_train.ipynb", env={"PYTHONPATH": str(package.parent)})
    assert "embedded policy is missing" in line and "04b_policy" in line


@pytest.mark.parametrize("text, message", [('{"schema": 1, "rollouts": [{"task"', "line 1, column 35"),
                                           (None, "there is no such rollouts file")], ids=["cut", "missing"])
def test_a_rollouts_file_that_cannot_be_read(project, text, message):
    (project / "results" / "old.json").write_text("precious")
    if text:
        (project / "r.json").write_text(text)
    assert message in refused(project, "nbs/06_tables.ipynb")


# A finished run


def finish(project, reason, scenario="page"):
    run = {"scenario": scenario, "model": "embedded", "seed": 0, "stop_reason": reason, "batches": 20, "minutes": 4.25,
           "final_mean": 0.97, "held_out": {"before": {"mean": 0.5}, "after": {"mean": 0.98}}}
    write_json(run_folder(scenario, "embedded", 0, project) / "run.json", run)


@pytest.mark.parametrize("words", [["-p", "model", "auto"], ["mine.ipynb"]], ids=["auto", "output"])
def test_a_finished_run_is_shown_and_not_touched(project, words):
    finish(project, "converged")
    before = files(project)
    done = papermill(project, "nbs/05_train.ipynb", *words)
    assert (done.returncode, done.stderr, files(project)) == (0, "", before)
    assert "converged after 20 batches and 4.25 minutes; final mean reward 0.97, held-out 0.50 before and 0.98 after" \
        in done.stdout
    assert "`-p fresh True`" in done.stdout


@pytest.mark.parametrize("reason, words", [
    ("interrupted", []), ("converged", ["-p", "fresh", "True"]), ("converged", ["-p", "seed", "1"]),
    ("converged", ["-p", "scenario", "label"])], ids=["interrupted", "fresh", "seed", "scenario"])
def test_these_run(project, monkeypatch, reason, words):
    finish(project, reason)
    monkeypatch.chdir(project)
    command = ["papermill", "nbs/05_train.ipynb", *words]
    assert prepare_command(command) is None
    assert command[2] == ("results/label/05_train.ipynb" if "label" in words else "results/page/05_train.ipynb")


# Executed


def test_the_executed_notebook_and_its_kernel(project):
    done = papermill(project, "nbs/05_train.ipynb", "-p", "scenario", "subtask", "-p", "seed", "3", execute=True)
    assert done.returncode == 0, done.stderr
    text = (project / "results/subtask/05_train.ipynb").read_text()
    last = json.loads(text, parse_constant=pytest.fail)["cells"][-1]["outputs"][0]["data"]["text/plain"]
    assert ast.literal_eval("".join(last))[:4] == ("subtask", "embedded", 3, False)
    assert str(project) not in text and str(Path.home()) not in text


def test_e16_a_failed_run_keeps_its_record_without_paths(project):
    body = "from pathlib import Path\nraise ValueError(f'no luck in {Path.cwd()}/nbs')"
    write_json(project / "nbs/05_train.ipynb", notebook((PARAMETERS, "parameters"), (body,)))
    done = papermill(project, project / "nbs/05_train.ipynb", execute=True)
    assert done.returncode == 1
    text = (project / "results/page/05_train.ipynb").read_text()
    assert "no luck in" in text and str(project) not in text and str(Path.home()) + "/" not in text
