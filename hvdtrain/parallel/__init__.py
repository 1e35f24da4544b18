"""Layouts in which a model spans ranks, and sharding of its optimizer's state over replicas."""
