"""The parity certificate: a recipe's tiny twin, one process against every factor of a layout."""

from moe_zoo.certify.certificate import Certificate, Result
from moe_zoo.certify.crew import Crew
from moe_zoo.certify.run import certify

__all__ = ["Certificate", "Crew", "Result", "certify"]
