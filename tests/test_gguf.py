"""A GGUF file as the model, as a user would give it."""

import pytest
import torch

from ia_mech.models import embedded
from ia_mech.models.load import ModelSpec, load


@pytest.mark.slow
def test_a_gguf_file_loads_as_the_same_weights_as_the_embedded_model(tmp_path):
    gguf = embedded.gguf_file(tmp_path)
    given, ours = load(ModelSpec(name=str(gguf))), load(ModelSpec())
    assert given.weights_hash == ours.weights_hash
    ids = torch.tensor([[1, 4093, 198, 1780, 314]])
    assert torch.equal(given.model(ids).logits, ours.model(ids).logits)
