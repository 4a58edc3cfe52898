"""termrsi trains terminal agents by rewriting and refining their own work."""

__version__ = "0.1.0"
