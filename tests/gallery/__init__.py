"""The gallery: small faulty preps beside their correct twins, mutants of shipped preps, and generated correct ones.

``GALLERY`` is a list of values; the tests audit each, and ``python tests/gallery/figures.py`` counts.
"""

from . import hidden, host_reads, host_state, padding, shapes, undeclared, unsteady, unwritten, uploads
from .specimens import CHECKS, GALLERY, LADDER, Made, Pair, Specimen, Stage, specimens

__all__ = [
    "CHECKS",
    "GALLERY",
    "LADDER",
    "Made",
    "Pair",
    "Specimen",
    "Stage",
    "hidden",
    "host_reads",
    "host_state",
    "padding",
    "shapes",
    "specimens",
    "undeclared",
    "unsteady",
    "unwritten",
    "uploads",
]
