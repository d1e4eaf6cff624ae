"""The page: whole, from this server alone, and true to what it serves."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from mktts.server.app import PAGE

KEY = "a-key-of-the-tests"
BROWSER = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
SCRIPTS = sorted(PAGE.glob("*.js"))


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def values(self, attribute: str) -> list[str]:
        return [found[attribute] for _, found in self.found if found.get(attribute)]


@pytest.fixture(scope="module")
def locked(make_api):
    return make_api(api_key=KEY)


@pytest.fixture(scope="module")
def page(locked) -> httpx.Response:
    return locked.get("/", headers=BROWSER)


def test_a_browser_gets_the_page_and_a_program_the_text(locked, page):
    assert page.headers["Content-Type"].startswith("text/html") and "<textarea" in page.text
    plain = locked.get("/")
    assert plain.headers["Content-Type"].startswith("text/plain") and "POST /v1/audio/speech" in plain.text
    assert "Accept" in page.headers["Vary"] and "Accept" in plain.headers["Vary"]


def test_the_page_and_what_it_loads_need_no_key_and_come_from_here(locked, page):
    tags = Tags(page.text)
    for address in [*tags.values("src"), *tags.values("href")]:
        if address != "data:,":
            assert not re.match(r"[a-z]+:|/", address), f"{address} leaves the server, or the path it lies behind"
            assert locked.get(f"/{address}").status_code == 200, address
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "script-src 'self';" in policy
    assert not [tag for tag, attributes in tags.found if tag == "style" or "style" in attributes]
    assert not [found for _, found in tags.found if any(name.startswith("on") for name in found)]
    for path in (*SCRIPTS, PAGE / "style.css"):
        answer = locked.get(f"/page/{path.name}")
        assert answer.content == path.read_bytes() and answer.headers["X-Content-Type-Options"] == "nosniff"
        assert not re.search(r"https?://|//cdn|@import", answer.text), path
    for absent in ("none.js", "../app.py", "%2e%2e/app.py"):
        assert locked.get(f"/page/{absent}").status_code in (401, 404)


def test_scripts_find_every_element_that_they_name_and_every_field_has_a_name(page):
    tags = Tags(page.text)
    ids = tags.values("id")
    assert len(ids) == len(set(ids))
    for script in SCRIPTS:
        code = script.read_text(encoding="utf-8")
        assert set(re.findall(r'\$\("([\w-]+)"\)', code)) <= set(ids), script
        for imported in re.findall(r'from "\./([\w.]+)"', code):
            assert (PAGE / imported).is_file()
    named = re.search(r"for \(const id of \[(.+?)\]\) \$\(id\)", (PAGE / "page.js").read_text()).group(1)
    assert set(re.findall(r'"([\w-]+)"', named)) <= set(ids)
    unlabelled = Tags(re.sub(r"<label.*?</label>", "", page.text, flags=re.DOTALL)).found
    fields = [found for tag, found in unlabelled if tag in ("input", "select", "textarea")]
    assert all("aria-label" in found for found in fields)


def test_the_page_asks_for_what_the_server_has(locked):
    code = (PAGE / "page.js").read_text(encoding="utf-8")
    asked = set(re.findall(r'ask\([`"]([\w/]+?)/?[`"$]', code))
    document = locked.get("/openapi.json").json()
    paths = {path.strip("/") for path in document["paths"]}
    assert asked <= paths and {"health", "v1/audio/voices", "v1/audio/speech"} <= asked
    formats = re.findall(r'<option value="(\w+)">', (PAGE / "index.html").read_text(encoding="utf-8"))
    wishes = document["components"]["schemas"]["OpenAISpeechRequest"]["properties"]
    assert set(formats) <= set(wishes["response_format"]["anyOf"][0]["enum"])
    sent = set(re.findall(r"wishes\.(\w+) =", code)) | {"input", "response_format", "language"}
    assert sent - {"instructions"} <= set(wishes)  # which this checkpoint does not take


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_pages_pure_code_and_that_scripts_are_read_by_an_engine():
    harness = Path(__file__).with_name("page_code.mjs")
    commands = [(["node", str(harness), str(PAGE)], "")]
    commands += [(["node", "--input-type=module", "--check"], script.read_text(encoding="utf-8")) for script in SCRIPTS]
    for command, code in commands:
        done = subprocess.run(command, input=code, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
