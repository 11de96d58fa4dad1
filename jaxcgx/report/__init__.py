"""Reports about programs, installations, networks and measurements."""
