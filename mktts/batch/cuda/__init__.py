"""Many utterances in one CUDA graph: `lanes` runs ticks, `frame` is one, `codec` its sound, `kernels` what they launch.

What imports the modules in `kernels`, which need triton, is loaded for a CUDA device only."""
