"""RunState: its keys in state.json, the best validation loss, and counts of skipped steps."""

import json
import math

import pytest

from gpt2_triton.config.config import Config
from gpt2_triton.errors import NonFiniteError
from gpt2_triton.model.step import StepResult
from gpt2_triton.training.run_state import MAX_REWINDS, RunState

SAVED = (
    '{"format": 2, "step": 4, "sample": 32, "best": '
    '[4, 1.5], "waited": 0, "skipped": 1, "outliers": 1, '
    '"skipped_in_a_row": 0, "without_update": 0, "rewinds": '
    '3, "rewound_to": 2, "config": {}, "data": []}'
)


def test_run_state_gives_the_text_of_the_state_json_it_was_read_from():
    saved = json.loads(SAVED)
    state = RunState.from_checkpoint(saved)
    assert (state.step, state.sample, state.best_step, state.outliers) == (4, 32, 4, 1)
    assert json.dumps({"format": 2} | state.as_dict() | {"config": {}, "data": []}) == SAVED


def test_run_state_of_a_checkpoint_of_an_earlier_version():
    saved = json.loads(SAVED)
    del saved["best"], saved["rewound_to"]
    state = RunState.from_checkpoint(saved)
    assert state.best_step is None and state.rewound_to == 0


def test_best_before_one_that_was_not_saved_is_the_best_again():
    state = RunState(best=(4, 3.0))
    for step, loss in ((5, 2.0), (6, 1.0)):
        state.record_validation(step, loss)
    for failed, best in ((5, (6, 1.0)), (6, (4, 3.0))):
        state.forget_best_of(failed)
        assert state.best == best
    state.record_validation(7, 2.5)
    state.forget_best_of(4)
    state.forget_best_of(7)
    assert state.best is None


def test_record_validation_keeps_the_first_of_the_lowest_finite_losses():
    state = RunState()
    for step, loss, best in (
        (0, 1.0, None),
        (4, math.nan, None),
        (5, 2.0, 5),
        (6, 2.0, 5),
        (7, math.nan, 5),
    ):
        state.record_validation(step, loss)
        assert state.best_step == best
        impatient = state.is_out_of_patience(Config().replace(train=dict(patience=1)))
        assert impatient == (step > 5)
    state.step = 90  # patience counts validations, at whatever eval.every they were
    assert [
        n for n in (1, 2, 3) if state.is_out_of_patience(Config().replace(train=dict(patience=n)))
    ] == [1, 2]


def test_run_state_counts_both_kinds_of_skipped_steps():
    state = RunState()
    for loss, applied in (
        (2.0, True),
        (9.0, False),
        (math.nan, False),
        (math.nan, False),
        (9.0, False),
        (2.0, True),
    ):
        state.count(StepResult(loss, 1.0, applied, 0.1, (0.0, 0.0)))
        seen = [state.skipped, state.outliers, state.skipped_in_a_row, state.without_update]
        if loss == 9.0:
            assert seen in ([1, 1, 0, 1], [4, 2, 0, 4])
    assert seen == [4, 2, 0, 0]


LIMITED = Config.model_validate(
    dict(train=dict(rewind_after=2, skip_limit=2), checkpoint=dict(every=4))
)


def test_rewind_after_so_many_steps_without_update():
    """At step 12 the last two had no update: the target is 8, the last
    multiple of 4 up to step 10.
    """
    state = RunState(step=12, without_update=1, skipped_in_a_row=1)
    assert not state.is_rewind_due(LIMITED)
    state.without_update = state.skipped_in_a_row = 2
    assert state.is_rewind_due(LIMITED) and state.rewind_target(LIMITED, [4, 8, 10, 12]) == 8
    assert state.rewind_target(LIMITED, [6, 7, 12]) == 7 and state.rewind_target(LIMITED, [12]) == 0
    state.raise_if_unstable(LIMITED, 8, str)  # a rewind comes first
    state.rewinds, state.rewound_to = MAX_REWINDS, 4
    state.raise_if_unstable(LIMITED, 8, str)  # those to step 4 do not count
    state.rewound_to = 8
    with pytest.raises(NonFiniteError, match=f"step 12: .* after {MAX_REWINDS} rewinds to step 8"):
        state.raise_if_unstable(LIMITED, 8, str)
    for step, loss in ((10, 2.0), (11, 1.0), (12, 3.0)):
        state.record_validation(step, loss)
    state.rewind_to(8, (4, 1.0))
    assert (state.best, state.waited) == ((4, 1.0), 0)
    assert (state.step, state.without_update, state.skipped_in_a_row, state.rewinds) == (
        8,
        0,
        0,
        MAX_REWINDS + 1,
    )
    state.forget_best_of(4)
    assert state.best is None  # that of step 10 is undone
    state.rewind_to(12, None)
    assert (state.rewinds, state.rewound_to) == (1, 12)


def test_raise_if_unstable_without_a_checkpoint_to_rewind_to():
    with pytest.raises(
        NonFiniteError,
        match=(
            "step 3: .* in a row, with no checkpoint .*; in the last step, "
            "those there; the last update was step 1"
        ),
    ):
        RunState(step=3, without_update=2, skipped_in_a_row=2).raise_if_unstable(
            LIMITED, 0, lambda: "those there"
        )
