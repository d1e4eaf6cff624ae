"""How many written forms of cases.tsv are read as listed: `python tests/text/record_cases.py` writes text.json. A line
is `written<TAB>read`, with "|" between readings that are all right; \\n and \\x1b stand for those characters."""

import json
import re
from pathlib import Path

from mktts.text import spoken


def cases(name: str = "cases.tsv") -> list[tuple[str, list[str]]]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    rows = [line.replace("\\n", "\n").replace("\\x1b", "\x1b").replace("\\\\", "\\").split("\t") for line in lines]
    return [(written, right.split("|")) for written, right in rows]


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def wrong(rows: list[tuple[str, list[str]]]) -> list[tuple[str, str]]:
    """(written, spoken) where `spoken` is none of the readings that are right."""
    return [(text, spoken(text)) for text, right in rows if words(spoken(text)) not in map(words, right)]


if __name__ == "__main__":
    found = {"cases": len(cases()), "right": len(cases()) - len(wrong(cases())), "outside": None}
    path = Path(__file__).resolve().parents[2] / "outputs" / "reference" / "text.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
