"""Run folders of tiny untrained models, and the command line in this process."""

from dataclasses import replace

import pytest
import torch

import kinformer
from kinformer.family.build import configure
from kinformer.lab.data import open_corpus, train_tokenizer
from kinformer.lab.runs.run import Run, open_run, save_weights
from kinformer.lab.tasks.table import task_of


@pytest.fixture(scope="session")
def make_run(tmp_path_factory, text_file):
    """A function that writes a run folder of a member with untrained weights, as the trainer would."""

    def make(name, data=None, **changes):
        folder = tmp_path_factory.mktemp("runs") / name
        torch.manual_seed(0)
        config = configure(name, "tiny", set=changes)
        model = config.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        corpus = open_corpus(str(text_file))
        Run(
            folder=folder,
            member=name,
            recipe="tiny",
            config=config,
            task=task_of(config),
            options=task_of(config).Options(),
            data=data or {"spec": str(text_file), "holdout": None, "identity": corpus.identity},
            training={"length": 32},
        ).save()
        save_weights(folder, model.state_dict())
        return folder

    return make


@pytest.fixture(scope="session")
def linear_run(make_run):
    return make_run("linear-transformer")


@pytest.fixture(scope="session")
def gpt_run(make_run):
    return make_run("gpt")


@pytest.fixture(scope="session")
def tokenized_run(make_run, text_file):
    """A run whose tokens are those of a tokenizer.json in its folder."""
    pytest.importorskip("tokenizers")
    folder = make_run("linear-transformer", **{"input.vocab_size": 300})
    train_tokenizer(open_corpus(str(text_file)).splits["train"], 300, folder / "tokenizer.json")
    replace(open_run(folder), vocabulary="tokenizer.json").save()
    return folder


@pytest.fixture(scope="session")
def load():
    return kinformer.load
