"""How a message travels: its schedules, hierarchies, low rank, costs, and the primitives that JAX sees."""
