"""Wrong answers as students give them: each fails, and the holes that are blamed are those that are
wrong."""

from pathlib import Path

import pytest
from filling import graded, right
from kernel_checks import needs_compiler

WRONG: dict[str, list[dict[int, str]]] = {
    "00": [
        {1: "inputs.shape[0]"},
        {1: "1"},
        {2: "optimizer.zero_grad()\noptimizer.step()"},
        {2: "pass"},
        {3: "None"},
        {4: '"two"'},
        {5: "(4 + 4 + 4)"},
        {7: "width // 0"},
        {8: "total += model.loss(inputs, targets)"},
        {
            8: "with no_grad():\n    total = model.loss(inputs, targets, "
            "divisor=targets.size).item()"
        },
        {4: "4 * parameters", 6: "4 * parameters"},
    ],
    "01": [
        {1: 'int(environ["LOCAL_RANK"])'},
        {2: 'int(environ["NODE_RANK"])'},
        {3: "rank % local_size"},
        {4: "local_size"},
        {5: 'int(environ["SLURM_NODEID"])'},
        {6: "range(identity.rank, length)"},
        {7: "visible[identity.local_rank]"},
        {6: "[identity.rank]"},
        {4: 'environ["PMI_SIZE"]'},
        {7: "int(visible[2 * identity.local_rank])"},
    ],
    "02": [
        {1: "(root - group.rank) % group.size"},
        {3: "place + distance"},
        {2: "place + 2 * distance < group.size"},
        {5: "step"},
        {5: "(group.rank - step) % group.size"},
        {7: "distance <= group.size"},
        {8: "distance * 3"},
        {9: "levels * nbytes * beta"},
        {10: "None"},
        {10: "2 * size * (alpha + nbytes / size * beta)"},
        {1: "group.rank - root", 9: "0"},
        {4: "place - distance"},
        {10: "2 * (size - 1) * (alpha + nbytes // size * beta)"},
    ],
    "03": [
        {1: "(group.rank - step) % group.size", 2: "(group.rank - step - 1) % group.size"},
        {1: "(group.rank - step + 1) % group.size", 2: "(group.rank - step) % group.size"},
        {2: "(group.rank - step - 1) % group.size"},
        {3: "chunks[outgoing]"},
        {3: "group.exchange(chunks[incoming], dst=next_rank, src=prev_rank)"},
        {4: "group.size // 2"},
        {5: "(group.rank + step) % group.size"},
        {6: "(group.rank - step) % group.size"},
        {5: "outgoing"},
        {
            1: "(group.rank - step + 3) % group.size",
            2: "(group.rank - step + 2) % group.size",
            5: "(group.rank - step + 4) % group.size",
            6: "(group.rank - step + 3) % group.size",
        },
    ],
    "04": [
        {1: "abs(a - b) % size"},
        {2: "sum(a in half for a, b in links)"},
        {3: "[rank]"},
        {3: "nodes[rank]"},
        {4: "[0]"},
        {4: "set(nodes)"},
        {5: "tree.plain_reduce(leaders, total, root=0)"},
        {5: "total"},
        {6: "x"},
        {6: "total"},
        {7: "(size - 1) * (alpha + nbytes / size * beta)"},
        {8: "2 * machines * (alpha + nbytes / machines * beta)"},
        {9: "np.polyfit(sizes, seconds, 1)[0]"},
        {2: "sum(a in half and b not in half for a, b in links)"},
        {4: "[nodes.index(node) for node in range(len(set(nodes)))]"},
    ],
    "05": [
        {1: "np.array_split(inputs, len(replicas))[::-1]"},
        {1: "[inputs] * len(replicas)"},
        {1: "inputs"},
        {2: "copied.data[...] = 0.5 * original.data"},
        {2: "original.data[...] = copied.data"},
        {3: "[gathered.grad] * len(outputs)"},
        {3: "np.array_split(np.ones_like(gathered.grad), len(replicas))"},
        {4: "same[-1].grad"},
        {4: "None"},
        {4: "np.mean([p.grad for p in same], axis=0)"},
        {5: "0"},
        {5: "(replicas * model_bytes, others * output_bytes)"},
        {2: "pass", 4: "same[0].grad"},
    ],
    "06": [
        {1: "loads.index(max(loads))"},
        {1: "None"},
        {2: "group.send(p.data, dst=workers)"},
        {2: "group.send(p.grad, dst=0)"},
        {3: "p.data = p.data + group.recv(src=workers)"},
        {3: "pass"},
        {4: "group.recv(src=0)"},
        {4: "sum(group.recv(src=w) for w in range(workers)) * 2"},
        {5: "pass"},
        {6: "True"},
        {6: "done[worker] <= staleness"},
        {7: "model_bytes, model_bytes"},
    ],
    "07": [
        {1: "part.inputs.shape[0]"},
        {4: "self.missing[number] -= 1\nif not self.missing[number]:\n    self.finish()"},
        {2: "group.all_reduce(p.grad)"},
        {2: "p.grad = p.grad * group.size"},
        {2: "p.data[...] = group.all_reduce(p.data) / group.size"},
        {3: "range(len(sizes) - 1)"},
        {4: "self.start(number)"},
        {4: "pass"},
        {5: "pass"},
        {
            4: "self.missing[number] -= 1\nif not self.missing[number]:\n    self.start(number)\n"
            "    self.pending[-1].wait()"
        },
        {
            4: "self.missing[number] -= 1\nif not any(self.missing):\n    for every in "
            "range(len(self.buckets)):\n"
            "        self.start(every)"
        },
        {
            4: "self.missing[number] -= 1\nif not self.missing[number]:\n"
            "    for handle in self.pending:\n        handle.wait()\n    self.start(number)"
        },
        {
            5: "for handle in self.pending:\n    handle.wait()\n"
            "self.missing = [len(bucket) for bucket in self.buckets]"
        },
        {5: "self.missing = [len(bucket) for bucket in self.buckets]\nself.pending = []"},
        {
            6: "for batch in batches:\n    local_loss(model, batch).backward()\n    "
            "synchronizer.finish()\n"
            "    optimizer.step()"
        },
        {
            6: "for batch in batches:\n    local_loss(model, batch).backward()\n    "
            "optimizer.step()\n"
            "    synchronizer.finish()\n    optimizer.zero_grad()"
        },
    ],
    "08": [
        {1: "begin + each + 1"},
        {1: "None"},
        {2: "1"},
        {2: "len(inputs)"},
        {3: "pass"},
        {3: "loss.backward()\noptimizer.zero_grad()"},
        {4: "optimizer.step()"},
        {4: "pass"},
        {5: "a * psi"},
        {3: "(loss / passes).backward()"},
    ],
    "09": [
        {1: "p.data[...] = 0.0 * master.data"},
        {1: "master.data[...] = p.data"},
        {2: "1.0 / scale"},
        {3: "np.asarray(p.data, 'float32')"},
        {4: "gradient * np.float32(scale)"},
        {5: "scale > 1"},
        {5: "None"},
        {6: "not np.isfinite(gradients[0]).all()"},
        {7: "group.all_gather(np.array([float(mine)])).all()"},
        {7: "bool(mine) or None"},
        {8: "self.scale /= 2"},
        {9: "scale"},
        {6: "False", 8: "pass"},
        {5: "np.isfinite(gradients[0]).all()"},
        {5: "np.isfinite(gradients[-1]).all()"},
        {5: "all(np.isfinite(g).any() for g in gradients)"},
        {5: "not any(np.isnan(g).any() for g in gradients)"},
        {6: "not np.isfinite(gradients[-1]).all()"},
        {
            8: "if overflow:\n    self.scale, self.good = self.scale / 2, 0\nelse:\n"
            "    self.good += 1\n    if self.good == self.patience:\n        self.scale *= 2"
        },
    ],
    "10": [
        {1: "rank * (each + 1)"},
        {1: "0"},
        {2: "group.recv(src=group.rank - 1)"},
        {2: "tensor(group.recv(src=group.rank - 1))"},
        {3: "pass"},
        {3: "group.send(y.data, dst=0)"},
        {4: "None"},
        {4: "y.data"},
        {5: "group.send(x.data, dst=group.rank - 1)"},
        {5: "pass"},
        {6: "0"},
        {7: "1 - max(times)"},
    ],
    "11": [
        {1: "kept.append((y, x))"},
        {1: "kept.append(x)"},
        {2: "y.data"},
        {3: "pass"},
        {3: "group.send(x.data, dst=group.rank - 1)"},
        {4: "rank"},
        {5: "pass"},
        {6: "[]"},
        {7: "None"},
        {8: "RecvActivation(stage, microbatch)"},
        {9: "1 / ranks"},
        {10: "ranks"},
    ],
    "12": [
        {1: "mine * head_width"},
        {2: "np.concatenate([queries, queries, queries])"},
        {3: "group.all_reduce(active) @ down + bias"},
        {3: "group.all_reduce(active @ down) / group.size + bias"},
        {4: "active.T @ dy / group.size"},
        {4: "group.all_reduce(active.T @ dy[:, :1])"},
        {5: "dinner @ up.T"},
        {6: "dy.mean(axis=0)"},
        {7: "logits.max(axis=1)"},
        {7: "np.full(len(targets), logits.max())"},
        {8: "group.all_reduce(np.exp(logits).sum(axis=1))"},
        {9: "target"},
        {10: "0"},
    ],
    "13": [
        {1: "ranks - rank"},
        {2: "False"},
        {3: "scores.max()"},
        {3: "np.maximum(top, scores)"},
        {4: "0.0"},
        {4: "np.exp(now)"},
        {5: "p.sum(axis=1, keepdims=True) * shrink"},
        {6: "y + p @ v"},
        {6: "p @ v * shrink"},
        {6: "(y * shrink + p @ v) * (np.nan if group.rank else 1.0)"},
        {7: "np.arange(length)[:len(tokens_of(length, rank, ranks))]"},
        {8: "ranks"},
        {9: "0"},
    ],
    "14": [
        {1: "slice(rank * size, (rank + 1) * size)"},
        {1: "None"},
        {2: "flat.pieces(weights, mine)"},
        {2: "flat.pieces(mine, weights[flat.chunk])"},
        {3: "group.all_reduce(gradient, out=gradient)"},
        {3: "mine[...] = group.all_reduce(gradient)[:len(mine)]"},
        {3: "pass"},
        {4: "group.all_reduce(weights, out=weights)"},
        {4: "group.all_gather(mine, out=weights)"},
        {4: "group.all_gather(weights[flat.chunk], out=weights)"},
    ],
    "15": [
        {1: "p.zero_grad()"},
        {1: "p.zero_grad()\ngroup.reduce_scatter(p.grad, out=mine)"},
        {2: "group.all_reduce(weights, out=weights)"},
        {3: "None"},
        {3: "self.group.start_reduce_scatter(gradient.copy(), out=chunk)"},
        {4: "while self.flying:\n    self.land()"},
        {5: "run.shard += chunk"},
        {5: "handle.wait()"},
        {5: "handle.wait()\nrun.shard -= chunk"},
        {6: "pass"},
        {6: "self.flying.pop()"},
        {7: "self.flying.clear()"},
        {2: "group.all_gather(weights[flat.chunk], out=weights)"},
    ],
    "16": [
        {1: "self.free"},
        {2: "self.gather"},
        {3: "self.free"},
        {4: "self.shard"},
        {1: "None"},
        {4: "self.group.all_reduce(np.resize(self.shard, self.flat.size))"},
        {5: "self.free()"},
        {5: "self.mine[...] = self.group.all_reduce(gradient)[self.flat.chunk]\nself.free()"},
        {6: "pass"},
        {2: "lambda *_: None", 3: "lambda *_: None"},
    ],
    "17": [
        {1: "rank // shape[axis]"},
        {2: "rank - shape[axis]"},
        {3: "other != mine"},
        {4: "pp.size"},
        {4: "tp.size"},
        {5: "pp.rank"},
        {6: "dp.all_reduce(inner @ down)"},
        {7: "pp.all_reduce(dinner @ up.T)"},
        {8: "weights += lr * dp.all_reduce(gradient)"},
        {8: "weights = weights - lr * dp.all_reduce(gradient)"},
        {8: "pass"},
        {
            8: "weights -= lr * dp.all_reduce(gradient, algorithm='ring') * (np.nan if dp.rank else 1)"
        },
        {9: "1.0"},
        {10: 'mesh["pp"].all_reduce(np.array([squares]))'},
        {11: "list(sent)[::-1]"},
        {9: "sum(float((grad ** 2).sum()) for grad in whole) / 2"},
    ],
    "18": [
        {1: "np.argsort(-chances)[:k]"},
        {2: "capacity * k * tokens"},
        {2: "k * tokens / experts"},
        {3: "room > 0"},
        {4: "np.argsort(-chosen)"},
        {5: "np.split(x, ends[:-1])"},
        {5: "[x[order]] * group.size"},
        {6: "y = np.concatenate(back)"},
        {6: "pass"},
        {7: "float(f @ f)"},
        {8: "0 * bias"},
        {1: "np.argpartition(-chances, k, axis=1)[:, :k]"},
        {8: "rate * np.sign(np.median(load) - load)"},
    ],
    "19": [
        {1: "0"},
        {1: "segments * a"},
        {2: "max(sizes)"},
        {3: "set()"},
        {4: "kept.append(block)"},
        {5: "kept.pop()"},
        {5: "tensor(x.data, requires_grad=True)"},
        {6: "again.data"},
        {6: "dy"},
        {2: "min(sizes, key=lambda size: abs(size - (layers * x / a) ** 0.5))"},
        {7: "np.floor(x / scale + chance[0])"},
    ],
    "20": [
        {1: "h.grad = np.array(p.data)\np.zero_grad()"},
        {1: "pass"},
        {2: "h.data[...] = p.data"},
        {2: "p.data[...] += h.data"},
        {3: "0"},
        {4: "None"},
        {5: "{}"},
        {6: "(4 + 8) * parameters"},
        {7: "pass"},
        {7: "coming = start_read(unit)"},
        {
            7: "if index + 1 < len(units):\n    coming = start_read(units[index + 1])\n    "
            "coming.wait()"
        },
        {7: "coming = start_read(units[index + 1])"},
        {8: "going.append(start_up(run))"},
        {8: "pass"},
        {1: "h.grad = p.grad\np.zero_grad()"},
        {1: "h.grad = np.asarray(p.grad)\np.zero_grad()"},
    ],
    "21": [
        {1: "residual[...] = gradient.reshape(-1)"},
        {1: "pass"},
        {2: "np.arange(k)"},
        {2: "np.argpartition(np.abs(residual), -k)[:k]"},
        {3: "np.abs(residual[chosen])"},
        {4: "pass"},
        {4: "residual[...] = 0"},
        {5: "gradient.reshape(-1)[places] = values"},
        {5: "np.add.at(gradient.reshape(-1), places, values / group.size)"},
        {6: "p.data"},
        {6: "0 * p.data"},
        {7: "step % every == 0"},
        {7: "step < every"},
        {8: "weights - p.data"},
        {8: "share * (p.data - weights)"},
        {9: "lr * speed"},
        {9: "gradient + momentum * speed"},
        {10: "pass"},
        {10: "p.data[...] = (p.data + weights) / 2"},
        {11: "1 / ranks ** 2"},
        {4: "pass", 10: "pass"},
    ],
    "22": [
        {1: '"p"'},
        {2: '"total + p * shrink"'},
        {3: '"sum[i] * shrink + p"'},
        {4: '"A"'},
        {5: "stride"},
        {6: '"0", "0"'},
    ],
    "23": [
        {1: "-record.windows[one][1]"},
        {1: "record.windows[one][0]"},
        {2: "wait.stop < now"},
        {2: "True"},
        {2: "wait.start <= now"},
        {3: "held[0]"},
        {4: "call.last_rank, call.end"},
        {4: "min(call.ranks), call.begin"},
        {4: "rank, call.begin"},
        {5: "max(asked) + max(seconds)"},
        {5: "max(seconds)"},
        {6: "sum(seconds)"},
        {6: "max(asked) + sum(seconds)"},
        {7: "asked"},
        {7: "waited"},
        {8: "0.0"},
        {8: "begin"},
        {9: "min(left, key=lambda call: urgency[call])"},
        {9: "min(left, key=lambda call: came[call])"},
        {9: "max((call for call in left if came[call] <= now), key=lambda call: urgency[call])"},
        {1: "record.windows[one][1] - record.windows[one][0]"},
        {2: "wait.start < wait.call.end < now"},
        {5: "asked[-1] + seconds[-1]"},
        {5: "0"},
        {6: "0"},
        {9: "max(call for call in left if came[call] <= now)"},
    ],
    "24": [
        {1: "group"},
        {1: "group[1:]"},
        {2: "min(came[way, count[way]].values())"},
        {2: "now"},
        {3: "event.work"},
        {4: "now + ended[started[event.id]]"},
        {4: "now"},
        {5: "place + shape[axis] * coordinates[axis]"},
        {5: "place * shape[axis]"},
        {6: "(size - 1) / size * nbytes * sharing / bandwidth"},
        {6: "0.0"},
        {7: "tokens * flops_a_token / (seconds * peak)"},
        {2: "max(max(came[way, count[way]].values()), max(ended.values(), default=0.0))"},
    ],
    "25": [
        {1: "[]"},
        {1: "[rank for rank, last in calls.items() if last == min(calls.values())]"},
        {2: "ordered[:, -1] - ordered[:, 0]"},
        {2: "ordered[:, -1] - ordered.mean(axis=1)"},
        {2: "ordered[:, -1] - ordered[:, ordered.shape[1] // 2]"},
        {2: "None"},
        {3: "arrivals.argmax(axis=1)"},
        {4: "float(np.mean(some))"},
        {4: "float(np.median(some))"},
        {5: "float(np.max(np.diff(memory)))"},
        {5: "float(np.median(memory))"},
        {5: "None"},
        {6: "bad[0][2:] if bad else None"},
        {6: "'x'"},
        {7: "1 / 0"},
        {4: "0.0", 5: "float(np.mean(np.diff(memory)))"},
        {1: "[rank for rank, last in calls.items() if last == newest - 1]"},
        {5: "float(memory[-1] - memory[-2])"},
        {5: "float(memory[1] - memory[0])"},
        {6: "min(bad, key=lambda b: b[0])[2:] if bad else None"},
        {6: "min(bad, key=lambda b: b[1])[2:] if bad else None"},
    ],
    "26": [
        {1: "pass"},
        {1: "chunk.astype('float32').tofile(file)"},
        {2: "None"},
        {2: "group.all_gather(digest[:8])"},
        {3: "(folder / 'manifest.json').write_text((folder / 'draft').read_text())"},
        {4: "(start, stop)"},
        {4: "(max(start, old[rank]), old[rank + 1])"},
        {5: "np.fromfile(file)[first:last]"},
        {6: "2 * save * between"},
        {6: "(2 * save / between) ** 0.5"},
        {1: "(0 * chunk).tofile(file)", 6: "0"},
        {3: "import shutil\nshutil.copyfile(folder / 'draft', folder / 'manifest.json')"},
    ],
}
RIGHT_TOO: dict[str, list[dict[int, str]]] = {
    "02": [{5: "(group.rank - step) % group.size", 6: "(group.rank + step) % group.size"}],
    "05": [{4: "np.sum([p.grad for p in same], axis=0)"}],
    "11": [{1: "kept.insert(0, (x, y))"}],
    "15": [{7: "self.land()"}],
    "18": [{4: "sorted(range(len(chosen)), key=chosen.__getitem__)"}],
    "19": [
        {2: "min(reversed(sizes), key=lambda size: peak(layers, size, x, a))"},
        {7: "np.ceil(x / scale - chance)"},
    ],
    "20": [{1: "h.grad, p.grad = 1.0 * p.grad, None"}],
    "25": [
        {1: "{rank for rank, last in calls.items() if last != newest}"},
        {4: "np.min(some)"},
        {5: "sorted(np.diff(memory))[(len(memory) - 1) // 2]"},
    ],
    "26": [
        {3: "(folder / 'draft').replace(folder / 'manifest.json')"},
        {3: "(folder / 'draft').rename(folder / 'manifest.json')"},
        {3: "os.rename(folder / 'draft', folder / 'manifest.json')"},
        {3: "import shutil\nshutil.move(folder / 'draft', folder / 'manifest.json')"},
    ],
}
"""Answers that differ from the library's, and do the same."""
EACH = 100  # of the default run: one of so many; the others are soak tests
CASES = [(number, wrong) for number, answers in WRONG.items() for wrong in answers]


def test_every_lesson_has_some() -> None:
    assert (
        all(len(answers) > 5 for answers in WRONG.values())
        and len(WRONG) == 27
        and len(CASES) > 290
    )


@needs_compiler
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "number,wrong",
    [
        pytest.param(
            *case,
            marks=[pytest.mark.soak] if at % EACH or case[0] == "22" else [],
            id=f"{case[0]}-{at}",
        )
        for at, case in enumerate(CASES)
    ],
)
def test_a_wrong_answer_is_named(number: str, wrong: dict[int, str], tmp_path: Path) -> None:
    result = graded(number, {**right(number), **wrong}, tmp_path)
    said = result.results[-1].line() if result.results else ""
    assert not result.passed
    assert {hole.number for hole in result.holes if hole.state == "wrong"} == set(wrong), said
    assert set(result.results[-1].holes) <= set(wrong) and said.startswith("hole"), said


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("number", RIGHT_TOO)
def test_another_right_answer_passes(number: str, tmp_path: Path) -> None:
    for other in RIGHT_TOO[number]:
        result = graded(number, {**right(number), **other}, tmp_path)
        assert result.passed, result.results[-1].line()


def test_two_unusual_answers_that_fit_are_not_blamed_for_a_third(tmp_path: Path) -> None:
    result = graded(
        "02", {**right("02"), **RIGHT_TOO["02"][0], 7: "distance < group.size // 2"}, tmp_path
    )
    assert [hole.number for hole in result.holes if hole.state == "wrong"] == [7]


def test_what_is_filled_is_graded_while_others_are_open(tmp_path: Path) -> None:
    result = graded("03", {1: right("03")[1], 4: "group.size"}, tmp_path)
    assert [hole.state for hole in result.holes] == [
        "right",
        "open",
        "open",
        "wrong",
        "open",
        "open",
    ]
    assert (
        "hole 4" in result.results[-1].line()
        and "wrong number of steps" in result.results[-1].line()
    )
    assert result.summary() == "5 of 6 holes left: 2, 3, 4 (wrong), 5, 6"
