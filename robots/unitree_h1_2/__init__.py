"""Unitree H1-2, 27 joints, without hands."""
