"""The main job: the only place where text (``chat``) and tensors (``engine``) meet."""
