"""No folder grows: the figures of outputs/reference/size.json are ceilings, which `make size` lowers."""

import json

from size import RECORD, exceeded, measured

NOW = measured()
CEILINGS = json.loads(RECORD.read_text(encoding="utf-8"))


def test_no_total_is_larger_than_recorded():
    assert exceeded(NOW) == []


def test_no_folder_has_more_lines_or_tokens_than_recorded():
    for kind in ("folders", "folder_tokens"):
        over = {name: count for name, count in NOW[kind].items() if count > CEILINGS[kind].get(name, 0)}
        assert over == {}, f"{kind}: delete or merge as much as came, then `make size`"
