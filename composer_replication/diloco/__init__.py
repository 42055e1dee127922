"""The algorithm. Knows torch and torchft; knows no Composer, no YAML, no HTTP."""
