"""Causal models of transformers with random weights, and what must be equal once one is imported."""

import torch

import kinformer
from kinformer.core.state import detach
from kinformer.interop.checkpoint import ARCHITECTURES
from tests.interop.peers import KINDS, VOCABULARY, new_model, tokens

LENGTHS = (17, 9, 4)


class Pair:
    """A model of transformers (a name of ``KINDS``), its folder, and the model imported from that."""

    def __init__(self, kind, folder, **changes):
        self.folder, self.out = folder / "peer", folder / "run"
        self.theirs = new_model(kind, **changes)
        self.theirs.save_pretrained(self.folder)
        self.done = kinformer.import_checkpoint(self.folder, self.out)
        self.ours = kinformer.load(self.out)

    @torch.no_grad()
    def logits(self, ids):
        """Their logits of ``ids`` [batch, time]."""
        return self.theirs(ids).logits

    def read(self, tensors):
        """Tensors of theirs by name under our names, as the import reads them."""
        config = self.theirs.config.to_dict()
        form = ARCHITECTURES[config["model_type"]]
        return form.read_tensors(tensors, form.read_config(config, self.folder), self.folder)


def assert_close(ours, theirs, limit=1e-5):
    """Equal to ``limit`` of the largest value, in float32."""
    difference = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)
    assert difference < limit, f"differ by {difference:.1e} of the largest value"


def check_logits(pair):
    ids = tokens()
    with torch.no_grad():
        assert_close(pair.ours(ids)[0], pair.logits(ids))


def check_gradients(pair):
    """The gradient of one loss with respect to each weight, and all weights have one."""
    ids = tokens()
    for model in (pair.ours, pair.theirs):
        model.zero_grad()
        logits = model(ids)[0] if model is pair.ours else model(ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    theirs = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    nothing = pair.read({name: torch.zeros_like(grad) for name, grad in theirs.items()})
    wanted = {name: grad - nothing[name] for name, grad in pair.read(theirs).items()}
    ours = {name: parameter.grad for name, parameter in pair.ours.named_parameters()}
    assert ours.keys() == wanted.keys() - dict(pair.ours.named_buffers()).keys()
    for name, gradient in ours.items():
        assert_close(gradient, wanted[name])


@torch.no_grad()
def check_streaming(pair):
    """Chunks of any length are the whole."""
    ids, state, parts = tokens(), None, []
    for part in ids.split([1, 7, 2, 1, 9], dim=1):
        logits, state = pair.ours(part, state)
        parts.append(logits)
        state = detach(state)
    assert_close(torch.cat(parts, dim=1), pair.logits(ids))


@torch.no_grad()
def check_padding(pair):
    """Rows of unlike length, padded on either side, are each what theirs is alone."""
    time = max(LENGTHS)
    for left in (False, True):
        valid = torch.arange(time) < torch.tensor(LENGTHS)[:, None]
        valid = valid.flip(1) if left else valid
        ids = tokens(time, len(LENGTHS)).masked_fill(~valid, 0)
        logits = pair.ours(ids, valid=valid)[0]
        for row, mask, result in zip(ids, valid, logits, strict=True):
            assert_close(result[mask], pair.logits(row[mask][None])[0])


def check_generation(pair):
    """Greedy tokens are theirs."""
    prompt = tokens(6)
    theirs = pair.theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    ours = kinformer.generate(pair.ours, prompt, max_new_tokens=8, temperature=0, seed=0)
    assert torch.equal(ours, theirs[:, prompt.shape[1] :])


CHECKS = {
    "logits": check_logits,
    "gradients": check_gradients,
    "streaming": check_streaming,
    "padding": check_padding,
    "generation": check_generation,
}

__all__ = ["CHECKS", "KINDS", "VOCABULARY", "Pair", "tokens"]
