"""Formats results as text, JSON, charts, an HTML report and DeepSpeed's logs."""
