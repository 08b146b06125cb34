"""The examples run as they say they do, and leave nothing behind. Tiny ones: what they measure is not looked at."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..support.patience import PATIENCE

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


SPREAD = r"[\d.]+ \([\d.]+-[\d.]+\)"
"""How a median and its extremes are printed."""


def run(
    name: str, *arguments: object, interpreter: Sequence[str] = (sys.executable, "-W", "error"), timeout: float = PATIENCE
) -> str:
    done = subprocess.run(
        [*interpreter, EXAMPLES / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        # Many threads for so small a model do nothing but wait for one another where there are fewer cores.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_model_is_saved_and_restored(drive: Path) -> None:
    printed = run("quickstart.py", "--dir", drive, "--layers", 1)
    assert "every byte the same" in printed
    assert len(re.findall(rf"^(?:wrote|fsync|read) +{SPREAD} G?B?/?s$", printed, re.MULTILINE)) == 3
    assert list(drive.iterdir()) == []


def test_a_checkpoint_is_saved_and_loaded_both_ways(drive: Path) -> None:
    printed = run("checkpoint.py", "--dir", drive, "--layers", 1, "--rounds", 1)
    assert "each reads what the other wrote, every byte the same" in printed
    assert re.search(r"^save: [\d.]+ times as fast$", printed, re.MULTILINE)
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_is_trained_with_its_states_on_the_drive_as_in_memory(drive: Path, processes: int) -> None:
    printed = run(
        "train_offloaded.py", "--dir", drive, "--width", 64, "--layers", 2, "--steps", 4, "--processes", processes
    )  # fmt: skip
    assert "4 losses, every one the same" in printed
    rows = re.findall(r"(in memory|on the drive) +│ +([\d.]+) +│ +([\d.]+) ", printed)
    assert [row[0] for row in rows] == ["in memory", "on the drive"]
    assert all(float(last) < float(first) for _, first, last in rows), "it has learned nothing"
    wrote = re.search(r"wrote\s+([\d.]+) MB", printed)
    assert wrote is not None
    assert float(wrote[1]) > 0, "no states went to the drive"
    assert list(drive.iterdir()) == []


def test_long_sequences_are_trained_alike_in_every_way(drive: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, to plot: pip install matplotlib")
    plot = tmp_path / "memory.png"
    given = ("--tokens", 1024, "--width", 256, "--layers", 3, "--steps", 2, "--budget", 4, "--plot", plot)
    interpreter = (sys.executable, "-W", "error")
    printed = run("train_long_sequences.py", "--dir", drive, *given, interpreter=interpreter)
    assert "2 losses, every one the same in all ways" in printed
    rows = re.findall(rf"^│ (.{{19}}) │ (\d+) +│ {SPREAD} +│ (\d+) +│ ([\d.]+) +│ ([\d.]+) +│$", printed, re.MULTILINE)
    written = {name.strip(): int(megabytes) for name, _, megabytes, _, _ in rows}
    assert list(written) == ["in memory", "save_on_cpu", "checkpointing", "save_on_disk", "checkpoints on disk"]
    assert [megabytes > 0 for megabytes in written.values()] == [False, False, False, True, True]
    assert all(float(last) < float(first) for *_, first, last in rows), "it has learned nothing"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(drive.iterdir()) == []


def test_a_model_of_clicks_is_trained_from_tables_on_the_drive_as_in_memory(drive: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, to plot: pip install matplotlib")
    options = ["--rows", "2000", "--steps", "12", "--batch", "64", "--width", "16", "--dir", str(drive)]
    output = run("click_model_on_disk.py", *options, "--plot", str(tmp_path / "clicks.png"))
    assert "The losses have the same bits." in output
    assert len(re.findall(r"│ +\d+ \(\d+-\d+\) +│", output)) == 2
    assert (tmp_path / "clicks.png").read_bytes()[1:4] == b"PNG"
    assert list(drive.iterdir()) == []


def test_agents_get_the_same_answers_with_their_keys_and_values_on_the_drive(drive: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib", reason="needs matplotlib, to plot: pip install matplotlib")
    options = ["--agents", 4, "--requests", 20, "--width", 128, "--layers", 2, "--memory", 10, "--capacity", "32MB"]
    printed = run("serve_from_drive.py", *options, "--dir", drive, "--plot", tmp_path / "serve.png")
    assert "20 answers, every one the same" in printed
    rows = re.findall(r"│ (?:memory only|with the drive) +│ +(\d+) +│ +(\d+) +│ +(\d+) ", printed)
    (_, none, computed), (_, on_drive, still_computed) = (tuple(map(int, row)) for row in rows)
    assert none == 0 < on_drive
    assert still_computed < computed
    assert ", 0 corrupt" in printed
    assert (tmp_path / "serve.png").read_bytes()[1:4] == b"PNG"
    assert list(drive.iterdir()) == []


def test_a_classifier_is_trained_from_the_drive_and_resumed_in_the_middle_of_an_epoch(drive: Path, tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="needs pillow, to make images: pip install pillow")
    pytest.importorskip("matplotlib", reason="needs matplotlib, to plot: pip install matplotlib")
    picture = tmp_path / "images.png"
    output = run("train_from_drive.py", "--dir", drive, "--images", 200, "--memory", "1MiB", "--batch", 16, "--plot", picture)
    assert "Stopped and resumed, the losses have the same bits." in output
    assert len(re.findall(r"│ +\d+ +│ +\d+ % +│", output)) == 2
    assert picture.read_bytes()[1:4] == b"PNG"
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(("mode", "given"), [("full", ()), ("lora", ("--quantize", "int4"))], ids=["full", "quantised lora"])
def test_a_model_is_fine_tuned_in_a_quarter_of_its_memory_as_without_a_limit(
    drive: Path, tmp_path: Path, mode: str, given: tuple[str, ...]
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib", reason="needs matplotlib, to plot: pip install matplotlib")
    arguments = ("--dir", drive, "--mode", mode, "--quick", "--plot", tmp_path / "plots", *given)
    printed = run("finetune_larger_than_memory.py", *arguments, timeout=800)
    sizes = re.search(r": (\d+) MiB of [a-z, ]+, with (\d+) MiB of memory by RLIMIT_DATA$", printed, re.MULTILINE)
    assert sizes is not None
    size, limit = map(int, sizes.groups())
    assert size >= 4 * limit - 4  # rounded
    assert re.search(r"^in memory, with the same limit: .*(Cannot allocate memory|can't allocate memory)", printed, re.MULTILINE)
    peaks = dict(re.findall(r"^│ (in memory|on the drive) +│ +\w+ +│ (\d+) +│", printed, re.MULTILINE))
    assert int(peaks["on the drive"]) <= limit < size <= int(peaks["in memory"])
    rows = re.findall(r"^│ \d +│ ([\d.]+) +│ ([\d.]+) +│ the same │$", printed, re.MULTILINE)
    assert len(rows) == 5
    assert float(rows[-1][0]) < float(rows[0][0]), "it has learned nothing"
    assert "5 losses, every one the same" in printed
    assert "waits" in printed
    assert (tmp_path / "plots" / f"memory-{mode}.png").read_bytes().startswith(b"\x89PNG")
    assert list(drive.iterdir()) == []


def test_a_streamed_model_generates_what_it_does_in_memory(drive: Path) -> None:
    pytest.importorskip("transformers")
    printed = run("generate_streamed.py", "--dir", drive, "--size", 0.02, "--tokens", 4)
    assert "4 tokens, every one the same" in printed
    rows = re.findall(rf"(in memory|streamed, 0\.005 GB of them kept) +│ +({SPREAD}) +│ +(\d+) ", printed)
    assert [row[0] for row in rows] == ["in memory", "streamed, 0.005 GB of them kept"]
    assert list(drive.iterdir()) == []


def test_a_mixture_generates_what_it_does_in_memory(drive: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib", reason="needs matplotlib, to plot: pip install matplotlib")
    plot = tmp_path / "mixture.png"
    printed = run("generate_mixture.py", "--dir", drive, "--size", 0.01, "--tokens", 6, "--plot", plot)
    assert "6 tokens, every one the same in memory" in printed
    rows = re.findall(rf"│ (experts on demand|in memory) +│ +[\d.]+ │ +{SPREAD} │ +(\d+) │", printed)
    assert [row[0] for row in rows] == ["experts on demand", "in memory"]
    hits = re.search(r"^experts: 13 tokens .*?([\d.]+)% of them in memory", printed, re.MULTILINE)
    assert hits is not None
    assert 0 < float(hits[1]) < 100
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(drive.iterdir()) == []


def test_a_mixture_of_the_users_generates_from_a_prompt_and_without_matplotlib_there_is_no_plot(
    drive: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder, plot = drive / "mixture", tmp_path / "mixture.png"
    words = {word: number for number, word in enumerate(["<unk>", "once", "upon", "a", "time"])}
    tokenizers = pytest.importorskip("tokenizers")
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=split, unk_token="<unk>").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 5}
    config = transformers.OlmoeConfig(num_experts=8, num_experts_per_tok=2, pad_token_id=0, eos_token_id=None, **sizes)
    transformers.OlmoeForCausalLM(config).save_pretrained(folder)
    program = "import runpy, sys; sys.modules['matplotlib'] = None; "
    program += f"sys.argv = {['', str(folder), '--prompt', 'once upon a', '--tokens', '4', '--plot', str(plot)]}; "
    program += f"runpy.run_path({str(EXAMPLES / 'generate_mixture.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pip install matplotlib" in done.stderr
    assert re.search(r"^once upon a( \S+){4}$", done.stdout, re.MULTILINE)
    assert "4 tokens, every one the same in memory" in done.stdout
    assert not plot.exists()


def test_a_mixture_without_a_tokenizer_is_told_in_a_sentence(drive: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
    config = transformers.OlmoeConfig(num_experts=8, num_experts_per_tok=2, eos_token_id=None, **sizes)
    transformers.OlmoeForCausalLM(config).save_pretrained(drive / "mixture")
    command = [sys.executable, EXAMPLES / "generate_mixture.py", drive / "mixture", "--prompt", "once upon"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "makes no tokens of 'once upon': does tokenizer.json lie there?" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_transformers_the_examples_have_their_help_and_say_what_to_install(drive: Path) -> None:
    told = [(["--help"], 0, "Generate text with a "), (["--dir", str(drive)], 1, "pip install 'deepnvme[transformers]'")]
    for name, (more, code, said) in itertools.product(("generate_streamed.py", "generate_mixture.py"), told):
        example = str(EXAMPLES / name)
        program = "import runpy, sys; sys.modules['transformers'] = None; "
        program += f"sys.argv = {[example, *more]}; runpy.run_path({example!r}, run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == code, done.stdout + done.stderr
        assert said in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_deepspeed_trains_alike_with_and_without_this_package(
    request: pytest.FixtureRequest, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = request.config.getoption("--deepspeed-python")
    if not python:
        pytest.skip("needs an interpreter that has DeepSpeed 0.19.8: --deepspeed-python PATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")])))
    given = ("--dir", drive, "--width", 256, "--layers", 2, "--steps", 3)
    printed = run("deepspeed_zero_infinity.py", *given, interpreter=[python], timeout=800)
    assert "3 losses, every one the same" in printed
    rows = re.findall(r"(DeepSpeed alone|our ops|our ops and swappers) +│ +([\d.]+) +│ +([\d.]+) ", printed)
    assert [row[0] for row in rows] == ["DeepSpeed alone", "our ops", "our ops and swappers"]
    assert all(float(last) < float(first) for _, first, last in rows), "it has learned nothing"
    assert list(drive.iterdir()) == []


def test_without_deepspeed_the_example_says_what_to_install(tmp_path: Path) -> None:
    example = EXAMPLES / "deepspeed_zero_infinity.py"
    absent = f"import runpy, sys; sys.path.insert(0, {str(EXAMPLES)!r}); sys.modules['deepspeed'] = None; sys.argv = ['']; "
    done = subprocess.run(
        [sys.executable, "-c", absent + f"runpy.run_path({str(example)!r}, run_name='__main__')"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "pip install --no-build-isolation deepspeed==0.19.8" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
