"""The stages as tables: what each of them does, and what tells them apart."""

import pathlib
import subprocess
import sys

import pytest

from zeroshard.config import STAGES, Options
from zeroshard.schedule import Action, Event, compile_schedule, describe

DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_bucket_is_reduced_once_and_gathered_once(stage):
    table = compile_schedule(Options(stage=stage)).table
    actions = [action for row in table.values() for action in row]
    assert actions.count(Action.REDUCE) == 1
    assert actions.count(Action.GATHER) == 1
    assert actions.count(Action.UPDATE) == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_everything_is_waited_for_before_backward_and_step_return(stage):
    schedule = compile_schedule(Options(stage=stage))
    assert Action.WAIT in schedule.actions(Event.BACKWARD_END)
    assert schedule.actions(Event.STEP)[-1] is Action.WAIT


def test_only_stage_2_lets_go_during_backward():
    first, second = (compile_schedule(Options(stage=stage)) for stage in (1, 2))
    assert Action.DRAIN not in first.actions(Event.GRAD_READY)
    assert Action.DRAIN in second.actions(Event.GRAD_READY)
    assert Action.RELEASE not in first.actions(Event.BACKWARD_END)
    assert second.actions(Event.BACKWARD_END)[-1] is Action.RELEASE


def test_every_event_has_a_row():
    for stage in (1, 2, 3):
        assert set(compile_schedule(Options(stage=stage)).table) == set(Event)


def test_stage_3_is_stage_2_with_units():
    second, third = (compile_schedule(Options(stage=stage)) for stage in (2, 3))
    assert second.spares_buffers
    assert third.spares_buffers
    assert third.shards_parameters
    assert not second.shards_parameters
    of_units = {Action.UNSHARD, Action.PREFETCH, Action.IDLE, Action.RESHARD, Action.RESHARD_ALL}
    assert third.actions(Event.GRAD_READY)[-1] is Action.REDUCE
    assert third.actions(Event.ZERO_GRAD) == (Action.FREE_GRADIENTS,)
    assert third.actions(Event.UNIT_DONE) == (Action.LAUNCH,)
    for event in set(Event).difference({Event.GRAD_READY, Event.ZERO_GRAD, Event.UNIT_DONE}):
        assert not of_units.intersection(second.actions(event))
        others = [action for action in third.actions(event) if action not in of_units]
        assert others == list(second.actions(event)), event


def test_a_unit_is_whole_before_it_is_used_and_freed_when_nothing_follows():
    schedule = compile_schedule(Options(stage=3))
    for event in (Event.PRE_FORWARD, Event.PRE_BACKWARD):
        assert schedule.actions(event) == (Action.UNSHARD, Action.PREFETCH)
    for event in (Event.EVALUATED, Event.BACKWARD_END, Event.STEP):
        assert schedule.actions(event)[0] is Action.RESHARD_ALL


def test_no_reshard_after_forward_drops_one_action():
    given, kept = (
        compile_schedule(Options(stage=3, reshard_after_forward=choice)) for choice in (True, False)
    )
    different = [event for event in Event if given.actions(event) != kept.actions(event)]
    assert different == [Event.POST_FORWARD]
    assert given.actions(Event.POST_FORWARD) == (Action.IDLE,)
    assert kept.actions(Event.POST_FORWARD) == ()


def test_the_table_prints():
    printed = subprocess.run(
        [sys.executable, "-m", "zeroshard.schedule"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert describe(Options(stage=1)) in printed
    assert "GRAD_READY(bucket)     reduce, drain" in printed


def test_the_documented_tables_are_the_printed_ones():
    pages = "".join((DOCS / name).read_text() for name in ("stages.md", "stage3.md"))
    for stage in STAGES:
        assert describe(Options(stage=stage)) in pages
