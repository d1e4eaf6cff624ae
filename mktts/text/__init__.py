"""The text front end: what is written becomes what is spoken. English is what there is; other languages pass."""

from mktts.text.front_end import FrontEnd, spoken

__all__ = ["FrontEnd", "spoken"]
