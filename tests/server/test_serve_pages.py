"""The pages for people: whole, from this server alone, and true to what it serves."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from served import served

from mktts.server.app import PAGE

KEY = "a-key-of-the-tests"
BROWSER = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
SCRIPTS = sorted(PAGE.glob("*.js"))


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, attribute: str) -> list[str]:
        return [found[attribute] for _, found in self.found if found.get(attribute)]


@pytest.fixture(scope="module")
def server(synthesizer):
    with served(synthesizer, api_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def page(server) -> httpx.Response:
    return httpx.get(server.url, headers=BROWSER)


def test_a_browser_gets_the_page_and_a_program_the_text(server, page):
    assert page.headers["Content-Type"].startswith("text/html") and "<textarea" in page.text
    plain = httpx.get(server.url)
    assert plain.headers["Content-Type"].startswith("text/plain") and "POST /v1/audio/speech" in plain.text
    assert page.headers["Vary"] == plain.headers["Vary"] and "Accept" in page.headers["Vary"]


def test_pages_and_what_they_load_need_no_key_and_come_from_here(server, page):
    for answer in (page,):
        tags = Tags(answer.text)
        for address in [*tags.values("src"), *tags.values("href")]:
            if address in ("data:,", "docs"):
                continue
            assert not re.match(r"[a-z]+:|/", address), f"{address} leaves the server, or the path it lies behind"
            found = httpx.get(f"{server.url}/{address.removeprefix('./')}")
            assert found.status_code == 200, address
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "script-src 'self';" in policy
        assert not [tag for tag, attributes in tags.found if tag == "style" or "style" in attributes]
        assert not [found for _, found in tags.found if any(name.startswith("on") for name in found)]
    for path in (*SCRIPTS, PAGE / "style.css"):
        answer = httpx.get(f"{server.url}/page/{path.name}")
        assert answer.content == path.read_bytes()
        assert not re.search(r"https?://|//cdn|@import", answer.text), path
    for absent in ("none.js", "../app.py", "%2e%2e/app.py"):
        assert httpx.get(f"{server.url}/page/{absent}").status_code in (401, 404)


def test_scripts_find_every_element_that_they_name_and_import_what_is_there(page):
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


def test_every_field_of_the_page_has_a_name_for_those_who_cannot_see_it(page):
    labelled = re.sub(r"<label.*?</label>", "", page.text, flags=re.DOTALL)
    left = [
        tag
        for tag, found in Tags(labelled).found
        if tag in ("input", "select", "textarea") and "aria-label" not in found
    ]
    assert left == []


def test_the_page_asks_for_what_the_server_has(server):
    code = (PAGE / "page.js").read_text(encoding="utf-8")
    asked = set(re.findall(r'ask\([`"]([\w/]+?)/?[`"$]', code))
    paths = {path.strip("/") for path in httpx.get(f"{server.url}/openapi.json").json()["paths"]}
    assert asked <= paths and {"health", "v1/audio/voices", "v1/audio/speech"} <= asked
    formats = re.findall(r'<option value="(\w+)">', (PAGE / "index.html").read_text(encoding="utf-8"))
    document = httpx.get(f"{server.url}/openapi.json").json()
    wishes = document["components"]["schemas"]["OpenAISpeechRequest"]["properties"]
    assert set(formats) <= set(wishes["response_format"]["anyOf"][0]["enum"])
    sent = set(re.findall(r"wishes\.(\w+) =", code)) | {"input", "response_format", "language"}
    assert sent - {"instructions"} <= set(wishes)  # which this checkpoint does not take


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_pages_pure_code():
    harness = Path(__file__).with_name("page_code.mjs")
    done = subprocess.run(["node", str(harness), str(PAGE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_read_by_an_engine(script):
    check = ["node", "--input-type=module", "--check"]
    done = subprocess.run(check, input=script.read_text(encoding="utf-8"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
