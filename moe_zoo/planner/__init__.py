"""What a layout costs, by arithmetic alone: no torch, no processes."""
