"""The text front end of checkpoints that name one: what is written becomes what is spoken.

`spoken` is all of it for one text. English is what there is; another language passes through as it is written. What
holds for all: text in a script that the voice's languages are not written in, and text without a letter or digit, raise
TextError."""

from mktts.text.front_end import FrontEnd, spoken

__all__ = ["FrontEnd", "spoken"]
