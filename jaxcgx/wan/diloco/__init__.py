"""Rounds: centers train on their own, and move common parameters once in many steps."""
