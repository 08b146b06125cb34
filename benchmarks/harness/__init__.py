"""What the benchmarks share: contenders, the drive between measurements, figures and their verdicts."""
