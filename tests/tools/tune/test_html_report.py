"""The HTML report: complete in itself, honest about what was not measured, and safe with any folder's name."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from deepnvme.config import AioConfig
from deepnvme.tools.tune.measure.folder import FolderFacts
from deepnvme.tools.tune.measure.job import Operation
from deepnvme.tools.tune.measure.unsuitable import Unsuitable
from deepnvme.tools.tune.render import charts, html_report, sweep_text
from deepnvme.tools.tune.render.html_report import render_html, require_matplotlib
from deepnvme.tools.tune.search.estimates import Difference
from deepnvme.tools.tune.search.results import Figures, Reference, Result, RoundFacts, Search, Striping, Tuning

DRIVE = FolderFacts("/mnt/nvme0", "ext4", "/dev/nvme0n1", True, "ext4, takes direct I/O", 1)
OTHER_DRIVE = FolderFacts("/mnt/nvme1", "xfs", "/dev/nvme1n1", True, "xfs, takes direct I/O", 2)
MEMORY = FolderFacts("/dev/shm", "tmpfs", "tmpfs", False, "tmpfs, in memory, not a drive", 3)
HOSTILE = '/<script>alert("1")</script>&lt;\' onload="x\udcff\n$x_$ 驱'

KIB = 1024


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra [plot]")


needs_matplotlib = pytest.mark.usefixtures("_matplotlib")


def result(block: int, depth: int, workers: int, backend: str, read: float | None, write: float | None) -> Result:
    def figures(speed: float | None) -> Figures | None:
        seconds = block * depth * workers / 1e9
        if speed is None:
            return None
        return Figures(speed, 0.02 + 1e4 / block, seconds / speed, 2 * seconds / speed, (0.99 * speed, 1.02 * speed))

    setting = AioConfig(block_size=block, queue_depth=depth, intra_op_parallelism=workers)
    return Result(setting, backend, figures(read), figures(write), 3)


def longer(slower: float, reach: float) -> Difference:
    return Difference(slower, (slower - reach, slower + reach))


def search(*folders: FolderFacts, read: bool = True, write: bool = True, complete: bool = True) -> Search:
    """128K x 4 to 512K x 16, one and two workers, two backends; each has a speed of its own; 512K x 16 was not measured.

    Six are in the final, the second of which is recommended; ten left before it, and the others before these.
    """
    grid = itertools.product((128 * KIB, 256 * KIB, 512 * KIB), (4, 8, 16), (1, 2), ("io_uring", "libaio"))
    settings = [each for each in grid if each[:2] != (512 * KIB, 16)]
    results = [
        result(*each, read=3 + nth / 100 if read else None, write=2 + nth / 100 if write else None)
        for nth, each in enumerate(settings)
    ]
    results.reverse()
    best = results[1]
    for nth, each in enumerate(results):
        rounds = 3 if nth < 6 else 2 if nth < 16 else 1
        if each is not best:
            results[nth] = replace(each, rounds=rounds, difference=longer((nth - 1) / 100, 0.02 * (4 - rounds)))
    return Search(
        folders,
        best,
        "fast & lean",
        3,
        75.0,
        complete,
        tuple(results),
        (RoundFacts(32, 2, 4 << 20), RoundFacts(16, 8, 16 << 20), RoundFacts(6, 24, 64 << 20)),
        Reference(AioConfig(), 77, 0.081),
    )


def tuning(*searches: Search, striping: Striping | None = None) -> Tuning:
    return Tuning(400 << 20, 80.0, all(each.complete for each in searches), 12 * 10**9, searches, striping)


def two_folders() -> Tuning:
    alone = (("/mnt/nvme0", {"read": 3.2, "write": 2.2}), ("/mnt/nvme1", {"read": 3.1, "write": 2.1}))
    return tuning(
        search(DRIVE),
        search(OTHER_DRIVE),
        search(DRIVE, OTHER_DRIVE),
        striping=Striping(alone, {"read": 6.0, "write": 4.3}, shared_device=False),
    )


_drawn: dict[str, str] = {}


def rendered(tried: Tuning) -> str:
    """Drawn once for all tests that look at it."""
    if repr(tried) not in _drawn:
        _drawn[repr(tried)] = render_html(tried)
    return _drawn[repr(tried)]


def worded(tried: Tuning) -> str:
    """Without its pictures, which take a second, for tests of what is written around them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html_report, "svg", lambda chart, prefix: "")
        return render_html(tried)


class Page(HTMLParser):
    """What a browser would make of the document: its elements, and the text of some."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == [], "elements left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def of_class(self, name: str) -> list[dict[str, str]]:
        return [attributes for _, attributes in self.tags if name in attributes.get("class", "").split()]

    @property
    def text(self) -> str:
        return self.texts["body"][0]

    def titles_of_charts(self) -> list[str]:
        return [text for text in self.texts["h3"] if text != "The finalists"]

    def notes_of_charts(self) -> str:
        return " ".join(self.texts.get("figcaption", []))


# Without matplotlib


@pytest.mark.parametrize("module", ["matplotlib", "matplotlib.figure"])
def test_a_missing_matplotlib_is_told_in_one_line_with_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unsuitable, match=r"pip install 'deepnvme\[plot\]'") as caught:
        require_matplotlib()
    assert "\n" not in str(caught.value)


def test_the_module_can_be_imported_without_loading_matplotlib() -> None:
    code = "import sys, deepnvme.tools.tune.render.html_report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_matplotlib
def test_a_matplotlib_that_is_there_is_accepted() -> None:
    require_matplotlib()


# The document


@pytest.mark.slow
@needs_matplotlib
def test_nothing_outside_the_document_is_referred_to() -> None:
    source = rendered(two_folders())
    page = Page(source)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "poster", "data", "action"):
                assert value.startswith(("#", "data:")), f"{tag} {name}={value}"
    references = re.findall(r"url\(\s*[\"']?([^)]*)", source)
    assert references, "clip paths at least"
    assert all(reference.startswith(("#", "data:")) for reference in references)
    assert "@import" not in source
    addresses = set(re.findall(r"https?://[^\"'\s<]+", source))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "names of XML, which nobody fetches"


@needs_matplotlib
@pytest.mark.slow
def test_every_reference_has_one_target() -> None:
    source = rendered(two_folders())
    page = Page(source)
    names = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(names) == len(set(names))
    targets = {attributes[key][1:] for _, attributes in page.tags for key in ("href", "xlink:href") if key in attributes}
    targets |= set(re.findall(r"url\(#([^)]*)\)", source))
    assert targets <= set(names)


@needs_matplotlib
def test_the_document_stays_below_a_megabyte() -> None:
    assert len(rendered(two_folders()).encode()) < 1_000_000


@pytest.mark.slow
@needs_matplotlib
def test_the_users_own_style_and_matplotlibs_state_are_left_alone_and_the_document_is_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import matplotlib

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # cannot be imported
    with matplotlib.rc_context({"axes.grid": True, "font.size": 31, "text.color": "#abcdef"}):
        before = matplotlib.rcParams.copy()
        source = render_html(tuning(search(DRIVE)))
        assert matplotlib.rcParams.copy() == before
    assert source == rendered(tuning(search(DRIVE)))


@needs_matplotlib
def test_every_picture_says_what_it_shows_and_leaves_its_colours_to_the_page() -> None:
    source = rendered(two_folders())
    page = Page(source)
    pictures = page.all("svg")
    assert len(pictures) == 3 * 7 + 2
    for each in pictures:
        assert each["role"] == "img"
        assert re.search("GB/s|per cent", each["aria-label"])
    assert not re.search(r"#0[1-4]0[1-4]0[1-4]", source), "a placeholder was not replaced"
    for name in set(re.findall(r"var\((--[\w-]+)\)", source)):
        assert f"{name}:" in source, "a colour that the page does not define"


@needs_matplotlib
def test_figures_in_descriptions_are_not_rounded_with_the_coordinates() -> None:
    page = Page(rendered(tuning(search(DRIVE))))
    descriptions = " ".join(each["aria-label"] for each in page.all("svg"))
    assert "at 0.0391" in descriptions  # CPU s/GB of the largest blocks


# What it says


@needs_matplotlib
def test_the_block_to_paste_is_that_of_the_recommended_setting() -> None:
    tried = two_folders()
    block = json.loads(Page(rendered(tried)).texts["pre"][0])
    assert block == tried.chosen.best.setting.to_deepspeed()
    assert block["aio"]["queue_depth"] == 8


@needs_matplotlib
def test_the_head_tells_speeds_setting_and_reason() -> None:
    page = Page(rendered(two_folders()))
    head = page.texts["header"][0]
    for said in (
        "3.30 GB/s read",
        "2.30 GB/s write",
        "512K block size",
        "8 queue depth",
        "2 workers",
        "io_uring",
        "Fast & lean.",
    ):
        assert said in head


@needs_matplotlib
def test_every_search_is_shown_and_linked() -> None:
    page = Page(rendered(two_folders()))
    headings = " ".join(page.texts["h2"])
    for title in ("/mnt/nvme0", "/mnt/nvme1", "2 folders together", "Striping"):
        assert title in headings
    assert [link["href"] for link in page.all("a")] == ["#search-0", "#search-1", "#search-2", "#striping"]


@needs_matplotlib
def test_a_folder_that_is_no_drive_is_marked_and_a_drive_is_not() -> None:
    assert len(Page(worded(tuning(search(MEMORY)))).of_class("warning")) == 2  # in the head and in the section
    page = Page(rendered(tuning(search(DRIVE))))
    assert page.of_class("warning") == []
    assert "ext4, takes direct I/O" in page.text


@needs_matplotlib
def test_a_hostile_folder_name_stays_text() -> None:
    folder = replace(DRIVE, path=HOSTILE, device=HOSTILE)
    rates = {"read": 3.0, "write": 2.0}
    striping = Striping(((HOSTILE, rates), ("/mnt/nvme1", rates)), {"read": 5.0, "write": 4.0}, False)
    source = rendered(tuning(search(folder), striping=striping))
    source.encode("utf-8")
    page = Page(source)
    assert page.all("script") == []
    assert not any("onload" in attributes for _, attributes in page.tags)
    shown = HOSTILE.replace("\udcff", "\\xff")
    assert shown in page.texts["h2"][1]
    assert shown in page.texts["code"]
    assert any('<script>alert("1")</script>' in text and "$x_$" in text for text in page.texts["text"]), (
        "in the chart of striping"
    )


@needs_matplotlib
@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_direction_that_was_not_measured_leaves_no_trace(direction: Operation) -> None:
    missing = "write" if direction == "read" else "read"
    only = {"read": direction == "read", "write": direction == "write"}
    striping = Striping(tuple((folder, {direction: 3.0}) for folder in ("/a", "/b")), {direction: 5.5}, False)
    page = Page(rendered(tuning(search(DRIVE, **only), striping=striping)))
    titles = page.titles_of_charts()
    assert len(titles) == 5 + 1
    assert not any(missing in title.lower() for title in titles)
    assert missing not in page.texts["header"][0]
    assert missing not in page.texts["table"][0]
    assert all(missing not in each["aria-label"].lower() for each in page.all("svg"))


@needs_matplotlib
def test_cells_that_were_not_measured_are_hatched_and_said_to_be() -> None:
    some_missing = search(DRIVE)
    page = Page(rendered(tuning(some_missing)))
    assert "Hatched: not measured." in page.notes_of_charts()
    assert len(page.all("pattern")) == 1
    assert "1 cells were not measured" in page.all("svg")[0]["aria-label"]

    all_there = tuple(each for each in some_missing.results if each.setting.queue_depth != 16)
    page = Page(rendered(tuning(replace(some_missing, results=all_there))))
    assert "Hatched" not in page.notes_of_charts()
    assert page.all("pattern") == []


@needs_matplotlib
def test_a_cell_holds_the_setting_that_did_best_over_workers_and_backends() -> None:
    best = result(128 * KIB, 8, 1, "io_uring", 4.0, None)
    others = [
        replace(result(128 * KIB, 4, workers, backend, 1.0, None), rounds=rounds, difference=difference)
        for workers, backend, rounds, difference in (
            (1, "io_uring", 2, longer(0.35, 0.1)),
            (2, "io_uring", 2, longer(0.4, 0.1)),
            (1, "libaio", 1, longer(0.1, 0.05)),  # not compared: it left before
        )
    ]
    clear = replace(result(256 * KIB, 4, 1, "io_uring", 1.0, None), rounds=1, difference=longer(2.0, 0.5))
    doubtful = replace(clear, setting=AioConfig(block_size=256 * KIB), difference=longer(0.1, 0.2))
    results = (best, *others, clear, doubtful)
    with html_report.style():
        chart = charts.heat_map(Search((DRIVE,), best, "", 3, 1.0, True, results))
    assert chart is not None
    assert [text.get_text() for text in chart.axes.texts] == ["+35", "0", "+200", "≤30"]


def with_flukes() -> Search:
    """All that left in the first round had a few transfers that were too good to be true: 99 GB/s, in no time."""
    tried = search(DRIVE)
    fluke = Figures(99.0, 1e-9, 1e-9, 1e-9, (10.0, 199.0))
    results = [
        each if each.rounds > 1 else replace(each, read=fluke, write=fluke, difference=longer(-0.9, 0.95))
        for each in tried.results
    ]
    results.append(replace(results[-1], backend="threads"))
    return replace(tried, results=tuple(results))


@needs_matplotlib
def test_what_was_eliminated_never_looks_better_than_what_is_recommended() -> None:
    tried = with_flukes()
    source = render_html(tuning(tried))
    page = Page(source)
    said = " ".join([page.text, *(each["aria-label"] for each in page.all("svg"))])
    assert "99.0" not in said
    (gone,) = (text for text in page.texts["details"] if "eliminated" in text)
    assert not re.search(r"-\d+ %", gone)  # intervals may reach below zero; no figure does
    with html_report.style():
        drawn = charts.search_charts(tried)
        cells, *others = (chart.axes for chart in drawn)
    shown = {text.get_text() for text in cells.texts}
    assert not [text for text in shown if text.startswith("-") and "." not in text]
    finalists = {each.read.gb_per_second for each in tried.finalists if each.read} | {
        each.write.gb_per_second for each in tried.finalists if each.write
    }
    (backends,) = (axes for axes in others if axes.get_xlabel() == "backend")
    assert sorted(text.get_text() for text in backends.texts) == ["-1.0", "recommended", "≤5, left in round 1"]
    trade_offs = [axes for axes in others if "GB/s" in axes.get_ylabel()]
    assert len(trade_offs) == 4
    for axes in trade_offs:
        assert {float(y) for line in axes.lines for y in line.get_ydata()} <= finalists
    text = sweep_text.render(tuning(tried), verbose=True)
    assert "99.00" not in text
    for line in text.split("eliminated before")[1].splitlines():
        assert not re.search(r" -\d+\.\d %", line)


@needs_matplotlib
def test_latencies_are_compared_within_one_round_only() -> None:
    """With longer transfers they are longer: a setting that left early would look better for that."""
    tried = search(DRIVE)
    with html_report.style():
        chart = charts.latency_chart(tried, "read")
    assert chart is not None
    shown = {float(x) for line in chart.axes.lines for x in line.get_xdata()}
    assert shown == {each.read.latency_p99 * 1e3 for each in tried.finalists if each.read}


@needs_matplotlib
def test_it_is_said_how_sure_the_figures_are() -> None:
    page = Page(rendered(tuning(search(DRIVE))))
    assert "half of the 77 reference transfers were within 8 % of their round's median" in page.text
    assert "Measured in turn, 24 times each, with transfers of 64M" in page.text
    assert "-1.0 %-3.0 to +1.0" in re.sub(r"\s*\n\s*", "", page.texts["table"][0])


@needs_matplotlib
def test_the_line_of_a_trade_off_joins_only_settings_that_none_beats() -> None:
    found = [Figures(speed, cpu, 1e-3, 2e-3) for speed, cpu in ((1.0, 0.1), (3.0, 0.2), (2.0, 0.3), (4.0, 0.4), (4.0, 0.5))]
    results = [Result(AioConfig(queue_depth=nth + 1), "io_uring", each, None, 1) for nth, each in enumerate(found)]
    with html_report.style():
        chart = charts.cpu_chart(Search((DRIVE,), results[1], "", 1, 1.0, True, tuple(results)), "read")
    assert chart is not None
    joined = [line.get_xydata().tolist() for line in chart.axes.lines if line.get_linestyle() != "None"]
    assert joined == [[[0.1, 1.0], [0.2, 3.0], [0.4, 4.0]]]


@needs_matplotlib
def test_a_single_setting_is_shown_without_charts() -> None:
    only = result(1 << 20, 8, 1, "io_uring", 3.0, 2.0)
    page = Page(rendered(tuning(Search((DRIVE,), only, "the only one", 1, 2.0, True, (only,)))))
    assert page.all("svg") == []
    assert "nothing to compare" in page.text
    assert "1M blocks, queue depth 8, 1 worker, io_uring" in page.text


@needs_matplotlib
def test_figures_of_zero_break_no_chart() -> None:
    nothing = Figures(0.0, 0.0, 0.0, 0.0)
    results = [
        Result(AioConfig(queue_depth=depth, intra_op_parallelism=depth), "io_uring", nothing, nothing, 1, difference)
        for depth, difference in ((1, None), (2, Difference(0.0, None)))
    ]
    rates = {"read": 0.0, "write": 0.0}
    striping = Striping((("/a", rates), ("/b", rates)), rates, True)
    stopped = Search((DRIVE,), results[0], "", 1, 0.0, False, tuple(results))
    page = Page(rendered(tuning(stopped, striping=striping)))
    assert len(page.all("svg")) == 1 + 1 + 2  # heat map, workers, striping; latency and CPU time have nothing to show


@needs_matplotlib
def test_an_interrupted_run_says_so_at_its_head_its_section_and_its_foot() -> None:
    page = Page(worded(tuning(search(DRIVE), search(OTHER_DRIVE, complete=False))))
    assert "left untried: /mnt/nvme1." in page.texts["header"][0]
    assert ["interrupted" in text for text in page.texts["section"]] == [False, True]
    assert "interrupted" in page.texts["footer"][0]
    assert "nterrupted" not in Page(rendered(tuning(search(DRIVE)))).text


@needs_matplotlib
def test_an_interrupt_between_searches_is_told_at_the_head_and_the_foot() -> None:
    whole = two_folders()
    page = Page(worded(replace(whole, searches=whole.searches[:1], striping=None, complete=False)))
    assert "Interrupted. What was to follow was not measured." in page.texts["header"][0]
    assert "interrupted" not in page.texts["section"][0]
    assert "interrupted" in page.texts["footer"][0]


@needs_matplotlib
def test_folders_on_one_device_are_told_to_share_its_speed() -> None:
    alone = (("/mnt/nvme0/a", {"read": 3.2}), ("/mnt/nvme0/b", {"read": 3.1}))
    striping = Striping(alone, {"read": 3.15}, shared_device=True)
    page = Page(worded(tuning(search(DRIVE), striping=striping)))
    assert "on one device" in page.text
    assert "50% of the sum" in page.text
    assert "on one device" not in Page(rendered(two_folders())).text


@needs_matplotlib
def test_the_table_has_the_finalists_and_another_the_eliminated_settings() -> None:
    tried = search(DRIVE)
    page = Page(worded(tuning(tried)))
    assert len(page.of_class("recommended")) == 1
    assert len(page.of_class("gone")) == 26
    assert len(page.all("tr")) == 2 + 6 + 1 + 26
    assert page.texts["table"][0].count("io_uring") + page.texts["table"][0].count("libaio") == 6
    assert "GB/s" not in page.texts["table"][1]


@needs_matplotlib
def test_of_a_search_that_was_interrupted_in_its_first_round_ten_are_shown_and_the_recommended_one() -> None:
    tried = search(DRIVE, complete=False)
    results = tuple(replace(each, rounds=1) for each in tried.results)
    page = Page(worded(tuning(replace(tried, results=results, best=results[20]))))
    assert len(page.all("tr")) == 2 + 11
    assert len(page.of_class("recommended")) == 1


@needs_matplotlib
def test_single_submission_is_told_apart_from_its_twin() -> None:
    tried = search(DRIVE)
    single = replace(tried.best, setting=tried.best.setting.model_copy(update={"single_submit": True}))
    page = Page(worded(tuning(replace(tried, results=(single, *tried.results), best=single))))
    assert page.text.count("single submit") >= 2  # in the table, and of the best
    assert "single submit" not in Page(worded(tuning(tried))).text


@needs_matplotlib
def test_settings_that_could_not_be_used_are_listed_with_the_reason_once() -> None:
    refused = {"1M/8/1 io_uring": "io_uring is <off> here", "1M/16/1 io_uring": "io_uring is <off> here"}
    foot = Page(worded(replace(tuning(search(DRIVE)), refused=refused))).texts["footer"][0]
    assert "2 settings could not be used" in foot
    assert "1M/16/1 io_uring" in foot
    assert foot.count("io_uring is <off> here") == 1
    assert "could not be used" not in Page(rendered(tuning(search(DRIVE)))).text


@needs_matplotlib
def test_the_foot_tells_how_it_was_measured() -> None:
    foot = Page(rendered(tuning(search(DRIVE)))).texts["footer"][0]
    for said in (
        "at most 400M per folder",
        "overwrote a file",
        "page cache",
        "all of a round have the same length",
        "Successive halving in 3 rounds",
        "1 min 20 s",
        "12.0 GB written",
    ):
        assert said in foot


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.01234, "0.0123"), (0.5, "0.500"), (6.9, "6.90"), (12.34, "12.3"), (1234.5, "1234")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert charts.three_digits(value) == text
