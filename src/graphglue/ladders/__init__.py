"""Ladders for a histogram of batch sizes, held beside the usual ones: what ``graphglue ladder`` runs."""
