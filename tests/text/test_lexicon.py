"""What is said in place of words."""

import pytest

from mktts.errors import OptionsError, TextError
from mktts.text.lexicon import MAX_ENTRY_CHARS, Lexicon, LexiconFeed, respelled
from mktts.text.split import MAX_TEXT_CHARS

WORDS = {
    "nginx": "engine X",
    "GIF": "jif",
    "SQL": "sequel",
    "SQL Server": "sequel server",
    "C++": "see plus plus",
    ".NET": "dot net",
    "Nguyen": "Win",
    "straße": "shtrahsuh",
    "重庆": "崇庆",
    "New York": "Noo Yawk",
}
LEXICON = Lexicon(WORDS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("nginx, Nginx or NGINX", "engine X, engine X or engine X", id="small-letters-for-any-case"),
        pytest.param("A GIF is no gif.", "A jif is no gif.", id="a-capital-stands-for-itself"),
        pytest.param("nginxes, mynginx, _nginx, nginx2, SQLite", None, id="never-inside-a-word"),
        pytest.param("nginx's and Nguyen’s", "engine X's and Win’s", id="a-possessive-is-the-word"),
        pytest.param("O'Nguyen, nginx'd, nginx'sx", None, id="any-other-apostrophe-is-not"),
        pytest.param("nginx.org me@nginx.org v1.nginx", None, id="names-with-dots-are-one-word"),
        pytest.param("'nginx' (SQL) SQL-like/GIF", "'engine X' (sequel) sequel-like/jif", id="marks-part-words"),
        pytest.param("SQL Server, SQL server", "sequel server, sequel server", id="the-longest-counts"),
        pytest.param("C++ and C++11, ASP.NET and .NET", "see plus plus and C++11, ASP.NET and dot net", id="signs"),
        pytest.param("Die Straße, die STRASSE", "Die shtrahsuh, die shtrahsuh", id="other-letters-in-any-case"),
        pytest.param("我去重庆旅行。", "我去崇庆旅行。", id="no-spaces-in-chinese"),
        pytest.param("nginx\u0301", None, id="an-accent-belongs-to-its-letter"),
        pytest.param("New York is not New\nYork.", "Noo Yawk is not New\nYork.", id="two-words"),
        pytest.param("SQL", "sequel", id="alone"),
    ],
)
def test_words_are_said_as_listed(text, said):
    assert LEXICON.say(text) == (text if said is None else said)


def test_what_is_said_is_not_looked_up_again_and_an_entry_of_the_request_comes_before_the_loaded_ones_in_any_case():
    assert Lexicon({"a": "b", "b": "a"}).say("a b") == "b a"
    assert Lexicon({"gif": "giff"}, LEXICON).say("GIF SQL") == "giff sequel"
    assert Lexicon({"SQL": "squeal"}, LEXICON).say("SQL Server, SQL") == "sequel server, squeal"
    with pytest.raises(TextError, match="may have"):
        Lexicon({"a": "b" * MAX_ENTRY_CHARS}).say("a " * (MAX_TEXT_CHARS // 50))


def test_only_what_may_become_a_word_is_held_back():
    feed = LexiconFeed(LEXICON)
    pushed = [feed.take(piece) for piece in ("All of ", "it on ng", "in", "x", " is. S", "o")]
    assert pushed == ["All of ", "it on ", "", "", "engine X is. ", "So"]
    assert LexiconFeed(LEXICON).take("No such thing he") == "No such thing he"


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        pytest.param(b"nginx engine X\n", "line 1: expected a word, a tab and .* found 0 tabs", id="no-tab"),
        pytest.param(b"a\tb\n\na\tb\tc\n", "line 3: .* found 2 tabs", id="two-tabs"),
        pytest.param(b"a\tb\n\xff\tc\n", "expected UTF-8, found other bytes at 4", id="bytes"),
        pytest.param(b"a\tb\na\tc\n", "line 2: 'a' stands in a line before", id="twice"),
        pytest.param(b"a\t\n", "line 1: .* got 0 characters", id="nothing-to-say"),
        pytest.param(b"a\t...\n", "line 1: .*letters or digits to say for 'a'", id="silence"),
        pytest.param(b"x" * 101 + b"\tb\n", "line 1: .* got 101 characters", id="long"),
    ],
)
def test_a_bad_file_is_refused_by_its_line(tmp_path, lines, named):
    path = tmp_path / "words.tsv"
    path.write_bytes(lines)
    with pytest.raises(OptionsError, match=rf"words.tsv[,:] {named}"):
        Lexicon.of(path)
    with pytest.raises(OptionsError, match="found no file"):
        Lexicon.of(tmp_path / "none.tsv")


def test_a_file_is_what_its_mapping_is_and_a_bad_mapping_is_refused(tmp_path):
    path = tmp_path / "words.tsv"
    path.write_bytes("\ufeffnginx\tengine X\r\n\n  GIF\t jif \n".encode())
    assert Lexicon.of(str(path)).say("A GIF of nginx") == "A jif of engine X"
    for words in (["a"], {"a": 3}, {3: "a"}, {"": "a"}, {"a": "?"}, {"a": "b" * (MAX_ENTRY_CHARS + 1)}):
        with pytest.raises(OptionsError, match="pronunciations"):
            Lexicon(words)


def test_ipa_in_english_letters():
    found = {ipa: respelled(ipa) for ipa in ("/mɛtˈfɔɹmɪn/", "ˈt͡ʃiː.nəʊ", "ˈdɪnɚ ˈɛks", "ʁoz", "ˈ", "")}
    assert [*found.values()] == ["metformin", "cheenoh", "dinner eks", None, None, None]
