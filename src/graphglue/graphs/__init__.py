"""Recorders: what turns a callable into something that can be replayed."""
