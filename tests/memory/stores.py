"""Small datastores of random entries."""

import numpy as np
import torch

from kinformer.lab.datastore.store import Datastore, KeySpace, Writer

DIM, VOCAB = 8, 300_000
ORIGIN = KeySpace(weights="w", representation="r", dim=DIM, vocab_size=VOCAB, tokenizer="bytes")


def entries(count, seed=0):
    """Keys [count, DIM] in a few clusters, and tokens [count] of the whole vocabulary."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(12, DIM)) * 3
    keys = centres[random.integers(12, size=count)] + random.normal(size=(count, DIM))
    return torch.from_numpy(keys).float(), random.integers(VOCAB, size=count)


def write(folder, count=1000, *, source=None, seed=0, flushed=130, dtype="float16", kill=None):
    """Write ``count`` entries in pieces of 50, from where the store has come to; stop at ``kill``, unflushed."""
    keys, tokens = entries(count, seed)
    with Writer(folder, ORIGIN, dtype=dtype) as writer:
        done = writer.begin(source or {"seed": seed}, count)
        while done < count:
            if kill is not None and done >= kill:
                return None
            piece = slice(done, min(done + 50, count))
            writer.append(keys[piece], tokens[piece])
            done = piece.stop
            if writer.pending >= flushed or done == count:
                writer.flush()
    return Datastore(folder, ORIGIN)
