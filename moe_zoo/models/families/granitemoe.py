"""Granite 3 MoE. Source: transformers.models.granitemoe."""

from moe_zoo.models.families import granite
from moe_zoo.models.families.base import Family

FAMILY = Family("granitemoe", granite.read, granite.write, granite.rules())
