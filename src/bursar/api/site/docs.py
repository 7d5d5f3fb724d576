"""The documentation page, generated from the OpenAPI document.

It loads nothing from elsewhere, works without JavaScript, and follows the reader's choice of light or dark. The only
script filters; `CONTENT_SECURITY_POLICY` allows only this script and the style, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

Document = Mapping[str, Any]

METHODS: Final = ("get", "post", "put", "patch", "delete")
_SCHEMAS: Final = "#/components/schemas/"


def page(document: Document) -> bytes:
    """Render the whole page."""
    return "".join(_page(document)).encode()


def _page(document: Document) -> Iterator[str]:
    info = document["info"]
    groups = _by_tag(document)
    yield "<!doctype html><html lang=en><head><meta charset=utf-8>"
    yield '<meta name=viewport content="width=device-width, initial-scale=1">'
    yield '<meta name=color-scheme content="light dark">'
    yield f"<title>{_text(info['title'])} API</title><style>{STYLE}</style></head><body>"
    yield from _sidebar(info, groups)
    yield "<main>"
    yield from _introduction(info)
    for tag, operations in groups.items():
        yield from _section(document, tag, operations)
    yield from _schema_section(document)
    yield f"</main><script>{SCRIPT}</script></body></html>\n"


def _by_tag(document: Document) -> dict[str, list[tuple[str, str, Document]]]:
    """Operations by tag as (method, path, operation), in the document's order."""
    groups: dict[str, list[tuple[str, str, Document]]] = {tag["name"]: [] for tag in document.get("tags", ())}
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                operation = {**item[method], "parameters": _parameters(item, item[method])}
                groups.setdefault(operation.get("tags", ["System"])[0], []).append((method, path, operation))
    return {tag: operations for tag, operations in groups.items() if operations}


def _parameters(item: Document, operation: Document) -> list[Document]:
    return [*item.get("parameters", ()), *operation.get("parameters", ())]


# The frame.


def _sidebar(info: Document, groups: Mapping[str, list[tuple[str, str, Document]]]) -> Iterator[str]:
    yield f"<nav><a class=brand href='#top'>{_text(info['title'])}<small>{_text(info['version'])}</small></a>"
    yield "<input id=filter type=search placeholder='Filter by path or word' aria-label=Filter autocomplete=off hidden>"
    yield "<ul>"
    for tag, operations in groups.items():
        yield f"<li data-tag='{_text(tag)}'><a href='#{_anchor('tag', tag)}'>{_text(tag)}"
        yield f"<span>{len(operations)}</span></a>"
    yield "<li><a href='#schemas'>Schemas</a></ul>"
    yield "<p class=raw><a href='/openapi.json'>openapi.json</a></p></nav>"


def _introduction(info: Document) -> Iterator[str]:
    yield f"<header id=top><h1>{_text(info['title'])} API</h1><p class=lead>{_text(info.get('summary', ''))}</p>"
    yield f"<p>{_prose(info.get('description', ''))}</p>"
    yield "<p>Every request carries a token. The examples take it, and the address, from the environment:</p>"
    yield f"<pre><code>{_text(_ENVIRONMENT)}</code></pre></header>"


_ENVIRONMENT: Final = """export BURSAR_URL=…     # where this page came from, without /docs
export BURSAR_TOKEN=…   # what `bursar token create --role user --tenant ml-team` printed"""


# Operations.


def _section(document: Document, tag: str, operations: Iterable[tuple[str, str, Document]]) -> Iterator[str]:
    described = {one["name"]: one.get("description", "") for one in document.get("tags", ())}
    yield f"<section id='{_anchor('tag', tag)}' data-tag='{_text(tag)}'><h2>{_text(tag)}</h2>"
    if described.get(tag):
        yield f"<p>{_prose(described[tag])}</p>"
    for method, path, operation in operations:
        yield from _operation(document, tag, method, path, operation)
    yield "</section>"


def _operation(document: Document, tag: str, method: str, path: str, operation: Document) -> Iterator[str]:
    name = operation["operationId"]
    words = f"{method} {path} {operation.get('summary', '')} {tag} {name}".lower()
    yield f"<details class=op id='{_anchor('op', name)}' data-words='{_text(words)}'>"
    yield f"<summary><b class='method {method}'>{method.upper()}</b><code class=path>{_path(path)}</code>"
    yield f"<span class=what>{_text(operation.get('summary', ''))}</span></summary><div class=body>"
    yield from _parameter_table(operation["parameters"])
    yield from _request(operation.get("requestBody"))
    yield from _responses(document, operation["responses"])
    yield f"<h4>Example</h4><pre><code>{_text(curl(method, path, operation))}</code></pre></div></details>"


def _parameter_table(parameters: list[Document]) -> Iterator[str]:
    if not parameters:
        return
    yield "<h4>Parameters</h4><div class=scroll><table>"
    for one in parameters:
        where = "path, required" if one["in"] == "path" else one["in"]
        yield f"<tr><td><code>{_text(one['name'])}</code><td class=type>{_text(one['schema'].get('type', ''))}"
        yield f"<td class=type>{where}<td>{_prose(one.get('description', ''))}"
    yield "</table></div>"


def _request(body: Document | None) -> Iterator[str]:
    if body is None:
        return
    yield f"<h4>Body{'' if body.get('required') else ' (optional)'}</h4><div class=scroll><table>"
    for media, content in body["content"].items():
        yield f"<tr><td><code>{_text(media)}</code><td>{_type(content['schema'])}"
        yield f"<td>{_prose(content['schema'].get('description', ''))}"
    yield "</table></div>"
    for content in body["content"].values():
        if "example" in content:
            shown = json.dumps(content["example"], indent=2)
            yield "<details class=example><summary>Example body</summary>"
            yield f"<pre><code>{_text(shown)}</code></pre></details>"


def _responses(document: Document, responses: Document) -> Iterator[str]:
    yield "<h4>Answers</h4><div class=scroll><table>"
    for status, response in responses.items():
        whole, phrase = _resolve(document, response), HTTPStatus(int(status)).phrase
        types = dict.fromkeys(_type(one["schema"]) for one in whole.get("content", {}).values())
        described = "" if whole["description"] == phrase else _prose(whole["description"])
        yield f"<tr><td><b class='status s{status[0]}'>{status}</b><td class=type>{_text(phrase)}"
        yield f"<td>{' or '.join(types)}<td>{described}"
    yield "</table></div>"


def curl(method: str, path: str, operation: Document) -> str:
    """A curl command for the operation; words in capitals are placeholders."""
    content = (operation.get("requestBody") or {}).get("content", {})
    example: Document = next((one["example"] for one in content.values() if "example" in one), {})
    address = path.replace("{namespace}", "ml-team")
    for variable in (one["name"] for one in operation["parameters"] if one["in"] == "path"):
        address = address.replace(f"{{{variable}}}", variable.upper())
    lines = ["curl" if method == "get" else f"curl -X {method.upper()}"]
    if operation.get("security") != []:
        lines.append('-H "Authorization: Bearer $BURSAR_TOKEN"')
    if content:
        media = next(iter(content))
        lines.append(f"-H 'Content-Type: {media}'")
        lines.append(f"-d @{example['metadata']['name']}.json" if example else f"-d '{_sample(media)}'")
    return " \\\n  ".join([*lines, f'"$BURSAR_URL{address}"'])


def _sample(media: str) -> str:
    if "json-patch+" in media:
        return '[{"op": "add", "path": "/metadata/labels/team", "value": "ml"}]'
    return '{"metadata": {"labels": {"team": "ml"}}}' if "patch+" in media else "{…}"


# Schemas.


def _schema_section(document: Document) -> Iterator[str]:
    yield "<section id=schemas data-tag=Schemas><h2>Schemas</h2><p>What bodies and answers are made of. "
    yield "A star marks what must be given.</p>"
    for name, schema in document["components"]["schemas"].items():
        words = f"{name} {' '.join(schema.get('properties', {}))}".lower()
        yield f"<details class=op id='{_anchor('schema', name)}' data-words='{_text(words)}'>"
        yield f"<summary><code class=path>{_text(name)}</code>"
        yield f"<span class=what>{_prose(schema.get('description', ''))}</span></summary><div class=body>"
        yield from _fields(schema)
        yield "</div></details>"
    yield "</section>"


def _fields(schema: Document) -> Iterator[str]:
    properties = schema.get("properties")
    if not properties:
        yield f"<p>{_type(schema)}</p>"
        return
    required = schema.get("required", ())
    yield "<div class=scroll><table>"
    for name, inner in properties.items():
        star = "<b class=star title=required>*</b>" if name in required else ""
        yield f"<tr><td><code>{_text(name)}</code>{star}<td class=type>{_type(inner)}"
        yield f"<td>{_prose(inner.get('description', ''))}"
    yield "</table></div>"


def _type(schema: Document) -> str:
    """Render a type in one line, with links to named types."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMAS)
        return f"<a href='#{_anchor('schema', name)}'>{_text(name)}</a>"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(_text(str(one)) for one in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_type(schema['additionalProperties'])}"
    return _text(" or ".join(kind) if isinstance(kind, list) else kind)


def _resolve(document: Document, one: Document) -> Document:
    if "$ref" not in one:
        return one
    found: Any = document
    for step in one["$ref"].removeprefix("#/").split("/"):
        found = found[step]
    resolved: Document = found
    return resolved


# Text.


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _prose(text: str) -> str:
    """Render text in which backticks mark code."""
    pieces = _text(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


def _path(path: str) -> str:
    """A path with highlighted variables, which may wrap before each segment."""
    steps = (f"<i>{_text(step)}</i>" if step.startswith("{") else _text(step) for step in path.split("/"))
    return "/<wbr>".join(steps)


def _anchor(what: str, name: str) -> str:
    return f"{what}-{_text(name.replace(' ', '-'))}"


STYLE: Final = """
:root{--ink:#1c2330;--soft:#5b6577;--line:#e2e6ec;--paper:#fff;--shade:#f5f7fa;--link:#1f5fbf;
--get:#1f5fbf;--post:#1d7a46;--put:#96650a;--patch:#7a4fb5;--delete:#b3372f}
@media (prefers-color-scheme:dark){:root{--ink:#e4e8ef;--soft:#97a1b3;--line:#2a313d;--paper:#12161d;--shade:#1a2029;
--link:#7fb0ff;--get:#7fb0ff;--post:#6fcf97;--put:#e0b25a;--patch:#c3a0f2;--delete:#f08b83}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{margin:0;display:grid;grid-template-columns:16rem minmax(0,1fr);color:var(--ink);background:var(--paper);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
nav{position:sticky;top:0;height:100vh;overflow:auto;padding:1.5rem 1.25rem;background:var(--shade);
border-right:1px solid var(--line)}
.brand{display:flex;align-items:baseline;gap:.5rem;font-size:1.25rem;font-weight:700;color:var(--ink)}
.brand small{font-size:.75rem;font-weight:400;color:var(--soft)}
nav input{width:100%;margin:1rem 0 0;padding:.45rem .6rem;font:inherit;font-size:.875rem;color:inherit;
background:var(--paper);border:1px solid var(--line);border-radius:6px}
nav ul{list-style:none;margin:1rem 0;padding:0}
nav li a{display:flex;justify-content:space-between;padding:.22rem .5rem;margin:0 -.5rem;border-radius:5px;
color:var(--ink)}
nav li a:hover{background:var(--line);text-decoration:none}
nav li span{color:var(--soft);font-size:.8rem}
.raw{font-size:.85rem}
main{max-width:62rem;padding:2rem 2.5rem 6rem}
h1{margin:0;font-size:1.9rem;letter-spacing:-.02em}
.lead{margin:.25rem 0 1rem;font-size:1.1rem;color:var(--soft)}
h2{margin:3rem 0 .25rem;padding-bottom:.35rem;font-size:1.35rem;border-bottom:1px solid var(--line)}
h2+p{margin:.35rem 0 .9rem;color:var(--soft)}
h4{margin:1.25rem 0 .4rem;font-size:.75rem;letter-spacing:.06em;text-transform:uppercase;color:var(--soft)}
.op{margin:.4rem 0;border:1px solid var(--line);border-radius:8px;background:var(--paper)}
.op>summary{display:flex;align-items:baseline;gap:.75rem;padding:.5rem .8rem;cursor:pointer;list-style:none;
border-radius:8px}
.op>summary::-webkit-details-marker{display:none}
.op>summary:hover,.op[open]>summary{background:var(--shade)}
.op:target{border-color:var(--link)}
summary:focus-visible,a:focus-visible,input:focus-visible{outline:2px solid var(--link);outline-offset:1px}
.method{flex:0 0 4.2rem;font-size:.75rem;letter-spacing:.03em}
.get{color:var(--get)}.post{color:var(--post)}.put{color:var(--put)}.patch{color:var(--patch)}.delete{color:var(--delete)}
.path{flex:0 1 auto;overflow-wrap:anywhere}.path i{font-style:normal;color:var(--soft)}
.what{margin-left:auto;text-align:right;color:var(--soft);font-size:.875rem}
.body{padding:0 .9rem .9rem;border-top:1px solid var(--line)}
.scroll{overflow-x:auto}
table{width:100%;border-collapse:collapse;font-size:.875rem}
td{padding:.3rem .75rem .3rem 0;vertical-align:top;border-top:1px solid var(--line)}
tr:first-child td{border-top:0}
td:last-child{width:100%}
td:first-child,.type{white-space:nowrap}
.type{color:var(--soft)}
.status{font-variant-numeric:tabular-nums}.s2{color:var(--post)}.s4{color:var(--put)}.s5{color:var(--delete)}
.star{color:var(--delete);margin-left:.15rem}
pre{margin:.4rem 0;padding:.75rem .9rem;overflow-x:auto;background:var(--shade);border:1px solid var(--line);
border-radius:8px}
.example{margin-top:.6rem}.example>summary{cursor:pointer;color:var(--link);font-size:.875rem}
[hidden]{display:none!important}
@media (max-width:50rem){body{display:block}nav{position:static;height:auto;border-right:0;
border-bottom:1px solid var(--line)}nav ul{columns:2}main{padding:1.25rem}.op>summary{flex-wrap:wrap;gap:.4rem}
.what{margin-left:0;text-align:left;flex-basis:100%}td:last-child{width:auto}}
@media print{nav{display:none}body{display:block}}
"""

SCRIPT: Final = """
const box=document.getElementById('filter'),entries=[...document.querySelectorAll('.op')];
const parts=[...document.querySelectorAll('section')],links=[...document.querySelectorAll('nav li[data-tag]')];
box.hidden=false;
box.addEventListener('input',()=>{
  const words=box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for(const one of entries)one.hidden=!words.every(word=>one.dataset.words.includes(word));
  for(const part of parts)part.hidden=!part.querySelector('.op:not([hidden])');
  const shown=new Set(parts.filter(part=>!part.hidden).map(part=>part.dataset.tag));
  for(const link of links)link.hidden=!shown.has(link.dataset.tag);
});
const open=()=>{const one=location.hash&&document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if(one&&one.matches('details')){one.open=true;one.scrollIntoView();}};
addEventListener('hashchange',open);open();
"""


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


CONTENT_SECURITY_POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_hash(STYLE)}'; script-src 'sha256-{_hash(SCRIPT)}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
