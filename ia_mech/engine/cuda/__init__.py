"""Decoding in buffers of fixed addresses, which a GPU can replay as CUDA graphs.

``sizes`` says how large the buffers are and what they take, ``seating`` who sits where in them,
``layer`` is a cache layer made of them, ``recurrent`` one of a recurrent state, ``stepper`` the
step, ``stream`` the loop around it; ``kernels`` and ``fused`` are a step's attention and its
sampling in Triton, ``copies`` asynchronous copies to the host, ``check`` says whether a model
can be decoded so. Everything but the capture of a graph runs on a CPU as well, Triton's part in its
interpreter: so it is tested.
"""
