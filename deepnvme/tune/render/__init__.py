"""Results as text, JSON, charts and an HTML report."""
