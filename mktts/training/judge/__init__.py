"""The voice measured beside its teacher."""
