"""Triton kernels of a batched frame. Imported on CUDA machines only: Triton comes with torch's CUDA builds."""
