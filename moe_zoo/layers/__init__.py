"""nn.Modules. They take sizes, never configs, and know nothing of ranks."""
