"""Runs under EleutherAI's lm-evaluation-harness: ``lm`` is its model ``kinformer``, ``evaluate`` runs its tasks."""
