"""Sentences to learn from and, apart from them, sentences to be judged by.

Both come from the same small grammar; a sentence belongs to the held-out side by the hash of its words, so the two
cannot meet whatever the seed. `{name}` in a template draws from the list of that name:
lists hold words as they are written inside a sentence.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator

from mktts.training.words import LISTS, TEMPLATES

HELD_OUT = 640
_HELD_OUT_SEED = 20_260
_HELD_OUT_SHARE = 64  # one in so many
_REPLY_SHARE = 0.02  # of training: what the offline agent says, so that it is said well
_PAIR_SHARE = 0.12  # two sentences in one breath: longer prosody, and an end that is not at the first full stop
_SLOT = re.compile(r"\{(\w+)\}")


def normal(text: str) -> str:
    """What makes two sentences the same: words in lower case, no punctuation."""
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def is_held_out(text: str) -> bool:
    digest = hashlib.sha256(normal(text).encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_SHARE == 0


def training_sentences(seed: int) -> Iterator[str]:
    """Without end; the same for the same seed. No half of a pair is held out; only the agent's replies repeat."""
    rng, replies = random.Random(seed), agent_replies()
    seen: set[str] = set()
    while True:
        draw = rng.random()
        if draw < _REPLY_SHARE:
            yield rng.choice(replies)
            continue
        if draw < _REPLY_SHARE + _PAIR_SHARE:
            text = f"{_learnt(rng)} {_learnt(rng)}"
        else:
            text = _learnt(rng)
        if not is_held_out(text) and normal(text) not in seen:
            seen.add(normal(text))
            yield text


def held_out() -> list[str]:
    """640 different sentences, every kind in turn."""
    rng, found, kinds = random.Random(_HELD_OUT_SEED), {}, list(TEMPLATES)
    while len(found) < HELD_OUT:
        text = _fill(rng, rng.choice(TEMPLATES[kinds[len(found) % len(kinds)]]))
        if is_held_out(text):
            found.setdefault(normal(text), text)
    return list(found.values())


def agent_replies() -> list[str]:
    """The offline agent's fixed answers, sentence by sentence. Needs the agent's packages, as training does not."""
    from mktts.agent import intents

    turn = intents.Turn((), intents.datetime(2026, 1, 1, 9, 7))
    answers = [intent.answer(turn) for intent in intents.INTENTS]
    return sorted({s for answer in answers for s in re.split(r"(?<=[.!?]) ", answer) if not is_held_out(s)})


def _learnt(rng: random.Random) -> str:
    while True:
        text = _fill(rng, rng.choice(TEMPLATES[rng.choice(list(TEMPLATES))]))
        if not is_held_out(text):
            return text


def _fill(rng: random.Random, template: str) -> str:
    text = _SLOT.sub(lambda match: rng.choice(LISTS[match.group(1)]), template)
    text = re.sub(r"\ba (?=[aeio]|ug|um)", "an ", text)
    return text[0].upper() + text[1:]
