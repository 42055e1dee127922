"""A config of a test with a text to train on, in files."""

from pathlib import Path


def write_config(folder: Path, config: str) -> Path:
    """Write a config into a folder, with the path of a small text in the place of TEXT."""
    text = folder / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text("to be or not to be, that is the question\n" * 20)
    path = folder / "config.yaml"
    path.write_text(config.replace("TEXT", str(text)))
    return path
