"""Paper tier: what a person writes, and what follows from it by arithmetic. No torch."""
