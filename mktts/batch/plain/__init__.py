"""Many utterances in one step of plain PyTorch operators, on the CPU."""
