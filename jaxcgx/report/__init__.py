"""Looking: what an installation has."""
