"""Loaded transformers models with mixers of this library in place of attention, and their training for it."""
