"""Exchanges of messages: schedules, hierarchies, low-rank sums, costs, and the primitives that JAX sees."""
