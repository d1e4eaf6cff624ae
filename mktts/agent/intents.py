"""The intents of the offline bot: a table of phrases and answers, which also defines the grammar of its speech to text.
Phrases are written as in a JSGF grammar: `[word]` is optional, `(one | other)` is a choice."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from num2words import num2words

STORY = (
    "Once upon a time there was a very small computer. It lived under a desk and it dreamed of singing in the opera. "
    "Every night, when the office was dark, it practised its scales. One evening a famous conductor came back for her "
    "umbrella, and she heard it. The next winter it sang before a full house, and everybody cheered."
)
_HELLO = "Hello! Ask me for the time, for a joke, or for a story."
_ME = "I am a small voice agent. I hear, I answer, and I stop when you speak."
_FAST = "I begin to speak with the first frame of audio. After that, one frame is eighty milliseconds of sound."
_JOKE = "Why did the robot cross the road? Because it was programmed by a chicken."
_WEATHER = "I have no window and no network, so I cannot tell. Let us hope for sun."
_STOPPED = "All right, I have stopped. Say go on when you want the rest."
_NO_MORE = "There is nothing left to tell. Ask me for a story first."
_NOTHING_SAID = "I have not said anything yet."
_SORRY = "I am sorry, I did not understand that. Try: what time is it."


@dataclass(frozen=True)
class Intent:
    """One thing that the user may say. phrases: for the grammar. pattern: a regular expression that finds the intent in
    a lower-case transcript. answer: makes the reply from the assistant's messages so far and the local time."""

    phrases: tuple[str, ...]
    pattern: str
    answer: Callable[[Sequence[str], datetime], str]


def spoken_time(now: datetime) -> str:
    """The time in words: "It is seven minutes past nine."."""
    hour, minute = num2words((now.hour - 1) % 12 + 1), now.minute
    if minute == 0:
        return f"It is {hour} o'clock."
    return f"It is {num2words(minute)} minute{'s' * (minute > 1)} past {hour}."


def rest_of_story(said: Sequence[str]) -> str:
    """The part of the story that the listener has not heard, from the start of the interrupted sentence."""
    heard = ""
    for message in said:  # the story may have been continued more than once
        place = STORY.find(message.strip()) if len(message.split()) > 1 else -1
        if place >= 0:
            heard = STORY[: place + len(message.strip())]
    if not heard or heard == STORY:
        return _NO_MORE
    begin = max((match.end() for match in re.finditer(r"[.!?] ", STORY) if match.end() <= len(heard) + 1), default=0)
    return STORY[begin:]


INTENTS = (
    Intent(("hello [there]", "good morning"), r"\b(hello|hi|good morning)\b", lambda said, now: _HELLO),
    Intent(("what time is it",), r"\btime is it\b|\bthe time\b", lambda said, now: spoken_time(now)),
    Intent(("tell me a [long] story",), r"\bstory\b", lambda said, now: STORY),
    Intent(("stop [please]", "please stop"), r"\bstop\b|\bwait\b", lambda said, now: _STOPPED),
    Intent(("go on [please]",), r"\bgo on\b|\bcontinue\b", lambda said, now: rest_of_story(said)),
    Intent(("tell me (a | another) joke",), r"\bjoke\b", lambda said, now: _JOKE),
    Intent(("what is the weather in (paris | london | tokyo | berlin)",), r"\bweather\b", lambda said, now: _WEATHER),
    Intent(("how fast are you",), r"\bhow fast\b", lambda said, now: _FAST),
    Intent(("who are you",), r"\bwho are you\b", lambda said, now: _ME),
    Intent(("say that again",), r"\bagain\b", lambda said, now: said[-1] if said else _NOTHING_SAID),
    Intent(("thank you [very much]",), r"\bthank", lambda said, now: "You are welcome."),
    Intent(("goodbye",), r"\b(good)?bye\b", lambda said, now: "Goodbye. It was nice talking to you."),
)


def answer(text: str, said: Sequence[str], now: datetime) -> str:
    """The reply to a transcript; an apology with a suggestion if no intent matches.

    said: the assistant's messages in the conversation's context, oldest first; an interrupted message contains only
        what was heard.
    now: the local time."""
    lowered = text.lower()
    return next((intent.answer(said, now) for intent in INTENTS if re.search(intent.pattern, lowered)), _SORRY)


def grammar() -> str:
    """The JSGF grammar of all phrases."""
    phrases = "\n  | ".join(phrase for intent in INTENTS for phrase in intent.phrases)
    return f"#JSGF V1.0;\ngrammar mktts;\npublic <said> =\n  {phrases};\n"


def hints() -> list[str]:
    """One example phrase of each intent, to show to users."""
    choices = [re.sub(r"\(([^|)]*)\|[^)]*\)", r"\1", intent.phrases[0]) for intent in INTENTS]
    return [" ".join(re.sub(r"\[[^]]*\]", "", choice).split()) for choice in choices]
