"""Where processes that torchrun starts find each other: torchrun's store, behind a name that one start has alone.

torchrun's store outlives a start, under its rendezvous "static" and "c10d" alike, and what dead processes have left in
it would be found by those that come after them: a process would look for an address that nobody answers at any more.
"""

from __future__ import annotations

import os
import time
from uuid import uuid4

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

_PAUSE = 0.01


def torchruns_store() -> Store | None:
    """Return torchrun's store; None where processes were started otherwise."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def job_id() -> str | None:
    """Return the name of torchrun's job (``--rdzv-id``), which all starts of it have; None where it was given none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def of_this_start(store: Store, rank: int, world: int) -> Store:
    """Return ``store`` behind a name that process ``rank`` has in common with the ``world`` of this start, and with
    nobody before.

    The first process makes the name. The others ask for it by a word that is new, so that no answer is an old one; and
    they say that they have heard it, so that the first knows to whom it has not answered yet.

    Errors: ``TimeoutError`` where a process does not come within PyTorch's time for a collective.
    """
    if rank:
        word = uuid4().hex
        store.set(f"ask/{rank}", word)
        store.wait([f"answer/{word}"], default_pg_timeout)
        name = store.get(f"answer/{word}").decode()
        store.set(f"heard/{name}/{rank}", "")
        return PrefixStore(name, store)
    name, missing = uuid4().hex, set(range(1, world))
    end = time.monotonic() + default_pg_timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"heard/{name}/{other}"]):
                missing.discard(other)
            elif store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", name)
        if time.monotonic() > end:
            raise TimeoutError(f"process {min(missing)} of {world} did not come")
        time.sleep(_PAUSE)
    return PrefixStore(name, store)
