"""The quickstart's model, text and inner optimizer: code to copy, and to change."""
