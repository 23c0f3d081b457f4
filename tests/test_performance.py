"The stored measurement is whole, and the page shows it."
import html
import json
import re

import pytest
from conftest import ROOT

from atlas_rlvr.scenarios import SCENARIOS

STORED = json.loads((ROOT / "results/performance.json").read_text(encoding="utf-8"))
CELLS = json.loads((ROOT / "nbs/16_performance.ipynb").read_text(encoding="utf-8"))["cells"]
NAMES = [(row["server"], row["clients"]) for row in STORED["http"]]


def shown() -> list[list[list[str]]]:
    "The tables of the page, as rows of texts."
    outputs = ["".join(output["data"]["text/html"]) for cell in CELLS for output in cell.get("outputs", ())
               if "text/html" in output.get("data", {})]
    return [[[html.unescape(text) for text in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)]
             for row in re.findall(r"<tr.*?</tr>", output, re.DOTALL)] for output in outputs]


def test_every_scenario_and_server_was_measured():
    assert [row["scenario"] for row in STORED["in_process"]] == list(SCENARIOS)
    assert len(NAMES) == len(set(NAMES)) and {clients for _, clients in NAMES} == {1, 8}
    assert {"atlas-rlvr", "constant"} <= {server for server, _ in NAMES} <= {"atlas-rlvr", "constant", "bare", "jira820"}


def test_every_number_is_positive():
    rows = [*STORED["in_process"], *STORED["http"]]
    assert min(value for row in rows for value in row.values() if not isinstance(value, str)) > 0


def test_the_constant_answer_has_our_size():
    assert len({row["bytes"] for row in STORED["http"] if row["server"] != "jira820"}) == 1


def test_the_machine_is_named():
    assert {"cpu", "cores", "python", "starlette", "uvicorn", "fake"} == set(STORED["machine"])
    assert all(STORED["machine"].values())


@pytest.mark.parametrize("row", STORED["in_process"], ids=SCENARIOS)
def test_the_page_shows_the_stored_costs(row):
    wanted = [row["scenario"], *(float(row[name]) for name in ("reset", "read", "write", "score", "rollout", "calls"))]
    assert wanted in [[line[0], *map(float, line[1:])] for line in shown()[1] if line[0] == row["scenario"]]


@pytest.mark.parametrize("server", sorted({server for server, _ in NAMES}))
def test_the_page_shows_the_stored_rates(server):
    one, eight = (next(row for row in STORED["http"] if (row["server"], row["clients"]) == (server, n)) for n in (1, 8))
    wanted = [one["bytes"], one["start"], one["requests_per_second"], eight["requests_per_second"]]
    assert [[float(text) for text in line[2:]] for line in shown()[2] if server in line] == [[float(value) for value in wanted]]


def test_the_page_shows_the_stored_machine():
    assert {name: str(value) for name, value in STORED["machine"].items()} == {line[0]: line[1] for line in shown()[0][1:]}
