"""The published API documents: where a copy of them is, how they are patched, what they say of an operation.

Copies are looked for in the folder that ATLAS_RLVR_SPECS names, else beside the checkout. Nothing is copied into the project.
"""
import copy
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest
from jsonschema import Draft4Validator

from atlas_rlvr import confluence, jira, wire  # noqa: F401 (wire registers every operation)

FOLDER = Path(os.environ.get("ATLAS_RLVR_SPECS") or Path(__file__).parents[2] / "shared" / "specs")
NAMES = {"jira": ("jira-platform-v3*.json", "swagger-v3*.json"), "confluence": ("confluence-v2*.json", "openapi-v2*.json")}
PREFIXES = {"jira": "/rest/api/3", "confluence": "/wiki/api/v2"}
ADDRESSES = {"jira": "https://developer.atlassian.com/cloud/jira/platform/swagger-v3.v3.json",
             "confluence": "https://developer.atlassian.com/cloud/confluence/openapi-v2.v3.json"}


class Patch(NamedTuple):
    "One change of a document in memory."
    product: str
    at: str  # path of names separated by blanks; `*` is any name, `**` any number of them
    change: dict  # name → value to set; {"rename": new name} renames the member itself
    reason: str


PATCHES = (
    Patch("confluence", "** oneOf", {"rename": "anyOf"},
          "the branches of a body overlap, so a correct page body matches both and `oneOf` refuses it; the service takes it"),
    *(Patch("confluence", f"components schemas {name}", {"nullable": True},
            "described as null where a page has no parent, which the schema does not say")
      for name in ("PageSingle properties parentId", "PageBulk properties parentId", "ParentContentType")),
    Patch("jira", "components schemas IssueTransition properties id", {"type": ["string", "integer"]},
          "two of three clients send the number of a transition, and the service compares it as text"),
)


def places(node, names: list[str], above=(None, None)):
    "Each (parent, name) at the end of a path of names."
    if not names:
        yield above
    elif isinstance(node, dict | list):
        for name, inner in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if names[0] == "**":
                yield from places(inner, names, (node, name))
            if names[0] in ("*", name):
                yield from places(inner, names[1:], (node, name))
            elif names[:2] == ["**", name]:
                yield from places(inner, names[2:], (node, name))


def patch(document: dict, patches) -> dict:
    "A copy of a document with patches; a patch that finds no place is an error."
    document = copy.deepcopy(document)
    for one in patches:
        found = list(places(document, one.at.split()))
        assert found, f"nothing to patch at {one.at}"
        for parent, name in found:
            if "rename" in one.change:
                parent[one.change["rename"]] = parent.pop(name)
            else:
                parent[name].update(one.change)
    return document


def as_json_schema(node):
    "OpenAPI 3.0's `nullable` in the words of JSON Schema."
    if isinstance(node, list):
        return [as_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {name: as_json_schema(value) for name, value in node.items()}
    if made.get("nullable") is True and "type" in made:
        made["type"] = [made["type"], "null"]
        made |= {"enum": [*made["enum"], None]} if "enum" in made else {}
    return made


@lru_cache(maxsize=2)
def published(product: str) -> dict:
    "The document as it was published, or a skip that says where to get it."
    found = sorted(path for name in NAMES[product] for path in FOLDER.glob(name))
    if not found:
        pytest.skip(f"no copy of {ADDRESSES[product]} in the folder that ATLAS_RLVR_SPECS names")
    return json.loads(found[-1].read_text(encoding="utf-8"))


@lru_cache(maxsize=2)
def patched(product: str) -> dict:
    "The document with its patches."
    return patch(published(product), [one for one in PATCHES if one.product == product])


def served() -> list[tuple[str, str, str]]:
    "(product, method, template) of each operation that the site answers; a template has its whole path."
    found = [("jira", method, PREFIXES["jira"] + template) for method, template in jira.HANDLERS]
    return sorted(found + [("confluence", method, template) for method, template in confluence.ROUTES])


def documented(product: str, method: str, template: str) -> dict | None:
    "What the patched document says of an operation; None: the document does not cover it (Confluence v1)."
    path = template if product == "jira" else template.removeprefix(PREFIXES[product])
    return patched(product)["paths"].get(path, {}).get(method.lower()) if template.startswith(PREFIXES[product]) else None


def errors_of(product: str, schema: dict, value, document=patched) -> list[str]:
    "What a document has against a value: one line each."
    root = as_json_schema(schema) | {"components": components(product, document)}
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in Draft4Validator(root).iter_errors(value)]


@lru_cache(maxsize=4)
def components(product: str, document) -> dict:
    return as_json_schema(document(product)["components"])


def wrong_answer(product: str, method: str, template: str, status: int, body) -> list[str]:
    "What an operation's own document has against a 2xx answer."
    operation = documented(product, method, template)
    if operation is None:
        return []
    response = operation["responses"].get(str(status))
    if response is None:
        return [f"the document has no {status} for {method} {template}"]
    content = next(iter(response.get("content", {}).values()), {})
    if not content.get("schema"):
        return []
    return errors_of(product, content["schema"], body)

