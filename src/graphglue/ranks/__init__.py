"""Ranks: data-parallel groups whose every decision that changes a collective is agreed."""

from graphglue.ranks.facts import RankFacts
from graphglue.ranks.group import RankGroup
from graphglue.ranks.padding import CostRule
from graphglue.ranks.plan import Meeting, Padding, RankPlan, Role
from graphglue.ranks.planner import Planner
from graphglue.ranks.transport import Transport

__all__ = ["CostRule", "Meeting", "Padding", "Planner", "RankFacts", "RankGroup", "RankPlan", "Role", "Transport"]
