"""`python -m mktts lab site`: makes a static site of executed notebooks, with sound and a table of all figures. Its
pages load nothing from other hosts: pictures are embedded, sounds are separate files, formulas are MathML. `page/` has
the template and the style."""

import argparse
import html
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from mktts.common import write_whole
from mktts.errors import BatchError
from mktts.measure.metrics import short
from mktts.notebook.records import VERDICT, provenance, stored
from mktts.notebook.runs import PAGE, publish

RUNS = (Path("outputs/runs"), Path("outputs/reference"))
OUT = Path("outputs/site")
STYLE = "site.css"  # a folder with this file is a site
TEMPLATE = Path(__file__).parent / "page"
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
AGENT_PICTURE = "agent_page.png"
EXAMPLES = """examples:
  python -m mktts lab site
  python -m mktts lab site outputs/reference --out site

It uses notebooks that `python -m mktts run` has executed, and the published ones if there is no run: if several RUNS
have a notebook, the first one counts. Runs that failed or had values set are left out. Exit status: 0, or 2 if there is
no executed notebook, or --out holds something else."""
_NAME = re.compile(r"\d\d_[A-Za-z0-9_]+")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_SOUND = re.compile(r'<a href="([^"/]+\.mp3)">[^<]*</a>')
_LINK = re.compile(r'<a href="(?![a-z]+:|#)([^"]*)">(.*?)</a>', re.DOTALL)
_TARGET = re.compile(r"(?:.*/)?(\d\d_\w+)(?:\.ipynb|/executed\.ipynb)")


@dataclass
class Page:
    """An executed notebook. machine: the folder between RUNS and the notebook's own, such as h200; usually ""."""

    folder: Path
    machine: str = ""
    notebook: Any = None
    verdict: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{'_'.join(filter(None, (self.folder.name, self.machine)))}.html"

    @property
    def label(self) -> str:
        return self.folder.name + (f" on {self.machine.upper()}" if self.machine else "")

    @property
    def title(self) -> str:
        """The first heading, such as "04 · Can it be heard while it is being made?"."""
        prose = (cell.source for cell in self.notebook.cells if cell.cell_type == "markdown")
        return next((found[1] for text in prose if (found := _TITLE.search(text))), self.folder.name)

    @property
    def question(self) -> str:
        return str(self.verdict.get("question") or self.title.partition(" · ")[2] or self.title)


class Prose(IPythonRenderer):
    """Renders Markdown as HTML. sections: level, id and heading of each section, for the table of contents."""

    def __init__(self) -> None:
        super().__init__(escape=False)
        self.sections: list[dict[str, Any]] = []

    def heading(self, text: str, level: int, **attributes: Any) -> str:
        plain = _plain(text)
        again = sum(one["heading"] == plain for one in self.sections)
        name = re.sub(r"\W+", "-", plain.lower()).strip("-") + (f"-{again + 1}" if again else "")
        self.sections.append({"level": level, "id": name, "heading": plain})
        anchor = f'<a class="anchor-link" href="#{name}" aria-label="Link to this section">¶</a>'
        return f'<h{level} id="{name}">{text}{anchor}</h{level}>\n'

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return text  # badges are on another host: only their text is shown

    def block_math(self, body: str) -> str:
        return f'<div class="formula">{_mathml(body, "block")}</div>'

    def inline_math(self, body: str) -> str:
        return _mathml(body, "inline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = f"folders of run folders (default: {' '.join(map(str, RUNS))})"
    parser.add_argument("runs", nargs="*", type=Path, default=RUNS, metavar="RUNS", help=default)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="to write (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    pages = build(arguments.runs, arguments.out)
    print(f"{len(pages)} notebooks: {arguments.out / 'index.html'}")
    return 0


def build(runs: Sequence[Path], out: Path) -> list[Page]:
    """Writes the site of all executed notebooks in the folders `runs` to `out`, replacing an older site; returns its
    pages. Raises BatchError if there are no notebooks, or `out` holds something else."""
    pages = found(runs)
    if not pages:
        raise BatchError(f"expected executed notebooks in {', '.join(map(str, runs))}, found none: make run")
    if out.exists() and not (out / STYLE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise BatchError(f"{out}: expected a folder that is empty or holds a site, found something else")
    shutil.rmtree(out, ignore_errors=True)
    write_whole(out / STYLE, (TEMPLATE / STYLE).read_bytes())
    with tempfile.TemporaryDirectory() as scratch:
        for number, page in enumerate(pages):
            copy = publish(page.folder, Path(scratch) / page.address / page.folder.name)
            page.notebook = nbformat.read(copy / "executed.ipynb", as_version=4)
            page.verdict = stored(Path(VERDICT).stem, page.folder) or {}
            before, after = pages[number - 1] if number else None, (pages[number + 1 :] or [None])[0]
            markup = _exported(page, before=before, after=after)
            write_whole(out / page.address, _placed(markup, page, pages, [copy, page.folder, *runs], out).encode())
    index = Page(Path("index"), notebook=nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Notebooks")]))
    write_whole(out / index.address, _exported(index, notebooks=pages).encode())
    return pages


def found(runs: Sequence[Path]) -> list[Page]:
    """The notebooks that ran without errors, in order, the first of duplicates. A machine's are one folder deeper."""
    pages: dict[str, Page] = {}
    for folder in runs:
        for path in [*folder.glob("*/executed.ipynb"), *folder.glob("*/*/executed.ipynb")]:
            page = Page(path.parent, "".join(path.relative_to(folder).parts[:-2]))
            status = (stored("metrics", page.folder) or {}).get("status")
            if _NAME.fullmatch(page.folder.name) and status == "ok":
                pages.setdefault(page.address, page)
    return [pages[address] for address in sorted(pages)]


def _exported(page: Page, **known: Any) -> str:
    """Renders a page as HTML. known: further values for the template."""
    prose, section = Prose(), page.title
    page.notebook.cells = [c for c in page.notebook.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    for cell in page.notebook.cells:
        if cell.cell_type == "markdown" and (headings := _HEADING.findall(cell.source)):
            section = headings[-1]
        for output in (one for one in cell.get("outputs", []) if "image/png" in one.get("data", {})):
            output.metadata["image/png"] = {**output.metadata.get("image/png", {}), "alt": f"Picture: {section}"}
    exporter = HTMLExporter(template_name=TEMPLATE.name, extra_template_basedirs=[str(TEMPLATE.parent)])
    exporter.register_filter("markdown2html", MarkdownWithMath(renderer=prose).render)
    exporter.register_filter("short", short)
    about = provenance(stored("environment", page.folder))
    exporter.environment.globals["site"] = {"page": page, "sections": prose.sections, "about": about, **known}
    return exporter.from_notebook_node(page.notebook)[0]


def _placed(markup: str, page: Page, pages: Sequence[Page], folders: Sequence[Path], out: Path) -> str:
    """Turns links to sounds into players, links to notebooks into links to their pages, and the agent's page into a
    picture. Files come from the first of `folders` that has them. Other relative links are replaced by their text."""

    def taken(name: str) -> str | None:
        if not (path := next((folder / name for folder in folders if (folder / name).is_file()), None)):
            return None
        place = Path("files") / page.address.removesuffix(".html") / name
        write_whole(out / place, path.read_bytes())
        return html.escape(place.as_posix())

    def sound(link: re.Match[str]) -> str:
        source = taken(html.unescape(link[1]))
        return f'<audio controls preload="none" title="{link[1]}" src="{source}"></audio>' if source else link[0]

    def linked(link: re.Match[str]) -> str:
        target = _TARGET.fullmatch(link[1])
        named = [one for one in pages if target and one.folder.name == target[1]]
        nearest = next((one for one in named if one.machine == page.machine), next(iter(named), None))
        own = link[1].partition("#")[0] in {"index.html", *(one.address for one in pages)}
        return link[0] if own else f'<a href="{nearest.address}">{link[2]}</a>' if nearest else link[2]

    if PAGE in markup and (picture := taken(AGENT_PICTURE)):
        markup = markup.replace(PAGE, f'<img src="{picture}" alt="The agent\'s page, as it looks while it runs">')
    return _LINK.sub(linked, _SOUND.sub(sound, markup))


def _mathml(tex: str, display: str) -> str:
    """Converts TeX to MathML, without the namespace, which HTML does not need. The converter lacks \\arg."""
    known = tex.strip().replace(r"\arg", r"\operatorname{arg}")
    return convert(known, display=display).replace(f' xmlns="{NAMESPACE}"', "")


def _plain(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", markup)).split())
