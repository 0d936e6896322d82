"""The flight recorder: the last steps of a runner, as decided and as agreed, to be read after a fault."""

from graphglue.flight.parting import Parting, parting
from graphglue.flight.record import FlightBatch, FlightPlan, FlightRecord, FlightSource, FlightStep

__all__ = ["FlightBatch", "FlightPlan", "FlightRecord", "FlightSource", "FlightStep", "Parting", "parting"]
