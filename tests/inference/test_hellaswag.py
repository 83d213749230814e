"""HellaSwag: losses equal a plain evaluation in torch for any batches, questions equal those of
llm.c and lm-evaluation-harness, and a mistake in a file is reported in one line.
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gpt2_triton.checkpoint.sources import load_weights
from gpt2_triton.data import hellaswag as data
from gpt2_triton.data.hellaswag import Questions
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.errors import DataError
from gpt2_triton.inference import hellaswag
from gpt2_triton.inference.load import load_for_losses
from gpt2_triton.inference.losses import Stopped, validation_loss
from tests.conftest import DEVICE
from tests.data.prepare.test_text import gpt2, llama3
from tests.support import torch_reference
from tests.support.commands import run_tool
from tests.support.loop import losses, records, train
from tests.support.tiny import tiny_config, tiny_model

ROOT = Path(__file__).parents[2]
PUBLISHED = Path(os.environ.get("HELLASWAG", ROOT / "data/hellaswag_val.jsonl"))
WORDS = [
    "a",
    "man",
    "throws",
    "the ball",
    "[step]",
    "[title] far,  away.",
    "then",
    "\N{GREEK SMALL LETTER PI}",
]


def row(i, **other):
    """Return row i of a made-up file; `other` replaces fields."""
    rng = np.random.default_rng(i)
    text = [" ".join(rng.choice(WORDS, rng.integers(1, 6))) for _ in range(6)]
    ctx_b = "" if i % 3 else text[5]
    whole = dict(
        activity_label="Sport", ctx_a=text[4], ctx_b=ctx_b, ctx=f"{text[4]} {ctx_b}".strip()
    )
    return whole | dict(endings=text[:4], label=str(i % 4), ind=i) | other


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rows_file(tmp_path):
    return write(tmp_path / "rows.jsonl", [row(i) for i in range(10)])


def completions(rows_file):
    tokenizer = get_tokenizer("bytes")
    return data.load_questions(rows_file, tokenizer, 0, ("completion",))["completion"]


def model_of(batch_size=16, vocab_size=256, dtype="fp32"):
    """Return a model with three times the initial weights: endings differ by more than
    rounding, no loss is near 70.
    """
    sizes = dict(train=dict(batch_size=batch_size, seq_len=128, dtype=dtype), eval=dict(every=0))
    model, _ = tiny_model(model=dict(block_size=192, vocab_size=vocab_size), **sizes)
    model.state.params.copy_(model.state.params.cpu() * 3)
    return model


@pytest.fixture(scope="module")
def model():
    return model_of()


def plain_losses(model, questions):
    """Return losses [endings] of plain torch in float64, one ending at a time, without padding."""
    params, losses = torch_reference.leaves(model.state.params.cpu(), model.dims, torch.float64), []
    for i, ending in enumerate(questions.endings):
        whole = torch.from_numpy(np.concatenate([questions.contexts[i], ending]).astype(np.int64))[
            None
        ]
        with torch.no_grad():
            each = torch_reference.gpt2_loss(
                params, whole[:, :-1], whole[:, 1:], model.dims["V"], model.dims["NH"], "none"
            )
        losses.append(float(each[-len(ending) :].sum()))
    return np.array(losses)


# ---- scores ----


@pytest.mark.parametrize("style", ["completion", "harness"])
def test_ending_losses_equal_a_plain_evaluation(model, rows_file, style):
    """float64 against fp32: 1e-5 is 100 roundings of a sum of up to 70
    losses; predictions are equal.
    """
    questions = data.load_questions(rows_file, get_tokenizer("bytes"), 0, (style,))[style]
    losses, want = hellaswag.ending_losses(model, questions), plain_losses(model, questions)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    np.testing.assert_array_equal(
        hellaswag.predictions(questions, losses), hellaswag.predictions(questions, want)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "config_class, model_class, more",
    [(LlamaConfig, LlamaForCausalLM, {}), (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=128))],
)
def test_a_llama_has_transformers_scores(rows_file, tmp_path, config_class, model_class, more):
    """By the command, which imports the weights that transformers has saved."""
    sizes = dict(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=1, intermediate_size=176
    )
    config = config_class(
        vocab_size=256,
        num_hidden_layers=2,
        max_position_embeddings=192,
        initializer_range=0.06,
        **sizes,
        **more,
    )
    torch.manual_seed(0)
    theirs, directory = model_class(config), str(tmp_path / "llama")
    for p in theirs.parameters():
        if p.dim() == 1:  # norms' weights, of heads too
            p.data.uniform_(0.5, 1.5)
    theirs.save_pretrained(directory)
    questions, out = (
        data.load_questions(rows_file, get_tokenizer("bytes"), 2, tuple(data.STYLES)),
        tmp_path / "out",
    )
    words = f"--data {rows_file} --limit 2 --batch_tokens 1000 --dtype fp32 --json {out}"
    assert run_tool(f"hellaswag {directory} {words}") == 0
    model = load_for_losses(*load_weights(directory)[:2], 1000, "fp32")
    for style, asked in questions.items():
        want = []
        for context, ending in zip(asked.contexts, asked.endings, strict=True):
            ids = torch.from_numpy(np.concatenate([context, ending]).astype(np.int64))[None]
            with torch.no_grad():
                logits = theirs(ids[:, :-1]).logits[0].log_softmax(-1)
            want.append(-logits.gather(1, ids[0, 1:, None])[-len(ending) :].sum().item())
        np.testing.assert_allclose(hellaswag.ending_losses(model, asked), want, rtol=1e-5)
        assert json.loads(out.read_text())[style] == hellaswag.scores(asked, np.array(want))


@pytest.mark.gpu
def test_batching_changes_no_bit_on_a_gpu(rows_file):
    questions = completions(rows_file)
    losses = [hellaswag.ending_losses(model_of(b, dtype="bf16"), questions) for b in (1, 3, 16)]
    np.testing.assert_array_equal(losses[0], losses[1])
    np.testing.assert_array_equal(losses[0], losses[2])


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.integers(100, 400))
def test_batches_hold_every_sequence_once_and_fit(lengths, budget):
    lengths, seen, shapes = np.array(lengths), [], set()
    for chosen, T in hellaswag.batches(lengths, budget, 100):
        assert (
            0 < len(chosen) * T <= budget
            and lengths[chosen].max() <= T
            and (T % 32 == 0 or T == 100)
        )
        assert T - lengths[chosen].max() < 32
        seen += chosen.tolist()
        shapes.add(T)
    assert sorted(seen) == list(range(len(lengths))) and len(shapes) <= 4


def test_long_contexts_lose_their_beginning(model):
    """As in lm-evaluation-harness, the model sees the last 192 tokens before
    the last one of the ending.
    """
    context, ending = np.arange(300, dtype=np.uint16) % 256, np.arange(8, dtype=np.uint16)
    whole = Questions([context] * 4, [ending] * 4, np.full(4, 8.0), np.array([0]))
    cut = whole._replace(contexts=[context[-(192 + 1 - 8) :]] * 4)
    np.testing.assert_array_equal(
        *(hellaswag.ending_losses(model, asked) for asked in (whole, cut))
    )
    too_long = whole._replace(endings=[np.zeros(193, np.uint16)] * 4)
    hellaswag.require_fitting(model, whole)
    with pytest.raises(
        DataError,
        match="longest ending has 193 tokens, .* sees 192 at once; .*block_size of 193 or",
    ):
        hellaswag.require_fitting(model, too_long)


def test_scores_are_fractions_and_standard_errors_by_sum_and_by_length():
    """Two rows; the second ending of the first row is empty after the clean-up and
    is not chosen for any loss.
    """
    losses = np.array([4.0, 3.0, 9.0, 9.0, 1.0, 4.0, 8.0, 8.0])
    lengths = np.array([4.0, 0.0, 1.0, 1.0, 1.0, 8.0, 1.0, 1.0])
    asked = Questions([], [], lengths, np.array([0, 0]))
    scores = hellaswag.scores(asked, losses)
    assert scores == {
        "rows": 2,
        "acc": 0.5,
        "acc_stderr": 0.5,
        "acc_norm": 0.5,
        "acc_norm_stderr": 0.5,
    }
    predictions = hellaswag.predictions(asked, losses)
    assert [chosen.tolist() for chosen in predictions] == [[1, 0], [0, 1]]


# ---- questions ----


def test_completion_questions_are_the_plain_text(rows_file):
    asked = data.load_questions(rows_file, gpt2(), 3, ("completion",))["completion"]
    rows = [row(i) for i in range(3)]
    assert [gpt2().decode(t) for t in asked.contexts[::4]] == [r["ctx"] for r in rows]
    assert [gpt2().decode(t) for t in asked.endings] == [
        " " + e for r in rows for e in r["endings"]
    ]
    assert asked.lengths.tolist() == [len(t) for t in asked.endings]
    assert asked.labels.tolist() == [0, 1, 2]


def test_harness_questions_equal_lm_evaluation_harness(tmp_path):
    """The expected texts are worked out by hand from its rules: capitalised ctx_b; " [title]" is ".
    "; other brackets go; two spaces become one; length in characters.
    """
    published = row(
        0, activity_label="Clean and jerk", ctx_a="A lady [header] Lifts. [step]",
        ctx_b="she DROPS [x]",
        endings=["it [title] now.", "a  b", "\N{GREEK SMALL LETTER PI}", " [substeps] x"],
    )  # fmt: skip
    asked = data.load_questions(write(tmp_path / "r.jsonl", [published]), gpt2(), 0, ("harness",))[
        "harness"
    ]
    assert gpt2().decode(asked.contexts[0]) == "Clean and jerk: A lady Lifts. She drops"
    # the context's last space moves to the ending
    assert [gpt2().decode(t) for t in asked.endings] == [
        "  it. now.",
        "  a b",
        "  \N{GREEK SMALL LETTER PI}",
        "   x",
    ]
    assert asked.lengths.tolist() == [8.0, 3.0, 1.0, 2.0]


@pytest.mark.parametrize("tokenizer, begin", [(gpt2, []), (llama3, [128000])])
def test_endings_have_the_same_tokens_alone_and_after_their_context(rows_file, tokenizer, begin):
    """lm-evaluation-harness tokenises both together and cuts; here each
    ending is tokenised alone.
    """
    t = tokenizer()
    asked = data.load_questions(rows_file, t, 0, ("harness",))["harness"]
    for context, ending in zip(asked.contexts, asked.endings, strict=True):
        context, ending = context.tolist(), ending.tolist()
        whole = t.encode(t.decode(context[len(begin) :]) + t.decode(ending))
        assert begin + whole.tolist() == context + ending


def test_a_file_that_is_missing_or_of_another_kind_is_reported_in_one_line(tmp_path):
    with pytest.raises(
        DataError, match=re.escape(f"get it with `curl -LO {data.URL}` for --data FILE; a run")
    ):
        data.load_questions(tmp_path / "none.jsonl", gpt2(), 0, ("completion",))
    write(path := tmp_path / "rows.jsonl", [row(0), row(0, label=4)])
    with pytest.raises(
        DataError,
        match="rows.jsonl: not rows of HellaSwag: Input should be less than 4; get it with",
    ):
        data.load_questions(path, get_tokenizer("bytes"), 0, ("completion",))
    # the first row alone is good
    data.load_questions(path, get_tokenizer("bytes"), 1, ("completion",))


# ---- in training ----


class MadeUpLosses:
    """A model whose loss of a token follows from the token and the one before it."""

    B, T, config = 2, 64, tiny_config(model=dict(block_size=64))

    def evaluate(self, ids, targets, fp8=False):
        return torch.from_numpy(
            np.where(targets < 0, 0, np.sin(7.0 * ids + 3.0 * targets) + 1).reshape(-1)
        )


def test_each_of_two_ranks_has_the_scores_of_one(rows_file):
    questions = completions(rows_file)
    model, store = MadeUpLosses(), torch.distributed.HashStore()

    def evaluate(*group):
        return hellaswag.evaluate(model, questions, *group)

    with ThreadPoolExecutor(2) as ranks:
        together = ranks.map(
            lambda rank: evaluate(ControlGroup("hellaswag", rank, 2, store)), range(2)
        )
        assert [*together] == [evaluate()] * 2
    parts = [
        hellaswag.ending_losses(model, questions, ControlGroup("", rank, 2)) for rank in range(2)
    ]
    assert np.array_equal(sum(parts), hellaswag.ending_losses(model, questions))
    for part in parts:  # neither has the scores without the other
        assert part.any() and hellaswag.scores(questions, part) != evaluate()


def test_stop_on_one_rank_breaks_off_the_evaluation_on_both(rows_file):
    questions = completions(rows_file)
    model, store = MadeUpLosses(), torch.distributed.HashStore()
    loader = SimpleNamespace(batches=lambda *_: [(np.zeros((2, 64), np.int32),) * 2], tokens=128)

    def evaluate(rank):
        for evaluation, made_of in ((hellaswag.evaluate, questions), (validation_loss, loader)):
            group = ControlGroup(evaluation.__name__, rank, 2, store)
            with pytest.raises(Stopped):
                evaluation(model, made_of, group, lambda: rank == 1)

    with ThreadPoolExecutor(2) as ranks:
        assert [*ranks.map(evaluate, range(2))] == [None, None]


@pytest.mark.slow
def test_training_evaluates_when_due_without_changing_a_bit(tmp_path, rows_file, capsys):
    asked = dict(every=0, hellaswag_every=1, hellaswag_data=str(rows_file), hellaswag_limit=2)
    sizes = dict(model=dict(block_size=192), train=dict(steps=2, batch_size=2, seq_len=128))
    for name, evaluation in (("with", asked), ("without", dict(every=0))):
        assert train(tiny_config(eval=evaluation, **sizes), tmp_path / name) == 0
    found = [record for record in records(tmp_path / "with") if "hellaswag" in record]
    assert [record["step"] for record in found] == [1, 2]
    assert all(
        record[key] in (0, 0.5, 1) for record in found for key in ("hellaswag", "hellaswag_acc")
    )
    out = capsys.readouterr().out
    assert f"hellaswag acc_norm {found[-1]['hellaswag']:.4f}" in out
    announced = 2 if DEVICE == "cpu" else 0  # a GPU is quick
    assert out.count("\nanswering 2 questions of HellaSwag\n") == announced
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_training_refuses_bad_rows_before_the_first_step(tmp_path):
    asked = dict(every=0, hellaswag_every=2, hellaswag_data=str(tmp_path / "none.jsonl"))
    todo = "a run takes eval.hellaswag_data, or eval.hellaswag_every 0$"
    with pytest.raises(
        DataError, match=f"none.jsonl: cannot read or write: .*`curl -LO http.*`.* {todo}"
    ):
        train(tiny_config(eval=asked), tmp_path / "run")
