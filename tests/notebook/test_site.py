"""The site of executed notebooks: links, sound, figures, and nothing from elsewhere."""

import base64
import re

import nbformat
import numpy as np
from absent import needs
from commands import run
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from mktts.audio import write_audio
from mktts.cli import main
from mktts.common import write_json

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="


def write_run(folder, question, html, prose, status="ok"):
    """A run's folder as `mktts run` leaves it: a notebook with a picture and `html` as outputs, and its verdict."""
    folder.mkdir(parents=True)
    outputs = [new_output("display_data", data=data) for data in ({"image/png": PNG}, {"text/html": html})]
    code = new_code_cell("print('not <prose>')", outputs=outputs)
    cells = [new_markdown_cell(f"# {folder.name[:2]} · {question}\n\n{prose}"), new_markdown_cell("## Listen"), code]
    nbformat.write(new_notebook(cells=cells), folder / "executed.ipynb")
    figure = {"name": "frames <made>", "value": 2 / 3, "unit": "ms", "n": 5, "machine": "2 cores", "checked": "≤ 1"}
    verdict = {"question": question, "answer": "Yes & no.", "figures": [figure], "limit": "none"}
    write_json(folder / "verdict.json", verdict)
    write_json(folder / "metrics.json", {"status": status})


@needs("nbconvert", "latex2mathml")
def test_two_executed_notebooks_become_a_site_that_needs_nothing_from_elsewhere(tmp_path, capsys):
    runs, reference, out = tmp_path / "runs", tmp_path / "reference", tmp_path / "site"
    data = base64.b64encode(b"RIFF").decode()
    heard = f'<audio controls title="said.wav" src="data:audio/wav;base64,{data}"></audio>'
    heard += '<iframe src="http://127.0.0.1:1/?key=k"></iframe>'
    prose = r"After it: [05_next](05_next.ipynb), [file](../README.md). $\arg x_1$. ![A badge](https://elsewhere/b.svg)"
    write_run(runs / "04_first", "Can it be heard?", heard, prose)
    write_audio(runs / "04_first" / "said.wav", np.zeros(2_400, np.float32))
    (runs / "04_first-SEED=1").mkdir()
    (runs / "04_first-SEED=1" / "executed.ipynb").write_text("not read")
    write_run(runs / "05_next", "How did it fail?", "", "", "error")
    link = '<a href="spoken.mp3">spoken.mp3</a>'
    write_run(reference / "05_next", "How fast?", link, "See [first](../04_first/executed.ipynb).\n\n$$y = x^2$$")
    (reference / "05_next" / "spoken.mp3").write_bytes(b"sound")
    write_run(reference / "04_first", "An older one?", "", "")
    write_run(reference / "h200" / "04_first", "Elsewhere?", "", "See [next](05_next.ipynb).")
    assert run("lab site", runs, reference, "--out", out) == 0
    assert capsys.readouterr().out == f"3 notebooks: {out / 'index.html'}\n"
    texts = {path.name: path.read_text(encoding="utf-8") for path in out.glob("*.*")}
    pages = {name: text for name, text in texts.items() if name.endswith(".html")}
    assert set(pages) == {"index.html", "04_first.html", "04_first_h200.html", "05_next.html"}
    assert not re.search("https?:|//[a-z]+[.]|@import|url\\(", "".join(texts.values()))
    for name, text in pages.items():
        for address, anchor in re.findall(r'(?:href|src)="(?!data:)([^"#]*)(#[^"]*)?"', text):
            assert not address or (out / address).is_file(), (name, address)
            assert not anchor or f'id="{anchor[1:]}"' in pages[address or name], (name, anchor)

    first, following = pages["04_first.html"], pages["05_next.html"]
    assert "An older one?" not in first and PNG in first and "<math" in first and "arg</mo>" in first
    assert '<a href="05_next.html">05_next</a>, file.' in first and "A badge" in first
    assert '<a href="04_first.html">first</a>' in following
    assert '<a href="#listen">Listen</a>' in first and '<h2 id="listen">' in first
    along = [re.findall(r'rel="(\w+)"[^>]*>[← ]*(.+?)[→ ]*</a>', text) for text in (first, following)]
    assert along == [[("next", "04_first on H200")], [("prev", "04_first on H200")]]
    sounds = [re.search(r'<audio controls[^>]* src="([^"]*)"', text)[1] for text in (first, following)]
    assert sounds == ["files/04_first/said.mp3", "files/05_next/spoken.mp3"]
    assert (out / sounds[1]).read_bytes() == b"sound" and (out / sounds[0]).stat().st_size > 100

    rows = re.findall(r"<tr>(.*?)</tr>", pages["index.html"], re.DOTALL)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert [row for row in cells if row] == 3 * [["frames &lt;made&gt;", "0.667", "ms", "5", "≤ 1", "2 cores"]]
    index = pages["index.html"]
    assert index.count("Yes &amp; no.") == 6 and index.index("Can it be heard?") < index.index("How fast?")

    assert run("lab site", reference, "--out", out) == 0  # an older site is replaced
    assert "An older one?" in (out / "04_first.html").read_text(encoding="utf-8")


@needs("nbconvert", "latex2mathml")
def test_a_site_of_nothing_and_a_folder_of_something_else_are_refused(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    for expected in ("expected executed notebooks", "expected a folder that is empty"):
        assert main(["lab", "site", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
        assert expected in capsys.readouterr().err
        write_run(tmp_path / "runs" / f"04_{expected[9]}", "Can it be heard?", "", "")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
