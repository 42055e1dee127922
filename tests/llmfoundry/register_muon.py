"""Makes the quickstart's Muon known to llm-foundry, which imports the files of its `code_paths`."""

from llmfoundry.registry import optimizers

from examples.quickstart.muon import Muon

optimizers.register("muon", func=Muon)
