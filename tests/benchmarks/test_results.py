"""The record of figures: what is measured when, the markers of pages and
recipes, tables and pictures.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import as_gpu, pages, pictures, results
from benchmarks.figures import flat, value_of
from benchmarks.parts import Part, joint_parts, parts_as, parts_of
from benchmarks.record import ROOT, read
from benchmarks.tables import TABLES, chosen
from gpt2_triton.commands.app import main
from gpt2_triton.errors import DataError
from tests.support.elsewhere import compiled_elsewhere
from tests.support.pages import FENCE

META = dict(commit="abc1234", gpu="H200", gpus=1, power_limit_w=700.0, torch="2.11", triton="3.6")
STEP = dict(ms=80.0, tok_s=819_200.0, gib=16.3, planned=16.1)
OPS = {"adamw.ms": 7.0, "adamw.floor_ms": 7.0, "ms": 80.0, "floor_ms": 71.0}
FIGURES = {
    f"{key}.d12.{arm}.{name}": value
    for key, arm, figures in (
        ("steps", "bf16", STEP),
        ("steps", "fp8", STEP),
        ("steps", "torch", dict(ms=120.0, tok_s=546_133.0, gib=25.6)),
        ("ops", "bf16", OPS),
        ("ops", "fp8", OPS),
    )
    for name, value in figures.items()
}
RECORD = {"h200": {"meta": META} | FIGURES}


@pytest.mark.slow
def test_render_changes_nothing_on_the_committed_pages():
    # elsewhere: the interpreter's blocks need other scratch, and the table of memory shows it
    assert (
        compiled_elsewhere("-m", "benchmarks.results", "render", "--check") == "nothing changes\n"
    )
    assert read()["losses"] == results.losses()


def test_a_table_stands_between_its_markers():
    page = "before\n\n<!-- r: table ops -->\nOLD\n<!-- /r -->\n\nafter\n"
    new = pages.render(page, RECORD, Path("page.md"))
    assert new == page.replace("OLD", TABLES["ops"](RECORD))
    assert pages.render(new, RECORD, Path("page.md")) == new


def test_a_recipe_has_its_hours_before_the_marker():
    text = "# GPT-2 124M: hours: 9.9  # r: recipe.gpt2_124m.hours\nmodel: 1\n"
    assert pages.render(text, RECORD, Path("gpt2_124m.yaml")) == text.replace("9.9", "3.2")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("README.md", "<!-- r: table nothing --><!-- /r -->"),
        ("README.md", "a sentence takes <!-- r: h200.steps.d12.fp8.ms -->80.0<!-- /r --> ms"),
        ("docs/guide/llama.md", "<!-- r: table llama_losses --><!-- /r -->"),
        ("quickstart.yaml", "hours: 1.0  # r: recipe.quickstart.hours"),
    ],
)
def test_an_unknown_table_or_figure_is_refused_with_the_page(page, text):
    with pytest.raises(DataError, match=rf"^{page}: ") as raised:
        pages.render(text, RECORD, Path(page))
    assert len(str(raised.value).splitlines()) == 1


def test_the_table_of_operations_ends_with_the_step_and_its_share_of_the_floors():
    *_, step, share = TABLES["ops"](RECORD).splitlines()
    assert step == "| step | 80.0 (71.0) | 80.0 (71.0) |"
    assert share == "| step / floor | 1.13 | 1.13 |"


def test_a_table_chosen_by_hand_computes_the_cells_that_begin_with_an_equals_sign():
    spec = dict(
        head=["program", "ms | h200.steps.d12.{}.ms | .1f"],
        rows=[["ours", "=fp8"], ["over ours", "=torch.ms / h200.steps.d12.fp8"], ["theirs", ""]],
    )
    _, _, *rows = chosen(spec)(RECORD).splitlines()
    assert rows == ["| ours | 80.0 |", "| over ours | 1.5 |", "| theirs |  |"]
    with pytest.raises(KeyError, match="steps.d12.fp16.ms"):
        chosen(dict(spec, rows=[["ours", "=fp16"]]))(RECORD)


# ---- no figure outside markers ----

STRAY = re.compile(r"±|\d(?:[kM]?\s?tok(?:en)?s?/s|\s?(?:ms|J)\b|x(?!\w))")


def strays(text: str) -> list[str]:
    """Return the lines with a speed, a time, an energy or an interval outside markers and code."""
    text = re.sub(r"`[^`\n]+`", "", FENCE.sub("", pages.TABLE.sub("", text)))
    return [line for line in text.splitlines() if STRAY.search(line)]


def test_figures_of_pages_stand_between_markers():
    text = "takes 80.8 ms\n1.52x as fast\n<!-- r: table a -->80.8 ms<!-- /r -->"
    assert strays(text) == ["takes 80.8 ms", "1.52x as fast"]
    documents = [page for page in pages.files() if page.suffix == ".md"]
    found = {page.name: strays(page.read_text(encoding="utf-8")) for page in documents}
    assert not {name: lines for name, lines in found.items() if lines}


SENTENCES = yaml.safe_load(Path(__file__).with_name("sentences.yaml").read_text())


@pytest.mark.parametrize("page", SENTENCES)
def test_rounded_figures_of_sentences_are_the_record_s(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    figures = flat(read())
    for words, expression, least, most in SENTENCES[page]:
        assert words in text, f"{page} no longer says: {words}"
        value = value_of(expression, figures)
        assert least <= value <= most, f"{page}: {words}: {value:.4g}"


# ---- measuring ----


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """measured(groups, joint, *words) runs parts on two GPUs, and returns exit code and record."""
    out = tmp_path / "record.json"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")

    def run(groups, joint, *words, **meta):
        meta = META | dict(commit="one", gpus=2) | meta
        monkeypatch.setattr(results, "machine", lambda commit: ("h100", meta))
        monkeypatch.setattr(results, "parts_of", lambda sizes, gpu: groups)
        monkeypatch.setattr(results, "joint_parts", lambda sizes, gpus: joint)
        given = ["--out", str(out), "--seconds", "500", "--commit", "one", *words]
        return main(results.app, ["run", *given]), json.loads(out.read_text())

    return run


def test_run_measures_what_is_missing_and_begins_again_at_a_new_commit(measured, capsys):
    calls = []

    def part(key, seconds=1, fails=False):
        def measure(limit, env):
            calls.append((key, env.get("CUDA_VISIBLE_DEVICES"), env["TRITON_CACHE_DIR"]))
            if fails:
                raise OSError("no memory left")
            return dict(ms=80.123456, recompute="gelu")

        return Part(key, seconds, measure)

    def keys():
        found = sorted(key for key, *_ in calls)
        calls.clear()
        return found

    bf16, fp8, ops, two = "steps.d12.bf16", "steps.d12.fp8", "ops.d12.bf16", "multi.d12.fp8"
    groups, joint = [[part(bf16), part(fp8, fails=True)], [part(ops, 450)]], [part(two, 60)]
    code, record = measured(groups, joint)
    gpus = {key: gpu for key, gpu, _ in calls}
    assert code == 1 and keys() == [two, bf16, fp8]  # `two` needs the time of `ops`
    assert gpus[two] is None and {gpus[bf16], gpus[fp8]} < {"4", "5"}
    found = {f"{bf16}.ms": 80.123, f"{bf16}.recompute": "gelu"}
    assert record["h100"] == {"meta": META | dict(commit="one", gpus=1)} | found
    assert record["h100x2"][f"{two}.ms"] == 80.123 and record["h100x2"]["meta"]["gpus"] == 2
    text, err = capsys.readouterr()
    assert f"{ops}: left for another run" in text and f"{fp8}: failed: no memory left" in err
    groups = [[part(bf16), part(fp8)], [part(ops)]]
    assert measured(groups, joint, "--parts", "steps")[0] == 0 and keys() == [fp8]
    code, record = measured(groups, joint, commit="two")
    assert code == 0 and record["h100"]["meta"]["commit"] == "two"
    assert keys() == [two, ops, bf16, fp8]
    code, record = measured(groups, [part(two, 60, fails=True)], commit="two", torch="2.12")
    assert code == 1 and keys() == [two, ops, bf16, fp8] and record.keys() == {"h100"}
    first = [part("first_step.d12.fp8"), part("first_step.d12.bf16"), part(bf16), part(ops)]
    measured([first], [], commit="three")
    assert len({folder for *_, folder in calls}) == 3  # a first step has a cache of its own


def test_another_gpu_s_code_has_a_section_named_by_the_code(measured, monkeypatch):
    """fp8 has products on Hopper in the portable code alone."""
    monkeypatch.setattr(as_gpu, "require_hopper", lambda: None)
    [a100], [portable] = (parts_as(code, ["d12"]) for code in ("a100", "h100-portable"))
    assert [part.key for part in a100] == ["steps.d12.bf16", "ops.d12.bf16"]
    assert [part.key for part in portable][:2] == ["steps.d12.bf16", "steps.d12.fp8"]
    part = Part("steps.d12.bf16", 1, lambda limit, env: dict(ms=5.0))
    monkeypatch.setattr(results, "parts_as", lambda code, sizes: [[part]])
    _, record = measured([], [], "--as", "a100", gpu="NVIDIA H100", command="run")
    assert [*record] == ["h100_sm_80_code"]
    assert record["h100_sm_80_code"]["meta"]["gpu"] == "sm_80 code on NVIDIA H100"


STANDIN = """
import json, sys
words = sys.argv[1:]
if "rowwise" in words:
    sys.exit("no torchao")
if "--micro_steps" in words:
    assert words[words.index("--micro_steps") + 1] == "2"  # of 65,536 tokens
if "--json" in words:
    alone = [dict(alone=[ms - 2] * 3) for ms in (12.0, 13.0)]
    ranks = [{**times, "in step": [12.0], "together": [12.5]} for times in alone]
    operation = dict(name="matmul", ms=5.0, floor_ms=4.0)
    step = dict(step_ms=9.0, floors_ms=8.0, joules=6.0, operations=[operation])
    found = [step] if "ops" in words else dict(ranks=ranks)
    open(words[words.index("--json") + 1], "w").write(json.dumps(found))
print(json.dumps(dict(ms=100.0, joules=None, gib=2.0, planned=1.5, first_step=3.0)))
"""


def test_parts_keep_what_the_programs_report(monkeypatch, tmp_path):
    """Each program is replaced by one that reports at once."""
    (tmp_path / "standin.py").write_text(STANDIN)
    run = subprocess.run

    def replaced(command, **more):
        return run([sys.executable, str(tmp_path / "standin.py"), *command[2:]], **more)

    monkeypatch.setattr(subprocess, "run", replaced)
    groups = [*parts_of(["d12", "d48"], "h100"), joint_parts(["d12", "d48"], 2)]
    parts = {part.key: part for group in groups for part in group}

    def found(key):
        return parts[key].measure(60.0, {"TRITON_CACHE_DIR": "x"})

    step = dict(ms=100.0, gib=2.0, planned=1.5, tok_s=655_360.0, recompute="gelu")
    assert found("steps.d12.bf16") == step and found("steps.d48.torch")["tok_s"] == 163_840
    assert {found(f"muon.d12.{arm}")["tok_s"] for arm in ("fp8", "torch")} == {1_310_720.0}
    assert found("first_step.d12.torch") == dict(cold_s=3.0, warm_s=3.0)
    own = found("first_step.d12.fp8")
    assert own.pop("compile_s") < 60.0 and own == dict(cold_s=3.0, warm_s=3.0, compiled_s=3.0)
    assert found("peer.d12.torchao_rowwise") == dict(absent="exit code 1")
    ops = {"ms": 9.0, "floor_ms": 8.0, "joules": 6.0, "matmul.ms": 5.0, "matmul.floor_ms": 4.0}
    assert found("ops.d12.fp8") == ops
    two = dict(alone_ms=10.5, in_step_ms=12.0, together_ms=12.5, slowest_ms=11.0)
    two |= dict(each_ms=[10.0, 11.0], batch=64, tok_s=2 * 65_536 / 12.5e-3)
    assert found("multi.d12.fp8_muon") == two


def test_parts_have_keys_that_are_unlike_and_can_be_named():
    groups = [[part.key for part in group] for group in parts_of(["d12", "d48", "d24"], "h100")]
    keys = [*sum(groups, []), *(part.key for part in joint_parts(["d12"], 2))]
    assert len(set(keys)) == len(keys)
    assert {key.partition(".")[0] for key in keys} == {*results.KINDS.split(",")}
    assert not [key for key in keys for other in keys if key.startswith(f"{other}.")]
    assert all(arm in pictures.NAMES for key in keys for arm in key.split(".")[2:])
    for group in groups:  # PyTorch's step, with which they are compared, is of the same minute
        compared = {key.split(".")[1] for key in group if key.startswith(("peer", "levels"))}
        assert {f"steps.{size}.torch" for size in compared} <= {*group}


# ---- pictures ----


def test_a_picture_of_other_figures_is_drawn_again(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "PICTURES", tmp_path)
    (tmp_path / "runs.jsonl").write_text("one")
    one = ("steps", lambda _: pictures.new_figure(2, 2), (tmp_path / "runs.jsonl",))
    monkeypatch.setattr(pictures, "DRAWN", {"one": one})
    drawn = ["docs/pictures/one.png: drawn again"]
    assert pictures.draw(RECORD, check=False) == drawn
    assert pictures.draw(RECORD, check=True) == []
    slower = RECORD["h200"] | {"steps.d12.fp8.tok_s": 1.0}
    assert pictures.draw({"h200": slower}, check=True) == drawn
    (tmp_path / "runs.jsonl").write_text("two")
    assert pictures.draw(RECORD, check=True) == drawn
