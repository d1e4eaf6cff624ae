"""The OpenAPI document as a page: written here once, read without scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any

_LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "maxItems": "at most {}",
}


def reference_page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI 3.1 document as FastAPI makes them: no callbacks, no cycles among schemas."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    operations = [
        _operation(document, path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="stylesheet" href="page/style.css"><link rel="icon" href="data:,"></head>
<body class="docs">
<header><h1>{title}</h1><nav><a href="./">Try it</a> <a href="openapi.json">openapi.json</a></nav></header>
{_text(document["info"].get("description", ""))}
<h2>Requests</h2>
{"".join(operations)}
</body>
</html>
"""


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> str:
    name = f"<code>{method.upper()} {escape(path)}</code>"
    first = operation.get("description", "").partition(".")[0]
    parts = [_text(operation.get("description", "")), _parameters(operation)]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body, <code>{escape(kind)}</code></p>" + _keys(document, content.get("schema", {})))
    parts.append(_responses(document, operation))
    if operation.get("security"):
        parts.append("<p>With a key: <code>Authorization: Bearer KEY</code></p>")
    return f"<details><summary>{name} {escape(first)}</summary>{''.join(parts)}</details>\n"


def _parameters(operation: dict[str, Any]) -> str:
    rows = [
        (f"<code>{escape(one['name'])}</code>", escape(one["in"]), escape(one.get("description", "")))
        for one in operation.get("parameters", [])
    ]
    return _table(("Parameter", "In", ""), rows)


def _keys(document: dict[str, Any], schema: dict[str, Any]) -> str:
    schema = _resolved(document, schema)
    required = set(schema.get("required", ()))
    rows = []
    for name, found in schema.get("properties", {}).items():
        types = " or ".join(dict.fromkeys(_types(document, found)))
        mark = "<br>required" if name in required else ""
        rows.append((f"<code>{escape(name)}</code>{mark}", escape(types), escape(found.get("description", ""))))
    return _table(("Key", "Type", ""), rows)


def _types(document: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    """What a value may be, in words, one alternative after the other."""
    schema = _resolved(document, schema)
    for alternative in schema.get("anyOf", ()):
        yield from _types(document, alternative)
    if "anyOf" in schema:
        return
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        yield "one of " + ", ".join("null" if value is None else str(value) for value in values)
        return
    kind = schema.get("type", "anything")
    if kind == "array":
        kind = f"list of {' or '.join(_types(document, schema.get('items', {})))}"
    limits = [words.format(schema[key]) for key, words in _LIMITS.items() if key in schema]
    yield f"{kind} ({', '.join(limits)})" if limits else str(kind)


def _responses(document: dict[str, Any], operation: dict[str, Any]) -> str:
    rows = []
    for status, answer in operation.get("responses", {}).items():
        kinds = ", ".join(answer.get("content", {}))
        rows.append((escape(status), escape(kinds), escape(answer.get("description", ""))))
    return _table(("Answer", "Type", ""), rows)


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        found: Any = document
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    titles = "".join(f"<th>{title}</th>" for title in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{titles}</tr>{lines}</table></div>'


def _text(markdown: str) -> str:
    """Paragraphs, **bold** and `code`: all the Markdown that the document has."""
    paragraphs = []
    for paragraph in filter(None, re.split(r"\n\s*\n", markdown.strip())):
        html = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(paragraph, quote=False))
        html = re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
        paragraphs.append(f"<p>{html}</p>")
    return "\n".join(paragraphs)
