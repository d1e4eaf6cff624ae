"""The text front end: converts written text to spoken words. Languages other than English are passed through."""

from mktts.text.front_end import FrontEnd, spoken

__all__ = ["FrontEnd", "spoken"]
