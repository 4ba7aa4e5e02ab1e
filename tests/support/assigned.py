"""Right answers to the assignments, for any student: what the library does not have."""

from minidist.lessons.assignments import pipeline, planning, ring


def right_ring(drawn: ring.DrawnRing) -> dict[int, str]:
    """The code of each hole of assignment 1, as bodies of its functions."""
    size = drawn.size
    travel = drawn.circle if drawn.forward else drawn.circle[::-1]
    # the owner of a chunk stands at this place of the way; chunks are told by their owners' places
    owner_of = [drawn.owned.index(chunk) for chunk in range(size)]
    operation = {"sum": "np.add", "maximum": "np.maximum", "minimum": "np.minimum"}
    bounds = [sum(drawn.shares[:chunk]) for chunk in range(1, size)]
    chunk_at = [drawn.owned[rank] for rank in travel]
    assert [travel.index(owner) for owner in owner_of] == [
        chunk_at.index(chunk) for chunk in range(size)
    ]
    return {
        1: f"{travel}[({travel}.index(rank) + 1) % {size}]",
        2: f"{chunk_at}[({travel}.index(rank) - step - 1) % {size}]",
        3: f"{chunk_at}[({travel}.index(rank) - step) % {size}]",
        4: f"np.split(x, [b * (len(x) // {sum(drawn.shares)}) for b in {bounds}])",
        5: f"""
            chunks = [chunk.copy() for chunk in cut(x)]
            dst = next_of(group.rank)
            src = [rank for rank in range({size}) if next_of(rank) == group.rank][0]
            for step in range({size - 1}):
                arrives = sends(src, step)
                came = group.exchange(chunks[sends(group.rank, step)], dst=dst, src=src)
                chunks[arrives] = {operation[drawn.reduction]}(chunks[arrives], came)
            for step in range({size - 1}):
                arrives = passes_on(src, step)
                chunks[arrives] = group.exchange(
                    chunks[passes_on(group.rank, step)], dst=dst, src=src
                )
            return np.concatenate(chunks)
            """,
        6: f"8 * (2 * n - ({drawn.shares}[{drawn.owned}[rank]]"
        f" + {drawn.shares}[{drawn.owned}[next_of(rank)]]) * n // {sum(drawn.shares)})",
    }


def right_pipeline(drawn: pipeline.DrawnPipeline) -> dict[int, str]:
    """The code of each hole of assignment 2."""
    ranks = drawn.ranks
    if drawn.twist == "little memory":
        own = f"{ranks - 1} - rank if rank < {drawn.place} else min({ranks - 1} - rank, "
        ahead = f"min({own}{drawn.limit - 1}), microbatches)"
    elif drawn.twist == "more ahead":
        ahead = f"min({ranks - 1 + drawn.more} - rank, microbatches)"
    else:
        ahead = f"min(2 * ({ranks - 1} - rank), microbatches)"
    width = 2 if drawn.twist == "in pairs" else 1
    return {
        1: ahead,
        2: f"""
            work = [Forward(rank, number) for number in range(ahead(rank, microbatches))]
            forwards = len(work)
            for turn in range(0, microbatches, {width}):
                for _ in range({width}):
                    if forwards < microbatches:
                        work.append(Forward(rank, forwards))
                        forwards += 1
                work += [Backward(rank, turn + number) for number in range({width})]
            return work
            """,
        3: f"""
            held = most = 0
            for one in order(rank, microbatches):
                held += 1 if type(one) is Forward else -1
                most = max(most, held)
            return most * {drawn.kept}[rank]
            """,
        4: f"""
            ended = {{}}
            free = [0] * {ranks}
            queues = [order(rank, microbatches) for rank in range({ranks})]
            while any(queues):
                for rank, queue in enumerate(queues):
                    while queue:
                        one = queue[0]
                        forward = type(one) is Forward
                        before = type(one)(rank - 1 if forward else rank + 1, one.microbatch)
                        needs = 0 <= before.stage < {ranks}
                        if needs and before not in ended:
                            break
                        begin = max(free[rank], ended[before] if needs else 0)
                        took = {drawn.forward}[rank] if forward else {drawn.backward}[rank]
                        free[rank] = ended[one] = begin + took
                        queue.pop(0)
            return max(free)
            """,
        5: f"1 - microbatches * {sum(drawn.forward) + sum(drawn.backward)}"
        f" / ({ranks} * seconds(microbatches))",
    }


def right_planning(task: planning.PlanningTask) -> dict[int, str]:
    """The code of each hole of assignment 3; the plan is the planner's."""
    width = 128 * task.heads
    layer = f"(12 * {width} ** 2 + 13 * {width})"
    table = f"{task.vocabulary} * {width}"
    row = task.plans.candidates.rows(*planning.CHOSEN)[task.best].tolist()
    plan = dict(zip(planning.CHOSEN, row, strict=True))
    return {
        1: repr(plan),
        2: f"{task.layers} * {layer} + 2 * {table}",
        3: f"({task.layers} / pp * {layer} + (1 + (pp == 1)) * {table}) / tp"
        " * (4 + 12 / (dp if zero else 1))",
        4: repr(float(task.plans.step_seconds[task.best])),
    }


RIGHT = {1: right_ring, 2: right_pipeline, 3: right_planning}
"""{assignment: the code of its holes for what is drawn}."""
