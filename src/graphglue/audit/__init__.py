"""Proof: what preps declare is checked, not trusted.

``audit(runner)`` runs every check over twins of the runner's slots and tables, and gives a ``Certificate``.
"""

from graphglue.audit.certificate import Audited, Certificate, Check, Finding, Verdict
from graphglue.audit.run import audit, run_checks
from graphglue.audit.subject import Subject
from graphglue.config import Shadow

__all__ = ["Audited", "Certificate", "Check", "Finding", "Shadow", "Subject", "Verdict", "audit", "run_checks"]
