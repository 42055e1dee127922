"""The coordinator: a run's settings, who takes part, and which samples each group trains on."""
