"""Batched simulation: backends, parameters, sensors, environments and tasks. Backends are imported when chosen."""
