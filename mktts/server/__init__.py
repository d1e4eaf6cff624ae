"""Serves one model over HTTP and WebSocket: `python -m mktts serve`."""
