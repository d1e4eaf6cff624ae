"""Clients that people have, tried against a server of ours over a socket: `python -m mktts clients`.

A tick means: the named version of a client, or the requests that a project's page documents at the named commit, sent
over a socket; the sound decoded by something else than what made it; and as long as what was made.
"""
