"""How good the voice is, beside its teacher."""
