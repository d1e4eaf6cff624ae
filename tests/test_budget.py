"""No folder grows: the figures of outputs/reference/size.json are ceilings, which `make size` lowers."""

import json

from size import RECORD, exceeded, measured


def test_no_total_and_no_folder_is_larger_than_recorded():
    now, ceilings = measured(), json.loads(RECORD.read_text(encoding="utf-8"))
    assert exceeded(now) == []
    for kind in ("folders", "folder_tokens"):
        over = {name: count for name, count in now[kind].items() if count > ceilings[kind].get(name, 0)}
        assert over == {}, f"{kind}: delete or merge as much as came, then `make size`"
