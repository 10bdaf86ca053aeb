"""The zoo: models assembled from an Architecture."""
