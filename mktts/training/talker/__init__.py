"""Training of talker and code predictor: sequences of text and codes, and the models."""
