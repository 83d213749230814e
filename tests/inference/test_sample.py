"""Generation: tokens equal those of full forward passes, across windows, batches
and seeds; text is streamed.
"""

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gpt2_triton.kernels as K
from gpt2_triton.checkpoint.save import Retention, save_checkpoint
from gpt2_triton.commands import sample as sample_command
from gpt2_triton.data.tokenizer import ByteTokenizer
from gpt2_triton.errors import UserError
from gpt2_triton.inference import generate, load, sample
from gpt2_triton.inference.sampling import Sampling
from gpt2_triton.model import schedule
from gpt2_triton.model.gpt2 import schedule as layers
from gpt2_triton.model.memory_plan import bytes_by_kind
from gpt2_triton.model.model import Model
from tests.conftest import DEVICE
from tests.kernels.test_sampling import kept, scores
from tests.support import checkpoints
from tests.support.commands import run_tool
from tests.support.models import train_steps
from tests.support.tiny import tiny_config, tiny_model

PROMPT = [72, 101, 108, 108, 111]
GREEDY, PLAIN, CUT = Sampling(0.0), Sampling(), Sampling(0.8, 20, 0.9)


def randomised(model: Model) -> Model:
    """Set random weights with which no token is certain and the layers matter more than
    the last token's embedding.
    """
    generator = torch.Generator().manual_seed(0)
    model.state.params.copy_(0.2 * torch.randn(model.state.params.shape, generator=generator))
    model.train_view.w.wte.mul_(0.5)
    model.train_view.w.lnw.fill_(1.0)
    return model


def decoder(texts: int = 1, **sections) -> Model:
    batch = -(-texts // 16)
    return randomised(Model(tiny_config(**sections), K, DEVICE, batch=batch, sequences=texts))


def generated(model: Model, count: int, how: tuple, seeds=(1,), prompt=PROMPT) -> list[list[int]]:
    """Return the tokens of each text."""
    steps = generate.generate(model, [prompt] * len(seeds), count, seeds, Sampling(*how))
    return [list(text) for text in zip(*steps)]


def window(text: list[int], prompt: int, T: int) -> list[int]:
    """Return the window: all of a text up to T tokens; then the newest T // 2 and the
    next tokens, again up to T.
    """
    begin = 0
    for length in range(prompt, len(text) + 1):
        if length - begin > T:
            begin = length - T // 2
    return text[begin:]


def full_logits(model: Model, ids: np.ndarray) -> np.ndarray:
    """Return the logits [B*T, V] of the training kernels' forward pass; the
    last product is in float64.
    """
    v = model.view(*ids.shape)
    v.ids.copy_(torch.from_numpy(ids))
    layers.embed(K, v)
    schedule.block(K, layers, v)
    schedule.final_norm(K, v)
    return (v.a.lnf.double() @ v.w.wte.double().T)[:, : v.V].cpu().numpy()


def by_full_forward(model: Model, count: int, how: tuple, seed: int, prompt=PROMPT) -> list[int]:
    """Compute each token by the training kernels' forward pass over its
    window, and sample it in numpy.
    """
    text, (temperature, top_k, top_p) = list(prompt), how
    for drawn in range(count):
        seen = window(text, len(prompt), model.T)
        ids = np.zeros((1, model.T), np.int32)
        ids[0, : len(seen)] = seen
        z = full_logits(model, ids)[len(seen) - 1]
        if temperature:
            z = np.where(
                kept(z, temperature, top_k, top_p), scores(z, seed, drawn, temperature), -np.inf
            )
        text.append(int(z.argmax()))
    return text[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how,count", [(GREEDY, 15), (PLAIN, 14), (CUT, 13)], ids=["greedy", "plain", "cut"]
)
def test_generate_equals_full_forward_passes(how, count):
    """fp32; at the 13th token a new window begins."""
    model = decoder()
    got = generated(model, count, how, seeds=[5])
    assert got == [by_full_forward(model, count, how, seed=5)]
    assert len(set(got[0])) > 3  # repeating the last token would not pass


@pytest.mark.parametrize("length", [1, 16, 40])
def test_generate_takes_prompts_of_any_length(length):
    """One token, which needs no forward pass; lengths at and above the window of 16."""
    model, prompt = decoder(), [7 * i % 256 for i in range(length)]
    assert generated(model, 4, GREEDY, prompt=prompt) == [
        by_full_forward(model, 4, GREEDY, 0, prompt)
    ]


@pytest.mark.skipif(DEVICE == "cuda", reason="a graph has the rows of the context")
def test_a_prompt_takes_no_more_rows_than_it_needs():
    """Multiples of 32, which are few shapes; also in a window that moves, or by a graph."""
    model = decoder(train=dict(seq_len=80), model=dict(block_size=80))
    model.eager = False
    model._graphs = lambda launches, *args: launches(*args)
    for length, rows, count in ((3, 32, 1), (33, 64, 1), (70, 80, 12)):
        prompt = [7 * i % 256 for i in range(length)]
        model._views.clear()
        got = generated(model, count, GREEDY, prompt=prompt)
        assert {T for _, T, _ in model._views} == {1, rows, 64 if length == 70 else rows}
        assert got == [by_full_forward(model, count, GREEDY, 0, prompt)]


def test_seeds_have_62_bits():
    model = decoder(2)
    generate.place(model, [PROMPT] * 2, 0, [(1 << 62) - 1, 1 << 62])
    largest = (1 << 31) - 1
    assert model.decoding.seq[:, 3:].tolist() == [[largest, largest], [0, 0]]


@pytest.mark.slow
def test_texts_of_several_prompts_equal_single_texts():
    """Windows of 16 move at different steps; the first prompt is cut, the last two are neighbours
    with one window.
    """
    prompts = [[7 * i % 256 for i in range(n)] for n in (40, 1, 11)]
    prompts.append(prompts[-1])
    steps = generate.generate(decoder(4), prompts, 20, range(4), PLAIN)
    for seed, (prompt, text) in enumerate(zip(prompts, zip(*steps), strict=True)):
        assert [[*text]] == generated(decoder(), 20, PLAIN, [seed], prompt)


@pytest.mark.slow
def test_generate_takes_more_texts_than_the_window_has_tokens():
    """Rows of a step are sequences, rows of a prompt are tokens:
    neither number bounds the other.
    """
    texts = generated(decoder(18), 2, PLAIN, seeds=range(18))
    assert len(texts) == 18 and texts[:1] == generated(decoder(), 2, PLAIN, seeds=[0])


@pytest.mark.slow
def test_sample_in_training_equals_its_weights_and_changes_no_bit():
    """The cache shares memory with the backward pass: the text is the same, and the
    next step has the same bits.
    """
    sampling, plain = tiny_model(sample=dict(every=1))[0], tiny_model()[0]
    assert train_steps(sampling, 1) == train_steps(plain, 1)
    alone = decoder()
    alone.state.params.copy_(sampling.state.params)
    assert generated(sampling, 5, GREEDY) == generated(alone, 5, GREEDY)
    assert train_steps(sampling, 1) == train_steps(plain, 1)
    assert torch.equal(sampling.state.params, plain.state.params)


def test_no_token_without_a_text_is_drawn():
    free, limited = (decoder(model=dict(vocab_size=300)) for _ in range(2))
    for model in (free, limited):
        model.train_view.w.wte[256:300].mul_(50)
    sample.limit(limited, ByteTokenizer())
    assert max(*generated(free, 4, GREEDY)) >= 256
    assert max(*generated(limited, 4, GREEDY)) < 256


def test_a_sample_in_training_follows_its_section(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "stream", lambda _, tokenizer, *given: [str(given)])
    section = dict(prompt="Hi", tokens=3, temperature=0.5, top_k=7)
    config = tiny_config(sample=section, train=dict(seed=9))
    text = sample.sample_in_training(None, config, tmp_path)
    assert text == f"Hi{('Hi', 3, Sampling(0.5, 7), 9, tmp_path)}"


def test_cache_takes_no_memory_where_the_backward_pass_needs_more():
    """The cache of 16 KiB fits the 2 x 16 x 4 x 64 floats of dfch,
    which are free after the step.
    """
    memory = dict(recompute="block")  # so that the peak is in the backward pass and not in the head
    model, without = (
        tiny_model(sample=dict(every=1), memory=memory)[0],
        tiny_model(memory=memory)[0],
    )
    assert bytes_by_kind(model.plan)["decoding"] > 16_384
    assert model.plan.total - without.plan.total < 4096


def test_logits_equal_a_product_on_the_host_and_stay_in_small_chunks():
    """All positions of a sequence of 40 tokens, in chunks of 16 rows;
    then the last position alone.
    """
    model = decoder(train=dict(seq_len=40), model=dict(block_size=40, vocab_size=300))
    ids = np.random.default_rng(0).integers(0, 300, (1, 40), dtype=np.int32)
    want = full_logits(model, ids)[None]
    got = model.logits(ids, 0, 40)
    assert got.shape == (1, 40, 300) and got.dtype == np.float32
    # fp32 sums of 64 products
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert np.array_equal(model.logits(ids, 39, 40), got[:, 39:])  # also in a chunk of one row
    assert model.plan.buffers["logits"].shape == (16, 384) and "p" not in model.plan.buffers


# ---- text ----


def test_stream_text_ends_pieces_between_characters():
    tokenizer, text = ByteTokenizer(), "a–é\N{GRINNING FACE}z"
    got = list(sample.stream_text(tokenizer, tokenizer.encode(text).tolist()))
    assert got == ["a", "–", "é", "\N{GRINNING FACE}", "z", ""]
    cut = tokenizer.encode(text).tolist()[:-2]
    # half a character at the end
    assert "".join(sample.stream_text(tokenizer, cut)) == tokenizer.decode(cut)
    noise = np.random.default_rng(0).integers(0, 256, 300).tolist()
    assert "".join(sample.stream_text(tokenizer, noise)) == tokenizer.decode(noise)


@pytest.fixture(scope="module")
def step_dir(tmp_path_factory) -> Path:
    model = decoder()
    state = checkpoints.state(1, config=model.config.to_dict())
    return save_checkpoint(
        tmp_path_factory.mktemp("run"), 1, {"params": model.state.params.cpu()}, state, Retention(1)
    )


@pytest.mark.parametrize("prompts", [["Hello"], ["Hello", "World"]])
def test_a_batch_prints_its_first_text_while_it_is_decoded(prompts, step_dir, monkeypatch):
    """Each piece is written before the steps beyond those in flight are launched."""
    written, launched = [], []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "write", lambda s: written.append((len(launched), s)))
    launch = Model.decode
    monkeypatch.setattr(
        Model, "decode", lambda self, *how: (launched.append(1), launch(self, *how))
    )
    sample_command.sample(str(step_dir), prompt=prompts, tokens=12, temperature=0, seed=3)
    pieces = [(at, s) for at, s in written if s]
    assert (
        pieces[0] == (0, "Hello")
        and pieces[1][0] <= generate.STEPS_IN_FLIGHT + 3
        and pieces[-1][1] == "\n"
    )
    assert len(pieces) > 4


@pytest.mark.slow
def test_texts_of_several_batches_equal_single_texts_in_order(step_dir, capsys):
    """5 texts, 2 at once: text i is that of seed + i alone, with a line of dashes
    between; the rate is on stderr.
    """
    sample_command.sample(str(step_dir), tokens=3, seed=3, num=5, batch=2)  # without a prompt
    out, err = capsys.readouterr()
    assert err.startswith("15 tokens in ")
    single = []
    for seed in range(3, 8):
        sample_command.sample(str(step_dir), prompt=[""], tokens=3, seed=seed)
        single.append(capsys.readouterr().out)
    assert out == "---\n".join(single)


@pytest.mark.parametrize("num", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_texts_stop_at_every_end_of_text(num, tmp_path, monkeypatch):
    """The tokens that end them are two that they draw; no step runs long
    after the last text has ended.
    """
    seeds, model = range(7, 7 + num), decoder(num)
    plain = generated(model, 6, PLAIN, seeds)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [plain[0][4], plain[-1][3]]})
    )
    ends = sample.ends_of_text(ByteTokenizer(), tmp_path)
    assert ends == {ByteTokenizer.eot, plain[0][4], plain[-1][3]}
    lengths = [next((i for i, token in enumerate(text) if token in ends), 6) for text in plain]
    launched, launch = [], Model.decode
    monkeypatch.setattr(
        Model, "decode", lambda self, *how: (launched.append(1), launch(self, *how))
    )
    texts = [[*text] for text in sample.draw(model, [PROMPT] * num, 6, PLAIN, seeds, ends)]
    assert texts == [text[:length] for text, length in zip(plain, lengths)]
    assert lengths[0] <= 4 and lengths[-1] <= 3
    assert len(launched) <= max(lengths) + generate.STEPS_IN_FLIGHT
    if num == 1:
        streamed = sample.stream(model, ByteTokenizer(), "Hello", 6, PLAIN, 7, tmp_path)
        assert "".join(streamed) == ByteTokenizer().decode(texts[0])


def test_special_tokens_in_a_prompt_are_counted_or_ordinary_text(step_dir, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(
        sample, "draw", lambda model, prompts, *_: seen.append(bytes(*prompts)) or [[]]
    )
    for words, said in (("", "special tokens in the prompts: 1\n"), ("--no-special", "")):
        prompt = "--prompt 'a<|endoftext|>b<|eot_id|>'"
        assert run_tool(f"sample {step_dir} {prompt} {words}") == 0
        assert capsys.readouterr().err.startswith(said + "0 tokens in ")
    assert seen == [b"a\0b<|eot_id|>", b"a<|endoftext|>b<|eot_id|>"]


@pytest.mark.parametrize(
    ("length", "note"), [(16, ""), (17, "note: prompts over 16 .* 8: {} texts, up to 17 tokens\n")]
)
def test_a_prompt_that_is_cut_is_named_once(capsys, length, note):
    prompts = [[97], [97] * length, [97, 98]]
    for some, cut in ((prompts, "1 of 3"), (prompts[1:2] * 2, "2 of 2")):
        assert len(list(sample.draw(decoder(2), some, 1, PLAIN, range(7, 10), {0}))) == len(some)
        assert re.fullmatch(note.format(cut), capsys.readouterr().err)


def test_texts_of_several_prompts_are_decoded_at_once(step_dir, monkeypatch):
    """As many as --batch says, in memory for two of them; 5 texts then take 3 batches."""
    steps = []
    launch = Model.decode
    monkeypatch.setattr(
        Model, "decode", lambda self, *how: (steps.append(self), launch(self, *how))
    )
    prompts = ["a", "bc", "d", "e", "f"]
    for batch, texts, runs in ((64, 5, 1), (3, 3, 2)):
        steps.clear()
        sample_command.sample(str(step_dir), prompt=prompts, tokens=2, batch=batch)
        assert len(steps[0].decoding.seq) == texts
        assert len(steps) == 2 * runs
    memory = load._plan_bytes(steps[0].config, 1, 2)
    monkeypatch.setattr(load, "free_bytes", lambda _: memory)
    steps.clear()
    sample_command.sample(str(step_dir), prompt=prompts, tokens=2)
    assert len(steps[0].decoding.seq) == 2
    assert len(steps) == 2 * 3


@pytest.mark.slow
def test_several_prompts_are_continued_one_after_the_other(step_dir, tmp_path, capsys, monkeypatch):
    """Those of the command line come first, then a line of the file each; a
    text is the same as alone.
    """
    (tmp_path / "prompts.txt").write_text("\ufeffSecond\r\n\nThird\n")
    monkeypatch.setattr(sys, "stdin", open(tmp_path / "prompts.txt"))
    for num, file in (("1", str(tmp_path / "prompts.txt")), ("2", "-")):
        words = f"--prompt First --prompt_file {file} --tokens 3 --num {num}"
        assert run_tool(f"sample {step_dir} {words}") == 0
        together, alone = capsys.readouterr().out, []
        for prompt in ("First", "Second", "Third"):
            sample_command.sample(str(step_dir), prompt=[prompt], tokens=3, num=int(num))
            alone.append(capsys.readouterr().out)
        assert together == "---\n".join(alone)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, " cannot be read: No such file or directory; correct the path"),
        (b"a\ncaf\xe9", ", line 2: not UTF-8: byte 0xe9; `iconv -f ENCODING -t utf-8 "),
    ],
)
def test_prompts_that_cannot_be_read_say_how_to_convert_them(tmp_path, content, wrong):
    file = tmp_path / "prompts.txt"
    if content:
        file.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{file}{wrong}")):
        sample_command.sample("no checkpoint", prompt_file=file)


@pytest.mark.parametrize(("num", "terminal"), [(1, False), (1, True), (2, True)])
def test_control_characters_are_escaped_on_a_terminal_only(
    step_dir, capsys, monkeypatch, num, terminal
):
    """A file gets the text as it is."""
    prompt = "\x1b[2J\x9b\a"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    sample_command.sample(str(step_dir), prompt=[prompt], tokens=1, seed=3, num=num)
    out = capsys.readouterr().out
    assert out.count(sample_command.printable(prompt) if terminal else prompt) == num
    assert terminal == (sample_command.printable(out) == out)
