"Notebooks run, are clean, export what the package holds, and can be parameterised."
import ast
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from nbdev.test import test_nb as run_notebook

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").glob("[0-9]*.ipynb"))
PARAMETERISED = {"04_baselines", "04b_policy", "05_train", "06_tables", "07_figures", "08_listings",
                 "15_audit", "16_performance", "18c_agreement", "18d_scale", "23_supervised", "24_statistics", "27_ladder"}
BIN = Path(sys.executable).parent
settings = ConfigParser(delimiters=["="])
settings.read(ROOT / "settings.ini", encoding="utf-8")


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell):
    return "".join(cell["source"])


def tagged(path):
    return [cell for cell in cells(path) if "parameters" in cell["metadata"].get("tags", [])]


def nbdev(project, command):
    env = {name: value for name, value in os.environ.items() if name != "IN_TEST"}  # under which nbdev exports nothing
    subprocess.run([BIN / command], cwd=project, check=True, capture_output=True, env=env)


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def test_all_notebooks_are_here():
    assert {path.stem for path in NOTEBOOKS} >= PARAMETERISED | {"00_tool_calls", "01_world", "02_scenarios", "03_rewards"}


@each_notebook
def test_it_runs(path, capsys):
    done, _ = run_notebook(path, skip_flags=settings["DEFAULT"]["tst_flags"].split(), basepath=ROOT)
    assert done, capsys.readouterr().err


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "A copy of the project whose notebooks are cleaned and exported into an empty package."
    project = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "settings.ini", project)
    shutil.copytree(ROOT / "nbs", project / "nbs", ignore=shutil.ignore_patterns(".*"))
    shutil.copytree(ROOT / "atlas_rlvr", project / "atlas_rlvr", ignore=shutil.ignore_patterns("*.py", "data", "__pycache__"))
    nbdev(project, "nbdev_export")
    nbdev(project, "nbdev_clean")
    return project


def same(one, other, names):
    _, different, missing = filecmp.cmpfiles(one, other, names, shallow=False)
    return [*different, *missing]


def test_the_package_is_what_the_notebooks_export(copy):
    names = {path.name for folder in (ROOT, copy) for path in (folder / "atlas_rlvr").glob("*.py")}
    assert same(ROOT / "atlas_rlvr", copy / "atlas_rlvr", sorted(names)) == []


def test_exporting_again_changes_nothing(copy):
    before = {path: path.read_bytes() for path in (copy / "atlas_rlvr").glob("*.py")}
    nbdev(copy, "nbdev_export")
    assert before == {path: path.read_bytes() for path in (copy / "atlas_rlvr").glob("*.py")}


def test_notebooks_are_clean(copy):
    assert same(ROOT / "nbs", copy / "nbs", [path.name for path in NOTEBOOKS]) == []


def test_no_cell_of_a_table_is_cut_off():
    assert [path.stem for path in NOTEBOOKS if "...</td>" in path.read_text(encoding="utf-8")] == []


def test_one_notebook_for_each_module():
    exports = [name for path in NOTEBOOKS for cell in cells(path)
               for name in re.findall(r"^#\|\s*default_exp (\S+)", source(cell), re.MULTILINE)]
    assert len(exports) == len(set(exports)) > 0


# papermill's cell


@pytest.mark.parametrize("name", sorted(PARAMETERISED))
def test_exactly_one_parameters_cell(name):
    path = ROOT / "nbs" / f"{name}.ipynb"
    assert len(tagged(path)) == 1
    names = {target.id for cell in tagged(path) for line in ast.parse(source(cell)).body for target in [line.target]}
    start = [source(cell) for cell in cells(path)].index(source(tagged(path)[0]))
    earlier = "\n".join(source(cell) for cell in cells(path)[:start] if cell["cell_type"] == "code")
    loose = {node.id for line in ast.parse(re.sub(r"^[%!].*$", "", earlier, flags=re.MULTILINE)).body
             if not isinstance(line, ast.FunctionDef | ast.ClassDef) for node in ast.walk(line)
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in ast.walk(ast.parse(re.sub(r"^[%!].*$", "", earlier, flags=re.MULTILINE)))
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert not (names & loose) - bound, "used before the cell"


def test_no_other_notebook_is_tagged():
    assert {path.stem for path in NOTEBOOKS if tagged(path)} == PARAMETERISED


@pytest.mark.parametrize("name", sorted(PARAMETERISED))
def test_every_parameter_is_typed_literal_and_explained(name):
    for line in source(tagged(ROOT / "nbs" / f"{name}.ipynb")[0]).split("\n"):
        assert re.fullmatch(r"\w+: (str|int|float|bool) = [^#]+  # \S.+", line), line
        ast.literal_eval(line.split("=", 1)[1].split("  # ")[0].strip())


def test_the_parameters_of_a_training_run():
    names = [line.split(":")[0] for line in source(tagged(ROOT / "nbs/05_train.ipynb")[0]).split("\n")]
    assert names == ["scenario", "model", "seed", "fresh"]


def test_no_parameter_is_a_secret():
    names = [name for path in NOTEBOOKS for cell in tagged(path) for name in re.findall(r"^\w+", source(cell), re.MULTILINE)]
    assert names and not [name for name in names if re.search(r"token|secret|password|credential|key", name)]


def test_cleaning_keeps_the_tag(tmp_path):
    assert settings["DEFAULT"]["allowed_cell_metadata_keys"] == "tags"
    for keys, kept in (("tags", True), ("", False)):
        (tmp_path / "nbs").mkdir(exist_ok=True)
        shutil.copy(ROOT / "nbs/05_train.ipynb", tmp_path / "nbs")
        text = (ROOT / "settings.ini").read_text(encoding="utf-8")
        (tmp_path / "settings.ini").write_text(text.replace("metadata_keys = tags", f"metadata_keys = {keys}"))
        nbdev(tmp_path, "nbdev_clean")
        assert bool(tagged(tmp_path / "nbs/05_train.ipynb")) is kept


# How a page is built


@each_notebook
def test_a_page_opens_with_its_title_and_purpose(path):
    assert re.match(r"# \S.+\n\n> \S", source(cells(path)[0]))


@each_notebook
def test_cells_are_short_and_have_no_errors(path):
    for number, cell in enumerate(cells(path)):
        lines = [line for line in source(cell).split("\n") if line.strip() and not line.startswith("#|")]
        assert cell["cell_type"] != "code" or len(lines) <= 25, f"cell {number} has {len(lines)} lines"
        assert not any(out["output_type"] == "error" for out in cell.get("outputs", [])), f"cell {number}"


@each_notebook
def test_directives_come_first(path):
    for cell in cells(path):
        later = source(cell).split("\n#|")[1:] if cell["cell_type"] == "code" else []
        assert not later or source(cell).startswith("#|"), source(cell)[:80]
        head = re.match(r"(#\|[^\n]*\n?)*", source(cell)).group(0)
        assert source(cell).count("\n#|") + source(cell).startswith("#|") == head.count("#|") or cell["cell_type"] != "code"


@each_notebook
def test_tables_pick_their_columns(path):
    "E12: an aggregation over a whole frame breaks or joins text when a column is added."
    loose = re.compile(r"\.groupby\([^)]*\)\.(mean|sum|std|median|min|max)\(")
    assert not [source(cell) for cell in cells(path) if loose.search(source(cell))]
