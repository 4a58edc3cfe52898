"""Synthesis of tasks in Tmax's manner: draws, the format of an author's replies, task directories. No model, no sandbox here."""
