"""What GeoMX has: differential transmission, mixed sync, and its variables."""
