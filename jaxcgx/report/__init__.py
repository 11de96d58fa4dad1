"""Looking at what a program does, and at what an installation has."""
