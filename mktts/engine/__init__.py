"""From a text to chunks of speech: streams, the worker thread, its scheduler and admission, and lanes of width 1."""
