"""What voices may be called."""

from __future__ import annotations

import pytest

from mktts.errors import ServerError
from mktts.server.command import read_aliases, reference_sources
from mktts.server.schemas import DEFAULT
from mktts.server.voices import OPENAI_VOICES, voice_aliases

RELEASED = ["aiden", "dylan", "eric", "ono_anna", "ryan", "serena", "sohee", "uncle_fu", "vivian"]


def test_openais_voices_are_dealt_out_by_sex_and_to_nobody_with_a_dialect():
    aliases = voice_aliases(RELEASED, ["dylan", "eric"])
    assert set(aliases) == set(OPENAI_VOICES) and not {"dylan", "eric"} & set(aliases.values())
    assert {aliases[name] for name in ("nova", "shimmer", "alloy")} <= {"ono_anna", "serena", "sohee", "vivian"}
    assert {aliases[name] for name in ("onyx", "echo", "ash")} <= {"aiden", "ryan", "uncle_fu"}
    assert len(set(aliases.values())) == len(RELEASED) - 2


@pytest.mark.parametrize(
    ("names", "stands_for"),
    [(["anna"], {"anna"}), ([], {DEFAULT}), (["rms", "awb", "slt"], {"rms", "awb", "slt"}), (["dylan"], {"dylan"})],
)
def test_every_one_of_openais_names_stands_for_somebody(names, stands_for):
    aliases = voice_aliases(names, ["dylan"])
    assert set(aliases) == set(OPENAI_VOICES) and set(aliases.values()) == stands_for


def test_a_voice_with_one_of_openais_names_is_itself():
    assert "alloy" not in voice_aliases(["alloy", "anna"])


def test_given_aliases_come_first_and_are_checked():
    aliases = voice_aliases(["rms", "slt"], given={"Alloy": "SLT", "narrator": "rms", "any": "default"})
    assert (aliases["alloy"], aliases["narrator"], aliases["any"]) == ("slt", "rms", DEFAULT)
    for given, message in (({"a": "nobody"}, "got 'nobody'"), ({"rms": "slt"}, "there is a voice 'rms'")):
        with pytest.raises(ServerError, match=message):
            voice_aliases(["rms", "slt"], given=given)


def test_the_words_of_the_command():
    assert read_aliases(["alloy=rms", " nova = slt "]) == {"alloy": "rms", "nova": "slt"}
    for word in ("alloy", "=rms", "alloy="):
        with pytest.raises(ServerError, match="ALIAS=NAME"):
            read_aliases([word])


def test_where_recordings_may_come_from_is_checked_at_the_start(tmp_path):
    assert reference_sources(["Files.Example"], tmp_path).hosts == {"files.example"}
    for hosts, folder, message in (
        (["https://files.example"], None, "host's name"),
        ([], tmp_path / "absent", "expected a folder"),
    ):
        with pytest.raises(ServerError, match=message):
            reference_sources(hosts, folder)
