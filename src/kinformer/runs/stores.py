"""The datastores of runs, reached through the hook of ``datastore``."""

from __future__ import annotations

from kinformer.datastore.hook import Stores
from kinformer.runs.run import open_run

STORES = Stores(open_run)
