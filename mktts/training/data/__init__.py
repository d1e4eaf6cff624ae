"""Training data of the voice: texts and the teacher's audio."""
