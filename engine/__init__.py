"""The real clock: tensors and Triton kernels that carry out what the scheduler plans."""
