"""torch.distributed, and nothing about models."""
