"""The text front end: what is written becomes what is spoken. Languages other than English pass as they are."""

from mktts.text.front_end import FrontEnd, spoken

__all__ = ["FrontEnd", "spoken"]
