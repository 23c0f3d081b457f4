"The pages of the paper: regenerated from a rollouts file, recomputed without our code, and labelled."

import csv
import hashlib
import json
import re
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean

import pytest
from fake_rollouts import MODEL, SCRIPTS, suite, write_suite

from atlas_rlvr import display, results
from atlas_rlvr.environments import run_calls
from atlas_rlvr.rewards import score
from atlas_rlvr.runs import write_json
from atlas_rlvr.scenarios import SCENARIOS, find_task, gold_calls, load_tasks, task_env

ROOT = Path(__file__).parents[1]
PAGES = ("06_tables", "07_figures", "08_listings")
SHIPPED = ROOT / "results" / "atlassian_rollouts.json"
WRITTEN = ("figures/*.csv", "figures/*.json", "paper/tables/*", "paper/listings/*")


def run_page(page: str, **parameters):
    "Run the code cells of a page in this process, with parameters set as papermill sets them."
    notebook = json.loads((ROOT / "nbs" / f"{page}.ipynb").read_text(encoding="utf-8"))
    names = {}
    with chdir(ROOT / "nbs"), redirect_stdout(StringIO()):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), page, "exec"), names)  # noqa: S102 - the project's own page
            if "parameters" in cell["metadata"].get("tags", []):
                names.update(parameters)


def make(rollouts: Path, out: Path) -> Path:
    "All pages from one file."
    for page in PAGES:
        run_page(page, rollouts=str(rollouts), out=str(out))
    return out


OF_LADDER = ("ladder", "smollm2")  # figures that come from other rollouts


def texts(out: Path) -> dict:
    "Every text file that the pages write."
    paths = sorted(path for pattern in WRITTEN for path in out.glob(pattern) if path.is_file() and path.stem not in OF_LADDER)
    return {str(path.relative_to(out)): path.read_text(encoding="utf-8") for path in paths}


def figure_bytes(out: Path) -> dict:
    paths = [path for kind in ("pdf", "png") for path in sorted(out.glob(f"figures/*.{kind}"))]
    return {path.name: path.read_bytes() for path in paths if path.stem not in OF_LADDER}


def rows(out: Path, name: str) -> list[dict]:
    return list(csv.DictReader((out / name).open(encoding="utf-8")))


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> Path:
    return write_suite(tmp_path_factory.mktemp("fake") / "fake_rollouts.json")


@pytest.fixture(scope="module")
def records(rollouts) -> list[dict]:
    return json.loads(rollouts.read_text(encoding="utf-8"))["rollouts"]


@pytest.fixture(scope="module")
def out(rollouts, tmp_path_factory) -> Path:
    return make(rollouts, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def reported() -> dict:
    return json.loads((ROOT / "paper/reported.json").read_text(encoding="utf-8"))


def test_same_bytes_again(rollouts, out, tmp_path):
    again = make(rollouts, tmp_path)
    assert texts(again) == texts(out)
    assert figure_bytes(again) == figure_bytes(out)
    assert set(figure_bytes(out)) == {"figure2.pdf", "figure2.png", "figure3.pdf", "figure3.png"}


def test_committed_pages_come_from_the_shipped_rollouts(tmp_path):
    if not SHIPPED.exists():
        pytest.skip("results/atlassian_rollouts.json is not there")
    made, committed = texts(make(SHIPPED, tmp_path)), texts(ROOT)
    manifests = [json.loads(files.pop("figures/manifest.json")) for files in (made, committed)]
    assert made == committed
    assert manifests[0]["sha256"] == manifests[1]["sha256"] == hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
    if manifests[0]["drawn_with"] == manifests[1]["drawn_with"]:
        assert figure_bytes(tmp_path) == figure_bytes(ROOT)


def test_no_fake_record_is_shipped():
    if not SHIPPED.exists():
        pytest.skip("results/atlassian_rollouts.json is not there")
    assert MODEL not in SHIPPED.read_text(encoding="utf-8")
    assert all(MODEL not in text for text in texts(ROOT).values())


def phase_of(series: str) -> str:
    return {"prompted": "before", "trained": "after"}[series]


def means_by_task(records: list[dict]) -> list[float]:
    "Straight from the records, without the library."
    tasks = {}
    for r in records:
        if r["reward"] is not None:
            tasks.setdefault(r["task"], []).append(r["reward"])
    return [sum(rewards) / len(rewards) for rewards in tasks.values()]


@pytest.mark.parametrize("path", ["fake", "shipped"])
def test_summary_can_be_recomputed(path, records, out):
    if path == "shipped" and not SHIPPED.exists():
        pytest.skip("results/atlassian_rollouts.json is not there")
    if path == "shipped":
        records, out = json.loads(SHIPPED.read_text(encoding="utf-8"))["rollouts"], ROOT
    checked = 0
    for row in rows(out, "paper/tables/summary.csv"):
        if row["series"] == "final_epoch" or not row["model"]:
            continue
        own = [
            r
            for r in records
            if (r["scenario"], r["model"], r["split"], r["phase"])
            == (row["scenario"], row["model"], row["split"], phase_of(row["series"]))
        ]
        means = means_by_task(own)
        assert int(row["rollouts"]) + int(row["errors"]) == len(own)
        assert int(row["prompts"]) == len(means)
        if means:
            assert float(row["mean"]) == pytest.approx(fmean(means), abs=6e-5)
            assert float(row["low"]) <= float(row["mean"]) <= float(row["high"])
            checked += 1
    assert checked >= 4


def test_figures_plot_the_summary(out):
    summary = {
        (r["scenario"], r["model"], r["series"]): r
        for r in rows(out, "paper/tables/summary.csv")
        if r["split"] == "train"
    }
    ours = [r for r in rows(out, "figures/figure2.csv") if r["source"] == "ours"]
    assert len(ours) == len(summary)
    for row in ours:
        own = summary[row["scenario"], row["model"], row["series"]]
        assert [row["value"], row["low"], row["high"]] == [own["mean"], own["low"], own["high"]]


def test_curve_can_be_recomputed(records, out):
    train = [r for r in records if r["phase"] == "train"]
    for row in rows(out, "figures/figure3.csv"):
        groups = {}
        for r in train:
            if (r["scenario"], r["batch"]) == (row["scenario"], int(row["batch"])) and r["reward"] is not None:
                groups.setdefault(r["task"], []).append(r["reward"])
        expected = [fmean(how(g) for g in groups.values()) for how in (fmean, min, max)]
        assert [float(row[name]) for name in ("mean", "low", "high")] == pytest.approx(expected, abs=6e-5)
    subtask = [r for r in rows(out, "figures/figure3.csv") if r["scenario"] == "subtask"]
    assert float(subtask[6]["average"]) == pytest.approx(fmean(float(r["mean"]) for r in subtask[2:7]), abs=1e-4)
    band = next(r for r in rows(out, "figures/figure3_bands.csv") if r["scenario"] == "subtask")
    widths = [float(r["high"]) - float(r["low"]) for r in subtask]
    assert float(band["change"]) == pytest.approx(fmean(widths[-5:]) - fmean(widths[:5]), abs=2e-4)


def test_final_epoch_is_the_last_pass_over_the_prompts(records, out):
    subtask = [r for r in records if (r["scenario"], r["phase"]) == ("subtask", "train")]
    last_pass = [r for r in subtask if r["batch"] > 4]  # 8 prompts, 2 a batch, 8 batches
    row = next(
        r for r in rows(out, "paper/tables/summary.csv") if (r["scenario"], r["series"]) == ("subtask", "final_epoch")
    )
    assert float(row["mean"]) == pytest.approx(fmean(means_by_task(last_pass)), abs=6e-5)


def test_perfect_can_be_recomputed(records, out):
    before = [r for r in records if (r["scenario"], r["split"], r["phase"]) == ("cross", "train", "before")]
    row = next(
        r
        for r in rows(out, "paper/tables/perfect.csv")
        if (r["scenario"], r["split"], r["series"]) == ("cross", "train", "prompted")
    )
    perfect = [r for r in before if r["reward"] == 1.0]
    assert int(row["perfect"]) == len(perfect)
    assert int(row["first_perfect"]) == sum(r["generation"] == 0 for r in perfect)
    assert float(row["perfect_raw"]) == pytest.approx(fmean(r["raw"] for r in perfect), abs=6e-5)
    twice = [r for r in perfect if sum(c["name"] == "create_page" for c in r["calls"]) > 1]
    assert int(row["perfect_with_duplicates"]) == len(twice) > 0


CLASSES_OF = {
    "gold": set(),
    "gold+verify": set(),
    "early": {"early_stop"},
    "bare": {"wrong_shape", "duplicate"},
    "dropped": {"dropped_field"},
    "invented": {"hallucinated"},
    "twice": {"duplicate"},
    "cap": {"turn_cap"},
}


@pytest.mark.parametrize("script", CLASSES_OF)
def test_failure_classes(script):
    from fake_rollouts import record

    made = record(load_tasks("cross")[0], script, phase="before", batch=None, generation=0, temperature=0.7)
    assert results.failure_classes(made) == CLASSES_OF[script]
    assert script.removesuffix("+verify") in SCRIPTS


@pytest.mark.parametrize("outcome", ["malformed", "truncated"])
def test_broken_calls_are_classes(outcome):
    from fake_rollouts import broken

    made = broken(load_tasks("cross")[0], outcome, phase="before", batch=None, generation=0, temperature=0.7)
    assert results.failure_classes(made) == {outcome}


def test_errors_are_counted_apart(records, out):
    own = [r for r in records if (r["scenario"], r["split"], r["phase"]) == ("subtask", "train", "before")]
    row = next(
        r
        for r in rows(out, "paper/tables/failures.csv")
        if (r["scenario"], r["split"], r["series"]) == ("subtask", "train", "prompted")
    )
    errors = sum(r["outcome"] == "error" for r in own)
    assert (int(row["errors"]), int(row["rollouts"])) == (errors, len(own) - errors)
    assert errors > 0


def test_label_precision_sees_what_recall_does_not():
    task = load_tasks("label")[0]
    calls = [
        (name, {**a, "labels": [*a["labels"], "extra-one", "extra-two", "extra-three"]} if name == "add_labels" else a)
        for name, a in gold_calls(task)
    ]
    made = run_calls(task_env(task), calls)
    stored = {
        "task": task["id"],
        "calls": [
            {"name": c.name, "arguments": c.arguments, "raw": "", "id": c.id, "outcome": c.outcome} for c in made
        ],
    }
    assert score("label", made, task["gold"]).reward == 1.0
    assert results.label_precision(stored) == pytest.approx(
        len(task["gold"]["labels"]) / (len(task["gold"]["labels"]) + 3)
    )


# The paper's numbers, as literals: page 1 (abstract), Section 6.1, Appendix A and Table 2.
PRINTED = {
    "prompted.page.qwen3.5-4b": 0.35,
    "trained.page": 1.00,
    "lift.page": 0.65,
    "prompted.label.qwen3.5-4b": 0.52,
    "trained.label": 0.95,
    "lift.label": 0.43,
    "prompted.subtask.qwen3.5-4b": 0.68,
    "trained.subtask": 1.00,
    "lift.subtask": 0.32,
    "prompted.cross.qwen3.5-4b": 0.92,
    "trained.cross": 1.00,
    "prompted.transition.qwen3.5-4b": 1.00,
    "perfect_before.cross": 8,
    "perfect_after.cross": 12,
    "perfect_of.cross": 12,
    "range.prompted_4b": [0.35, 0.92],
    "range.trained": [0.95, 1.00],
    "table1.prompts": [6, 12],
    "listing1.reward": 0.00,
    "listing2.reward": 0.52,
    "listing3.reward": 1.00,
    "listing1.step": 0,
    "listing2.step": 2,
    "listing3.step": 53,
    "table2.maximum": 1.35,
    "table2.jira_arguments": 0.50,
    "table2.confluence_arguments": 0.40,
    "table2.jira_structure": 0.15,
    "table2.confluence_structure": 0.15,
    "table2.completion": 0.15,
    "table2.missing_create": -0.25,
    "table2.invalid_payload": -0.25,
    "table2.duplicate": -0.15,
    "table2.hallucinated": -0.15,
    "table2.excess": -0.05,
    "table2.budget_calls": 6,
    "r3.subtask.missing_create": -0.30,
    "baseline.temperature": 0.7,
    "baseline.turn_cap": 25,
    "figure3.moving_average": 5,
    "figure3.batches_to_095": 100,
    "training.iterations": 2,
    "training.gradient_accumulation": 4,
    "training.stop_delta": 0.01,
    "training.patience_epochs": [5, 10],
    "training.completion_tokens": [2048, 4096],
    "training.generations": [4, 16],
}


@pytest.mark.parametrize("name", PRINTED)
def test_reported_numbers_are_the_papers(name, reported):
    assert reported["numbers"][name]["value"] == PRINTED[name]


def test_reported_is_null_where_nothing_is_printed(reported):
    numbers = reported["numbers"]
    silent = [f"prompted.{s}.qwen3-1.7b" for s in SCENARIOS] + [
        "trained.transition",
        "lift.cross",
        "figure3.band_narrowing",
    ]
    assert [numbers[name]["value"] for name in silent] == [None] * len(silent)
    assert all(set(entry) >= {"value", "section"} for entry in numbers.values())


def test_reported_lifts_agree_with_the_means(reported):
    value = {name: entry["value"] for name, entry in reported["numbers"].items()}
    for s in ("page", "label", "subtask"):
        assert value[f"trained.{s}"] - value[f"prompted.{s}.qwen3.5-4b"] == pytest.approx(value[f"lift.{s}"])
    low, high = value["range.prompted_4b"]
    prompted = [value[f"prompted.{s}.qwen3.5-4b"] for s in SCENARIOS if s != "transition"]
    assert (min(prompted), max(prompted)) == (low, high)


def test_reported_arithmetic_of_listing2(reported):
    task = next(t for t in load_tasks("cross") if t["gold"]["issue"]["summary"] == "Write Release Notes")
    read_issue, read_page, issue, page = gold_calls(task, verify=False)
    full = issue[1]["fields"]
    bare = {**full, "parent": "ABC-123"}
    unassigned = {name: value for name, value in bare.items() if name != "assignee"}
    no_project = {**{name: value for name, value in unassigned.items() if name != "project"}, "projectKey": "ABC"}
    shapes = [bare, {**bare, "assignee": "admin123"}, unassigned, no_project, bare, bare]
    first, *more = [("create_issue", {"fields": fields}) for fields in shapes]
    entry = next(d for d in reported["disagreements"] if d["id"] == "listing2_reward")["arithmetic"]
    for creates, key in ((5, "raw_as_listed"), (6, "raw_as_told")):
        calls = [read_issue, read_page, first, page, *more[: creates - 1]]
        result = score("cross", run_calls(task_env(task), calls), task["gold"])
        assert (result.raw, result.reward) == (entry[key], entry["clamped"])


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_json_is_strict(out):
    for path in [ROOT / "paper/reported.json", *out.rglob("*.json")]:
        json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_the_papers_values_are_labelled(out):
    for row in rows(out, "figures/figure2.csv"):
        is_qwen = row["model"].startswith("qwen")
        assert (row["source"] == "paper") == is_qwen == row["series"].startswith("paper_")
        assert not is_qwen or row["low"] == row["high"] == row["rollouts"] == ""
    results_row = rows(out, "paper/tables/results.csv")[1]
    assert {name for name, value in results_row.items() if value in ("0.6800", "1.0000")} == {
        "Paper: 4B",
        "Paper: RLVR",
    }
    for n in (1, 2, 3):
        assert (out / f"paper/listings/listing{n}_paper.txt").read_text().startswith(f"# the paper, Listing {n}:")
        assert (out / f"paper/listings/listing{n}.txt").read_text().startswith("# ours: ")


def test_embedded_is_marked_as_ours(tmp_path):
    data = suite()
    for r in data["rollouts"]:
        r["model"] = "embedded"
    write_json(tmp_path / "in.json", data)
    run_page("06_tables", rollouts=str(tmp_path / "in.json"), out=str(tmp_path))
    for name in ("results", "held_out", "perfect", "failures"):
        text = (tmp_path / f"paper/tables/{name}.tex").read_text()
        assert text.count("embedded (ours)") == text.count("embedded") > 0


def test_a_scenario_without_rollouts_keeps_its_row(out):
    assert [r["Our model"] for r in rows(out, "paper/tables/results.csv") if r["Scenario"] == "page"] == ["no rollouts"]
    assert [r["mean"] for r in rows(out, "paper/tables/summary.csv") if r["scenario"] == "page"] == [""] * 5


def test_an_empty_file_gives_empty_pages(tmp_path):
    write_json(tmp_path / "in.json", {"schema": 1, "manifest": {}, "suite": {}, "rollouts": []})
    make(tmp_path / "in.json", tmp_path)
    assert [r["Our model"] for r in rows(tmp_path, "paper/tables/results.csv")] == ["no rollouts"] * 5
    assert "no rollout of the file meets the rule" in (tmp_path / "paper/listings/listing1.txt").read_text()


def test_several_models_and_seeds(tmp_path):
    data = suite()
    second = [{**r, "seed": 1, "reward": r["reward"] and max(0.0, r["reward"] - 0.1)} for r in data["rollouts"]]
    other = [{**r, "model": "another"} for r in data["rollouts"] if r["scenario"] == "cross"]
    write_json(tmp_path / "in.json", {**data, "rollouts": data["rollouts"] + second + other})
    make(tmp_path / "in.json", tmp_path)
    summary = rows(tmp_path, "paper/tables/summary.csv")
    row = next(r for r in summary if (r["scenario"], r["model"], r["series"]) == ("cross", MODEL, "trained"))
    assert (row["seeds"], row["seed_low"], row["seed_high"]) == ("2", "0.9000", "1.0000")
    assert {r["model"] for r in summary if r["scenario"] == "cross"} == {MODEL, "another"}
    assert (
        len({(r["model"], r["seed"]) for r in rows(tmp_path, "figures/figure3.csv") if r["scenario"] == "cross"}) == 3
    )


@pytest.mark.parametrize("page", PAGES)
def test_a_cut_file_is_named_and_nothing_is_written(page, rollouts, tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_text(rollouts.read_text()[:5000])
    with pytest.raises(ValueError, match=r"cut\.json.*line 1, column \d+") as error:
        run_page(page, rollouts=str(cut), out=str(tmp_path / "out"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_listings_follow_their_rules(records, out):
    train = [r for r in records if (r["scenario"], r["phase"]) == ("cross", "train")]
    names = {id(r): [c["name"] for c in r["calls"]] for r in train}
    early = [r for r in train if set(names[id(r)]) == {"get_issue", "get_page"} and r["outcome"] == "ended"]
    assert results.choose(records, 1)["batch"] == min(r["batch"] for r in early)
    bare = [
        r for r in train if any(isinstance(c["arguments"].get("fields", {}).get("parent"), str) for c in r["calls"])
    ]
    chosen = results.choose(records, 2)
    assert chosen in bare and len(chosen["calls"]) == max(len(r["calls"]) for r in bare)
    perfect = [
        r
        for r in train
        if r["reward"] == 1.0 and names[id(r)].count("create_page") == 1 and "make_it_so" not in names[id(r)]
    ]
    assert results.choose(records, 3)["batch"] == max(r["batch"] for r in perfect)
    for n in (1, 2, 3):
        record = results.choose(records, n)
        text = (out / f"paper/listings/listing{n}.txt").read_text()
        shown = re.findall(r"(?m)^(\w+)\(", text)
        assert shown == [c["name"] for c in record["calls"]]
        prompt = find_task("cross", record["task"])["prompt"].replace("‘", "'").replace("’", "'")
        assert prompt in text.replace("\n# ", " ")


def test_listing_keeps_a_call_as_it_came():
    from atlas_rlvr.tool_calls import Call

    call = Call(None, None, raw='<tool_call>{"name": "get_', outcome="malformed")
    assert display.call_text(call) == '<tool_call>{"name": "get_  # malformed'


def test_table2_equals_the_paper_line_by_line(out):
    table2 = rows(out, "paper/tables/table2.csv")
    assert len(table2) == 10
    assert all(r["value"] == r["paper"] and r["provenance"] == "paper" for r in table2)


def test_interval_is_seeded_and_over_prompts():
    assert results.bootstrap([0.5] * 6) == (0.5, 0.5)
    assert results.bootstrap([0.0, 1.0, 1.0, 0.4]) == results.bootstrap([0.0, 1.0, 1.0, 0.4])
    low, high = results.bootstrap([0.0, 1.0] * 10)
    assert 0.2 < low < 0.4 and 0.6 < high < 0.8


def test_tex_escapes_everything():
    assert display.tex("a_b & 5% ~^\\<>|") == (
        r"a\_b \& 5\% \textasciitilde{}\textasciicircum{}\textbackslash{}"
        r"\textless{}\textgreater{}\textbar{}"
    )


def test_report_builds(out, tmp_path):
    if not shutil.which("latexmk"):
        pytest.skip("latexmk is not installed")
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    shutil.copy(ROOT / "paper/main.tex", tmp_path / "paper/main.tex")
    command = ["latexmk", "-pdf", "-interaction=nonstopmode", "-outdir=build", "main.tex"]
    done = subprocess.run(command, check=False, cwd=tmp_path / "paper", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    log = (tmp_path / "paper/build/main.log").read_text(errors="replace")
    assert "undefined" not in log and "Overfull" not in log


def test_papermill_takes_the_parameters(rollouts, tmp_path):
    papermill = Path(sys.executable).with_name("papermill")
    if not papermill.exists():
        pytest.skip("papermill is not installed")
    command = [
        papermill,
        ROOT / "nbs/08_listings.ipynb",
        tmp_path / "08.ipynb",
        "-p",
        "rollouts",
        rollouts,
        "-p",
        "out",
        tmp_path,
    ]
    done = subprocess.run(list(map(str, command)), check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "paper/listings/listing3.txt").exists()
