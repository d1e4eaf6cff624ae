"""The words and sentence patterns of the training grammar: our own lists, common words first."""

from __future__ import annotations

_ONES = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen " \
    "eighteen nineteen".split()  # fmt: skip
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_NUMBERS = _ONES + _TENS + [f"{ten}-{one}" for ten in _TENS for one in _ONES[:9]]
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth " \
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth".split()  # fmt: skip

LISTS: dict[str, list[str]] = {
    "number": _NUMBERS,
    "large": [f"{n} {unit}" for n in _NUMBERS[:60] for unit in ("hundred", "thousand", "million")],
    "digit": _ONES[:9] + ["zero"],
    "ordinal": _ORDINALS,
    "month": "January February March April May June July August September October November December".split(),
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "name": "Anna Peter Mary John Susan David Laura Michael Sarah Thomas Emma Daniel Julia Robert Alice George Helen "
    "Frank Rachel Henry Olivia Samuel Grace Victor Nora Philip Martha Simon Ruth Oscar".split(),
    "place": "Paris London Tokyo Berlin Madrid Boston Chicago Dublin Oslo Vienna Geneva Sydney Toronto Cairo Lisbon "
    "Prague Denver Seattle Rome Athens".split(),
    "person": "teacher doctor farmer singer lawyer driver baker pilot nurse child stranger neighbour captain writer "
    "painter judge sailor gardener engineer soldier king queen student boy girl woman man friend guest "
    "thief".split(),
    "thing": "book table window garden river mountain bottle letter picture machine bridge church village kitchen "
    "mirror candle basket hammer pencil blanket ship train car house door road field forest island shirt shoe coat "
    "hat key lamp clock phone camera guitar violin piano drum box chair spoon knife plate cup glass bowl ring rope "
    "wheel engine button pocket jacket umbrella newspaper ticket suitcase ladder shovel thread needle cloud stone "
    "flower apple orange lemon potato cheese sandwich cake bread soup horse dog cat bird fish rabbit mouse sheep "
    "goat bear wolf lion".split(),
    "quality": "small large old young green blue yellow red black white heavy light strange quiet loud broken clean "
    "dirty warm cold wet dry sharp smooth rough empty full narrow wide round square bright dark cheap expensive "
    "beautiful ugly simple modern ancient wooden famous useful precious curious".split(),
    "did": "found lost saw sold bought carried painted repaired dropped opened closed moved pushed pulled watched "
    "followed measured washed borrowed stole covered described noticed remembered forgot loved hated needed wanted "
    "touched".split(),
    "do": "find lose see sell buy carry paint repair drop open close move push pull watch follow measure wash borrow "
    "cover describe notice remember forget love need want touch change choose".split(),
    "how": "slowly quickly quietly carefully suddenly happily sadly often never always gently badly again yesterday "
    "together alone".split(),
    "where": "under near behind above beside inside outside beyond against around".split(),
    "when": "in the morning;at noon;after dinner;before sunrise;last week;every winter;this afternoon;at midnight;"
    "during the storm;after the war;two years ago;in the summer".split(";"),
    "why": "because it was raining;although nobody asked;while the others slept;since there was no time;"
    "when the music stopped;before the guests arrived;until the lights went out;as if nothing had happened;"
    "unless the weather changed;after everybody had left".split(";"),
    "reply": "yes;no;of course;all right;thank you;certainly;not yet;maybe later;I see;good idea;never mind;"
    "just a moment;you are right;I am sorry;no problem;very well;sure;exactly".split(";"),
    "mood": "happy sad tired angry hungry afraid surprised sorry ready late sick busy proud jealous calm".split(),
}

TEMPLATES: dict[str, tuple[str, ...]] = {
    "plain": (
        "the {quality} {person} {did} the {quality} {thing}.",
        "{name} {how} {did} a {thing} {where} the {thing}.",
        "{when}, the {person} {did} {number} {quality} {thing}s.",
        "there is a {quality} {thing} {where} the {quality} {thing}.",
    ),
    "number": (
        "the {thing} costs {number} dollars and {number} cents.",
        "we counted {large} {number} {thing}s in {place}.",
        "please call {digit} {digit} {digit}, {digit} {digit} {digit} {digit}.",
        "page {number} has {number} pictures of a {thing}.",
    ),
    "date": (
        "the {person} arrives on {day}, the {ordinal} of {month}.",
        "{name} was born on {month} {ordinal}, nineteen {number}.",
        "it is {number} minutes past {number} {when}.",
    ),
    "question": (
        "did {name} {do} the {quality} {thing}?",
        "where did the {person} {do} the {thing}?",
        "why are you so {mood}, {name}?",
        "can you {do} this {thing} for {name} on {day}?",
        "who {did} the {thing} {where} the {thing}?",
    ),
    "reply": (
        "{reply}, {name}.",
        "{reply}, the {thing} is {quality}.",
        "{reply}, I am {mood}.",
        "{reply}, {reply}.",
        "I will {do} it {how}.",
    ),
    "long": (
        "{when}, when {name} {did} the {quality} {thing}, the {person} was {mood}, and {name} {how} {did} the {thing} "
        "{where} the {quality} {thing}.",
        "the {quality} {person} from {place} {did} a {thing}, a {thing} and a {quality} {thing} {why}.",
        "{name} and {name} travelled from {place} to {place} to {do} the {thing}, {why}.",
    ),
    "name": (
        "{name} and {name} live in {place}.",
        "my {person} {name} is {mood} {when}.",
        "{name}, please {do} the {thing} {where} the {thing}.",
    ),
}
