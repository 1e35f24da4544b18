"""How one model spans ranks, and how its optimizer's state is spread over replicas."""
