"""A finished model -> this rank's share of it. Delete this package and a single-device program is left."""
