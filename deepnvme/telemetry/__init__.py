"""Output for people: progress, reports, sizes as text, estimates of drive wear, and ranges in profiler traces."""
