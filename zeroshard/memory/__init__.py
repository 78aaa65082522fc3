"""What memory training takes: planned, simulated and measured, in one schema."""
