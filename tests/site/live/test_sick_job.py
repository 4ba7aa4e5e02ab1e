"""The numbers of the live figure `sick_job`, computed another way."""

from live_figures import figure

from minidist.site.live import (
    sick_job,
)


def test_the_rules_of_the_sick_jobs_name_what_was_planted() -> None:
    rules = ("hang", "slow rank", "slow link", "leak", "not finite")
    live = figure("sick_job", "en")
    for number, kind in enumerate(sick_job.JOBS, start=1):
        for turn in (1, 2):
            job = sick_job.job_of(number, turn)
            planted = [job.culprit] if kind == "leak" else job.culprit
            assert sick_job.answers(number, turn) == tuple(
                planted if rule == kind else None for rule in rules
            )
            for record, rule in enumerate(rules):
                shapes = live.picture(number - 1, record, 1, turn - 1).shapes
                marked = [shape for shape in shapes if shape[0] == "r" and shape[5] == "wrong"]
                assert bool(marked) == (rule == kind), (kind, rule)
                hidden = live.picture(number - 1, record, 0, turn - 1)
                assert not any(shape[5:6] == ["wrong"] for shape in hidden.shapes)
                assert len(hidden.facts) == 1 and kind not in hidden.command
