"""Tests of the recorders, and the contract that both of them keep."""

import pytest

# The contract is imported by two test modules, and is not one itself: its asserts must still explain.
pytest.register_assert_rewrite("tests.unit.graphs.recorder_contract")
