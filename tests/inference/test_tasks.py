"""Evaluation tasks: scores equal those of a plain evaluation in torch, on the command line and in training."""

import json
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from benchmarks import torch_reference
from gpt2_triton.commands import tools as app
from gpt2_triton.commands.app import main
from gpt2_triton.config.config import Config
from gpt2_triton.data.questions import Questions
from gpt2_triton.data.tasks import load_questions
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import DataError
from gpt2_triton.inference import tasks
from gpt2_triton.training.trainer import train
from tests.data.test_tasks import METRICS, ROWS, write_rows
from tests.inference.test_hellaswag import model, plain_losses  # noqa: F401  (a fixture)
from tests.support.tiny import tiny_config, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for name in ROWS:
        write_rows(folder, name)
    return folder


def next_logits(model, ids):  # noqa: F811
    """Return the logits after each token, float64 [n, V], by plain torch."""
    params = torch_reference.leaves(model.state.params.cpu(), model.dims, torch.float64)
    V = model.dims["V"]
    tokens = torch.from_numpy(np.repeat(ids[None], V, 0).astype(np.int64))
    with torch.no_grad():  # the loss of every token of the vocabulary, at every place
        targets = torch.arange(V)[:, None].expand(V, len(ids))
        losses = torch_reference.gpt2_loss(params, tokens, targets.contiguous(), V, model.dims["NH"], "none")
    return -losses.view(V, len(ids)).T.numpy()


@pytest.mark.parametrize("name", ["arc_easy", "winogrande"])
def test_scores_of_rows_with_choices_equal_a_plain_evaluation(model, folder, name):  # noqa: F811
    """Contexts and numbers of endings differ; float64 against fp32: 1e-5 is 100 roundings of a sum of losses."""
    asked = load_questions(name, folder / f"{name}.jsonl", get_tokenizer("bytes"), 0)
    answers, want = tasks.answer(model, name, asked), plain_losses(model, asked)
    np.testing.assert_allclose(answers.losses, want, rtol=1e-5)
    rows = np.split(want, np.cumsum(asked.counts)[:-1])
    lengths = np.split(asked.lengths, np.cumsum(asked.counts)[:-1])
    right = [r.argmin() == label for r, label in zip(rows, asked.labels)]
    normalised = [(r / n).argmin() == label for r, n, label in zip(rows, lengths, asked.labels)]
    found = tasks.scores(asked, answers)
    assert found["rows"] == 2 and found["acc"] == np.mean(right)
    assert found.get("acc_norm") == (np.mean(normalised) if name == "arc_easy" else None)


def test_lambada_counts_words_of_most_likely_tokens_alone(model):  # noqa: F811
    """Endings made of the most likely tokens match, those with one other token do not."""
    context = np.frombuffer(b"To be, or not", np.uint8)
    greedy = context.tolist()
    for _ in range(3):
        greedy.append(int(next_logits(model, np.array(greedy))[-1].argmax()))
    best = greedy[len(context) :]
    endings = [best, best[:1], [*best[:2], (best[2] + 1) % 256], [(best[0] + 1) % 256, *best[1:]]]
    asked = Questions(
        [context.astype(np.uint16)] * 4, [np.array(ending, np.uint16) for ending in endings], np.ones(4),
        np.ones(4, np.int64), np.zeros(4, np.int64), METRICS["lambada"],
    )  # fmt: skip
    answers, want = tasks.answer(model, "lambada", asked), plain_losses(model, asked)
    assert answers.greedy.tolist() == [True, True, False, False]
    found = tasks.scores(asked, answers)
    assert found == {
        "rows": 4,
        "perplexity": pytest.approx(math.exp(want.mean()), rel=1e-4),  # an error of 1e-5 in a loss of 5
        "acc": 0.5,
        "acc_stderr": pytest.approx(math.sqrt(0.25 / 3)),
    }


def test_greedy_matches_take_a_vocabulary_in_parts():
    """The scratch of a tiny model holds fewer logits than its vocabulary has tokens."""
    tiny, _ = tiny_model(model=dict(vocab_size=1000))
    assert tiny.view(1, 16).a.scratch.numel() < 1000
    ids = np.arange(16, dtype=np.int32)[None]
    best = next_logits(tiny, ids[0]).argmax(1).astype(np.int32)
    targets = np.where(np.arange(16) % 3, best, (best + 300) % 1000).astype(np.int32)
    targets[0] = -1
    assert tasks.greedy_matches(tiny, ids, targets[None]).tolist() == [i == 0 or bool(i % 3) for i in range(16)]


@pytest.mark.slow
def test_training_logs_tasks_and_the_command_prints_the_same(tmp_path, folder, capsys):
    asked = dict(every=0, tasks=["lambada", "piqa"], tasks_every=1, tasks_data=str(folder), tasks_limit=1)
    config = tiny_config(
        eval=asked, model=dict(block_size=96), train=dict(steps=1, batch_size=6, seq_len=16), checkpoint=dict(every=1)
    )
    assert train(config, tmp_path / "run", resume=False) == 0
    [logged] = [
        record
        for record in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if "piqa_acc" in record
    ]
    assert list(logged) == ["step", "lambada_perplexity", "lambada_acc", "piqa_acc", "piqa_acc_norm"]
    printed = capsys.readouterr().out
    assert (
        f"lambada perplexity {logged['lambada_perplexity']:.4f}, acc {logged['lambada_acc']:.4f}; piqa acc" in printed
    )
    words = ["--tasks", "lambada,piqa", "--data", str(folder), "--limit", "1", "--json", str(tmp_path / "out.json")]
    assert main(app, ["evaluate", str(tmp_path / "run"), *words]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["tasks"]
    for key, value in logged.items():
        task, _, metric = key.partition("_")
        # batches differ, and so do sums in the interpreter
        assert key == "step" or found[task][metric] == pytest.approx(value, rel=1e-6)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lambada")]
    acc, error, perplexity = line.split()[2:]
    assert (acc, perplexity) == (f"{found['lambada']['acc']:.4f}", f"{found['lambada']['perplexity']:.2f}")


def test_mistakes_are_one_line(tmp_path, folder, capsys):
    for words, code, message in (
        (
            ["--tasks", "mmlu"],
            2,
            "--tasks: unknown task mmlu; known are hellaswag, lambada, arc_easy, piqa, winogrande",
        ),
        (["--data", str(folder / "piqa.jsonl")], 2, "piqa.jsonl is no folder of TASK.jsonl; give one, or one task"),
    ):
        assert main(app, ["evaluate", "none", *words]) == code
        err = capsys.readouterr().err
        assert message in err and len(err.splitlines()) == 1
    for wrong, message in (
        ("hellaswag", "set eval.hellaswag_every"),
        ("mmlu", "unknown task mmlu; known"),
        ("ARC-easy", "did you mean arc_easy?"),
    ):
        with pytest.raises(ValidationError, match=message):
            Config.model_validate(dict(eval=dict(tasks=wrong)))
    assert Config.model_validate(dict(eval=dict(tasks=["piqa", "piqa", "lambada"]))).eval.tasks == "piqa,lambada"


def test_an_ending_too_long_ends_training_and_the_command_before_the_first_step_or_task(tmp_path, monkeypatch, capsys):
    row = {"goal": "open", "sol1": "a" * 17, "sol2": "b", "label": 0}
    (tmp_path / "piqa.jsonl").write_text(json.dumps(row))
    (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": "the cat sat"}))
    asked = dict(every=0, tasks="lambada,piqa", tasks_every=1, tasks_data=str(tmp_path))
    config = tiny_config(train=dict(steps=1), eval=asked, checkpoint=dict(every=1))
    message = "piqa: an ending too long: got 18 tokens in row 1, expected 16 or fewer"
    with pytest.raises(DataError, match=message):
        train(config, tmp_path / "run", resume=False)
    assert "step 1/1" not in capsys.readouterr().out
    train(tiny_config(train=dict(steps=1)), tmp_path / "other", resume=False)
    monkeypatch.delattr(tasks, "answer")  # no evaluation begins
    words = ["evaluate", str(tmp_path / "other"), "--tasks", "lambada,piqa", "--data", str(tmp_path)]
    assert main(app, words) == DataError.exit_code
    assert message in capsys.readouterr().err
