"""What a stream tells of itself."""

from __future__ import annotations

from deepnvme.streaming import StreamReport


def test_a_report_has_rates_over_all_the_time_in_the_model() -> None:
    report = StreamReport(passes=2, seconds=4.0, bytes_read=8 * 10**9, stalled=2.1, resident_bytes=10**9, peak_bytes=3 * 10**9)
    assert report.bytes_per_second == 2e9
    assert str(report) == (
        "2 passes in 4.000 s, 2.100 s of them waiting for weights; read 8.000 GB at 2.00 GB/s; 1.000 GB stay in memory,"
        " and at most 3.000 GB were there"
    )
    nothing = StreamReport(0, 0.0, 0, 0.0, 0, 0)
    assert nothing.bytes_per_second == 0
    assert str(nothing).startswith("0 passes in 0.000 s")
