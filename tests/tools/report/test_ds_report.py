"""ds_report: true, quick, and of use when something is missing."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepnvme.drives import mounts as drives
from deepnvme.ops.op_builder import AsyncIOBuilder, GDSBuilder, jit
from deepnvme.ops.op_builder.cuda import Found, GdsProbe
from deepnvme.tools.report import directory_probes, machine_probes
from deepnvme.tools.report import ds_report as report
from deepnvme.tools.report.facts import Fact

from ...support.patience import PATIENCE
from ...support.system_calls import answering

REPOSITORY = Path(__file__).resolve().parents[3]

# Has the kernel refuse one system call with an errno, for this process and for good, as a container's profile would.
REFUSE = """
import ctypes, struct
def refuse(number, code):
    libc = ctypes.CDLL(None, use_errno=True)
    rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | code), (0x06, 0, 0, 0x7fff0000)]
    rows = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(rows)))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        raise SystemExit(77)
"""


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture(autouse=True)
def cache(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without an op. What the compiler was found to take is in it after the first report, as it is for users."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    return extensions


@pytest.fixture(scope="module")
def found(extensions: Path) -> report.Report:
    """The report of this machine and of the repository's directory, gathered once for the tests that only look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
        return report.gather(REPOSITORY)


def run(*arguments: str, prelude: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    program = f"{prelude}\nfrom deepnvme.report import main\nmain({list(arguments)!r})\n"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        timeout=PATIENCE,
    )


def document(*arguments: str, **keywords: Any) -> dict[str, Any]:
    done = run("--json", *arguments, **keywords)
    if done.returncode == 77:
        pytest.skip("needs a kernel that lets a process filter its system calls")
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


# Bad input


@pytest.mark.parametrize("path", ["/no/such/place", __file__, "", "with\0nul"])
def test_a_path_that_is_no_directory_is_one_clear_line_and_status_2(path: str) -> None:
    done = run("--path", path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ds_report: --path ")
    assert done.stderr.count("\n") == 1


# What is missing


@pytest.mark.parametrize(
    ("backend", "number", "code", "name", "remedy"),
    [
        ("io_uring", 425, 1, "EPERM", "seccomp=unconfined"),
        ("io_uring", 425, 38, "ENOSYS", "seccomp=unconfined"),
        ("io_uring", 427, 1, "io_uring_register failed with EPERM", "seccomp=unconfined"),
        ("libaio", 206, 11, "EAGAIN", "sysctl -w fs.aio-max-nr"),
    ],
)
def test_a_backend_that_the_kernel_refuses_is_reported_with_the_errno(
    backend: str, number: int, code: int, name: str, remedy: str
) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("needs x86_64, whose system call numbers it knows")
    found = document(prelude=REFUSE + f"refuse({number}, {code})")
    assert found["selected_backend"] != backend
    fact = found["backends"][backend]
    assert fact["status"] == "NO"
    assert name in fact["problems"][0]
    assert remedy in fact["problems"][0]


OF_LINUX_5_4 = """
static long answer(long number, long *a) {
    const long result = ask(number, a);
    if (number == SETUP) ((unsigned *)a[1])[FEATURES] = ONE_MAPPING;
    return result;
}
"""


def test_a_kernel_whose_io_uring_lacks_reads_and_writes_is_reported_and_the_next_backend_is_taken(tmp_path: Path) -> None:
    found = document(LD_PRELOAD=str(answering(OF_LINUX_5_4, tmp_path)))
    if "failed with" in str(found["backends"]["io_uring"]["problems"]):
        pytest.skip("needs a kernel that has io_uring")
    assert found["backends"]["io_uring"]["status"] == "NO"
    assert found["backends"]["io_uring"]["problems"][0].endswith("without read and write: use Linux 5.6 or later")
    assert found["selected_backend"] != "io_uring"


def test_without_a_compiler_it_alone_is_named_and_only_once(tmp_path: Path) -> None:
    text = run(PATH=str(tmp_path), CXX="").stdout
    assert text.count("no C++20 compiler") == 1
    assert "install GCC 11 or Clang 14" in text
    assert "libaio" not in text.replace("\nlibaio ....", "")
    assert "\nthreads .......................... unusable [NO]\n" in text
    assert "auto takes" not in text


@pytest.fixture
def installed_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the place of the op that an installation has. It does not load."""
    library = tmp_path / "async_io_op.so"
    library.write_bytes(AsyncIOBuilder().source_hash().encode())
    monkeypatch.setattr(jit, "prebuilt", lambda name: library if "async_io" in name else None)
    return library


def test_an_installed_op_has_every_backend_and_needs_no_compiler(installed_op: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    facts, selected = machine_probes.backends()
    assert [fact.key for fact in facts] == ["io_uring", "libaio", "threads"]
    assert {fact.value for fact in facts} <= {"usable", "refused"}
    assert selected is not None
    environment = {fact.key: fact for fact in machine_probes.environment(GDS)}
    assert (environment["cxx_compiler"].status, environment["cxx_compiler"].problems) == ("", ())


GDS = GdsProbe(Found(), Found(), Found(), Found("/lib/libcufile.so.0", "1.14"), Found(), torch_cuda="13.0")


def gds_as_reported(monkeypatch: pytest.MonkeyPatch, probe: GdsProbe) -> tuple[str, list[str]]:
    """Its line, and what is said of it."""
    monkeypatch.setattr(GDSBuilder, "probe", lambda self: probe)
    lines = report.render(report.gather()).splitlines()
    (line,) = (line for line in lines if line.startswith("gds ..."))
    return line, [line.strip() for line in lines if line.strip().startswith("[NO] gds: ")]


NO_CUFILE = Found(problem="libcufile.so was not found (tried /x): pip install nvidia-cufile")


@pytest.mark.parametrize(
    ("changes", "compatible", "reason"),
    [
        ({"torch_cuda": None}, "NO", "torch is missing or was built without CUDA, which only gds needs: pip install "),
        ({"cufile_library": NO_CUFILE}, "NO", NO_CUFILE.problem),
        ({}, "OKAY", "DS_BUILD_GDS=1 pip install"),
    ],
    ids=["torch without CUDA", "no cuFile", "all is there"],
)
def test_gds_is_compatible_or_not_with_the_reason_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], compatible: str, reason: str
) -> None:
    line, (said,) = gds_as_reported(monkeypatch, dataclasses.replace(GDS, **changes))
    assert line == f"gds .................... [NO] ....... [{compatible}]"
    assert reason in said


def test_a_machine_without_a_gpu_is_advised_nothing_about_gds(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Found(problem="not found: pip install it")
    probe = GdsProbe(missing, missing, missing, missing, missing, torch_cuda=None, gpu=False)
    line, said = gds_as_reported(monkeypatch, probe)
    assert line == "gds .................... [NO] ....... [NO]"
    assert said == ["[NO] gds: this machine has no NVIDIA GPU, which only gds needs"]
    text = report.render(report.gather())
    assert "pip install it" not in text
    assert "reinstall torch" not in text


def of_the_system(key: str) -> Fact:
    """The fact with that key in JSON."""
    return next(fact for fact in machine_probes.system() if fact.key == key)


def test_shared_memory_that_is_too_small_is_warned_of_as_deepspeed_does(monkeypatch: pytest.MonkeyPatch) -> None:
    small = os.statvfs_result((4096, 4096, 16384, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr("os.statvfs", lambda path: small)
    fact = of_the_system("shared_memory_bytes")
    assert (fact.value, fact.status) == (64 << 20, "WARNING")
    assert "--shm-size='1gb'" in fact.problems[0]


@pytest.mark.parametrize(("used", "status"), [("0", ""), ("65000", "WARNING")])
def test_few_aio_events_left_are_warned_of(used: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aio-nr").write_text(used)
    (tmp_path / "aio-max-nr").write_text("65536")
    monkeypatch.setattr(machine_probes, "AIO_LIMITS", tmp_path)
    allowed = of_the_system("aio_max_nr")
    assert (allowed.value, allowed.text, allowed.status) == (65536, f"65536, {used} in use", status)


def test_huge_pages_that_are_off_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(machine_probes, "HUGE_PAGES", tmp_path / "enabled")
    fact = of_the_system("transparent_huge_pages")
    assert (fact.value, fact.status) == ("never", "WARNING")
    assert "echo madvise" in fact.problems[0]


def test_what_the_system_does_not_tell_is_unknown_rather_than_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probes, "AIO_LIMITS", tmp_path)
    monkeypatch.setattr(machine_probes, "HUGE_PAGES", tmp_path / "enabled")

    def refuse(path: Path, *args: Any, **kwargs: Any) -> str:
        raise PermissionError(errno.EACCES, "as asked for", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    for fact in machine_probes.system():
        assert fact.shown
        assert bool(fact.problems) == (fact.status == "WARNING")


# Truth and form


def test_every_fault_comes_with_a_reason_and_what_works_without(found: report.Report) -> None:
    facts = [found.ninja, *found.backends, *found.environment, *found.system, *(found.directory or [])]
    for fact in facts:
        assert not fact.status or bool(fact.problems) == (fact.status in ("NO", "WARNING", "FAIL")), fact
    for op in found.ops:
        assert bool(op.problems) == (not (op.value and op.status == "OKAY")), op


def test_json_has_keys_in_snake_case_and_numbers_as_numbers() -> None:
    found = document("--path", str(REPOSITORY))
    sections = ("ops", "backends", "environment", "system", "directory")
    keys = [key for section in sections for key in found[section]]
    assert [key for key in [*found, *keys] if not re.fullmatch("[a-z][a-z0-9_]*", key)] == []
    assert set(found["backends"]) == {"io_uring", "libaio", "threads"}
    assert found["selected_backend"] in found["backends"]
    for section, key in (
        ("system", "aio_max_nr"),
        ("system", "usable_cpus"),
        ("system", "memory_bytes"),
        ("system", "shared_memory_bytes"),
        ("directory", "free_bytes"),
    ):
        assert isinstance(found[section][key]["value"], int), key


@pytest.mark.parametrize(
    ("text", "processor", "vectors"),
    [
        ("model name\t: A processor\nflags\t\t: fpu avx avx2 avx512f\n\nprocessor\t: 1\n", "A processor", "avx, avx2, avx512f"),
        ("BogoMIPS\t: 50.00\nFeatures\t: fp asimd sve\n", os.uname().machine, "asimd, sve"),
        ("", os.uname().machine, None),
    ],
    ids=["x86", "ARM", "nothing known"],
)
def test_the_processor_is_told_with_its_vector_extensions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, processor: str, vectors: str | None
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine_probes, "CPUINFO", tmp_path / "cpuinfo")
    assert (of_the_system("cpu").value, of_the_system("vector_extensions").value) == (processor, vectors)


def test_the_text_has_deepspeeds_table(found: report.Report) -> None:
    text = report.render(found)
    assert "\nop name ................ installed .. compatible\n" in text
    assert "\nninja .................. [OKAY]\n" in text
    assert "\nutils .................. [YES] ...... [OKAY]\n" in text
    for name in ("torch install path", "torch version", "deepnvme info", "nvcc version"):
        assert f"\n{name} ..." in text
    assert "\nshared memory (/dev/shm) size .... " in text


def test_hiding_the_operators_leaves_the_rest(found: report.Report) -> None:
    text = report.render(found, operators=False)
    assert "op name" not in text
    assert "async_io backends" not in text
    assert "torch version" in text
    assert set(json.loads(report.as_json(found, operators=False))) == {"environment", "system", "directory"}


def test_hiding_warnings_leaves_the_statuses(found: report.Report) -> None:
    shown, hidden = report.render(found), report.render(found, explanations=False)
    assert "  [NO] gds: " in shown
    assert "  [NO] " not in hidden
    assert re.search(r"^gds \.{20} \[(NO|YES)\] \.+ \[(NO|OKAY)\]$", hidden, re.MULTILINE)
    assert "problems" not in report.as_json(found, explanations=False)


def test_a_directory_s_name_does_not_command_the_terminal(drive: Path) -> None:
    (place := drive / "a\nb\x1b]0;title\x07\udcff[red]").mkdir()
    done = run("--path", str(place))
    assert done.returncode == 0, done.stderr
    assert f"{drive}/a\\nb\\x1b]0;title\\x07\\udcff[red]" in done.stdout
    assert all(line.isprintable() for line in done.stdout.split("\n"))


@pytest.mark.alone
def test_it_never_compiles_the_op_and_takes_less_than_five_seconds(cache: Path) -> None:
    run()  # the probes of a first run are remembered

    def seconds() -> float:
        started = time.monotonic()
        assert run("--path", str(REPOSITORY)).returncode == 0
        return time.monotonic() - started

    assert any(seconds() < 5 for _ in range(5))  # others may use the processors too
    assert {path.name for path in (cache / "deepnvme").iterdir()} <= {"probes"}


# A directory


def facts_of(directory: Path) -> dict[str, Fact]:
    return {fact.name: fact for fact in directory_probes.directory_facts(directory)}


def failing(code: str) -> Callable[..., Any]:
    """A function that raises OSError with that errno."""
    number = getattr(errno, code)

    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_direct_io_is_tried_and_leaves_nothing_behind(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert facts["O_DIRECT"].status in ("OKAY", "WARNING")
    assert facts["path"].value == str(tmp_path)
    free = facts["free space"].value
    assert isinstance(free, int)
    assert abs(free - os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize) < 1 << 30


def test_tmpfs_is_told_to_be_buffered_whatever_it_accepts() -> None:
    place = Path("/dev/shm")
    mount = drives.mount_of(place) if place.is_dir() else None
    if mount is None or mount.filesystem != "tmpfs":
        pytest.skip("needs a tmpfs at /dev/shm")
    fact = facts_of(place)["O_DIRECT"]
    assert (fact.value, fact.status) == (False, "WARNING")
    assert "buffered" in fact.problems[0]


def test_a_directory_that_cannot_be_written_is_reported_without_an_error() -> None:
    for place in (Path("/proc"), Path("/sys")):
        fact = facts_of(place)["O_DIRECT"]
        assert (fact.value, fact.status) == (None, "WARNING")
        assert fact.shown.startswith("not tried: ")


@pytest.mark.parametrize("code", ["EROFS", "EACCES"])
def test_direct_io_is_not_judged_where_no_file_can_be_made(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkstemp", failing(code))
    direct = directory_probes.try_direct_io(tmp_path)
    assert direct.works is None
    assert direct.outcome.startswith("unknown: ")
    assert code in direct.outcome


VERDICTS = [
    ("EINVAL", False, "does not work"),
    ("ENOTSUP", False, "does not work"),
    ("ENOSPC", None, "unknown: ENOSPC (No space left on device)"),
    ("EIO", None, "unknown: EIO (Input/output error)"),
]


@pytest.mark.parametrize("when", ["open", "pwrite"])
@pytest.mark.parametrize(("code", "works", "outcome"), VERDICTS)
def test_only_the_errors_that_mean_refusal_are_taken_for_it(
    code: str, works: bool | None, outcome: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, flags: int, *rest: int) -> int:
        return failing(code)() if flags & os.O_DIRECT else real(path, flags, *rest)

    monkeypatch.setattr("os.open", refusing) if when == "open" else monkeypatch.setattr("os.pwrite", failing(code))
    direct = directory_probes.try_direct_io(tmp_path)
    assert (direct.works, direct.outcome) == (works, outcome)
    assert direct.problem
    assert list(tmp_path.iterdir()) == []
