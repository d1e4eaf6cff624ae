"""Work by the thousand: a table of sentences into a folder of audio files, and a manifest of what became of each."""
