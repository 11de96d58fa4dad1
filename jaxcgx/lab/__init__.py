"""A network of hosts on one machine, for measurements."""
