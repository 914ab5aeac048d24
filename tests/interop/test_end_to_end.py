"""Folders from end to end by the commands: trained by transformers, imported, generated with, evaluated, exported, and
generated with by transformers again."""

import json
from pathlib import Path

import pytest
import torch

import kinformer
from kinformer.core.state import nbytes
from kinformer.lab.cli.main import main
from tests.interop.peers import byte_tokenizer, new_model, tokens

TEXT = Path(__file__).read_text()[:2000]
KINDS = {"mistral": 0, "qwen3_next with experts": 1}
"""Of each kind how many layers remember all tokens: none of a LLaMA-like with a window, one of a hybrid."""
NEW = 24


def trained(kind, tokenizer):
    """A model of transformers that has learnt a little of this file."""
    model = new_model(kind, vocab_size=256).train()
    ids = torch.tensor(tokenizer.encode(TEXT).ids)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        starts = torch.randint(len(ids) - 33, (4,), generator=torch.Generator().manual_seed(step))
        batch = torch.stack([ids[start : start + 33] for start in starts.tolist()])
        optimiser.zero_grad()
        losses.append(model(batch, labels=batch).loss)
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]
    return model.eval()


@torch.no_grad()
def grown(model):
    """How many bytes the state grows by between 20 and 28 tokens."""
    return nbytes(model(tokens(28, 1))[1]) - nbytes(model(tokens(20, 1))[1])


@pytest.mark.parametrize(("kind", "growing"), KINDS.items())
def test_a_folder_from_end_to_end(kind, growing, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "theirs").mkdir()
    theirs = trained(kind, byte_tokenizer(tmp_path / "theirs"))
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "text.txt").write_text(TEXT)
    run, out, text = str(tmp_path / "run"), tmp_path / "out", str(tmp_path / "text.txt")

    assert main(["import", str(tmp_path / "theirs"), "--out", run]) == 0
    ours = kinformer.load(run)
    one_layer = 8 * 2 * 4 * 2 * (16 if "qwen3_next" in kind else 8)  # 8 tokens, keys and values of 2 heads in float32
    assert grown(ours) == growing * one_layer
    capsys.readouterr()
    assert main(["generate", run, "--prompt", "import ", "--max-new-tokens", str(NEW), "--temperature", "0"]) == 0
    generated = capsys.readouterr().out
    assert main(["evaluate", run, "--data", text, "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert main(["export", run, "--out", str(out)]) == 0

    tokenizer = AutoTokenizer.from_pretrained(out)
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(again) is type(theirs)
    prompt = tokenizer("import ", return_tensors="pt")
    texts = [
        model.generate(**prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None) for model in (theirs, again)
    ]
    assert torch.equal(*texts)
    assert tokenizer.decode(texts[0][0, prompt["input_ids"].shape[1] :]) in generated
    assert evaluated["bits_per_byte"] < 6
    kinformer.import_checkpoint(out, tmp_path / "again")
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "again"), "--data", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == evaluated["bits_per_byte"]
