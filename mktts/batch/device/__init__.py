"""What a tick of the CUDA lanes reads, works in and writes: its block of numbers, its memory, its way to the host."""
