"""`python -m mktts serve`: one model behind HTTP and WebSocket. Needs requirements.txt; `import mktts` does not."""
