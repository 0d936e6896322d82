"""The benchmark that a user can run."""
