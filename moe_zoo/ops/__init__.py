"""Pure tensor functions: no modules, no ranks."""
