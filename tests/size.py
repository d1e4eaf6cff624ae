"""How large the package is: lines, Python tokens and files by folder, and what `stream("Hello.")` enters (`make size`).

`python tests/size.py` prints the table and writes outputs/reference/size.json, unless a total grew: its figures are
ceilings for test_hygiene.py."""

import io
import json
import re
import sys
import threading
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "mktts")
RECORD = ROOT / "outputs" / "reference" / "size.json"
LAYOUT = {tokenize.ENCODING, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}
# Since Python 3.12 an f-string is many tokens, from a start to an end; it counts as one here, as in 3.11.
FSTRING = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
APART = "training"  # has a budget of its own: in `folders`, but in no total


def tokens(text: str) -> int:
    """Python tokens of a file, without comments, line ends and indentation."""
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth -= token.type == FSTRING[1]
        count += depth == 0 and token.type not in LAYOUT and token.type != FSTRING[0]
        depth += token.type == FSTRING[0]
    return count - 1  # the end marker


def measured() -> dict:
    """The keys of size.json: totals of mktts and of tests without training, and lines and tokens by folder."""
    lines, spent, files, classes = Counter(), Counter(), Counter(), Counter()
    for path in sorted([*(ROOT / "mktts").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        folder = "/".join(path.relative_to(ROOT).parts[:-1][:2])
        lines[folder] += text.count("\n")
        spent[folder] += tokens(text)
        files[folder] += 1
        if folder.startswith("mktts"):
            classes.update(re.findall(r"^ *class _*(\w+)[(:]", text, re.MULTILINE))
    counted = [name for name in lines if APART not in name]
    package = [name for name in counted if name.startswith("mktts")]
    return {
        "lines": sum(lines[name] for name in package),
        "tokens": sum(spent[name] for name in package),
        "files": sum(files[name] for name in package),
        "tests_lines": sum(lines[name] for name in counted if name.startswith("tests")),
        "doubles": sum(count > 1 for count in classes.values()),
        "folders": dict(lines),
        "folder_tokens": dict(spent),
        "folder_files": dict(files),
        "double_names": sorted(name for name, count in classes.items() if count > 1),
    }


def exceeded(now: dict) -> list[str]:
    """Totals that are larger than in size.json, as sentences."""
    ceilings = json.loads(RECORD.read_text(encoding="utf-8"))
    totals = ("lines", "tokens", "files", "tests_lines", "doubles")
    return [f"{name}: {now[name]}, at most {ceilings[name]}" for name in totals if now[name] > ceilings[name]]


def entered() -> dict[str, int]:
    """Functions and files of mktts that a warm `stream("Hello.").read()` enters, on a CPU, with its worker's thread."""
    from mktts import Synthesizer
    from mktts.checkpoint import open_checkpoint

    functions: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            functions.add((code.co_filename, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    with Synthesizer.load(open_checkpoint("small"), device="cpu", engine="single") as synthesizer:
        synthesizer.stream("Hello.", seed=1).read()
        functions.clear()
        synthesizer.stream("Hello.", seed=1).read()
        counts = {"functions": len(functions), "files": len({file for file, _ in functions})}
    sys.setprofile(None)
    threading.setprofile(None)
    return counts


def main() -> None:
    now = measured()
    now["stream_hello"] = entered()
    print(f"{'folder':<20}{'lines':>8}{'tokens':>9}{'files':>7}")
    for name, lines in now["folders"].items():
        print(f"{name:<20}{lines:>8}{now['folder_tokens'][name]:>9}{now['folder_files'][name]:>7}")
    print(f"{'mktts - training':<20}{now['lines']:>8}{now['tokens']:>9}{now['files']:>7}")
    print(f"{'tests - training':<20}{now['tests_lines']:>8}")
    print('stream("Hello.") enters {functions} functions in {files} files'.format(**now["stream_hello"]))
    print(f"class names defined twice: {now['doubles']}: {', '.join(now['double_names'])}")
    if over := exceeded(now):
        raise SystemExit(f"larger than {RECORD.name} allows, which is left as it is: {'; '.join(over)}")
    RECORD.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
