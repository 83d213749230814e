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
    assert results.read()["losses"] == results.losses()


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
    assert strays("a step takes 80.8 ms\n1.52x as fast\n<!-- r: table a -->80.8 ms<!-- /r -->") == [
        "a step takes 80.8 ms",
        "1.52x as fast",
    ]
    found = {
        page: strays(page.read_text(encoding="utf-8"))
        for page in pages.files()
        if page.suffix == ".md"
    }
    assert not {page.name: lines for page, lines in found.items() if lines}


SENTENCES = yaml.safe_load(Path(__file__).with_name("sentences.yaml").read_text())


@pytest.mark.parametrize("page", SENTENCES)
def test_rounded_figures_of_sentences_are_the_record_s(page):
    text = " ".join((pages.ROOT / page).read_text(encoding="utf-8").split())
    figures = flat(results.read())
    for words, expression, least, most in SENTENCES[page]:
        assert words in text, f"{page} no longer says: {words}"
        value = value_of(expression, figures)
        assert least <= value <= most, f"{page}: {words}: {value:.4g}"


# ---- measuring ----


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """measured(groups, joint, *words) runs parts on two GPUs, and returns the
    exit code and the record.
    """
    out = tmp_path / "record.json"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")

    def run(groups, joint, *words, **meta):
        monkeypatch.setattr(
            results, "machine", lambda commit: ("h100", META | dict(commit="one", gpus=2) | meta)
        )
        monkeypatch.setattr(results, "parts_of", lambda sizes, gpu: groups)
        monkeypatch.setattr(results, "joint_parts", lambda sizes, gpus: joint)
        code = main(
            results.app, ["run", "--out", str(out), "--seconds", "500", "--commit", "one", *words]
        )
        return code, json.loads(out.read_text()) if out.exists() else None

    return run


def test_run_measures_what_is_missing_and_begins_again_at_a_new_commit(measured, capsys):
    calls = []

    def part(key, seconds=1, fails=False):
        def measure(limit, env):
            calls.append((key, env.get("CUDA_VISIBLE_DEVICES")))
            if fails:
                raise OSError("no memory left")
            return dict(ms=80.123456, recompute="gelu")

        return Part(key, seconds, measure)

    def keys():
        found = [key for key, _ in calls]
        calls.clear()
        return sorted(found)

    bf16, fp8, ops, two = "steps.d12.bf16", "steps.d12.fp8", "ops.d12.bf16", "multi.d12.fp8"
    groups, joint = [[part(bf16), part(fp8, fails=True)], [part(ops, 450)]], [part(two, 60)]
    assert measured(groups, joint, "--plan") == (0, None) and keys() == []
    assert "steps.d12.bf16 1 s, steps.d12.fp8 1 s" in capsys.readouterr().out
    code, record = measured(groups, joint)
    assert code == 1 and {gpu for key, gpu in calls if key.startswith("steps")} < {"4", "5"}
    assert (two, None) == calls[-1] and keys() == [two, bf16, fp8]
    found = {f"{bf16}.ms": 80.123, f"{bf16}.recompute": "gelu"}
    assert record["h100"] == {"meta": META | dict(commit="one", gpus=1)} | found
    assert record["h100x2"][f"{two}.ms"] == 80.123 and record["h100x2"]["meta"]["gpus"] == 2
    text, err = capsys.readouterr()
    # `two` needs the time
    assert f"{ops}: left for another run" in text and f"{fp8}: failed: no memory left" in err
    groups = [[part(bf16), part(fp8)], [part(ops)]]
    assert measured(groups, joint, "--parts", "steps")[0] == 0 and keys() == [fp8]
    code, record = measured(groups, joint, commit="two")
    assert (
        code == 0
        and keys() == sorted([two, ops, bf16, fp8])
        and record["h100"]["meta"]["commit"] == "two"
    )
    code, record = measured(groups, [part(two, 60, fails=True)], commit="two", torch="2.12")
    assert code == 1 and keys() == sorted([two, ops, bf16, fp8]) and record.keys() == {"h100"}
    assert (
        measured(groups, joint, "--parts", "step")[0]
        == main(results.app, ["run", "--out", "no/r.json"])
        == 2
    )


def test_a_first_step_has_caches_of_its_own_and_no_joint_part_no_section(measured):
    caches = dict.fromkeys(
        ("first_step.d12.fp8", "first_step.d12.bf16", "steps.d12.bf16", "ops.d12.fp8"), ""
    )
    measures = {
        key: lambda _, env, key=key: dict(ms=caches.update({key: env["TRITON_CACHE_DIR"]}))
        for key in caches
    }
    groups = [[Part(key, 1, measures[key]) for key in caches]]
    _, record = measured(groups, [], "--parts", "first_step,steps,ops")
    first, second, steps, ops = caches.values()
    assert len({first, second, steps}) == 3 and steps == ops and record.keys() == {"h100"}


def test_another_gpu_s_code_has_a_section_named_by_the_code(measured, monkeypatch):
    """Of one GPU, without PyTorch's figures; fp8 has products on Hopper
    in the portable code alone.
    """
    monkeypatch.setattr(as_gpu, "require_hopper", lambda: None)
    found = {}
    for code in ("a100", "h100-portable"):
        found[code] = [part.key for group in parts_as(code, ["d12", "d48"]) for part in group]
    assert found["a100"] == ["steps.d12.bf16", "ops.d12.bf16", "steps.d48.bf16", "ops.d48.bf16"]
    assert found["h100-portable"][:3] == ["steps.d12.bf16", "steps.d12.fp8", "ops.d12.bf16"]
    part = Part("steps.d12.bf16", 1, lambda limit, env: dict(ms=5.0))
    monkeypatch.setattr(results, "parts_as", lambda code, sizes: [[part]])
    code, record = measured([], [], "--as", "a100", gpu="NVIDIA H100 80GB HBM3", command="run")
    assert (
        code == 0
        and [*record] == ["h100_sm_80_code"]
        and record["h100_sm_80_code"]["steps.d12.bf16.ms"] == 5.0
    )
    meta = record["h100_sm_80_code"]["meta"]
    assert (meta["gpu"], meta["gpus"], meta["command"]) == (
        "sm_80 code on NVIDIA H100 80GB HBM3",
        1,
        "run --as a100",
    )


STANDIN = """
import json, sys
words = sys.argv[1:]
if "rowwise" in words:
    sys.exit("no torchao")
if "--json" in words:
    ranks = [dict([("alone", [ms - 2] * 3), ("in step", [12.0]), ("together", \
[ms])]) for ms in (12.0, 13.0)]
    operation = dict(name="matmul", ms=5.0, floor_ms=4.0)
    step = dict(step_ms=9.0, floors_ms=8.0, joules=6.0, operations=[operation])
    found = [step] if "ops" in words else dict(ranks=ranks)
    open(words[words.index("--json") + 1], "w").write(json.dumps(found))
print(json.dumps(dict(ms=100.0, joules=None, gib=2.0, planned=1.5, first_step=3.0)))
"""


def test_parts_keep_what_the_programs_report(monkeypatch, tmp_path):
    """Each program is replaced by one that reports at once."""
    (tmp_path / "standin.py").write_text(STANDIN)
    calls, run, env = list[list[str]](), subprocess.run, {"TRITON_CACHE_DIR": "x"}

    def replaced(command, **more):
        calls.append(command)
        return run([sys.executable, str(tmp_path / "standin.py"), *command[2:]], **more)

    monkeypatch.setattr(subprocess, "run", replaced)
    groups = [*parts_of(["d12", "d48"], "h100"), joint_parts(["d12", "d48"], 2)]
    found = {part.key: part.measure(60.0, env) for group in groups for part in group}
    step = dict(ms=100.0, gib=2.0, planned=1.5, tok_s=655_360.0, recompute="gelu")
    assert found["steps.d12.bf16"] == step and found["steps.d48.torch"]["tok_s"] == 163_840
    assert {found[f"muon.d12.{arm}"]["tok_s"] for arm in ("bf16", "fp8", "torch")} == {1_310_720.0}
    assert found["first_step.d12.torch"] == dict(cold_s=3.0, warm_s=3.0)
    for arm in ("fp8", "bf16"):
        own = found[f"first_step.d12.{arm}"]
        assert own.pop("compile_s") < 60.0 and own == dict(cold_s=3.0, warm_s=3.0, compiled_s=3.0)
    assert found["peer.d12.torchao_rowwise"] == dict(absent="exit code 1")
    assert found["ops.d12.fp8"] == {
        "ms": 9.0,
        "floor_ms": 8.0,
        "joules": 6.0,
        "matmul.ms": 5.0,
        "matmul.floor_ms": 4.0,
    }
    two = dict(
        batch=64,
        alone_ms=10.5,
        in_step_ms=12.0,
        together_ms=12.5,
        slowest_ms=11.0,
        each_ms=[10.0, 11.0],
    )
    assert found["multi.d12.fp8_muon"] == two | dict(tok_s=2 * 65_536 / 12.5e-3)
    assert [" ".join(call[-2:]) for call in calls].count("--fp8.keep_bf16 head") == 2
    assert (
        sum("--torch" in call for call in calls) == 2 and found["multi.llama_1b.fp8"]["batch"] == 8
    )


def test_parts_have_different_keys_and_kinds_that_can_be_named():
    groups = [[part.key for part in group] for group in parts_of(["d12", "d48", "d24"], "h100")]
    keys = [*sum(groups, []), *(part.key for part in joint_parts(["d12"], 2))]
    peers = [
        (key.split(".")[1], group)
        for group in groups
        for key in group
        if key.startswith(("peer", "levels"))
    ]
    # `speed` compares them
    assert len(peers) == 10 and all(f"steps.{size}.torch" in group for size, group in peers)
    assert len(set(keys)) == len(keys) and {key.partition(".")[0] for key in keys} == {
        *results.KINDS.split(",")
    }
    assert not [key for key in keys for other in keys if key.startswith(f"{other}.")]
    assert all(arm in pictures.NAMES for key in keys for arm in key.split(".")[2:])


# ---- pictures ----


def test_a_picture_of_other_figures_is_drawn_again(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "PICTURES", tmp_path)
    monkeypatch.setitem(
        pictures.DRAWN, "scale", ("none", lambda _: pictures.new_figure(2, 2), (pictures.SCALE,))
    )
    names = [f"docs/pictures/{name}.png: drawn again" for name in pictures.DRAWN]
    assert pictures.draw({}, check=True) == names[2:]  # the others are not measured
    assert pictures.draw(RECORD, check=True) == names == pictures.draw(RECORD, check=False)
    assert pictures.draw(RECORD, check=True) == []
    slower = RECORD["h200"] | {"steps.d12.fp8.tok_s": 1.0}
    assert pictures.draw({"h200": slower}, check=True) == names[:1]
