"""The records of steps, read again and again: the same as read at once, but the newest steps
alone."""

import json
from pathlib import Path

from step_records import table, write_records

from minidist.observe.live.steps_follower import KEPT, StepsFollower
from minidist.observe.rank_steps import read_rank_steps, steps_file


def steps_of(found):
    return {rank: [line["step"] for line in each.steps] for rank, each in found.items()}


def test_a_follower_sees_what_a_reader_sees(tmp_path: Path) -> None:
    follower = StepsFollower(tmp_path)
    assert follower.poll() == {}
    whole = write_records(tmp_path / "whole", table(3, 30))
    for rank in range(3):
        steps_file(tmp_path, rank).parent.mkdir(exist_ok=True)
        data = steps_file(whole, rank).read_bytes()
        for at in range(0, len(data), 700 + 100 * rank):  # lines come torn
            with open(steps_file(tmp_path, rank), "ab") as file:
                file.write(data[at : at + 700 + 100 * rank])
            follower.poll()
    assert follower.poll() == read_rank_steps(tmp_path) == read_rank_steps(whole)


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    write_records(tmp_path, table(2, KEPT + 60))
    follower = StepsFollower(tmp_path)
    newest = list(range(60, KEPT + 60))
    assert steps_of(follower.poll()) == {0: newest, 1: newest}
    with open(steps_file(tmp_path, 0), "a") as file:
        file.write('{"step":300,"seconds":1}\nno line\n')
    assert steps_of(follower.poll()) == {0: [*newest[1:], 300], 1: newest}


def test_a_later_run_in_the_folder_begins_anew(tmp_path: Path) -> None:
    write_records(tmp_path, table(2, 40))
    follower = StepsFollower(tmp_path)
    follower.poll()
    write_records(tmp_path, table(2, 40), ends_at=1e9)
    again = follower.poll()
    assert steps_of(again) == {0: list(range(40)), 1: list(range(40))} and again == read_rank_steps(
        tmp_path
    )
    write_records(tmp_path, table(2, 3), ends_at=2e9)
    assert steps_of(follower.poll()) == {0: [0, 1, 2], 1: [0, 1, 2]}


def test_steps_that_are_made_again_replace_those_after_them_too(tmp_path: Path) -> None:
    """A run that goes on from its checkpoint of step 10 has not made steps 12 to 29 again yet."""
    write_records(tmp_path, table(2, 30))
    follower = StepsFollower(tmp_path)
    follower.poll()
    for rank in range(2):
        about = json.loads(steps_file(tmp_path, rank).read_text().splitlines()[0])
        with open(steps_file(tmp_path, rank), "a") as file:
            file.write(
                json.dumps(about | {"time": 200.0})
                + '\n{"step":10,"seconds":1}\n{"step":11,"seconds":1}\n'
            )
    assert follower.poll() == read_rank_steps(tmp_path) and steps_of(follower.poll())[1] == list(
        range(12)
    )
    assert follower.poll()[0].since == 200.0
