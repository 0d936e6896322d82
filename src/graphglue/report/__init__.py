"""The report: what the stats of one runner, or of the runners of several ranks, say to a person."""

from graphglue.report.reading import read_stats
from graphglue.report.summary import Summary, summarize

__all__ = ["Summary", "read_stats", "summarize"]
