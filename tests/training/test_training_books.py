"""Books in packages, with small packages made here in the formats of the real ones, and how packages are fetched."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
from commands import run

from mktts.errors import BackendUnavailable, CheckpointError, OptionsError
from mktts.training.data import books, packages


def put(folder: Path, name: str, content: str | bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def r_data(*books_of_lines: list[str]) -> bytes:
    """R's lazy-load database: per object four bytes of length and a zlib stream of its serialization."""
    found = b""
    for lines in books_of_lines:
        strings = b"".join(b"\0\x04\0\x09" + struct.pack(">i", len(line)) + line.encode() for line in lines)
        whole = (
            b"X\n" + struct.pack(">iii", 3, 0x30602, 0x20300) + b"\0\0\0\x10" + struct.pack(">i", len(lines)) + strings
        )
        found += struct.pack(">i", len(whole)) + zlib.compress(whole)
    return found


@pytest.fixture
def folder(tmp_path):
    verses = (
        '<title>Not this one</title><verse osisID="a"/><w lemma="1">He</w> <w>asked</w> them, “Where is the boat?” '
        '<note>nor this</note><verse osisID="b"/>They didn’t know.'
    ).encode()
    blocks = [zlib.compress(verses), zlib.compress(b"<verse/>The end of it.")]
    for part in ("ot", "nt"):
        base = f"usr/share/sword/modules/texts/ztext/engWEB1/{part}"
        index = struct.pack("<III", 0, len(blocks[0]), 0) + struct.pack("<III", len(blocks[0]), len(blocks[1]), 0)
        put(tmp_path, f"{base}.bzs", index)
        put(tmp_path, f"{base}.bzz", b"".join(blocks))
    lines = ["CHAPTER I", "", 'Mr. Hill said, "My', 'dear, it is late," and he left.', "", "So it was."]
    put(tmp_path, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", r_data(lines, ["Another book of hers."]))
    put(tmp_path, "npm/datasets-moby-dick/package/data/chapter_1.json", json.dumps({"text": "Call me a sailor."}))
    put(tmp_path, "npm/datasets-sotu/package/data/1899_old.txt", "This is too old.")
    put(tmp_path, "npm/datasets-sotu/package/data/1950_new.txt", "We are strong. We are many.")
    put(
        tmp_path,
        "pip/chatterbot_corpus/data/english/a.yml",
        "categories:\n- a\nx:\n- - How are you?\n  - 'I''m fine.'\n",
    )
    put(
        tmp_path,
        "usr/share/doc/python3.1/html/_sources/a/b.rst.txt",
        "Title\n=====\n\nUse a list\nhere.\n\n   code()\n",
    )
    put(tmp_path, "usr/share/doc/sqlite3/a.html", "<h1>No</h1><p>Rows are <b>kept</b> &amp; read.</p>")
    put(tmp_path, "usr/share/doc/postgresql-doc-15/html/b.html", "<p>Tables can grow.</p>")
    put(tmp_path, "usr/share/dictd/devil.dict.dz", gzip.compress(b"BORE, n.  A person who\ntalks.\n"))
    put(tmp_path, "usr/share/dictd/jargon.dict.dz", gzip.compress(b"bug\n\n    [x] A {flaw} in it.\n"))
    return tmp_path


EXPECTED = {
    "scripture": ["He asked them,", "Where is the boat?", "They didn't know.", "The end of it."],
    "novels": ["Mister Hill said,", "My dear, it is late,", "and he left.", "So it was.", "Another book of hers."],
    "whale": ["Call me a sailor."],
    "speeches": ["We are strong.", "We are many."],
    "dialogue": ["How are you?", "I'm fine."],
    "manuals": ["Use a list here.", "Rows are kept & read.", "Tables can grow."],
    "definitions": ["A person who talks.", "A flaw in it."],
}


@pytest.mark.parametrize("source", books.SOURCES)
def test_a_package_is_read_sentence_by_sentence(folder, source):
    texts = [text.strip() for text in books.SOURCES[source](folder)]
    found = [piece for text in texts for piece in books.sentences(text)]
    wanted = [piece.strip(",") for piece in EXPECTED[source]]
    assert found == [piece for piece in wanted if len(piece.split()) >= 3] * (2 if source == "scripture" else 1)


@pytest.mark.parametrize("source", books.SOURCES)
def test_a_missing_package_is_named(tmp_path, source):
    with pytest.raises(CheckpointError, match="expected the package"):
        list(books.SOURCES[source](tmp_path))


def test_long_sentences_are_cut_where_a_speaker_pauses():
    text = " ".join(["one two three four"] * 4) + ", and " + " ".join(["five six"] * 4) + "; but it was late then."
    found = list(books.sentences(text))
    assert [len(piece.split()) for piece in found] == [16, 9, 5]
    assert all(len(piece.split()) <= books.MAX_SENTENCE_WORDS for piece in found)
    assert list(books.sentences("word " * 30)) == []


def client(folder: Path, name: str, script: str) -> None:
    put(folder, name, f"#!{sys.executable}\nimport sys\n{script}\n")
    (folder / name).chmod(0o755)


def test_every_registry_has_its_client(tmp_path, monkeypatch):
    archive, wheel = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        info = tarfile.TarInfo("package/data/a.txt")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"hi"))
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("talk/a.yml", "x")
    put(tmp_path, "a.tgz", archive.getvalue())
    put(tmp_path, "a.whl", wheel.getvalue())
    copy = "import shutil; shutil.copy({!r}, '.')"
    bin_folder = tmp_path / "bin"
    client(bin_folder, "apt-get", "open(sys.argv[-1] + '_1_all.deb', 'w')")
    client(bin_folder, "dpkg", "import pathlib; pathlib.Path(sys.argv[3], pathlib.Path(sys.argv[2]).stem).touch()")
    client(bin_folder, "npm", copy.format(str(tmp_path / "a.tgz")))
    client(bin_folder, "python", copy.format(str(tmp_path / "a.whl")))
    monkeypatch.setenv("PATH", str(bin_folder), prepend=os.pathsep)
    monkeypatch.setattr(packages.sys, "executable", str(bin_folder / "python"))
    made = [packages.Package(*pair, "", "") for pair in (("Debian", "words"), ("npm", "@x/y"), ("PyPI", "talk"))]
    packages.fetch(tmp_path / "out", made)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"words_1_all", "npm/y/package/data/a.txt", "pip/talk/a.yml"}


def test_a_client_that_fails_is_quoted(tmp_path, monkeypatch):
    client(tmp_path, "apt-get", "sys.exit('no such package')")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(BackendUnavailable, match="words.*no such package"):
        packages.fetch(tmp_path / "out", [packages.Package("Debian", "words", "", "")])


def test_packages_are_fetched_into_a_folder_only(tmp_path):
    with pytest.raises(OptionsError, match="--corpora"):
        run("train texts", "--fetch", "--out", tmp_path / "a.xz")


def test_every_package_is_in_the_notice():
    notice = (Path(__file__).parents[2] / "NOTICE").read_text(encoding="utf-8")
    assert [package.name for package in packages.PACKAGES if package.name not in notice] == []
    assert not [package for package in packages.PACKAGES if "SA" in package.licence or "NC" in package.licence]
