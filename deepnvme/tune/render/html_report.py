"""Formats the results of ds_nvme_tune as one self-contained HTML document: no network, no script, no other files."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping

from deepnvme.tune.measure.folder import FolderFacts, Unsuitable
from deepnvme.tune.measure.job import OPERATIONS
from deepnvme.tune.search.results import TABLE, Result, Search, Striping, Tuning
from deepnvme.tune.sizes import size_text
from deepnvme.version import __version__

from . import charts, picture
from .charts import three_digits
from .picture import Chart


def require_matplotlib() -> None:
    """Raise Unsuitable if matplotlib cannot be imported. Called before measuring, so that this does not fail afterwards."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise Unsuitable(f"a report needs matplotlib, which cannot be imported ({why}): pip install 'deepnvme[plot]'") from error


def render_html(tuning: Tuning) -> str:
    """Return the whole HTML document. Needs matplotlib.

    It can be encoded as UTF-8 whatever the names of the folders are. The same ``tuning`` gives the same text.
    """
    with picture.style():
        body = "\n".join(_body(tuning))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>DeepNVMe: the best aio setting</title>
<style>{_CSS}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _body(tuning: Tuning) -> Iterator[str]:
    """Yield the elements of the document's body."""
    yield _head(tuning)
    for nth, search in enumerate(tuning.searches):
        yield _search_section(search, nth)
    if tuning.striping is not None:
        yield _striping_section(tuning.striping)
    yield _foot(tuning)


def _head(tuning: Tuning) -> str:
    """Return the header: the recommended setting, and the block for DeepSpeed's configuration."""
    best = tuning.chosen.best
    setting = best.setting
    tiles = [
        _tile(three_digits(figures.gb_per_second), f"GB/s {operation}", operation)
        for operation in charts.operations([best])
        if (figures := best.figures(operation))
    ]
    tiles += [
        _tile(size_text(setting.block_size), "block size"),
        _tile(str(setting.queue_depth), "queue depth"),
        _tile(str(setting.intra_op_parallelism), "worker" if setting.intra_op_parallelism == 1 else "workers"),
        _tile(best.backend, "backend"),
    ]
    folders = dict.fromkeys(folder for search in tuning.searches for folder in search.folders)
    return f"""<header>
<h1>The best <code>aio</code> setting</h1>
{_interruption(tuning)}
<div class="tiles">{"".join(tiles)}</div>
<p>{_sentence(tuning.chosen.reason)}</p>
<ul class="folders">{"".join(f"<li>{_folder(folder)}</li>" for folder in folders)}</ul>
<h2>For your DeepSpeed configuration</h2>
<pre>{_text(json.dumps(setting.to_deepspeed(), indent=2))}</pre>
{_contents(tuning)}
</header>"""


def _tile(value: str, name: str, kind: str = "") -> str:
    """Return a box with one value and its name."""
    return f'<div class="tile {kind}"><b>{_text(value)}</b> <span>{_text(name)}</span></div>'


def _folder(folder: FolderFacts) -> str:
    return f"<code>{_text(folder.path)}</code> {_place(folder)}"


def _place(folder: FolderFacts) -> str:
    """Return the filesystem and device of a folder."""
    kind = "badge" if folder.direct else "badge warning"
    return f'<span class="{kind}">{_text(folder.label)}</span> <span class="muted">{_text(folder.device)}</span>'


def _interruption(tuning: Tuning) -> str:
    """Return a notice if the run was interrupted, else an empty text."""
    if tuning.complete:
        return ""
    if tuning.chosen.complete:
        what = "What was to follow was not measured."
    else:
        what = (
            "The search was stopped before its end, and a better setting may have been left untried: "
            f"{_text(_title(tuning.chosen))}."
        )
    return f'<p class="notice" role="note"><b>Interrupted.</b> {what}</p>'


def _contents(tuning: Tuning) -> str:
    """Return links to the sections; an empty text if there is only one."""
    entries = [(f"search-{nth}", _title(search)) for nth, search in enumerate(tuning.searches)]
    if tuning.striping is not None:
        entries.append(("striping", "Striping"))
    if len(entries) == 1:
        return ""
    return "<nav>" + "".join(f'<a href="#{anchor}">{_text(title)}</a>' for anchor, title in entries) + "</nav>"


def _title(search: Search) -> str:
    return search.folders[0].path if len(search.folders) == 1 else f"{len(search.folders)} folders together"


def _search_section(search: Search, nth: int) -> str:
    count = len(search.results)
    tried = f"{count} settings" if count > 1 else "One setting, so that there is nothing to compare"
    described = _place if len(search.folders) == 1 else _folder  # the path of a single folder is the title already
    incomplete = "" if search.complete else ' <span class="badge warning">interrupted</span>'
    return f"""<section id="search-{nth}">
<h2>{_text(_title(search))}{incomplete}</h2>
<ul class="folders">{"".join(f"<li>{described(folder)}</li>" for folder in search.folders)}</ul>
<p><b>{_text(_words(search.best))}.</b> {_sentence(search.reason)}</p>
<p class="muted">{tried}; {_plural(search.rounds, "round")}; {_duration(search.seconds)}.</p>
<div class="charts">{_figures(charts.search_charts(search), f"s{nth}")}</div>
{_table(search)}
</section>"""


def _words(result: Result) -> str:
    """Return a setting in words."""
    setting = result.setting
    workers = _plural(setting.intra_op_parallelism, "worker")
    return f"{size_text(setting.block_size)} blocks, queue depth {setting.queue_depth}, {workers}, {_submission(result)}"


def _submission(result: Result) -> str:
    """Return the backend of a result, and whether blocks are submitted one by one."""
    return f"{result.backend}, single submit" if result.setting.single_submit else result.backend


def _figures(shown: list[Chart], prefix: str) -> str:
    """Return charts as HTML figures; ``prefix`` makes their ids unique."""
    return "".join(
        f"<figure><figcaption><h3>{_text(chart.title)}</h3><p>{_text(chart.note)}</p></figcaption>"
        f"{picture.svg(chart, f'{prefix}-{nth}-')}</figure>"
        for nth, chart in enumerate(shown)
    )


def _table(search: Search) -> str:
    """Return the table of the best results."""
    both = charts.operations(search.results)
    groups = "".join(f'<th colspan="4" scope="colgroup" class="{operation}">{operation}</th>' for operation in both)
    columns = "<th>GB/s</th><th>p50 ms</th><th>p99 ms</th><th>CPU s/GB</th>" * len(both)
    rows = []
    for result in search.table:
        setting = result.setting
        values = [
            size_text(setting.block_size),
            str(setting.queue_depth),
            str(setting.intra_op_parallelism),
            _submission(result),
        ]
        for operation in both:
            figures = result.figures(operation)
            values += ["-"] * 4 if figures is None else [
                three_digits(figures.gb_per_second),
                three_digits(figures.latency_p50 * 1e3),
                three_digits(figures.latency_p99 * 1e3),
                three_digits(figures.cpu_seconds_per_gb),
            ]  # fmt: skip
        values += [size_text(setting.in_flight_bytes), str(result.rounds)]
        recommended = ' class="recommended"' if result == search.best else ""
        rows.append(f"<tr{recommended}>{''.join(f'<td>{_text(value)}</td>' for value in values)}</tr>")
    title = "The ten best" if len(search.results) > TABLE else "All settings" if len(search.results) > 1 else "The setting"
    return f"""<h3>{title}</h3>
<div class="wide" tabindex="0" role="region" aria-label="{title}"><table>
<thead><tr><th colspan="4"></th>{groups}<th colspan="2"></th></tr>
<tr><th>block size</th><th>depth</th><th>workers</th><th>backend</th>{columns}<th>in flight</th><th>rounds</th></tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>
<p class="muted">Best first; the recommended setting is highlighted. p50 and p99: latency of a block, from its submission to its
completion. In flight: bytes under transfer at a time. Rounds: the more a setting stayed in, the longer it was measured.</p>"""


def _striping_section(striping: Striping) -> str:
    found = [charts.striping_chart(striping, operation) for operation in OPERATIONS]
    shared = (
        '<p class="notice" role="note">Some of the folders lie on one device, so that they share its speed.</p>'
        if striping.shared_device
        else ""
    )
    return f"""<section id="striping">
<h2>Striping</h2>
<p>Each folder alone with its own best setting, and all at once with the bytes dealt in proportion to their speeds.</p>
{shared}
<div class="charts">{_figures([chart for chart in found if chart], "striping")}</div>
</section>"""


def _foot(tuning: Tuning) -> str:
    """Return the footer: how it was measured."""
    fewest, most = (limit(search.rounds for search in tuning.searches) for limit in (min, max))
    rounds = _plural(most, "round") if fewest == most else f"{fewest} to {most} rounds"
    both = charts.operations([result for search in tuning.searches for result in search.results])
    reads = "Reads were cold: the file's pages had been dropped from the page cache." if "read" in both else ""
    writes = "Writes overwrote a file that existed, so that no space was allocated meanwhile." if "write" in both else ""
    return f"""<footer>
<h2>How it was measured</h2>
<p>Transfers of at most {size_text(tuning.io_size)} per folder; early rounds move less. {writes} {reads}
Successive halving in {rounds}: every setting gets a short measurement, the better ones a longer one, until few are left; figures
of earlier rounds are put in relation to those of the last. Speeds are in 10⁹ bytes per second, sizes in powers of 1024.</p>
<p>{_duration(tuning.seconds)} in all; {three_digits(tuning.bytes_written / 1e9)} GB written;
{"complete" if tuning.complete else "<b>interrupted before the end</b>"}. DeepNVMe {_text(__version__)}.</p>
{_refusals(tuning.refused)}
</footer>"""


def _refusals(refused: Mapping[str, str]) -> str:
    """Return the list of settings that could not be used, grouped by reason."""
    if not refused:
        return ""
    settings_of: dict[str, list[str]] = {}  # by reason: a backend that does not work refuses all its settings for one
    for setting, reason in refused.items():
        settings_of.setdefault(reason, []).append(setting)
    entries = [f"<li>{_text(reason)}: {_text(', '.join(settings))}</li>" for reason, settings in settings_of.items()]
    return (
        f"<details><summary>{_plural(len(refused), 'setting')} could not be used</summary><ul>{''.join(entries)}</ul></details>"
    )


def _sentence(text: str) -> str:
    """Return a text with a capital letter at its beginning and a full stop at its end."""
    return _text(text[:1].upper() + text[1:].rstrip(".") + ".")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _duration(seconds: float) -> str:
    """Return seconds as text, from a minute on with minutes."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{three_digits(seconds)} s"


def _text(text: str) -> str:
    """Escape a text for an element or a quoted attribute. Bytes of a file name that are not UTF-8 are shown as escapes."""
    return html.escape(text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


_CSS = """
:root { --ink: #16191d; --muted: #565e69; --rule: #d5d9df; --paper: #ffffff; --shade: #f4f6f8; --accent: #e7effd;
  --warn-ink: #7a3c00; --warn: #ffedd0; --read: #2f6fed; --write: #c8501e; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e8eaee; --muted: #a3abb7; --rule: #363c45; --paper: #14171b; --shade: #1d2127; --accent: #1c2c4a;
    --warn-ink: #ffcf8f; --warn: #43300f; --read: #6c9cff; --write: #f08a5d; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 1.5rem 1rem 3rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .6rem; line-height: 1.25; }
header h2, footer h2 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .4rem 0; }
section, footer { border-top: 1px solid var(--rule); margin-top: 2.5rem; }
section h2, footer h2 { margin-top: 1.5rem; }
code, pre { font: .92em/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--shade); border: 1px solid var(--rule); border-radius: 8px; padding: .8rem 1rem; margin: 0;
  overflow-x: auto; user-select: all; -webkit-user-select: all; }
.muted, figcaption p, footer { color: var(--muted); font-size: .875rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 0 0 1rem; }
.tile { background: var(--shade); border-radius: 10px; padding: .6rem 1rem; }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: .875rem; }
.tile.read b, th.read { color: var(--read); }
.tile.write b, th.write { color: var(--write); }
.folders { list-style: none; padding: 0; margin: .6rem 0; }
.badge { display: inline-block; background: var(--shade); color: var(--muted); border-radius: 99px; padding: .1rem .6rem;
  font-size: .8rem; font-weight: normal; }
.warning, .notice { background: var(--warn); color: var(--warn-ink); }
.warning { font-weight: 600; }
.notice { border-radius: 8px; padding: .6rem 1rem; margin: 0 0 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin-top: 1.2rem; }
nav a { color: var(--read); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 1.8rem 2rem;
  margin: 1.2rem 0 1.8rem; }
.charts:empty { display: none; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption p { margin: 0 0 .4rem; line-height: 1.35; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif !important; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; white-space: nowrap; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; color: var(--muted); }
th[colspan] { text-align: center; border: 0; }
.recommended td { background: var(--accent); font-weight: 600; }
@media print { html { font-size: 11px; } body { max-width: none; font-size: 1rem; padding: 0; } nav { display: none; }
  .charts { grid-template-columns: 1fr 1fr; } .wide { overflow: visible; } table { break-inside: avoid; }
  th, td { padding: .15rem .3rem; } h2, h3 { break-after: avoid; } }
"""
