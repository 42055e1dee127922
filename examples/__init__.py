"""Configs whose models and data are not this package's, with what they need beside libraries."""
