"""What authors of preps and engines test with. Public; needs hypothesis (``pip install graphglue[test]``).

``graphglue.testing.strategies`` generates slots, ladders, batches and contracts.
"""
