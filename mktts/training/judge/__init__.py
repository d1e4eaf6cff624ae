"""Evaluation of the voice in comparison with its teacher."""
