"""The flight recorder: the last steps of a runner, as decided and as agreed, to be read after a fault."""

from graphglue.flight.parting import Parting, parting
from graphglue.flight.record import FlightPlan, FlightRecord, FlightStep

__all__ = ["FlightPlan", "FlightRecord", "FlightStep", "Parting", "parting"]
