"""Decoding in buffers of fixed size and address, as a GPU wants it; steps may be CUDA graphs.

``layers`` has the cache layers and their sizes, ``stepper`` the step and its capture, ``stream``
the loop, which is one step behind the device, ``check`` whether a model can be decoded so, and
``fused`` the sampling rule as one Triton kernel. Everything but the capture runs on a CPU as well,
the kernel in Triton's interpreter, and is tested there.
"""
