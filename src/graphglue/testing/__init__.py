"""What authors of preps and engines test with. Public; needs hypothesis and pytest (``pip install graphglue[test]``).

``conformance`` makes a test of one's own backend::

    from graphglue.testing import conformance

    test = conformance(make_backend)  # make_backend() -> graphglue.Runner, or a dict of its arguments

``graphglue.testing.strategies`` generates slots, ladders, batches, contracts and groups of ranks.
"""

from graphglue.testing.suite import PARTS, conformance

__all__ = ["PARTS", "conformance"]
