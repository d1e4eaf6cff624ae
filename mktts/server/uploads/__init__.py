"""Voices that callers upload: a recording and a statement of consent, kept as a voice for a while."""
