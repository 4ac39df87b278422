"""Batched simulation: backends, physical parameters, sensors, environments and tasks. No backend is imported before it is chosen."""
