"""Folders of torch.distributed.checkpoint that others wrote, read by what their names mean."""

import pytest
import torch
from models import assert_same
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import zeroshard
from zeroshard.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Named(nn.Module):
    """Modules and a buffer with names that checkpoints use themselves."""

    def __init__(self):
        super().__init__()
        self.state = nn.Linear(3, 4)
        self.optimizer = nn.Linear(4, 2)
        self.register_buffer("step", torch.tensor([5.0]))

    def forward(self, x):
        return self.optimizer(self.state(x))


def trained(model, kind=torch.optim.AdamW, steps=2, **options):
    torch.manual_seed(0)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def states(model, optimizer, **options):
    names = ("model", "optimizer")
    found = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return dict(zip(names, found, strict=True))


def loaded(path, make=Named):
    model = make()
    optimizer = zeroshard.AdamW(model, lr=0.5)
    values = zeroshard.load_checkpoint(path, model, optimizer)
    return model, optimizer, values


def check(path, model, optimizer, make=Named):
    """The folder goes on as the model and optimizer that it is of."""
    found, ours, values = loaded(path, make)
    assert_same(found.state_dict(), model.state_dict(), "weights")
    for mine, other in zip(found.parameters(), model.parameters(), strict=True):
        entry = optimizer.state[other]
        assert torch.equal(ours.state[mine]["exp_avg"], entry["exp_avg"])
        assert ours.state[mine]["step"] == entry["step"] == 2
    assert ours.param_groups[0]["lr"] == 0.1
    return values


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("top", [False, True])
def test_names_that_checkpoints_use_too_are_names(flat, top, tmp_path):
    model, optimizer = trained(Named())
    said = states(model, optimizer, flatten_optimizer_state_dict=flat)
    content = {**said["model"], "optimizer": said["optimizer"]} if top else said
    save(content, checkpoint_id=tmp_path)
    check(tmp_path, model, optimizer)


def test_state_may_lie_at_the_top(tmp_path):
    model, optimizer = trained(Named())
    said = states(model, optimizer)
    save({"model": said["model"], **said["optimizer"]}, checkpoint_id=tmp_path)
    check(tmp_path, model, optimizer)


def sequential():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_modules_with_numbers_for_names_are_not_taken_for_param_groups(tmp_path):
    model, optimizer = trained(sequential())
    said = states(model, optimizer, flatten_optimizer_state_dict=True)
    save(said, checkpoint_id=tmp_path)
    check(tmp_path, model, optimizer, sequential)


def test_averages_beside_the_model_are_not_taken_for_it(tmp_path):
    model, optimizer = trained(Named())
    averages = {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}
    save({**states(model, optimizer), "ema": averages}, checkpoint_id=tmp_path)
    values = check(tmp_path, model, optimizer)
    assert_same(values["ema"], averages, "averages")


def test_two_models_of_equal_right_are_refused(tmp_path):
    model, optimizer = trained(Named())
    said = states(model, optimizer)
    content = {"a_net": said["model"], "best": said["model"], "optimizer": said["optimizer"]}
    save(content, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"under each of 'a_net\.', 'best\.'"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.RMSprop, {})]
)
def test_state_of_another_optimizer_is_refused(kind, options, tmp_path):
    save(states(*trained(Named(), kind, **options)), checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match="not AdamW's"):
        loaded(tmp_path)


def test_adam_with_decay_in_its_gradients_is_refused(tmp_path):
    save(states(*trained(Named(), torch.optim.Adam, weight_decay=0.1)), checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match="adds weight decay to gradients"):
        loaded(tmp_path)


def test_radam_is_refused(tmp_path):
    save(states(*trained(Named(), torch.optim.RAdam)), checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match="not AdamW's"):
        loaded(tmp_path)


def test_state_that_lacks_a_moment_is_refused(tmp_path):
    """As Lion's."""
    said = states(*trained(Named()))
    for entry in said["optimizer"]["state"].values():
        del entry["exp_avg_sq"]
    save(said, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match="has no exp_avg_sq, which AdamW's has"):
        loaded(tmp_path)


def test_steps_that_are_counted_in_the_param_group_are_taken(tmp_path):
    """As apex's FusedAdam does."""
    model, optimizer = trained(Named())
    said = states(model, optimizer)
    for name, entry in said["optimizer"]["state"].items():
        said["optimizer"]["state"][name] = {k: v for k, v in entry.items() if k != "step"}
    said["optimizer"]["param_groups"][0]["step"] = 2
    save(said, checkpoint_id=tmp_path)
    check(tmp_path, model, optimizer)
    assert "step" not in loaded(tmp_path)[1].param_groups[0]


def test_what_came_from_adam_without_decay_can_be_saved_and_loaded_with_decay(tmp_path):
    save(states(*trained(Named(), torch.optim.Adam)), checkpoint_id=tmp_path / "adam")
    model, optimizer, _ = loaded(tmp_path / "adam")
    optimizer.param_groups[0]["weight_decay"] = 0.1
    zeroshard.save_checkpoint(tmp_path / "ours", model, optimizer)
    zeroshard.load_checkpoint(tmp_path / "ours", model, optimizer)


def test_a_folder_with_a_name_of_ours_is_what_is_in_it(tmp_path):
    model, optimizer = trained(Named())
    path = tmp_path / "step-000000000300"
    save(states(model, optimizer), checkpoint_id=path)
    check(path, model, optimizer)


def test_a_first_save_that_was_killed_does_not_hide_the_folder_that_training_began_from(tmp_path):
    model, optimizer = trained(Named())
    save(states(model, optimizer), checkpoint_id=tmp_path)
    (tmp_path / ".step-000000000010.unfinished").mkdir()
    check(tmp_path, model, optimizer)


def test_a_value_that_cannot_be_read_is_left_out_and_said(tmp_path, caplog):
    import numpy

    model, optimizer = trained(Named())
    content = {**states(model, optimizer), "loader": numpy.arange(3), "note": {"a": 1}}
    save(content, checkpoint_id=tmp_path)
    assert check(tmp_path, model, optimizer) == {"note": {"a": 1}}
    assert "loader is left out" in caplog.text
    assert "would have to be read as code" in caplog.text


def test_weights_alone_are_refused_with_the_remedy(tmp_path):
    save({"model": Named().state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match="holds no optimizer state: load the weights with"):
        loaded(tmp_path)
