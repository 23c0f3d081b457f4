"The tree: settings, metadata, strict JSON, no traces of a machine, one direction of imports, short functions."
import ast
import json
import re
import statistics
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import requires
from pathlib import Path

import pytest
from conftest import ROOT, project_files

MODULES = sorted((ROOT / "atlas_rlvr").glob("[a-z]*.py"))
# baselines load models as training does, so that one comes after the other
ORDER = ("world", "rich_text", "tool_calls", "jira", "jql", "jira_site", "jira_edits", "cql", "confluence",
         "confluence_site", "confluence_v1", "wire", "environments", "scenarios", "endpoints", "runs", "final_state", "rewards", "faults", "audited", "repl",
         "audit", "openapi", "resources", "synthesis", "agreement", "scale", "document_scenario", "verdicts", "policy", "pretrained", "train", "supervised", "baselines", "scaffolds", "user_simulator", "retries", "proof", "record", "server", "mcp_server", "cli", "results", "statistics", "judged", "preflight", "display", "ladder")
TOP = {"nbs", "atlas_rlvr", "settings.ini", "setup.py", "results", "figures", "paper", "README.md", "tests", ".ci", "LICENSE",
       "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md"}
settings = ConfigParser(delimiters=["="])
settings.read(ROOT / "settings.ini", encoding="utf-8")
package = settings["DEFAULT"]


def refuse(constant):
    raise ValueError(f"{constant} is not JSON")


# Metadata


def test_the_top_level_is_the_agreed_one():
    found = {path.relative_to(ROOT).parts[0] for path in project_files()}
    assert {name for name in found if not name.startswith(".")} <= TOP
    assert {"LICENSE", "README.md", ".ci"} <= found


def test_extras_build_on_each_other():
    found = {extra: {r.split(";")[0].strip() for r in requires("atlas-rlvr") if f'extra == "{extra}"' in r.replace("'", '"')}
             for extra in ("train", "test")}
    assert found["train"] < found["test"]
    assert {r.split("=")[0] for r in found["train"]} >= {"torch", "trl", "transformers", "papermill", "jupyterlab", "nbdev"}


@pytest.mark.parametrize("name", ["torch==", "trl==", "transformers==", "nbdev==2.4.14", "execnb<", "fastcore<", "ghapi<"])
def test_what_must_be_pinned_is(name):
    assert any(word.startswith(name) for word in package["train_requirements"].split())
    assert not any(word.startswith(name.rstrip("=<")) for word in package["requirements"].split())


@pytest.mark.parametrize("name", ["pandas", "matplotlib"])
def test_ranges_of_what_makes_the_tables(name):
    assert re.search(rf"\b{name}>=\d[\d.]*,<\d+", package["requirements"])


@pytest.mark.parametrize("command", ["pip install -e '.[train]' && papermill nbs/05_train.ipynb -p scenario subtask",
                                     "pip install -e '.[test]' && pytest"])
def test_the_readme_starts_with_the_two_commands(command):
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")


def test_one_version_everywhere():
    version = package["version"]
    assert f'__version__ = "{version}"' in (ROOT / "atlas_rlvr/__init__.py").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()


# Files


@pytest.mark.parametrize("path", project_files(".json", ".ipynb", ".jsonl"), ids=lambda path: str(path.relative_to(ROOT)))
def test_json_is_strict(path):
    text = path.read_text(encoding="utf-8")
    for part in filter(None, text.split("\n")) if path.suffix == ".jsonl" else [text]:
        json.loads(part, parse_constant=refuse)


@pytest.mark.parametrize("path", project_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_trace_of_a_machine(path):
    places = [rb"/home/\w", rb"/Users/\w", rb"/root/", rb"/tmp/[a-z]", rb"/work/", rb"/farm/", rb"C:\\\\Users"]
    places += [re.escape(str(place).encode()) + b"/" for place in (ROOT, Path.home()) if len(str(place)) > 1]
    found = re.search(b"|".join(places), path.read_bytes())
    assert found is None or path.parent.name == "tests", found


@pytest.mark.parametrize("path", project_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_large_file(path):
    assert path.stat().st_size <= 10 * 2**20


def test_no_token_in_any_file():
    tokens = re.compile(rb"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9]{20,}|ghp_[A-Za-z0-9]{30,}|ATATT3[\w-]{20,})")
    assert [str(path) for path in project_files() if tokens.search(path.read_bytes())] == []


# Code


def imports(path):
    "Names of our modules that a module imports, also inside functions."
    tree = ast.parse(path.read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    ours = [node.module.split(".")[-1] for node in froms if node.level or node.module.startswith("atlas_rlvr.")]
    packages = [alias.name for node in froms if node.module == "atlas_rlvr" for alias in node.names]
    return set(ours + packages) & set(ORDER)


def test_the_order_names_every_module():
    assert {path.stem for path in MODULES} == set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_no_module_reaches_back(path):
    assert imports(path) <= set(ORDER[:ORDER.index(path.stem)])


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_no_module_imports_what_is_private_to_another(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("atlas_rlvr"))]
    assert [alias.name for node in froms for alias in node.names if alias.name.startswith("_")] == []


def test_importing_everything_loads_no_torch():
    code = "import sys\n" + "\n".join(f"import atlas_rlvr.{path.stem}" for path in MODULES) + "\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"torch", "transformers", "trl", "nbdev", "fastcore", "execnb", "papermill"} & set(loaded.split())


@pytest.mark.parametrize("name", ["00_tool_calls", "01_world", "01a_jira", "01b_confluence", "01c_environments",
                                  "02_scenarios", "03_rewards", "04_baselines", "04a_runs"])
def test_the_first_pages_import_no_torch(name):
    cells = json.loads((ROOT / "nbs" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert not re.search(r"^(import|from) (torch|transformers|trl)\b", code, re.MULTILINE)


def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", project_files(".py"), ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_short(path):
    limit = 60 if path.parent.name == "tests" else 30
    sizes = {f.name: f.end_lineno - f.lineno + 1 for f in functions(path)}
    assert {name: size for name, size in sizes.items() if size > limit} == {}


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_lines_fit_the_page(path):
    code = re.sub(r"^__all__ = \[.*?\]", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)  # nbdev's
    assert [line for line in code.split("\n") if len(line) > 130] == []


def test_the_median_function_is_short():
    sizes = [f.end_lineno - f.lineno + 1 for path in MODULES for f in functions(path)]
    assert statistics.median(sizes) <= 6


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_outside_input_is_never_run(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not called & {"eval", "exec"} and "trust_remote_code" not in keywords and "pickle" not in modules
