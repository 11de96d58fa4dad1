"""Looking at what a program does, and at the machine it runs on."""
