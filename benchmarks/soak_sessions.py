"""What the soak does to sessions: prompts, recorded steps, more text, forks, text that is taken back; the logits stay
the model's own."""

from __future__ import annotations

import random
from typing import Any

import torch

from combinations import VOCAB
from kinformer.generation.session import Session
from kinformer.testing.subject import VALUES, agree

LONGEST, ROWS, OPERATIONS = 40, 4, 10
RECORD_AT = (1, 2, 4, 100)
"""Steps before one is recorded."""


class Sessions:
    """One session after the other, each a fork of the one before or itself, with the text of every row."""

    def __init__(self, random_: random.Random, model: Any, done: list[str]) -> None:
        self.random, self.model, self.done = random_, model, done
        self.longest = min(LONGEST, model.max_length or LONGEST)
        rows = random_.randint(1, 2)
        room, chunk = random_.choice((1, 4, 30)), random_.choice((1, 3, 1024))
        rewind = random_.choice((0, 3, 9))
        self.session = Session(model, rows, temperature=0, room=room, chunk=chunk, rewind=rewind)
        self.session._stepping.record_at = random_.choice(RECORD_AT)
        self.texts: list[list[int]] = [[] for _ in range(rows)]
        self.feed(1)

    def run(self) -> None:
        for _ in range(OPERATIONS):
            name = self.random.choices(("step", "feed", "fork", "rewind"), (6, 2, 1, 2))[0]
            if self.longest - max(map(len, self.texts)) < 8:
                return
            getattr(self, name)()

    def feed(self, least: int = 0) -> None:
        """A text of up to six tokens for each row, of ``least`` or more."""
        lengths = [self.random.randint(least, 6) for _ in self.texts]
        time = max(1, *lengths)
        tokens = torch.tensor([[self.random.randrange(VOCAB) for _ in range(time)] for _ in self.texts])
        valid = torch.arange(time) < torch.tensor(lengths)[:, None]
        self.done.append(f"feed {lengths}")
        self.session.feed(tokens, valid)
        for row, text in enumerate(self.texts):
            text += tokens[row, : lengths[row]].tolist()
        self.compare()

    def step(self) -> None:
        """One to five steps, whose tokens are absorbed one step later."""
        steps = self.random.randint(1, 5)
        self.done.append(f"step {steps}")
        for _ in range(steps):
            drawn = self.session.step().tolist()
            self.compare()
            for text, token in zip(self.texts, drawn, strict=True):
                text.append(token)

    def fork(self) -> None:
        """Go on with a fork, or with what was forked while the fork takes a step."""
        copies = self.random.choice((1, 2))
        if copies * len(self.texts) > ROWS:
            return
        self.done.append(f"fork {copies}")
        forked = self.session.fork(copies)
        forked._stepping.record_at = self.random.choice(RECORD_AT)
        if self.random.random() < 0.5:
            forked.step()
        else:
            self.session.step()
            self.session = forked
            self.texts = [list(text) for text in self.texts for _ in range(copies)]

    def rewind(self) -> None:
        """Take some tokens of each row back, never its last; what stays is absorbed by the next step or text."""
        limit = self.session.rewindable
        counts = [self.random.randint(0, min(limit, len(text) - 1)) for text in self.texts]
        self.done.append(f"rewind {counts}")
        self.session.rewind(counts)
        self.texts = [text[: len(text) - count] for text, count in zip(self.texts, counts, strict=True)]

    def compare(self) -> None:
        """The logits are those behind the whole text of each row."""
        for row, text in enumerate(self.texts):
            with torch.no_grad():
                want = self.model(torch.tensor([text]))[0][0, -1]
            agree(f"logits of row {row} after {len(text)} tokens", self.session._logits[row], want, VALUES)
