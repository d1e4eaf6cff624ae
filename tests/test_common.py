"""What `write_whole` does to the things that stand at a path: files, links, FIFOs, devices; lines for people."""

import os
import re
import stat
import threading
import time

import pytest

from mktts.common import announced, require_writable, whole_numbers, write_whole
from mktts.errors import MkttsError, OptionsError

DATA = b"whole" * 50_000  # more than a FIFO holds


def test_a_file_is_replaced_whole_and_alone_also_behind_a_link_which_stays(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to("folder/target")
    assert write_whole(link, b"before") == link and target.read_bytes() == b"before"  # which was not there
    for path, data in ((link, DATA), (target, b"after")):
        before = target.read_bytes()
        with target.open("rb") as kept:  # a reader of the old file goes on reading the old file
            write_whole(path, data)
            assert kept.read() == before
        assert link.is_symlink() and target.read_bytes() == data and not target.is_symlink()
        assert os.listdir(tmp_path / "folder") == ["target"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_stays_and_its_reader_gets_all(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()), daemon=True)
    reader.start()
    write_whole(fifo, DATA)
    reader.join(60)
    assert read == [DATA] and stat.S_ISFIFO(fifo.stat().st_mode) and os.listdir(tmp_path) == ["fifo"]


def test_a_device_stays_a_device(tmp_path):
    null, link = tmp_path / "null", tmp_path / "link"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        null.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"no device nodes here: {error}")
    link.symlink_to(null)
    for path in (null, link):
        require_writable(path)
        write_whole(path, DATA)
    assert stat.S_ISCHR(null.stat().st_mode) and link.is_symlink() and set(os.listdir(tmp_path)) == {"null", "link"}


def test_what_cannot_be_written_is_refused_by_name_and_nothing_is_touched(tmp_path):
    (tmp_path / "there").write_bytes(b"before")
    (tmp_path / "lost").symlink_to("absent/target")
    with pytest.raises(MkttsError, match="found a folder"):
        require_writable(tmp_path)
    for name in ("absent/file", "lost", "there/file"):
        with pytest.raises(MkttsError, match="in a folder that exists"):
            require_writable(tmp_path / name)
    require_writable(tmp_path / "new")
    require_writable(tmp_path / "there")
    if os.path.isdir("/proc/self"):  # where even root makes no files
        with pytest.raises(MkttsError, match="can be written to"):
            require_writable("/proc/new.wav")
    assert set(os.listdir(tmp_path)) == {"there", "lost"} and (tmp_path / "there").read_bytes() == b"before"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_file_and_folder_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(0o444)
    with pytest.raises(MkttsError, match="file that may be written"):
        require_writable(tmp_path / "file")
    tmp_path.chmod(0o555)
    with pytest.raises(MkttsError, match="can be written to"):
        require_writable(tmp_path / "new")
    tmp_path.chmod(0o755)


@pytest.mark.parametrize(("patience_s", "said"), [(60, ""), (0, r"working \.\.\. \d+\.\d s\n")])
def test_slow_work_says_what_it_does_and_how_long_it_took_and_quick_work_says_nothing(patience_s, said, capsys):
    with announced("working", patience_s=patience_s):
        time.sleep(0.05)
    assert re.fullmatch(said, capsys.readouterr().err)


def test_what_is_no_list_of_whole_numbers_has_its_parameters_name():
    assert whole_numbers("SCHEDULE", "1, 1,16") == (1, 1, 16)
    for wrong in ("a", "", "1,,2", "1,0", "-1", "1.5"):
        with pytest.raises(OptionsError, match="SCHEDULE takes whole numbers of at least 1"):
            whole_numbers("SCHEDULE", wrong)
