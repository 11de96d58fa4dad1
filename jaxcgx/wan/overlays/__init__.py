"""Overlays for links of unlike rates: measured while training goes on, and searched."""
