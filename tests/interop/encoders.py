"""Random encoders of transformers, saved to a folder, and the same texts for them and for ours."""

import json

import torch

import kinformer
from kinformer.lab.cli.exchange import Import

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
LENGTHS = (30, 22, 7)
FAMILIES = {"bert": "Bert", "roberta": "Roberta", "longformer": "Longformer", "big_bird": "BigBird"}


class Peer:
    """A random ``model_type`` of transformers without dropout, and the folder that it was saved to.

    Its Longformer pads texts to the widest window only, so that all windows must divide that.
    """

    def __init__(self, folder, model_type, kind="ForMaskedLM", **changes):
        import transformers

        torch.manual_seed(0)
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        own = {"attention_window": [4, 16, 8]} if model_type == "longformer" else {}
        config = getattr(transformers, FAMILIES[model_type] + "Config")(**SIZES | dropout | own | changes)
        self.model = getattr(transformers, FAMILIES[model_type] + kind)(config).eval()
        self.pad, self.folder = config.pad_token_id, folder
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self.model.save_pretrained(folder)

    def __call__(self, dtype=torch.float64, **inputs):
        with torch.no_grad():
            return self.model.to(dtype)(**inputs, output_hidden_states=True)

    def texts(self, lengths=LENGTHS, left=False):
        """tokens, valid and types; the padding token stands where nothing is valid."""
        torch.manual_seed(1)
        slots = torch.arange(max(lengths))
        valid = slots < torch.tensor(lengths)[:, None]
        valid = valid.flip(1) if left else valid
        tokens = torch.randint(4, SIZES["vocab_size"], valid.shape).masked_fill(~valid, self.pad)
        return tokens, valid, torch.randint(2, valid.shape)


def imported(folder, out):
    assert Import(folder=str(folder), out=str(out)).run() == 0
    return kinformer.load(out)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_close(got, want, limit):
    assert got.shape == want.shape
    assert (got - want).abs().max() < limit * want.abs().max().clamp(min=1)
