"""One model behind HTTP and WebSocket: `python -m mktts serve`."""
