"""The frame kernel's trace: recorded on a card, kept as one document."""
